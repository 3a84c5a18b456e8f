"""Every rendered manifest is one that the server accepts, with every feature and backend."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import schemas
import yaml

from farandole.core.errors import UsageError
from farandole.launch.kubernetes import naming, render
from farandole.launch.kubernetes.submission import Submission
from farandole.launch.spec import JobSpec

IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
BACKENDS = ("job", "jobset", "trainjob", "mpijob")
KEY = "c0ffee" * 10

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpus": {"nodes": 4, "gpus": 8, "cpu": 32, "memory": "256Gi", "gpu_product": "NVIDIA-H200"},
    "mig": {"gpus": 1, "mig": "1g.10gb"},
    "shm": {"shm": "1Gi"},
    "resources": {"resources": {"vpc.amazonaws.com/efa": 4}},
    "rdma": {"rdma": "rdma/hca", "gpus": 8},
    "pull secret": {"image_pull_secrets": ["registry"]},
    "code on a claim": {"code": "claim:code/run7"},
    "code from git": {"code": "git:https://example.org/me/train.git@v1"},
    "code in the image": {"code": "image", "workdir": "/app"},
    "environment": {"env": {"A": "1"}, "secrets": ["keys"],
                    "secret_env": {"TOKEN": {"secret": "hub", "key": "token"}}},
    "volumes": {"datasets": "claim:data", "checkpoints": "claim:runs/ckpt",
                "logs": "claim:runs/logs",
                "mounts": [{"claim": "cache", "path": "/cache", "read_only": True}]},
    "paths": {"datasets": "/mnt/data", "checkpoints": "/mnt/ckpt"},
    "kueue": {"queue": "team", "priority": "high", "time_limit": "12h",
              "topology": "cloud.provider.com/rack"},
    "volcano": {"gang": "volcano", "queue": "team", "priority": "high"},
    "placing": {"node_selector": {"pool": "a"}, "topology": "topology.kubernetes.io/zone",
                "tolerations": [{"key": "spot", "operator": "Exists"}]},
    "limits": {"retries": 0, "start_timeout": 600, "time_limit": "7d", "keep": "1h", "grace": 60},
    "no fence": {"network_policy": False},
    "restricted": {"restricted": True},
    "pod patch": {"pod_patch": {"spec": {"hostNetwork": True,
                                         "dnsPolicy": "ClusterFirstWithHostNet"}}},
}  # fmt: skip
ELASTIC = {"elastic": {"nodes": "2:4"}, "elastic under kueue": {"nodes": "2:4", "queue": "team"}}


def submission(**fields: Any) -> Submission:
    return Submission(
        name="train-7f3a",
        namespace="team",
        spec=JobSpec(command="train.py", **{"image": IMAGE, **fields}),
        argv=("train.py", "--epochs", "3"),
        archive=b"archive",
        key=KEY,
        owner="ada",
    )


def rendered(**fields: Any) -> list[dict[str, Any]]:
    return render.manifests(submission(**fields))


def pods(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        template
        for each in made
        for template in (
            [each["spec"]["template"]]
            if each["kind"] == "Job"
            else [t for _, t in schemas.pod_templates(each)]
            if each["kind"] in ("JobSet", "TrainingRuntime", "MPIJob")
            else []
        )
    ]


@pytest.mark.parametrize("version", schemas.VERSIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_feature_is_accepted_strictly(backend: str, version: str) -> None:
    found = {
        f"{feature}: {each['kind']}": problems
        for feature, fields in FEATURES.items()
        for each in rendered(backend=backend, **fields)
        if (problems := schemas.problems(each, version))
    }
    assert not found


@pytest.mark.parametrize("version", [v for v in schemas.VERSIONS if int(v[2:]) >= 31])
@pytest.mark.parametrize("feature", ELASTIC)
def test_elastic_jobs_are_accepted_strictly(feature: str, version: str) -> None:
    for each in rendered(**ELASTIC[feature]):
        assert schemas.problems(each, version) == []


def test_native_gangs_are_accepted_where_kubernetes_knows_them() -> None:
    job = rendered(gang="native")[0]
    assert schemas.problems(job, "1.37") == []
    assert schemas.problems(job, "1.36") != []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_misspelt_field_is_caught_at_every_depth(backend: str) -> None:
    """Otherwise the tests above would prove nothing."""
    for made in rendered(backend=backend, **FEATURES["volumes"]):
        for path in paths_of_objects(made):
            if made["kind"] in ("ConfigMap", "Secret") or free_form(path):
                continue
            broken = copy.deepcopy(made)
            place: Any = broken
            for step in path:
                place = place[step]
            place["missspelt"] = "x"
            assert schemas.problems(broken, "1.35") != [], (made["kind"], path)


def paths_of_objects(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    below = [found for key, each in items for found in paths_of_objects(each, (*path, key))]
    return [path, *below] if isinstance(value, dict) and path else below


def free_form(path: tuple[Any, ...]) -> bool:
    """Where any key is right, or where metadata is the server's own business."""
    names = {"labels", "annotations", "matchLabels", "requests", "limits", "selector", "metadata"}
    return any(step in names for step in path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_secret_is_in_what_is_printed_or_in_a_pod(backend: str) -> None:
    made = rendered(backend=backend)
    assert KEY not in render.as_yaml(made)
    assert [each["kind"] for each in made if KEY in yaml.safe_dump(each)] == ["Secret"]
    assert next(iter(yaml.safe_load_all(render.as_yaml(made)))) == made[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_runs_the_job_is_first_suspended_and_everything_has_its_labels(backend: str) -> None:
    made = rendered(backend=backend)
    spec = made[0]["spec"]
    assert spec.get("suspend") or spec["runPolicy"]["suspend"]
    for each in made:
        assert each["metadata"]["labels"].items() >= naming.labels("train-7f3a", backend).items()
        assert each["metadata"]["namespace"] == "team"


@pytest.mark.parametrize("backend", BACKENDS)
def test_pods_are_safe_by_default(backend: str) -> None:
    for pod in pods(rendered(backend=backend)):
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
    for pod in pods(rendered(backend=backend, restricted=True)):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_gpus_are_asked_for_and_limited_alike() -> None:
    (pod,) = pods(rendered(**FEATURES["gpus"]))
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "8"
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert "cpu" not in resources["limits"]
    (mig,) = pods(rendered(**FEATURES["mig"]))
    assert mig["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/mig-1g.10gb": "1"}


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"memory": "8Gi"}, str(2 * 2**30)),
        ({"memory": "512Gi"}, str(64 * 2**30)),
        ({"memory": "8Gi", "shm": "1G"}, str(10**9)),
        ({}, None),
    ],
)
def test_shared_memory_is_a_quarter_of_the_memory_or_as_said(
    fields: dict[str, Any], size: str | None
) -> None:
    (pod,) = pods(rendered(**fields))
    volume = next(each for each in pod["spec"]["volumes"] if each["name"] == "shm")
    assert volume["emptyDir"].get("sizeLimit") == size


