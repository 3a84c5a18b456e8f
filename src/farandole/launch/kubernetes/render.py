"""From a submission to the objects that are to be created, whatever the backend. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import yaml

from farandole.core.errors import UsageError
from farandole.launch.kubernetes import companions, job, jobset, mpijob, trainjob
from farandole.launch.kubernetes.submission import Manifest, Submission

_BACKENDS: Mapping[str, Callable[[Submission], list[Manifest]]] = {
    "job": job.render,
    "jobset": jobset.render,
    "trainjob": trainjob.render,
    "mpijob": mpijob.render,
}


def manifests(submission: Submission) -> list[Manifest]:
    """What is created for a job. The first runs it, begins suspended, and owns all the others.

    ``UsageError`` when the job file lacks what a cluster needs, or asks for things that do not go
    together.
    """
    spec = submission.spec
    if not spec.image:
        raise UsageError(
            "image: is missing. A job on a cluster needs a container image with Python and torch, "
            "as `image: pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime`."
        )
    if spec.gpus > 1 and "shared" in (spec.gpu_resource or ""):
        raise UsageError(
            f"gpus: {spec.gpus} of {spec.gpu_resource} could be the same GPU, which NCCL refuses. "
            "Ask for one shared GPU a node."
        )
    made = _BACKENDS[spec.backend](submission)
    if spec.network_policy:
        made.append(companions.fence(submission))
    return made


def own(manifest: Manifest, owner: Manifest) -> Manifest:
    """``manifest`` as the property of ``owner``, as the server returned it: it goes with it."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": False,
        # True would need the right to change the owner's finalizers.
        "blockOwnerDeletion": False,
    }
    metadata = {**manifest["metadata"], "ownerReferences": [reference]}
    return {**manifest, "metadata": metadata}


def as_yaml(made: list[Manifest]) -> str:
    """The manifests for people: no secret, no archive."""
    shown = [companions.printable(each) for each in made]
    return yaml.dump_all(shown, Dumper=_Plain, sort_keys=False, width=100)


class _Plain(yaml.SafeDumper):
    """Writes what stands in two places twice: anchors are for machines."""

    def ignore_aliases(self, data: object) -> bool:
        """See ``yaml.representer.BaseRepresenter``."""
        return True
