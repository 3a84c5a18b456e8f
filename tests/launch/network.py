"""Three hosts on one machine: network namespaces behind a bridge, two of them with an sshd.

``head`` (10.78.0.254, where the launcher runs), ``a`` (10.78.0.1) and ``b`` (10.78.0.2), each also
with an IPv6 address. They share files and process numbers, and nothing of the network.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ADDRESSES = {"a": "10.78.0.1", "b": "10.78.0.2", "head": "10.78.0.254"}
IPV6 = {"a": "fd78::1", "b": "fd78::2", "head": "fd78::254"}
SSHD = "/usr/sbin/sshd"


def why_not() -> str:
    """Why such hosts cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "ssh", "ssh-keygen", SSHD) if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    probe = f"farandole-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    if made.returncode != 0:
        return "needs network namespaces"
    _run("ip", "netns", "delete", probe)
    return ""


class Network:
    """The three hosts, until :meth:`close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = f"fd{os.getpid()}"
        self._daemons: list[subprocess.Popen[bytes]] = []
        for host in ADDRESSES:
            _run("ip", "netns", "add", self.name(host))
            _run("ip", "-n", self.name(host), "link", "set", "lo", "up")
        self._wire()
        self._write_keys()
        for host in ("a", "b"):
            self._start_sshd(host)

    def name(self, host: str) -> str:
        """The name of a host's namespace."""
        return f"{self._mark}-{host}"

    def inside(self, host: str, *command: str) -> list[str]:
        """A command line that runs ``command`` on a host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def unplug(self, host: str) -> None:
        """Pull a host's cable: packets to it and from it vanish."""
        _run("ip", "-n", self.name("head"), "link", "set", f"to-{host}", "down")

    @property
    def ssh(self) -> str:
        """The ssh that knows the hosts a and b."""
        return f"ssh -F {self.folder}/ssh_config"

    def python(self) -> str:
        """This Python with this checkout, as other hosts find it."""
        path = self.folder / "python"
        path.write_text(
            f'#!/bin/sh\nPYTHONPATH={os.environ.get("PYTHONPATH", "")} exec {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return str(path)

    def close(self) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        for host in ADDRESSES:
            # An unplugged sshd does not know yet that its visitor has gone.
            within = ["ip", "netns", "pids", self.name(host)]
            for pid in subprocess.run(within, capture_output=True, check=False).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", self.name(host)], check=False)

    def _wire(self) -> None:
        head = self.name("head")
        _run("ip", "-n", head, "link", "add", "bridge", "type", "bridge")
        self._give_addresses("head", "bridge")
        _run("ip", "-n", head, "link", "set", "bridge", "up")
        for host in ("a", "b"):
            own = self.name(host)
            _run("ip", "-n", head, "link", "add", f"to-{host}", "type", "veth",
                 "peer", "name", "cable", "netns", own)  # fmt: skip
            _run("ip", "-n", head, "link", "set", f"to-{host}", "master", "bridge", "up")
            self._give_addresses(host, "cable")
            _run("ip", "-n", own, "link", "set", "cable", "up")

    def _give_addresses(self, host: str, device: str) -> None:
        own = self.name(host)
        _run("ip", "-n", own, "address", "add", f"{ADDRESSES[host]}/24", "dev", device)
        _run("ip", "-n", own, "address", "add", f"{IPV6[host]}/64", "dev", device, "nodad")

    def _write_keys(self) -> None:
        for key in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.folder}/{key}")
        host_key = (self.folder / "host_key.pub").read_text()
        self.folder.joinpath("known_hosts").write_text(
            "".join(f"{ADDRESSES[host]},{IPV6[host]} {host_key}" for host in ("a", "b"))
        )
        self.folder.joinpath("ssh_config").write_text(
            "".join(f"Host {host}\n  HostName {ADDRESSES[host]}\n" for host in ("a", "b", "head"))
            + f"Host *\n  IdentityFile {self.folder}/user_key\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n"
        )

    def _start_sshd(self, host: str) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        config = self.folder / f"sshd_config_{host}"
        config.write_text(
            f"ListenAddress {ADDRESSES[host]}\nListenAddress {IPV6[host]}\n"
            f"HostKey {self.folder}/host_key\n"
            f"AuthorizedKeysFile {self.folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
            f"PermitRootLogin yes\nPidFile none\n"
        )
        self._daemons.append(
            subprocess.Popen(
                self.inside(host, SSHD, "-D", "-e", "-f", str(config)), stderr=subprocess.DEVNULL
            )
        )
        ready = ["sh", "-c", f"until ssh-keyscan {ADDRESSES[host]} 2>&1 | grep -q ssh-; do :; done"]
        subprocess.run(self.inside("head", *ready), check=True, timeout=20)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
