"""What can be known to go wrong before anything is created: said all at once, with remedies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from farandole.core.errors import SetupError
from farandole.launch.cluster import claim_of
from farandole.launch.kubernetes import gang, kinds, pod, rights
from farandole.launch.kubernetes.cluster import Cluster
from farandole.launch.kubernetes.rights import Right
from farandole.launch.kubernetes.submission import Manifest, Submission

OLDEST = (1, 29)
OLDEST_ELASTIC = (1, 31)


async def check(cluster: Cluster, submission: Submission) -> None:
    """Raise ``SetupError`` with all that stands in the way of a job; nothing was created."""
    problems, rules = await asyncio.gather(_of_the_cluster(cluster, submission), cluster.rules())
    if not problems:
        user = _User(cluster, rules)
        found = await asyncio.gather(
            _rights(user, submission), _objects(user, submission), _quota(user, submission)
        )
        problems = [problem for part in found for problem in part]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise SetupError(
            f"The job cannot run in namespace {cluster.namespace} of {cluster.server}:\n{listed}\n"
            "Nothing was created."
        )


@dataclass(frozen=True)
class _User:
    """Who submits: the cluster as seen by one who may not do everything in it."""

    cluster: Cluster
    rules: Sequence[Manifest]

    async def may(self, verb: str, right: Right) -> bool:
        """Whether the user may: by the rules, which are known, else by asking for this one."""
        return rights.granted(self.rules, verb, right) or await self.cluster.allowed(
            verb, right.kind, right.subresource
        )


async def _of_the_cluster(cluster: Cluster, submission: Submission) -> list[str]:
    spec = submission.spec
    kind = kinds.OWNERS[spec.backend]
    version, serves = await asyncio.gather(cluster.version(), cluster.serves(kind))
    oldest = OLDEST_ELASTIC if spec.elastic else OLDEST
    if version < oldest:
        why = " for an elastic job" if spec.elastic else ""
        return [
            f"Kubernetes {version[0]}.{version[1]} is too old: {oldest[0]}.{oldest[1]} or later is "
            f"needed{why}."
        ]
    if not serves:
        operator = kinds.OPERATORS.get(spec.backend, kind.api)
        return [
            f"The cluster has no {kind.name}s ({kind.api}): install {operator}, or use "
            "`backend: job`, which needs nothing."
        ]
    return []


async def _rights(user: _User, submission: Submission) -> list[str]:
    wanted = [
        (verb, right) for right in rights.needed(submission.spec.backend) for verb in right.verbs
    ]
    allowed = await asyncio.gather(*(user.may(verb, right) for verb, right in wanted))
    missing = [
        f"{verb} {right.resource}"
        for (verb, right), may in zip(wanted, allowed, strict=True)
        if not may
    ]
    if not missing:
        return []
    return [
        f"You may not {', '.join(missing)}. `farandole submit --print-rbac` prints the Role that "
        "is needed; an administrator can apply it."
    ]


async def _objects(user: _User, submission: Submission) -> list[str]:
    """Objects that the job names and that are not there, as far as one may look."""
    spec = submission.spec
    claims = [
        claimed[0]
        for place in (spec.datasets, spec.checkpoints, spec.logs, spec.code)
        if place and (claimed := claim_of(place))
    ]
    named = [
        *((kinds.CLAIM, name, "volume claim") for name in claims),
        *((kinds.CLAIM, mount.claim, "volume claim") for mount in spec.mounts),
        *((kinds.SECRET, name, "Secret (`secrets`)") for name in spec.secrets),
        *((kinds.SECRET, e.secret, "Secret (`secret_env`)") for e in spec.secret_env.values()),
        *((kinds.SECRET, n, "Secret (`image_pull_secrets`)") for n in spec.image_pull_secrets),
    ]
    if gang.kind_of(spec) == "kueue" and spec.queue:
        named.append((kinds.QUEUE, spec.queue, "LocalQueue (`queue`)"))
    found = await asyncio.gather(*(_is_there(user, kind, name) for kind, name, _ in named))
    problems = []
    for (kind, name, what), thing in zip(named, found, strict=True):
        if thing is None:
            problems.append(f"There is no {what} {name}: create it, or correct the name.")
        elif kind is kinds.CLAIM and spec.most_nodes > 1:
            problems += _one_node_only(name, thing)
    return list(dict.fromkeys(problems))


async def _is_there(user: _User, kind: kinds.Kind, name: str) -> Manifest | None:
    if not await user.may("get", Right(kind, ("get",))):
        return {}  # who may not look finds out when the pods do
    return await user.cluster.get(kind, name)


def _one_node_only(name: str, claim: Manifest) -> list[str]:
    modes = claim.get("spec", {}).get("accessModes", [])
    if not modes or any(mode in modes for mode in ("ReadWriteMany", "ReadOnlyMany")):
        return []
    return [
        f"The volume claim {name} can be mounted by one node only ({', '.join(modes)}), and the "
        "job has several: use one that is ReadWriteMany."
    ]


async def _quota(user: _User, submission: Submission) -> list[str]:
    if not await user.may("list", Right(kinds.QUOTA, ("list",))):
        return []  # it is the server that applies it, whether we may read it or not
    quotas = await user.cluster.find(kinds.QUOTA)
    spec = submission.spec
    nodes = spec.least_nodes
    wanted = {"pods": float(nodes), "count/jobs.batch": 1.0}
    if spec.gpus:
        wanted[f"requests.{pod.gpu_resource(submission)}"] = float(nodes * spec.gpus)
    for name, amount in (("cpu", spec.cpu), ("memory", spec.memory)):
        if amount:
            wanted[f"requests.{name}"] = wanted[name] = nodes * pod.read_quantity(amount)
    problems = []
    for quota in quotas:
        hard = quota.get("status", {}).get("hard", {})
        used = quota.get("status", {}).get("used", {})
        for name in hard.keys() & wanted.keys():
            left = pod.read_quantity(hard[name]) - pod.read_quantity(used.get(name, "0"))
            if wanted[name] > left:
                problems.append(
                    f"The quota {quota['metadata']['name']} leaves {left:g} of {name} "
                    f"({used.get(name, '0')} of {hard[name]} are used), and the job asks for "
                    f"{wanted[name]:g}. Ask for less, or wait, or use a `queue`."
                )
    return problems
