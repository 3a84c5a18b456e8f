"""What a pod of a job on a cluster does from its first moment on; see ``launch/kubernetes/boot``.

Node 0 runs the job loop, the others come to it. All that differs between clusters is told by the
arguments; what is secret, or only known in the pod, by the environment:

====================  ============================================================================
FARANDOLE_SECRET      the job's key, in hexadecimal
FARANDOLE_NODE        which node of the job this pod is, from 0
FARANDOLE_POD_IP      its address
FARANDOLE_FAILURES    how many pods of this node have failed before; elastic jobs only
FARANDOLE_DISRUPTIONS how many more were taken away
FARANDOLE_ADDRESSES   addresses of nodes whose names nobody resolves: ``name=address,…``; optional
====================  ============================================================================

The standard library and torch are all that an image needs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from farandole.core.address import Address
from farandole.core.config import Settings
from farandole.core.config import environment as current_environment
from farandole.core.errors import FarandoleError, SetupError, UsageError
from farandole.core.secret import Secret
from farandole.elastic.policy import Policy
from farandole.launch import early, environment, host, job, plan, pod_agent, pod_ssh
from farandole.launch.discovery import Discovery
from farandole.launch.hosts import Host, Share
from farandole.launch.pod_job import CANNOT_RUN, TERMINATED
from farandole.launch.task import Elastic, Meeting, Program, Task

_FAILED = 1


@dataclass(frozen=True)
class Pod:
    """What a pod knows."""

    told: Mapping[str, Any]
    """See ``launch/kubernetes/boot.arguments``."""
    work: str
    """The folder in which the archive was unpacked."""
    variables: Mapping[str, str]
    """The environment."""

    @property
    def ranks(self) -> int:
        """Ranks of each node."""
        return int(self.told["local_size"])

    @property
    def given(self) -> dict[str, str]:
        """The ranks' own variables: they find Farandole where the archive has it."""
        own = self.variables.get("PYTHONPATH", "")
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        return {"PYTHONPATH": f"{package}{os.pathsep}{own}" if own else package}

    def name_of(self, index: int) -> str:
        """The name of a node in the cluster's name service."""
        return str(self.told["peers"]).format(index)


def main(argv: Sequence[str]) -> NoReturn:
    """Be this pod: ``argv`` has the folder of the archive, where it is unpacked, and what is told.

    Ends the process with the pod's exit code; see :mod:`farandole.launch.pod_job`.
    """
    # Process 1 has no default handlers: without this one SIGTERM would do nothing.
    signal.signal(signal.SIGTERM, _end)
    _, work, told = argv
    pod = Pod(json.loads(told), work, current_environment())
    roles = {"node": _node, "ssh-server": _ssh_server, "launcher": _launcher}
    try:
        _fetch_code(pod)
        code = roles[pod.told["role"]](pod)
    except UsageError as error:
        _say(str(error))
        code = CANNOT_RUN
    except FarandoleError as error:
        _say(str(error))
        code = _FAILED
    sys.exit(code)


def _end(_number: int, _frame: object) -> None:
    sys.exit(TERMINATED)


def _say(text: str) -> None:
    os.write(2, f"farandole: {text}\n".encode())


# ---- the code


def _fetch_code(pod: Pod) -> None:
    code, folder = pod.told["code"], pod.told["folder"]
    if code.startswith("git:"):
        _clone(*split_revision(code.removeprefix("git:")), f"{pod.work}/project")
    if folder:
        try:
            os.chdir(folder)
        except OSError as error:
            raise UsageError(
                f"The folder {folder}, in which it would start, cannot be entered "
                f"({error.strerror}). Correct `workdir` or `code`."
            ) from None


def split_revision(place: str) -> tuple[str, str]:
    """The address of a repository, and the revision after its last ``@``, or an empty one.

    Example::

        split_revision("https://example.com/me/train.git@v1")   # ("https://…/train.git", "v1")
        split_revision("git@example.com:me/train.git")          # (the same, "")
    """
    url, at, revision = place.rpartition("@")
    if at and ":" not in revision and "/" in url.rpartition("://")[2]:
        return url, revision
    return place, ""


def _clone(url: str, revision: str, folder: str) -> None:
    steps = [["git", "clone", "--quiet", url, folder]]
    if revision:
        steps.append(["git", "-C", folder, "checkout", "--quiet", revision])
    for step in steps:
        try:
            done = subprocess.run(step, stderr=subprocess.PIPE, text=True, check=False)
        except FileNotFoundError:
            raise UsageError(f"code: git:{url} needs git, which the image has not.") from None
        if done.returncode != 0:
            raise SetupError(f"{' '.join(step)} failed: {done.stderr.strip()}")


# ---- a node


def _node(pod: Pod) -> int:
    index = int(pod.variables["FARANDOLE_NODE"])
    secret = Secret.from_hex(pod.variables["FARANDOLE_SECRET"])
    return _lead(pod, secret) if index == 0 else _follow(pod, index, secret)


