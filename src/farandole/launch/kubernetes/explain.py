"""Why a job does not run, or why it failed: from what the cluster knows of it. Pure.

Each rule looks at one kind of evidence and gives causes with a weight; the heaviest is the first
line. What has surely ended the job weighs more than what holds it up, which weighs more than what
only looks bad; and the first failure weighs more than those that followed from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from farandole.launch.kubernetes.submission import Manifest

ENDED, HELD_UP, DOUBTFUL = 300, 200, 100
"""Weights: of what has ended the job, what keeps it from running, and what only may matter."""

USER_ERROR, TRY_AGAIN, SAVED = 64, 75, 143
_BUS_ERROR = 135
"""How a process ends that writes to memory for which /dev/shm has no room."""
_FULL_SHM = re.compile(r"Bus error|unable to \w+ shared memory|shared memory segment /dev/shm")
"""What torch and NCCL say when it has no room."""
_SHM_FULL = "/dev/shm was full"
_MORE_SHM = "Raise `shm` (and `memory`, of which it is a part), or use fewer data workers."


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong, and what to do about it."""

    weight: int
    what: str
    remedy: str
    where: str = ""
    """The object that shows it."""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.what}{place}. {self.remedy}"


@dataclass(frozen=True)
class Evidence:
    """What the cluster knows of a job."""

    owner: Manifest
    pods: Sequence[Manifest] = ()
    events: Sequence[Manifest] = ()
    """Of the owner and of its pods."""
    workloads: Sequence[Manifest] = ()
    """Kueue's."""
    claims: dict[str, Manifest | None] = field(default_factory=dict)
    """The volume claims that the job names; ``None`` for those that are not there."""
    logs: dict[str, str] = field(default_factory=dict)
    """The last lines of pods that have failed."""


def causes(evidence: Evidence) -> list[Cause]:
    """What may be wrong, most likely first; empty when nothing looks wrong.

    Example::

        for cause in causes(evidence):
            print(cause)
    """
    found = [cause for rule in _RULES for cause in rule(evidence)]
    unique = {(cause.what, cause.remedy): cause for cause in reversed(found)}
    return sorted(unique.values(), key=lambda cause: -cause.weight)


# ---- what holds pods up


def _unschedulable(evidence: Evidence) -> Iterator[Cause]:
    for pod in evidence.pods:
        condition = _condition(pod, "PodScheduled")
        if condition is None or condition.get("status") != "False":
            continue
        if condition.get("reason") == "SchedulingGated":
            yield Cause(HELD_UP, "The pods wait to be admitted", "See the queue.", _name(pod))
            continue
        yield _why_unschedulable(condition.get("message", ""), _name(pod))


_SHORTAGES = (
    (r"Insufficient (nvidia\.com/\S+?|amd\.com/\S+?)[,.\s]", "No node has {0} free",
     "Ask for fewer GPUs a node, wait for other jobs, or add nodes."),
    (r"Insufficient (\S+?)[,.\s]", "No node has enough {0} free",
     "Ask for less {0} in the job file, wait, or add nodes."),
    (r"had untolerated taint[s]? \{([^}]*)\}", "The nodes have a taint that the job does not "
     "tolerate: {0}", "Add it to `tolerations`, or choose other nodes by `node_selector`."),
    (r"didn't match Pod's node affinity/selector", "No node has the labels that the job asks for",
     "Check `gpu_product` and `node_selector` against `kubectl get nodes --show-labels`."),
    (r"persistentvolumeclaim \"([^\"]+)\" not found", "The volume claim {0} does not exist",
     "Create it, or correct its name in the job file."),
    (r"unbound immediate PersistentVolumeClaims|didn't find available persistent volumes",
     "A volume claim is not bound to a volume", "Look at `kubectl describe pvc`: is there a "
     "storage class that makes such volumes?"),
    (r"volume node affinity conflict", "The volume is in another zone than the nodes that are free",
     "Use a volume that all zones can mount, or nodes of its zone (`node_selector`)."),
    (r"Too many pods", "The nodes run as many pods as they may", "Add nodes."),
)  # fmt: skip


def _why_unschedulable(message: str, where: str) -> Cause:
    for pattern, what, remedy in _SHORTAGES:
        found = re.search(pattern, message + " ")
        if found:
            groups = found.groups()
            return Cause(HELD_UP + 20, what.format(*groups), remedy.format(*groups), where)
    said = message or "the scheduler gave no reason"
    return Cause(HELD_UP, f"The pod cannot be placed: {said}", "See `farandole events`.", where)


