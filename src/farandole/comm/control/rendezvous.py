"""Where the ranks of a generation find rank 0's hub: one key of the job's store."""

from __future__ import annotations

import json
import logging

from farandole.comm.control import wording
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import DeadlineError, FarandoleError, SetupError
from farandole.core.store import Store

_log = logging.getLogger(__name__)


def publish(store: Store, generation: int, address: Address) -> None:
    """Rank 0: the hub of ``generation`` listens at ``address``. Forgets the generation before."""
    store.set(_key(generation), json.dumps({"address": str(address)}).encode())
    store.delete(_key(generation - 1))


def end(store: Store, generation: int, why: str) -> None:
    """Rank 0: whoever comes now is too late, because of ``why``."""
    try:
        store.set(_key(generation), json.dumps({"ended": why}).encode())
    except FarandoleError as error:
        # The group does not need the store any more, nor does who would have come too late.
        _log.debug("Latecomers cannot be told: %s", error)


def find(store: Store, generation: int, size: int, deadline: Deadline) -> Address:
    """Wait for rank 0's hub.

    Raises ``DeadlineError`` about rank 0 when it does not come in time, ``SetupError`` when this
    process is too late.
    """
    try:
        value = json.loads(store.get(_key(generation), deadline))
    except DeadlineError:
        raise DeadlineError(wording.late([0], size, deadline.limit), ranks=[0]) from None
    if "ended" in value:
        raise SetupError(f"This process came too late: {value['ended']}")
    return Address.parse(value["address"])


def _key(generation: int) -> str:
    return f"control/{generation}"
