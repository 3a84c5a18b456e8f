"""What only a real cluster can say: its scheduler, kubelet, admission and garbage collection."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benches import Bench
from cluster_bench import ClusterBench

from farandole.launch.kubernetes import kinds

pytest.importorskip("kr8s")

NEVER_RUNS = {
    "GPUs": ({"gpus": 64}, "No node has nvidia.com/gpu free"),
    "memory": ({"memory": "900Ti"}, "No node has enough memory free"),
    "labels": ({"node_selector": "{farandole.dev/zone: nowhere}"}, "No node has the labels"),
    "an image": ({"image": "registry.invalid/none:1"}, "registry.invalid/none:1"),
    "a name of an image": ({"image": "registry/UPPER:1"}, "The image's name registry/UPPER:1"),
}


@pytest.fixture
def cluster(bench: Bench) -> ClusterBench:
    if not isinstance(bench, ClusterBench):
        pytest.skip("needs a cluster: make test-cluster IMAGE=...")
    return bench


@pytest.mark.parametrize("lacking", NEVER_RUNS)
def test_why_a_job_does_not_run_is_explained(cluster: ClusterBench, lacking: str) -> None:
    fields, words = NEVER_RUNS[lacking]
    name = cluster.submit("", command="train.py", **fields)

    def first() -> str:
        causes = json.loads(cluster.call("explain", "--output", "json", name))
        return str(causes[0]["cause"]) if causes else ""

    cluster.until(first, "cause")
    assert words in first()


def test_a_job_that_does_not_start_in_time_is_stopped_and_the_cause_is_said(
    cluster: ClusterBench,
) -> None:
    (cluster.project / "train.py").write_text("")
    submitting = cluster.start(
        "submit", "--image", cluster.image, "--gpus", "64", "--start-timeout", "5", "train.py"
    )
    _, said = submitting.communicate(timeout=cluster.limit)
    assert submitting.returncode == 1
    assert "given up" in said
    assert "No node has nvidia.com/gpu free" in said
    cluster.until(lambda: not cluster.all(kinds.POD), "end of the pod")


def refusal(cluster: ClusterBench, **fields: Any) -> str:
    lines = {"command": "train.py", "image": cluster.image, **fields}
    (cluster.project / "train.py").write_text("")
    (cluster.project / "job.yaml").write_text(
        "".join(f"{name}: {value}\n" for name, value in lines.items())
    )
    return cluster.call("submit", "--detach", "job.yaml", code=1)


def test_what_is_refused_leaves_nothing(cluster: ClusterBench) -> None:
    said = refusal(cluster, pod_patch="{spec: {misspelt: 1}}")
    assert 'unknown field "spec.template.spec.misspelt"' in said
    said = refusal(cluster, pod_patch="{spec: {priorityClassName: UPPER}}")
    assert "priorityClassName" in said
    assert not cluster.all(kinds.JOB)
    assert not cluster.all(kinds.SECRET)


def test_in_a_restricted_namespace_a_restricted_job_runs_and_others_are_explained(
    cluster: ClusterBench,
) -> None:
    cluster.label("pod-security.kubernetes.io/enforce", "restricted")
    name = cluster.submit("", command="train.py")
    cluster.until(lambda: "allows no such pods" in cluster.call("explain", name), "refusal")
    name = cluster.submit("import os\nprint('as', os.getuid())", command="train.py",
                          restricted="true")  # fmt: skip
    assert "as 1000" in cluster.wait(name, "Complete")


def test_with_a_job_goes_all_that_belongs_to_it(cluster: ClusterBench) -> None:
    name = cluster.submit("", command="train.py", nodes=2)
    own = (kinds.JOB, kinds.POD, kinds.SERVICE, kinds.SECRET, kinds.POLICY)
    assert all(cluster.all(kind) for kind in own[2:])
    cluster.call("delete", name)
    cluster.until(lambda: not any(cluster.all(kind) for kind in own), "end of all that it owned")
