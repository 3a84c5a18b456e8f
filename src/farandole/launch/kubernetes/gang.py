"""Gangs and queues: who sees to it that a job's nodes start together. Decorations on any backend.

==========  ==================================================================================
`kueue`     a label names the LocalQueue; Kueue admits the job as a whole and unsuspends it
`volcano`   Volcano schedules the pods; an annotation on the owner says how many belong together
`native`    Kubernetes' own gang scheduling, an alpha of 1.37 (`spec.scheduling` of a Job)
`none`      the scheduler places pods one by one; the start timeout bounds the wait
==========  ==================================================================================
"""

from __future__ import annotations

from farandole.core.errors import UsageError
from farandole.launch.cluster import ClusterFields
from farandole.launch.kubernetes.submission import Manifest

_QUEUE = "kueue.x-k8s.io/queue-name"
_PRIORITY = "kueue.x-k8s.io/priority-class"
_LIMIT = "kueue.x-k8s.io/max-exec-time-seconds"
_ELASTIC = "kueue.x-k8s.io/elastic-job"
_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"


def kind_of(spec: ClusterFields) -> str:
    """Who is to see to the gang."""
    return spec.gang or ("kueue" if spec.queue else "none")


def decorate(spec: ClusterFields, owner: Manifest, template: Manifest) -> None:
    """Add to the object that runs the job, and to its pods' template, what the gang needs.

    ``UsageError`` where backend and gang do not go together.
    """
    gang = kind_of(spec)
    labels = owner["metadata"].setdefault("labels", {})
    notes = owner["metadata"].setdefault("annotations", {})
    pod_notes = template["metadata"].setdefault("annotations", {})
    if gang == "kueue":
        labels[_QUEUE] = spec.queue
        if spec.priority:
            labels[_PRIORITY] = spec.priority
        if spec.time_limit:
            labels[_LIMIT] = str(int(spec.time_limit))
        if spec.elastic:
            notes[_ELASTIC] = "true"
        if spec.topology:
            pod_notes[_TOPOLOGY] = spec.topology
    elif gang == "volcano":
        notes["scheduling.volcano.sh/group-min-member"] = str(spec.least_nodes)
        if spec.queue:
            notes["scheduling.volcano.sh/queue-name"] = spec.queue
    elif gang == "native":
        if owner["kind"] != "Job":
            raise UsageError(
                f"gang: native needs backend: job; with backend: {spec.backend} use kueue or "
                "volcano."
            )
        owner["spec"]["scheduling"] = {"schedulingPolicy": {"gang": {}}}
