"""From options and a job file to what may change while a job runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farandole.core.errors import UsageError
from farandole.elastic.policy import RANK, SHRINK, Policy
from farandole.launch import hosts as host_list
from farandole.launch.discovery import Discovery
from farandole.launch.hosts import Host
from farandole.launch.task import Elastic

if TYPE_CHECKING:
    from farandole.launch.spec import JobSpec

HERE = "localhost"
"""What this machine is called where no hosts are named."""


def resolve(
    spec: JobSpec | None,
    ranks: int | None,
    hosts: str | None,
    hostfile: str | None,
    *,
    min_np: int | None = None,
    max_np: int | None = None,
    host_discovery_script: str | None = None,
    slots_per_host: int | None = None,
    reset_limit: int | None = None,
    elastic_timeout: float | None = None,
    blacklist_cooldown_range: Sequence[float] | None = None,
    on_loss: str | None = None,
    on_loss_size: str | None = None,
    start_timeout: float,
    stall_warning: float = Policy.stall_warning,
    stall_timeout: float = Policy.stall_timeout,
    discovery_interval: float | None = None,
    awaits_newcomers: bool = False,
) -> Elastic | None:
    """What may change; ``None`` when the job is not elastic.

    It is when a smallest or largest number of ranks, or a discovery script, is given. An option
    that is not given leaves the job file's word, else the default. ``UsageError`` says what is
    wrong.
    """
    if spec is not None:
        min_np, max_np = min_np or spec.min_ranks, max_np or spec.max_ranks
        script = spec.host_discovery_script
        host_discovery_script = host_discovery_script or script
        reset_limit = spec.reset_limit if reset_limit is None else reset_limit
        elastic_timeout = elastic_timeout or spec.elastic_timeout
        on_loss, on_loss_size = on_loss or spec.on_loss, on_loss_size or spec.on_loss_size
    if min_np is None and max_np is None and host_discovery_script is None:
        _require_nothing_else(
            {
                "--reset-limit": reset_limit,
                "--elastic-timeout": elastic_timeout,
                "--blacklist-cooldown-range": blacklist_cooldown_range or None,
                "--slots-per-host": slots_per_host,
                "--on-loss": on_loss,
                "--on-loss-size": on_loss_size,
            }
        )
        return None
    start = ranks or min_np
    if start is None:
        raise UsageError("Say with -np or --min-np how many ranks the job begins with.")
    found = _discovery(hosts, hostfile, host_discovery_script, slots_per_host, max_np or start)
    if discovery_interval is not None:
        found = dataclasses.replace(found, interval=discovery_interval)
    return Elastic(
        policy=Policy(
            start_size=start,
            min_size=min_np or start,
            max_size=max_np,
            on_loss=on_loss or RANK,
            on_loss_size=on_loss_size or SHRINK,
            reset_limit=reset_limit,
            cooldown=_pair(blacklist_cooldown_range),
            start_timeout=start_timeout,
            stall_warning=stall_warning,
            stall_timeout=stall_timeout,
            awaits_newcomers=awaits_newcomers,
            patience=600.0 if elastic_timeout is None else elastic_timeout,
        ),
        discovery=found,
        first=found.look(),
    )


def describe(elastic: Elastic | None) -> str:
    """What may change, for people; begins with a comma."""
    if elastic is None:
        return ""
    policy = elastic.policy
    most = "as many as there are slots" if policy.max_size is None else policy.max_size
    return f" to begin with, at least {policy.min_size}, at most {most}"


def _discovery(
    hosts: str | None,
    hostfile: str | None,
    script: str | None,
    slots_per_host: int | None,
    here: int,
) -> Discovery:
    given = [each for each in (hosts, hostfile, script) if each]
    if len(given) > 1:
        raise UsageError(
            "Name hosts by -H, by --hostfile or by --host-discovery-script, by one of them."
        )
    if script:
        return Discovery(script=script, slots_per_host=slots_per_host)
    if hostfile:
        found: tuple[Host, ...] = host_list.read_file(hostfile)
    else:
        found = host_list.parse(hosts) if hosts else (Host(HERE, here),)
    return Discovery(file=hostfile) if hostfile else Discovery(fixed=found)


def _pair(values: Sequence[float] | None) -> tuple[float, float] | None:
    return (float(values[0]), float(values[1])) if values else None


def _require_nothing_else(options: dict[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"{', '.join(given)} is for jobs whose ranks may change: add --min-np, the smallest "
            "number of ranks to train with."
        )
