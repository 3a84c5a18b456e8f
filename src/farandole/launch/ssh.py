"""Starting an agent on another host, over ssh.

The command line holds the Python to start and nothing else about the job. What the agent needs to
know, secrets and environment among it, comes through ssh's standard input, from memory: a line of
JSON. ssh encrypts it, and it shows in no process list. From then on ssh tells two things only: what
went wrong, by its standard error, and that the host is gone, by its end: it asks for a sign of life
every :data:`ASK_EVERY` seconds, and gives up after :data:`ASK_TIMES` without one.

ssh is the user's, with the user's configuration: aliases, keys, jump hosts and known hosts work as
in a shell. It must not need a password.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from collections import deque
from collections.abc import Sequence
from importlib import metadata
from typing import IO, Any

from farandole.core.errors import SetupError
from farandole.launch import early

ASK_EVERY = 5
ASK_TIMES = 3
CONNECT_LIMIT = 20.0
"""Seconds for a connection to the other host's ssh server."""

REFUSED = 97
"""The exit code of an agent that cannot do what it was asked for; the reason is on its stderr."""

_SSH_FAILED = 255
_NO_COMMAND = (126, 127)
_ABSENT = re.compile(r"(?:No module named|cannot import name) '?(?:farandole|remote)\b")
_ANSWER_LIMIT = 10.0
_LAST_LINES = 12

BOOTSTRAP = (
    "import sys;sys.path[:]=filter(None,sys.path);"
    "import json;wish=json.loads(sys.stdin.buffer.readline());"
    "sys.path[:0]=wish['pythonpath'];"
    "from farandole.launch import remote;remote.main(wish)"
)
"""What the other Python runs. It is said to need no file there but the package itself."""


def version() -> str:
    """The version of the package that runs here; empty when it was never installed."""
    try:
        return metadata.version("farandole")
    except metadata.PackageNotFoundError:
        return ""


class Login:
    """An ssh that runs an agent on ``host``; ``python`` is the interpreter there."""

    def __init__(
        self, ssh: Sequence[str], host: str, python: str, wish: dict[str, Any], limit: float
    ) -> None:
        self.host = host
        self._python = python
        self._said: deque[bytes] = deque([b""], maxlen=_LAST_LINES + 1)
        self.ended = False
        """Whether ssh has ended, and with it what ran on the host."""
        try:
            with _in_memory(wish) as stdin:
                # Not in our session: Ctrl-C is the job loop's to interpret.
                self._process = subprocess.Popen(
                    [*ssh, *_options(limit), "--", host, _command(python)],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            raise _absent(ssh, host, error) from None
        assert self._process.stderr is not None
        self._stderr = self._process.stderr
        os.set_blocking(self._stderr.fileno(), False)

    def fileno(self) -> int:
        """The descriptor of ssh's standard error, to wait on."""
        return self._stderr.fileno()

    def read(self) -> None:
        """Take what ssh has said; sets :attr:`ended` when it has ended."""
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._stderr.fileno(), 1 << 16)
            *lines, rest = (self._said.pop() + chunk).split(b"\n")
            self._said.extend([*lines, rest])
            if not chunk:
                self.ended = True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=1.0)

    def words(self) -> list[str]:
        """The last lines that came from ssh or the agent."""
        lines = [line.decode("utf-8", "replace").strip() for line in self._said]
        return [line for line in lines if line]

    def why_not_started(self) -> str:
        """What is wrong with the host, and what to do, once ssh has ended."""
        return explain(self.host, self._process.returncode, self.words(), self._python)

    def why_lost(self) -> str:
        """Why a host was lost on which the agent had been running."""
        last = self.words()[-1:]
        ended = f"ssh ended with code {self._process.returncode}"
        return f"ssh says: {last[0].rstrip('.')}" if last else ended

    def close(self) -> None:
        """End ssh, and with it the agent if that still runs."""
        self._process.kill()
        self._process.wait()
        self._stderr.close()


def explain(host: str, code: int | None, words: Sequence[str], python: str) -> str:
    """Why no agent runs on ``host``, from how ssh ended and what it said last. Pure."""
    last = words[-1] if words else "it gave no reason"
    if code == REFUSED:
        return f"{host}: {last}"
    if code == _SSH_FAILED:
        return (
            f"{host} cannot be reached: {last}. `ssh {host} true` must work here, and ask for no "
            "password."
        )
    if code in _NO_COMMAND:
        return f"{host} has no Python {python} ({last}). Name the one there with --remote-python."
    if any(_ABSENT.search(word) for word in words):
        ours = version()
        return (
            f"{host}: {python} there has no Farandole, or an old one. All hosts of a job need the "
            f"same: `{python} -m pip install farandole{f'=={ours}' if ours else ''}` there, or "
            "name another Python with --remote-python."
        )
    return f"{host}: the agent there ended with code {code}: {last}"


def real_name(ssh: Sequence[str], host: str) -> str:
    """The name or address by which ssh connects to ``host``, which may be an alias of its own."""
    try:
        done = subprocess.run(
            [*ssh, "-G", "--", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_LIMIT,
            check=False,
        )
    except OSError as error:
        raise _absent(ssh, host, error) from None
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"`{shlex.join([*ssh, '-G', host])}`, which tells what {host} stands for, did not end "
            f"within {_ANSWER_LIMIT:g} s."
        ) from None
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        if name == "hostname" and value:
            return value
    return host.rpartition("@")[2]


def _absent(ssh: Sequence[str], host: str, error: OSError) -> SetupError:
    return SetupError(
        f"Ranks on {host} need ssh, and {ssh[0]} cannot be started here: {error.strerror}. Install "
        "an OpenSSH client, or name one with --ssh."
    )


def _options(limit: float) -> list[str]:
    chosen = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, int(min(limit, CONNECT_LIMIT)))),
        "ServerAliveInterval": str(ASK_EVERY),
        "ServerAliveCountMax": str(ASK_TIMES),
        # A connection of its own: of a shared one, another ssh notices the end.
        "ControlMaster": "no",
        "ControlPath": "none",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    return ["-T", *(word for name, text in chosen.items() for word in ("-o", f"{name}={text}"))]


def _command(python: str) -> str:
    """For the login shell there, whichever that is."""
    return "exec " + shlex.join([python, *early.interpreter_flags(), "-c", BOOTSTRAP])


def _in_memory(wish: dict[str, Any]) -> IO[bytes]:
    """A file that holds the wish: a pipe would have to be filled while ssh connects."""
    file = open(os.memfd_create("farandole"), "w+b")  # noqa: SIM115 - its user closes it
    file.write(json.dumps(wish).encode("ascii") + b"\n")
    file.seek(0)
    return file
