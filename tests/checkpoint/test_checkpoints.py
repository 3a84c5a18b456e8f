"""Checkpoints through the public API, with real processes: whole or not at all, at any size."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole.torch as hvd
from farandole.core.errors import FarandoleError, MismatchError, SetupError, UsageError
from farandole.testing.ranks import process_outcomes, run_processes, run_threads


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 64:
            raise IndexError(index)
        return torch.full((4,), float(index))


def training(seed: int = 0) -> dict[str, Any]:
    """A model and all that belongs to it, each rank's the same."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        "data": hvd.DataLoader(Numbers(), 2, shuffle=True),
    }


def train(parts: dict[str, Any]) -> Iterator[float]:
    """One step after the other; their losses, averaged over the ranks."""
    while True:
        for batch in parts["data"]:
            loss = parts["model"](batch / 64).square().mean() * parts["data"].weight
            parts["optimizer"].zero_grad()
            loss.backward()
            parts["optimizer"].step()
            parts["scheduler"].step()
            yield float(hvd.allreduce(loss.detach(), name="loss"))


def begin(folder: Path, save_at: int, steps: int) -> Any:
    """Train from scratch, save on the way, and say what came after it."""
    hvd.init()
    parts = training()
    checkpoints = hvd.Checkpoints(folder, **parts)
    assert checkpoints.load() is None
    losses = train(parts)
    list(islice(losses, save_at))
    checkpoints.save(save_at, epoch=0, note=["any", {"plain": 1.5}])
    after = list(islice(losses, steps))
    drawn = random.random(), float(torch.rand(()))
    hvd.shutdown()
    return after, drawn


def loss_of(parts: dict[str, Any]) -> float:
    """That of all samples, whatever the number of ranks."""
    batch = torch.stack([Numbers()[index] for index in range(64)]) / 64
    with torch.no_grad():
        return float(parts["model"](batch).square().mean())


def resume(folder: Path, steps: int) -> Any:
    hvd.init()
    parts = training(seed=99)
    checkpoints = hvd.Checkpoints(folder, **parts)
    about = checkpoints.load()
    lr = parts["optimizer"].param_groups[0]["lr"]
    losses = list(islice(train(parts), steps))
    hvd.shutdown()
    return about, lr, losses


@pytest.mark.slow
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    before = run_processes(2, lambda _: begin(tmp_path, 5, 10))
    again = run_processes(2, lambda _: resume(tmp_path, 10))
    for (expected, _), (about, lr, losses) in zip(before, again, strict=True):
        assert about == {"step": 5, "epoch": 0, "note": ["any", {"plain": 1.5}]}
        assert lr == 0.005
        assert losses == expected


def test_any_other_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """4 to 2 to 3 ranks: the global batches differ, so the loss is that of the same weights."""

    def go_on(_: int) -> Any:
        hvd.init()
        parts = training(seed=5)
        checkpoints = hvd.Checkpoints(tmp_path, **parts)
        about = checkpoints.load() or {"step": 0}
        before, seen = loss_of(parts), parts["data"].state_dict()["done"]
        list(islice(train(parts), 2))
        checkpoints.save(about["step"] + 2)
        after = loss_of(parts)
        hvd.shutdown()
        return about["step"], seen, before, after

    four, two, three = (run_processes(size, go_on) for size in (4, 2, 3))
    for saved, resumed, place in ((four, two, (2, 16)), (two, three, (4, 24))):
        assert {each[:2] for each in resumed} == {place}
        (loss,) = {before for *_, before, _ in resumed}
        assert {after for *_, after in saved} == {loss}


def test_every_tensor_is_written_once_and_ranks_share_the_work(tmp_path: Path) -> None:
    def save(_: int) -> None:
        hvd.init()
        layers = [torch.nn.Linear(200, 200) for _ in range(8)]
        hvd.Checkpoints(tmp_path, model=torch.nn.Sequential(*layers)).save(1)
        hvd.shutdown()

    run_threads(4, save)
    (folder,) = tmp_path.glob("step-*")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    sizes = [about["bytes"] for name, about in files.items() if name.endswith(".distcp")]
    model = 8 * (200 * 200 + 200) * 4
    assert len(sizes) == 4
    assert model < sum(sizes) < 1.2 * model
    assert max(sizes) < 1.5 * model / 4


@pytest.mark.slow
def test_random_states_go_on(tmp_path: Path) -> None:
    before = run_processes(2, lambda _: begin(tmp_path, 1, 0))

    def draw(_: int) -> Any:
        hvd.init()
        parts = training(seed=1)
        hvd.Checkpoints(tmp_path, **parts).load()
        drawn = random.random(), float(torch.rand(()))
        hvd.shutdown()
        return drawn

    assert run_processes(2, draw) == [drawn for _, drawn in before]


def test_the_newest_ones_stay(tmp_path: Path) -> None:
    def save_often(_: int) -> None:
        hvd.init()
        checkpoints = hvd.Checkpoints(tmp_path, keep=2, model=training()["model"])
        for step in (1, 2, 3, 10):
            checkpoints.save(step)
        hvd.shutdown()

    run_threads(2, save_often)
    assert sorted(p.name for p in tmp_path.glob("*")) == [
        "generation",
        "step-000000000003",
        "step-000000000010",
    ]


def saved_twice(folder: Path) -> None:
    def save(_: int) -> None:
        hvd.init()
        model = training()["model"]
        checkpoints = hvd.Checkpoints(folder, model=model)
        for step in (1, 2):
            with torch.no_grad():
                model[0].bias.fill_(step)
            checkpoints.save(step)
        hvd.shutdown()

    run_threads(2, save)


