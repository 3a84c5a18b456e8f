from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benches import Bench, ProcessBench
from cluster_bench import ClusterBench


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kubernetes")
    group.addoption(
        "--cluster-image", metavar="IMAGE",
        help="run the end-to-end tests with this image on the cluster of the current kubeconfig",
    )  # fmt: skip
    group.addoption(
        "--storage-class", metavar="NAME",
        help="of the volumes that the tests share there [default: the cluster's]",
    )  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A cluster: of processes, or the one that was asked for."""
    # Where the whole repository is tested, these options are not known: only then is this file
    # found too late for them.
    image = request.config.getoption("--cluster-image", None)
    storage = request.config.getoption("--storage-class", None)
    made = ClusterBench(tmp_path, image, storage) if image else ProcessBench(tmp_path)
    yield made
    made.close()
