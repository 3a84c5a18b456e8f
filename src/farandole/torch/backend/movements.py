"""The operations of a process group that move values as they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from farandole.core.errors import UsageError
from farandole.torch.backend import layout
from farandole.torch.backend.operations import Operations, Options
from farandole.torch.backend.work import CollectiveWork


class Movements(Operations):
    """From one rank to all, from all to one, from all to all."""

    def broadcast(self, tensors: Sequence[Tensor], opts: Options) -> CollectiveWork:
        """Replace the tensor by that of ``opts.rootRank``."""
        tensor = layout.single(tensors)
        buffer = layout.flat(tensor)
        return self._begin(
            "broadcast",
            [tensor],
            lambda engine: [engine.broadcast(buffer, opts.rootRank)],
            lambda: layout.deal(buffer, [tensor]),
            opts,
            f"from {opts.rootRank}",
        )

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options
    ) -> CollectiveWork:
        """Fill the list with the ranks' tensors, in rank order."""
        return self._gather_all(outputs, [layout.single(inputs)], opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options
    ) -> CollectiveWork:
        """:meth:`allgather` of each of ``inputs`` into its list of ``outputs``."""
        return self._gather_all(outputs, inputs, opts)

    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Options,
    ) -> CollectiveWork:
        """Fill ``output`` with the ranks' equal ``input``, one after the other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options
    ) -> CollectiveWork:
        """:meth:`all_gather_single` of each."""
        for output, source in zip(outputs, inputs, strict=True):
            layout.equal_parts(output, source, self.size())
        return self._gather_all([[output] for output in outputs], inputs, opts)

    def _gather_all(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options
    ) -> CollectiveWork:
        size = self.size()
        sources = [layout.flat(source) for source in inputs]
        results = [layout.target(each) for each in outputs]
        counts = [
            [output.numel() for output in each] if len(each) == size else [source.numel()] * size
            for each, source in zip(outputs, sources, strict=True)
        ]
        for each, source in zip(counts, sources, strict=True):
            if each[self.rank()] != source.numel():
                raise UsageError(
                    f"all_gather got {source.numel()} elements to send, and room for "
                    f"{each[self.rank()]} of rank {self.rank()}. Make the outputs as large as what "
                    "the ranks send."
                )

        def finish() -> None:
            for result, each in zip(results, outputs, strict=True):
                layout.deal(result, each)

        return self._begin(
            "all_gather",
            inputs,
            lambda engine: [
                engine.allgather(result, source, each)
                for result, source, each in zip(results, sources, counts, strict=True)
            ],
            finish,
            opts,
            outputs=[output for each in outputs for output in each],
        )

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options
    ) -> CollectiveWork:
        """Rank ``opts.rootRank`` gets the ranks' tensors as a list."""
        source, root = layout.single(inputs), opts.rootRank
        targets = list(outputs[0]) if self.rank() == root else []
        sent = [source.numel() if rank == root else 0 for rank in range(self.size())]
        return self._all_to_all("gather", targets, [source], sent, opts, f"to {root}")

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Options
    ) -> CollectiveWork:
        """Rank r gets the r-th tensor of the list that ``opts.rootRank`` has."""
        target, root = layout.single(outputs), opts.rootRank
        sources = list(inputs[0]) if self.rank() == root else []
        received = [target.numel() if rank == root else 0 for rank in range(self.size())]
        sent = [source.numel() for source in sources] or [0] * self.size()
        return self._all_to_all(
            "scatter", [target], sources, sent, opts, f"from {root}", received=received
        )

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options
    ) -> CollectiveWork:
        """Rank r gets the r-th tensor of every rank's list."""
        sent = [source.numel() for source in inputs]
        return self._all_to_all("all_to_all", outputs, inputs, sent, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Options,
    ) -> CollectiveWork:
        """Send ``input_splits[r]`` rows to rank r, receive ``output_splits[r]``; none: equally."""
        sent = layout.rows(input, input_splits, self.size())
        received = layout.rows(output, output_splits, self.size())
        return self._all_to_all("all_to_all", [output], [input], sent, opts, received=received)

    def _all_to_all(
        self,
        what: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        sent: Sequence[int],
        opts: Options,
        kind: str = "",
        received: Sequence[int] = (),
    ) -> CollectiveWork:
        like = [*inputs, *outputs][0]
        source = layout.joined(inputs) if inputs else like.new_empty(0)
        result = layout.target(outputs) if outputs else like.new_empty(0)
        counts = list(received) or [output.numel() for output in outputs] or [0] * self.size()
        return self._begin(
            what,
            [*inputs, *outputs],
            lambda engine: [engine.alltoall(result, source, counts, sent)],
            lambda: layout.deal(result, outputs),
            opts,
            kind,
            outputs,
            uneven=True,
        )

    def barrier(self, opts: Options) -> CollectiveWork:
        """Over when every rank has called it."""
        return self._begin("barrier", [], lambda engine: [engine.barrier()], layout.nothing, opts)

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
