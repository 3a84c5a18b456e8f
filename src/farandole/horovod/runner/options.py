"""The options of ``horovodrun``: how each is written, and what becomes of it here.

One table (:data:`OPTIONS`) holds for every option its flags, its place in a configuration file,
the environment variable by which workers learn of it, and, where it can have no effect with
Farandole, why. Command line, configuration file, environment and messages are read off it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_NO_MPI = "Farandole has no MPI in it; to start ranks by mpirun, write `mpirun ... python ...`"
_NO_BAYES = "the search has a number of samples of its own and no model of the noise"
_OWN_ALGORITHM = "the engine chooses its algorithm by itself"

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


def _plain(value: Any) -> str:
    return str(value)


def _flag(value: Any) -> str:
    return "1" if value else "0"


def _opposite(value: Any) -> str:
    return "0" if value else "1"


def _mebibytes(value: Any) -> str:
    return str(value * 1024 * 1024)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. Its value is ``None`` until it is given."""

    name: str
    """The attribute of the parsed arguments."""
    on: tuple[str, ...] = ()
    """Flags that give a value, or that mean True if there is no ``kind``."""
    off: tuple[str, ...] = ()
    """Flags that mean False."""
    kind: Callable[[str], Any] | None = None
    """What reads the value; ``None``: the option is a switch."""
    section: str = "run"
    """Where it stands in ``--help``, and in a configuration file if it has a ``key``."""
    key: str = ""
    variable: str = ""
    """The environment variable of the workers."""
    text: Callable[[Any], str] = _plain
    """From the value to the variable's text."""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] | None = None
    count: int | None = None
    """How many values the flag takes, if not one."""
    why_not: str = ""
    """Why it has no effect here; empty: it has."""
    help: str = ""


def _number(name: str, flag: str, section: str, key: str, variable: str, **more: Any) -> Option:
    return Option(
        name=name, on=(flag,), section=section, key=key, variable=variable,
        **{"kind": int, "least": 0, **more},
    )  # fmt: skip


def _switch(name: str, section: str, key: str, variable: str, **more: Any) -> Option:
    flag = name.replace("_", "-")
    return Option(
        name=name, on=(f"--{flag}",), off=(f"--no-{flag}",), section=section, key=key,
        variable=variable, **{"text": _flag, **more},
    )  # fmt: skip


