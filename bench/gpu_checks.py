"""Checks on a machine with one NVIDIA GPU what a machine without cannot show.

    python bench/gpu_checks.py

* *One rank, NCCL*: every collective gets its input from a stream that is still busy, and its result
  is used at once. A stream wait that is missing anywhere on the way gives a wrong number here.
* *Two ranks on the one GPU, Gloo with CUDA tensors*: the collectives again, the optimizer against
  training in one process, gradient scaling with an overflow on one rank only, mixed precision,
  batch normalization over all ranks.

Prints a table; exits with 1 when a check failed. What one GPU cannot show is named at the end.
Takes under two minutes. ``--device cpu`` tries the checks themselves on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import farandole.torch as hvd

LENGTH = 1 << 20
"""Elements of a tensor that a collective is checked with."""
BUSY_CYCLES = 100_000_000
"""How long the producing stream is kept busy: about 0.06 s, far longer than any launch takes."""
PART_LIMIT = 55.0
"""Seconds for each of the two parts."""
DEVICE = torch.device("cuda")

Check = Callable[[], None]


def keep_busy(cycles: int = BUSY_CYCLES) -> None:
    """Give the current stream something to do before whatever is queued next."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """A stream of its own as the current one."""
    if DEVICE.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    else:
        yield


def late(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that holds ``value`` only once its stream gets there, and -7 until then."""
    tensor = torch.full((LENGTH,), -7.0, dtype=dtype, device=DEVICE)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    keep_busy()
    return tensor.fill_(value)


def expect(result: torch.Tensor, value: float | torch.Tensor) -> None:
    """Use ``result`` on the current stream at once, as a script would."""
    used = result * 1
    torch.testing.assert_close(
        used, torch.as_tensor(value, dtype=used.dtype).expand_as(used).to(used.device)
    )


def mine(scale: float = 1.0) -> float:
    """A value that differs between ranks: 1, 2, …"""
    return scale * (hvd.rank() + 1)


def total(scale: float = 1.0) -> float:
    """The sum of :func:`mine` over the ranks."""
    return scale * hvd.size() * (hvd.size() + 1) / 2


def in_rank_order() -> torch.Tensor:
    """Each rank's value, once a rank."""
    return torch.arange(1.0, hvd.size() + 1)


def check_allreduce() -> None:
    """The sum over the ranks."""
    expect(hvd.allreduce(late(mine()), op=hvd.Sum), total())


def check_scaled_average() -> None:
    """Scaled before and after, out of place."""
    result = hvd.allreduce(late(mine()), op=hvd.Average, prescale_factor=0.5, postscale_factor=3.0)
    expect(result, 1.5 * total() / hvd.size())


def check_half() -> None:
    """Averaged and scaled in float16."""
    result = hvd.allreduce(late(mine(), torch.float16), op=hvd.Average, postscale_factor=2.0)
    expect(result, 2.0 * total() / hvd.size())


def check_integer_average() -> None:
    """A dtype that travels in another one; averages are truncated."""
    expect(hvd.allreduce(late(mine(3.0), torch.int16)), int(total(3.0) / hvd.size()))


def check_in_place() -> None:
    """Scaled, and written into the input."""
    tensor = late(mine())
    hvd.allreduce_(tensor, op=hvd.Sum, prescale_factor=2.0)
    expect(tensor, total(2.0))


def check_grouped() -> None:
    """Fused by dtype, and cut apart again."""
    tensors = [late(mine()), late(mine(10.0), torch.float16), late(mine(100.0))]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum, postscale_factor=2.0)
    for result, value in zip(results, (2.0, 20.0, 200.0), strict=True):
        expect(result, total(value))


def check_allgather() -> None:
    """All ranks' tensors in rank order."""
    expect(hvd.allgather(late(mine())), in_rank_order().repeat_interleave(LENGTH))


def check_broadcast() -> None:
    """The last rank's tensor."""
    expect(hvd.broadcast(late(mine()), root_rank=hvd.size() - 1), float(hvd.size()))


