"""From command to first allreduce done: ``farandole run`` against ``torchrun``.

    python bench/launch.py [--rounds 9] [--json]

Both start the same small script, which makes its group and sums one tensor over all ranks on the
CPU; theirs with ``torch.distributed`` and Gloo. The time ends when the last rank has its result.
The two take turns, and who goes first alternates, so that both meet the same noise of the machine.
A ratio is the median over the rounds of our time over theirs. ``--json`` prints one line at the
end: ``{"ratios": {"2 ranks": …, "4 ranks": …}, …}``. ``farandole bench launch`` measures the same.
"""

from __future__ import annotations

import argparse
import json

from farandole.bench import compare

SIZES = (2, 4)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="launches of each, per size")
    parser.add_argument("--json", action="store_true", help="print the figures as one line")
    options = parser.parse_args()
    found = compare.launch(ranks=SIZES, rounds=options.rounds)
    print("\n".join(found.lines()))
    if options.json:
        figures = found.figures()
        ratios = figures["ratios"].items()
        figures["ratios"] = {key.removeprefix("torchrun "): ratio for key, ratio in ratios}
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
