"""The Dockerfile of an image with a project, what it requires, and Farandole. Pure.

Torch comes with the base image and stays as it is: Farandole and what its command line needs are
installed in exact versions and without looking at what they depend on, since pip would replace a
vendor's own build of torch, whose version it takes for an older one.

The image's user is the one that ``restricted`` pods run as: a number, since Kubernetes cannot tell
whether a name is root's, but one with a name and a home, which ssh and torch's compiler ask for.
"""

from __future__ import annotations

import enum
import re

from farandole.core.errors import UsageError
from farandole.launch.kubernetes.pod import USER

BASE = "docker.io/pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
"""Named in full: podman and buildah know no registry by default."""
FOLDER = "/app"
"""Where the project is in the image, and where programs start."""
PACKAGES = "farandole"
"""In the context: the folder with the wheel and :data:`PINS`."""
PINS = "requirements.txt"
PROJECT = "project"
"""In the context: the folder with the project."""
REQUIREMENTS = "requirements.txt"
PYPROJECT = "pyproject.toml"

_ELSEWHERE = re.compile(
    r"^\s*(-[rce]\b|--(requirement|constraint|editable)\b|[./])|^[^#\n]*\bfile:", re.MULTILINE
)
"""A line of a list of requirements that names other files of the project."""


class Needs(enum.Enum):
    """By which of its files a project says what it requires."""

    NOTHING = "none"
    LIST = REQUIREMENTS
    LIST_AND_FILES = f"{REQUIREMENTS}, which names other files"
    PYPROJECT = PYPROJECT


def needs(requirements: str | None, pyproject: str | None) -> Needs:
    """What a project requires, from the content of these files; ``None`` where there is none.

    A list of requirements counts more than a package's own: it is what people pin.
    """
    if requirements is not None:
        return Needs.LIST_AND_FILES if _ELSEWHERE.search(requirements) else Needs.LIST
    if pyproject is not None and re.search(r"^\[project\]", pyproject, re.MULTILINE):
        return Needs.PYPROJECT
    return Needs.NOTHING


def check_base(base: str) -> None:
    """``UsageError`` unless ``base`` names a version: an image of today should be one tomorrow."""
    name, at, _ = base.rpartition("/")[2].partition("@")
    _, _, tag = name.partition(":")
    if not at and tag in ("", "latest"):
        raise UsageError(
            f"--base {base}: names no version, so the image would be another one each time. Write "
            f"{base.removesuffix(':latest')}:TAG, or @sha256: and the digest."
        )


def dockerfile(base: str, wheel: str, needs: Needs, *, ssh: bool = False) -> str:
    """The Dockerfile, for the context that :mod:`farandole.launch.kubernetes.building` writes.

    ``wheel``: the name of Farandole's file. ``ssh``: for backend ``mpijob``.

    Raises ``UsageError`` when ``base`` names no version.
    """
    check_base(base)
    parts = [
        _HEAD.format(base=base),
        _FARANDOLE.format(packages=PACKAGES, pins=PINS, wheel=wheel),
        _USER.format(user=USER, folder=FOLDER),
    ]
    if ssh:
        parts.insert(1, _SSH)
    if needs is Needs.LIST:
        # Before the code, which changes more often: so it is installed once.
        parts.append(f"COPY {PROJECT}/{REQUIREMENTS} ./\nRUN {_PIP} -r {REQUIREMENTS}\n")
    parts.append(f"COPY --chown={USER}:{USER} {PROJECT}/ ./\n")
    if needs is Needs.LIST_AND_FILES:
        parts.append(f"RUN {_PIP} -r {REQUIREMENTS}\n")
    elif needs is Needs.PYPROJECT:
        parts.append(f"RUN {_PIP} .\n")
    parts.append(f"USER {USER}:{USER}\n")
    return "\n".join(parts)


_PIP = "python3 -m pip install"

_HEAD = """\
# Written by `farandole image build`.
FROM {base}

USER root
ARG PIP_BREAK_SYSTEM_PACKAGES=1
ARG PIP_DISABLE_PIP_VERSION_CHECK=1
ARG PIP_NO_CACHE_DIR=1
ARG PIP_ROOT_USER_ACTION=ignore

# Torch has to be there, and stays as it is.
RUN python3 -c "import torch"
"""

_FARANDOLE = """\
COPY {packages}/ /opt/farandole/
RUN python3 -m pip install --no-deps -r /opt/farandole/{pins} /opt/farandole/{wheel}
"""

_SSH = """\
# Without the server's keys, which would be everybody's: each pod makes its own.
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends openssh-client openssh-server \\
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
"""

_USER = """\
RUN (getent group {user} || groupadd --gid {user} farandole) \\
    && (getent passwd {user} || useradd --uid {user} --gid {user} --create-home farandole) \\
    && install --directory --owner {user} --group {user} {folder}
WORKDIR {folder}
"""
