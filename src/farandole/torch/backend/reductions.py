"""The operations of a process group that combine the ranks' values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from farandole.comm.engines.base import Engine, Work
from farandole.torch.backend import layout
from farandole.torch.backend.combination import Combination, combination
from farandole.torch.backend.operations import Operations, Options
from farandole.torch.backend.work import CollectiveWork


class Reductions(Operations):
    """All ranks' tensors, combined: all of it for all, for one, or a part for each."""

    def allreduce(self, tensors: Sequence[Tensor], opts: Options) -> Any:
        """Replace the tensor by that of all ranks, combined."""
        tensor = layout.single(tensors)
        if tensor.is_sparse:
            return self._gloo.allreduce(list(tensors), opts)
        return self._reduce("allreduce", [tensor], opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Options) -> CollectiveWork:
        """:meth:`allreduce` of each of ``tensors``, together."""
        return self._reduce("allreduce", tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Options) -> CollectiveWork:
        """:meth:`allreduce`, whose result only ``opts.rootRank`` gets."""
        return self._reduce("reduce", [layout.single(tensors)], opts, root=opts.rootRank)

    def _reduce(
        self, what: str, tensors: Sequence[Tensor], opts: Options, root: int | None = None
    ) -> CollectiveWork:
        batches = [
            (batch, combination(opts.reduceOp, batch[0].dtype, self.size()))
            for batch in layout.by_dtype(tensors)
        ]
        buffers = [how.load(layout.joined(batch)) for batch, how in batches]
        if root is not None:  # the others keep what they have
            buffers = [buffer.clone() for buffer in buffers]
        results = list(buffers)

        def begin(engine: Engine) -> list[Work]:
            return [
                self._combined(engine, how, buffer, results, index)
                for index, ((_, how), buffer) in enumerate(zip(batches, buffers, strict=True))
            ]

        def finish() -> None:
            for (batch, how), result in zip(batches, results, strict=True):
                layout.deal(how.unload(how.combine(result) if how.combine else result), batch)

        wanted = root is None or root == self.rank()
        return self._begin(
            what, tensors, begin, finish if wanted else layout.nothing, opts, str(opts.reduceOp.op)
        )

    def _combined(
        self, engine: Engine, how: Combination, buffer: Tensor, results: list[Tensor], index: int
    ) -> Work:
        """Reduce ``buffer`` in place, or gather all ranks' rows into ``results[index]``."""
        if how.combine is None:
            return engine.allreduce(buffer, how.reduction)
        results[index] = rows = buffer.new_empty((self.size(), buffer.numel()))
        return engine.allgather(rows.view(-1), buffer, [buffer.numel()] * self.size())

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Options,
    ) -> CollectiveWork:
        """Leave this rank's equal part of the combined inputs in ``output``."""
        counts = layout.equal_parts(input, output, self.size())
        return self._scatter_reduced([output], [input], [counts], opts)

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Options,
    ) -> CollectiveWork:
        """Rank r gets the combined r-th tensors of the ranks' lists."""
        pieces = inputs[0]
        counts = [piece.numel() for piece in pieces]
        return self._scatter_reduced(
            [layout.single(outputs)], [layout.joined(pieces)], [counts], opts
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options
    ) -> CollectiveWork:
        """:meth:`reduce_scatter_single` of each."""
        counts = [
            layout.equal_parts(source, output, self.size())
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return self._scatter_reduced(outputs, inputs, counts, opts)

    def _scatter_reduced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        counts: Sequence[Sequence[int]],
        opts: Options,
    ) -> CollectiveWork:
        rank, size = self.rank(), self.size()
        hows = [combination(opts.reduceOp, source.dtype, size) for source in inputs]
        sources = [how.load(layout.flat(each)) for how, each in zip(hows, inputs, strict=True)]
        parts = [
            [how.carrier.width * count for count in each]
            for how, each in zip(hows, counts, strict=True)
        ]
        results: list[Tensor] = []

        def begin(engine: Engine) -> list[Work]:
            works = []
            for how, source, part in zip(hows, sources, parts, strict=True):
                if how.combine is None:
                    results.append(source.new_empty(part[rank]))
                    works.append(engine.reducescatter(results[-1], source, part, how.reduction))
                else:
                    results.append(source.new_empty((size, source.numel())))
                    every = [source.numel()] * size
                    works.append(engine.allgather(results[-1].view(-1), source, every))
            return works

        def finish() -> None:
            for how, output, part, result in zip(hows, outputs, parts, results, strict=True):
                if how.combine is not None:
                    result = how.combine(result).split_with_sizes(part)[rank]
                layout.deal(how.unload(result), [output])

        kind = str(opts.reduceOp.op)
        return self._begin("reduce_scatter", inputs, begin, finish, opts, kind, outputs)

    # The names of torch before 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
