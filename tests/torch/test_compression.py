"""Gradients and tensors that travel smaller than they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch_ranks import STEPS, assert_equal_bits, batches, loss_of, make_model, sgd, share, weights

import farandole.torch as hvd
from farandole.core.errors import MismatchError, UsageError, UsageTypeError
from farandole.testing.ranks import run_processes, run_threads
from farandole.torch.compression import Compressor


def ranks(function, size=2):
    def rank_function(rank):
        hvd.init()
        result = function(rank)
        hvd.shutdown()
        return result

    return run_threads(size, rank_function)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_there_and_back(name):
    compression = getattr(hvd.Compression, name)
    narrow = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.tensor([[1.0, -2.0], [0.5, 0.0]], dtype=dtype)
        travels, context = compression.compress(tensor)
        assert travels.dtype == (narrow or dtype)
        back = compression.decompress(travels, context)
        assert back.dtype == dtype
        assert torch.equal(back, tensor)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.complex64):
        tensor = torch.ones(3, dtype=dtype)
        travels, context = compression.compress(tensor)
        assert travels.dtype == dtype
        assert torch.equal(compression.decompress(travels, context), tensor)


def test_collectives():
    def rank_function(rank):
        fine = torch.tensor([1.0 + 2**-14, float(rank)], dtype=torch.float64)
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            assert hvd.allreduce(fine, compression=compression).tolist() == [1.0, 0.5]
            one, two = hvd.grouped_allreduce(
                [fine, torch.ones(2, dtype=torch.int32)], compression=compression, op=hvd.Sum
            )
            assert one.tolist() == [2.0, 1.0]
            assert two.dtype == torch.int32
            part = hvd.reducescatter(fine, compression=compression, op=hvd.Sum)
            assert part.tolist() == [[2.0], [1.0]][rank]
            parts = hvd.grouped_reducescatter([fine, fine], compression=compression)
            assert [each.tolist() for each in parts] == [[[1.0], [0.5]][rank]] * 2
        leaf = torch.ones(3, requires_grad=True)
        hvd.allreduce(leaf, compression=hvd.Compression.fp16, op=hvd.Sum).sum().backward()
        assert leaf.grad.tolist() == [2.0] * 3

    ranks(rank_function)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_training_stays_close_and_equal_on_the_ranks(compression, op):
    size = 2

    def train(rank, **more):
        model = make_model(torch.float32)
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), op=op, **more
        )
        for batch in batches(STEPS, torch.float32):
            loss = loss_of(model, share(batch, rank, size))
            loss.backward()
            assert all(each.grad.dtype == torch.float32 for each in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    def rank_function(rank):
        return train(rank, compression=compression), train(rank)

    results = ranks(rank_function)
    assert_equal_bits([compressed for compressed, _ in results])
    for compressed, exact in zip(*results[0], strict=True):
        torch.testing.assert_close(compressed, exact, rtol=0.05, atol=0.05)
        assert not torch.equal(compressed, exact) or exact.numel() < 20


def test_every_kind_of_parameter_and_pass():
    """Missing gradients, dtypes that are not compressed, several passes before a step."""

    def rank_function(rank):
        one = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        two = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        half = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        nobody = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([one, two, half, nobody], lr=1.0), compression=hvd.Compression.fp16
        )
        for _ in range(3):
            loss = (two * (rank + 1)).real.sum() + half.float().sum()
            if rank == 0:
                loss = loss + one.sum()
            loss.backward()
            assert one.grad.tolist() == [0.5] * 3
            assert one.grad.dtype == torch.float64
            assert two.grad.tolist() == [1.5 + 0j] * 3
            assert half.grad.tolist() == [1.0] * 3
            assert nobody.grad is None
            (one * (rank + 1)).sum().backward()
            assert one.grad.tolist() == [2.0] * 3
            optimizer.step()
            optimizer.zero_grad()

    ranks(rank_function)


class Halved(Compressor):
    """A user's own: another shape, another dtype, a context."""

    @staticmethod
    def compress(tensor):
        return (tensor / 2).float().reshape(1, -1), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (2 * tensor).reshape(-1).to(ctx)


class Whole(Compressor):
    @staticmethod
    def compress(tensor):
        return tensor.to(torch.int32), None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.float()


def test_a_compression_of_ones_own():
    def rank_function(rank):
        weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=Halved)
        for _ in range(2):
            (weight * (rank + 1)).sum().backward()
            assert weight.grad.tolist() == [1.5] * 5
            optimizer.step()
            optimizer.zero_grad()
        again = copy.deepcopy(optimizer)
        assert pickle.loads(pickle.dumps(optimizer)).state_dict() == again.state_dict()

        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=Whole)
        with pytest.raises(UsageTypeError, match=r"made a torch\.int32 tensor"):
            weight.sum().backward()
        with pytest.raises(UsageTypeError, match="compression must be one of"):
            hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression="fp16")

    ranks(rank_function)


