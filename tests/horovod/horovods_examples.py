"""Horovod's elastic examples, run as they are on two ranks of which one is killed.

One needs nothing. Two would download pictures: they find small ones of ours where they look first.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

FOLDER = Path("examples", "elastic", "pytorch")
"""Of the examples, in a checkout."""

EXAMPLES: dict[str, tuple[int, str]] = {
    "pytorch_mnist_elastic.py": (3, "--no-cuda --epochs 2 --batch-size 16 --data-dir digits"),
    "pytorch_synthetic_benchmark_elastic.py": (
        3,
        "--no-cuda --model resnet18 --batch-size 2 --num-warmup-batches 2 "
        "--num-batches-per-iter 2 --num-iters 3",
    ),
    "pytorch_imagenet_resnet50_elastic.py": (
        1,
        "--no-cuda --epochs 1 --batch-size 2 --val-batch-size 2 --train-dir pictures "
        "--val-dir pictures",
    ),
}
"""Example → the optimizer's step after which rank 1 is killed, and arguments."""


def command(launch: list[str], name: str) -> list[str]:
    """The job, for a folder with the example and :func:`write_data`'s data in it."""
    step, arguments = EXAMPLES[name]
    elastic = ["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "600", "600"]
    return [*launch, *elastic, "--chaos", f"kill:rank=1@step={step}", name, *arguments.split()]


def write_data(folder: Path) -> None:
    """Digits in MNIST's format, and folders of pictures: noise, but of the right shape."""
    noise = random.Random(0)
    digits = folder / "digits" / "MNIST" / "raw"
    digits.mkdir(parents=True)
    for part, count in (("train", 160), ("t10k", 40)):
        images = struct.pack(">4I", 2051, count, 28, 28) + noise.randbytes(count * 28 * 28)
        labels = struct.pack(">2I", 2049, count) + bytes(n % 10 for n in range(count))
        (digits / f"{part}-images-idx3-ubyte").write_bytes(images)
        (digits / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    for label in ("cat", "dog"):
        pictures = folder / "pictures" / label
        pictures.mkdir(parents=True)
        for number in range(6):
            pixels = noise.randbytes(64 * 64 * 3)
            (pictures / f"{number}.ppm").write_bytes(b"P6 64 64 255\n" + pixels)
