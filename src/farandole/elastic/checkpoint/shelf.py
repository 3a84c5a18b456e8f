"""The folder in which a job's checkpoints stand. It knows files; what is in them it does not.

::

    checkpoints/
        step-000000000120/        published: complete, durable, never changed
            manifest.json         every file's length and digest; step, generation, ranks
            .metadata, __0_0.distcp, ...
        .step-000000000150.3.tmp/ being written by generation 3
        generation                the newest generation that has opened the folder

What is promised, and why it holds
    *Whole or not at all.* Files are written aside and synced on every rank; only when all have said
    so does one rank write the manifest, sync it, and rename the folder to its name. A rename is
    atomic: a reader sees a checkpoint with a manifest or none, whatever was killed when.

    *Not altered.* A checkpoint is used only when each of its files has the length and the digest of
    the manifest; one that has not is named, and the one before it is used.

    *No word from the dead.* An older generation of the job, of which some process still writes,
    cannot publish: whoever opens the folder notes its generation there, and who publishes looks.

    *Always one.* Old checkpoints are removed after a newer one stands, and are renamed first, so
    that a half-removed one is not taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.core.errors import SetupError

_NAME = re.compile(r"step-(\d{12,})")
_MANIFEST = "manifest.json"
_FENCE = "generation"
_CHUNK = 1 << 20
FORMAT = 1


@dataclass(frozen=True)
class Published:
    """A checkpoint that stands."""

    path: Path
    step: int

    def __str__(self) -> str:
        return str(self.path)


class Damaged(SetupError):
    """A checkpoint's files are not those that its manifest names."""


class Shelf:
    """The folder; ``keep`` newest checkpoints stay.

    Raises ``SetupError`` when the folder cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        self.folder = Path(folder)
        self._keep = keep

    # ---- reading

    def published(self) -> list[Published]:
        """What stands here, newest first. Nothing is read but names."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                name = _NAME.fullmatch(path.name)
                if name and (path / _MANIFEST).exists():
                    found.append(Published(path, int(name[1])))
        return sorted(found, key=lambda each: each.step, reverse=True)

    def manifest(self, each: Published) -> dict[str, Any]:
        """Its manifest. Raises :class:`Damaged` when it cannot be read."""
        try:
            said: dict[str, Any] = json.loads((each.path / _MANIFEST).read_text("utf-8"))
            if said["format"] != FORMAT or said["step"] != each.step:
                raise ValueError(f"format {said['format']} and step {said['step']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{each.path / _MANIFEST} cannot be read: {error}.") from None
        return said

    def verify(self, each: Published, files: Iterable[str] | None = None) -> None:
        """Read ``files`` of a checkpoint (``None``: all) and compare them with the manifest.

        Raises :class:`Damaged`, which names the file.
        """
        listed: Mapping[str, Any] = self.manifest(each)["files"]
        for name in listed if files is None else files:
            _compare(each.path / name, listed[name])

    # ---- writing

    def open(self, generation: int) -> None:
        """Note that ``generation`` of the job is at work here, and remove what older ones left.

        Called by one rank of a generation, before any of its ranks begins to write.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / _FENCE, str(generation))
            for path in self.folder.glob(".step-*"):
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise SetupError(
                f"Checkpoints cannot be kept in {self.folder}: {error.strerror}. Name a folder "
                "that all ranks can write to."
            ) from None

    def aside(self, step: int, generation: int) -> Path:
        """Where a checkpoint is written before it is published. Any rank; made when missing."""
        path = self.folder / f".step-{step:012d}.{generation}.tmp"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def publish(self, aside: Path, step: int, generation: int, about: Mapping[str, Any]) -> Path:
        """Make what stands in ``aside`` the checkpoint of ``step``; by one rank, when all have
        written and synced. ``about`` goes into the manifest, with ``files`` from :func:`digest`.

        Raises ``SetupError`` when a newer generation is at work: what was written is dropped.
        """
        path = self.folder / f"step-{step:012d}"
        said = {"format": FORMAT, "step": step, "generation": generation, **about}
        _write(aside / _MANIFEST, json.dumps(said, indent=1))
        _sync(aside)
        self._require_newest(generation, step)
        if path.exists():  # a run that was rolled back to before it comes by again
            self._discard(path)
        aside.rename(path)
        _sync(self.folder)
        self._prune()
        return path

    def _require_newest(self, generation: int, step: int) -> None:
        noted = int((self.folder / _FENCE).read_text("ascii"))
        if noted != generation:
            raise SetupError(
                f"The checkpoint of step {step} was not published: generation {noted} of the job "
                f"is at work in {self.folder}, and this process belongs to generation {generation}."
            )

    def _prune(self) -> None:
        for old in self.published()[self._keep :]:
            self._discard(old.path)

    def _discard(self, path: Path) -> None:
        gone = path.with_name(f".{path.name}.old")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def digest(path: Path) -> dict[str, Any]:
    """Length and digest of a file, for a manifest."""
    state = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
        return {"bytes": file.tell(), "blake2b": state.hexdigest()}


def sync_files(paths: Iterable[Path]) -> None:
    """Return when the files, and their names, are on the disk."""
    folders = set()
    for path in paths:
        _sync(path)
        folders.add(path.parent)
    for folder in folders:
        _sync(folder)


def _compare(path: Path, wanted: Mapping[str, Any]) -> None:
    try:
        length = path.stat().st_size
        if length != wanted["bytes"]:
            raise Damaged(f"{path} is {length} bytes long and was written with {wanted['bytes']}.")
        if digest(path) != dict(wanted):
            raise Damaged(f"{path} was altered since it was written: its digest differs.")
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}.") from None


def _write(path: Path, text: str) -> None:
    """A whole new content or the old one, for whoever reads."""
    aside = path.with_name(f".{path.name}.new")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
