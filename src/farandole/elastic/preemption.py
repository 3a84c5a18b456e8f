"""Leaving in good order: SIGTERM becomes a commit, a checkpoint, and exit code 143.

Machines that are taken away (spot instances, drained nodes) are announced by SIGTERM and a grace
period. Inside ``elastic.run`` a process that gets it goes on until the next commit; in the vote all
ranks hear of it, so all save the same step; then the processes that got the signal end. If a commit
does not come within the grace period, whoever sent the signal sends SIGKILL, and the last commit or
checkpoint counts.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

PREEMPTED = "preempted"
"""What a rank raises in the vote of a commit, once it got the signal."""

EXIT_CODE = 128 + signal.SIGTERM


class Notice:
    """Whether this process was told to end."""

    def __init__(self) -> None:
        self.given = False

    def listen(self) -> None:
        """Take SIGTERM as a notice from now on, unless the program handles it itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def ignore(self) -> None:
        """Let SIGTERM end the process again."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.given:
                # There was no commit after it: it is not to be lost.
                signal.raise_signal(signal.SIGTERM)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.given = True


notice = Notice()
"""This process's."""
