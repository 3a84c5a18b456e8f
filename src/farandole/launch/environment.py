"""The environment variables of workers: what all share, and what each rank has of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it is imported before anything else is
    from farandole.core.topology import Topology

NAMES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "horovod", "path")
"""The folder in which Python finds a package ``horovod`` that is Farandole's."""

PLACES = ("FARANDOLE", "HOROVOD")
"""Under whose names a worker finds its place."""

SECRET = "FARANDOLE_SECRET"
"""The job's secret: it travels where it is hidden, by ssh or in an object of the cluster."""

_OF_AN_OUTER_LAUNCHER = ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "ROLE_RANK")
_PER_RANK = frozenset(
    [f"{place}_{name}" for place in PLACES for name in
     ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
    + ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
       "FARANDOLE_STORE", SECRET, "FARANDOLE_START_TIMEOUT", "FARANDOLE_WORKER",
       "FARANDOLE_DRIVER_TIMEOUT",
       "HOROVOD_ELASTIC", "HOROVOD_HOSTNAME", *_OF_AN_OUTER_LAUNCHER]
)  # fmt: skip


def shared(
    environ: Mapping[str, str], given: Mapping[str, str], *, local_size: int, cores: int
) -> dict[str, str]:
    """The part that all workers of a host have in common.

    The launcher's own environment without what would tell a worker that it belongs to another
    job, then the user's ``given`` variables. ``OMP_NUM_THREADS`` becomes cores ÷ local ranks (at
    least 1) unless it is set; a fault in native code prints the Python stack.
    """
    variables = {name: value for name, value in environ.items() if name not in _PER_RANK}
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // local_size)))
    variables.setdefault("PYTHONFAULTHANDLER", "1")
    variables.update(given)
    return with_names(variables)


def with_names(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which ``import horovod`` finds Farandole, behind the user's own paths."""
    own = environ.get("PYTHONPATH", "")
    if NAMES in own.split(os.pathsep):
        return dict(environ)
    return {**environ, "PYTHONPATH": f"{own}{os.pathsep}{NAMES}" if own else NAMES}


def seat(topology: Topology) -> dict[str, str]:
    """Where a rank sits among ranks on several hosts; completes :func:`own`."""
    place = {
        "LOCAL_RANK": topology.local_rank, "LOCAL_SIZE": topology.local_size,
        "CROSS_RANK": topology.cross_rank, "CROSS_SIZE": topology.cross_size,
    }  # fmt: skip
    variables = {f"{prefix}_{name}": str(n) for prefix in PLACES for name, n in place.items()}
    return variables | {
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_size),
    }


def own(
    rank: int,
    size: int,
    *,
    store: str,
    secret: str,
    start_timeout: float,
    master: tuple[str, int],
) -> dict[str, str]:
    """What rank ``rank`` of ``size`` has of its own, on one host."""
    place = {
        "RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size,
        "CROSS_RANK": 0, "CROSS_SIZE": 1,
    }  # fmt: skip
    variables = {f"{prefix}_{name}": str(n) for prefix in PLACES for name, n in place.items()}
    host, port = master
    return variables | {
        "FARANDOLE_STORE": store,
        SECRET: secret,
        "FARANDOLE_START_TIMEOUT": f"{start_timeout:g}",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
