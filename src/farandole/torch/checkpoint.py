"""Checkpoints of a training: what to save, when, and where to go on."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from farandole.core.errors import FarandoleError, UsageError
from farandole.elastic.checkpoint.shelf import Shelf
from farandole.torch.session import before_shutdown, current

if TYPE_CHECKING:
    from farandole.elastic.checkpoint.saver import Saver


class Checkpoints:
    """The checkpoints of a training in one folder, which all ranks see.

    ``parts`` are what a checkpoint holds, by name: anything with ``state_dict()`` and
    ``load_state_dict()`` (models, optimizers, schedulers, ``GradScaler``, a
    :class:`farandole.torch.DataLoader`). The random states of Python, NumPy and torch are saved
    too.

    * **Training waits for one copy in memory**, of this rank's share; writing goes on beside it.
      What all ranks have alike is shared out among them, each tensor written once.
    * **A checkpoint is there whole, or not.** It is published when it is durable on all ranks. Kill
      any process at any moment: the last published one can be loaded. The ``keep`` newest stay.
    * **Any number of ranks** may load it: more or fewer than have saved it.
    * Before :func:`shutdown`, and at the end of the program, a save that is under way is completed.

    The files are those of ``torch.distributed.checkpoint``; a manifest beside them has their
    lengths and digests. They hold pickled objects: load only what you trust.

    Example::

        checkpoints = hvd.Checkpoints("/ckpt", model=model, optimizer=optimizer, data=loader)
        resumed = checkpoints.load() or {"step": 0, "epoch": 0}
        step = resumed["step"]
        for epoch in range(resumed["epoch"], 90):
            for images, labels in loader:       # goes on in the middle of the epoch
                ...
                step += 1
                if step % 500 == 0:
                    checkpoints.save(step, epoch=epoch)
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, **parts: Any) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: at least one checkpoint has to stay.")
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise UsageError(
                    f"{name}={type(part).__name__} has no state_dict(). Give plain values to "
                    "save(): save(step, epoch=epoch)."
                )
        # It brings torch.distributed.checkpoint, which takes long to import.
        from farandole.elastic.checkpoint.saver import Saver

        self._parts = parts
        self._saver = Saver(Shelf(folder, keep=keep), current)
        _savers.add(self._saver)

    def save(self, step: int, **values: Any) -> None:
        """Begin to save a checkpoint of ``step``; all ranks do, at the same step.

        ``values`` (numbers, texts, lists and dictionaries of them) come back from :meth:`load`.
        Waits for the save before, if that is not over.

        Raises ``MismatchError`` when the ranks save different steps or models, ``SetupError`` when
        the folder cannot be written to, and as collectives do. A save that fails later (a full
        disk) is a warning of rank 0 and an error of :meth:`wait`; training goes on.
        """
        about = {**values, "step": step}
        try:
            json.dumps(about)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"save() takes plain values beside the step: {error}. Make what it is a part of "
                "Checkpoints(), with state_dict() and load_state_dict()."
            ) from None
        self._saver.save(step, self._state(), about)

    def wait(self, timeout: float | None = None) -> None:
        """Return when the last save is published, on all ranks; ``timeout`` in seconds.

        Raises what it failed with, and ``DeadlineError`` when it takes longer.

        Example::

            checkpoints.save(step)
            checkpoints.wait()      # from here on it survives the loss of all machines
        """
        self._saver.wait(timeout)

    def load(self) -> dict[str, Any] | None:
        """Load the newest checkpoint that is whole into the parts; all ranks do.

        Returns what :meth:`save` was given, with ``step``; ``None`` when there is no checkpoint. A
        checkpoint with a truncated or altered file is named in a warning, and the one before it is
        taken.

        Raises ``UsageError`` when the checkpoint has not the parts that are here.
        """
        found = self._saver.find()
        if found is None:
            return None
        state, about = self._saver.load(found, self._state())
        missing = sorted(set(self._parts) - set(state))
        if missing:
            raise UsageError(
                f"{found} has no {', '.join(missing)}: it holds {', '.join(sorted(state))}. Give "
                "Checkpoints() the parts that were saved."
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        return about

    def _state(self) -> Mapping[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}


def export_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights of ``model`` as a safetensors file, by rank 0; for serving and sharing.

    Tensors that share memory (tied weights) are written once. Needs the extra ``export``.

    Example::

        hvd.export_weights(model, "model.safetensors")
    """
    from farandole.torch.export import write_weights

    if current().rank == 0:
        write_weights(model, path)


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


def _complete() -> None:
    group = current()
    for each in list(_savers):
        if each.group is group:
            # Rank 0 has warned of it.
            with contextlib.suppress(FarandoleError):
                each.wait()


before_shutdown(_complete)
