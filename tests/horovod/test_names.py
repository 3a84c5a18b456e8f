"""Where ``import horovod`` leads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.horovod import names
from farandole.launch import environment

ROOT = Path(__file__).parents[2]


def python(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**environment.with_names(dict(os.environ)), **variables}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def says(code: str, folder: Path, **variables: str) -> str:
    done = python("-c", code, folder=folder, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("horovod.torch", "farandole.torch"),
        ("horovod.torch.mpi_ops", "farandole.torch.mpi_ops"),
        ("horovod.torchvision", "farandole.horovod.torchvision"),
        ("horovod.common.exceptions", "farandole.horovod.common.exceptions"),
        ("horovod", None),
        ("horovods.torch", None),
        ("numpy.linalg", None),
    ],
)
def test_each_name_leads_to_one_module(name: str, ours: str | None) -> None:
    assert names.target(name) == ours


def test_modules_are_the_same_under_both_names(tmp_path: Path) -> None:
    code = (
        "import horovod, horovod.torch as hvd, farandole.torch\n"
        "import horovod.torch.optimizer, farandole.torch.optimizer\n"
        "from horovod.common.exceptions import HorovodInternalError\n"
        "assert hvd is farandole.torch is horovod.torch\n"
        "assert horovod.torch.optimizer is farandole.torch.optimizer\n"
        "assert HorovodInternalError is hvd.HorovodInternalError\n"
        "assert hvd.__spec__.name == hvd.__name__ == 'farandole.torch'\n"
        "print(horovod.__version__)\n"
    )
    assert says(code, tmp_path) == "0.28.1"


def test_what_there_is_not_is_not_found(tmp_path: Path) -> None:
    code = (
        "import importlib.util\n"
        "print(importlib.util.find_spec('horovod.tensorflow'))\n"
        "import horovod.tensorflow\n"
    )
    done = python("-c", code, folder=tmp_path)
    assert done.stdout == "None\n"
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'horovod.tensorflow'\n")


def real_horovod(folder: Path) -> Path:
    package = folder / "installed" / "horovod"
    (package / "common").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = 'real'\nfrom horovod.common import it\n")
    (package / "common" / "__init__.py").write_text("it = 'its own'\n")
    return package.parent


SHOW = "import horovod; print(horovod.__version__, getattr(horovod, 'it', ''), horovod.__name__)"


def test_a_horovod_that_is_installed_wins_and_that_is_said(tmp_path: Path) -> None:
    installed = real_horovod(tmp_path)
    code = f"import sys; sys.path.append({str(installed)!r}); {SHOW}"
    done = python("-c", code, folder=tmp_path)
    assert done.stdout == "real its own horovod\n"
    assert f"gets the Horovod that is installed here ({installed}/horovod)" in done.stderr
    assert "FARANDOLE_HOROVOD=1" in done.stderr
    assert python("-c", code, folder=tmp_path, FARANDOLE_RANK="1").stderr == ""
    done = python("-c", code, folder=tmp_path, FARANDOLE_HOROVOD="1")
    assert done.stdout == "0.28.1  farandole.horovod\n"
    assert done.stderr == ""


def test_our_own_distribution_is_no_other_horovod(tmp_path: Path) -> None:
    code = f"import sys; sys.path.append({str(ROOT / 'compat' / 'horovod')!r}); {SHOW}"
    done = python("-c", code, folder=tmp_path)
    assert (done.stdout, done.stderr) == ("0.28.1  farandole.horovod\n", "")
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'compat' / 'horovod')!r}); {SHOW}"
    assert says(code, tmp_path) == "0.28.1  farandole.horovod"


def test_a_python_without_farandole_has_no_horovod(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path = [{environment.NAMES!r}, *(p for p in sys.path if 'lib/python' in p"
        " and 'site-packages' not in p)]\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "import horovod\n"
    )
    done = python("-c", code, folder=tmp_path)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'horovod'\n")


def test_the_users_own_paths_come_first() -> None:
    assert environment.with_names({})["PYTHONPATH"] == environment.NAMES
    once = environment.with_names({"PYTHONPATH": f"/a{os.pathsep}/b"})
    assert once["PYTHONPATH"].split(os.pathsep) == ["/a", "/b", environment.NAMES]
    assert environment.with_names(once) == once


def test_a_program_is_run_with_the_names_and_so_are_its_children(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import subprocess, sys, horovod\n"
        "print(sys.argv, horovod.__name__, sys.path[0], __name__, flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import horovod; print(horovod.__name__)'])\n"
    )
    environ = dict(os.environ)
    environ.pop("FARANDOLE_HOROVOD", None)
    done = subprocess.run(
        [sys.executable, "-m", "farandole.horovod", "script.py", "-x"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"['script.py', '-x'] farandole.horovod {tmp_path} __main__",
        "farandole.horovod",
    ]


def test_a_program_that_is_not_named(tmp_path: Path) -> None:
    done = python("-m", "farandole.horovod", folder=tmp_path)
    assert done.returncode == 1
    assert "python -m farandole.horovod script.py" in done.stderr


def test_modules_can_be_run_by_their_old_names(tmp_path: Path) -> None:
    done = python("-m", "horovod.runner.launch", "--version", folder=tmp_path)
    assert done.stdout == "0.28.1 (Farandole)\n"
