"""Which hosts an elastic job has now: fixed, by a file that changes, or by a script that is asked.

A script prints a host a line, with its slots (``node1:4``) or without. Its first failure ends the
job, since it will hardly have worked by chance; later ones change nothing and are told.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from farandole.core.errors import FarandoleError, SetupError, UsageError
from farandole.launch import hosts as host_list

INTERVAL = 1.0
"""Seconds between two looks."""

_SCRIPT_LIMIT = 60.0
"""Seconds for the script to answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """Where to look. Exactly one of the first three is given."""

    fixed: tuple[host_list.Host, ...] = ()
    file: str | None = None
    """A host file, read again when it changes."""
    script: str | None = None
    slots_per_host: int | None = None
    """Of hosts that the script names without slots; ``None``: each must have a number."""

    interval: float = INTERVAL
    """Seconds between two looks."""

    @property
    def changes(self) -> bool:
        """Whether it is worth to look again."""
        return not self.fixed

    def look(self) -> dict[str, int]:
        """The hosts of now and their slots. Raises ``SetupError`` or ``UsageError``."""
        if self.fixed:
            return {each.name: each.slots for each in self.fixed}
        if self.file is not None:
            return {each.name: each.slots for each in host_list.read_file(self.file)}
        assert self.script is not None
        return self._parse(_ask(self.script))

    def _parse(self, text: str) -> dict[str, int]:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        found: dict[str, int] = {}
        for line in lines:
            (each,) = host_list.parse(line)
            numbered = line.endswith(f":{each.slots}")
            if not numbered and self.slots_per_host is None:
                raise UsageError(
                    f"--host-discovery-script {self.script} names {line!r} without slots: have it "
                    f"print `{line}:4`, or say --slots-per-host."
                )
            found[each.name] = each.slots if numbered else int(self.slots_per_host or 1)
        return found


class Watch:
    """Looks again and again, in a thread of its own, and tells of changes.

    ``tell`` gets what was found when it is new, ``complain`` a text when a look failed; both from
    that thread.
    """

    def __init__(
        self,
        discovery: Discovery,
        first: Mapping[str, int],
        tell: Callable[[dict[str, int]], None],
        complain: Callable[[str], None],
    ) -> None:
        self._discovery = discovery
        self._known = dict(first)
        self._tell = tell
        self._complain = complain
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _run(self) -> None:
        complained = ""
        while not self._ended.wait(self._discovery.interval):
            try:
                found = self._discovery.look()
            except FarandoleError as error:
                if error.message != complained:
                    complained = error.message
                    self._complain(f"{error.message} The hosts stay as they are.")
                continue
            complained = ""
            if found != self._known:
                self._known = found
                self._tell(found)


def _ask(script: str) -> str:
    try:
        answer = subprocess.run(
            [os.path.abspath(script) if os.path.exists(script) else script],
            capture_output=True, text=True, timeout=_SCRIPT_LIMIT, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"--host-discovery-script {script}: {error}.") from None
    if answer.returncode:
        words = answer.stderr.strip().splitlines()[-1:]
        said = f": {words[0]}" if words else ""
        raise SetupError(
            f"--host-discovery-script {script} ended with exit code {answer.returncode}{said}."
        )
    return answer.stdout