OPTIONS: tuple[Option, ...] = (
    Option(name="num_proc", on=("-np", "--num-proc"), kind=int, least=1, help="number of ranks"),
    Option(name="disable_cache", on=("--disable-cache",), why_not="no check is remembered"),
    Option(
        name="start_timeout", on=("--start-timeout",), kind=int, least=1,
        help="seconds that the first rank in init() waits for the others [default: 120]",
    ),
    Option(
        name="output_filename", on=("--output-filename",), kind=str,
        help="folder for one file a rank, rank-N.log, with what it prints",
    ),
    Option(name="verbose", on=("--verbose",), help="tell how the ranks were started"),
    Option(
        name="ssh_port", on=("-p", "--ssh-port"), kind=int, least=1, section="hosts",
        help="port of the ssh servers",
    ),
    Option(
        name="ssh_identity_file", on=("-i", "--ssh-identity-file"), kind=str, section="hosts",
        help="file with the private key for ssh",
    ),
    _number(
        "fusion_threshold_mb", "--fusion-threshold-mb", "params", "fusion_threshold_mb",
        "HOROVOD_FUSION_THRESHOLD", text=_mebibytes,
        help="size of the buckets of gradients, MiB [default: 25]",
    ),
    _number(
        "cycle_time_ms", "--cycle-time-ms", "params", "cycle_time_ms", "HOROVOD_CYCLE_TIME",
        kind=float, why_not="nothing waits for a cycle",
    ),
    _number(
        "cache_capacity", "--cache-capacity", "params", "cache_capacity",
        "HOROVOD_CACHE_CAPACITY", why_not="what is known of tensors takes no setting",
    ),
    _switch(
        "hierarchical_allreduce", "params", "hierarchical_allreduce",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        help="reduce in stages inside and across hosts: always or never [default: if it pays]",
    ),
    _switch(
        "hierarchical_allgather", "params", "hierarchical_allgather",
        "HOROVOD_HIERARCHICAL_ALLGATHER", help="the same for gathering and broadcasting",
    ),
    _switch(
        "torus_allreduce", "params", "torus_allreduce", "HOROVOD_TORUS_ALLREDUCE",
        why_not=_OWN_ALGORITHM,
    ),
    _switch(
        "autotune", "autotune", "enabled", "HOROVOD_AUTOTUNE",
        help="begin training with trials of other sizes of buckets",
    ),
    Option(
        name="autotune_log_file", on=("--autotune-log-file",), kind=str, section="autotune",
        key="log_file", variable="HOROVOD_AUTOTUNE_LOG",
        help="file for what was tried and chosen; a choice in it is used again",
    ),
    _number(
        "autotune_warmup_samples", "--autotune-warmup-samples", "autotune", "warmup_samples",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        help="samples that are thrown away before the first trial [default: 3]",
    ),
    _number(
        "autotune_steps_per_sample", "--autotune-steps-per-sample", "autotune",
        "steps_per_sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", least=1,
        help="steps of a sample [default: 5]",
    ),
    _number(
        "autotune_bayes_opt_max_samples", "--autotune-bayes-opt-max-samples", "autotune",
        "bayes_opt_max_samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", why_not=_NO_BAYES,
    ),
    _number(
        "autotune_gaussian_process_noise", "--autotune-gaussian-process-noise", "autotune",
        "gaussian_process_noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", kind=float, most=1,
        why_not=_NO_BAYES,
    ),
    Option(
        name="min_num_proc", on=("--min-np", "--min-num-proc"), kind=int, least=1,
        section="elastic", help="go on with as few ranks as this [default: -np]",
    ),
    Option(
        name="max_num_proc", on=("--max-np", "--max-num-proc"), kind=int, least=1,
        section="elastic", help="up to so many ranks [default: as many as there are slots]",
    ),
    Option(
        name="slots", on=("--slots-per-host",), kind=int, least=1, section="elastic",
        help="ranks of a host that the discovery script names without a number",
    ),
    Option(
        name="elastic_timeout", on=("--elastic-timeout",), kind=int, least=0, section="elastic",
        help="seconds to wait for --min-np ranks [default: 600]",
    ),
    Option(
        name="reset_limit", on=("--reset-limit",), kind=int, least=0, section="elastic",
        help="how often the ranks may change [default: any number of times]",
    ),
    Option(
        name="cooldown_range", on=("--blacklist-cooldown-range",), kind=int, count=2,
        section="elastic", help="seconds that a host is avoided after a loss, shortest and longest",
    ),
    Option(
        name="on_loss", on=("--on-loss",), kind=str, section="elastic", choices=("rank", "host"),
        help="what goes when a rank is lost, which Horovod does not have [default: host]",
    ),
    Option(
        name="timeline_filename", on=("--timeline-filename",), kind=str, section="timeline",
        key="filename", variable="HOROVOD_TIMELINE", help="file for the timeline of all ranks",
    ),
    _switch(
        "timeline_mark_cycles", "timeline", "mark_cycles", "HOROVOD_TIMELINE_MARK_CYCLES",
        help="mark the rounds of agreement in it",
    ),
    Option(
        name="no_stall_check", on=("--no-stall-check",), off=("--stall-check",),
        section="stall_check", variable="HOROVOD_STALL_CHECK_DISABLE", text=_flag,
        help="wait for a missing rank for ever, and say nothing",
    ),
    _number(
        "stall_check_warning_time_seconds", "--stall-check-warning-time-seconds", "stall_check",
        "warning_time_seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS",
        help="seconds until a warning names the rank that others wait for [default: 60]",
    ),
    _number(
        "stall_check_shutdown_time_seconds", "--stall-check-shutdown-time-seconds",
        "stall_check", "shutdown_time_seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        help="seconds until that ends the job, 0: never [default: 1800]",
    ),
    _switch(
        "mpi_threads_disable", "library_options", "mpi_threads_disable",
        "HOROVOD_MPI_THREADS_DISABLE", why_not=_NO_MPI,
    ),
    Option(
        name="mpi_args", on=("--mpi-args",), kind=str, section="library_options", why_not=_NO_MPI
    ),
    Option(
        name="tcp_flag", on=("--tcp",), section="library_options", variable="NCCL_IB_DISABLE",
        text=_flag, help="keep NCCL off InfiniBand",
    ),
    Option(
        name="binding_args", on=("--binding-args",), kind=str, section="library_options",
        why_not=_NO_MPI,
    ),
    _number(
        "num_nccl_streams", "--num-nccl-streams", "library_options", "num_nccl_streams",
        "HOROVOD_NUM_NCCL_STREAMS", why_not="each channel has its own stream",
    ),
    _number(
        "thread_affinity", "--thread-affinity", "library_options", "thread_affinity",
        "HOROVOD_THREAD_AFFINITY", why_not="no thread of ours is busy",
    ),
    _number(
        "gloo_timeout_seconds", "--gloo-timeout-seconds", "library_options",
        "gloo_timeout_seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS",
        why_not="--stall-check-shutdown-time-seconds is what bounds every wait",
    ),
    Option(
        name="log_level", on=("--log-level",), kind=str, section="logging", key="level",
        variable="HOROVOD_LOG_LEVEL", choices=LOG_LEVELS,
        help=f"least serious messages shown: {', '.join(LOG_LEVELS)} [default: WARNING]",
    ),
    Option(
        name="log_with_timestamp", on=("--log-with-timestamp", "--no-log-hide-timestamp"),
        off=("--log-without-timestamp", "--log-hide-timestamp"), section="logging",
        key="with_timestamp", variable="HOROVOD_LOG_HIDE_TIME", text=_opposite,
        why_not="log lines have no time; a script's own logging set-up can give it to them",
    ),
    Option(
        name="prefix_output_with_timestamp",
        on=("-prefix-timestamp", "--prefix-output-with-timestamp"), section="logging",
        why_not="lines are shown with their rank only",
    ),
    Option(
        name="hosts", on=("-H", "--hosts"), kind=str, section="hosts",
        help="hosts and their slots, as in node1:4,node2:4 [default: this one]",
    ),
    Option(
        name="hostfile", on=("-hostfile", "--hostfile"), kind=str, section="hosts",
        help="file with one host a line, as in `node1 slots=4`",
    ),
    Option(
        name="host_discovery_script", on=("--host-discovery-script",), kind=str, section="hosts",
        help="program that prints the hosts of now, one a line, as in node1:4",
    ),
    Option(name="use_gloo", on=("--gloo",), section="controller", help="what is used anyway"),
    Option(name="use_mpi", on=("--mpi",), section="controller", why_not=_NO_MPI),
    Option(name="use_jsrun", on=("--jsrun",), section="controller", why_not=_NO_MPI),
)  # fmt: skip

