"""What each rank of a benchmark runs: ``python -m farandole.bench.ranks FOLDER``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from farandole.bench import collectives, steps
from farandole.bench.seats import Seats

BENCHMARKS: dict[str, Callable[[Seats, dict[str, Any]], Any]] = {
    "collectives": collectives.measure,
    "step": steps.measure,
}


def main() -> None:
    """Carry out what ``request.json`` in the folder asks for; rank 0 writes ``result.json``."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    torch.set_num_threads(1)
    with Seats() as seats:
        result = BENCHMARKS[request["benchmark"]](seats, request["options"])
    if seats.rank == 0:
        draft = folder / "result.part"
        draft.write_text(json.dumps(result))
        draft.replace(folder / "result.json")


if __name__ == "__main__":
    main()
