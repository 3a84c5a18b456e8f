"""The job loop of an elastic job: workers come and go, and the job goes on.

It is the plain job loop, in which a *rank* of messages, prefixes and logs is the number of a
process: the first ones' numbers are their ranks, one that is started later has the next number.
What the end of a process means is decided by the driver (:mod:`farandole.elastic.driver`); this is
its hands.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from farandole.core.errors import FarandoleBug, describe_ranks
from farandole.core.store import LocalStore
from farandole.core.worlds import World
from farandole.elastic import decisions
from farandole.elastic.driver import Driver
from farandole.elastic.reunion import Reunion
from farandole.launch import discovery, early, environment, failure
from farandole.launch.job import Job
from farandole.launch.task import Task

WHY = "elastic/failure"
"""Where in the store it is said why the job has failed."""


class ElasticJob(Job):
    """See the module."""

    def __init__(self, task: Task, agent: early.Agent, store: LocalStore) -> None:
        super().__init__(task, agent, store)
        if task.elastic is None:
            raise FarandoleBug("This task is not elastic.")
        self._elastic = task.elastic
        self._driver = Driver(self._elastic.policy, store, self, self._wake, self._reunion())
        self._spawns: list[decisions.Spawn] = []
        """Decided, and not sent yet."""
        self._found: deque[dict[str, int] | str] = deque()
        """From the thread that looks for hosts: the hosts of now, or a complaint."""
        self._watch: discovery.Watch | None = None
        self._failed = False

    def _reunion(self) -> Reunion | None:
        """What the driver waits for in the beginning: nothing outlives this one."""
        return None

    def close(self) -> None:
        """See :class:`Job`."""
        if self._watch is not None:
            self._watch.close()
        super().close()

    # ---- the driver's hands

    def spawn(self, spawn: decisions.Spawn) -> None:
        """See :class:`~farandole.elastic.driver.Hands`."""
        self._expect(spawn.number)
        self._spawns.append(spawn)

    def kill(self, number: int, *, show: bool) -> None:
        """See :class:`~farandole.elastic.driver.Hands`."""
        self._channel.send("stack" if show else "end", rank=number)

    def say(self, text: str) -> None:
        """See :class:`~farandole.elastic.driver.Hands`."""
        self._say(text)

    def _expect(self, number: int) -> None:
        """One more process."""
        self._verdict.expect(number)
        self._screen.expect(number)
        self._open_log(number)

    # ---- the loop

    def _is_over(self) -> bool:
        return self._verdict.over and (self._driver.over or self._is_ending)

    def _start(self) -> None:
        super()._start()
        self._set_hosts(self._elastic.first)
        self._send_spawns()
        if self._elastic.discovery.changes:
            tell = self._on_found
            self._watch = discovery.Watch(self._elastic.discovery, self._elastic.first, tell, tell)

    def _on_found(self, found: dict[str, int] | str) -> None:
        """In the thread that looks for hosts."""
        self._found.append(found)
        self._wake()

    def _patience(self) -> float | None:
        due = self._driver.next_due(self._now())
        patience = super()._patience()
        if due is None:
            return patience
        wait = max(0.0, due - self._now())
        return wait if patience is None else min(wait, patience)

    def _act(self) -> None:
        while self._found:
            found = self._found.popleft()
            if isinstance(found, str):
                self._say(f"farandole: {found}")
            else:
                self._set_hosts(found)
        if not self._is_ending:
            self._driver.pump(self._now())
            self._send_spawns()
            self._heed_failure()
        super()._act()

    def _set_hosts(self, slots: Mapping[str, int]) -> None:
        self._driver.hosts_are(slots, self._now())

    def _send_spawns(self) -> None:
        if not self._spawns:
            return
        spawns, self._spawns = self._spawns, []
        self._channel.send(
            "spawn",
            numbers=[each.number for each in spawns],
            ranks=[self._own_of(each) for each in spawns],
        )

    def _own_of(self, spawn: decisions.Spawn) -> dict[str, str]:
        slots = {"LOCAL_RANK": spawn.slot, "LOCAL_SIZE": spawn.slots}
        own = self._own(spawn.rank, spawn.size)
        own |= {f"{p}_{name}": str(n) for p in environment.PLACES for name, n in slots.items()}
        return own | {
            "LOCAL_RANK": str(spawn.slot),
            "LOCAL_WORLD_SIZE": str(spawn.slots),
            "FARANDOLE_WORKER": str(spawn.number),
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_HOSTNAME": spawn.host,
        }

    # ---- fates

    def _on_fate(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        if kind == "report":
            self._verdict.note_report(rank, fields)
            return
        if kind == "frozen":
            self._say(
                f"farandole: {self._name(rank)} has been frozen for {fields['seconds']:.0f} s "
                f"(process state {fields['state']}); it is ended."
            )
            self.kill(rank, show=False)
            # What hangs in the kernel may not die of it for long; nobody waits for that.
            self._settle(rank, -signal.SIGKILL)
            return
        code = int(fields["code"]) if kind == "exited" else 127 if kind == "unstarted" else 1
        self._verdict.note_exit(rank, code)
        if self._is_ending:
            return
        report = self._verdict.ranks[rank].report
        victim = report is not None and report["victim"]  # of a loss that was told of already
        expected = victim or self._driver.expects_end_of(rank)
        if code != 0 and not self._failed and not expected:
            self._say(f"farandole: {self._name(rank)} {self._how(rank, code, fields)}.")
        self._settle(rank, code)

    def _settle(self, number: int, code: int) -> None:
        """Have the driver decide what the end of a process means."""
        self._driver.exited(number, code, self._now())
        self._send_spawns()
        self._heed_failure()

    def _how(self, number: int, code: int, fields: dict[str, Any]) -> str:
        report = self._verdict.ranks[number].report
        if "why" in fields:
            return str(fields["why"])
        if report is not None:
            said = report["text"].partition("\n")[0][:200].rstrip(".")
            return f"raised {report['exception']}: {said}"
        return failure.by_code(code)

    def _name(self, number: int) -> str:
        """What a process is called: its rank of now, and its number where that differs."""
        world: World | None = self._driver.world
        if world is None or number not in world.members:
            return f"process {number}"
        rank = world.rank_of(number)
        return f"rank {rank}" if rank == number else f"rank {rank} (process {number})"

    def _named(self, ranks: Sequence[int]) -> str:
        """Numbers of processes: as ranks where they are the same, else said to be none."""
        if len(ranks) == 1:
            return self._name(ranks[0])
        if all(self._name(number) == f"rank {number}" for number in ranks):
            return describe_ranks(ranks)
        return f"processes {', '.join(map(str, sorted(ranks)))}"

    def _heed_failure(self) -> None:
        failed = self._driver.failure
        if failed is None or self._failed:
            return
        self._failed = True
        if failed.culprit is None:
            self._verdict.call_off(self._now())
        else:
            self._verdict.condemn(failed.culprit, self._now())

    def _conclude(self) -> int:
        code = super()._conclude()
        failed = self._driver.failure
        if failed is None:
            return code
        self._say(f"farandole: {failed.why}")
        self._store.set(WHY, failed.why.encode())
        self._flush()
        return code or 1

    def _on_user_signal(self, number: int) -> None:
        self._driver.stop()
        super()._on_user_signal(number)
