"""How a pod comes from a bare image to our agent: unpack the archive, then be the agent.

The image needs Python and torch. Farandole travels in the archive, so what runs first can rely on
the standard library alone, and is short enough to stand in the manifest: everybody can read there
what a pod begins with.
"""

from __future__ import annotations

import json

from farandole.launch.cluster import ClusterFields, claim_of, mounted_at
from farandole.launch.kubernetes import submission as model

JOB_FOLDER = "/farandole/job"
"""Where the archive is mounted."""
WORK_FOLDER = "/farandole/work"
"""Where it is unpacked; on the node's disk, gone with the pod."""
CODE_FOLDER = "/farandole/code"
"""Where a claim that holds the code is mounted."""
ARCHIVE = "archive.tar.gz"
PACKAGE = "package"
"""In the archive: the folder with Farandole itself."""
PROJECT = "project"
"""In the archive: the folder with the user's program."""

BOOTSTRAP = (
    "import sys,tarfile;"
    "job,work=sys.argv[1:3];"
    f"t=tarfile.open(job+'/{ARCHIVE}');"
    "t.extractall(work,**({'filter':'data'} if hasattr(tarfile,'data_filter') else {}));"
    f"sys.path.insert(0,work+'/{PACKAGE}');"
    "from farandole.launch import pod;pod.main(sys.argv[1:])"
)


def command() -> list[str]:
    """What the container runs: our agent as process 1, so that signals reach it."""
    return ["python3", "-u", "-c", BOOTSTRAP]


def arguments(
    submission: model.Submission, peers: str, role: str = "node", **more: object
) -> list[str]:
    """The arguments of :data:`BOOTSTRAP`: every path, port and address that the pod uses.

    ``role``: ``node`` (finds the others and runs ranks), ``ssh-server`` (waits to be told by ssh),
    or ``launcher`` (starts ranks on the hosts of the file ``peers``). ``more``: what this role
    needs to be told besides.
    """
    spec = submission.spec
    told = {
        "role": role,
        "name": submission.name,
        "peers": peers,
        "port": model.STORE_PORT,
        "nodes": spec.most_nodes,
        "least_nodes": spec.least_nodes,
        "local_size": spec.local_size,
        "argv": list(submission.argv),
        "folder": folder(submission),
        "code": spec.code,
        "logs": _within_pod(spec, "logs"),
        "start_timeout": submission.start_timeout,
        "time_limit": spec.time_limit,
        "grace": submission.grace,
        "fork": spec.fork,
        **more,
    }
    return [JOB_FOLDER, WORK_FOLDER, json.dumps(told)]


def folder(submission: model.Submission) -> str:
    """In which folder the program starts."""
    spec = submission.spec
    if spec.workdir:
        return spec.workdir
    if claim_of(spec.code):
        return CODE_FOLDER
    return f"{WORK_FOLDER}/{PROJECT}" if spec.code != "image" else ""


def _within_pod(spec: ClusterFields, field: str) -> str | None:
    place: str | None = getattr(spec, field)
    return f"/{mounted_at(field)}" if place is not None and claim_of(place) else place
