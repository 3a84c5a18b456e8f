"""What the documents say about the repository is true of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farandole"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def anchors(document: Path) -> set[str]:
    """The anchors that a Markdown renderer gives to the headings."""
    headings = re.findall(r"^#+\s+(.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{document.name} links to {target}"


def test_every_page_of_the_docs_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in ROOT.glob("docs/**/*.md"):
        if page.name != "index.md":
            assert f"({page.relative_to(ROOT / 'docs')})" in index


def named_paths() -> set[str]:
    """What ARCHITECTURE.md names as a folder (`core/`) or a Python file (`core/config.py`)."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    quoted = re.findall(r"`([^`\s]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {one for one in quoted if re.fullmatch(r"[\w./]+(\.py|/)", one)}


def test_the_architecture_names_only_what_exists() -> None:
    missing = {
        name
        for name in named_paths()
        if not (PACKAGE / name).exists() and not (ROOT / name).exists()
    }
    assert not missing


def test_the_architecture_names_every_package_and_every_file_of_it() -> None:
    files = {path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    folders = {path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    expected = {str(path.relative_to(PACKAGE)) for path in files} | {
        f"{path.relative_to(PACKAGE)}/" for path in folders
    }
    assert not expected - named_paths()
