"""Elastic training with PyTorch, under Horovod's names.

Example::

    import farandole.torch as hvd

    hvd.init()
    state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(state)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from farandole.elastic import run as elastic_run
from farandole.elastic.interrupt import HostsUpdatedInterrupt
from farandole.elastic.state import ObjectState, State
from farandole.torch import channel, session
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.elastic.state import TorchState

ResultT = TypeVar("ResultT")

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]


def run(func: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Make ``func(state, …)`` survive the loss of ranks, and take new ones in.

    The result calls ``func`` when all ranks have the same state. When a rank is lost, the others
    go back to the last ``state.commit()`` and call ``func`` again, with the ranks of then; when
    ranks come or go in good order, they do so after a commit, and lose nothing. So ``func`` reads
    from ``state`` how far it is, and commits as it goes. Start the job with ``farandole run
    --min-np``; without, ``func`` runs as it is.

    Before ``func`` is called, a rank takes part in no collective but ``init()``, since the ranks
    that go on call none then.

    Raises what ``func`` raises: to the other ranks, this one is lost then. ``MismatchError`` too,
    since all ranks would only meet it again; ``PeerLost`` where nobody could start replacements.

    Example::

        @hvd.elastic.run
        def train(state):
            while state.step < 1000:
                step(state.model, state.optimizer)
                state.step += 1
                state.commit()
    """
    mark: dict[tuple[int, int], int] | None = None

    @functools.wraps(func)
    def again(*args: Any, **kwargs: Any) -> ResultT:
        nonlocal mark
        if mark is None:
            mark = channel.mark()
        channel.rewind(mark)
        return func(*args, **kwargs)

    return elastic_run.run(again, _meet_alone, session.follow)


def _meet_alone() -> None:
    session.shutdown()
    session.init()
