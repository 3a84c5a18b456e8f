"""SIGTERM: all ranks agree on a step, commit, save, and those that got it exit with 143."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole.torch as hvd
from farandole.testing.ranks import process_outcomes, run_processes

STEPS = 12


def train(folder: Path, doomed: dict[int, int], log: Path | None = None) -> Any:
    """Train; the ranks in ``doomed`` get SIGTERM in the step that it names."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.keep_in(folder, every=5)

    @hvd.elastic.run
    def loop(state: Any) -> tuple[int, list[float]]:
        first = state.step
        while state.step < STEPS:
            if doomed.get(hvd.rank()) == state.step:
                os.kill(os.getpid(), signal.SIGTERM)
            inputs = torch.full((4, 3), float(state.step))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
        return first, model.weight.detach().flatten().tolist()

    result = loop(state)
    hvd.shutdown()
    return result


@pytest.mark.parametrize(
    "doomed",
    [
        pytest.param({0: 3, 1: 3}, id="together", marks=pytest.mark.slow),
        pytest.param({0: 6, 1: 7}, id="apart"),
    ],
)
def test_told_to_end_all_save_the_same_step_and_a_new_job_goes_on(
    tmp_path: Path, doomed: dict[int, int]
) -> None:
    undisturbed = run_processes(2, lambda _: train(tmp_path / "undisturbed", {}))
    outcomes = process_outcomes(2, lambda _: train(tmp_path / "kept", doomed))
    codes = {outcome.exit_code for outcome in outcomes}
    assert 143 in codes
    saved = sorted(path.name for path in (tmp_path / "kept").glob("step-*"))
    assert int(saved[-1].removeprefix("step-")) == min(doomed.values()) + 1
    again = run_processes(2, lambda _: train(tmp_path / "kept", {}))
    assert [first for first, _ in again] == [min(doomed.values()) + 1] * 2
    assert [weights for _, weights in again] == [weights for _, weights in undisturbed]


def test_a_job_of_another_size_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    process_outcomes(2, lambda _: train(tmp_path, {0: 7, 1: 7}))
    for first, _ in run_processes(3, lambda _: train(tmp_path, {})):
        assert first == 8


def test_a_signal_after_the_last_commit_ends_the_process_all_the_same(tmp_path: Path) -> None:
    def be(_: int) -> None:
        hvd.init()
        state = hvd.elastic.TorchState(torch.nn.Linear(1, 1))

        @hvd.elastic.run
        def loop(_: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        loop(state)

    (outcome,) = process_outcomes(1, be)
    assert not outcome.finished
    assert outcome.signal == signal.SIGTERM
