"""What Chrome and Perfetto expect of a trace file, as a check."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The records of a file that must be valid now."""
    return check(json.loads(path.read_text()))


def check(records: list[Record]) -> list[Record]:
    """Fields, nesting and order of a trace; unfinished spans are allowed at the end of a row."""
    assert isinstance(records, list)
    open_spans: dict[tuple[int, int], list[str]] = defaultdict(list)
    latest: dict[tuple[int, int], float] = defaultdict(float)
    named: set[tuple[int, int]] = set()
    for record in records:
        assert {"name", "ph", "pid", "tid"} <= set(record), record
        row = (record["pid"], record["tid"])
        assert all(type(number) is int and number >= 0 for number in row), record
        assert isinstance(record["name"], str)
        assert record["name"]
        if record["ph"] == "M":
            assert isinstance(record["args"], dict)
            if record["name"] == "thread_name":
                assert row not in named, f"{record} introduces a row twice"
                named.add(row)
            continue
        assert row in named, f"{record} lies in a row without a name"
        assert isinstance(record["ts"], (int, float))
        assert record["ts"] >= latest[row], f"{record} goes back in time"
        latest[row] = record["ts"]
        spans = open_spans[row]
        if record["ph"] == "B":
            spans.append(record["name"])
        elif record["ph"] == "E":
            assert spans, f"{record} ends what has not begun"
            assert spans.pop() == record["name"], f"{record} ends another span"
        elif record["ph"] == "X":
            assert record["dur"] >= 0
            assert not spans, f"{record} overlaps {spans}"
            latest[row] += record["dur"] - 0.0005  # as far as microseconds are rounded
        else:
            assert record["ph"] == "i", record
            assert record["s"] in "gpt"
    introduced = {r["pid"] for r in records if r["name"] == "process_name"}
    assert {pid for pid, _ in named} <= introduced
    return records


def unfinished(records: list[Record]) -> list[tuple[int, str]]:
    """The spans that have no end: rank and name, the outer ones first."""
    left: dict[tuple[int, int], list[str]] = defaultdict(list)
    for record in records:
        if record["ph"] == "B":
            left[record["pid"], record["tid"]].append(record["name"])
        elif record["ph"] == "E":
            left[record["pid"], record["tid"]].pop()
    return [(pid, name) for (pid, _), names in left.items() for name in names]


def rows(records: list[Record], rank: int) -> dict[str, list[Record]]:
    """A rank's records by the title of their row."""
    titles = {
        r["tid"]: r["args"]["name"]
        for r in records
        if r["name"] == "thread_name" and r["pid"] == rank
    }
    found: dict[str, list[Record]] = {title: [] for title in titles.values()}
    for record in records:
        if record["pid"] == rank and record["ph"] != "M":
            found[titles[record["tid"]]].append(record)
    return found
