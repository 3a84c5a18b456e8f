"""Plain DistributedDataParallel on backend ``farandole`` against the same on Gloo.

    python bench/ddp_backend.py [--ranks 2] [--steps 100] [--json]

Both train copies of the same two models, a transformer of 9 M parameters and a ResNet-18 for images
of 32 pixels, with DistributedDataParallel's own settings, in one process a rank and on the same
batches; a third copy trains without communication. They take steps in turn, in rotated order; the
slowest rank's time counts, and a ratio is the median of the paired steps. ``--json`` prints the
figures as one line at the end: ``{"ratios": {"backend transformer 2 ranks": ...}, ...}``.
"""

from __future__ import annotations

import argparse
import json

from farandole.bench import compare

SYSTEMS = ("backend", "ddp", "local")


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="steps of each system")
    parser.add_argument("--model", action="append", choices=compare.MODELS, help="may be repeated")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    found = compare.steps(
        ranks=[options.ranks],
        systems=SYSTEMS,
        models=options.model or compare.MODELS,
        steps=options.steps,
    )
    print("\n".join(found.lines()))
    if options.json:
        print(json.dumps(found.figures()))


if __name__ == "__main__":
    main()