def found_by(size: int, folder: Path) -> list[Any]:
    def load(_: int) -> Any:
        hvd.init()
        model = training()["model"]
        about = hvd.Checkpoints(folder, model=model).load()
        hvd.shutdown()
        return about and (about["step"], float(model[0].bias.detach()[0]))

    return run_threads(size, load)


DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 7),
    "altered": lambda path: path.write_bytes(
        path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])
    ),
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("which", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage: str, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved_twice(tmp_path)
    assert found_by(2, tmp_path) == [(2, 2.0)] * 2
    DAMAGES[damage](tmp_path / "step-000000000002" / which)
    with caplog.at_level(logging.WARNING, "farandole.checkpoint"):
        assert found_by(3, tmp_path) == [(1, 1.0)] * 3
    if (damage, which) != ("removed", "manifest.json"):  # then it was never published
        assert which in caplog.text


def test_different_steps_or_models_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def differ(rank: int) -> list[str]:
        hvd.init()
        said = []
        one = hvd.Checkpoints(tmp_path, model=training()["model"])
        other = hvd.Checkpoints(tmp_path, model=torch.nn.Linear(2, 3 + rank))
        for save in (lambda: one.save(7 + rank), lambda: other.save(1)):
            with pytest.raises(MismatchError) as error:
                save()
            said.append(str(error.value))
        hvd.shutdown()
        return said

    first, second = run_threads(2, differ)
    assert first == second
    assert "7 on rank 0; 8 on rank 1" in first[0]


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def save(_: int) -> str:
        hvd.init()
        checkpoints = hvd.Checkpoints(tmp_path / "file" / "below", model=training()["model"])
        with pytest.raises(SetupError) as error:
            checkpoints.save(1)
        hvd.shutdown()
        return str(error.value)

    for said in run_threads(2, save):
        assert "Name a folder" in said


def test_a_write_that_fails_on_one_rank_is_an_error_of_wait_on_all(tmp_path: Path) -> None:
    def save(rank: int) -> str:
        hvd.init()
        checkpoints = hvd.Checkpoints(tmp_path, model=training()["model"])
        checkpoints.save(1)
        checkpoints.wait(60)
        if rank == 1:
            import resource

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        checkpoints.save(2)
        with pytest.raises(SetupError) as error:
            checkpoints.wait(60)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        hvd.shutdown()
        return str(error.value)

    for said in run_processes(2, save):
        assert "step 2 was not written: rank 1 could not write" in said
    assert found_by(2, tmp_path)[0][0] == 1


def test_what_has_no_state_and_what_was_not_saved_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"save\(step, epoch=epoch\)"):
        hvd.Checkpoints(tmp_path, epoch=3)
    saved_twice(tmp_path)

    def load(_: int) -> None:
        hvd.init()
        parts = training()
        with pytest.raises(UsageError, match="has no optimizer: it holds model"):
            hvd.Checkpoints(tmp_path, model=parts["model"], optimizer=parts["optimizer"]).load()
        hvd.shutdown()

    run_threads(1, load)


def save_until_killed(folder: Path, doomed: int, after: float, _: int) -> None:
    """Each rank saves over and over; one is killed at some moment of it."""
    hvd.init()
    parts = training()
    parts["model"].register_buffer("ballast", torch.zeros(300_000))
    checkpoints = hvd.Checkpoints(folder, **parts)
    about = checkpoints.load()
    step = about["step"] if about else 0
    end = time.monotonic() + after
    while True:
        step += 1
        with torch.no_grad():
            parts["model"].ballast.fill_(step)
        checkpoints.save(step)
        if hvd.rank() == doomed and time.monotonic() > end:
            time.sleep((os.getpid() % 100) / 2500)  # somewhere within the write
            os.kill(os.getpid(), signal.SIGKILL)


def kill_in_saves(folder: Path, rounds: int) -> None:
    last = 0
    for number in range(rounds):
        doomed, after = number % 3, 0.02 * (number % 7)
        process_outcomes(3, partial(save_until_killed, folder, doomed, after), timeout=90)

        def load(_: int) -> tuple[int, float]:
            hvd.init()
            parts = training()
            parts["model"].register_buffer("ballast", torch.zeros(300_000))
            about = hvd.Checkpoints(folder, **parts).load()
            hvd.shutdown()
            return (about["step"] if about else 0, float(parts["model"].ballast.mean()))

        loaded = run_threads(2, load)
        assert loaded[0] == loaded[1]
        step, ballast = loaded[0]
        assert step >= last
        assert ballast == step
        last = step
    assert last > 0


def test_a_kill_in_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_in_saves(tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_in_saves_leave_a_whole_checkpoint_each(tmp_path: Path) -> None:
    kill_in_saves(tmp_path, 20)


def test_an_older_generation_cannot_publish(tmp_path: Path) -> None:
    from farandole.elastic.checkpoint.shelf import Shelf

    old = Shelf(tmp_path)
    old.open(1)
    aside = old.aside(5, 1)
    Shelf(tmp_path).open(2)
    aside.mkdir(exist_ok=True)  # it goes on writing
    with pytest.raises(FarandoleError, match="generation 2 of the job is at work"):
        old.publish(aside, 5, 1, {"files": {}})
    assert old.published() == []


def test_weights_are_exported_with_tied_ones_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def export(_: int) -> None:
        hvd.init()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        hvd.export_weights(model, tmp_path / "model.safetensors")
        hvd.shutdown()

    run_threads(2, export)
    loaded = load_file(tmp_path / "model.safetensors")
    assert sorted(loaded) == ["0.bias", "0.weight", "1.bias"]
