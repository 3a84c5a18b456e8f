"""What can be set, and the one place that reads the environment.

Each field of :class:`Settings` carries its own row of ``docs/settings.md``: the variables it is
read from, in order of precedence, its unit, and the meaning of its special values.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.core import faults, log
from farandole.core.address import Address
from farandole.core.errors import UsageError
from farandole.core.secret import Secret

MIB = 1024 * 1024


@dataclass(frozen=True)
class Kind:
    """What values a knob takes: how its text is read, and which of them are accepted."""

    accepted: str
    parse: Callable[[str], Any]
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class Knob:
    """One row of the table of settings."""

    name: str
    variables: tuple[str, ...]
    """In order of precedence: ours, then Horovod's."""
    kind: Kind
    unit: str
    default: Any
    meaning: str
    readers: Mapping[str, Callable[[str], Any]]
    """For variables whose text says it in another way; ``None`` from one means: not said."""


def environment() -> dict[str, str]:
    """A snapshot of this process's environment variables."""
    return dict(os.environ)


def cache_folder() -> Path | None:
    """Where this user's programs keep what they can find out again; ``None`` if there is none."""
    variables = environment()
    given = variables.get("XDG_CACHE_HOME", "")
    if given.startswith("/"):
        return Path(given) / "farandole"
    home = variables.get("HOME", "")
    return Path(home) / ".cache" / "farandole" if home.startswith("/") else None


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _zero_if_set(text: str) -> float | None:
    return 0.0 if _flag(text) else None


def _unless_dynamic(text: str) -> str | None:
    return None if text.strip() == "DYNAMIC" else text


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_address(value: object) -> bool:
    return isinstance(value, str) and _is_understood(Address.parse, value)


def _is_understood(parse: Callable[[str], Any], text: str) -> bool:
    try:
        parse(text)
    except UsageError:
        return False
    return True


def _one_of(*words: str) -> Kind:
    return Kind(
        "one of " + ", ".join(words), lambda text: text.strip().lower(), lambda v: v in words
    )


_BYTES = Kind(
    "a whole number of bytes, at least 0",
    int,
    lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
)
_COUNT = Kind("a whole number, at least 0", int, _BYTES.accepts)
_POSITIVE = Kind("a whole number, at least 1", int, lambda v: _BYTES.accepts(v) and v >= 1)
_COUNT_OR_NONE = Kind(_COUNT.accepted, int, lambda v: v is None or _COUNT.accepts(v))
_SECONDS = Kind("a number of seconds, at least 0", float, lambda v: _is_real(v) and v >= 0)
_SOME_SECONDS = Kind("a number of seconds above 0", float, lambda v: _is_real(v) and v > 0)
_INTERFACE = Kind(
    "the name of a network interface, as in `ip link`",
    str.strip,
    lambda v: v is None or (isinstance(v, str) and bool(v) and not any(c.isspace() for c in v)),
)
_FILE = Kind("the path of a file", str, lambda v: v is None or (isinstance(v, str) and bool(v)))
_FAULTS = Kind(
    "faults such as kill:rank=1@step=30",
    str.strip,
    lambda v: v is None or (isinstance(v, str) and _is_understood(faults.parse, v)),
)
_FLAG = Kind("0 or 1", _flag, lambda v: isinstance(v, bool))
_FLAG_OR_NONE = Kind("0 or 1", _flag, lambda v: v is None or isinstance(v, bool))
_ADDRESS = Kind("host:port", str.strip, lambda v: v is None or _is_address(v))
_SECRET = Kind(
    "at least 32 hexadecimal digits",
    lambda text: Secret.from_hex(text.strip()),
    lambda v: v is None or isinstance(v, Secret),
)