def test_ranks_that_compress_differently():
    def rank_function(rank):
        weight = nn.Parameter(torch.zeros(5))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            compression=[hvd.Compression.none, hvd.Compression.fp16][rank],
        )
        with pytest.raises(MismatchError, match="compression NoneCompressor on rank 0"):
            weight.sum().backward()
        del optimizer

    ranks(rank_function)


INT8, POWERSGD, TOPK = hvd.Compression.int8, hvd.Compression.powersgd(2), hvd.Compression.topk(0.2)
FEEDBACK = [INT8, POWERSGD, TOPK]


class Wide(nn.Sequential):
    """Large enough for every codec to encode its matrices."""

    def __init__(self):
        super().__init__(
            nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 4)
        )
        random = torch.Generator().manual_seed(3)  # threads share the default one
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.15, generator=random)


def inputs(rank, step):
    random = torch.Generator().manual_seed(50 * step + rank)
    return torch.randn(8, 32, generator=random), torch.randint(4, (8,), generator=random)


def backward(model, rank, step):
    images, labels = inputs(rank, step)
    nn.functional.cross_entropy(model(images), labels).backward()


def train_wide(rank, steps, after_step=lambda step, model, optimizer: None, lr=0.1, **options):
    model = Wide()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), **options
    )
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        images, labels = inputs(rank, step % 4)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
        after_step(step, model, optimizer)
    return weights(model), losses


@pytest.mark.parametrize("compression", FEEDBACK, ids=str)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_feedback_trains_as_exact_gradients_do(compression, op):
    def rank_function(rank):
        lr = 0.2 if op == hvd.Average else 0.1
        exact = train_wide(rank, 40, op=op, lr=lr)
        return train_wide(rank, 40, op=op, lr=lr, compression=compression), exact

    results = ranks(rank_function)
    assert_equal_bits([compressed for (compressed, _), _ in results])
    (compressed, losses), (exact, exact_losses) = results[0]
    assert not all(map(torch.equal, compressed, exact))
    assert losses[0] == exact_losses[0]
    fallen = exact_losses[0] - exact_losses[-1]
    assert fallen > 0.1
    assert abs(losses[-1] - exact_losses[-1]) < 0.2 * fallen


@pytest.mark.parametrize("compression", FEEDBACK, ids=str)
def test_feedback_between_processes(compression):
    def rank_function(rank):
        hvd.init()
        result, _ = train_wide(rank, 6, compression=compression)
        hvd.shutdown()
        return result

    assert_equal_bits(run_processes(2, rank_function))


@pytest.mark.parametrize("compression", FEEDBACK, ids=str)
def test_every_gradient_is_sent_sooner_or_later(compression):
    """Steps of several passes, a second pass that comes late, missing gradients."""

    def rank_function(rank):
        model = Wide()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            model.named_parameters(),
            compression=compression,
            backward_passes_per_step=2,
        )
        shape = model[0].weight.shape
        wanted, sent = torch.zeros(shape), torch.zeros(shape)
        for step in range(12):
            optimizer.zero_grad()
            for part in range(2):
                if (rank, step % 3, part) != (1, 1, 0):
                    backward(model, rank, 2 * step + part)
                    wanted += local_gradient(rank, 2 * step + part)
                else:
                    (0 * model[2].bias).sum().backward()
            sent += model[0].weight.grad
            optimizer.step()
        errors = optimizer._farandole.gradients._agreed.memory.errors["0.weight"]
        return wanted, sent, errors.view(shape)

    results = ranks(rank_function)
    wanted = sum(each for each, _, _ in results) / 2
    left = sum(each for _, _, each in results)
    torch.testing.assert_close(results[0][1] + left, wanted, rtol=1e-4, atol=1e-4)
    assert left.any()


def local_gradient(rank, step):
    model = Wide()
    backward(model, rank, step)
    return model[0].weight.grad


