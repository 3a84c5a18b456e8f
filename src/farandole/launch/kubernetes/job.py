"""Backend ``job``: an Indexed Job, which every cluster runs without anything installed.

A lost pod is replaced by one with the same index, and only it: each index has its own limit of
retries, since an incident that touches all pods would use up a common one at once. A lost machine
is nobody's fault and does not count, nor does the end of a pod that was let down by another one
(75). An exit code of 64 says that the program itself is wrong, and ends the job at once.
"""

from __future__ import annotations

from farandole.launch.kubernetes import companions, gang, pod
from farandole.launch.kubernetes.submission import Manifest, Submission

CONTAINER = "trainer"
USER_ERROR = 64
"""The exit code of an agent whose program cannot run: trying again does not help."""
TRY_AGAIN = 75
"""The exit code of an agent that was let down by another pod, whose own end is what counts."""


def render(submission: Submission) -> list[Manifest]:
    """The Job, suspended, then what belongs to it."""
    return [
        job(submission),
        companions.service(submission),
        companions.archive(submission),
        companions.secret(submission),
    ]


def job(submission: Submission) -> Manifest:
    """The Job."""
    spec = submission.spec
    template = pod.template(submission, container=CONTAINER, peers=peers(submission))
    template["spec"]["subdomain"] = submission.name
    owner: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": companions.described(submission),
        "spec": {
            "suspend": True,
            "completionMode": "Indexed",
            "completions": spec.most_nodes,
            "parallelism": spec.most_nodes,
            "backoffLimitPerIndex": spec.retries,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    *failure_rules(CONTAINER, on_disruption="Ignore"),
                    on_exit(CONTAINER, TRY_AGAIN, "Ignore"),
                ]
            },
            "ttlSecondsAfterFinished": int(spec.keep),
            "template": template,
        },
    }
    if spec.elastic:
        owner["spec"]["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    gang.decorate(spec, owner, template)
    return owner


def failure_rules(container: str, *, on_disruption: str) -> list[Manifest]:
    """What a failed pod means; in this order, since a pod that is evicted exits with a code too."""
    return [
        {
            "action": on_disruption,
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        on_exit(container, USER_ERROR, "FailJob"),
    ]


def on_exit(container: str, code: int, action: str) -> Manifest:
    """The rule for one exit code."""
    codes = {"containerName": container, "operator": "In", "values": [code]}
    return {"action": action, "onExitCodes": codes}


def peers(submission: Submission) -> str:
    """The address of a pod, with ``{}`` for its index."""
    return f"{submission.name}-{{}}.{submission.name}"
