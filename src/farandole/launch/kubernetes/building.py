"""Building and pushing an image with docker, podman or buildah, whichever is there and works."""

from __future__ import annotations

import collections
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from farandole.core.errors import SetupError
from farandole.launch.kubernetes import archive, image, wheel

BUILDERS = {"docker": ["build"], "podman": ["build"], "buildah": ["build", "--layers"]}
"""By preference, and how each builds; ``--layers``: what did not change is not built again."""
ANSWER_LIMIT = 20.0
"""Seconds for a builder to say its version."""
LAST_LINES = 8

Say = Callable[[str], object]


def find_builder(wanted: str | None = None) -> str:
    """A builder that works; ``wanted`` is the only one to try.

    Raises ``SetupError``, which says what is missing.
    """
    faults = {}
    for name in [wanted] if wanted else BUILDERS:
        fault = _fault(name)
        if fault is None:
            return name
        faults[name] = fault
    listed = "\n".join(f"  - {name}: {fault}" for name, fault in faults.items())
    raise SetupError(
        f"An image is built by docker, podman or buildah:\n{listed}\n"
        "Install one of them, or start it. `farandole submit` itself needs no image of your own: "
        "the folder and Farandole travel with the job into any image that has torch."
    )


def plan(project: Path, base: str, *, ssh: bool = False) -> str:
    """The Dockerfile for ``project``; see :func:`image.dockerfile`."""
    names = set(archive.project_files(project))
    requirements, pyproject = (
        (project / name).read_text("utf-8") if name in names else None
        for name in (image.REQUIREMENTS, image.PYPROJECT)
    )
    needs = image.needs(requirements, pyproject)
    return image.dockerfile(base, wheel.file_name(), needs, ssh=ssh)


def build(builder: str, tag: str, project: Path, dockerfile: str, say: Say) -> None:
    """Build the image ``tag``; ``say`` is told each line that the builder prints.

    Raises ``SetupError`` with the last of them when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="farandole-image-") as folder:
        context = Path(folder)
        (context / "Dockerfile").write_text(dockerfile, "utf-8")
        _write_packages(context / image.PACKAGES)
        files, size = _write_project(context / image.PROJECT, project)
        say(f"{builder} builds {tag} with {files} files of {project} ({size / 2**20:.1f} MiB)")
        words = [builder, *BUILDERS[builder], "--tag", tag, str(context)]
        _run(words, f"{builder} could not build {tag}", say)


def push(builder: str, tag: str, say: Say) -> None:
    """Send the image to its registry. Raises ``SetupError`` as :func:`build` does."""
    _run([builder, "push", tag], f"{builder} could not push {tag}", say)


def _fault(builder: str) -> str | None:
    """Why it does not work; ``None`` when it does. A docker without its daemon does not."""
    if shutil.which(builder) is None:
        return "is not installed."
    try:
        done = subprocess.run(
            [builder, "version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_LIMIT,
            check=False,
        )
    except OSError as error:
        return f"cannot be started: {error.strerror}."
    except subprocess.TimeoutExpired:
        return f"`{builder} version` did not end within {ANSWER_LIMIT:g} s."
    lines = done.stderr.strip().splitlines() or ["it gave no reason"]
    return None if done.returncode == 0 else f"does not work: {lines[-1]}"


def _write_packages(folder: Path) -> None:
    folder.mkdir()
    (folder / wheel.file_name()).write_bytes(wheel.make())
    (folder / image.PINS).write_text("".join(f"{line}\n" for line in wheel.pins()), "utf-8")


def _write_project(folder: Path, project: Path) -> tuple[int, int]:
    """Copy what would travel with a job; how many files, and bytes, that are."""
    names = archive.project_files(project)
    for name in names:
        copied = folder / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(project / name, copied)
        copied.chmod(archive.mode_of(project / name))
    return len(names), sum((folder / name).stat().st_size for name in names)


def _run(words: Sequence[str], failure: str, say: Say) -> None:
    last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip("\n"))
            if line.strip():
                last.append(line.rstrip())
    if process.returncode != 0:
        said = "".join(f"\n  {line}" for line in last) or " nothing"
        raise SetupError(f"{failure} (exit code {process.returncode}). It said at last:{said}")