@pytest.mark.parametrize("compression", FEEDBACK, ids=str)
def test_a_result_that_is_reduced_again(compression):
    """Two backward passes before a step: what was reduced already stays, more is added."""

    def rank_function(rank):
        model = Wide()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(),
            compression=compression,
        )  # fmt: skip
        total = torch.zeros_like(model[0].weight)
        for step in range(0, 20, 2):
            optimizer.zero_grad()
            backward(model, rank, step)
            backward(model, rank, step + 1)
            total += model[0].weight.grad
            optimizer.step()
        errors = optimizer._farandole.gradients._agreed.memory.errors["0.weight"]
        return total, errors.view(total.shape)

    (total, left_0), (other, left_1) = ranks(rank_function)
    assert torch.equal(total, other)
    wanted = sum(local_gradient(rank, step) for rank in range(2) for step in range(20)) / 2
    torch.testing.assert_close(total + left_0 + left_1, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compression", FEEDBACK, ids=str)
def test_errors_stay_when_the_plan_changes(compression):
    """A parameter is added, so buckets are made anew; loading a state forgets the errors."""

    def rank_function(rank):
        model = Wide()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), compression=compression
        )
        gradients = optimizer._farandole.gradients
        backward(model, rank, 0)
        optimizer.step()
        first = gradients._agreed.memory.errors
        before = {name: error.clone() for name, error in first.items()}
        wanted = {
            name: before[name].view(each.shape) + _gradient_of(place, rank) / 2
            for place, each in enumerate(model.parameters())
            if (name := f"parameter {place} of group 0") in before
        }
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(64, 64))]})
        optimizer.zero_grad()
        backward(model, rank, 1)
        after = gradients._agreed.memory.errors
        assert after is not first
        sent = {
            f"parameter {place} of group 0": each.grad
            for place, each in enumerate(model.parameters())
        }
        left = {name: error.clone().view(wanted[name].shape) for name, error in after.items()
                if name in wanted}  # fmt: skip
        optimizer.load_state_dict(optimizer.state_dict())
        assert not any(error.any() for error in gradients._agreed.memory.errors.values())
        return wanted, sent, left

    def _gradient_of(place, rank):
        model = Wide()
        backward(model, rank, 1)
        return list(model.parameters())[place].grad

    (wanted_0, sent, left_0), (wanted_1, _, left_1) = ranks(rank_function)
    assert len(wanted_0) >= 2
    for name in wanted_0:
        torch.testing.assert_close(
            sent[name] + left_0[name] + left_1[name], wanted_0[name] + wanted_1[name],
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("compression", [*FEEDBACK, hvd.Compression.fp16], ids=str)
def test_ranks_that_join(compression):
    """The others go on, with the same results on all of them; later all train together again."""

    def rank_function(rank):
        model = Wide()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
            compression=compression,
        )  # fmt: skip

        def step(number):
            optimizer.zero_grad()
            backward(model, rank, number)
            optimizer.step()

        for number in range(3 + 2 * rank):
            step(number)
        last = hvd.join()
        together = [each.clone() for each in model.parameters()]
        hvd.broadcast_parameters(model.state_dict(), root_rank=2)
        for number in range(3):
            step(number)
        return last, together, weights(model)

    first, second, third = ranks(rank_function, size=3)
    assert first[0] == second[0] == third[0] == 2
    assert_equal_bits([first[2], second[2], third[2]])


def test_rules_by_parameter():
    compression = hvd.Compression.rules(
        {"0.*": hvd.Compression.none, "2.weight": TOPK, "[24].*": INT8, "*": hvd.Compression.bf16}
    )

    def rank_function(rank):
        model = Wide()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(),
            compression=compression,
        )  # fmt: skip
        for _ in range(2):
            optimizer.zero_grad()
            backward(model, rank, 0)
        agreed = optimizer._farandole.gradients._agreed
        buckets = [
            {agreed.reducer.plan.parameters[slot.index].codec for slot in bucket.slots}
            for bucket in agreed.reducer.plan.buckets
        ]
        assert all(len(codecs) == 1 for codecs in buckets)
        assert set.union(*buckets) == {"", "topk(ratio=0.2)", "int8"}
        assert sorted(agreed.memory.errors) == ["2.weight", "4.weight"]
        return {name: each.grad for name, each in model.named_parameters()}

    first, second = ranks(rank_function)
    exact = Wide()
    for rank in range(2):
        backward(exact, rank, 0)
    for name, parameter in exact.named_parameters():
        assert torch.equal(first[name], second[name])
        if not name.endswith("weight") or name.startswith("0"):
            torch.testing.assert_close(first[name], parameter.grad / 2)
    assert int((first["2.weight"] == 0).sum()) > 0.5 * first["2.weight"].numel()