_WAITING = {
    "InvalidImageName": ("The image's name {image} is not one", "Correct `image` in the job file."),
    "ErrImageNeverPull": ("The image {image} is not on the node, and may not be pulled",
                          "Load it there, or let it be pulled."),
    "CreateContainerError": ("The container cannot be made: {message}", "See `farandole events`."),
    "RunContainerError": ("The container cannot be started: {message}",
                          "Does the image have python3 on its PATH?"),
}  # fmt: skip


def _waiting(evidence: Evidence) -> Iterator[Cause]:
    for pod in evidence.pods:
        for container in _statuses(pod):
            waiting = container.get("state", {}).get("waiting")
            if not waiting:
                continue
            reason, message = waiting.get("reason", ""), waiting.get("message", "")
            image = container.get("image") or pod["spec"]["containers"][0]["image"]
            if reason in ("ErrImagePull", "ImagePullBackOff"):
                yield _image(image, message, evidence, _name(pod))
            elif reason == "CreateContainerConfigError":
                yield _missing_object(message, _name(pod))
            elif reason in _WAITING:
                what, remedy = _WAITING[reason]
                said = message.rstrip(".")
                yield Cause(
                    HELD_UP + 30, what.format(image=image, message=said), remedy, _name(pod)
                )


def _image(image: str, message: str, evidence: Evidence, where: str) -> Cause:
    said = " ".join([message, *_messages(evidence, "Failed")]).lower()
    if any(word in said for word in ("unauthorized", "authentication", "denied", "no basic auth")):
        secrets = _pod_spec(evidence).get("imagePullSecrets", [])
        named = ", ".join(each["name"] for each in secrets)
        hint = (
            f"Check the Secret {named} (`image_pull_secrets`)."
            if named
            else "Name a Secret for the registry in `image_pull_secrets`."
        )
        return Cause(HELD_UP + 40, f"The registry of {image} wants a login", hint, where)
    if any(word in said for word in ("not found", "manifest unknown", "does not exist")):
        return Cause(
            HELD_UP + 40, f"There is no image {image}", "Correct `image`: name and tag.", where
        )
    return Cause(
        HELD_UP + 35,
        f"The image {image} cannot be pulled: {message.rstrip('.')}",
        "Can the nodes reach its registry?",
        where,
    )


def _missing_object(message: str, where: str) -> Cause:
    found = re.search(r"(secret|configmap) \"([^\"]+)\" not found", message)
    key = re.search(r"couldn't find key (\S+) in (Secret|ConfigMap) (\S+)", message)
    if key:
        what = f"The {key[2]} {key[3]} has no key {key[1]}"
        return Cause(HELD_UP + 40, what, "Correct `secret_env` in the job file.", where)
    if found:
        kind = {"secret": "Secret", "configmap": "ConfigMap"}[found[1]]
        return Cause(
            HELD_UP + 40,
            f"The {kind} {found[2]} does not exist",
            "Create it in this namespace, or correct `secrets` or `secret_env`.",
            where,
        )
    return Cause(HELD_UP + 30, f"The container cannot be set up: {message}", "", where)


def _mounts(evidence: Evidence) -> Iterator[Cause]:
    for message in _while_pending(evidence, "FailedMount", "FailedAttachVolume"):
        attached = "Multi-Attach" in message or "already exclusively attached" in message
        remedy = (
            "Its volume can be mounted by one node only: use one that is ReadWriteMany."
            if attached
            else "Look at `kubectl describe pvc`, and at the driver of its storage class."
        )
        yield Cause(HELD_UP + 10, f"A volume cannot be mounted: {message.rstrip('.')}", remedy)


def _sandboxes(evidence: Evidence) -> Iterator[Cause]:
    for message in _while_pending(evidence, "FailedCreatePodSandBox"):
        # What went wrong stands behind the names of all who pass it on, and of the sandbox.
        said = message.rpartition('": ')[2].rstrip(".")
        yield Cause(
            HELD_UP + 15,
            f"The node cannot start any container of the pod: {said}",
            "Its network plugin or container runtime is ill: ask who runs the cluster.",
        )


def _claims(evidence: Evidence) -> Iterator[Cause]:
    for name, claim in evidence.claims.items():
        if claim is None:
            yield Cause(
                HELD_UP + 45,
                f"The volume claim {name} does not exist",
                "Create it, or correct its name in the job file.",
            )


