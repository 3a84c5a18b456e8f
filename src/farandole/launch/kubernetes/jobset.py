"""Backend ``jobset``: a JobSet, which restarts all pods of a job together.

The JobSet's own webhook makes the headless Service. A failed pod ends its Job at once, and the
failure policy decides by the reason: the program's own fault ends the set, a lost machine restarts
it without being counted, anything else restarts it within the limit.
"""

from __future__ import annotations

from farandole.launch.kubernetes import companions, gang, job, pod
from farandole.launch.kubernetes.submission import Manifest, Submission

REPLICATED_JOB = "w"


def render(submission: Submission) -> list[Manifest]:
    """The JobSet, suspended, then what belongs to it."""
    return [jobset(submission), companions.archive(submission), companions.secret(submission)]


def jobset(submission: Submission) -> Manifest:
    """The JobSet."""
    spec = submission.spec
    template = pod.template(submission, container=job.CONTAINER, peers=peers(submission))
    owner: Manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": companions.described(submission),
        "spec": {
            "suspend": True,
            "ttlSecondsAfterFinished": int(spec.keep),
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [REPLICATED_JOB]},
            "failurePolicy": failure_policy(spec.retries),
            "replicatedJobs": [
                {
                    "name": REPLICATED_JOB,
                    "replicas": 1,
                    "template": {"spec": replicated(spec.most_nodes, template)},
                }
            ],
        },
    }
    gang.decorate(spec, owner, template)
    return owner


def replicated(nodes: int, template: Manifest, container: str = job.CONTAINER) -> Manifest:
    """The Job within the set: the first failed pod ends it."""
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": job.failure_rules(container, on_disruption="FailJob")},
        "template": template,
    }


def peers(submission: Submission, replicated_job: str = REPLICATED_JOB) -> str:
    """The address of a pod, with ``{}`` for its index."""
    return f"{submission.name}-{replicated_job}-0-{{}}.{submission.name}"


def failure_policy(retries: int) -> Manifest:
    """What the end of the Job within the set means."""
    by_policy = {"onJobFailureReasons": ["PodFailurePolicy"]}
    user_error = {
        "name": "userError",
        "action": "FailJobSet",
        **by_policy,
        "onJobFailureMessagePatterns": [f".*exit code {job.USER_ERROR} .*"],
    }
    disruption = {"name": "disruption", "action": "RestartJobSetAndIgnoreMaxRestarts", **by_policy}
    return {"maxRestarts": retries, "rules": [user_error, disruption]}
