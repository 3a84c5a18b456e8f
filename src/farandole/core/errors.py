"""Every error that a user of Farandole can meet.

The class says whose act it was and what to do next::

    FarandoleError
    ├── UsageError (ValueError)           you: fix the call; nothing was sent, nothing is lost
    │   ├── NotInitializedError           you: call init() first
    │   ├── UsageTypeError (TypeError)    you: pass another type
    │   └── UnsupportedError              you: ask for something that exists
    │       (NotImplementedError)
    ├── CollectiveError (RuntimeError)    a collective did not complete
    │   ├── MismatchError                 you: the ranks asked for different things
    │   ├── PeerLost                      the world: a rank died or left; recoverable
    │   ├── StallError                    a rank did not arrive within the limit
    │   └── ShutDownError                 you: the group was shut down here, work was in flight
    ├── JobFailed (RuntimeError)          a rank of a job that this program started failed
    ├── SetupError (RuntimeError)         the environment: something is missing or unreachable
    │   ├── MissingExtraError             install the named extra
    │   ├── AuthenticationError           a peer does not hold the job's secret
    │   └── DeadlineError (TimeoutError)  somebody did not answer in time
    ├── ConnectionLost (ConnectionError)  a socket of ours closed; callers turn it into PeerLost
    └── FarandoleBug (RuntimeError)       us: please report it

A distributed error names the ranks, the first cause, the limit and the remedy in its text, keeps
the ranks in ``ranks``, and survives pickling.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def describe_ranks(ranks: Iterable[int]) -> str:
    """Name ranks as people do: ``rank 3``, ``ranks 0-2, 5``."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}"


class FarandoleError(Exception):
    """Anything that Farandole raises on purpose.

    ``ranks`` are the global ranks that the error is about (often empty). The text is complete in
    itself: what happened, where, why, and what to do.
    """

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(sorted(set(ranks)))

    @property
    def message(self) -> str:
        """The whole text."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args[0], self.ranks))


def _rebuild(kind: type[FarandoleError], message: str, ranks: tuple[int, ...]) -> FarandoleError:
    return kind(message, ranks=ranks)


class UsageError(FarandoleError, ValueError):
    """The call is wrong. It was refused before anything moved."""


class UsageTypeError(UsageError, TypeError):
    """The call got an argument of a type it cannot use."""


class NotInitializedError(UsageError):
    """A rank, a size or a collective was asked for before ``init()``."""


class UnsupportedError(UsageError, NotImplementedError):
    """What was asked for does not exist for these arguments, or for this number of ranks."""


class CollectiveError(FarandoleError, RuntimeError):
    """A collective did not complete. Horovod calls this ``HorovodInternalError``.

    Example::

        try:
            loss = hvd.allreduce(loss, name="loss")
        except hvd.HorovodInternalError as error:
            print(error, error.ranks)
    """


class MismatchError(CollectiveError):
    """The ranks asked for things that do not fit together. Raised alike on every rank."""


class PeerLost(CollectiveError):
    """A rank died, left, or cannot be reached. ``ranks`` are those that were lost."""


class StallError(CollectiveError):
    """Ranks waited longer than the limit for ``ranks``, which never came."""


class ShutDownError(CollectiveError):
    """This process shut its group down while work was in flight, or used it afterwards."""


class JobFailed(FarandoleError, RuntimeError):
    """A rank of a job that was started from this program failed, and the job was ended.

    ``ranks``: which was the first, where that is known.
    """


class SetupError(FarandoleError, RuntimeError):
    """The environment lacks something, or a part of the job cannot be reached."""


class MissingExtraError(SetupError):
    """An optional dependency is not installed; the text holds the pip command."""


class AuthenticationError(SetupError):
    """The other end of a connection does not hold the job's secret."""


class DeadlineError(SetupError, TimeoutError):
    """Somebody did not answer within a limit; the text names who, and the limit in seconds."""


class ConnectionLost(FarandoleError, ConnectionError):
    """A socket of ours was closed by the other end."""


class FarandoleBug(FarandoleError, RuntimeError):
    """Our own mistake. The text says what was expected; please report it."""