def test_a_claim_that_is_used_twice_is_one_volume() -> None:
    (pod,) = pods(rendered(**FEATURES["volumes"]))
    claims = [
        each["persistentVolumeClaim"]["claimName"]
        for each in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in each
    ]
    assert claims == ["data", "runs", "cache"]
    mounts = {
        m["mountPath"]: m.get("subPath") for m in pod["spec"]["containers"][0]["volumeMounts"]
    }
    assert mounts["/checkpoints"] == "ckpt"
    assert mounts["/logs"] == "logs"
    assert mounts["/data"] is None


def test_a_patch_reaches_into_lists_by_name() -> None:
    patch = {
        "metadata": {"annotations": {"sidecar.istio.io/inject": None, "mine": "1"}},
        "spec": {
            "containers": [{"name": "trainer", "env": [{"name": "A", "value": "2"}]}],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        },
    }
    (pod,) = pods(rendered(env={"A": "1"}, pod_patch=patch))
    assert "sidecar.istio.io/inject" not in pod["metadata"]["annotations"]
    assert pod["metadata"]["annotations"]["mine"] == "1"
    (container,) = pod["spec"]["containers"]
    assert container["image"] == IMAGE
    assert [each["value"] for each in container["env"] if each["name"] == "A"] == ["2"]
    assert [each["name"] for each in pod["spec"]["volumes"]] == ["shm", "job", "work", "scratch"]


def test_elastic_jobs_begin_with_the_most_and_end_with_index_0() -> None:
    job = rendered(nodes="2:4")[0]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_names_fit_and_differ() -> None:
    made = [naming.new_name(text) for text in ("Train_ResNet.py", "7.py", "a" * 80, "--", "é.py")]
    assert all(len(name) <= 35 and name[0].isalpha() for name in made)
    assert made[0].startswith("train-resnet-")
    assert len({naming.new_name("x") for _ in range(20)}) > 15


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({"image": None}, "image: is missing"),
    "too large": ({}, "claim:NAME/FOLDER"),
    "native gang of a set": ({"gang": "native", "backend": "jobset"}, "needs backend: job"),
    "shared GPUs": ({"gpus": 2, "gpu_resource": "nvidia.com/gpu.shared"}, "could be the same GPU"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_the_remedy(case: str) -> None:
    fields, words = REFUSED[case]
    wanted = submission(**fields)
    if case == "too large":
        wanted = Submission(**{
            **{name: getattr(wanted, name) for name in Submission.__dataclass_fields__},
            "archive": bytes(2**20),
        })  # fmt: skip
    with pytest.raises(UsageError, match=words):
        render.manifests(wanted)


def test_all_pairs_of_features_render() -> None:
    """Features that meet in one field must not lose each other."""
    for one, other in itertools.combinations(FEATURES, 2):
        fields = {**FEATURES[one], **FEATURES[other]}
        try:
            spec = JobSpec(command="train.py", image=IMAGE, **fields)
        except ValueError:
            continue
        made = render.manifests(
            Submission(name="t-0000", namespace="n", spec=spec, argv=("t",), archive=b"", key=KEY)
        )
        for each in made:
            assert schemas.problems(each, "1.37") == [], (one, other)
