"""What every rank runs for ``horovod.run``: fetch the function, call it, hand the result back.

``python -m farandole.horovod.runner.callee``. Function and results travel through the job's store,
which serves nobody who does not hold the job's secret: what is unpickled here comes from whoever
started the job.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback

import cloudpickle  # type: ignore[import-untyped]

from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.config import environment as current_environment
from farandole.core.errors import ConnectionLost, DeadlineError, FarandoleBug
from farandole.core.placement import find_placement
from farandole.core.store import StoreClient
from farandole.horovod.runner import parcels

FUNCTION = "call/function"
PATH = "call/path"
FAILURE = "call/failure"
"""What the first rank to fail says: JSON with its number and its traceback."""

_LIMIT = 60.0
"""Seconds for the store to answer."""


def result_of(rank: int) -> str:
    """The key of a rank's result."""
    return f"call/result/{rank}"


def main() -> None:
    """Be one rank of the call."""
    rank = find_placement(current_environment()).rank
    store = _connect()
    try:
        path = json.loads(parcels.get(store, PATH, Deadline.after(_LIMIT)))
        sys.path += [entry for entry in path if entry not in sys.path]
        function = cloudpickle.loads(parcels.get(store, FUNCTION, Deadline.after(_LIMIT)))
        parcels.put(store, result_of(rank), cloudpickle.dumps(function()))
    except Exception:
        failure = json.dumps({"rank": rank, "traceback": traceback.format_exc()})
        with contextlib.suppress(ConnectionLost, DeadlineError):  # then the exit code must do
            store.compare_and_set(FAILURE, None, failure.encode())
        raise
    finally:
        store.close()


def _connect() -> StoreClient:
    settings = Settings.from_environment()
    if settings.store_address is None or settings.secret is None:
        raise FarandoleBug("This module runs in jobs of horovod.run only.")
    address = Address.parse(settings.store_address)
    return StoreClient(address, settings.secret, Deadline.after(_LIMIT))


if __name__ == "__main__":
    main()
