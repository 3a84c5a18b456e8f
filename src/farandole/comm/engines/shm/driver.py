"""In which thread a collective proceeds: in whichever has the time, always one at a time.

Operations of one engine proceed one after the other, in the order in which they were begun. Who
*drives* holds a lock:

* The caller of a verb begins the operation, if no other is under way: at least its own part is
  then written and published when the verb returns.
* Whoever waits for an operation drives until it is done. A blocking collective never changes
  threads, which would cost more than all the rest of a small one.
* A thread of the engine drives what nobody else does, ``GRACE`` seconds after it was begun. It
  gives way, between two rounds, to a thread that waits.

Awaiting the others begins with looking again and again, for about as long as a sleep costs. Between
two looks the thread offers its core to whoever else can run there, since that may be the rank which
is awaited. Were it to sleep earlier, then the others, awaiting it while it wakes up, would sleep as
well, and so on: 64 MiB then took half as long again. Looking keeps the GIL, so the engine's thread
does not do it.

After that the thread sleeps in the kernel, and every ``SLICE`` looks whether the operation can
complete at all. It cannot when a rank is gone and some rank has not published the round which is
awaited: what the gone rank completed, it completed with everybody's part published, so that the
survivors complete it too. The counts of published rounds are trusted only after a sleep in the
kernel since the rank was known to be gone.
"""

from __future__ import annotations

import collections
import copy
import inspect
import math
import os
import threading
import time

import torch

from farandole.comm.engines.base import Work
from farandole.comm.engines.shm import libc
from farandole.comm.engines.shm.collectives import Steps
from farandole.comm.engines.shm.flags import Flags
from farandole.comm.engines.shm.peers import Peers
from farandole.core.errors import CollectiveError, FarandoleBug, FarandoleError, PeerLost

SLICE = 0.005
"""Seconds between two looks whether a rank is gone or the engine was aborted."""

SUSPICION = 0.002
"""The same, once a rank is known to be gone."""

GRACE = 0.002
"""Seconds after which the engine's thread takes up what nobody drives."""

SPIN = 400e-6
"""Seconds of looking before sleeping: about what going to sleep and waking up takes at worst."""


