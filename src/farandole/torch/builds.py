"""What Farandole is made of, in Horovod's questions: scripts ask them to choose a way."""

from __future__ import annotations

import torch

from farandole.core.errors import UsageError
from farandole.torch.session import current


def mpi_built() -> bool:
    """``False``: Farandole never uses MPI, also when ``mpirun`` started the ranks.

    Example::

        assert not hvd.mpi_built()
    """
    return False


def mpi_enabled() -> bool:
    """``False``; see :func:`mpi_built`.

    Example::

        assert not hvd.mpi_enabled()
    """
    return False


def mpi_threads_supported() -> bool:
    """Raises ``UsageError`` (a ``ValueError``), as Horovod does where MPI is not in use.

    Any thread may call any collective.

    Example::

        threads = hvd.mpi_enabled() and hvd.mpi_threads_supported()
    """
    current()  # says so where init() is missing
    raise UsageError("Horovod MPI is not enabled: Farandole does not use MPI.")


def gloo_built() -> bool:
    """Whether this torch has Gloo, which carries CPU tensors.

    Example::

        assert hvd.gloo_built()
    """
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def gloo_enabled() -> bool:
    """As :func:`gloo_built`.

    Example::

        assert hvd.gloo_enabled()
    """
    return gloo_built()


def nccl_built() -> int:
    """The version of the NCCL in this torch, as in 22304 for 2.23.4; 0 without one.

    Example::

        if hvd.nccl_built():
            model.cuda()
    """
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call, unused-ignore]
    major, minor, patch = (*version, 0, 0)[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """``False``: IBM's DDL is not used.

    Example::

        assert not hvd.ddl_built()
    """
    return False


def ccl_built() -> bool:
    """``False``: Intel's oneCCL is not used.

    Example::

        assert not hvd.ccl_built()
    """
    return False


def cuda_built() -> bool:
    """Whether this torch is built with CUDA.

    Example::

        device = "cuda" if hvd.cuda_built() and torch.cuda.is_available() else "cpu"
    """
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch is built with ROCm.

    Example::

        assert not hvd.rocm_built()
    """
    return torch.version.hip is not None
