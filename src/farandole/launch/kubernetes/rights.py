"""What a user must be allowed to do to submit jobs and look after them; pods need nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole.launch.kubernetes import kinds
from farandole.launch.kubernetes.kinds import Kind
from farandole.launch.kubernetes.submission import Manifest

ROLE = "farandole-submit"


@dataclass(frozen=True)
class Right:
    """Doing ``verbs`` with objects of ``kind``."""

    kind: Kind
    verbs: tuple[str, ...]
    subresource: str = ""

    @property
    def resource(self) -> str:
        """As rules name it."""
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


_OWN = ("create", "get", "list", "patch", "delete")
_MADE = ("create", "get", "delete")


def needed(backend: str, *, queue: bool = False) -> tuple[Right, ...]:
    """The rights that a job of ``backend`` needs; ``queue``: under Kueue, to tell why it waits."""
    owners = [Right(kinds.OWNERS[backend], _OWN)]
    if backend == "trainjob":
        owners.append(Right(kinds.RUNTIME, _MADE))
    if queue:
        owners.append(Right(kinds.WORKLOAD, ("get", "list")))
    return (
        *owners,
        Right(kinds.SERVICE, _MADE),
        Right(kinds.CONFIG_MAP, _MADE),
        Right(kinds.SECRET, _MADE),
        Right(kinds.POLICY, _MADE),
        Right(kinds.POD, ("get", "list")),
        Right(kinds.POD, ("get",), "log"),
        Right(kinds.EVENT, ("list",)),
    )


def granted(rules: Sequence[Manifest], verb: str, right: Right) -> bool:
    """Whether ``rules`` (see ``Cluster.rules``) allow ``verb`` with every object of ``right``."""
    fitting = {right.resource, "*", *([f"*/{right.subresource}"] if right.subresource else [])}
    return any(
        not rule.get("resourceNames")
        and {verb, "*"} & set(rule["verbs"])
        and {right.kind.group, "*"} & set(rule.get("apiGroups", ()))
        and fitting & set(rule.get("resources", ()))
        for rule in rules
    )


def role(backend: str, *, queue: bool = False, shell: bool = False) -> Manifest:
    """The least Role that grants them; ``shell``: also what ``farandole shell`` needs."""
    granted = list(needed(backend, queue=queue))
    if shell:
        granted.append(Right(kinds.POD, ("create",), "exec"))
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": ROLE},
        "rules": [
            {
                "apiGroups": [right.kind.group],
                "resources": [right.resource],
                "verbs": list(right.verbs),
            }
            for right in granted
        ],
    }
