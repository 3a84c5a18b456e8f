"""The job loop of an elastic job in a pod: its hosts are the pods that are there.

When it dies its own pod's ranks die with it, and the others go on. Its replacement takes them over:
see :mod:`farandole.elastic.reunion`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from farandole.elastic.reunion import Reunion
from farandole.launch.channel import Message
from farandole.launch.elastic import ElasticJob
from farandole.launch.elastic_arrivals import REUNITED
from farandole.launch.failure import Failure
from farandole.launch.pod_job import PodJob
from farandole.launch.verdict import Rank


class ElasticPodJob(PodJob, ElasticJob):
    """See :mod:`farandole.launch.pod_job` for what its exit codes say."""

    def _reunion(self) -> Reunion | None:
        (own,) = self._elastic.first
        meeting = self._task.meeting
        return Reunion(
            began=self._now(),
            own=own,
            most_hosts=len(self._task.hosts),
            replaces=meeting is not None and meeting.replaces,
        )

    def _act(self) -> None:
        awaiting = self._driver.reunion is not None
        super()._act()
        if awaiting and self._driver.reunion is None:
            self._channel.send(REUNITED)

    def _expect(self, number: int) -> None:
        """Those before it that are not known here were an earlier job loop's, and are dead."""
        for lost in range(len(self._verdict.ranks), number):
            super()._expect(lost)
            self._verdict.note_exit(lost, -signal.SIGKILL)
        super()._expect(number)

    def _on_returned(self, host: str, running: Iterable[tuple[int, int]], well: list[int]) -> None:
        reunion = self._driver.reunion
        if reunion is None:
            return
        slots = dict(running)
        for number in sorted(slots):
            if number < len(self._verdict.ranks):
                self._verdict.ranks[number] = Rank(number)
            else:
                self._expect(number)
        reunion.on_host(host, slots, tuple(well))

    def _on_message(self, message: Message) -> None:
        if message.kind == "returned":
            self._on_returned(**message.fields)
        elif message.kind == "hosts":
            if not self._is_ending:
                self._set_hosts(message.fields["slots"])
                self._send_spawns()
        else:
            super()._on_message(message)

    def _set_hosts(self, slots: Mapping[str, int]) -> None:
        """Whoever comes has the secret, so all may take part."""
        self._driver.hosts_are(slots, self._now())

    def _cannot_run(self, cause: Failure) -> bool:
        return self._driver.world is None and super()._cannot_run(cause)