def _lead(pod: Pod, secret: Secret) -> int:
    agent = early.start_agent(())
    return job.run(_task(pod, secret), agent)


def _task(pod: Pod, secret: Secret) -> Task:
    told, nodes = pod.told, int(pod.told["nodes"])
    program = _program(pod)
    settings = Settings.from_environment(pod.variables)
    return Task(
        program=program,
        size=nodes * pod.ranks,
        environment=pod.given,
        fork=told["fork"] and program.form != "command",
        output_dir=_log_folder(pod),
        hosts=tuple(
            Share(f"node {index}", range(index * pod.ranks, (index + 1) * pod.ranks))
            for index in range(nodes)
        ),
        elastic=_elastic(pod, settings),
        start_timeout=settings.start_timeout,
        # The cluster's own limit is not to come first.
        grace=max(1.0, told["grace"] - _MARGIN),
        meeting=Meeting(
            address=pod.variables["FARANDOLE_POD_IP"],
            port=told["port"],
            secret=secret,
            patience=told["start_timeout"],
            time_limit=told["time_limit"],
            replaces=_replaces_another(pod),
        ),
    )


def _replaces_another(pod: Pod) -> bool:
    """Whether this is not the first pod of its node, as the cluster counts."""
    counts = (pod.variables.get(f"FARANDOLE_{each}", "") for each in ("FAILURES", "DISRUPTIONS"))
    return any(count not in ("", "0") for count in counts)


def _elastic(pod: Pod, settings: Settings) -> Elastic | None:
    """What may change: nodes, from the least number on; how many come is the cluster's affair."""
    least = int(pod.told["least_nodes"])
    if least == int(pod.told["nodes"]):
        return None
    return Elastic(
        policy=Policy(
            start_size=least * pod.ranks,
            min_size=least * pod.ranks,
            start_timeout=settings.start_timeout,
            stall_warning=settings.stall_warning,
            stall_timeout=settings.stall_timeout,
            patience=pod.told["start_timeout"],
        ),
        # Other nodes are told of when they come.
        discovery=Discovery(fixed=(Host(_FIRST, pod.ranks),)),
        first={_FIRST: pod.ranks},
    )


def _program(pod: Pod) -> Program:
    """What the ranks run. ``python`` is this one where an image has no other."""
    words = list(pod.told["argv"])
    if words[0] in ("python", "python3") and shutil.which(words[0]) is None:
        words[0] = sys.executable
    return plan.recognise(words)


_FIRST = "node 0"
_MARGIN = 10.0
"""Seconds of the cluster's grace period that are kept for ending in order."""


def _log_folder(pod: Pod) -> str | None:
    """A folder for this attempt's logs; node 0 writes those of all ranks."""
    logs = pod.told["logs"]
    if logs is None:
        return None
    folder = os.path.join(logs, pod.told["name"])
    attempt = 1
    while os.path.exists(os.path.join(folder, str(attempt))):
        attempt += 1
    return os.path.join(folder, str(attempt))


def _follow(pod: Pod, index: int, secret: Secret) -> int:
    program = _program(pod)
    task = {
        "form": program.form,
        "argv": list(program.argv),
        "fork": pod.told["fork"] and program.form != "command",
        "terminal": {},
        "environment": environment.shared(
            pod.variables, pod.given, local_size=pod.ranks, cores=host.usable_cores()
        ),
    }
    return pod_agent.serve(
        index, lambda: _address_of(pod, 0), secret, task, pod.told["start_timeout"], _end
    )


def _address_of(pod: Pod, index: int) -> Address:
    """Where a node's agent listens."""
    name = pod.name_of(index)
    known = dict(
        each.split("=", 1)
        for each in pod.variables.get("FARANDOLE_ADDRESSES", "").split(",")
        if "=" in each
    )
    return Address(known.get(name, name), pod.told["port"])


# ---- the pods of an MPIJob


def _ssh_server(pod: Pod) -> int:
    told = pod.told
    pod_ssh.serve(pod.work, told["ssh_keys"], told["ssh_port"], pod.variables["FARANDOLE_POD_IP"])


def _launcher(pod: Pod) -> int:
    # Other hosts are told to look for Farandole where this process does.
    os.environ.update(pod.given)
    told = pod.told
    ssh = pod_ssh.command(pod.work, told["ssh_keys"], told["ssh_port"])
    task = plan.resolve(
        told["argv"],
        hostfile=told["peers"],
        env=[f"{name}={text}" for name, text in pod.given.items()],
        ssh=" ".join(ssh),
        output_dir=_log_folder(pod),
        grace=max(1.0, told["grace"] - _MARGIN),
        no_fork=not told["fork"],
    )
    pod_ssh.wait_for([share.host for share in task.hosts], ssh, told["start_timeout"])
    return job.run(task, early.start_agent(()))