def test_compressions_that_cannot_be():
    rules, powersgd, topk = (
        hvd.Compression.rules, hvd.Compression.powersgd, hvd.Compression.topk
    )  # fmt: skip
    across_hosts = hvd.Compression.across_hosts
    for make in (lambda: powersgd(0), lambda: powersgd(1.5), lambda: topk(0), lambda: topk(1.1)):
        with pytest.raises(UsageError, match="takes a"):
            make()
    with pytest.raises(UsageTypeError, match="within rules"):
        rules({"*": rules({})})
    with pytest.raises(UsageTypeError, match="compression must be one of"):
        rules({"*": "int8"})
    with pytest.raises(UsageTypeError, match="patterns"):
        rules({1: INT8})
    for inner in (across_hosts(INT8), rules({"*": INT8})):
        with pytest.raises(UsageTypeError, match="takes one compression"):
            across_hosts(inner)
    with pytest.raises(UsageTypeError, match="compression must be one of"):
        across_hosts(None)

    def rank_function(rank):
        weight = nn.Parameter(torch.zeros(4, 4))
        for compression in (INT8, powersgd(), across_hosts(INT8), rules({"*": INT8})):
            with pytest.raises(UsageError, match="does not sum"):
                hvd.DistributedOptimizer(
                    torch.optim.SGD([weight], lr=1.0), compression=compression, op=hvd.Adasum
                )
        for compression in (powersgd(), topk(), across_hosts(INT8), rules({"*": INT8})):
            for reduce in (hvd.allreduce, hvd.reducescatter):
                with pytest.raises(UsageError, match=r"Compression\..* is not for single tensors"):
                    reduce(torch.ones(4), compression=compression)
        with pytest.raises(UsageError, match="is not for single tensors"):
            hvd.reducescatter(torch.ones(4), compression=INT8)
        with pytest.raises(UsageError, match="floating-point"):
            hvd.allreduce(torch.ones(4, dtype=torch.int64), compression=INT8)
        with pytest.raises(UsageError, match="op=Sum or Average"):
            hvd.allreduce(torch.ones(4), compression=INT8, op=hvd.Max)

    ranks(rank_function)


@pytest.mark.parametrize(
    "pair",
    [(INT8, hvd.Compression.fp16), (hvd.Compression.powersgd(2), hvd.Compression.powersgd(4)),
     (hvd.Compression.rules({"a*": INT8}), hvd.Compression.rules({"b*": INT8})),
     (INT8, hvd.Compression.across_hosts(INT8))],
    ids=str,
)  # fmt: skip
def test_ranks_that_encode_differently(pair):
    def rank_function(rank):
        weight = nn.Parameter(torch.zeros(5, 64))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), compression=pair[rank]
        )
        with pytest.raises(MismatchError) as caught:
            weight.sum().backward()
        del optimizer
        return str(caught.value)

    first, second = ranks(rank_function)
    assert first == second
    name = getattr(pair[1], "__name__", str(pair[1]))
    assert f"compression {pair[0]} on rank 0, {name} on rank 1" in first


def test_int8_of_named_tensors():
    def rank_function(rank):
        random = torch.Generator().manual_seed(rank)
        one = torch.randn(700, 3, generator=random)
        two = torch.randn(5, generator=random, dtype=torch.float64)
        three = torch.full((), 2.0 + rank, dtype=torch.bfloat16)
        sole = hvd.allreduce(one, compression=INT8)
        summed, other, scalar = hvd.grouped_allreduce(
            [one, two, three], compression=INT8, op=hvd.Sum, name="all",
            prescale_factor=0.5, postscale_factor=4.0,
        )  # fmt: skip
        nothing = hvd.allreduce(torch.empty(0, 3), compression=INT8)
        assert nothing.shape == (0, 3)
        return [one, two, three], [sole, summed, other, scalar]

    (mine, first), (theirs, second), (others, third) = ranks(rank_function, size=3)
    assert_equal_bits([first, second, third])
    sums = [sum(each) for each in zip(mine, theirs, others, strict=True)]
    bound = sum(float(each[0].abs().max()) for each in (mine, theirs, others, sums)) / 250
    for result, expected in zip(first, [sums[0] / 3, *(2 * each for each in sums)], strict=True):
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, rtol=0.03, atol=2 * bound)


def test_int8_of_named_tensors_has_a_gradient():
    def rank_function(rank):
        leaf = torch.ones(3, requires_grad=True)
        hvd.allreduce(leaf * (rank + 1), compression=INT8, op=hvd.Sum).sum().backward()
        assert leaf.grad.tolist() == [2.0 * (rank + 1)] * 3
        one, two = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
        a, b = hvd.grouped_allreduce([one, two], compression=INT8)
        (a.sum() + 2 * b.sum()).backward()
        assert one.grad.tolist() == [1.0] * 3
        assert two.grad.tolist() == [2.0] * 2

    ranks(rank_function)


def test_int8_on_one_rank_only():
    def rank_function(rank):
        with pytest.raises(MismatchError, match="alltoall"):
            hvd.allreduce(torch.ones(3), name="x", compression=[INT8, hvd.Compression.none][rank])

    ranks(rank_function)


def test_optimizers_with_feedback_can_be_copied():
    compression = hvd.Compression.rules({"*.weight": hvd.Compression.across_hosts(POWERSGD)})

    def rank_function(rank):
        model = Wide()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
            compression=compression,
        )  # fmt: skip
        backward(model, rank, 0)
        optimizer.step()
        again = pickle.loads(pickle.dumps(optimizer))
        assert again._farandole.chosen.compression == compression
        assert again.state_dict().keys() == torch.optim.SGD([torch.zeros(1)]).state_dict().keys()

    ranks(rank_function)
