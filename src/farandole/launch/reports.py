"""The table at the end of a job, from what each rank has left in the store."""

from __future__ import annotations

import json

from farandole.core.store import Store
from farandole.monitor import report


def table(store: Store, size: int) -> str:
    """How each rank's time divides; empty when no rank has measured anything."""
    left = {rank: store.peek(f"report/{rank}") for rank in range(size)}
    found = {rank: json.loads(text) for rank, text in left.items() if text is not None}
    return report.render(found) if found else ""
