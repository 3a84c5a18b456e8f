"""One rank in a process of its own: ``rank_process.py SCENARIO RANK SIZE STORE``.

Prints a line of JSON for each thing that the test wants to know, with the time since boot.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from farandole.comm.control.channel import Control
from farandole.comm.control.position import Position
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.errors import FarandoleError, UsageError
from farandole.core.secret import Secret
from farandole.core.store import StoreClient

LIMIT = 30.0
PLACE = Position("named", "0", 1, 'allreduce "loss"')


def say(kind: str, **more: Any) -> None:
    line = json.dumps({"kind": kind, "at": time.monotonic(), **more}) + "\n"
    os.write(1, line.encode())  # in one piece: several threads and a child have news


def wait_to_be_told() -> None:
    """Return when the test closes this process's standard input."""
    sys.stdin.read()


def tell(error: FarandoleError) -> None:
    say("failed", error=type(error).__name__, text=str(error), ranks=list(error.ranks))


def idle(control: Control) -> None:
    """Do nothing, and use no processor for it."""
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    say("idle", seconds=time.process_time() - before)
    wait_to_be_told()


def gather(control: Control) -> None:
    """Wait in a gather that the last rank never joins."""
    if control.rank == control.size - 1:
        time.sleep(LIMIT)
    try:
        control.allgather("t", b"")
    except FarandoleError as error:
        say("raised", text=str(error))


def poll(control: Control) -> None:
    """Wait for something that never happens."""
    try:
        control.wait_for(_nap, PLACE)
    except FarandoleError as error:
        say("raised", text=str(error))


def fork(control: Control) -> None:
    """Rank 1 leaves a child behind that lives on when it is killed."""
    if control.rank == 1:
        child = os.fork()
        if child == 0:
            try:
                control.allgather("t", b"")
            except UsageError as error:
                say("child", text=str(error))
            control.close()
            time.sleep(LIMIT)
            os._exit(0)
        say("forked", child=child)
    wait_to_be_told()


def stall(control: Control) -> None:
    """Rank 1 stops before it joins the others."""
    if control.rank == 1:
        wait_to_be_told()
    control.allgather("t", b"", position=PLACE)
    say("gathered")


def _nap(timeout: float) -> bool:
    time.sleep(timeout)
    return False


def main(scenario: Callable[[Control], None], rank: int, size: int, store: str) -> None:
    logging.basicConfig(format="%(message)s")
    secret = Secret.from_hex(os.environ["FARANDOLE_SECRET"])
    deadline = Deadline.after(LIMIT)
    client = StoreClient(Address.parse(store), secret, deadline)
    settings = Settings(stall_warning=0.3 if scenario is stall else 60.0)
    say("started", pid=os.getpid())
    try:
        control = Control.form(client, rank, size, 0, settings, secret, "127.0.0.1", deadline)
    except FarandoleError as error:
        tell(error)
        return
    control.on_failure(tell)
    control.allgather("ready", b"")
    say("formed")
    scenario(control)
    control.close()
    say("closed")


if __name__ == "__main__":
    main(globals()[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
