"""Runs the test files of a checkout of Horovod against Farandole, and prints how they went.

``python tests/horovod/horovods_own.py CHECKOUT [FILE ...]``. The files are run as they are. Of two
a copy is made, and run too or instead:

* ``test_run.py`` tests Horovod's launchers too: the copy has the tests of arguments, configuration
  and hosts, and the imports that these use.
* ``test_elastic_torch.py`` skips tests that Horovod fails: the copy does not. (One of them nobody
  could pass, since it calls its helper with an argument that this does not have:
  ``test_min_hosts_timeout``; ``tests/elastic/test_recovery.py`` has one of ours for it.)

Horovod's elastic examples are run as they are too, by :mod:`horovods_examples`.

Horovod's helpers for tests need ``pip install mock packaging psutil``; its examples
``pip install torchvision tensorboard filelock tqdm``.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import horovods_examples

FARANDOLE = [sys.executable, "-c", "from farandole.cli.main import main; main()", "run"]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.."]
ALONE = [sys.executable, "-m", "farandole.horovod", *PYTEST]
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
        [[*ALONE, "test_interactiverun.py"]],
    ),
    "test_stall.py": ("integration", [[*FARANDOLE, "-np", "2", "test_stall.py"]]),
    "test_run.py": ("single", [[*ALONE, "test_run_cut.py"]]),
    "test_torch_elastic.py": ("single", [[*ALONE, "test_torch_elastic.py"]]),
    "test_elastic_torch.py": (
        "integration",
        [[*ALONE, "test_elastic_torch.py"], [*ALONE, "test_elastic_torch_unskipped.py"]],
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
IMPOSSIBLE = {"test_min_hosts_timeout"}


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


def unskip(folder: Path) -> None:
    """Write ``test_elastic_torch_unskipped.py`` beside ``test_elastic_torch.py``.

    Where the file replaces a test by one that skips, the copy has the test again, and no others.
    """
    tree = ast.parse((folder / "test_elastic_torch.py").read_text())
    tests = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    methods = [node for node in tests.body if isinstance(node, ast.FunctionDef)]
    skipped = {each.name for each in methods if "skipTest" in ast.unparse(each)}
    tests.body = [node for node in tests.body if node not in methods or node.name not in skipped]
    common = ast.parse((folder / "elastic_common.py").read_text())
    base = next(node for node in common.body if isinstance(node, ast.ClassDef))
    wanted = skipped - IMPOSSIBLE
    base.body = [
        node
        for node in base.body
        if not isinstance(node, ast.FunctionDef)
        or not node.name.startswith("test_")
        or node.name in wanted
    ]
    (folder / "elastic_common_unskipped.py").write_text(ast.unparse(common) + "\n")
    text = ast.unparse(tree).replace("from elastic_common ", "from elastic_common_unskipped ")
    (folder / "test_elastic_torch_unskipped.py").write_text(text + "\n")


def main() -> int:
    """Run the files; the exit code is 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of Horovod's repository")
    parser.add_argument("files", nargs="*", help="default: all")
    arguments = parser.parse_args()
    worst = 0
    with tempfile.TemporaryDirectory() as scratch:
        tests, examples = Path(scratch) / "test", Path(scratch) / "examples"
        shutil.copytree(arguments.checkout / "test", tests)
        shutil.copytree(arguments.checkout / horovods_examples.FOLDER, examples)
        cut(tests / "single")
        unskip(tests / "integration")
        horovods_examples.write_data(examples)
        for name in arguments.files or [*FILES, *horovods_examples.EXAMPLES]:
            if name in FILES:
                folder, commands = FILES[name]
                where = tests / folder
            else:
                where, commands = examples, [horovods_examples.command(FARANDOLE, name)]
            for command in commands:
                print(f"==== {name}: {' '.join(command)}", flush=True)
                environ = {**os.environ, "HOME": scratch}
                done = subprocess.run(command, cwd=where, env=environ, timeout=LIMIT, check=False)
                print(f"==== {name}: exit code {done.returncode}", flush=True)
                worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
