"""How a job stands, from the object that runs it and its pods. Pure."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from farandole.launch.kubernetes import naming
from farandole.launch.kubernetes.submission import Manifest

INDEX = "batch.kubernetes.io/job-completion-index"
_REPLICA = "training.kubeflow.org/replica-index"
"""Of an MPIJob's workers. Its launcher, of which there is one, has none."""


@dataclass(frozen=True)
class Standing:
    """One job."""

    name: str
    backend: str
    state: str
    """``queued``, ``stopped``, ``starting``, ``running``, ``succeeded``, ``failed`` or
    ``deleting``."""
    nodes: str
    """As the job file says: ``4`` or ``2:4``."""
    running: int
    """Pods that run."""
    command: str
    created: str
    """RFC 3339."""
    owner: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ("succeeded", "failed")


def of(owner: Manifest, pods: Sequence[Manifest]) -> Standing:
    """The standing of the job that ``owner`` runs."""
    metadata = owner["metadata"]
    notes = metadata.get("annotations", {})
    phases = Counter(pod.get("status", {}).get("phase", "Pending") for pod in pods)
    return Standing(
        name=metadata["name"],
        backend=metadata["labels"].get(naming.BACKEND, "job"),
        state=_state(owner, phases),
        nodes=notes.get(naming.NODES, "?"),
        running=phases["Running"],
        command=notes.get(naming.COMMAND, ""),
        created=metadata.get("creationTimestamp", ""),
        owner=notes.get("farandole.dev/owner", ""),
    )


def _state(owner: Manifest, phases: Counter[str]) -> str:
    if owner["metadata"].get("deletionTimestamp"):
        return "deleting"
    conditions = {
        condition["type"]
        for condition in owner.get("status", {}).get("conditions", [])
        if condition.get("status") == "True"
    }
    if conditions & {"Complete", "Completed", "Succeeded", "SuccessCriteriaMet"}:
        return "succeeded"
    if conditions & {"Failed", "FailureTarget"}:
        return "failed"
    spec = owner["spec"]
    if spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"):
        queued = "kueue.x-k8s.io/queue-name" in owner["metadata"].get("labels", {})
        return "queued" if queued else "stopped"
    return "running" if phases["Running"] else "starting"


@dataclass(frozen=True)
class PodRow:
    """One pod of a job."""

    index: int
    name: str
    phase: str
    node: str
    reason: str
    started: str


def pods_of(pods: Sequence[Manifest]) -> list[PodRow]:
    """The pods in the order of their index, the newest of each first."""
    rows = []
    for pod in pods:
        status = pod.get("status", {})
        rows.append(
            PodRow(
                index=index_of(pod),
                name=pod["metadata"]["name"],
                phase=status.get("phase", "Pending"),
                node=pod["spec"].get("nodeName", ""),
                reason=_reason(status),
                started=status.get("startTime", ""),
            )
        )
    return sorted(rows, key=lambda row: (row.index, row.started))


def index_of(pod: Manifest) -> int:
    """Which node of the job a pod is."""
    metadata = pod["metadata"]
    for place in ("annotations", "labels"):
        for key in (_REPLICA, INDEX):
            value = metadata.get(place, {}).get(key)
            if value is not None:
                return int(value)
    return 0


def age(created: str, now: datetime.datetime) -> str:
    """How long ago, for people: ``45s``, ``12m``, ``3h``, ``2d``."""
    if not created:
        return ""
    then = datetime.datetime.fromisoformat(created.replace("Z", "+00:00"))
    seconds = max(0, int((now - then).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length or (unit == "m" and seconds >= length):
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _reason(status: dict[str, Any]) -> str:
    if status.get("reason"):
        return str(status["reason"])
    for container in status.get("containerStatuses", []):
        state = container.get("state", {})
        for kind in ("waiting", "terminated"):
            if kind in state:
                code = state[kind].get("exitCode")
                said = state[kind].get("reason", "")
                return f"{said} (exit code {code})" if code else str(said)
    return ""
