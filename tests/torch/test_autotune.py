"""Autotuning while training: what it changes (when gradients leave), and what it does not."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch
from torch import nn
from torch_ranks import assert_equal_bits, fill, weights

import farandole.torch as hvd
from farandole.core.errors import MismatchError
from farandole.testing.ranks import process_outcomes, run_processes, run_threads
from farandole.torch import tuning

STEPS = 60


@pytest.fixture(autouse=True)
def bad_start(monkeypatch):
    monkeypatch.setenv("FARANDOLE_BUCKET_BYTES", "65536")
    monkeypatch.setenv("FARANDOLE_FIRST_BUCKET_BYTES", "1024")
    monkeypatch.setenv("FARANDOLE_AUTOTUNE_WARMUP_SAMPLES", "1")
    monkeypatch.setenv("FARANDOLE_AUTOTUNE_STEPS_PER_SAMPLE", "2")


@pytest.fixture
def tuned(monkeypatch):
    monkeypatch.setenv("FARANDOLE_AUTOTUNE", "1")


class ClockOfEachRank:
    """Stands still, but where a rank, which is a thread, says that it took some time."""

    def __init__(self):
        self._here = threading.local()

    def now(self) -> float:
        return getattr(self._here, "time", 0.0)

    def spend(self, seconds: float) -> None:
        self._here.time = self.now() + seconds


def make_model() -> nn.Module:
    """Of 1.1 MiB, so that several sizes of buckets make a difference."""
    return stack(9)


def stack(layers: int) -> nn.Module:
    model = fill(nn.Sequential(*(nn.Linear(128, 128) for _ in range(layers)), nn.Linear(128, 1)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)
    return model


def dressed(model: nn.Module, **more):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **more)


def backward(model: nn.Module, rank: int, step: int) -> None:
    random = torch.Generator().manual_seed(1000 * step + rank)
    model(torch.randn(2, 128, generator=random)).square().mean().backward()


def buckets_of(optimizer) -> int:
    agreed = optimizer._farandole.gradients._agreed
    return 0 if agreed is None else len(agreed.reducer.plan.buckets)


def plan_of(optimizer) -> str:
    return optimizer._farandole.gradients._agreed.reducer.plan.digest


def train(optimizer, model: nn.Module, rank: int, steps: int = STEPS) -> list[str]:
    """The plan in force after each step."""
    plans = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, rank, step)
        plans.append(plan_of(optimizer))
        optimizer.step()
    return plans


def ranks(size: int, function):
    def rank_function(rank):
        hvd.init()
        result = function(rank)
        hvd.shutdown()
        return result

    return run_threads(size, rank_function)


def trained(rank: int, **more):
    model = make_model()
    plans = train(dressed(model, **more), model, rank)
    return plans, weights(model)


@pytest.mark.parametrize("more", [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}])
def test_trials_change_plans_on_all_ranks_at_once_and_no_result(monkeypatch, more):
    plain = ranks(3, lambda rank: trained(rank, **more))
    monkeypatch.setenv("FARANDOLE_AUTOTUNE", "1")
    tuned = ranks(3, lambda rank: trained(rank, **more))
    assert len(set(plain[0][0])) == 1
    plans = tuned[0][0]
    assert all(plans == theirs for theirs, _ in tuned)
    assert len(set(plans)) >= 4  # several were tried
    assert len(set(plans[-10:])) == 1  # and one was chosen
    assert_equal_bits([values for _, values in plain + tuned])
    assert not torch.equal(plain[0][1][0], weights(make_model())[0])


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_a_second_backward_pass_adds_to_results_that_were_moved(op):
    """With two passes a step, half of the switches come between them."""

    def rank_function(rank):
        model, alone = make_model(), make_model()
        optimizer = dressed(model, op=op)
        for step in range(40):
            optimizer.zero_grad()
            alone.zero_grad()
            for number in range(2):
                backward(model, rank, 2 * step + number)
                for each in range(2):
                    backward(alone, each, 2 * step + number)
            factor = 2 if op is hvd.Average else 1
            for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad / factor)

    ranks(2, rank_function)


@pytest.mark.usefixtures("tuned")
def test_a_parameter_without_gradient_keeps_none_through_all_switches():
    def rank_function(rank):
        model, unused = make_model(), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*model.parameters(), unused], lr=0.01)
        optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(40):
            optimizer.zero_grad()
            assert all(each.grad is None for each in model.parameters())
            backward(model, rank, step)
            assert unused.grad is None
            assert all(each.grad is not None for each in model.parameters())
            optimizer.step()

    ranks(2, rank_function)


@pytest.mark.usefixtures("tuned")
def test_a_gradient_that_the_script_keeps_stays_as_it_was():
    def rank_function(rank):
        model = make_model()
        optimizer = dressed(model)
        kept = []
        for step in range(30):
            optimizer.zero_grad()
            backward(model, rank, step)
            gradient = next(model.parameters()).grad
            kept.append((gradient, gradient.clone()))
            optimizer.step()
        for gradient, copy in kept:
            assert torch.equal(gradient, copy)

    ranks(2, rank_function)


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize("before", [3, 7, 20])
def test_a_rank_that_joins_holds_up_no_trial_and_spoils_none(before):
    """Some steps with all ranks, some without one, and then enough with all to come to a choice."""

    def rank_function(rank):
        model = make_model()
        optimizer = dressed(model)
        train(optimizer, model, rank, before if rank else before + 8)
        hvd.join()
        return train(optimizer, model, rank)

    first, second = ranks(2, rank_function)
    assert first == second
    assert len(set(first[-10:])) == 1
    assert len(set(first)) >= (2 if before < 20 else 1)


@pytest.mark.usefixtures("tuned")
def test_a_parameter_that_is_frozen_meanwhile_begins_the_trial_again():
    def rank_function(rank):
        model = make_model()
        optimizer = dressed(model)
        plans = train(optimizer, model, rank, 10)
        model[0].weight.requires_grad_(False)
        return plans + train(optimizer, model, rank)

    first, second = ranks(2, rank_function)
    assert first == second
    assert len(set(first[-10:])) == 1


@pytest.mark.usefixtures("tuned")
def test_a_choice_holds_for_the_parameters_that_are_left():
    def rank_function(rank):
        model = make_model()
        optimizer = dressed(model)
        train(optimizer, model, rank)
        chosen = optimizer._farandole.gradients._agreed.proposal
        model[0].weight.requires_grad_(False)
        train(optimizer, model, rank, 3)
        after = optimizer._farandole.gradients._agreed.proposal
        assert len(after.parameters) == len(chosen.parameters) - 1
        return [(each.bucket_bytes, each.first_bucket_bytes) for each in (chosen, after)]

    (chosen, after), other = ranks(2, rank_function)
    assert chosen == after
    assert [chosen, after] == other


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("allowed", "compression", "expected"),
    [
        ("none", hvd.Compression.none, ""),
        ("fp16", hvd.Compression.none, "FP16Compressor"),
        ("bf16", hvd.Compression.none, "BF16Compressor"),
        ("bf16", hvd.Compression.fp16, "FP16Compressor"),
    ],
)
def test_gradients_are_compressed_only_where_that_is_allowed(
    allowed, compression, expected, monkeypatch
):
    """A rank's step takes a second, and half of that when gradients are compressed."""
    monkeypatch.setenv("FARANDOLE_AUTOTUNE_COMPRESSION", allowed)
    clock = ClockOfEachRank()
    monkeypatch.setattr(tuning, "SYSTEM_CLOCK", clock)

    def codec_of(optimizer):
        agreed = optimizer._farandole.gradients._agreed
        return "" if agreed is None else agreed.reducer.plan.parameters[0].codec

    def rank_function(rank):
        model, codecs = make_model(), []
        optimizer = dressed(model, compression=compression)
        for step in range(STEPS):
            optimizer.zero_grad()
            clock.spend(0.5 if codec_of(optimizer) else 1.0)
            backward(model, rank, step)
            codecs.append(codec_of(optimizer))
            optimizer.step()
        return codecs, weights(model)

    results = ranks(2, rank_function)
    for codecs, _ in results:
        assert codecs[-1] == expected
        assert set(codecs) <= {"", expected}
    assert_equal_bits([values for _, values in results])
    monkeypatch.setenv("FARANDOLE_AUTOTUNE", "0")
    plain = ranks(2, trained)
    for ours, theirs in zip(results[0][1], plain[0][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
        assert torch.equal(ours, theirs) or expected


@pytest.mark.usefixtures("tuned")
def test_only_the_first_optimizer_is_tuned():
    def rank_function(rank):
        models = [make_model(), make_model()]
        optimizers = [dressed(model) for model in models]
        plans: list[list[str]] = [[], []]
        for _ in range(20):
            for each, model, seen in zip(optimizers, models, plans, strict=True):
                seen += train(each, model, rank, 1)
        return [len(set(each)) for each in plans]

    for first, second in ranks(2, rank_function):
        assert first > 1
        assert second == 1


def test_the_log_tells_what_was_tried_and_its_choice_is_used_again(tmp_path, monkeypatch):
    path = tmp_path / "tuning.log"
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    monkeypatch.setenv("HOROVOD_AUTOTUNE_LOG", str(path))
    plans = ranks(2, trained)[0][0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["start"] == {"bucket_bytes": 65536, "first_bucket_bytes": 1024}
    trials = rows[1:-1]
    assert [each["trial"] for each in trials] == list(range(1, len(trials) + 1))
    assert all(each["seconds"] > 0 for each in trials)
    chosen = rows[-1]["chosen"]
    assert chosen in [each["setting"] for each in trials]

    before = path.read_text()
    again = ranks(2, trained)[0][0]
    assert set(again) == {plans[-1]}
    assert path.read_text() == before

    # Another model is another job.
    def other(rank):
        model = nn.Sequential(make_model(), nn.Linear(1, 1))
        return train(dressed(model), model, rank, 20)

    assert len(set(ranks(2, other)[0])) > 1
    assert path.read_text() != before


@pytest.mark.usefixtures("tuned")
def test_one_rank_has_nothing_to_tune():
    def rank_function(rank):
        model = make_model()
        optimizer = dressed(model)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()

    ranks(1, rank_function)


def test_ranks_that_would_tune_differently_are_told():
    def rank_function(rank):
        os.environ["FARANDOLE_AUTOTUNE"] = str(rank)
        hvd.init()
        model = make_model()
        train(dressed(model), model, rank, 5)

    for outcome in process_outcomes(2, rank_function):
        assert isinstance(outcome.error, MismatchError)
        assert "autotune nothing on rank 0, 2 steps a sample after 1 samples on rank 1" in str(
            outcome.error
        )


@pytest.mark.parametrize("engine", [pytest.param("torch", marks=pytest.mark.slow), "shm"])
def test_finds_its_way_from_a_bad_start_on_real_transport(engine, monkeypatch):
    """A model of many small parameters: a bucket for each costs several times the step.

    On two ranks every engine's sums are the same bits whatever the buckets are.
    """
    monkeypatch.setenv("FARANDOLE_ENGINE", engine)

    def rank_function(rank, tunes):
        os.environ["FARANDOLE_AUTOTUNE"] = tunes
        hvd.init()
        model = stack(40)
        optimizer = dressed(model)
        plans = train(optimizer, model, rank, 70)
        buckets = buckets_of(optimizer)
        hvd.shutdown()
        return plans, buckets, weights(model)

    tuned = run_processes(2, lambda rank: rank_function(rank, "1"))
    plain = run_processes(2, lambda rank: rank_function(rank, "0"))
    assert tuned[0][0] == tuned[1][0]
    assert 2 * tuned[0][1] < plain[0][1]
    assert_equal_bits([values for _, _, values in tuned + plain])


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize("slow", [0, 1])
def test_the_time_of_the_slowest_rank_decides(slow, monkeypatch):
    """Small buckets are dear on one rank, large ones a little so on the other."""
    clock = ClockOfEachRank()
    monkeypatch.setattr(tuning, "SYSTEM_CLOCK", clock)

    def rank_function(rank):
        model = make_model()
        optimizer = dressed(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            buckets = buckets_of(optimizer)
            clock.spend(0.1 * buckets if rank == slow else 0.1 / max(1, buckets))
            backward(model, rank, step)
            optimizer.step()
        return buckets_of(optimizer)

    assert ranks(2, rank_function) == [1, 1]
