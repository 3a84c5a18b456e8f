"""Sparse gradients of one optimizer: only the rows that some rank touched travel.

Each rank's rows go to all ranks, on the named path, since their number differs from pass to pass;
the result has all of them, each index once. It is made when the pass ends, with one collective for
all of the optimizer's sparse gradients on a device.

What is said in :mod:`farandole.comm.fusion.reducer` about a second pass over reduced gradients
holds here too.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from farandole.comm.group import Group
from farandole.comm.handle import Handle
from farandole.comm.ops import Op


def is_sparse(gradient: Tensor | None) -> bool:
    """Whether it is one that this module is about."""
    return gradient is not None and gradient.layout is torch.sparse_coo


def topic_of(channel: str) -> str:
    """What the first agreement on a plan is about."""
    return f"sparse/{channel}"


def agree_on_sparse(
    group: Group, channel: str, label: str, members: Sequence[Tensor]
) -> dict[int, int]:
    """The members whose gradient is sparse on some rank, by place, with its sparse dimensions."""
    mine = {
        place: each.grad.sparse_dim()
        for place, each in enumerate(members)
        if each.grad is not None and is_sparse(each.grad)
    }
    answers = group.agree(
        topic_of(channel),
        json.dumps(mine).encode(),
        f"agreement on the parameters of {label}",
    )
    agreed: dict[int, int] = {}
    for answer in answers:
        for place, dims in json.loads(answer).items():
            if int(place) < len(members):
                agreed.setdefault(int(place), dims)
    return agreed


class SparseGradients:
    """The parameters whose gradients travel as rows; ``dims[i]`` sparse dimensions the i-th."""

    def __init__(
        self, group: Group, name: str, op: Op, parameters: Sequence[Tensor], dims: Sequence[int]
    ) -> None:
        self._group = group
        self._name = name
        self._op = op
        self._parameters = list(parameters)
        self._dims = list(dims)
        self._devices: dict[torch.device, list[int]] = {}
        for place, each in enumerate(parameters):
            self._devices.setdefault(each.device, []).append(place)
        self._results: dict[int, Tensor] = {}
        """``id`` of a parameter → what it was given as its reduced gradient."""
        self._flights: list[tuple[list[int], list[int], Handle[list[Tensor]]]] = []

    def undo_sum(self, parameter: Tensor) -> None:
        """More is about to be added to a result: with Sum, keep this rank's share of it."""
        result = self._results.pop(id(parameter), None)
        if result is not None and result is parameter.grad and self._op is Op.SUM:
            parameter.grad = result / self._group.size

    def undo_sums(self) -> None:
        """:meth:`undo_sum` for every parameter."""
        for parameter in self._parameters:
            self.undo_sum(parameter)

    def submit(self) -> None:
        """The pass is over: send. Does not wait."""
        for number, (device, places) in enumerate(self._devices.items()):
            indices, values, counts = [], [], []
            for place in places:
                parameter = self._parameters[place]
                self.undo_sum(parameter)
                rows = self._rows(parameter, self._dims[place])
                counts.append(-1 if rows is None else rows._nnz())
                if rows is None:
                    rows = _no_rows(parameter, self._dims[place])
                indices.append(rows._indices().t().contiguous())
                values.append(rows._values())
            count = torch.tensor([counts], device=device)
            handle = self._group.grouped_allgather_async(
                [count, *indices, *values], name=f"{self._name}.sparse.{number}"
            )
            self._flights.append((places, counts, handle))

    def _rows(self, parameter: Tensor, dims: int) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None:
            return None
        gradient = gradient.detach()
        if is_sparse(gradient) and gradient.sparse_dim() == dims:
            return gradient.coalesce()
        return gradient.to_dense().to_sparse(dims).coalesce()

    def collect(self, *, keep: bool) -> None:
        """Wait, and give every parameter the result; ``None`` where no rank had a gradient.

        Without ``keep`` the results are dropped.
        """
        flights, self._flights = self._flights, []
        for places, _, handle in flights:
            counts, *rest = handle.wait()
            if not keep:
                continue
            had = (counts >= 0).any(0).tolist()
            indices, values = rest[: len(places)], rest[len(places) :]
            for place, some, index, value in zip(places, had, indices, values, strict=True):
                parameter = self._parameters[place]
                parameter.grad = None
                if some:
                    parameter.grad = self._result(parameter, index, value)
                    self._results[id(parameter)] = parameter.grad

    def _result(self, parameter: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        rows = torch.sparse_coo_tensor(
            indices.t(), values, parameter.shape, check_invariants=False
        ).coalesce()
        return rows / self._group.size if self._op is Op.AVERAGE else rows


class SparseLook:
    """Gradients that came sparse and travel dense: the results look as those came."""

    def __init__(self) -> None:
        self._dims: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        """Sparse dimensions of a parameter's gradient."""
        self._results: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def note(self, parameter: Tensor, dims: int) -> None:
        """Gradients of ``parameter`` are sparse in ``dims`` dimensions."""
        self._dims[parameter] = dims

    def dress(self, parameter: Tensor, result: Tensor) -> Tensor:
        """``result`` as the gradient of ``parameter`` should look."""
        dims = self._dims.get(parameter) if self._dims else None  # a model has none, as a rule
        if dims is None:
            return result
        rows = self._results[parameter] = result.to_sparse(dims)
        return rows

    def undo_sum(self, parameter: Tensor, size: int) -> None:
        """If a result of a Sum is what ``parameter`` has, make it this rank's share of that."""
        result = self._results.pop(parameter, None)
        if result is not None and result is parameter.grad:
            parameter.grad = result / size


def _no_rows(parameter: Tensor, dims: int) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.empty(dims, 0, dtype=torch.long, device=parameter.device),
        parameter.new_empty(0, *parameter.shape[dims:]),
        parameter.shape,
        check_invariants=False,
    ).coalesce()
