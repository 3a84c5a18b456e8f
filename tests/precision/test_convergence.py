"""Training with compressed gradients ends where exact ones lead to: the digits example."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import farandole.torch as hvd
from farandole.testing.ranks import run_processes

pytest.importorskip("sklearn")
EXAMPLE = Path(__file__).parents[2] / "examples" / "torch" / "digits.py"
RANKS, BATCH = 2, 32
CODECS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
    "int8": hvd.Compression.int8,
    "powersgd": hvd.Compression.powersgd(rank=4),
    "topk": hvd.Compression.topk(ratio=0.05),
}


def accuracy(example, name: str, epochs: int, rank: int, seed: int) -> float:
    """Percent of the test images that the example's network gets right after training."""
    torch.manual_seed(seed)
    model = example.Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        model.named_parameters(),
        compression=CODECS[name],
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    images, labels = example.load(training=True).dataset.tensors
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed + 1 + rank)
    for _ in range(epochs):
        model.train()
        shuffled = torch.randperm(len(images), generator=order)
        for batch in shuffled.split(RANKS * BATCH)[:-1]:
            mine = batch[rank * BATCH : (rank + 1) * BATCH]
            optimizer.zero_grad()
            functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
        schedule.step()
    model.eval()
    images, labels = example.load(training=False).dataset.tensors
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).sum()
    return 100 * right.item() / len(labels)


def accuracies(names: list[str], epochs: int | None, seeds: Sequence[int]) -> dict[str, float]:
    """The mean over the seeds, since one image more or less is a quarter of a point."""

    def rank_function(rank: int) -> dict[str, float]:
        spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        hvd.init()
        result = {
            name: statistics.mean(
                accuracy(example, name, epochs or example.EPOCHS, rank, seed) for seed in seeds
            )
            for name in names
        }
        hvd.shutdown()
        return result

    first, second = run_processes(RANKS, rank_function, timeout=280)
    assert first == second
    return first


def test_powersgd_after_fewer_epochs():
    results = accuracies(["none", "powersgd"], epochs=8, seeds=[0])
    assert results["none"] > 96, results
    assert min(results.values()) > results["none"] - 1, results


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_after_as_many_as_the_example_takes():
    results = accuracies(list(CODECS), epochs=None, seeds=[0, 10, 20])
    assert results["none"] > 97, results
    assert min(results.values()) > results["none"] - 1, results
