"""The kinds of objects that a job is made of, and how the server knows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of object."""

    api: str
    """Group and version, as ``batch/v1``; ``v1`` for the core."""
    name: str
    plural: str

    @property
    def group(self) -> str:
        """The API group; empty for the core."""
        return self.api.rpartition("/")[0]


JOB = Kind("batch/v1", "Job", "jobs")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
POD = Kind("v1", "Pod", "pods")
EVENT = Kind("v1", "Event", "events")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
QUOTA = Kind("v1", "ResourceQuota", "resourcequotas")
POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
JOBSET = Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets")
TRAINJOB = Kind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs")
RUNTIME = Kind("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", "trainingruntimes")
MPIJOB = Kind("kubeflow.org/v2beta1", "MPIJob", "mpijobs")
WORKLOAD = Kind("kueue.x-k8s.io/v1beta2", "Workload", "workloads")
QUEUE = Kind("kueue.x-k8s.io/v1beta2", "LocalQueue", "localqueues")

OWNERS = {"job": JOB, "jobset": JOBSET, "trainjob": TRAINJOB, "mpijob": MPIJOB}
"""What runs a job, by backend."""

OPERATORS = {
    "jobset": "JobSet (jobset.sigs.k8s.io)",
    "trainjob": "Kubeflow Trainer (trainer.kubeflow.org)",
    "mpijob": "the MPI Operator (kubeflow.org)",
}
"""What must be installed for a backend."""

_BY_NAME = {
    (kind.api, kind.name): kind
    for kind in (
        JOB, SERVICE, CONFIG_MAP, SECRET, POD, EVENT, CLAIM, QUOTA, POLICY, JOBSET, TRAINJOB,
        RUNTIME, MPIJOB, WORKLOAD, QUEUE,
    )
}  # fmt: skip


def kind_of(manifest: dict[str, object]) -> Kind:
    """The kind of a manifest of ours."""
    return _BY_NAME[str(manifest["apiVersion"]), str(manifest["kind"])]
