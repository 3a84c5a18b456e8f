"""The engine between ranks of one host: shared memory where all of them can, else torch's."""

from __future__ import annotations

import logging
import sys

import torch

from farandole.comm.engines import registry
from farandole.comm.engines.base import Engine, Seat
from farandole.core.clock import Deadline
from farandole.core.errors import DeadlineError, SetupError
from farandole.core.store import LocalStore

_log = logging.getLogger("farandole.engines")


def open_one_host(seat: Seat) -> Engine:
    """Open the channel of ``seat``, whose ranks share a host. All ranks choose alike.

    Raises what the opening of ``torch`` raises, and ``DeadlineError`` when a rank does not come.
    """
    if seat.device.type == "cpu" and sys.platform == "linux":
        try:
            return registry.opener("shm")(seat)
        except DeadlineError:
            raise
        except SetupError as error:  # the same on every rank
            _log.info("%s The engine 'torch' is used.", error.message)
    return registry.opener("torch")(seat)


def why_not_shared() -> str:
    """Why ranks on this host cannot share memory; empty when one process finds no reason."""
    if sys.platform != "linux":
        return "it needs Linux"
    seat = Seat(
        rank=0, size=1, channel="probe", store=LocalStore(), device=torch.device("cpu"),
        hosts=("here",), address="127.0.0.1", deadline=Deadline.after(5.0),
    )  # fmt: skip
    try:
        registry.opener("shm")(seat).close()
    except SetupError as error:
        return error.message
    return ""
