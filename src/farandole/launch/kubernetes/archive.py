"""What travels with a job into any image: Farandole itself and, if asked for, the project's files.

One gzipped tar file, the same for the same content, so that its digest names the code that ran. In
a git repository the project is what git tracks or would track; elsewhere it is the folder without
what is plainly no source. ``.farandoleignore`` leaves out more, in the form of a ``.gitignore``.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import os
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import farandole
from farandole.core.errors import UsageError
from farandole.launch.kubernetes import boot

IGNORE_FILE = ".farandoleignore"
NEVER = frozenset([
    ".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", ".ipynb_checkpoints", ".tox",
])  # fmt: skip
"""Folders that are no source, wherever they stand."""
_EFFORT = 6
"""Of compression: the most would take thrice as long and save less than one percent."""


def pack(project: Path | None) -> bytes:
    """The archive with Farandole and the files of ``project`` (``None``: without a project)."""
    packed = io.BytesIO()
    # No times and no names of users: the same content is the same archive.
    with (
        gzip.GzipFile("", "wb", _EFFORT, packed, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name, content in package():
            _add(tar, f"{boot.PACKAGE}/farandole/{name}", content, 0o644)
        if project is not None:
            for name in project_files(project):
                path = project / name
                _add(tar, f"{boot.PROJECT}/{name}", path.read_bytes(), mode_of(path))
    return packed.getvalue()


def package() -> Iterator[tuple[str, bytes]]:
    """The files of Farandole itself, relative to the package's folder, in order."""
    root = Path(farandole.__file__).parent
    for name in sorted(_walk(root)):
        if name.endswith(".py"):
            yield name, (root / name).read_bytes()


def project_files(project: Path) -> list[str]:
    """The files of a project that travel, relative to it, in order.

    Raises ``UsageError`` when there is none.
    """
    patterns = _ignored_patterns(project)
    found = _tracked(project)
    names = _walk(project) if found is None else found
    kept = sorted({name for name in names if not ignored(name, patterns)})
    kept = [name for name in kept if (project / name).is_file()]
    if not kept:
        raise UsageError(
            f"There are no files to send in {project}. Start from the folder of your program, or "
            "say where the code is: `code: image`, `code: claim:NAME/FOLDER`."
        )
    return kept


def mode_of(path: Path) -> int:
    """The rights with which a file travels: whoever the user is there, all that matters is kept."""
    return 0o755 if os.access(path, os.X_OK) else 0o644


def ignored(name: str, patterns: Iterable[str]) -> bool:
    """Whether an ignore file's ``patterns`` leave ``name`` out; the last that fits decides.

    As in a ``.gitignore``: ``!`` takes back, a slash at the end means folders, a slash elsewhere
    binds the pattern to the top, and a pattern without one fits at any depth.
    """
    out = False
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        if _fits(name, wanted):
            out = not pattern.startswith("!")
    return out


def _fits(name: str, pattern: str) -> bool:
    parts = name.split("/")
    only_folders = pattern.endswith("/")
    pattern = pattern.rstrip("/")
    above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + (not only_folders))]
    if "/" in pattern:
        return any(fnmatch.fnmatchcase(each, pattern.lstrip("/")) for each in above)
    return any(fnmatch.fnmatchcase(each.rpartition("/")[2], pattern) for each in above)


def _ignored_patterns(project: Path) -> list[str]:
    try:
        lines = (project / IGNORE_FILE).read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _tracked(project: Path) -> list[str] | None:
    """What git tracks or would track below ``project``; ``None`` where there is no git."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=project,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return [name for name in os.fsdecode(listed.stdout).split("\0") if name]


def _walk(project: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(project):
        folders[:] = sorted(set(folders) - NEVER)
        within = os.path.relpath(folder, project)
        for name in files:
            if not name.endswith((".pyc", ".pyo")):
                yield name if within == os.curdir else f"{within}/{name}"


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = mode
    tar.addfile(member, io.BytesIO(content))