VARIABLES = {option.variable: option for option in OPTIONS if option.variable}


class Arguments(Namespace):
    """Parsed arguments, or arguments to be filled in: one rank, and nothing else given."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{option.name: None for option in OPTIONS})
        self.num_proc: int | None = 1
        self.check_build: bool | None = None
        self.config_file: str | None = None
        self.nics: set[str] | None = None
        self.command: list[str] | None = None
        self.run_func: Callable[[], Any] | None = None
        self.executable: str | None = None
        self.discovery_interval: float | None = None
        for name, value in given.items():
            setattr(self, name, value)


def environment_of(arguments: Namespace) -> Iterator[tuple[str, str]]:
    """The variables by which workers learn what was asked for."""
    for option in OPTIONS:
        value = getattr(arguments, option.name)
        if not option.variable or value is None or _is_pointless(option, arguments):
            continue
        yield option.variable, option.text(value)


def _is_pointless(option: Option, arguments: Namespace) -> bool:
    """Whether an option says more about something that was not asked for."""
    switch = {"autotune": "autotune", "timeline": "timeline_filename"}.get(option.section)
    return switch is not None and not getattr(arguments, switch)


def without_effect(arguments: Namespace, environ: Mapping[str, str]) -> list[str]:
    """One line for each reason why something that was asked for has no effect."""
    by_reason: dict[str, list[str]] = {}
    for option in OPTIONS:
        if not option.why_not:
            continue
        if getattr(arguments, option.name):
            by_reason.setdefault(option.why_not, []).append(option.on[0])
        elif environ.get(option.variable, "0") not in ("", "0"):
            by_reason.setdefault(option.why_not, []).append(option.variable)
    return [
        f"{', '.join(what)} {'has' if len(what) == 1 else 'have'} no effect: {reason}."
        for reason, what in by_reason.items()
    ]