def _knob(
    default: Any,
    kind: Kind,
    *variables: str,
    unit: str = "",
    readers: Mapping[str, Callable[[str], Any]] | None = None,
    meaning: str,
) -> Any:
    row = {
        "kind": kind,
        "variables": variables,
        "unit": unit,
        "readers": readers or {},
        "meaning": meaning,
    }
    return dataclasses.field(default=default, metadata=row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Every knob of a process, fixed at ``init()``. See ``docs/settings.md``.

    A value that is not accepted raises ``UsageError``, which names the knob or the variable.

    Example::

        Settings(bucket_bytes=8 * 1024 * 1024)
        Settings.from_environment({"HOROVOD_FUSION_THRESHOLD": "8388608"})   # the same
    """

    engine: str = _knob(
        "auto",
        _one_of("auto", "torch", "shm", "hierarchical", "threads"),
        "FARANDOLE_ENGINE",
        meaning="What moves the tensors; see [Engines](engines.md). `auto`: shared memory for CPU "
        "tensors of ranks that share a host, in stages inside and across hosts where that pays, "
        "else `torch` (NCCL for CUDA tensors, Gloo for CPU tensors).",
    )
    hierarchical_allreduce: bool | None = _knob(
        None,
        _FLAG_OR_NONE,
        "FARANDOLE_HIERARCHICAL_ALLREDUCE",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        meaning="Whether what ranks on several hosts reduce goes in stages inside and across the "
        "hosts: always or never. Not set: where a short measurement says that it pays.",
    )
    hierarchical_allgather: bool | None = _knob(
        None,
        _FLAG_OR_NONE,
        "FARANDOLE_HIERARCHICAL_ALLGATHER",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        meaning="The same for what they gather or broadcast.",
    )
    bucket_bytes: int = _knob(
        25 * MIB,
        _BYTES,
        "FARANDOLE_BUCKET_BYTES",
        "HOROVOD_FUSION_THRESHOLD",
        unit="bytes",
        meaning="Gradients travel together in buckets of about this size. 0: each parameter alone.",
    )
    first_bucket_bytes: int = _knob(
        1 * MIB,
        _BYTES,
        "FARANDOLE_FIRST_BUCKET_BYTES",
        unit="bytes",
        meaning="Size of the bucket that leaves first: a small one starts the communication early.",
    )
    autotune: bool = _knob(
        False,
        _FLAG,
        "FARANDOLE_AUTOTUNE",
        "HOROVOD_AUTOTUNE",
        meaning="Whether training begins with trials of other sizes of buckets; see "
        "[Autotuning](tuning.md).",
    )
    autotune_log: str | None = _knob(
        None,
        _FILE,
        "FARANDOLE_AUTOTUNE_LOG",
        "HOROVOD_AUTOTUNE_LOG",
        meaning="Where rank 0 writes what was tried and chosen. A choice for the same job that "
        "stands there already is used instead of trials.",
    )
    autotune_warmup_samples: int = _knob(
        3,
        _COUNT,
        "FARANDOLE_AUTOTUNE_WARMUP_SAMPLES",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        unit="samples",
        meaning="How many samples are taken, and thrown away, before the first trial.",
    )
    autotune_steps_per_sample: int = _knob(
        5,
        _POSITIVE,
        "FARANDOLE_AUTOTUNE_STEPS_PER_SAMPLE",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        unit="steps",
        meaning="How many steps a trial has, beside the one that brings its setting into force.",
    )
    autotune_compression: str = _knob(
        "none",
        _one_of("none", "fp16", "bf16"),
        "FARANDOLE_AUTOTUNE_COMPRESSION",
        meaning="How gradients of an optimizer without `compression` may travel if that is faster. "
        "`none`: only as they are.",
    )
    start_timeout: float = _knob(
        120.0,
        _SOME_SECONDS,
        "FARANDOLE_START_TIMEOUT",
        "HOROVOD_START_TIMEOUT",
        unit="seconds",
        meaning="How long all ranks together may take from start to the end of `init()`.",
    )
    stall_warning: float = _knob(
        60.0,
        _SECONDS,
        "FARANDOLE_STALL_WARNING",
        "HOROVOD_STALL_CHECK_DISABLE",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        unit="seconds",
        readers={"HOROVOD_STALL_CHECK_DISABLE": _zero_if_set},
        meaning="How long ranks wait for another one before a warning names it and shows where it "
        "is. 0: no warning.",
    )
    stall_timeout: float = _knob(
        1800.0,
        _SECONDS,
        "FARANDOLE_STALL_TIMEOUT",
        "HOROVOD_STALL_CHECK_DISABLE",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        unit="seconds",
        readers={"HOROVOD_STALL_CHECK_DISABLE": _zero_if_set},
        meaning="How long ranks wait for another one before all of them raise `StallError`. "
        "0: for ever.",
    )
    block_notice: float = _knob(
        0.1,
        _SOME_SECONDS,
        "FARANDOLE_BLOCK_NOTICE",
        unit="seconds",
        meaning="A rank that is blocked for this long tells rank 0 where it is.",
    )
    deadlock_after: float = _knob(
        2.0,
        _SOME_SECONDS,
        "FARANDOLE_DEADLOCK_AFTER",
        unit="seconds",
        meaning="When all ranks wait, but for different things, and that does not change for this "
        "long, all of them raise `MismatchError`.",
    )
    join_average: str = _knob(
        "all",
        _one_of("all", "participants"),
        "FARANDOLE_JOIN_AVERAGE",
        meaning="What an average is divided by while some ranks have called `join()`: the number "
        "of `all` ranks, or of the `participants` that still take part.",
    )
    network_interface: str | None = _knob(
        None,
        _INTERFACE,
        "FARANDOLE_INTERFACE",
        "HOROVOD_GLOO_IFACE",
        meaning="The network interface for traffic between hosts. Not set: the one that routes to "
        "rank 0; loopback when all ranks share a host.",
    )
    store_address: str | None = _knob(
        None,
        _ADDRESS,
        "FARANDOLE_STORE",
        meaning="Where the job's store listens (`host:port`). Set by `farandole run`; by hand only "
        "to start ranks on several hosts without a launcher that connects them.",
    )
    secret: Secret | None = _knob(  # noqa: RUF009 (a field, whose default is None)
        None,
        _SECRET,
        "FARANDOLE_SECRET",
        meaning="The job's secret, the same for all its ranks, in hexadecimal. Set by `farandole "
        "run`. Keep it out of command lines and logs.",
    )
    chaos: str | None = _knob(
        None,
        _FAULTS,
        "FARANDOLE_CHAOS",
        meaning="Faults to suffer, to try what a job survives: `kill:rank=1@step=30`. Set by "
        "`farandole run --chaos`; see [Training that survives](elastic.md).",
    )
    worker: int | None = _knob(
        None,
        _COUNT_OR_NONE,
        "FARANDOLE_WORKER",
        meaning="The number of this process in an elastic job, whose driver says which rank it is. "
        "Set by `farandole run --min-np`.",
    )
    driver_timeout: float = _knob(
        0.0,
        _SECONDS,
        "FARANDOLE_DRIVER_TIMEOUT",
        unit="seconds",
        meaning="How long this process waits for the driver of its elastic job to come back when "
        "it is lost. 0: it cannot come back. Set where node 0 of a job on a cluster is replaced.",
    )
    timeline: str | None = _knob(
        None,
        _FILE,
        "FARANDOLE_TIMELINE",
        "HOROVOD_TIMELINE",
        readers={"HOROVOD_TIMELINE": _unless_dynamic},
        meaning="Record what every rank does from `init()` to `shutdown()` in this file, which "
        "rank 0 writes; see [Timeline](timeline.md). `HOROVOD_TIMELINE=DYNAMIC` records nothing: "
        "`start_timeline()` needs no permission.",
    )
    timeline_mark_cycles: bool = _knob(
        False,
        _FLAG,
        "FARANDOLE_TIMELINE_MARK_CYCLES",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        meaning="Whether that timeline shows when each cycle of the negotiation began.",
    )
    log_level: str = _knob(
        "warning",
        _one_of(*log.LEVELS),
        "FARANDOLE_LOG_LEVEL",
        "HOROVOD_LOG_LEVEL",
        meaning="The least serious log messages that are shown.",
    )

    def __post_init__(self) -> None:
        for knob in knobs():
            value = getattr(self, knob.name)
            if not knob.kind.accepts(value):
                raise UsageError(
                    f"Settings({knob.name}={value!r}) is not accepted: it must be "
                    f"{knob.kind.accepted}."
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment (``None``: this process's, now); what is not set has its default.

        An empty variable counts as not set. Of several variables for one knob the first in the
        table counts. ``UsageError`` names the variable, its value and what is accepted.
        """
        variables = environment() if environ is None else environ
        given: dict[str, Any] = {}
        for knob in knobs():
            for variable in knob.variables:
                text = variables.get(variable, "")
                value = _read(knob, variable, text) if text.strip() else None
                if value is not None:
                    given[knob.name] = value
                    break
        return cls(**given)


def knobs() -> tuple[Knob, ...]:
    """The table of settings, one row a field, in the order of the fields."""
    return tuple(
        Knob(name=field.name, default=field.default, **field.metadata)
        for field in dataclasses.fields(Settings)
    )


def _read(knob: Knob, variable: str, text: str) -> Any:
    reader = knob.readers.get(variable)
    accepted = knob.kind.accepted if reader is None else "0 or 1"
    try:
        value = (reader or knob.kind.parse)(text)
    except ValueError:
        value, readable = None, False
    else:
        readable = value is None or knob.kind.accepts(value)
    if not readable:
        shown = "a value (not shown)" if knob.kind is _SECRET else repr(text)
        raise UsageError(f"The environment variable {variable} is {shown}; accepted is {accepted}.")
    return value
