"""Training on the backend ``farandole`` with what torch brings: DDP, FSDP2, DTensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import backend_ranks
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import batches, fill, loss_of, make_model, share, weights


def train(model: nn.Module, module: nn.Module, rank: int, size: int) -> list[Tensor]:
    """Some steps of ``model``; the parameters of ``module``, which it wraps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for batch in batches(4):
        optimizer.zero_grad()
        loss_of(model, share(batch, rank, size)).backward()
        optimizer.step()
    return weights(module)


@pytest.mark.parametrize("static", [False, True])
def test_ddp_trains_as_on_gloo(tmp_path: Path, static: bool) -> None:
    def check(rank: int) -> list[Tensor]:
        results = []
        for group in (dist.new_group(backend="gloo"), None):
            module = make_model()
            ddp = DistributedDataParallel(
                module,
                process_group=group,
                static_graph=static,
                gradient_as_bucket_view=static,
                bucket_cap_mb=0.001,  # several buckets
            )
            results.append(train(ddp, module, rank, 2))
        for gloo, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, gloo, rtol=1e-10, atol=1e-12)
        return results[1]

    first, second = backend_ranks.run(tmp_path, 2, check)
    assert all(map(torch.equal, first, second))


def test_fsdp2_trains_as_on_gloo(tmp_path: Path) -> None:
    def check(rank: int) -> int:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        results = []
        for group in (dist.new_group(backend="gloo"), dist.group.WORLD):
            model = fill(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            random = torch.Generator().manual_seed(rank)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 6, generator=random)).square().mean().backward()
                optimizer.step()
            results.append([each.full_tensor() for each in model.parameters()])
        for gloo, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, gloo)
        return len(results[1])

    assert backend_ranks.run(tmp_path, 2, check) == [4, 4]


def test_dtensors_are_dealt_out_and_redistributed(tmp_path: Path) -> None:
    def check(rank: int) -> list[float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        whole = torch.arange(16.0).view(4, 4)
        part = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert part.to_local().shape == (2, 2)
        turned = part.redistribute(mesh, [Shard(1), Replicate()])
        assert torch.equal(turned.full_tensor(), whole)
        return (part @ part).full_tensor().flatten().tolist()

    whole = torch.arange(16.0).view(4, 4)
    assert backend_ranks.run(tmp_path, 4, check) == [(whole @ whole).flatten().tolist()] * 4


def test_it_lives_beside_init(tmp_path: Path) -> None:
    def check(rank: int) -> list[float]:
        import farandole.torch as hvd

        hvd.init()
        dist.all_reduce(theirs := torch.tensor([1.0]))
        ours = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum)
        hvd.shutdown()
        dist.all_reduce(theirs)
        return [theirs.item(), ours.item()]

    assert backend_ranks.run(tmp_path, 2, check) == [[4.0, 1.0]] * 2


def test_a_group_forms_again_on_the_same_store(tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'store'}"

    def check(rank: int) -> list[float]:
        import farandole.torch  # noqa: F401

        store = dist.FileStore(method.removeprefix("file://"), 2)
        totals = []
        for number in range(3):
            dist.init_process_group("farandole", store=store, rank=rank, world_size=2)
            dist.all_reduce(tensor := torch.tensor([float(rank + number)]))
            totals.append(tensor.item())
            dist.destroy_process_group()
        return totals

    assert backend_ranks.run_processes(2, check) == [[1.0, 3.0, 5.0]] * 2


SCRIPT = """
import torch
import torch.distributed as dist
import farandole.torch

dist.init_process_group("farandole")
dist.all_reduce(total := torch.tensor([dist.get_rank() + 1.0]))
said = f"total {total.item()} of rank {dist.get_rank()} by {dist.get_backend()}"
print(said + "\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["farandole", "torchrun"])
def test_under_each_launcher(launcher: str, tmp_path: Path) -> None:
    """``torchrun`` gives no secret: there the ranks find it in a file."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = {
        "farandole": ["farandole", "run", "-np", "2"],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node=2"],
    }[launcher]
    environment: dict[str, Any] = {
        **os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)
    }  # fmt: skip
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:], str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"total 3.0 of rank {rank} by farandole" in done.stdout
    assert list((tmp_path / "farandole").glob("*")) == []
