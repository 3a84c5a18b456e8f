"""Who writes which part of a state, and who reads what: torch.distributed.checkpoint's planners and
files, over our own groups.

``dcp.save`` needs a process group that torch has registered; with another one every rank takes
itself for the only one and writes the same file. So its steps are taken here one by one, and what
the ranks have to tell each other goes over the group's control channel. The files are those that
``dcp.save`` writes: ``dcp.load`` reads them. A tensor that all ranks have alike is written by one,
sharded ones (``DTensor``) by whoever has the shard.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank what each has passed, in rank order: an allgather of small objects."""


@dataclass(frozen=True)
class Shares:
    """What this rank writes of one kind of state, and what all have agreed on."""

    plan: SavePlan
    plans: list[SavePlan]
    metadata: Metadata

    def names(self) -> frozenset[str]:
        """The entries of which this rank writes something."""
        return frozenset(item.index.fqn for item in self.plan.items)


def share_out(state: Mapping[str, Any], rank: int, exchange: Exchange) -> Shares:
    """Agree on who writes what of ``state`` (tensors, and objects that pickle, by name)."""
    planner = _planner(state, rank)
    plans = [pickle.loads(said) for said in exchange(pickle.dumps(planner.create_local_plan()))]
    plans, metadata = planner.create_global_plan(plans)
    plans = FileSystemWriter("").prepare_global_plan(plans)
    return Shares(plans[rank], plans, metadata)


def write(state: Mapping[str, Any], shares: Shares, rank: int, folder: Path) -> list[Any]:
    """Write this rank's share into ``folder``, synced; the results for :func:`finish`."""
    planner = _planner(state, rank)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    plan = planner.finish_plan(shares.plan)
    results = writer.write_data(plan, planner)
    results.wait()
    return list(results.value())


def finish(shares: Shares, results: list[list[Any]], folder: Path) -> None:
    """Write the index of all files; by one rank, with the results of all."""
    writer = FileSystemWriter(folder)
    writer.finish(shares.metadata, results)


def read(folder: Path, into: Mapping[str, Tensor]) -> dict[str, Any]:
    """All entries of a checkpoint, by name.

    Sharded tensors are read into those of ``into``, whose layout says which parts this rank needs;
    other tensors come as new ones on the CPU.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for name, about in metadata.state_dict_metadata.items():
        if not isinstance(about, TensorStorageMetadata):
            state[name] = None
        elif type(into.get(name)) not in (type(None), Tensor, torch.nn.Parameter):
            state[name] = into[name].detach()
        else:
            state[name] = torch.empty(about.size, dtype=about.properties.dtype)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return state


def _planner(state: Mapping[str, Any], rank: int) -> DefaultSavePlanner:
    # Flattening is done in `skeleton`, by rules that cannot change under us.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), is_coordinator=rank == 0)
    return planner


def fingerprint(state: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Two states with equal fingerprints have the same shares."""
    return [
        (name, type(value).__name__, tuple(value.shape), str(value.dtype))
        if isinstance(value, Tensor)
        else (name, "object")
        for name, value in state.items()
    ]
