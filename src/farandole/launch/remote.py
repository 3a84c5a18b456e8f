"""The agent of another host, as :mod:`farandole.launch.ssh` starts it there.

It is the agent of :mod:`farandole.launch.agent` but for this: it learns what it is to run from its
standard input (the *wish*), at once and secrets included; it has torch imported from then on, while
other hosts are still being reached; and it connects to the job loop, which has to prove that it is
that. When this connection ends, or the other host does not even confirm packets for
:data:`farandole.launch.link.SILENCE` seconds, it kills all that it has started, as ever.

Its first message is ``ready``: which of the hosts it is, the address at which it is reached, and a
port there that nobody else is given.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import ConnectionLost, DeadlineError, FarandoleError, SetupError
from farandole.core.secret import Secret
from farandole.launch import early, environment, host, link, ssh
from farandole.launch.agent import Agent
from farandole.launch.channel import Message

_OF_A_HOST = frozenset([
    "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "HOST", "TMPDIR", "TERM", "DISPLAY",
    "XAUTHORITY", "PWD", "OLDPWD", "SHLVL", "_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
])  # fmt: skip
_OF_A_LOGIN = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_")


def wish_for(index: int, environ: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Any]:
    """The part of a wish that says where its reader runs, and in which environment."""
    python_path = environ.get("PYTHONPATH", "")
    return {
        "index": index,
        "version": ssh.version(),
        "pythonpath": [os.path.abspath(path) for path in python_path.split(os.pathsep) if path],
        "folder": os.getcwd(),
        "environ": {name: text for name, text in environ.items() if not belongs_to_host(name)},
        "given": dict(given),
    }


def belongs_to_host(name: str) -> bool:
    """Whether an environment variable says something of one host, and so does not travel."""
    return name in _OF_A_HOST or name.startswith(_OF_A_LOGIN)


def main(wish: dict[str, Any]) -> None:
    """Be the agent of this host until the job loop is done with it, or gone."""
    try:
        agent = _prepare(wish)
    except (FarandoleError, OSError) as error:
        # The last line of standard error is what the launcher shows.
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(ssh.REFUSED)
    agent.run()


class RemoteAgent(Agent):
    """The agent, with what was wished for before it had a channel."""

    def __init__(
        self, channel: link.Link, parent: early.ForkingParent | None, task: dict[str, Any]
    ) -> None:
        super().__init__(channel, parent, task.get("secrets"))
        self._wished = task

    def _start(self, message: Message) -> None:
        """All hosts are there. What could not be known before comes with the message."""
        ranks = [{**own, **message.fields["master"]} for own in self._wished["ranks"]]
        super()._start(message._replace(fields={**self._wished, "ranks": ranks}))


def _prepare(wish: dict[str, Any]) -> RemoteAgent:
    ours = ssh.version()
    if ours != wish["version"]:
        raise SetupError(
            f"Farandole is {ours or 'not installed'} there and {wish['version']} here; all hosts "
            f"of a job need the same: `{sys.executable} -m pip install "
            f"farandole=={wish['version']}` there, or name another Python with --remote-python."
        )
    try:
        os.chdir(wish["folder"])
    except OSError as error:
        raise SetupError(
            f"The folder {wish['folder']} cannot be entered there ({error.strerror}). All hosts "
            "need the program at the same path."
        ) from None
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    task = {
        **wish["task"],
        "environment": environment.shared(
            {**os.environ, **wish["environ"]},
            wish["given"],
            local_size=wish.get("slots") or len(wish["task"]["ranks"]),
            cores=host.usable_cores(),
        ),
    }
    parent = early.start_forking_parent(task["environment"]) if task["fork"] else None
    channel = _connect(wish)
    address = channel.own_address
    channel.send("ready", index=wish["index"], address=address, port=_reserve(address))
    return RemoteAgent(channel, parent, task)


def _connect(wish: dict[str, Any]) -> link.Link:
    try:
        return link.connect(
            Address.parse(wish["address"]),
            Secret.from_hex(wish["secret"]),
            Deadline.after(wish["limit"]),
        )
    except (ConnectionLost, DeadlineError) as error:
        raise SetupError(
            f"{error.message} The launcher listens there, and its hosts have to reach it: is a "
            "firewall between them? FARANDOLE_INTERFACE chooses another interface of the launcher."
        ) from None


def _reserve(address: str) -> int:
    """A port that stays bound here and does not listen: rank 0 can, and nobody else is given it."""
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    _reserved.append(holder)
    port: int = holder.getsockname()[1]
    return port


_reserved: list[socket.socket] = []
