"""Saves and finds checkpoints: training waits for a copy in memory, a thread does the rest.

A save, step by step:

1. All ranks say which step they save and what their state looks like; they must agree.
2. They share the state out (:mod:`farandole.elastic.checkpoint.shards`); the same kind of state as
   last time is shared out as then, without another word.
3. Each rank copies its own share to host memory. Now training goes on.
4. In a thread: it writes and syncs its files, and tells all what they are. When all have written,
   rank 0 publishes (:mod:`farandole.elastic.checkpoint.shelf`) and tells so.

One save at a time: the next one waits for the one before. A lost rank ends a save that is under
way: what was written is never published, and the checkpoint before it stands.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import random
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farandole.comm.group import Group
from farandole.core.errors import (
    CollectiveError,
    DeadlineError,
    MismatchError,
    SetupError,
    describe_ranks,
)
from farandole.elastic.checkpoint import shards, shelf, skeleton
from farandole.elastic.checkpoint.shelf import Published, Shelf

_log = logging.getLogger("farandole.checkpoint")

SKELETON = "skeleton"
_INDEX = ".metadata"


@dataclass
class _Saving:
    """A save under way."""

    step: int
    thread: threading.Thread = field(init=False)
    error: Exception | None = None


class Saver:
    """One rank's end. ``group_of`` gives the root group of now; all its ranks call alike."""

    def __init__(self, folder: Shelf, group_of: Callable[[], Group]) -> None:
        self._shelf = folder
        self._group_of = group_of
        self._opened: tuple[Group, dict[str, shards.Shares]] | None = None
        """The group for which the folder was opened, and what it has shared out."""
        self._saving: _Saving | None = None

    @property
    def group(self) -> Group | None:
        """The group that saved last."""
        return None if self._opened is None else self._opened[0]

    # ---- saving

    def save(self, step: int, state: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Begin to save ``state``; ``about`` (plain values) can be read without loading it.

        Raises ``MismatchError`` when the ranks save different steps or states, and ``SetupError``
        when the folder cannot be written to. What goes wrong later is told by :meth:`wait`, and as
        a warning.
        """
        self._await_last()
        group = self._group_of()
        known = self._open(group)
        bones, tensors = skeleton.take_apart(dict(state))
        entries: dict[str, Any] = {SKELETON: bones, **tensors}
        mark = self._agree(group, step, entries)
        entries[_random_of(group.rank)] = random_state()
        shares = known.get(mark)
        if shares is None:
            shares = known[mark] = shards.share_out(
                entries, group.rank, lambda said: group.agree("checkpoint/plan", said, _WHAT)
            )
        mine = shares.names()
        copied = {name: _copied(value) for name, value in entries.items() if name in mine}
        saving = self._saving = _Saving(step)
        saving.thread = threading.Thread(
            target=self._write,
            args=(saving, group, copied, shares, dict(about)),
            name="farandole-checkpoint",
        )
        saving.thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the last save is published, here and on all ranks.

        Raises what it failed with, and ``DeadlineError`` after ``timeout`` seconds.
        """
        saving = self._saving
        if saving is None:
            return
        saving.thread.join(timeout)
        if saving.thread.is_alive():
            raise DeadlineError(
                f"The checkpoint of step {saving.step} was not written within {timeout:g} s."
            )
        if saving.error is not None:
            raise saving.error

    def _await_last(self) -> None:
        if self._saving is not None:
            self._saving.thread.join()

    def _open(self, group: Group) -> dict[str, shards.Shares]:
        """The folder is one generation's at a time."""
        if self._opened is None or self._opened[0] is not group:
            error = ""
            if group.rank == 0:
                try:
                    self._shelf.open(group.generation)
                except SetupError as failed:
                    error = failed.message
            said = group.agree("checkpoint/open", error.encode(), _WHAT)
            if said[0]:
                raise SetupError(said[0].decode(), ranks=[0])
            self._opened = (group, {})
        return self._opened[1]

    def _agree(self, group: Group, step: int, entries: Mapping[str, Any]) -> str:
        """Make sure that all save the same; the mark by which a state's shares are kept."""
        look = json.dumps(shards.fingerprint(entries)).encode()
        mark = hashlib.blake2b(look, digest_size=16).hexdigest()
        mine = json.dumps([step, mark]).encode()
        said = [json.loads(each) for each in group.agree("checkpoint", mine, _WHAT)]
        steps = [each[0] for each in said]
        if len(set(steps)) > 1:
            by_step = "; ".join(
                f"{step} on {describe_ranks(r for r, s in enumerate(steps) if s == step)}"
                for step in sorted(set(steps))
            )
            raise MismatchError(
                f"The ranks save checkpoints of different steps: {by_step}. Save at the same step "
                "on every rank.",
                ranks=group.members,
            )
        if len({each[1] for each in said}) > 1:
            raise MismatchError(
                f"The ranks' states at step {step} differ in their tensors' names, shapes or "
                "dtypes. Save the same model and optimizer on every rank.",
                ranks=group.members,
            )
        return mark

    def _write(
        self,
        saving: _Saving,
        group: Group,
        copied: dict[str, Any],
        shares: shards.Shares,
        about: Mapping[str, Any],
    ) -> None:
        """In a thread of its own."""
        try:
            self._publish(group, saving.step, copied, shares, about)
        except CollectiveError as error:
            # Training hears of it by itself, and goes on from what stands.
            _log.info("checkpoint of step %d given up: %s", saving.step, error)
            saving.error = error
        except SetupError as error:
            saving.error = error
            if group.rank == 0:
                _log.warning("%s", error)

    def _publish(
        self,
        group: Group,
        step: int,
        copied: dict[str, Any],
        shares: shards.Shares,
        about: Mapping[str, Any],
    ) -> None:
        aside = self._shelf.aside(step, group.generation)
        said = [
            pickle.loads(each)
            for each in group.agree(
                "checkpoint/written",
                pickle.dumps(_write_share(copied, shares, group.rank, aside)),
                _WHAT,
            )
        ]
        _raise_first(step, [each[0] for each in said])
        error = ""
        if group.rank == 0:
            try:
                shards.finish(shares, [each[1] for each in said], aside)
                shelf.sync_files([aside / _INDEX])
                files = {_INDEX: shelf.digest(aside / _INDEX)}
                for each in said:
                    files |= each[2]
                told = {"ranks": group.size, "about": dict(about), "files": files}
                self._shelf.publish(aside, step, group.generation, told)
            except OSError as failed:
                error = f"{failed.strerror}: {failed.filename}"
            except SetupError as failed:
                error = failed.message
        published = group.agree("checkpoint/published", error.encode(), _WHAT)
        if published[0]:
            raise SetupError(published[0].decode(), ranks=[0])

    # ---- finding

    def find(self) -> Published | None:
        """The newest checkpoint that is whole, the same on all ranks; ``None`` when there is none.

        Every rank reads a part of the files. One that is damaged is named in a warning, and the one
        before it is looked at.
        """
        group = self._group_of()
        steps = [each.step for each in self._shelf.published()]
        listed = json.loads(group.agree("checkpoint/list", json.dumps(steps).encode(), _WHAT)[0])
        for step in listed:
            problems = group.agree("checkpoint/verify", self._inspect(step, group).encode(), _WHAT)
            found = [text.decode() for text in problems if text]
            if not found:
                return next(each for each in self._shelf.published() if each.step == step)
            if group.rank == 0:
                _log.warning("The checkpoint of step %d is not used: %s", step, found[0])
        return None

    def _inspect(self, step: int, group: Group) -> str:
        """What is wrong with this rank's part of a checkpoint; empty when nothing is."""
        mine = [each for each in self._shelf.published() if each.step == step]
        if not mine:
            return (
                f"rank {group.rank} does not see it in {self._shelf.folder}, and rank 0 does: all "
                "ranks need the same folder"
            )
        try:
            files = sorted(self._shelf.manifest(mine[0])["files"])
            self._shelf.verify(mine[0], files[group.rank :: group.size])
        except SetupError as error:
            return error.message
        return ""

    def load(self, found: Published, into: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The state that was saved, and what was said about it.

        Sharded tensors are read into those of ``into``, a state of the same kind; the random states
        of this rank are set.
        """
        _, tensors = skeleton.take_apart(dict(into))
        entries = shards.read(found.path, tensors)
        own = entries.get(_random_of(self._group_of().rank))
        if own is not None:
            set_random_state(own)
        about: dict[str, Any] = self._shelf.manifest(found)["about"]
        return skeleton.put_together(entries[SKELETON], entries), about


_WHAT = "a checkpoint"


def _random_of(rank: int) -> str:
    return f"random/{rank}"


def random_state() -> dict[str, Any]:
    """The states of this process's random number generators: Python's, NumPy's if it is imported,
    torch's on the CPU and on its GPUs."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """The inverse of :func:`random_state`; generators that are not here now are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def _copied(value: Any) -> Any:
    """A copy that training does not change, in host memory."""
    if not isinstance(value, Tensor):
        return pickle.loads(pickle.dumps(value))
    value = value.detach()
    return value.clone() if value.device.type == "cpu" else value.to("cpu")


def _write_share(
    copied: dict[str, Any], shares: shards.Shares, rank: int, aside: Path
) -> tuple[str, list[Any], dict[str, Any]]:
    """What went wrong, else what was written and the digests of the files."""
    try:
        results = shards.write(copied, shares, rank, aside)
        names = {result.storage_data.relative_path for result in results}
        shelf.sync_files([aside / name for name in names])
        return "", results, {name: shelf.digest(aside / name) for name in names}
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", [], {}


def _raise_first(step: int, errors: list[str]) -> None:
    failed = [rank for rank, error in enumerate(errors) if error]
    if failed:
        raise SetupError(
            f"The checkpoint of step {step} was not written: {describe_ranks(failed)} could not "
            f"write ({errors[failed[0]]}). The one before it stands.",
            ranks=failed,
        )
