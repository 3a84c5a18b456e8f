"""Times steps of training: what each rank does. See ``farandole.bench.compare`` for the other side.

Every system trains its own copy of the model, from the same parameters and on the same batches, all
in one process. They take steps in turn, in rotated order; a step begins on all ranks at once, and
the slowest rank's time counts. In the end all copies that communicate must have the same
parameters.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole.torch as hvd
from farandole.bench.figures import slowest
from farandole.bench.models import MODELS, Step, make_model, make_optimizer, make_step
from farandole.bench.seats import Seats
from farandole.comm.engines.base import Engine
from farandole.core.errors import FarandoleBug

WARM_UP = 3


def measure(seats: Seats, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step, by model and system.

    ``options``: ``models``, ``systems`` and ``steps``. The systems are ``farandole`` (its
    optimizer), ``ddp`` (DistributedDataParallel with Gloo), ``backend`` (the same with backend
    ``farandole``) and ``local`` (no communication).
    """
    # Its successor in newer versions of torch does not exist in older ones.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers")
    hvd.init()
    dist.init_process_group(
        "gloo", store=seats.torch_store(), rank=seats.rank, world_size=seats.size
    )
    fence = seats.open("torch")
    seconds = {name: _time_all(seats, fence, MODELS[name], options) for name in options["models"]}
    hvd.shutdown()
    return {"seconds": seconds, "torch": torch.__version__}


def _time_all(
    seats: Seats, fence: Engine, kind: Any, options: dict[str, Any]
) -> dict[str, list[float]]:
    names: list[str] = options["systems"]
    models = {name: make_model(kind) for name in names}
    steps = {name: _step(name, model) for name, model in models.items()}
    torch.manual_seed(1 + seats.rank)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM_UP + options["steps"]):
        batch = kind.batch()
        first = number % len(names)
        for name in names[first:] + names[:first]:
            fence.barrier().wait()
            began = time.perf_counter()
            steps[name](batch)
            taken[name].append(time.perf_counter() - began)
    _check([model for name, model in models.items() if name != "local"])
    worst = slowest(seats.gather([taken[name][WARM_UP:] for name in names]))
    return dict(zip(names, worst, strict=True))


def _step(name: str, model: nn.Module) -> Step:
    if name == "farandole":
        optimizer: Any = hvd.DistributedOptimizer(make_optimizer(model), model.named_parameters())
        return make_step(model, optimizer)
    if name == "local":
        return make_step(model, make_optimizer(model))
    group = dist.new_group(backend="farandole" if name == "backend" else "gloo")
    # Farandole's optimizer broadcasts no buffers either.
    ddp = DistributedDataParallel(model, process_group=group, broadcast_buffers=False)
    return make_step(ddp, make_optimizer(ddp))


def _check(models: list[nn.Module]) -> None:
    """A fast wrong answer is no result."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        for other in parameters[1:]:
            if not torch.allclose(parameters[0], other, rtol=1e-3, atol=1e-4):
                raise FarandoleBug("The systems have trained different parameters.")
