"""How the launcher of an MPIJob waits for its workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.core.errors import SetupError, UsageError
from farandole.launch import pod_ssh


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_ssh, "_PAUSE", 0.01)


def ssh_that(folder: Path, *lines: str) -> list[str]:
    """Stands for ssh."""
    script = folder / "ssh"
    script.write_text("\n".join(("#!/bin/sh", f"cd {folder}", *lines)))
    script.chmod(0o755)
    return [str(script)]


def test_each_worker_is_tried_until_it_can_be_logged_in_to(tmp_path: Path) -> None:
    ssh = ssh_that(tmp_path, 'echo "$3" >> tried', 'test "$(wc -l < tried)" -ge 4')
    pod_ssh.wait_for(["a", "b"], ssh, 30.0)
    assert (tmp_path / "tried").read_text().split() == ["a", "a", "a", "a", "b"]


def test_one_that_does_not_come_is_named_with_the_reason(tmp_path: Path) -> None:
    ssh = ssh_that(tmp_path, "echo 'ssh: connect to host b: No route to host' >&2", "exit 255")
    with pytest.raises(SetupError, match=r"^b could not be reached .* 0.1 s .*No route to host$"):
        pod_ssh.wait_for(["b"], ssh, 0.1)


def test_an_image_without_ssh_is_told_what_it_lacks() -> None:
    with pytest.raises(UsageError, match="openssh-client"):
        pod_ssh.wait_for(["a"], ["/no/such/ssh"], 30.0)


def test_the_key_is_copied_to_where_nobody_else_can_read_it(tmp_path: Path) -> None:
    keys, work = tmp_path / "keys", tmp_path / "work"
    keys.mkdir()
    work.mkdir()
    (keys / "id_rsa").write_text("secret")
    (keys / "id_rsa").chmod(0o644)
    words = pod_ssh.command(str(work), str(keys), 2222)
    own = Path(words[words.index("-i") + 1])
    assert own.read_text() == "secret"
    assert own.stat().st_mode & 0o777 == 0o600