def _admission(evidence: Evidence) -> Iterator[Cause]:
    for message in _messages(evidence, "FailedCreate"):
        if "exceeded quota" in message:
            found = re.search(r"exceeded quota: ([^,]+), (.*)", message)
            said = f"{found[1]} ({found[2]})" if found else message
            yield Cause(
                HELD_UP + 40,
                f"The namespace's quota is used up: {said}",
                "Ask for less, wait for other jobs, or have the quota raised.",
            )
        elif "violates PodSecurity" in message:
            found = re.search(r"violates PodSecurity \"([^\"]+)\": (.*)", message)
            said = f"{found[1]}: {found[2]}" if found else message
            yield Cause(
                HELD_UP + 40,
                f"The namespace allows no such pods (PodSecurity {said})",
                "Set `restricted: true` in the job file, or use another namespace.",
            )
        else:
            yield Cause(
                HELD_UP + 35,
                f"The pods were refused by the cluster: {message.rstrip('.')}",
                "An admission webhook or policy decides this: ask who runs the cluster.",
            )


def _queue(evidence: Evidence) -> Iterator[Cause]:
    queue = evidence.owner["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
    for workload in evidence.workloads:
        evicted = _condition(workload, "Evicted")
        if evicted is not None and evicted.get("status") == "True":
            yield Cause(
                HELD_UP + 30,
                f"Kueue has taken the job's place away ({evicted.get('reason', '')}: "
                f"{evicted.get('message', '').rstrip('.')})",
                "It runs again when there is room; a higher `priority` helps.",
            )
        reserved = _condition(workload, "QuotaReserved")
        if reserved is not None and reserved.get("status") == "False":
            yield Cause(
                HELD_UP + 25,
                f"The job waits in the queue {queue}: {reserved.get('message', '').rstrip('.')}",
                "It starts when there is room.",
            )
    if queue and not evidence.workloads and evidence.owner["spec"].get("suspend"):
        yield Cause(
            HELD_UP,
            f"Kueue has not taken notice of the job: is there a queue {queue} in this namespace?",
            "See `kubectl get localqueues`.",
        )


def _stopped(evidence: Evidence) -> Iterator[Cause]:
    labels = evidence.owner["metadata"].get("labels", {})
    if evidence.owner["spec"].get("suspend") and "kueue.x-k8s.io/queue-name" not in labels:
        yield Cause(DOUBTFUL, "The job is stopped", "`farandole resume` starts it again.")


# ---- what has ended pods

_DISRUPTIONS = {
    "PreemptionByScheduler": ("Pods of higher priority took the node", "Set `priority`."),
    "EvictionByEvictionAPI": ("The node was drained", "Its pods are replaced elsewhere."),
    "DeletionByTaintManager": ("The node was lost or tainted", "Its pods are replaced elsewhere."),
    "DeletionByPodGC": ("The node has vanished", "Its pods are replaced elsewhere."),
    "TerminationByKubelet": ("The node ran short and ended the pod",
                             "Ask for more `memory` or disk, so that it is reserved."),
}  # fmt: skip


def _disrupted(evidence: Evidence) -> Iterator[Cause]:
    for pod in evidence.pods:
        condition = _condition(pod, "DisruptionTarget")
        if condition is not None and condition.get("status") == "True":
            reason = condition.get("reason", "")
            what, remedy = _DISRUPTIONS.get(reason, (f"The pod was taken away ({reason})", ""))
            yield Cause(ENDED - 10, what, remedy, _name(pod))


def _evicted(evidence: Evidence) -> Iterator[Cause]:
    for pod in evidence.pods:
        status = pod.get("status", {})
        message = status.get("message", "")
        if status.get("reason") == "Evicted":
            if "EmptyDir" in message or "emptyDir" in message:
                yield Cause(ENDED + 50, _SHM_FULL, _MORE_SHM, _name(pod))
            else:
                yield Cause(ENDED, f"The pod was evicted: {message}", "", _name(pod))
        elif status.get("reason") == "UnexpectedAdmissionError":
            yield Cause(
                ENDED + 30,
                f"The node could not give the pod its devices: {message}",
                "Shared GPUs can be had one at a time only; else the node's device plugin is ill.",
                _name(pod),
            )
        elif status.get("reason") == "DeadlineExceeded":
            yield Cause(ENDED + 40, "The time limit was reached", "Raise it.", _name(pod))


def _terminated(evidence: Evidence) -> Iterator[Cause]:
    ended = [
        (state.get("finishedAt", "~"), pod, state)
        for pod in evidence.pods
        if _condition(pod, "DisruptionTarget") is None  # it was killed for that
        for container in _statuses(pod)
        for state in (_terminated_state(container),)
        if state and (state.get("exitCode") or state.get("reason") == "OOMKilled")
    ]
    # The others fail because the first one did.
    for place, (_, pod, state) in enumerate(sorted(ended, key=lambda each: each[0])):
        yield from _ending(evidence, pod, state, ENDED + (20 if place == 0 else -50))


def _ending(evidence: Evidence, pod: Manifest, state: Manifest, weight: int) -> Iterator[Cause]:
    code = state.get("exitCode", 0)
    said = evidence.logs.get(_name(pod), "") or state.get("message", "")
    words = _last_words(said)
    if state.get("reason") == "OOMKilled":
        limit = pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory")
        yield Cause(
            weight + 30,
            f"A pod used more than its memory{f' of {limit}' if limit else ''}",
            "Raise `memory`; /dev/shm counts too, as do data workers and each rank's copy.",
            _name(pod),
        )
    elif state.get("reason") in ("StartError", "ContainerCannotRun"):
        missing = re.search(r'exec: "([^"]+)"', words)
        yield Cause(
            weight + 30,
            f"The image has no {missing[1]} on its PATH" if missing
            else f"The container cannot be started: {words}",
            "Use an image with Python and torch.",
            _name(pod),
        )  # fmt: skip
    elif code == USER_ERROR and "time limit" in words:
        yield Cause(weight + 30, "The job's time was up", "Raise `time_limit`.", _name(pod))
    elif code == USER_ERROR:
        yield Cause(
            weight + 30,
            f"The program cannot run: {words}",
            "Correct it and submit again; nothing was tried a second time.",
            _name(pod),
        )
    elif code == SAVED:
        yield Cause(
            DOUBTFUL,
            "A pod was told to end, has saved and ended",
            "`farandole resume`, or its replacement, goes on from there.",
            _name(pod),
        )
    elif re.search(r"did not come|rendezvous|did not answer|start timeout", words, re.I):
        yield Cause(
            weight,
            f"The pods did not find each other: {words}",
            "Were all of them running? Does a network policy or a mesh keep them apart?",
            _name(pod),
        )
    elif code == _BUS_ERROR or _FULL_SHM.search(said):
        yield Cause(weight + 30, _SHM_FULL, _MORE_SHM, _name(pod))
    elif "No space left on device" in said:
        yield Cause(
            weight + 30, f"/dev/shm or a disk was full: {words}",
            "Raise `shm` (and `memory`, of which it is a part), or use a larger volume.",
            _name(pod),
        )  # fmt: skip
    elif code == 137:
        yield Cause(
            weight,
            "A pod was killed (SIGKILL), and not for its memory limit",
            "The node may have run out of memory: ask for more `memory`.",
            _name(pod),
        )
    elif code != TRY_AGAIN:
        yield Cause(
            weight, f"A pod ended with exit code {code}: {words}", "See `farandole logs`.",
            _name(pod),
        )  # fmt: skip


def _owner_failed(evidence: Evidence) -> Iterator[Cause]:
    for condition in evidence.owner.get("status", {}).get("conditions", []):
        if condition.get("type") in ("Failed", "FailureTarget") and condition["status"] == "True":
            reason, message = condition.get("reason", ""), condition.get("message", "")
            if reason == "DeadlineExceeded":
                yield Cause(ENDED + 60, "The job's time was up", "Raise `time_limit`.")
            else:
                yield Cause(ENDED - 100, f"The job failed ({reason}): {message.rstrip('.')}", "")


Rule = Callable[[Evidence], Iterable[Cause]]
_RULES: tuple[Rule, ...] = (
    _unschedulable, _waiting, _mounts, _sandboxes, _claims, _admission, _queue, _stopped,
    _disrupted, _evicted, _terminated, _owner_failed,
)  # fmt: skip


# ---- reading objects


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def _condition(thing: Manifest, kind: str) -> Manifest | None:
    for condition in thing.get("status", {}).get("conditions", []):
        if condition.get("type") == kind:
            found: Manifest = condition
            return found
    return None


def _statuses(pod: Manifest) -> list[Manifest]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _terminated_state(container: Manifest) -> Manifest:
    now: Manifest = container.get("state", {}).get("terminated", {})
    return now or container.get("lastState", {}).get("terminated", {})


def _messages(evidence: Evidence, *reasons: str) -> list[str]:
    return [each.get("message", "") for each in evidence.events if each.get("reason") in reasons]


def _while_pending(evidence: Evidence, *reasons: str) -> list[str]:
    """Messages about pods that have not started: what went wrong before others did is over."""
    started = {_name(pod) for pod in evidence.pods if pod["status"].get("phase") != "Pending"}
    return [
        each.get("message", "")
        for each in evidence.events
        if each.get("reason") in reasons and each["involvedObject"]["name"] not in started
    ]


def _pod_spec(evidence: Evidence) -> Manifest:
    return evidence.pods[0]["spec"] if evidence.pods else {}


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
