"""Makes ``torch.distributed.init_process_group("farandole")`` work."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

NAME = "farandole"

DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Tell torch.distributed of the backend; does nothing where torch has no such thing.

    Example::

        import farandole.torch
        import torch.distributed as dist

        dist.init_process_group("farandole")
        model = DistributedDataParallel(model)
    """
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def _create(options: Any, _backend_options: object) -> Any:
    """A process group, as torch asks for it with its ``_DistributedBackendOptions``."""
    # Not before torch asks: what belongs to the backend is no part of importing farandole.torch.
    from farandole.torch.backend import places
    from farandole.torch.backend.process_group import FarandoleProcessGroup

    place = places.take(options)
    try:
        gloo = _gloo(options, place.address)
        return FarandoleProcessGroup(
            options.store, place, gloo, DEVICES, options.timeout.total_seconds()
        )
    except BaseException as error:
        place.leave(f"{type(error).__name__}: {error}")
        raise


def _gloo(options: Any, address: str) -> Any:
    """Torch's own Gloo group of the same ranks; its connections are made when first used."""
    kind: Any = dist.ProcessGroupGloo
    settings = kind._Options()
    settings._devices = [kind.create_device(hostname=address, lazy_init=True)]
    settings._timeout = max(options.timeout, datetime.timedelta(milliseconds=1))
    settings.global_ranks_in_group = list(options.global_ranks_in_group)
    settings.group_name = options.group_id
    return kind(options.store, options.group_rank, options.group_size, settings)
