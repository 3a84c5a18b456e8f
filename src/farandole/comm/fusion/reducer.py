"""Runs an agreed plan: gradients go into their buckets, buckets leave, results come back.

A *pass* is one reduction of everything in the plan. In it, every bucket leaves once: as soon as
its last gradient is there and the buckets before it have left. The last bucket leaves only with
:meth:`Reducer.flush`, since its tail says whether anything was added after its bucket had left.

Cost: one multiplication a gradient, which also scales it and moves it into the bucket. The result
is handed out as views of the bucket, so nothing is copied back.

Linearity makes a second pass over reduced gradients right: what is reduced already is the same on
all ranks, and the average of equal values is that value. Sums are divided by the number of ranks
first (``reduced_scale``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from farandole.comm.codec import Exchange
from farandole.comm.engines.base import REDUCIBLE, Engine, Reduction, Work
from farandole.comm.fusion.plan import GUARDS, BucketPlan, Plan
from farandole.core import events

OWN_REFERENCES = 2
"""To a view that nobody else has: its entry's, and that of the call which counts them."""

GradientOf = Callable[[int], Tensor | None]
WaitFor = Callable[[Work, int], None]
"""Blocks until the work of a bucket, by its number, is done; raises what it failed with."""


class Entry:
    """One parameter's place in its bucket, and what happened to it in this pass."""

    __slots__ = (
        "address",
        "bucket",
        "filled_in",
        "flag",
        "late",
        "place",
        "present",
        "reduced",
        "view",
    )

    def __init__(self, bucket: Bucket, place: Tensor, flag: int) -> None:
        self.bucket = bucket
        self.move(place)
        self.view = self.place.detach()
        """The same memory, to be handed out after a pass."""
        self.flag = flag
        """Where its flag lies in the bucket's buffer."""
        self.filled_in = 0
        """The last pass that had a gradient of this rank for it."""
        self.present = True
        """Whether any rank had one in the last pass."""
        self.reduced = False
        """Whether the view holds a result, and nothing of this rank's was added since."""
        self.late: Tensor | None = None
        """What came after the bucket had left."""

    def move(self, place: Tensor) -> None:
        """From now on its part of the bucket is ``place``, and the view is renewed after a pass."""
        self.place = place
        """Stays in here: whoever had it could point it elsewhere."""
        self.address = place.data_ptr()

    def result(self) -> Tensor | None:
        """The reduced gradient, or ``None`` when no rank had one."""
        return self.view if self.present else None


