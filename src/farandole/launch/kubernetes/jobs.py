"""Looking after jobs: all that is known of them is in the cluster, found by labels alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.core.errors import SetupError, UsageError
from farandole.launch.kubernetes import explain, following, kinds, naming, standing, submitting
from farandole.launch.kubernetes.cluster import Cluster, Refused
from farandole.launch.kubernetes.submission import Manifest

_LAST_LINES = 20


@dataclass(frozen=True)
class Found:
    """A job in the cluster."""

    kind: kinds.Kind
    owner: Manifest
    pods: list[Manifest]

    @property
    def standing(self) -> standing.Standing:
        """How it stands."""
        return standing.of(self.owner, self.pods)


async def find(cluster: Cluster, name: str) -> Found:
    """The job ``name``; the beginning of a name will do when it fits one job only.

    Raises ``UsageError`` when there is none, which names those that there are.
    """
    owners = await _owners(cluster)
    fitting = [each for each in owners if each[1]["metadata"]["name"] == name] or [
        each for each in owners if each[1]["metadata"]["name"].startswith(name)
    ]
    if len(fitting) != 1:
        names = ", ".join(sorted(each["metadata"]["name"] for _, each in owners)) or "none"
        what = "There is no job" if not fitting else "There are several jobs that begin with"
        raise UsageError(f"{what} {name} in namespace {cluster.namespace}. There are: {names}.")
    kind, owner = fitting[0]
    pods = await cluster.find(kinds.POD, naming.selector(owner["metadata"]["name"]))
    return Found(kind, owner, pods)


async def everything(cluster: Cluster) -> list[Found]:
    """All jobs of the namespace, the newest first."""
    owners, pods = await asyncio.gather(_owners(cluster), cluster.find(kinds.POD, naming.EVERY_JOB))
    found = [
        Found(kind, owner, [pod for pod in pods if _belongs(pod, owner)]) for kind, owner in owners
    ]
    return sorted(
        found, key=lambda each: each.owner["metadata"].get("creationTimestamp", ""), reverse=True
    )


async def _owners(cluster: Cluster) -> list[tuple[kinds.Kind, Manifest]]:
    """What runs jobs, of every backend that the cluster and the user's rights know.

    Raises ``Refused`` when nothing is found, and the user may not see Jobs.
    """

    async def of(kind: kinds.Kind) -> list[Manifest] | Refused:
        try:
            return await cluster.find(kind, naming.EVERY_JOB)
        except Refused as error:
            # An operator that is not installed, or whose jobs are not this user's business.
            if error.code in (403, 404):
                return error
            raise

    found = await asyncio.gather(*(of(kind) for kind in kinds.OWNERS.values()))
    owners = [
        (kind, each)
        for kind, part in zip(kinds.OWNERS.values(), found, strict=True)
        if not isinstance(part, Refused)
        for each in part
    ]
    of_jobs = found[list(kinds.OWNERS).index("job")]
    if not owners and isinstance(of_jobs, Refused):
        raise of_jobs
    # A JobSet's own Jobs have its labels, and an owner.
    return [each for each in owners if not _is_owned(each[1])]


def _is_owned(thing: Manifest) -> bool:
    return any(each.get("controller") for each in thing["metadata"].get("ownerReferences", []))


def _belongs(pod: Manifest, owner: Manifest) -> bool:
    name = pod["metadata"].get("labels", {}).get(naming.INSTANCE)
    return bool(name == owner["metadata"]["name"])


async def stop(cluster: Cluster, found: Found, *, on: bool = True) -> None:
    """Stop a job (its pods get SIGTERM and the grace period), or let it go on."""
    name = found.standing.name
    if found.standing.over:
        raise UsageError(f"The job {name} is over ({found.standing.state}).")
    if "kueue.x-k8s.io/queue-name" in found.owner["metadata"].get("labels", {}):
        workloads = await _workloads(cluster, found)
        for each in workloads:
            change = {"spec": {"active": not on}}
            await cluster.patch(kinds.WORKLOAD, each["metadata"]["name"], change)
        return
    await cluster.patch(found.kind, name, submitting.suspension(found.kind, on=on))


async def scale(cluster: Cluster, found: Found, nodes: int) -> None:
    """Change the number of nodes of an elastic job."""
    name = found.standing.name
    least, _, most = found.standing.nodes.partition(":")
    if not most:
        raise UsageError(
            f"The job {name} has {least} nodes from start to end. One that can be scaled says "
            "`nodes: 2:4` in its job file."
        )
    if found.kind is not kinds.JOB:
        raise UsageError(f"The job {name} is a {found.kind.name}, which cannot be scaled.")
    if nodes < int(least):
        raise UsageError(f"The job {name} needs at least {least} nodes; {nodes} were asked for.")
    # Only where the two are equal may they change.
    await cluster.patch(kinds.JOB, name, {"spec": {"completions": nodes, "parallelism": nodes}})


async def delete(cluster: Cluster, found: Found) -> None:
    """Delete a job and all that belongs to it."""
    await cluster.delete(found.kind, found.standing.name)


async def events(cluster: Cluster, found: Found) -> list[Manifest]:
    """What has happened to a job and its pods, oldest first."""
    mine = {found.owner["metadata"]["uid"]} | {pod["metadata"]["uid"] for pod in found.pods}
    all_events = await cluster.find(kinds.EVENT)
    about = [each for each in all_events if each.get("involvedObject", {}).get("uid") in mine]
    return sorted(about, key=when)


def when(event: Manifest) -> str:
    """When something happened last, to the second: some events tell no more, and texts of two
    lengths would not sort."""
    told = event.get("lastTimestamp") or event.get("eventTime") or ""
    return f"{told[:19]}Z" if told else ""


async def why(cluster: Cluster, found: Found) -> list[explain.Cause]:
    """Why a job does not run or has failed, most likely cause first."""
    if found.standing.state == "succeeded":
        return []  # what had gone wrong on the way was made good
    happened, workloads, claims, logs = await asyncio.gather(
        events(cluster, found), _workloads(cluster, found), _claims(cluster, found),
        _last_words(cluster, found.pods),
    )  # fmt: skip
    return explain.causes(
        explain.Evidence(
            owner=found.owner,
            pods=found.pods,
            events=happened,
            workloads=workloads,
            claims=claims,
            logs=logs,
        )
    )


async def _workloads(cluster: Cluster, found: Found) -> list[Manifest]:
    if "kueue.x-k8s.io/queue-name" not in found.owner["metadata"].get("labels", {}):
        return []
    try:
        every = await cluster.find(kinds.WORKLOAD)
    except Refused:
        return []  # without the right to see them, the job's own state has to do
    uid = found.owner["metadata"]["uid"]
    return [
        each
        for each in every
        if any(o.get("uid") == uid for o in each["metadata"].get("ownerReferences", []))
    ]


async def _claims(cluster: Cluster, found: Found) -> dict[str, Manifest | None]:
    names = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in found.pods
        for volume in pod["spec"].get("volumes", [])
        if "persistentVolumeClaim" in volume
    }
    claims = {name: await _claim(cluster, name) for name in sorted(names)}
    return {name: claim for name, claim in claims.items() if claim != {}}


async def _claim(cluster: Cluster, name: str) -> Manifest | None:
    """A claim; ``{}`` for one that this user may not look at."""
    try:
        return await cluster.get(kinds.CLAIM, name)
    except Refused:
        return {}


async def _last_words(cluster: Cluster, pods: Sequence[Manifest]) -> dict[str, str]:
    words = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") != "Failed":
            continue
        try:
            lines = [line.text for line in await following.whole(cluster, pod)]
        except SetupError:
            continue  # the pod is gone from its node, and its output with it
        kept = lines[-_LAST_LINES:]
        words[pod["metadata"]["name"]] = b"\n".join(kept).decode("utf-8", "replace")
    return words
