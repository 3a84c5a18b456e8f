"""The log of a search: a JSON object a line, the choice in the last one, and reading that again.

::

    {"job": "3f0a…", "start": {"bucket_bytes": 65536, …}}
    {"trial": 1, "seconds": 0.0413, "setting": {"bucket_bytes": 65536, …}}
    …
    {"job": "3f0a…", "chosen": {"bucket_bytes": 4194304, …}}

``job`` says what the choice was made for: it is used again for the same only.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from farandole.core.errors import UsageError
from farandole.tune.search import Setting
from farandole.tune.session import Trial

_log = logging.getLogger(__name__)


def read_choice(path: str, job: str) -> Setting | None:
    """What was chosen for ``job`` in the log ``path``; ``None`` if nothing was, or no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"The autotune log {path!r} cannot be read: {error}") from None
    try:
        last = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None  # it was cut off, or is not ours
    if not isinstance(last, dict) or last.get("job") != job:
        return None
    chosen = last.get("chosen")
    return chosen if isinstance(chosen, dict) else None


class Record:
    """Writes a log, line by line as things happen. Takes the place of what was in the file."""

    def __init__(self, path: str, job: str, start: Setting) -> None:
        self._path = Path(path)
        self._job = job
        try:
            self._path.write_text("", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"The autotune log {path!r} cannot be written: {error}") from None
        self._write({"job": job, "start": start})

    def trial(self, trial: Trial) -> None:
        """A trial is over."""
        self._write(
            {"trial": trial.number, "seconds": round(trial.seconds, 6), "setting": trial.setting}
        )

    def choice(self, chosen: Setting) -> None:
        """The search is over."""
        self._write({"job": self._job, "chosen": chosen})

    def _write(self, row: dict[str, object]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # a full disk is no reason to end a training
            _log.warning("The autotune log %s cannot be written: %s", self._path, error)
