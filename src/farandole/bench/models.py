"""The models whose training steps are timed, and what a step is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A pre-norm transformer layer of width ``dim``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_bld: torch.Tensor) -> torch.Tensor:
        """``(batch, length, dim)`` to the same."""
        b, length, d = x_bld.shape
        qkv = self.qkv(self.norm1(x_bld)).view(b, length, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_bld = x_bld + self.out(mixed.transpose(1, 2).reshape(b, length, d))
        fed: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x_bld))))
        return x_bld + fed


class Transformer(nn.Module):
    """A causal language model: 6 layers, width 320, 2,000 tokens."""

    tokens, length, dim = 2000, 64, 320

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.tokens, self.dim)
        self.place = nn.Parameter(0.02 * torch.randn(self.length, self.dim))
        self.blocks = nn.Sequential(*(Block(self.dim, heads=5) for _ in range(6)))
        self.norm = nn.LayerNorm(self.dim)
        self.head = nn.Linear(self.dim, self.tokens)

    def forward(self, tokens_bl: torch.Tensor) -> torch.Tensor:
        """``(batch, length)`` tokens to ``(batch, tokens, length)`` scores."""
        hidden = self.blocks(self.embed(tokens_bl) + self.place)
        scores: torch.Tensor = self.head(self.norm(hidden))
        return scores.transpose(1, 2)

    @classmethod
    def batch(cls) -> tuple[torch.Tensor, torch.Tensor]:
        """Two random texts and their continuations."""
        tokens = torch.randint(cls.tokens, (2, cls.length + 1))
        return tokens[:, :-1], tokens[:, 1:]


class Residual(nn.Module):
    """Two 3 x 3 convolutions and the way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, inputs, height, width)`` to ``(batch, outputs, height/stride, ...)``."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.around(x))


class ResNet18(nn.Sequential):
    """ResNet-18 with the stem for images of 32 pixels and 10 classes."""

    def __init__(self) -> None:
        widths = (64, 64, 128, 256, 512)
        layers = [
            block
            for number, (inputs, outputs) in enumerate(itertools.pairwise(widths))
            for block in (
                Residual(inputs, outputs, stride=1 if number == 0 else 2),
                Residual(outputs, outputs, stride=1),
            )
        ]
        super().__init__(
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            *layers,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    @classmethod
    def batch(cls) -> tuple[torch.Tensor, torch.Tensor]:
        """Two random images and labels."""
        return torch.randn(2, 3, 32, 32), torch.randint(10, (2,))


MODELS: dict[str, Any] = {"transformer": Transformer, "resnet18": ResNet18}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, for each of the systems."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], None]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """What is measured: one step of training on a batch."""

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss: Any = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()

    return step


def make_model(kind: Any) -> nn.Module:
    """A new model, with the same parameters each time."""
    torch.manual_seed(0)
    model: nn.Module = kind()
    return model
