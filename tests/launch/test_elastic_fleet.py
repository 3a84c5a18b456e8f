"""An elastic job on several hosts, with an ssh that stays on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from launching import Launcher, wait_until
from test_elastic_hosts import TRAIN, wait_for
from test_fleet import SSH

from farandole.launch.elastic_fleet import ElasticFleet, Guest
from farandole.launch.hosts import Share


def agents_of(host: str) -> list[int]:
    """The processes that run as on ``host`` and are no worker's."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"HOST_OF_AGENT={host}".encode() in variables and b"farandole.launch" in command:
            found.append(int(entry.name))
    return found


def test_secrets_do_not_travel_by_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """It authenticates and does not hide: agents elsewhere get them by ssh."""
    fleet = ElasticFleet.__new__(ElasticFleet)
    fleet._secrets = {"FARANDOLE_SECRET": "ab" * 32}
    sent: list[dict[str, Any]] = []
    guest = Guest(Share("b", range(0)), "10.0.0.1", ready=True)
    monkeypatch.setattr(guest, "send", lambda _kind, **fields: sent.append(fields))
    own = {"FARANDOLE_STORE": "127.0.0.1:5", "FARANDOLE_SECRET": "ab" * 32, "RANK": "1"}
    guest.waiting.append((1, own))
    fleet._hand_over(guest)
    assert sent == [{"numbers": [1], "ranks": [{"FARANDOLE_STORE": "10.0.0.1:5", "RANK": "1"}]}]


@pytest.mark.slow
def test_a_host_that_cannot_be_found_is_done_without(launcher: Launcher) -> None:
    hosts = launcher.folder / "hosts"
    hosts.write_text("localhost slots=1\nno-such-host.invalid slots=1\n")
    (launcher.folder / "enough").touch()
    options = ["--hostfile", str(hosts), "-np", "1", "--min-np", "1", "--on-loss", "host"]
    done = launcher.run(*options, launcher.script(TRAIN), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "could not be started: no-such-host.invalid cannot be reached" in done.stderr
    assert "done on 1 localhost" in done.stdout


@pytest.mark.slow
def test_a_host_comes_in_and_one_is_lost(launcher: Launcher) -> None:
    ssh = launcher.folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    hosts = launcher.folder / "hosts"
    hosts.write_text("a slots=1\n")
    options = ["--ssh", str(ssh), "--hostfile", str(hosts), "-np", "1", "--min-np", "1"]
    process = launcher.start(
        *options, launcher.script(TRAIN), text=True, stderr=-2, env={"OMP_NUM_THREADS": "1"}
    )
    seen: list[str] = []
    wait_for(process, "trains on 1", seen)  # type: ignore[arg-type]
    hosts.write_text("a slots=1\nb slots=2\n")
    wait_for(process, "trains on 3", seen)  # type: ignore[arg-type]
    for agent in agents_of("b"):
        os.kill(agent, signal.SIGKILL)
    wait_for(process, "was lost with b", seen)  # type: ignore[arg-type]
    wait_for(process, "trains on", seen)  # type: ignore[arg-type]
    # The host is logged in to again.
    wait_for(process, "trains on 3", seen)  # type: ignore[arg-type]
    (launcher.folder / "enough").touch()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(seen) + str(out)
    assert wait_until(lambda: not launcher.running(), limit=10.0), launcher.running()
