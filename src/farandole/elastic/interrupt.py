"""What ``commit()`` raises when the members of the job are to change."""

from __future__ import annotations


class HostsUpdatedInterrupt(RuntimeError):
    """The members change: the ranks meet again, and training goes on where it was.

    Raised by ``commit()`` and ``check_host_updates()``, on all ranks at the same one, for
    ``elastic.run`` to catch; nothing is rolled back. ``skip_sync``: nobody new comes, so states
    need not be compared.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The hosts of this job change; elastic.run goes on with those of now.")
        self.skip_sync = skip_sync
