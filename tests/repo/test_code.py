"""Rules of the code that a type checker does not know."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farandole"
MODULES = sorted(PACKAGE.rglob("*.py"))


def fresh(code: str) -> str:
    """What a new interpreter prints that runs ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    ["--help", "run --help", "doctor --help", "bench --help", "bench step --help", "--version"],
    ids=str.strip,
)
def test_the_command_line_imports_no_framework(arguments: str) -> None:
    loaded = fresh(
        "import sys\n"
        "from farandole.cli.main import main\n"
        f"sys.argv = ['farandole', *{arguments.split()}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print('loaded:', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    modules = set(loaded.rsplit("loaded:", 1)[1].split())
    assert not modules & {"torch", "numpy", "tensorflow", "jax", "keras"}


def test_importing_the_package_imports_no_framework() -> None:
    assert fresh("import sys, farandole\nprint('torch' in sys.modules)") == "False\n"


def test_a_worker_needs_the_standard_library_and_torch_alone() -> None:
    fresh(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {'click', 'rich', 'pydantic', 'yaml'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import torch\n"
        "import farandole.torch as hvd\n"
        "hvd.init()\n"
        "assert hvd.allreduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]\n"
        "hvd.shutdown()\n"
    )


def test_the_layers_hold() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout


def test_only_the_settings_read_the_environment() -> None:
    """Aside from who builds the environments of processes: the launcher, the test ranks.

    NCCL takes some options from the environment only; its engine lends them to it. Horovod's
    helper ``env`` sets variables for a while, and what ``import horovod`` finds must not need us.
    """
    reading = re.compile(r"\bos\.(environ|getenv|environb)\b|\bfrom os import .*\benviron")
    readers = {
        str(module.relative_to(PACKAGE)) for module in MODULES if reading.search(module.read_text())
    }
    builders = ("launch/", "testing/")
    assert {one for one in readers if not one.startswith(builders)} <= {
        "core/config.py",
        "comm/engines/nccl.py",
        "horovod/common/util.py",
        "horovod/path/horovod/__init__.py",
    }


def test_internal_packages_are_docstring_only() -> None:
    faces = {
        "",
        "torch",
        "torch/elastic",
        "horovod",
        "horovod/data",
        "horovod/path/horovod",
        "horovod/runner",
    }
    for module in PACKAGE.rglob("__init__.py"):
        tree = ast.parse(module.read_text())
        assert ast.get_docstring(tree), f"{module} does not say what belongs there"
        if str(module.parent.relative_to(PACKAGE)).replace(".", "") not in faces:
            assert len(tree.body) == 1, f"{module} holds more than its docstring"


def test_no_module_outgrows_a_reader() -> None:
    lengths = {str(one.relative_to(PACKAGE)): len(one.read_text().splitlines()) for one in MODULES}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


def public_names() -> list[str]:
    import farandole.torch as hvd

    return sorted(hvd.__all__)


def test_every_public_name_says_what_it_promises_with_an_example() -> None:
    import farandole.torch as hvd

    silent = [
        name
        for name in public_names()
        if (inspect.isfunction(thing := getattr(hvd, name)) or inspect.isclass(thing))
        and "Example" not in (thing.__doc__ or "")
    ]
    assert silent == []


def test_the_public_face_imports_under_each_of_its_names() -> None:
    import farandole.torch as hvd

    assert [name for name in public_names() if not hasattr(hvd, name)] == []
