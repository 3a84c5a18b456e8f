"""Backend ``trainjob``: a TrainJob of Kubeflow's Trainer, with a runtime of its own.

The runtime is namespaced, so no administrator has to install one. It has no policy for torch: that
would put a torchrun's variables into our pods, while our agent gives the ranks their places itself.
"""

from __future__ import annotations

from farandole.launch.kubernetes import companions, gang, jobset, pod
from farandole.launch.kubernetes.submission import Manifest, Submission

CONTAINER = "node"
"""Trainer knows the trainer's container by this name."""
API = "trainer.kubeflow.org/v1alpha1"


def render(submission: Submission) -> list[Manifest]:
    """The TrainJob, suspended, then its runtime and what belongs to it."""
    template = pod.template(
        submission, container=CONTAINER, peers=jobset.peers(submission, CONTAINER)
    )
    owner = trainjob(submission)
    gang.decorate(submission.spec, owner, template)
    return [
        owner,
        runtime(submission, template),
        companions.archive(submission),
        companions.secret(submission),
    ]


def trainjob(submission: Submission) -> Manifest:
    """The TrainJob."""
    spec = submission.spec
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": companions.described(submission),
        "spec": {
            "suspend": True,
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": submission.name,
            },
            "trainer": {"numNodes": spec.most_nodes},
        },
    }


def runtime(submission: Submission, template: Manifest) -> Manifest:
    """The TrainingRuntime: how this job's nodes are run."""
    nodes = submission.spec.most_nodes
    replicated = jobset.replicated(nodes, template, CONTAINER)
    # Trainer sets these two from numNodes.
    del replicated["completions"], replicated["parallelism"]
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": companions.metadata(submission),
        "spec": {
            "mlPolicy": {"numNodes": nodes},
            "template": {
                "spec": {
                    "failurePolicy": jobset.failure_policy(submission.spec.retries),
                    "replicatedJobs": [
                        {
                            "name": CONTAINER,
                            "template": {"metadata": {"labels": step}, "spec": replicated},
                        }
                    ],
                }
            },
        },
    }
