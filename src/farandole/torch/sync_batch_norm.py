"""Batch normalisation over the batches of all ranks.

Shapes: x is (N, C, *); n is the number of values a channel on this rank, M on all ranks together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's custom
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from farandole.comm import group as groups
from farandole.torch import program
from farandole.torch.differentiable import record


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm`` whose statistics in training are those of all ranks' batches.

    Takes (N, C, *) with any floating dtype, on the CPU or a GPU; N may differ between ranks, and be
    0 on some. In training, results and gradients are those of one process with the whole batch (up
    to rounding); in evaluation it communicates nothing. All ranks must run their layers in the same
    order, and train or evaluate together; ``MismatchError`` says so on every rank otherwise.

    Arguments as in torch: ``momentum=None`` is the cumulative average, without
    ``track_running_stats`` evaluation uses the batch's statistics too.

    Raises ``ValueError`` for an input without channels, with other than ``num_features`` of them,
    or with a single value a channel on all ranks together, and ``NotInitializedError``, when
    training, before ``init()``.

    Example::

        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3), hvd.SyncBatchNorm(16), torch.nn.ReLU()
        )
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self._ref: groups.GroupRef | None = None
        self._registered: tuple[groups.Group, int] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``; see the class."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        group = self._group() if uses_batch else None
        if group is None or group.size == 1:
            return super().forward(input)
        momentum = self._count_batch()
        result, mean, variance, count = record(
            _Normalise, input, self.weight, self.bias, self.eps, group, self._sender(group)
        )
        if self.training and self.running_mean is not None:
            self._track(mean, variance, count, momentum)
        normalised: Tensor = result
        return normalised

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels in dimension 1, got {input.shape[1]}"
            )

    def _group(self) -> groups.Group:
        if self._ref is None:
            self._ref = groups.root()
        return self._ref.current

    def _sender(self, group: groups.Group) -> int:
        """This layer's number in the group, agreed on in its first forward pass."""
        if self._registered is None or self._registered[0] is not group:
            channel = program.channel_of(group)
            what = f"SyncBatchNorm({self.num_features}), layer {len(channel.senders)}"
            number = channel.register(group, what, 2 * self.num_features + 1)
            self._registered = (group, number)
        return self._registered[1]

    def _count_batch(self) -> float:
        """Count this batch; the weight that it gets in the running statistics."""
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor, momentum: float) -> None:
        unbiased = variance * (count / (count - 1))
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ref": None, "_registered": None}


class _Normalise(torch.autograd.Function):
    """The result, and the mean and variance (float64, (C,)) and count of all ranks' batches."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: groups.Group,
        sender: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Exchange each rank's count, mean and sum of squared deviations; combine (Chan et al.)."""
        channels = x.shape[1]
        mine = _statistics(x)
        rows = program.channel_of(group).allgather(group, sender, mine)
        counts, means, squares = torch.split(rows, [1, channels, channels], dim=1)
        count = counts.sum()
        if x.numel() <= channels and count.item() <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, on all ranks together; "
                f"got input size {tuple(x.shape)} on this rank"
            )
        mean = (counts * means).sum(0) / count
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        dtype = _computed_in(x)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean.to(dtype), scale.to(dtype), count)
        ctx.group, ctx.sender = group, sender
        ctx.mark_non_differentiable(mean, variance, count)
        result = F.batch_norm(
            x,
            mean.to(dtype),
            variance.to(dtype),
            None if weight is None else weight.to(dtype),
            None if bias is None else bias.to(dtype),
            training=False,
            eps=eps,
        )
        return result, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange each rank's sums over dy and dy·(x - mean)."""
        x, weight, mean, scale, count = ctx.saved_tensors
        channels = x.shape[1]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, channels] + [1] * (x.dim() - 2)
        dy = gradient.to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        sum_dy = dy.sum(dims)
        sum_dy_centred = (dy * centred).sum(dims)
        mine = torch.cat([sum_dy, sum_dy_centred]).double()
        rows = program.channel_of(ctx.group).allgather(ctx.group, ctx.sender, mine)
        means = (rows.sum(0) / count).to(mean.dtype)
        mean_dy, mean_dy_centred = means[:channels], means[channels:]
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        slope = (mean_dy_centred * scale.square()).view(shape)
        dx = (dy - mean_dy.view(shape) - centred * slope) * factor.view(shape)
        d_weight = d_bias = None
        if weight is not None:
            d_weight = (sum_dy_centred * scale).to(weight.dtype)
            d_bias = sum_dy.to(weight.dtype)
        return dx.to(x.dtype), d_weight, d_bias, None, None, None


def _computed_in(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _statistics(x: Tensor) -> Tensor:
    """(1 + 2 C,) in float64: n, the mean and the sum of squared deviations of each channel."""
    channels = x.shape[1]
    count = x.numel() // channels
    if count == 0:
        return torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(x.to(_computed_in(x)), dims, correction=0)
    counted = torch.full((1,), count, dtype=torch.float64, device=x.device)
    return torch.cat([counted, mean.double(), variance.double() * count])
