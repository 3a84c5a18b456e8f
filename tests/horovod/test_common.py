"""What programs and tests import from ``horovod.common``."""

from __future__ import annotations

import os

import pytest

from farandole.core.errors import NotInitializedError
from farandole.horovod.common import process_sets, util
from farandole.horovod.common.basics import HorovodBasics
from farandole.horovod.common.exceptions import HorovodVersionMismatchError
from farandole.horovod.runner.util.threads import in_thread


def test_variables_are_set_for_a_while() -> None:
    os.environ["FARANDOLE_TEST_A"] = "1"
    with util.env(FARANDOLE_TEST_A="2", FARANDOLE_TEST_B="3", FARANDOLE_TEST_C=None):
        assert os.environ["FARANDOLE_TEST_A"] == "2"
        assert os.environ["FARANDOLE_TEST_B"] == "3"
        assert "FARANDOLE_TEST_C" not in os.environ
        del os.environ["FARANDOLE_TEST_B"]
    assert os.environ.pop("FARANDOLE_TEST_A") == "1"
    assert "FARANDOLE_TEST_B" not in os.environ


def test_what_can_be_used() -> None:
    assert util.gloo_built() is True
    assert util.mpi_built() is util.ddl_built() is util.ccl_built() is False
    assert util.nccl_built() >= 0
    assert util.extension_available("torch")
    assert not util.extension_available("tensorflow")
    assert util.gpu_available("mxnet") is False
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.tensorflow has not been built: Farandole has"):
        util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__)


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.13.0+cpu", "1.10.0", True),
        ("1.9", "1.10.0", False),
        ("1.10", "1.10.0", True),
        ("1.10.0.1", "1.10.0", True),
        ("0.28.1", "0.28.2", False),
    ],
)
def test_versions_are_compared(version: str, target: str, expected: bool) -> None:
    assert util.is_version_greater_equal_than(version, target) is expected


def test_versions_that_are_none() -> None:
    with pytest.raises(ValueError, match="string arguments"):
        util.is_version_greater_equal_than("1", 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"major\.minor\.patch"):
        util.is_version_greater_equal_than("1.0.0", "1.0")


def test_lists_are_cut() -> None:
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert util.split_list([1], 2) == [[1], []]
    assert [number for number in range(-1, 9) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8]
    assert util.is_iterable([])
    assert not util.is_iterable(3)


def test_basics_are_those_of_the_front() -> None:
    basics = HorovodBasics(__file__, "mpi_lib_v2")
    assert basics.is_initialized() is False
    with pytest.raises(NotInitializedError):
        basics.rank()
    assert basics.mpi_built() is False
    with pytest.raises(AttributeError, match="no attribute 'allreduce'"):
        basics.allreduce  # noqa: B018


def test_process_sets_are_those_of_the_front() -> None:
    import farandole.torch as hvd

    assert process_sets.ProcessSet is hvd.ProcessSet
    assert process_sets.global_process_set is hvd.global_process_set


def test_the_error_that_is_never_raised() -> None:
    error = HorovodVersionMismatchError("torch", "2", "1")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2", "1")


def test_a_function_is_called_in_a_thread() -> None:
    seen: list[int] = []
    in_thread(seen.append, args=(3,), name="adds").join()
    in_thread(lambda: 1 / 0, silent=True).join()
    assert seen == [3]
    with pytest.raises(ValueError, match="must be a tuple"):
        in_thread(seen.append, args=[3])  # type: ignore[arg-type]
