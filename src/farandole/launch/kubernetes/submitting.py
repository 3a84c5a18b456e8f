"""Creating a job: all of it, or nothing."""

from __future__ import annotations

import asyncio

from farandole.core.errors import FarandoleError, SetupError
from farandole.launch.kubernetes import gang, kinds, render
from farandole.launch.kubernetes.cluster import Cluster, Refused, Unreachable, say
from farandole.launch.kubernetes.submission import Manifest, Submission


async def submit(cluster: Cluster, submission: Submission) -> None:
    """Create the job's objects and let it run.

    The object that runs it is created first, suspended, so that it can own the others, which are
    created at the same time; it is unsuspended when all are there, unless a queue decides that.
    Whatever fails on the way, what was created is deleted again.

    Raises ``SetupError``, which says what was refused.
    """
    made = render.manifests(submission)
    kind = kinds.kind_of(made[0])
    owner = await _create(cluster, made[0])
    try:
        await _create_all(cluster, [render.own(each, owner) for each in made[1:]])
        if gang.kind_of(submission.spec) != "kueue":
            await cluster.patch(kind, submission.name, suspension(kind, on=False))
    except BaseException as error:
        left = await _take_back(cluster, made)
        if left and isinstance(error, FarandoleError):
            raise SetupError(
                f"{error.message} What was created could not be deleted again either: run "
                f"`farandole delete {submission.name}` when the cluster answers."
            ) from None
        if isinstance(error, Refused):
            raise SetupError(say(kind, "change", error)) from None
        raise


async def dry_run(cluster: Cluster, submission: Submission) -> list[Manifest]:
    """What the server would make of the job's objects; nothing is created.

    Raises ``SetupError``, which names the object and the field.
    """
    return [await _create(cluster, each, dry_run=True) for each in render.manifests(submission)]


def suspension(kind: kinds.Kind, *, on: bool) -> Manifest:
    """The change that stops an object that runs a job, or lets it run."""
    if kind is kinds.MPIJOB:
        return {"spec": {"runPolicy": {"suspend": on}}}
    return {"spec": {"suspend": on}}


async def _create_all(cluster: Cluster, manifests: list[Manifest]) -> None:
    """Create them at the same time; when one is refused, the others have been answered too."""
    answers = await asyncio.gather(
        *(_create(cluster, each) for each in manifests), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer


async def _create(cluster: Cluster, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
    kind = kinds.kind_of(manifest)
    try:
        return await cluster.create(manifest, dry_run=dry_run)
    except Refused as error:
        if error.reason == "AlreadyExists":
            raise SetupError(
                f"There is a {kind.name} {manifest['metadata']['name']} already. Submit again for "
                "another name, or `farandole delete` that one."
            ) from None
        raise SetupError(say(kind, "create", error)) from None


async def _take_back(cluster: Cluster, made: list[Manifest]) -> bool:
    """Delete what was created; whether something may be left."""
    deleted = [await _deleted(cluster, each) for each in made]
    return not all(deleted)


async def _deleted(cluster: Cluster, manifest: Manifest) -> bool:
    try:
        await cluster.delete(kinds.kind_of(manifest), manifest["metadata"]["name"])
    except (Refused, Unreachable):
        return False
    return True
