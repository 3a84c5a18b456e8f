"""A process that dies is seen to die before it has given back its memory."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

import pytest

from farandole.comm.engines.shm import witness

MEBIBYTES = 400
LIMIT = 20.0


@contextlib.contextmanager
def process_with_much_memory() -> Iterator[tuple[int, list[int]]]:
    """A process and its witnesses."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        memory = [bytearray(b"1" * 2**20) for _ in range(MEBIBYTES)]
        os.write(theirs, b" ".join(b"%d" % each for each in witness.witnesses()))
        while memory:
            time.sleep(LIMIT)
    os.close(theirs)
    try:
        yield pid, [int(each) for each in os.read(ours, 100).split()]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(ours)
        os.waitpid(pid, 0)


def is_readable(descriptors: list[int], seconds: float) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(int(1e3 * seconds)))


def thread_pidfds_exist() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid(), os.O_EXCL))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not thread_pidfds_exist(), reason="Linux 6.9 has pidfds of threads")
def test_the_witnesses_of_a_process_end_before_the_process_has_ended() -> None:
    with process_with_much_memory() as (pid, threads):
        whole, watched = [os.pidfd_open(pid)], witness.watch(pid, threads)
        assert len(watched) == witness.COUNT
        assert not is_readable(watched, 0.0)
        os.kill(pid, signal.SIGKILL)
        assert is_readable(watched, LIMIT)
        assert not is_readable(whole, 0.0)
        assert is_readable(whole, LIMIT)
        for descriptor in (*whole, *watched):
            os.close(descriptor)


def test_where_there_are_no_witnesses_the_process_is_watched() -> None:
    with process_with_much_memory() as (pid, _):
        never = 2**22 - 1  # the highest number that the system gives
        (watched,) = witness.watch(pid, [never])
        assert not is_readable([watched], 0.0)
        os.kill(pid, signal.SIGKILL)
        assert is_readable([watched], LIMIT)
        os.close(watched)


def test_a_forked_child_has_witnesses_of_its_own() -> None:
    ours = witness.witnesses()
    assert witness.witnesses() == ours
    with process_with_much_memory() as (_, theirs):
        assert not set(theirs) & set(ours)