class Operation(Work):
    """A collective that was begun."""

    def __init__(self, driver: Driver, steps: Steps) -> None:
        self.steps: Steps | None = steps
        self._driver = driver

    @property
    def completed(self) -> bool:
        """Whether it was carried out."""
        return self.steps is None

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Work`."""
        return self.completed or self._driver.wait(self, timeout)

    def done(self) -> bool:
        """See :class:`Work`."""
        return self.completed or self._driver.failure is not None


class Driver:
    """The operations of one engine, and the lock that who drives them holds."""

    def __init__(self, channel: str, flags: Flags, peers: Peers) -> None:
        self.failure: FarandoleError | None = None
        self._channel = channel
        self._flags = flags
        self._peers = peers
        self._mode = torch.inference_mode()  # the tensors may have been made in it
        self._queue: collections.deque[Operation] = collections.deque()
        self._driving = threading.Lock()
        self._failing = threading.RLock()  # a signal handler may fail it as well
        self._wanted = False
        """Whether a thread waits for the lock."""
        self._timer = libc.new_timer()
        self._armed = False
        self._thread: threading.Thread | None = None

    def begin(self, steps: Steps) -> Operation:
        """Put an operation behind those that were begun before."""
        self.check()
        operation = Operation(self, steps)
        farewell = self._peers.farewell()
        if farewell is not None:
            self._begin_deserted(operation, farewell)
            return operation
        self._queue.append(operation)
        if self._driving.acquire(blocking=False):
            try:
                self._advance(operation, end=0.0, gives_way=False)
            finally:
                self._driving.release()
        if not operation.completed:
            self._arm()
        return operation

    def _begin_deserted(self, operation: Operation, farewell: str) -> None:
        """Whoever left did not complete what has not even begun here, unless it moves nothing."""
        with self._driving, self._mode:
            self._step(operation)
        if not operation.completed:
            self._lose(farewell)

    def wait(self, operation: Operation, timeout: float | None) -> bool:
        """See :class:`Work`."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not operation.completed:
            self.check()
            if self._acquire(end):
                try:
                    self._advance(operation, end, gives_way=False)
                finally:
                    self._driving.release()
                if self._queue:
                    self._arm()
            if not operation.completed and time.monotonic() >= end:
                self.check()
                return False
        return True

    def check(self) -> None:
        """Raise what the engine failed with, if it did."""
        if self.failure is not None:
            raise copy.copy(self.failure)

    def fail(self, error: FarandoleError) -> None:
        """Make pending and later operations raise ``error``, and the other ranks' soon too."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error
        self._peers.say_farewell(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the thread and let go of what is pending. The driver has failed before."""
        thread, self._thread = self._thread, None
        if thread is not None:
            libc.set_timer(self._timer, 1e-6)
            if thread is not threading.current_thread():
                thread.join()
        if self._driving.acquire(timeout=1.0):  # not for ever: a signal handler may close
            self._queue.clear()
            self._driving.release()
        timer, self._timer = self._timer, -1
        if timer >= 0:
            os.close(timer)

    def abandon(self, error: FarandoleError) -> None:
        """In a forked child: fail without a word to the other ranks, and without any lock."""
        self.failure = error
        self._thread = None
        timer, self._timer = self._timer, -1
        if timer >= 0:
            os.close(timer)

    def _acquire(self, end: float) -> bool:
        """Try to get hold of the driving lock, for at most a slice."""
        if self._driving.acquire(blocking=False):
            return True
        self._wanted = True
        left = min(SLICE, end - time.monotonic())
        return self._driving.acquire(timeout=left) if left > 0 else False

    def _advance(self, until: Operation | None, end: float, *, gives_way: bool) -> None:
        """Drive the first operations, to the end of ``until`` at most, or until ``end``."""
        self._wanted = False
        with self._mode:
            while self._queue:
                operation = self._queue[0]
                if operation.completed:
                    self._queue.popleft()
                    continue
                if until is not None and until.completed:
                    return
                if (gives_way and self._wanted) or not self._await(end, gives_way=gives_way):
                    return
                self._step(operation)

    def _step(self, operation: Operation) -> None:
        """From one yield of the first operation to the next, or to its end."""
        steps = operation.steps
        assert steps is not None
        try:
            next(steps)
        except StopIteration:
            operation.steps = None
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            self.fail(
                FarandoleBug(
                    f"An operation on the channel {self._channel!r} failed, which should have been "
                    f"checked before. Please report this: {error}"
                )
            )
            self.check()
        except BaseException as error:
            if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                self.fail(
                    CollectiveError(
                        f"A collective on the channel {self._channel!r} was broken off half way by "
                        f"{type(error).__name__}. The channel is of no more use."
                    )
                )
            raise

    def _await(self, end: float, *, gives_way: bool) -> bool:
        """Await the round published last; ``False`` when ``end`` came first, or to give way."""
        flags = self._flags
        if flags.poll():
            return True
        now = time.monotonic()
        if now >= end:
            return False
        spin_end = now if gives_way else min(now + SPIN, end)
        while now < spin_end:
            if flags.poll():
                return True
            libc.sched_yield()
            now = time.monotonic()
        suspicion = self._peers.farewell()
        while True:
            self.check()
            if gives_way and self._wanted:
                return False
            left = end - time.monotonic()
            if left <= 0:
                return False
            if flags.block(min(left, SLICE if suspicion is None else SUSPICION)):
                return True
            if suspicion is not None and flags.unpublished():
                self._lose(suspicion)
            suspicion = self._peers.gone()

    def _lose(self, suspicion: str) -> None:
        self.fail(
            PeerLost(
                f"The channel {self._channel!r} is broken: {suspicion}. "
                "Look for the first rank that ended."
            )
        )

    def _arm(self) -> None:
        if self._armed:
            return
        with self._failing:  # closing closes the timer, and has failed before
            if self.failure is not None:
                return
            self._armed = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._drive_idle, name="farandole-shm", daemon=True
                )
                self._thread.start()
            libc.set_timer(self._timer, GRACE)

    def _drive_idle(self) -> None:
        """The engine's thread: drives what nobody else does."""
        while True:
            os.read(self._timer, 8)
            if self.failure is not None:
                return
            self._armed = False
            if not self._driving.acquire(blocking=False):
                continue  # who drives arms the timer when done, if anything is left then
            try:
                self._advance(None, math.inf, gives_way=True)
            except FarandoleError as error:
                self.fail(error)
            finally:
                self._driving.release()
            if self._queue:
                self._arm()
