"""ssh between the pods of an MPIJob: the workers' servers, and the launcher's way to them.

The operator puts a key into every pod. Nothing of it needs root: the server listens above 1024,
has a host key of its own in the pod, and admits by the operator's key alone. Its user must have an
entry in the image's ``/etc/passwd``, which is ssh's own demand.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

from farandole.core.clock import Deadline
from farandole.core.errors import SetupError, UsageError
from farandole.launch.arrivals import SAY_EVERY

_SERVER = "/usr/sbin/sshd"
_PAUSE = 1.0
"""Seconds between two attempts to reach a server."""
_ATTEMPT = 20.0
"""Seconds for one attempt."""


def serve(work: str, keys: str, port: int, address: str) -> NoReturn:
    """Become the ssh server that admits by the keys in the folder ``keys``.

    ``UsageError`` when the image cannot be one.
    """
    host_key = os.path.join(work, "ssh-host-key")
    try:
        if os.geteuid() == 0:  # it gives up root for strangers, and wants this folder for it
            os.makedirs("/run/sshd", exist_ok=True)
        if not os.path.exists(host_key):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", host_key]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        options = {
            "Port": port, "ListenAddress": address, "HostKey": host_key, "PidFile": "none",
            "AuthorizedKeysFile": os.path.join(keys, "authorized_keys"), "StrictModes": "no",
            "PasswordAuthentication": "no", "KbdInteractiveAuthentication": "no", "UsePAM": "no",
        }  # fmt: skip
        given = [word for name, text in options.items() for word in ("-o", f"{name}={text}")]
        os.execv(_SERVER, [_SERVER, "-D", "-e", "-f", os.devnull, *given])
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(
            f"The image cannot be an ssh server, which backend mpijob needs ({error}): install "
            "openssh-server and openssh-client."
        ) from None


def command(work: str, keys: str, port: int) -> list[str]:
    """The ssh by which the launcher reaches the workers."""
    own = os.path.join(work, "ssh-key")
    # ssh uses no key that others may read, as they may that of a mounted Secret.
    with (
        open(os.path.join(keys, "id_rsa"), "rb") as mounted,
        open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as copy,
    ):
        copy.write(mounted.read())
    options = {
        "IdentitiesOnly": "yes", "BatchMode": "yes", "LogLevel": "ERROR",
        "StrictHostKeyChecking": "no", "UserKnownHostsFile": os.devnull,
    }  # fmt: skip
    given = [word for name, text in options.items() for word in ("-o", f"{name}={text}")]
    return ["ssh", "-p", str(port), "-i", own, *given]


def wait_for(hosts: Iterable[str], ssh: Sequence[str], patience: float) -> None:
    """Return when all hosts can be logged in to. ``SetupError`` after ``patience`` seconds."""
    deadline = Deadline.after(patience)
    said = time.monotonic()
    for host in hosts:
        while why := _why_not(host, ssh):
            if deadline.expired():
                raise SetupError(
                    f"{host} could not be reached by ssh within {patience:g} s (start_timeout): "
                    f"{why}"
                )
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                os.write(2, f"farandole: waiting for {host}: {why}\n".encode())
            time.sleep(_PAUSE)


def _why_not(host: str, ssh: Sequence[str]) -> str:
    """Why a host cannot be logged in to; empty when it can."""
    words = [*ssh, "-o", "ConnectTimeout=5", host, "true"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, timeout=_ATTEMPT, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise UsageError("The image has no ssh: install openssh-client.") from None
    except subprocess.TimeoutExpired:
        return f"it did not answer within {_ATTEMPT:g} s"
    if done.returncode == 0:
        return ""
    return done.stderr.strip() or f"ssh ended with exit code {done.returncode}"
