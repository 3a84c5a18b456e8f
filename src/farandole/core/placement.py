"""Which rank this process is, from the variables of whatever started it.

Every launcher says it in its own words. :data:`LAUNCHERS` lists them in order of precedence: our
own first, then torchrun, which a batch system or MPI may have started, then MPI, which a batch
system may have started, then the batch system. A process that none of them speaks of is alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from farandole.core.errors import UsageError

Environ = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What the place says of this process."""

    rank: int
    size: int
    local_rank: int | None
    """``None``, like ``local_size``: to be found out by comparing hosts."""
    local_size: int | None
    source: str
    """A name in :data:`LAUNCHERS`, or ``alone``."""
    job: str
    """Shared by the ranks of a job and, where the launcher tells, by no other; may be empty."""
    coordinator: str | None
    """``host`` or ``host:port`` of rank 0, where the launcher tells."""


@dataclass(frozen=True)
class Launcher:
    """How one launcher tells a process its place."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: Callable[[Environ], str]
    coordinator: Callable[[Environ], str | None] = lambda environ: None
    speaks: Callable[[Environ], bool] = lambda environ: True
    """Whether the rank and size variables mean a job at all."""


def find_placement(environ: Mapping[str, str]) -> Placement:
    """Read this process's place from ``environ``.

    ``UsageError`` names the variables when they contradict each other, are no numbers, or when
    only some of them are set and no other launcher says more.

    Example::

        find_placement({"RANK": "1", "WORLD_SIZE": "4"}).source   # "torchrun"
    """
    complaints: list[UsageError] = []
    for launcher in LAUNCHERS:
        if not launcher.speaks(environ):
            continue
        given = [name for name in (launcher.rank, launcher.size) if environ.get(name)]
        if len(given) == 2:
            return _read(launcher, environ)
        if given:
            complaints.append(_half_given(launcher, given[0]))
            if given[0].startswith("FARANDOLE_"):
                break
    if complaints:
        raise complaints[0]
    return Placement(
        rank=0, size=1, local_rank=0, local_size=1, source="alone", job="", coordinator=None
    )


def _read(launcher: Launcher, environ: Environ) -> Placement:
    rank = _number(environ, launcher.rank)
    size = _number(environ, launcher.size)
    _require_below(launcher.rank, rank, launcher.size, size)
    local_rank: int | None = None
    local_size: int | None = None
    if environ.get(launcher.local_rank):
        local_rank = _number(environ, launcher.local_rank)
        local_size = _local_size(launcher, environ)
    if local_rank is None or local_size is None:
        local_rank = local_size = None
    else:
        _require_below(launcher.local_rank, local_rank, launcher.local_size, local_size)
        _require_at_most(launcher.local_size, local_size, launcher.size, size)
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        source=launcher.source,
        job=launcher.job(environ),
        coordinator=launcher.coordinator(environ),
    )


def _local_size(launcher: Launcher, environ: Environ) -> int | None:
    text = environ.get(launcher.local_size)
    if not text:
        return None
    if launcher.source == "slurm":
        return slurm_tasks_on_node(text, _number(environ, "SLURM_NODEID"))
    return _number(environ, launcher.local_size)


def slurm_tasks_on_node(counts: str, node: int) -> int | None:
    """Tasks on the ``node``-th node, from a list like ``4(x2),3``; ``None`` if it does not say.

    Example::

        slurm_tasks_on_node("4(x2),3", 2)   # 3
    """
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        repeats = int(match[2] or 1)
        if node < repeats:
            return int(match[1])
        node -= repeats
    return None


def slurm_first_host(nodes: str) -> str | None:
    """The first host of a node list like ``gpu[07-09,12],login1``; ``None`` if there is none.

    Example::

        slurm_first_host("gpu[07-09,12]-ib")   # "gpu07-ib"
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes.strip())
    if first is None:
        return None
    return re.sub(r"\[([^\]]*)\]", lambda m: re.split("[-,]", m[1])[0], first[0])


def _number(environ: Environ, name: str) -> int:
    text = environ.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(
            f"The environment variable {name} is {environ.get(name)!r}; it must be a whole number, "
            "at least 0."
        )
    return int(text)


def _require_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise UsageError(
            f"The environment variables contradict each other: {name}={value} must be below "
            f"{limit_name}={limit}. Unset what an outer launcher or a script has left behind."
        )


def _require_at_most(name: str, value: int, limit_name: str, limit: int) -> None:
    if value > limit:
        raise UsageError(
            f"The environment variables contradict each other: {name}={value} is above "
            f"{limit_name}={limit}. Unset what an outer launcher or a script has left behind."
        )


def _half_given(launcher: Launcher, given: str) -> UsageError:
    missing = launcher.size if given == launcher.rank else launcher.rank
    return UsageError(
        f"The environment variable {given} is set, but {missing} is not. Set both, or neither to "
        "run as a single process."
    )


def _first_of(*names: str) -> Callable[[Environ], str]:
    return lambda environ: next((environ[name] for name in names if environ.get(name)), "")


def _joined(*names: str) -> Callable[[Environ], str]:
    return lambda environ: "/".join(environ[name] for name in names if environ.get(name))


def _torch_coordinator(environ: Environ) -> str | None:
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return (f"{bracketed}:{port}" if port else bracketed) if host else None


def _speaks_torch(environ: Environ) -> bool:
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return True
    return bool(environ.get("MASTER_ADDR") or environ.get("TORCHELASTIC_RUN_ID"))


def _speaks_slurm(environ: Environ) -> bool:
    """A batch script and an interactive shell also have a SLURM_PROCID, but are no step of many."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    return tasks.isdigit() and int(tasks) > 1


def _slurm_coordinator(environ: Environ) -> str | None:
    return slurm_first_host(environ.get("SLURM_STEP_NODELIST", ""))


def _kubernetes_job(environ: Environ) -> str:
    index, host = environ.get("JOB_COMPLETION_INDEX", ""), environ.get("HOSTNAME", "")
    return host.removesuffix(f"-{index}") if host.endswith(f"-{index}") else ""


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        source="farandole",
        rank="FARANDOLE_RANK",
        size="FARANDOLE_SIZE",
        local_rank="FARANDOLE_LOCAL_RANK",
        local_size="FARANDOLE_LOCAL_SIZE",
        job=_first_of("FARANDOLE_STORE"),
        speaks=lambda environ: bool(
            environ.get("FARANDOLE_RANK") or not environ.get("JOB_COMPLETION_INDEX")
        ),
    ),
    Launcher(
        source="torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        job=_joined(
            "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"
        ),
        coordinator=_torch_coordinator,
        speaks=_speaks_torch,
    ),
    Launcher(
        source="openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=_first_of("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
    ),
    Launcher(
        source="mpich",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        job=_first_of("PMI_JOBID", "PMI_PORT", "PMIX_NAMESPACE"),
    ),
    Launcher(
        source="slurm",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        job=_joined("SLURM_JOB_ID", "SLURM_STEP_ID"),
        coordinator=_slurm_coordinator,
        speaks=_speaks_slurm,
    ),
    Launcher(
        source="horovod",
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
        job=_joined("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    Launcher(
        source="kubernetes",
        rank="JOB_COMPLETION_INDEX",
        size="FARANDOLE_SIZE",
        local_rank="FARANDOLE_LOCAL_RANK",
        local_size="FARANDOLE_LOCAL_SIZE",
        job=_kubernetes_job,
        speaks=lambda environ: bool(environ.get("FARANDOLE_SIZE")),
    ),
)
