"""The job loop of an elastic job in a pod: its hosts are the pods that are there."""

from __future__ import annotations

from collections.abc import Mapping

from farandole.launch.channel import Message
from farandole.launch.elastic import ElasticJob
from farandole.launch.failure import Failure
from farandole.launch.pod_job import PodJob


class ElasticPodJob(PodJob, ElasticJob):
    """See :mod:`farandole.launch.pod_job` for what its exit codes say."""

    def _on_message(self, message: Message) -> None:
        if message.kind == "hosts":
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
