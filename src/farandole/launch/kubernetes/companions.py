"""What a job has beside what runs it: its archive, its secret, its name service and its fence."""

from __future__ import annotations

import base64

from farandole.core.errors import UsageError
from farandole.launch.kubernetes import boot, naming
from farandole.launch.kubernetes.submission import Manifest, Submission

ARCHIVE_LIMIT = 900 * 1024
"""Bytes. A ConfigMap may hold 1 MiB, of which names and labels take their part."""

HIDDEN = "(hidden)"


def metadata(submission: Submission) -> Manifest:
    """The metadata that all objects of a job share."""
    return {
        "name": submission.name,
        "namespace": submission.namespace,
        "labels": naming.labels(submission.name, submission.spec.backend),
    }


def described(submission: Submission) -> Manifest:
    """The metadata of the object that runs the job: it tells about it too."""
    spec = submission.spec
    notes = {
        naming.NODES: str(spec.nodes),
        naming.RANKS: str(spec.local_size),
        naming.COMMAND: " ".join(submission.argv),
    }
    if submission.owner:
        notes["farandole.dev/owner"] = submission.owner
    return {**metadata(submission), "annotations": notes}


def archive(submission: Submission) -> Manifest:
    """The ConfigMap with the archive. ``UsageError`` when it is larger than one can be."""
    size = len(submission.archive)
    if size > ARCHIVE_LIMIT:
        raise UsageError(
            f"The code is {size / 2**20:.1f} MiB when packed, and {ARCHIVE_LIMIT // 1024} KiB can "
            "travel with a job. Exclude what the job does not need in .farandoleignore, or choose "
            "another way in the job file: `code: claim:NAME/FOLDER` (a volume), "
            "`code: git:URL@REVISION`, or `code: image` with an image that "
            "holds it."
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(submission),
        "immutable": True,
        "binaryData": {boot.ARCHIVE: base64.b64encode(submission.archive).decode("ascii")},
    }


def secret(submission: Submission) -> Manifest:
    """The Secret with the job's key, by which its processes know each other."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(submission),
        "type": "Opaque",
        "immutable": True,
        "stringData": {"key": submission.key},
    }


def service(submission: Submission) -> Manifest:
    """The headless Service that gives each pod a name, before it is ready too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(submission),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {naming.INSTANCE: submission.name},
        },
    }


def fence(submission: Submission) -> Manifest:
    """The NetworkPolicy that lets only the job's own pods reach its pods."""
    own = {"matchLabels": {naming.INSTANCE: submission.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(submission),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}],
        },
    }


def printable(manifest: Manifest) -> Manifest:
    """A manifest as it may be shown: no secret, and no kilobytes of archive."""
    shown = dict(manifest)
    for field in ("stringData", "data", "binaryData"):
        if field in shown and manifest["kind"] in ("Secret", "ConfigMap"):
            shown[field] = dict.fromkeys(shown[field], HIDDEN)
    if manifest["kind"] == "ConfigMap" and "binaryData" in shown:
        shown["binaryData"] = {
            key: f"({len(text)} characters)" for key, text in manifest["binaryData"].items()
        }
    return shown