class Bucket:
    """One flat buffer with its tail."""

    __slots__ = (
        "all_present",
        "buffer",
        "entries",
        "exchange",
        "factor",
        "lane",
        "layouts",
        "left_at",
        "missing",
        "on_gpu",
        "plan",
        "storage",
        "tail",
        "tails",
        "uses",
        "work",
    )

    def __init__(
        self,
        plan: BucketPlan,
        dtype: torch.dtype,
        views: Sequence[Layout],
        lane: Lane,
        exchange: Exchange | None,
    ) -> None:
        self.plan = plan
        self.lane = lane
        self.layouts = views
        places = self._allocate(dtype)
        self.entries = [
            Entry(self, place, plan.payload + number) for number, place in enumerate(places)
        ]
        self.uses = self._count_uses()
        """How many tensors of ours share the memory."""
        self.tails = self._prepare_tails(dtype, lane.device)
        self.factor: Tensor | None = None
        """What gradients are multiplied by on their way in; ``None``: 1."""
        self.missing = len(self.entries)
        """How many gradients this rank does not have (yet)."""
        self.all_present = True
        """Whether the last pass had a gradient of some rank for every member."""
        self.work: Work | None = None
        self.left_at = 0.0
        self.on_gpu = self.buffer.is_cuda
        self.exchange = exchange

    def _allocate(self, dtype: torch.dtype) -> list[Tensor]:
        length, device = self.plan.length, self.lane.device
        if device.type == "cpu":
            self.buffer = self.lane.engine.buffer(length, dtype)
        else:  # the engine's own device may be another one of that type
            self.buffer = torch.zeros(length, dtype=dtype, device=device)
        self.storage = self.buffer.untyped_storage()
        self.tail = self.buffer[self.plan.payload :]
        return [
            self.buffer.as_strided(*layout, slot.offset)
            for slot, layout in zip(self.plan.slots, self.layouts, strict=True)
        ]

    def _count_uses(self) -> int:
        count: int = torch._C._storage_Use_Count(self.storage._cdata)  # type: ignore[attr-defined, unused-ignore]
        return count

    def spare_kept(self, gradient_of: GradientOf) -> None:
        """Take other memory if the script keeps a gradient of an earlier pass, or a view of it."""
        if self._count_uses() > self.uses or self._is_kept(gradient_of):
            for entry, place in zip(self.entries, self._allocate(self.buffer.dtype), strict=True):
                entry.move(place)

    def _is_kept(self, gradient_of: GradientOf) -> bool:
        """Whether somebody has a result that is not the gradient of its parameter any more."""
        return any(
            sys.getrefcount(entry.view) > OWN_REFERENCES
            and gradient_of(slot.index) is not entry.view
            for entry, slot in zip(self.entries, self.plan.slots, strict=True)
        )

    def _prepare_tails(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """A tail a step modulo :data:`GUARDS`, for when no gradient is missing."""
        flags = len(self.entries)
        tails = torch.zeros(GUARDS, flags + GUARDS + 1, dtype=dtype)
        tails[:, :flags] = 1
        for step in range(GUARDS):
            tails[step, flags + step] = 1
        return list(tails.to(device).unbind())

    def leave(self) -> Work:
        """Begin to sum the buffer over the ranks; complex numbers travel as pairs of reals."""
        engine = self.lane.engine
        if self.exchange is not None:
            return engine.sum_encoded(self.buffer, self.exchange)
        if self.buffer.dtype in REDUCIBLE:
            return engine.allreduce(self.buffer, Reduction.SUM)
        return engine.allreduce(torch.view_as_real(self.buffer).view(-1), Reduction.SUM)


class Guard:
    """Reads the first bucket's guard: at once on a CPU, a pass later on a GPU, to not stop it."""

    def __init__(self) -> None:
        self.differ = False
        self._counts: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def read(self, first: Bucket) -> None:
        """Look at a pass that has come back."""
        guard = first.buffer[first.plan.guard : first.plan.guard + GUARDS]
        if not guard.is_cuda:
            self.differ = int(guard.count_nonzero()) > 1
            return
        if self._counts is None or self._copied is None:
            self._counts = torch.empty(GUARDS, dtype=guard.dtype, pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        self._counts.copy_(guard, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(guard.device))

    def settle(self) -> None:
        """What a GPU still owes about the pass before."""
        if self._counts is not None and self._copied is not None:
            self._copied.synchronize()
            self.differ = int(self._counts.count_nonzero()) > 1


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and stride of a gradient."""


class Lane:
    """The buckets of one device; they leave in order through one engine."""

    __slots__ = ("buckets", "device", "engine", "next", "streams")

    def __init__(self, device: torch.device, engine: Engine) -> None:
        self.device = device
        self.engine = engine
        self.buckets: list[Bucket] = []
        self.next = 0
        self.streams: set[torch.cuda.Stream] = set()


def _factor(scale: float, dtype: torch.dtype) -> Tensor | None:
    """As a tensor on the CPU: a float would be made into one at each multiplication.

    Of the gradients' dtype where that is exact enough: it takes half the time of a conversion.
    """
    if scale == 1.0:
        return None
    exact = dtype if dtype in (torch.float32, torch.float64) else torch.float64
    return torch.tensor(scale, dtype=exact, device="cpu")


def _participants(bucket: Bucket) -> Tensor:
    """How many ranks had part in the pass that came back with ``bucket``."""
    guard = bucket.buffer[bucket.plan.guard : bucket.plan.guard + GUARDS]
    return (guard.real if guard.is_complex() else guard).sum()


class Reducer:
    """The state of one plan on this rank. Used by one thread at a time.

    ``engines`` and ``dtypes`` are looked up by the names that the plan uses for devices and
    dtypes. A result is ``post_scale`` times the sum of ``scale`` times each rank's gradient;
    ``reduced_scale`` takes the place of ``scale`` for a gradient that is a result already.
    ``exchanges`` has for each bucket what sums it in another form, or ``None``. ``average_over``,
    when it is not 0, is the number of ranks that ``scale`` divides by, to be corrected to the
    number of those that took part.
    """

    def __init__(
        self,
        plan: Plan,
        engines: Mapping[str, tuple[torch.device, Engine]],
        dtypes: Mapping[str, torch.dtype],
        *,
        scale: float,
        reduced_scale: float,
        post_scale: float = 1.0,
        exchanges: Sequence[Exchange | None] | None = None,
        average_over: int = 0,
    ) -> None:
        self.plan = plan
        self._average_over = average_over
        self._scale = scale
        self._share = reduced_scale / scale
        """What a result is multiplied by to become this rank's gradient again."""
        self._post_scale = post_scale
        self._lanes = {name: Lane(device, engine) for name, (device, engine) in engines.items()}
        self._buckets: list[Bucket] = []
        entries: dict[int, Entry] = {}
        chosen = exchanges or [None] * len(plan.buckets)
        for bucket_plan, exchange in zip(plan.buckets, chosen, strict=True):
            lane = self._lanes[bucket_plan.device]
            specs = [plan.parameters[slot.index] for slot in bucket_plan.slots]
            layouts = [(spec.shape, spec.stride) for spec in specs]
            bucket = Bucket(bucket_plan, dtypes[bucket_plan.dtype], layouts, lane, exchange)
            bucket.factor = _factor(scale, bucket.buffer.dtype)
            lane.buckets.append(bucket)
            self._buckets.append(bucket)
            entries.update(
                (slot.index, entry)
                for slot, entry in zip(bucket_plan.slots, bucket.entries, strict=True)
            )
        self.entries = [entries[index] for index in range(len(plan.parameters))]
        self._last = self._buckets[-1] if self._buckets else None
        self._step = 0
        self._pass = 0
        self._guard = Guard()
        self._late: list[Entry] = []
        """Those with something that came after their bucket had left."""
        self.adds_late = False
        """Whether gradients can come after their bucket has left: backward inside backward."""

    def begin(self, step: int) -> None:
        """Open a pass of step ``step``: nothing is filled, nothing has left."""
        self._guard.settle()
        self._step = step % GUARDS
        self._pass += 1
        for lane in self._lanes.values():
            lane.next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.entries)
            bucket.work = None

    def adopt(self, other: Reducer) -> None:
        """Take over where ``other`` is, a reducer of the same parameters that is between passes."""
        other._guard.settle()
        self._guard.differ = other._guard.differ
        self.adds_late = other.adds_late
        for mine, theirs in zip(self.entries, other.entries, strict=True):
            mine.present, mine.reduced = theirs.present, theirs.reduced
            if mine.present:
                mine.place.copy_(theirs.view)
        for bucket in self._buckets:
            bucket.all_present = all(entry.present for entry in bucket.entries)

    def spare_kept(self, gradient_of: GradientOf) -> None:
        """Before a pass: leave alone what the script keeps of the results of earlier ones.

        ``gradient_of(index)`` is what a parameter has for its gradient now.
        """
        for bucket in self._buckets:
            bucket.spare_kept(gradient_of)

    def put(self, index: int, gradient: Tensor) -> None:
        """Take this rank's gradient of a parameter; its bucket may leave.

        The caller gives the gradient away. A second one in the same pass is added to the first;
        after the bucket has left it is kept for another pass. ``gradient`` may be the view of an
        earlier pass with more added to it.
        """
        entry = self.entries[index]
        bucket = entry.bucket
        if bucket.work is not None:
            self._put_late(entry, gradient)
            return
        if entry.filled_in == self._pass:
            entry.place.add_(gradient, alpha=self._scale)
            return
        self._fill(entry, gradient)
        if bucket.on_gpu:
            bucket.lane.streams.add(torch.cuda.current_stream(bucket.lane.device))
        bucket.missing -= 1
        if not bucket.missing:
            self._advance(bucket.lane)

    def _put_late(self, entry: Entry, gradient: Tensor) -> None:
        if entry.late is None:
            entry.late = gradient
            self._late.append(entry)
        else:
            entry.late.add_(gradient)

    def _fill(self, entry: Entry, gradient: Tensor) -> None:
        entry.filled_in = self._pass
        factor = entry.bucket.factor
        if factor is not None:
            torch.mul(gradient, factor, out=entry.place)
        elif gradient.data_ptr() != entry.address:
            entry.place.copy_(gradient)

    def _advance(self, lane: Lane) -> None:
        """Let the complete buckets go whose predecessors have left, all but the plan's last."""
        buckets = lane.buckets
        while lane.next < len(buckets):
            bucket = buckets[lane.next]
            if bucket.missing or bucket is self._last:
                return
            bucket.tail.copy_(bucket.tails[self._step])
            self._leave(bucket)

    def _leave(self, bucket: Bucket) -> None:
        lane = bucket.lane
        lane.next += 1
        if lane.streams:
            current = torch.cuda.current_stream(lane.device)
            for stream in lane.streams:
                if stream != current:
                    current.wait_stream(stream)
        bucket.left_at = time.perf_counter()
        bucket.work = bucket.leave()
        if events.wanted(events.BucketLeft):
            events.emit(events.BucketLeft(f"bucket {bucket.plan.number}", bucket.left_at))

    def flush(self, gradient_of: GradientOf) -> None:
        """Let the rest go. ``gradient_of(index)`` is what there is for a parameter not put yet.

        A gradient that is the result of an earlier pass is contributed again; for ``None`` zeros
        are.
        """
        for bucket in self._buckets:
            if bucket.work is not None:
                continue
            self._complete(bucket, gradient_of)
            if bucket is self._last and self._late:
                bucket.tail[-1] = 1
            self._leave(bucket)

    def _complete(self, bucket: Bucket, gradient_of: GradientOf) -> None:
        bucket.tail.copy_(bucket.tails[self._step])
        if not bucket.missing:
            return
        for slot, entry in zip(bucket.plan.slots, bucket.entries, strict=True):
            if entry.filled_in == self._pass:
                continue
            gradient = gradient_of(slot.index)
            if gradient is None:
                entry.place.zero_()
                bucket.buffer[entry.flag] = 0
                continue
            if gradient is entry.view:
                self.divide(entry)
            bucket.missing -= 1
            self._fill(entry, gradient)

    def finish(self, wait_for: WaitFor) -> None:
        """Wait for every bucket, and reduce again what was added after its bucket had left.

        Afterwards each entry's ``view`` holds the result and ``present`` says whether any rank had
        a gradient.
        """
        self._collect(wait_for)
        while self._some_rank_added():
            for entry in self._late:
                assert entry.late is not None
                self.divide(entry)
                entry.view.add_(entry.late)
                entry.late = None
                entry.present = True
            self._late.clear()
            self.begin(self._step)
            self.flush(lambda index: self.entries[index].result())
            self._collect(wait_for)

    def abstain(self, wait_for: WaitFor) -> bool:
        """Run a pass in which this rank has no part; whether any rank had one.

        Everything that it sends is zero, guards and flags too.
        """
        self.begin(0)
        for bucket in self._buckets:
            bucket.buffer.zero_()
            self._leave(bucket)
        for bucket in self._buckets:
            assert bucket.work is not None
            wait_for(bucket.work, bucket.plan.number)
        return any(_participants(bucket) != 0 for bucket in self._buckets[:1])

    def _collect(self, wait_for: WaitFor) -> None:
        for bucket in self._buckets:
            assert bucket.work is not None
            wait_for(bucket.work, bucket.plan.number)
            if events.wanted(events.CollectiveFinished):
                self._tell(bucket)
            if self._post_scale != 1.0:
                bucket.buffer[: bucket.plan.payload].mul_(self._post_scale)
            if self._average_over:
                share = self._average_over / _participants(bucket)
                bucket.buffer[: bucket.plan.payload].mul_(share)
            self._read_flags(bucket)
            for entry in bucket.entries:
                if entry.view.data_ptr() != entry.address:  # as after `p.grad.data = ...`
                    entry.view = entry.place.detach()
        for lane in self._lanes.values():
            lane.streams.clear()
        if self._buckets:
            self._guard.read(self._buckets[0])

    def divide(self, entry: Entry) -> None:
        """Make a result this rank's share of it, so that more can be added to it."""
        if self._share != 1.0 and entry.reduced:
            entry.reduced = False
            entry.view.mul_(self._share)

    def _some_rank_added(self) -> bool:
        """Reading it from a GPU stops the host, so there only backward passes in one another do."""
        last = self._last
        if last is None or (last.on_gpu and not self.adds_late):
            return False
        return bool(last.tail[-1].item() != 0)

    @property
    def participants(self) -> int:
        """How many ranks had part in the last pass. Reading it from a GPU stops the host."""
        return round(_participants(self._buckets[0]).item()) if self._buckets else 0

    @property
    def steps_differ(self) -> bool:
        """Whether a pass paired ranks that are in different steps; alike on all ranks.

        On CPUs it is known when the pass is finished, on GPUs when the next one begins.
        """
        return self._guard.differ

    def _read_flags(self, bucket: Bucket) -> None:
        """Only a rank that lacked a gradient needs to know who had one: the others did."""
        if self._share != 1.0:
            for entry in bucket.entries:
                entry.reduced = True
        if not bucket.missing and bucket.all_present:
            return
        flags = bucket.tail[: len(bucket.entries)].abs().tolist() if bucket.missing else []
        bucket.all_present = True
        for place, entry in enumerate(bucket.entries):
            entry.present = entry.filled_in == self._pass or flags[place] != 0
            bucket.all_present = bucket.all_present and entry.present

    def _tell(self, bucket: Bucket) -> None:
        engine = bucket.lane.engine
        events.emit(
            events.CollectiveFinished(
                operation="allreduce",
                name=f"bucket {bucket.plan.number}",
                path="planned",
                engine=engine.name,
                bytes=bucket.buffer.numel() * bucket.buffer.element_size(),
                seconds=time.perf_counter() - bucket.left_at,
                ranks=engine.seat.size,
            )
        )
