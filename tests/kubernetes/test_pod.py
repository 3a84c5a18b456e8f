"""What a pod makes of what it is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import farandole
from farandole.launch import pod


@pytest.mark.parametrize(
    ("place", "url", "revision"),
    [
        ("https://example.com/me/train.git@v1", "https://example.com/me/train.git", "v1"),
        ("https://example.com/me/train.git", "https://example.com/me/train.git", ""),
        ("https://me@example.com/train.git", "https://me@example.com/train.git", ""),
        ("https://me@example.com/train.git@fix/it", "https://me@example.com/train.git", "fix/it"),
        ("git@example.com:me/train.git", "git@example.com:me/train.git", ""),
        ("git@example.com:me/train.git@0a1b2c", "git@example.com:me/train.git", "0a1b2c"),
        ("/srv/train@v1", "/srv/train", "v1"),
    ],
)
def test_a_repository_and_its_revision(place: str, url: str, revision: str) -> None:
    assert pod.split_revision(place) == (url, revision)


def test_the_agent_needs_the_standard_library_only() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from farandole.launch import arrivals, "
        "elastic_arrivals, elastic_pod_job, pod, pod_agent, pod_job"
    )
    source = str(Path(farandole.__file__).parents[1])
    # Without site-packages.
    subprocess.run([sys.executable, "-S", "-E", "-c", code, source], check=True, timeout=60)
