"""Backend ``mpijob``: an MPIJob v2beta1; its launcher runs ``farandole run`` over ssh.

The MPI Operator gives every pod an ssh key and writes the host file; the image has to have an ssh
server and client. The launcher waits for the workers' ssh servers by itself: the operator counts
those that are ready at the time at which it creates the launcher, and for a job that begins
suspended, as ours do, that is before there are any.
"""

from __future__ import annotations

import copy
import math

from farandole.launch.kubernetes import boot, companions, gang, pod
from farandole.launch.kubernetes.submission import Manifest, Submission

HOST_FILE = "/etc/mpi/hostfile"
KEYS = "/farandole/ssh"
SSH_PORT = 2222


def render(submission: Submission) -> list[Manifest]:
    """The MPIJob, suspended, then what belongs to it."""
    return [mpijob(submission), companions.archive(submission), companions.secret(submission)]


def mpijob(submission: Submission) -> Manifest:
    """The MPIJob."""
    spec = submission.spec
    worker = pod.template(submission, container="worker", peers="")
    launcher = copy.deepcopy(worker)
    _make_worker(worker, submission)
    _make_launcher(launcher, submission)
    owner: Manifest = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": companions.described(submission),
        "spec": {
            "slotsPerWorker": spec.local_size,
            "sshAuthMountPath": KEYS,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {
                "suspend": True,
                "cleanPodPolicy": "Running",
                "backoffLimit": spec.retries,
                "ttlSecondsAfterFinished": int(spec.keep),
            },
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
                "Worker": {
                    "replicas": spec.most_nodes,
                    "restartPolicy": "OnFailure",
                    "template": worker,
                },
            },
        },
    }
    if spec.time_limit:
        owner["spec"]["runPolicy"]["activeDeadlineSeconds"] = math.ceil(spec.time_limit)
    gang.decorate(spec, owner, worker)
    return owner


_SSH = {"ssh_keys": KEYS, "ssh_port": SSH_PORT}


def _make_worker(template: Manifest, submission: Submission) -> None:
    """A worker is an ssh server; the replica's restart policy counts, not the template's."""
    del template["spec"]["restartPolicy"]
    container = template["spec"]["containers"][0]
    container["args"] = boot.arguments(submission, HOST_FILE, "ssh-server", **_SSH)
    container["ports"] = [{"name": "ssh", "containerPort": SSH_PORT}]
    container["readinessProbe"] = {"tcpSocket": {"port": SSH_PORT}, "initialDelaySeconds": 2}


def _make_launcher(template: Manifest, submission: Submission) -> None:
    """The launcher trains nothing: it needs no GPU and little else."""
    del template["spec"]["restartPolicy"]
    template["spec"].pop("affinity", None)
    container = template["spec"]["containers"][0]
    container["name"] = "launcher"
    container["args"] = boot.arguments(submission, HOST_FILE, "launcher", **_SSH)
    del container["ports"]
    container["resources"] = {
        "requests": {"cpu": "1", "memory": "2Gi"},
        "limits": {"memory": "2Gi"},
    }
