"""Helpers that programs and tests import from Horovod: what is built in, and odds and ends.

Nothing of Farandole's is built, so "built" says here whether a thing can be used.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")
_FRONTS = ("torch",)
"""The frameworks that Farandole has a front for."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether programs of this framework (``torch``, ...) can be run here."""
    found = ext_base_name in _FRONTS and importlib.util.find_spec(ext_base_name) is not None
    if verbose:
        print(f"Extension {ext_base_name} {'was' if found else 'was NOT'} built.")  # noqa: T201
    return found


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ``ImportError`` when programs of the framework in ``horovod.FRAMEWORK`` cannot run."""
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(
            f"Extension {ext_name} has not been built: "
            + (
                f"{framework} is not installed."
                if framework in _FRONTS
                else f"Farandole has no front for {framework}."
            )
        )


def gloo_built(verbose: bool = False) -> bool:
    """Whether CPU tensors can be reduced."""
    return bool(_of_torch("gloo_built", verbose))


def mpi_built(verbose: bool = False) -> bool:
    """False: Farandole has no MPI in it (``mpirun`` can start its ranks all the same)."""
    return bool(_of_torch("mpi_built", verbose))


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as a number, such as 22703 for 2.27.3; 0 where torch has none."""
    return int(_of_torch("nccl_built", verbose))


def ddl_built(verbose: bool = False) -> bool:
    """False: Farandole has no DDL in it."""
    return bool(_of_torch("ddl_built", verbose))


def ccl_built(verbose: bool = False) -> bool:
    """False: Farandole has no oneCCL in it."""
    return bool(_of_torch("ccl_built", verbose))


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework sees a GPU."""
    if not extension_available(ext_base_name):
        return False
    import torch

    found = torch.cuda.is_available()
    if verbose:
        print(f"Extension {ext_base_name} {'was' if found else 'was NOT'} running with GPU.")  # noqa: T201
    return found


def _of_torch(name: str, verbose: bool) -> Any:
    if not extension_available("torch"):
        return 0
    import farandole.torch as hvd

    answer = getattr(hvd, name)()
    if verbose:
        print(f"{name}: {answer}")  # noqa: T201
    return answer


def _cache(f: Callable[..., _T]) -> Callable[..., _T]:
    """Remember what a function returned for the same arguments; they must be hashable."""
    known: dict[Any, _T] = {}

    def remembered(*args: Any, **kwargs: Any) -> _T:
        key = (args, frozenset(kwargs.items()))
        if key not in known:
            known[key] = f(*args, **kwargs)
        return known[key]

    return remembered


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for a while; those that are ``None`` stay as they are.

    Example::

        with env(HOROVOD_STALL_CHECK_TIME_SECONDS="2"):
            hvd.init()
    """
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[_T], n: int) -> list[Sequence[_T]]:  # noqa: E741 - its name there
    """Cut a sequence into ``n`` parts whose lengths differ by one at most, longer ones first."""
    length, longer = divmod(len(l), n)
    ends = [i * length + min(i, longer) for i in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(ends)]


def is_iterable(x: object) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version ``ver`` is ``target`` (``major.minor.patch``) or a later one."""
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"This function only accepts string arguments, got {ver!r}, {target!r}.")  # noqa: TRY004
    if len(target.split(".")) != 3:
        raise ValueError(f"The target must be of the form major.minor.patch, got {target!r}.")
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    return tuple([*numbers, 0, 0, 0][: max(3, len(numbers))])
