"""The names and labels of a job's objects in a cluster: everything about a job is found by them."""

from __future__ import annotations

import re
import secrets

SLUG = 30
"""Characters of the readable part of a name; the rest of 63 is for what Kubernetes appends."""

MANAGED_BY = {"app.kubernetes.io/managed-by": "farandole"}
INSTANCE = "app.kubernetes.io/instance"
BACKEND = "farandole.dev/backend"
NODES = "farandole.dev/nodes"
"""An annotation: the nodes of the job file, ``4`` or ``2:4``."""
RANKS = "farandole.dev/ranks-per-node"
"""An annotation."""
COMMAND = "farandole.dev/command"
"""An annotation: what runs, for people."""


def new_name(wanted: str) -> str:
    """A name that no other job has: ``wanted`` made fit for Kubernetes, and four random digits.

    Example::

        new_name("Train_ResNet.py")   # train-resnet-7f3a
    """
    slug = re.sub(r"\.py$", "", wanted.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", slug).strip("-")
    slug = re.sub(r"^[^a-z]+", "", slug)[:SLUG].strip("-") or "job"
    return f"{slug}-{secrets.token_hex(2)}"


def labels(name: str, backend: str) -> dict[str, str]:
    """What every object of the job ``name`` is labelled with."""
    return {**MANAGED_BY, INSTANCE: name, BACKEND: backend}


def selector(name: str) -> str:
    """The label selector of all objects of one job."""
    return f"{INSTANCE}={name},app.kubernetes.io/managed-by=farandole"


EVERY_JOB = "app.kubernetes.io/managed-by=farandole"
"""The label selector of the objects of all jobs."""
