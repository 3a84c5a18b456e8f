"""What the tests of the torch front share: small models, data, and single-process training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 6
BATCH = 8  # of all ranks together

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "adamw": adamw}


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """The same weights on all ranks, also when they are threads of one process."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(0.3 * values)
    return module


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Convolution in channels_last, a plain part, a bias-free part."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(36, 16),
        nn.Tanh(),
        nn.Linear(16, 5),
    )
    return fill(model).to(dtype).to(memory_format=torch.channels_last)


def batches(
    count: int, dtype: torch.dtype = torch.float64, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(BATCH, 3, 8, 8, generator=random, dtype=torch.float64).to(dtype),
            torch.randint(5, (BATCH,), generator=random),
        )
        for _ in range(count)
    ]


def share(batch: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    """One rank's equal part of the global batch."""
    images, labels = batch
    return images.chunk(size)[rank], labels.chunk(size)[rank]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def train_alone(make: MakeOptimizer, dtype: torch.dtype, passes: int) -> list[Tensor]:
    """One process with the global batches; gradients of ``passes`` batches are summed."""
    model = make_model(dtype)
    optimizer = make(model.parameters())
    for number, batch in enumerate(batches(STEPS * passes, dtype)):
        loss_of(model, batch).backward()
        if (number + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal_bits(results: list[Any]) -> None:
    """All ranks have bitwise the same tensors."""
    first, *others = results
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert torch.equal(ours, theirs)
