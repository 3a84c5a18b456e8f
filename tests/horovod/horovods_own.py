"""Runs the test files of a checkout of Horovod against Farandole, and prints how they went.

``python tests/horovod/horovods_own.py CHECKOUT [FILE ...]``. The files are run as they are, but for
``test_run.py``, which tests Horovod's launchers too: of it a copy is made that has the tests of
arguments, configuration and hosts, and the imports that these use. Horovod's helpers for tests need
``pip install mock packaging``.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FARANDOLE = [sys.executable, "-c", "from farandole.cli.main import main; main()", "run"]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
LIMIT = 1200.0

FILES: dict[str, tuple[str, list[list[str]]]] = {
    "test_torch.py": (
        "parallel",
        [
            [*FARANDOLE, "-np", "2", "--", sys.executable, *PYTEST, "test_torch.py"],
            [*FARANDOLE, "-np", "4", "--", sys.executable, *PYTEST, "test_torch.py"],
        ],
    ),
    "test_common.py": (
        "parallel",
        [[*FARANDOLE, "-np", "2", "--", sys.executable, *PYTEST, "test_common.py"]],
    ),
    "test_timeline.py": (
        "parallel",
        [[*FARANDOLE, "-np", "2", "--", sys.executable, *PYTEST, "test_timeline.py"]],
    ),
    "test_interactiverun.py": (
        "integration",
        [[sys.executable, "-m", "farandole.horovod", *PYTEST, "test_interactiverun.py"]],
    ),
    "test_stall.py": ("integration", [[*FARANDOLE, "-np", "2", "test_stall.py"]]),
    "test_run.py": (
        "single",
        [[sys.executable, "-m", "farandole.horovod", *PYTEST, "test_run_cut.py"]],
    ),
}
"""File → its folder, and the commands."""

KEPT = re.compile(
    r"test_(params_args|elastic_args|autotune_args|autotuning_with_fixed_param|timeline_args"
    r"|stall_check_args|library_args|library_env_override|logging_args|config_file\w*"
    r"|validate_config_args|horovodrun_hostfile|get_host_assignments\w*)"
)
HEAD = """
import contextlib, os, sys, tempfile, unittest
import pytest
from horovod.runner.common.util import config_parser, hosts
from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.launch import parse_args
"""
HELPERS = ("override_args", "temppath")


def cut(folder: Path) -> None:
    """Write ``test_run_cut.py`` beside ``test_run.py``."""
    tree = ast.parse((folder / "test_run.py").read_text())
    tests = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    tests.body = [
        node for node in tests.body if isinstance(node, ast.FunctionDef) and KEPT.match(node.name)
    ]
    common = ast.parse((folder.parent / "utils" / "common.py").read_text())
    helpers = [node for node in common.body if getattr(node, "name", "") in HELPERS]
    parts = [HEAD, *map(ast.unparse, [*helpers, tests])]
    (folder / "test_run_cut.py").write_text("\n\n".join(parts) + "\n")


def main() -> int:
    """Run the files; the exit code is 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of Horovod's repository")
    parser.add_argument("files", nargs="*", default=list(FILES), help="default: all")
    arguments = parser.parse_args()
    worst = 0
    with tempfile.TemporaryDirectory() as scratch:
        tests = Path(scratch) / "test"
        shutil.copytree(arguments.checkout / "test", tests)
        cut(tests / "single")
        for name in arguments.files:
            folder, commands = FILES[name]
            for command in commands:
                print(f"==== {name}: {' '.join(command)}", flush=True)
                done = subprocess.run(command, cwd=tests / folder, timeout=LIMIT, check=False)
                print(f"==== {name}: exit code {done.returncode}", flush=True)
                worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
