"""Horovod's basics as an object, as modules of Horovod's fronts keep one."""

from __future__ import annotations

from typing import Any

_NAMES = frozenset([
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built",
    "gloo_enabled", "init", "is_homogeneous", "is_initialized", "local_rank", "local_size",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "rocm_built",
    "shutdown", "size", "start_timeline", "stop_timeline",
])  # fmt: skip


class HorovodBasics:
    """``init()``, ``rank()`` and the like as methods; where a compiled library was, is ignored.

    Example::

        basics = HorovodBasics(__file__, "mpi_lib_v2")
        basics.init()
    """

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        self._place = (pkg_path, *args)

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        from farandole.torch import mpi_ops

        return getattr(mpi_ops, name)
