"""Plots of comparisons."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from farandole.bench import plot
from farandole.bench.compare import Case, Comparison
from farandole.core.errors import MissingExtraError

SERIES = {"shm": [1e-4, 2e-4, 3e-4], "gloo": [1e-3, 2e-3, 3e-3], "copy": [5e-5, 5e-5, 6e-5]}


def test_without_matplotlib_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'farandole\[plot\]'"):
        plot.require()


@pytest.mark.parametrize("sized", [True, False])
def test_a_panel_for_each_number_of_ranks(tmp_path: Path, sized: bool) -> None:
    pytest.importorskip("matplotlib")
    widths = []
    for counts in ([2], [2, 4]):
        cases = [
            Case(ranks, "allreduce" if sized else what, size if sized else None, SERIES, {})
            for ranks in counts
            for what, size in (("transformer", 4096), ("resnet18", 1 << 20))
        ]
        file = tmp_path / f"{len(counts)}.png"
        plot.draw(Comparison("Test", cases), file)
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        widths.append(struct.unpack(">I", data[16:20])[0])
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.02)
