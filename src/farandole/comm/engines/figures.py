"""What was measured between hosts, and what follows from it; kept for each user of a machine.

No torch: ``farandole doctor`` reads it too. The file is a cache: whatever is wrong with it, it
counts as empty, and what is lost is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farandole.core import config

MOST = 32
"""So many sets of figures are kept, the latest."""

STAGES = 1
"""Counts up when the stages change so that older figures say little about them."""

_log = logging.getLogger("farandole.engines")


@dataclass(frozen=True)
class Figures:
    """How long an allreduce took between certain ranks, by stages and flat."""

    layout: str
    """For people, as in ``2 + 2 ranks, cpu``."""
    sizes: tuple[int, ...]
    """Bytes, ascending."""
    stages: tuple[float, ...]
    """Seconds, for each size."""
    flat: tuple[float, ...]
    """Seconds, for each size."""
    cut_short: bool
    """Whether there was no time for larger sizes: the network is slow."""

    @property
    def pays_from(self) -> int | None:
        """From how many bytes on stages pay; ``None``: never.

        From the smallest size after which they were faster at each. If even the largest was no
        gain, they pay beyond it only where the network is so slow that larger sizes were not
        tried: then bytes are all that counts, and stages send fewer of them.
        """
        found = 2 * self.sizes[-1] if self.cut_short else None
        for size, stages, flat in reversed(
            list(zip(self.sizes, self.stages, self.flat, strict=True))
        ):
            if stages >= flat:
                break
            found = size
        return found


def key_of(hosts: Sequence[str], device: str, version: str) -> str:
    """What figures hold for: ``hosts`` (of each rank), the device, and torch's ``version``."""
    said = json.dumps([STAGES, list(hosts), device, version])
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def layout_text(ranks: Sequence[int], device: str) -> str:
    """So many ``ranks`` on each host, for people."""
    if len(set(ranks)) == 1:
        return f"{len(ranks)} hosts x {ranks[0]} ranks, {device}"
    return f"{' + '.join(map(str, ranks))} ranks, {device}"


def file() -> Path | None:
    """Where figures are kept, ``None`` if nowhere."""
    folder = config.cache_folder()
    return None if folder is None else folder / "engines.json"


def load() -> dict[str, Figures]:
    """All figures that are kept, oldest first."""
    path = file()
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.info("%s cannot be read (%s): engines are measured anew.", path, error)
        return {}
    entries = content if isinstance(content, dict) else {}
    read = {key: _read(entry) for key, entry in entries.items()}
    return {key: figures for key, figures in read.items() if figures is not None}


def keep(key: str, figures: Figures) -> None:
    """Add ``figures`` to those that are kept; where that cannot be, they are measured again."""
    path = file()
    if path is None:
        return
    kept = load()
    kept.pop(key, None)
    kept[key] = figures
    latest = {each: asdict(kept[each]) for each in list(kept)[-MOST:]}
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(latest), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        _log.info("What was measured cannot be kept in %s: %s.", path, error)


def _read(entry: Any) -> Figures | None:
    """The figures in ``entry`` if that is what it holds."""
    if not isinstance(entry, Mapping):
        return None
    layout, cut_short = entry.get("layout"), entry.get("cut_short")
    sizes, stages, flat = (_numbers(entry.get(name)) for name in ("sizes", "stages", "flat"))
    lengths = {len(sizes), len(stages), len(flat)}
    if len(lengths) > 1 or not sizes or not isinstance(layout, str):
        return None
    if not isinstance(cut_short, bool):
        return None
    return Figures(layout, tuple(map(int, sizes)), stages, flat, cut_short)


def _numbers(value: Any) -> tuple[float, ...]:
    numbers = value if isinstance(value, list) else []
    fine = all(
        isinstance(each, (int, float)) and math.isfinite(each) and each > 0 for each in numbers
    )
    return tuple(numbers) if fine else ()
