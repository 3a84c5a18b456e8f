"""The archive that travels with a job."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from farandole.core.errors import UsageError
from farandole.launch.kubernetes import archive, boot, companions


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {
        "train.py": "print('hi')",
        "pkg/model.py": "x = 1",
        "pkg/__pycache__/model.pyc": "",
        "data/big.bin": "x" * 10_000,
        "notes.log": "",
        ".venv/lib/torch.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "train.py").chmod(0o755)
    return tmp_path


def test_a_folder_travels_without_what_is_no_source(project: Path) -> None:
    assert archive.project_files(project) == [
        "data/big.bin",
        "notes.log",
        "pkg/model.py",
        "train.py",
    ]


def test_in_a_repository_git_decides(project: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".gitignore").write_text("*.log\ndata/\n.venv/\n__pycache__/\n")
    assert archive.project_files(project) == [".gitignore", "pkg/model.py", "train.py"]


def test_the_ignore_file_leaves_out_more(project: Path) -> None:
    (project / archive.IGNORE_FILE).write_text(
        "# big\ndata/\n*.log\n!notes.log\n.farandoleignore\n"
    )
    assert archive.project_files(project) == ["notes.log", "pkg/model.py", "train.py"]


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("*.bin", "a/b.bin", True),
        ("/b.bin", "a/b.bin", False),
        ("a/*.bin", "a/b.bin", True),
        ("a/", "a/b/c", True),
        ("a/", "b/a", False),
        ("a", "b/a/c", True),
        ("ab", "b/a/c", False),
    ],
)
def test_patterns_are_those_of_gitignore(pattern: str, name: str, fits: bool) -> None:
    assert archive.ignored(name, [pattern]) is fits


def test_the_same_content_is_the_same_archive(project: Path) -> None:
    first = archive.pack(project)
    (project / "train.py").touch()
    assert archive.pack(project) == first


def test_farandole_alone_leaves_most_of_the_room_to_the_project() -> None:
    assert len(archive.pack(None)) < companions.ARCHIVE_LIMIT / 1.5


def test_what_was_packed_is_there_and_imports(project: Path, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive.pack(project))) as tar:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(tmp_path / "out", **safely)  # type: ignore[arg-type]
    out = tmp_path / "out"
    assert (out / boot.PROJECT / "pkg/model.py").read_text() == "x = 1"
    assert (out / boot.PROJECT / "train.py").stat().st_mode & 0o100
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import farandole.core.errors as module; "
        "print(module.__file__)"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", code, str(out / boot.PACKAGE)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert boot.PACKAGE in found


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="code: image"):
        archive.pack(tmp_path)