def check_alltoall() -> None:
    """A piece from each rank."""
    expect(hvd.alltoall(late(mine())), in_rank_order().repeat_interleave(LENGTH // hvd.size()))


def check_reducescatter() -> None:
    """This rank's piece of the sum."""
    expect(hvd.reducescatter(late(mine()), op=hvd.Sum), total())


def check_result_on_another_stream() -> None:
    """Submitted on one stream, waited for on another."""
    with side_stream():
        handle = hvd.allreduce_async(late(mine()), op=hvd.Sum, prescale_factor=4.0)
    with side_stream():
        expect(hvd.synchronize(handle), total(4.0))


def check_input_changed_afterwards() -> None:
    """The input is overwritten right after the call."""
    tensor = late(mine())
    result = hvd.allgather(tensor)
    tensor.fill_(-9.0)
    expect(result, in_rank_order().repeat_interleave(LENGTH))


def check_input_freed_in_flight() -> None:
    """The input's memory must not be given to others while it travels."""
    handles = [hvd.allreduce_async(late(mine()), op=hvd.Sum, prescale_factor=2.0)]
    handles.append(hvd.allgather_async(late(mine())))
    with side_stream():  # takes the memory of what was freed too early
        junk = [torch.full((LENGTH,), -9.0, device=DEVICE) for _ in range(8)]
    expect(hvd.synchronize(handles[0]), total(2.0))
    expect(hvd.synchronize(handles[1]), in_rank_order().repeat_interleave(LENGTH))
    del junk


def check_a_missing_wait_would_show() -> None:
    """Read a late tensor from a stream that does not wait for it: the old value is seen."""
    if DEVICE.type != "cuda":
        return
    tensor = late(1.0)
    with side_stream():
        stolen = tensor.clone()
    torch.cuda.synchronize()
    assert (stolen == -7.0).all(), "the producing stream is not kept busy for long enough"


def check_host_goes_on() -> None:
    """Submitting and waiting queue work; neither may wait for a busy GPU."""
    if DEVICE.type != "cuda":
        return
    tensor = torch.ones(LENGTH, device=DEVICE)
    torch.cuda.synchronize()
    began = time.perf_counter()
    keep_busy(10 * BUSY_CYCLES)
    result = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0)
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    finished = time.perf_counter() - began
    expect(result, 2.0 * hvd.size())
    assert queued < finished / 2, f"the host waited {queued:.3f} s of {finished:.3f} s"


def make_net(dtype: torch.dtype = torch.float32, norm: type[nn.Module] | None = None) -> nn.Module:
    """A small network, the same on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), *([norm(128)] if norm else []), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).to(DEVICE, dtype)


def make_batches(steps: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, ...]]:
    """Global batches, the same on all ranks; each rank trains on its part."""
    torch.manual_seed(1)
    return [
        (torch.randn(32, 64, dtype=dtype).to(DEVICE), torch.randint(10, (32,)).to(DEVICE))
        for _ in range(steps)
    ]


def part(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """This rank's samples of a global batch."""
    return tuple(tensor.chunk(hvd.size())[hvd.rank()] for tensor in batch)


def expect_equal_on_all_ranks(net: nn.Module) -> None:
    """The parameters are the same on all ranks, bit for bit."""
    for name, parameter in net.named_parameters():
        for other in hvd.allgather(parameter.detach()[None]):
            assert torch.equal(other, parameter), f"{name} differs between the ranks"


def check_optimizer() -> None:
    """AdamW with clipping: as one process on the global batch, in float64."""
    dtype = torch.float64
    reference, net = make_net(dtype), make_net(dtype)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    ours = torch.optim.AdamW(net.parameters(), lr=1e-2)
    ours = hvd.DistributedOptimizer(ours, net.named_parameters())
    for batch in make_batches(6, dtype):
        for model, optimizer, (x, y) in ((reference, plain, batch), (net, ours, part(batch))):
            optimizer.zero_grad()
            keep_busy(BUSY_CYCLES // 10)
            functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for expected, parameter in zip(reference.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-11)
    expect_equal_on_all_ranks(net)


def check_accumulation() -> None:
    """Two backward passes a step: as one process on the global batches."""
    reference, net = make_net(torch.float64), make_net(torch.float64)
    plain = torch.optim.SGD(reference.parameters(), lr=1e-2, momentum=0.9)
    ours = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    ours = hvd.DistributedOptimizer(ours, net.named_parameters(), backward_passes_per_step=2)
    batches = make_batches(6, torch.float64)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        for model, optimizer, cut in ((reference, plain, tuple), (net, ours, part)):
            optimizer.zero_grad()
            for batch in (first, second):
                x, y = cut(batch)
                functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for expected, parameter in zip(reference.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-11)


def check_scaler() -> None:
    """An overflow on the last rank only: all ranks skip that step, halve the scale and go on."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    for step, batch in enumerate(make_batches(4)):
        x, y = part(batch)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        scale = scaler.get_scale()
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype=torch.float16):
            loss = functional.cross_entropy(net(x).float(), y)
        if step == 2 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        skipped = all(map(torch.equal, before, net.parameters()))
        assert skipped == (step == 2), f"step {step} was {'' if skipped else 'not '}skipped"
        assert scaler.get_scale() == (scale / 2 if step == 2 else scale)
    expect_equal_on_all_ranks(net)


def check_mixed_precision() -> None:
    """Parameters in bfloat16, float16 and float32 in one optimizer; autocast on top."""
    torch.manual_seed(0)
    net = make_net()
    net[0].bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    (batch,) = make_batches(1)
    x, y = part(batch)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = functional.cross_entropy(net(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
    assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    expect_equal_on_all_ranks(net)


def check_sync_batch_norm() -> None:
    """The statistics of the global batch: as one process with all of it."""
    dtype = torch.float64
    reference, net = make_net(dtype, nn.BatchNorm1d), make_net(dtype, hvd.SyncBatchNorm)
    net.load_state_dict(reference.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    ours = torch.optim.SGD(net.parameters(), lr=0.1)
    ours = hvd.DistributedOptimizer(ours, net.named_parameters())
    for batch in make_batches(4, dtype):
        for model, optimizer, (x, y) in ((reference, plain, batch), (net, ours, part(batch))):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], expected, rtol=1e-8, atol=1e-10)


COLLECTIVES: dict[str, Check] = {
    "allreduce, sum": check_allreduce,
    "allreduce, average, scaled": check_scaled_average,
    "allreduce, float16": check_half,
    "allreduce, int16 average": check_integer_average,
    "allreduce in place, scaled": check_in_place,
    "allreduce, grouped, two dtypes": check_grouped,
    "allgather": check_allgather,
    "broadcast": check_broadcast,
    "alltoall": check_alltoall,
    "reducescatter": check_reducescatter,
    "result used on another stream": check_result_on_another_stream,
    "input changed afterwards": check_input_changed_afterwards,
    "input freed in flight": check_input_freed_in_flight,
}

TRAINING: dict[str, Check] = {
    "optimizer = one process": check_optimizer,
    "accumulation = one process": check_accumulation,
    "overflow on one rank": check_scaler,
    "mixed precision": check_mixed_precision,
    "SyncBatchNorm = one process": check_sync_batch_norm,
}

PARTS: dict[str, tuple[int, dict[str, Check]]] = {
    "1 rank, NCCL": (
        1,
        {
            "a missing wait would show": check_a_missing_wait_would_show,
            **COLLECTIVES,
            "the host goes on": check_host_goes_on,
            **TRAINING,
        },
    ),
    "2 ranks on one GPU, Gloo": (2, {**COLLECTIVES, **TRAINING}),
}


def outcome(check: Check) -> str:
    """``ok``, or why not."""
    try:
        check()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        traceback.print_exc()
        return f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "ok"


def work(name: str, output: str) -> None:
    """What each rank of a part does."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    hvd.init()
    checks = PARTS[name][1]
    hvd.allreduce(torch.ones(1, device=DEVICE))  # opens the channel, which may block the host
    outcomes = {}
    for title, check in checks.items():
        outcomes[title] = outcome(check)
        if title in COLLECTIVES:
            with side_stream():
                outcomes[f"{title}, side stream"] = outcome(check)
    Path(output, f"{hvd.rank()}.json").write_text(json.dumps(outcomes))
    hvd.shutdown()


def run_part(name: str) -> dict[str, str]:
    """Run the ranks of a part; each check's outcome, the worst of the ranks."""
    ranks, _ = PARTS[name]
    farandole = str(Path(sys.executable).with_name("farandole"))
    with tempfile.TemporaryDirectory() as folder:
        worker = [__file__, "--device", DEVICE.type, "--worker", name, folder]
        try:
            ended = subprocess.run(
                [farandole, "run", "-np", str(ranks), *worker],
                timeout=PART_LIMIT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"all": f"FAILED: not finished after {PART_LIMIT:.0f} s"}
        if ended != 0:
            return {"all": f"FAILED: exit code {ended}; see above"}
        said: list[dict[str, str]] = [
            json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))
        ]
    return {
        check: max((one[check] for one in said), key=lambda text: text != "ok") for check in said[0]
    }


def report(results: dict[str, dict[str, str]]) -> bool:
    """Print the table; whether all is well."""
    outcomes = [text for part in results.values() for text in part.values()]
    for name, checks in results.items():
        print(f"\n{name}")
        for check, text in checks.items():
            print(f"  {check:<46} {text}")
    failed = sum(text != "ok" for text in outcomes)
    print(f"\n{len(outcomes) - failed} checks passed, {failed} failed")
    if DEVICE.type != "cuda":
        print("not checked: anything on a GPU")
    print("not checked: NCCL between GPUs")
    return failed == 0


def main() -> int:
    """Run as a command."""
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--worker", nargs=2, metavar=("PART", "FOLDER"), help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    DEVICE = torch.device(arguments.device)
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no NVIDIA GPU here")
        print("not checked: anything on a GPU, NCCL between GPUs")
        return 0
    if arguments.worker:
        work(*arguments.worker)
        return 0
    if DEVICE.type == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    return 0 if report({name: run_part(name) for name in PARTS}) else 1


if __name__ == "__main__":
    sys.exit(main())
