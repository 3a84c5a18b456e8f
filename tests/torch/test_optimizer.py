"""What a distributed optimizer does in the situations that training brings."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_ranks import (
    adamw,
    assert_equal_bits,
    batches,
    fill,
    loss_of,
    make_model,
    sgd,
    share,
    weights,
)

import farandole.torch as hvd
from farandole.testing.ranks import run_threads

SIZE = 2


def ranks(function, size=SIZE):
    """``function(rank)`` on ranks that are threads, between init and shutdown."""

    def rank_function(rank):
        hvd.init()
        result = function(rank)
        hvd.shutdown()
        return result

    return run_threads(size, rank_function)


def parameter(value: float, length: int = 3) -> nn.Parameter:
    return nn.Parameter(torch.full((length,), value, dtype=torch.float64))


def wrapped(parameters, **more):
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **more)


# What it is


def test_keeps_class_state_and_format():
    def rank_function(rank):
        model = make_model()
        plain = adamw(model.parameters())
        loss_of(model, batches(1)[0]).backward()
        plain.step()
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())

        assert isinstance(optimizer, torch.optim.AdamW)
        assert type(optimizer).__name__ == "AdamW"
        assert optimizer.param_groups is plain.param_groups
        assert optimizer.state is plain.state
        assert optimizer.defaults == plain.defaults
        ours, theirs = optimizer.state_dict(), plain.state_dict()
        assert ours.keys() == theirs.keys()
        assert str(ours) == str(theirs)
        assert str(optimizer) == str(plain)
        for method in ("step", "zero_grad"):
            signature = inspect.signature(getattr(optimizer, method))
            assert signature == inspect.signature(getattr(plain, method))

        optimizer.load_state_dict(theirs)
        assert plain.param_groups is optimizer.param_groups
        again = hvd.DistributedOptimizer(sgd(model.parameters()))
        assert type(again) is type(hvd.DistributedOptimizer(sgd(model.parameters())))

    ranks(rank_function, size=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"named_parameters": "twice"}, "unique. Found duplicates: a"),
        ({"named_parameters": "one"}, r"not named: parameter 1 of group 0 \(3,\)"),
        ({"named_parameters": "no tuples"}, "sequence of tuples"),
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"op": hvd.Max}, "op=Average, op=Sum or op=Adasum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average only"),
        ({"gradient_predivide_factor": 0.0}, "must be > 0"),
        ({"groups": -1}, "non-negative integer or a list of list"),
        ({"groups": [[1]]}, "non-negative integer or a list of list"),
        ({"groups": "stranger"}, "not a parameter of the optimizer"),
        ({"groups": "twice"}, "in more than one of the groups"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    def rank_function(rank):
        first, second = parameter(1.0), parameter(2.0)
        given = {
            "twice": [("a", first), ("a", second)],
            "one": [("a", first)],
            "no tuples": [first, second],
        }
        groups = {"stranger": [[parameter(0.0)]], "twice": [[first], [first]]}
        if "named_parameters" in arguments:
            arguments["named_parameters"] = given[arguments["named_parameters"]]
        if arguments.get("groups") in ("stranger", "twice"):
            arguments["groups"] = groups[arguments["groups"]]
        with pytest.raises(ValueError, match=message):
            wrapped([first, second], **arguments)

    ranks(rank_function, size=1)


def test_wraps_optimizers_only_and_once():
    def rank_function(rank):
        with pytest.raises(TypeError, match=r"wraps a torch.optim.Optimizer, not list"):
            hvd.DistributedOptimizer([])
        with pytest.raises(ValueError, match="wrap it once"):
            hvd.DistributedOptimizer(wrapped([parameter(1.0)]))

    ranks(rank_function, size=1)


def test_needs_init():
    with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
        wrapped([parameter(1.0)])


# Gradients


def test_gradients_are_reduced_when_backward_returns():
    def rank_function(rank):
        weight = parameter(0.0)
        optimizer = wrapped([weight])
        for step in range(3):
            (weight * (rank + step)).sum().backward()
            assert weight.grad.tolist() == [0.5 + step] * 3
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            assert torch.linalg.vector_norm(weight.grad) < 1.0 + 1e-9
            optimizer.zero_grad()
            assert weight.grad is None
        return weights(nn.ParameterList([weight]))

    assert_equal_bits(ranks(rank_function))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    def rank_function(rank):
        weight = parameter(0.0)
        optimizer = wrapped([weight])
        for _ in range(3):
            (weight * (rank + 1)).sum().backward()
            assert weight.grad.tolist() == [1.5] * 3
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert (weight.grad is None) == set_to_none

    ranks(rank_function)


def test_missing_gradients():
    """On one rank they count as zeros; missing everywhere they stay ``None``."""

    def rank_function(rank):
        both, first, second, nobody = (parameter(1.0) for _ in range(4))
        optimizer = wrapped([both, first, second, nobody])
        for _ in range(3):
            (both.sum() + (first if rank == 0 else second).sum() * 4).backward()
            assert both.grad.tolist() == [1.0] * 3
            assert first.grad.tolist() == [2.0] * 3
            assert second.grad.tolist() == [2.0] * 3
            assert nobody.grad is None
            optimizer.step()
            optimizer.zero_grad()
        assert nobody.tolist() == [1.0] * 3
        return weights(nn.ParameterList([both, first, second, nobody]))

    assert_equal_bits(ranks(rank_function))


def test_a_rank_whose_backward_touches_nothing_takes_part_in_step():
    def rank_function(rank):
        weight = parameter(0.0)
        optimizer = wrapped([weight])
        for step in range(4):
            if (step + rank) % 2:
                weight.sum().backward()
            optimizer.step()
            assert weight.grad.tolist() == [0.5] * 3
            optimizer.zero_grad()
        return weight.tolist()

    assert ranks(rank_function) == [[-2.0] * 3] * SIZE


def test_gradients_that_the_script_made_are_reduced_by_step():
    def rank_function(rank):
        weight = parameter(0.0)
        optimizer = wrapped([weight])
        weight.grad = torch.full((3,), rank + 1.0, dtype=torch.float64)
        optimizer.step()
        return weight.tolist()

    assert ranks(rank_function) == [[-1.5] * 3] * SIZE


def test_ready_in_another_order_on_each_rank():
    def rank_function(rank):
        layers = nn.ModuleList([fill(nn.Linear(4, 4).double(), seed) for seed in range(5)])
        order = list(layers) if rank == 0 else list(layers)[::-1]
        optimizer = hvd.DistributedOptimizer(sgd(layers.parameters()), layers.named_parameters())
        for step in range(4):
            x = torch.full((2, 4), float(rank + step + 1), dtype=torch.float64)
            for layer in order[step:] + order[:step]:
                x = torch.tanh(layer(x))
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(layers)

    assert_equal_bits(ranks(rank_function))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_several_backward_passes_before_a_step(op):
    """A later pass reduces again; what was reduced before counts once."""

    def rank_function(rank):
        one, two = parameter(0.0), parameter(0.0)
        optimizer = wrapped([one, two], op=op)
        for _ in range(3):
            (one * (rank + 1) + two * (rank + 2)).sum().backward()
            (one * 10 * (rank + 1)).sum().backward()
            factor = 1 if op == hvd.Sum else 0.5
            assert one.grad.tolist() == [33.0 * factor] * 3
            assert two.grad.tolist() == [5.0 * factor] * 3
            optimizer.step()
            optimizer.zero_grad()

    ranks(rank_function)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_that_are_never_cleared(op):
    def rank_function(rank):
        weight = parameter(0.0)
        optimizer = wrapped([weight], op=op)
        for step in range(3):
            (weight * (rank + 1)).sum().backward()
            expected = 3.0 * (step + 1) * (1 if op == hvd.Sum else 0.5)
            assert weight.grad.tolist() == [expected] * 3
            optimizer.step()

    ranks(rank_function)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_dtypes_in_one_optimizer(dtype):
    def rank_function(rank):
        one = nn.Parameter(torch.zeros(3, dtype=dtype))
        two = parameter(0.0)
        optimizer = wrapped([one, two])
        for _ in range(3):
            (one.sum().abs() * 0 + (one * (2 * rank + 1)).real.sum() + two.sum()).backward()
            assert one.grad.dtype == dtype
            torch.testing.assert_close(one.grad, torch.full((3,), 2.0, dtype=dtype))
            optimizer.step()
            optimizer.zero_grad()

    ranks(rank_function)


@pytest.mark.parametrize("groups", [2, "lists"])
def test_groups(groups):
    def rank_function(rank):
        model = make_model()
        parameters = list(model.parameters())
        chosen = groups if groups == 2 else [parameters[:2], parameters[4:6]]
        optimizer = hvd.DistributedOptimizer(sgd(parameters), groups=chosen)
        for batch in batches(3):
            loss_of(model, share(batch, rank, SIZE)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    assert_equal_bits(ranks(rank_function))


# Parameters that come, go and freeze


def test_parameters_added_later():
    def rank_function(rank):
        one, two = parameter(0.0), parameter(0.0)
        optimizer = wrapped([one])
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [two]})
            loss = (one * (rank + 1)).sum()
            if step >= 2:
                loss = loss + (two * (rank + 3)).sum()
            loss.backward()
            assert one.grad.tolist() == [1.5] * 3
            assert two.grad is None or two.grad.tolist() == [3.5] * 3
            optimizer.step()
            optimizer.zero_grad()
        return one.tolist(), two.tolist()

    assert ranks(rank_function) == [([-6.0] * 3, [-7.0] * 3)] * SIZE


def test_frozen_and_unfrozen_layers():
    def rank_function(rank):
        model = make_model()
        model[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        plain_model = make_model()
        plain_model[0].requires_grad_(False)
        plain = sgd(plain_model.parameters())
        for number, batch in enumerate(batches(9)):
            if number in (3, 6):
                model[0].requires_grad_(number == 3)
                plain_model[0].requires_grad_(number == 3)
            loss_of(model, share(batch, rank, SIZE)).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of(plain_model, batch).backward()
            plain.step()
            plain.zero_grad()
        torch.testing.assert_close(weights(model), weights(plain_model), rtol=0, atol=1e-13)
        return weights(model)

    assert_equal_bits(ranks(rank_function))


def test_frozen_between_forward_and_backward():
    def rank_function(rank):
        one, two = parameter(0.0), parameter(0.0)
        optimizer = wrapped([one, two])
        for _ in range(3):
            loss = (one * (rank + 1) + two * (rank + 2)).sum()
            two.requires_grad_(False)
            loss.backward()
            two.requires_grad_(True)
            assert one.grad.tolist() == [1.5] * 3
            assert two.grad is None  # as in torch
            optimizer.step()
            optimizer.zero_grad()

    ranks(rank_function)


def test_only_frozen_parameters():
    def rank_function(rank):
        weight = parameter(1.0).requires_grad_(False)
        optimizer = wrapped([weight])
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
        return weight.tolist()

    assert ranks(rank_function) == [[1.0] * 3] * SIZE


@pytest.mark.parametrize("freezes", [True, False])
def test_two_optimizers_that_play_against_each_other(freezes):
    """As in a GAN: each one's loss also reaches the other's parameters."""

    def play(maker, judge, optimizers, batch):
        make, decide = optimizers
        judge.requires_grad_(True)
        decide.zero_grad()
        (judge(maker(batch).detach()).mean() - judge(batch).mean()).backward()
        decide.step()
        if freezes:
            judge.requires_grad_(False)
        make.zero_grad()
        judge(maker(batch)).square().mean().backward()
        make.step()

    def networks():
        made = fill(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double(), 1)
        return made, fill(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), 2)

    def rank_function(rank):
        data = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        ours, alone = networks(), networks()
        optimizers = [
            hvd.DistributedOptimizer(sgd(each.parameters()), each.named_parameters())
            for each in ours
        ]
        for batch in data:
            play(*ours, optimizers, batch.chunk(SIZE)[rank])
        plain = [sgd(each.parameters()) for each in alone]
        for batch in data:
            play(*alone, plain, batch)
        for mine, theirs in zip(ours, alone, strict=True):
            torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-13)
        return weights(ours[0]) + weights(ours[1])

    assert_equal_bits(ranks(rank_function))


def test_two_optimizers_in_one_backward_pass_in_another_order():
    def rank_function(rank):
        one, two = parameter(0.0), parameter(0.0)
        optimizers = [wrapped([one]), wrapped([two])]
        for _ in range(4):
            first, second = (one, two) if rank == 0 else (two, one)
            (second * 2 + first.sum() * 3).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return one.tolist(), two.tolist()

    first, second = ranks(rank_function)
    assert first == second


# Backward passes in one another


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant, op):
    """Every layer twice, so that parameters get gradients in several inner passes."""

    def forward(layers, batch):
        x = batch
        for layer in [*layers, *layers]:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=reentrant)
        return x.square().mean()

    def make():
        return nn.ModuleList([fill(nn.Linear(4, 4).double(), seed) for seed in range(3)])

    def rank_function(rank):
        data = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        layers, alone = make(), make()
        optimizer = hvd.DistributedOptimizer(
            sgd(layers.parameters()), layers.named_parameters(), op=op
        )
        plain = sgd(alone.parameters())
        for batch in data:
            part = batch.chunk(SIZE)[rank].clone().requires_grad_()
            loss = forward(layers, part)
            (loss / SIZE if op == hvd.Sum else loss).backward()
            forward(alone, batch.clone().requires_grad_()).backward()
            for mine, theirs in zip(layers.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-13)
            optimizer.step()
            optimizer.zero_grad()
            plain.step()
            plain.zero_grad()
        return weights(layers)

    assert_equal_bits(ranks(rank_function))


def test_a_backward_pass_that_fails_does_not_spoil_the_next_one():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("out of memory")

    def rank_function(rank):
        one, two = parameter(1.0), parameter(1.0)
        optimizer = wrapped([one, two])
        for step in range(5):
            loss = (Fails.apply(one) if step == 2 else one) * two
            try:
                (loss * (rank + 1)).sum().backward()
            except RuntimeError as error:
                assert "out of memory" in str(error)  # noqa: PT017
            else:
                optimizer.step()
            optimizer.zero_grad()
        return one.tolist(), two.tolist()

    first, second = ranks(rank_function)
    assert first == second


# Steps


def test_schedulers_made_before_and_after_wrapping(recwarn):
    def rank_function(rank):
        weight = parameter(0.0)
        plain = torch.optim.SGD([weight], lr=1.0)
        before = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(plain)
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)
        rates = []
        for _ in range(3):
            weight.sum().backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            before.step()
            after.step()
        return rates, weight[0].item()

    (rates, weight), other = ranks(rank_function)
    assert rates == pytest.approx([1.0, 0.05, 0.0025])
    assert weight == pytest.approx(-1.0525)
    assert (rates, weight) == other
    assert [str(each.message) for each in recwarn if "lr_scheduler" in str(each.message)] == []


def test_step_hooks_run_once():
    def rank_function(rank):
        weight = parameter(0.0)
        plain = torch.optim.SGD([weight], lr=1.0)
        called = []
        plain.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer = hvd.DistributedOptimizer(plain)
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        optimizer.load_state_dict(optimizer.state_dict())
        weight.sum().backward()
        optimizer.step()
        return called

    assert ranks(rank_function) == [["before", "after"]] * SIZE


@pytest.mark.parametrize("passes", [1, 2])
def test_closures(passes):
    def rank_function(rank):
        weight = parameter(0.0)
        optimizer = wrapped([weight], backward_passes_per_step=passes)

        def closure():
            optimizer.zero_grad()
            loss = (weight * (rank + 1)).sum()
            loss.backward()
            return loss

        for _ in range(2 * passes):
            assert optimizer.step(closure) is not None
        return weight.tolist()

    assert ranks(rank_function) == [[-3.0 * passes] * 3] * SIZE


def test_lbfgs():
    def rank_function(rank):
        weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        target = torch.tensor([1.0 + rank, 3.0 - rank], dtype=torch.float64)
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([weight], lr=0.5))

        def closure():
            optimizer.zero_grad()
            loss = (weight - target).square().sum()
            loss.backward()
            return hvd.allreduce(loss.detach())  # it decides by the loss when to stop

        for _ in range(20):
            optimizer.step(closure)
        return weight.detach()

    results = ranks(rank_function)
    torch.testing.assert_close(results[0], torch.tensor([1.5, 2.5]).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("passes", [1, 2])
def test_scaler_skips_the_step_on_all_ranks(passes):
    def rank_function(rank):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=passes
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        seen = []
        for step in range(4):
            for _ in range(passes):
                factor = float("inf") if step == 1 and rank == 1 else 1.0
                scaler.scale((weight * factor).sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([weight], 100.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append((weight.tolist(), scaler.get_scale()))
        return seen

    first, second = ranks(rank_function)
    assert first == second
    steps = [weight[0] / passes for weight, _ in first]
    assert steps == [-1.0, -1.0, -2.0, -3.0]
    assert [scale for _, scale in first] == [8.0, 4.0, 4.0, 4.0]


def test_the_number_of_passes_can_change():
    def rank_function(rank):
        weight = parameter(0.0)
        optimizer = wrapped([weight])
        seen = []
        for step in range(6):
            if step == 2:
                optimizer.set_backward_passes_per_step(2)
            (weight * (rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(weight[0].item())
        return seen

    assert ranks(rank_function) == [[-1.5, -3.0, -3.0, -6.0, -6.0, -9.0]] * SIZE


# Copies


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_distributed_too(way):
    def rank_function(rank):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        data = batches(4)

        def step(model, optimizer, batch):
            loss_of(model, share(batch, rank, SIZE)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step(model, optimizer, data[0])
        if rank == 0:  # a copy that is never used, as for saving
            pickle.dumps(optimizer)
        if way == "deepcopy":
            other, copied = copy.deepcopy((model, optimizer))
        else:
            buffer = io.BytesIO()
            pickle.dump((model, optimizer), buffer)
            buffer.seek(0)
            other, copied = pickle.load(buffer)
        assert isinstance(copied, torch.optim.SGD)
        for batch in data[1:]:
            step(model, optimizer, batch)
            step(other, copied, batch)
        for ours, theirs in zip(weights(model), weights(other), strict=True):
            assert torch.equal(ours, theirs)
        return weights(other)

    assert_equal_bits(ranks(rank_function))


def test_init_again_after_shutdown():
    def rank_function(rank):
        hvd.init()
        weight = parameter(0.0)
        optimizer = wrapped([weight])
        for _ in range(3):
            (weight * (rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            hvd.shutdown()
            hvd.init()
        hvd.shutdown()
        return weight.tolist()

    assert run_threads(SIZE, rank_function) == [[-4.5] * 3] * SIZE


def test_one_rank_alone():
    def rank_function(rank):
        weight = parameter(0.0)
        optimizer = wrapped([weight], backward_passes_per_step=2)
        for _ in range(4):
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.tolist()

    assert ranks(rank_function, size=1) == [[-4.0] * 3]


def test_a_new_optimizer_for_the_same_parameters():
    """As for a second phase of training; the first one may be gone, or still be used."""

    def rank_function(rank):
        weight = parameter(0.0)
        first = wrapped([weight])
        (weight * (rank + 1)).sum().backward()
        first.step()
        first.zero_grad()
        second = wrapped([weight])
        for optimizer in (second, first, second):
            (weight * (rank + 1)).sum().backward()
            assert weight.grad.tolist() == [1.5] * 3
            optimizer.step()
            optimizer.zero_grad()
            assert weight.grad is None
        gone = weakref.ref(first)
        del first, optimizer
        assert gone() is None
        (weight * (rank + 1)).sum().backward()
        second.step()
        second.zero_grad()
        del second
        (weight * (rank + 1)).sum().backward()
        assert weight.grad.tolist() == [rank + 1.0] * 3  # nobody reduces any more
        return weight.tolist()

    assert ranks(rank_function) == [[-7.5] * 3] * SIZE


def test_unfrozen_after_wrapping():
    def rank_function(rank):
        weight = parameter(0.0).requires_grad_(False)
        optimizer = wrapped([weight])
        assert not weight.requires_grad
        weight.requires_grad_()
        (weight * (rank + 1)).sum().backward()
        assert weight.grad.tolist() == [1.5] * 3
        optimizer.step()

    ranks(rank_function)


# What scripts do to gradients


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("zeroes", [True, False])
def test_a_gradient_may_be_pointed_at_other_memory(op, zeroes):
    """``p.grad.data = ...``, as scripts write it, and as moving a model to another format does."""

    def rank_function(rank):
        one, two = parameter(1.0), parameter(1.0)
        optimizer = wrapped([one, two], op=op)
        whole = SIZE if op == hvd.Sum else 1
        expected = 0.0
        for step in range(4):
            (one * (rank + 1 + step)).sum().backward()
            if step == 0:
                two.sum().backward()
            expected = (0.0 if zeroes else expected) + whole * (1.5 + step)
            assert one.grad.tolist() == [expected] * 3
            one.grad.data = one.grad.data * 10
            expected *= 10
            if not zeroes:  # also where this rank adds nothing
                assert two.grad.tolist() == [whole * 10.0**step] * 3
                two.grad.data = two.grad.data * 10
                continue
            optimizer.step()
            optimizer.zero_grad()

    ranks(rank_function)


def test_the_memory_format_may_change():
    def rank_function(rank):
        model = make_model().to(memory_format=torch.contiguous_format)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
        for step, batch in enumerate(batches(4)):
            loss_of(model, share(batch, rank, SIZE)).backward()
            if step == 1:
                model.to(memory_format=torch.channels_last)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    plain = make_model()
    alone = sgd(plain.parameters())
    for batch in batches(4):
        loss_of(plain, batch).backward()
        alone.step()
        alone.zero_grad()
    results = ranks(rank_function)
    assert_equal_bits(results)
    for ours, theirs in zip(results[0], weights(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_asking_for_gradients_changes_none(op):
    """``torch.autograd.grad`` adds to no ``grad``, so it must leave a reduced one alone."""

    def rank_function(rank):
        weight = parameter(2.0)
        wrapped([weight], op=op)
        optimizer = wrapped([weight], op=op)
        for _ in range(2):
            loss = (weight * (rank + 1)).sum()
            loss.backward(retain_graph=True)
            before = weight.grad.clone()
            (asked,) = torch.autograd.grad(loss, [weight], retain_graph=True)
            assert asked.tolist() == [rank + 1.0] * 3
            assert torch.equal(weight.grad, before)
            loss.backward()
            assert torch.equal(weight.grad, 2 * before)
            optimizer.zero_grad()

    ranks(rank_function)


def test_parameters_that_take_the_place_of_others():
    """Python gives the ``id`` of what is gone to something new."""

    def rank_function(rank):
        optimizer = wrapped([parameter(0.0)])
        for change in range(30):
            optimizer.param_groups.clear()
            weight = parameter(0.0, length=1 + change % 3)
            optimizer.add_param_group({"params": [weight]})
            for _ in range(2):
                (weight * (rank + 1)).sum().backward()
                assert set(weight.grad.tolist()) == {1.5}
                optimizer.step()
                optimizer.zero_grad()
            del weight

    ranks(rank_function)


def test_a_failed_backward_pass_is_forgotten():
    """Also when the model, not the optimizer, clears the gradients afterwards."""

    def rank_function(rank):
        one, two = parameter(1.0), parameter(1.0)
        wrapped([one, two])
        optimizer = wrapped([one, two])

        def fail(_):
            raise RuntimeError("out of memory")

        for step in range(5):
            inner = one * (rank + 1)
            if step == 3:
                inner.register_hook(fail)
            try:
                (inner * two * 2).sum().backward()
            except RuntimeError as error:
                assert "out of memory" in str(error)  # noqa: PT017
            else:
                assert one.grad.tolist() == two.grad.tolist() == [3.0] * 3
            one.grad = two.grad = None
        assert optimizer is not None

    ranks(rank_function)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_backward_pass_in_a_hook_of_the_users(op):
    def rank_function(rank):
        one, two = parameter(1.0), parameter(1.0)
        optimizer = wrapped([one, two], op=op)
        whole = SIZE if op == hvd.Sum else 1

        def more(_):
            with torch.enable_grad():
                (two * (rank + 1)).sum().backward()

        for _ in range(3):
            inner = one * (rank + 1)
            inner.register_hook(more)
            (inner * two).sum().backward()
            assert one.grad.tolist() == [1.5 * whole] * 3
            assert two.grad.tolist() == [3.0 * whole] * 3
            optimizer.zero_grad()

    ranks(rank_function)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_gradient_that_is_all_the_script_keeps(op):
    """No view of it, nor of another gradient of its bucket, gives it away."""

    def rank_function(rank):
        one = parameter(1.0)
        optimizer = wrapped([one], op=op)
        kept = []
        for step in range(4):
            (one * (rank + step)).sum().backward()
            kept.append(one.grad)
            optimizer.zero_grad()
        whole = SIZE if op == hvd.Sum else 1
        assert [each.tolist() for each in kept] == [[whole * (0.5 + step)] * 3 for step in range(4)]

        del kept[:]
        addresses = set()
        for _ in range(3):
            (one * rank).sum().backward()
            addresses.add(one.grad.data_ptr())
            optimizer.zero_grad(set_to_none=False)
        assert len(addresses) == 1  # still the parameter's gradient: nothing allocated

    ranks(rank_function)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_that_the_script_keeps(op):
    """As methods do that compare the gradients of several losses or steps."""

    def rank_function(rank):
        one, two = parameter(1.0), parameter(1.0)
        optimizer = wrapped([one, two], op=op)
        whole = SIZE if op == hvd.Sum else 1
        kept, views = [], []
        for step in range(4):
            (one * (rank + step) + two * rank).sum().backward()
            kept.append(one.grad)
            views.append(two.grad[1:])
            optimizer.zero_grad()
        assert [each.tolist() for each in kept] == [[whole * (0.5 + step)] * 3 for step in range(4)]
        assert [each.tolist() for each in views] == [[whole * 0.5] * 2] * 4
        kept.clear()
        views.clear()
        addresses = set()
        for _ in range(3):
            (one * 2 + two).sum().backward()
            addresses.add(one.grad.data_ptr())
            optimizer.zero_grad()
        assert len(addresses) == 1  # nothing kept: nothing allocated

    ranks(rank_function)
