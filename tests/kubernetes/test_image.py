"""Images: the Dockerfile, what goes into it, and the builders, which are programs made up here."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from farandole.cli.commands import cli
from farandole.core.errors import UsageError
from farandole.launch.kubernetes import archive, boot, image, pod, wheel
from farandole.launch.kubernetes.image import Needs
from farandole.launch.kubernetes.submission import Submission
from farandole.launch.spec import JobSpec

BASE = "example/torch:1"
TAG = "registry.example/me/train:1"

BUILDER = """\
#!{python}
import os, shutil, sys
words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    print(os.path.basename(sys.argv[0]), *words, file=calls)
if words[0] == {fails!r}:
    print("one\\ntwo", flush=True)
    print("disk full", file=sys.stderr)
    sys.exit(3)
if words[0] == "build":
    print("STEP 1", flush=True)
    shutil.copytree(words[-1], {context!r})
"""


class Builders:
    """Programs on the search path, which has nothing else, and what they were asked to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self._calls = folder / "calls"
        self.context = folder / "context"
        """What the last build was given."""

    def install(self, name: str, fails: str = "") -> None:
        """``fails``: the verb at which it does, after it has said why."""
        program = self.folder / name
        program.write_text(
            BUILDER.format(
                python=sys.executable,
                calls=str(self._calls),
                context=str(self.context),
                fails=fails,
            )
        )
        program.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        """What was asked for, questions about versions left out."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line.split() for line in lines if not line.endswith(" version")]


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builders:
    made = Builders(tmp_path)
    monkeypatch.setenv("PATH", str(made.folder))
    return made


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    for name, text in {
        "train.py": "print('hi')\n",
        "requirements.txt": "tqdm==4.67.1\n",
        "data/big.bin": "x" * 1000,
        archive.IGNORE_FILE: f"data/\n{archive.IGNORE_FILE}\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "train.py").chmod(0o755)
    monkeypatch.chdir(folder)
    return folder


def build(*words: str) -> Result:
    return CliRunner().invoke(cli, ["image", "build", "--base", BASE, *words])


# ---- the Dockerfile


def instructions(needs: Needs = Needs.LIST, *, ssh: bool = False) -> list[str]:
    text = image.dockerfile(BASE, "farandole-1-py3-none-any.whl", needs, ssh=ssh)
    joined = text.replace("\\\n", " ")
    return [
        " ".join(line.split())
        for line in joined.splitlines()
        if line and not line.lstrip().startswith(("#", "ARG"))
    ]


def place(needs: Needs, wanted: str) -> int:
    (found,) = [n for n, line in enumerate(instructions(needs)) if re.search(wanted, line)]
    return found


def test_the_user_and_the_folder_are_those_of_the_pods() -> None:
    lines = instructions()
    submission = Submission(
        name="train-1", namespace="team", argv=("train.py",), archive=b"", key="ab" * 32,
        spec=JobSpec(command="train.py", image=TAG, code="image", restricted=True),
    )  # fmt: skip
    context = pod.template(submission, container="c", peers="")["spec"]["securityContext"]
    assert lines[-1] == f"USER {context['runAsUser']}:{context['runAsGroup']}"
    assert context["runAsNonRoot"]
    # Where the image starts its programs is where the pod does, and there the code is.
    assert boot.folder(submission) == ""
    assert "WORKDIR /app" in lines
    assert any(line.startswith("COPY") and line.endswith("project/ ./") for line in lines)


def test_torch_stays_as_the_base_has_it_and_all_else_is_pinned() -> None:
    lines = instructions()
    assert lines[0] == f"FROM {BASE}"
    assert lines.index('RUN python3 -c "import torch"') < place(Needs.LIST, "--no-deps")
    pins = wheel.pins()
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!-]+", pin) for pin in pins)
    names = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    assert {"click", "cloudpickle", "pydantic", "pydantic-core", "pyyaml", "rich"} <= names
    assert not names & {"torch", "numpy", "farandole", "kr8s", "pytest"}


def test_requirements_are_installed_before_the_code_where_they_can_be() -> None:
    code = "^COPY .*project/ "
    assert place(Needs.LIST, "-r requirements.txt$") < place(Needs.LIST, code)
    for needs, installs in (
        (Needs.LIST_AND_FILES, "install -r requirements.txt$"),
        (Needs.PYPROJECT, r"install \.$"),
    ):
        assert place(needs, installs) > place(needs, code)
    assert not [line for line in instructions(Needs.NOTHING) if "requirements.txt" in line][1:]


@pytest.mark.parametrize(
    ("requirements", "pyproject", "needed"),
    [
        (None, None, Needs.NOTHING),
        (None, "[tool.ruff]\n", Needs.NOTHING),
        (None, "[build-system]\n[project]\nname = 'x'\n", Needs.PYPROJECT),
        ("tqdm==4.67.1\n", "[project]\n", Needs.LIST),
        ("--index-url https://a.example/simple\nb @ https://a.example/b.whl\n", None, Needs.LIST),
        ("# -r other.txt, file:x\ntqdm  # ./x\n", None, Needs.LIST),
        ("tqdm\n-r other.txt\n", None, Needs.LIST_AND_FILES),
        ("tqdm\n--constraint=c.txt\n", None, Needs.LIST_AND_FILES),
        ("-e .\n", None, Needs.LIST_AND_FILES),
        ("  ./mine\n", None, Needs.LIST_AND_FILES),
        ("mine @ file:mine\n", None, Needs.LIST_AND_FILES),
    ],
)  # fmt: skip
def test_what_a_project_requires(
    requirements: str | None, pyproject: str | None, needed: Needs
) -> None:
    assert image.needs(requirements, pyproject) is needed


def test_for_mpijob_there_is_an_ssh_server_with_no_key_of_its_own() -> None:
    lines = instructions(ssh=True)
    (apt,) = [line for line in lines if "openssh-server" in line]
    assert "openssh-client" in apt
    assert re.search(r"rm .*/etc/ssh/ssh_host_\*", apt)
    assert lines[-1] == instructions()[-1]


@pytest.mark.parametrize(
    "base", ["example/torch", "example/torch:latest", "localhost:5000/torch", "torch"]
)
def test_a_base_without_a_version_is_refused(base: str) -> None:
    with pytest.raises(UsageError, match="names no version"):
        image.check_base(base)


@pytest.mark.parametrize(
    "base",
    [image.BASE, "torch:1", "localhost:5000/torch:1", "a/torch@sha256:12", "t:latest@sha256:1"],
)
def test_a_base_with_a_version_is_not(base: str) -> None:
    image.check_base(base)


# ---- the wheel


def test_the_same_files_are_the_same_wheel_and_every_file_is_on_record() -> None:
    made = wheel.make()
    assert wheel.make() == made
    with zipfile.ZipFile(io.BytesIO(made)) as files:
        (record,) = [name for name in files.namelist() if name.endswith("/RECORD")]
        listed = {line.split(",")[0] for line in files.read(record).decode().splitlines()}
        assert listed == set(files.namelist())


def test_pip_installs_the_wheel_with_its_commands(tmp_path: Path) -> None:
    file = tmp_path / wheel.file_name()
    file.write_bytes(wheel.make())
    installed = tmp_path / "installed"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
            "--no-compile", "--target", str(installed), str(file),
        ],
        check=True,
        timeout=60,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / "farandole"), "--version"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split()[1] in file.name


# ---- the command


def test_an_image_is_built_from_the_files_that_a_job_would_take(
    project: Path, builders: Builders
) -> None:
    builders.install("podman")
    done = build("--tag", TAG)
    assert done.exit_code == 0, done.output
    ((name, verb, *words),) = builders.calls
    assert (name, verb, words[:2]) == ("podman", "build", ["--tag", TAG])
    assert f"FROM {BASE}" in (builders.context / "Dockerfile").read_text()
    copied = builders.context / image.PROJECT
    assert {str(p.relative_to(copied)) for p in copied.rglob("*")} == {
        "train.py",
        "requirements.txt",
    }
    assert (copied / "train.py").stat().st_mode & 0o111
    packages = {path.name for path in (builders.context / image.PACKAGES).iterdir()}
    assert packages == {wheel.file_name(), image.PINS}
    assert not Path(words[-1]).exists()  # nothing of it stays
    for line in (f"built {TAG}", "STEP 1", f"image: {TAG}", "code: image", "restricted: true"):
        assert line in done.output


def test_a_builder_that_does_not_work_is_passed_over(project: Path, builders: Builders) -> None:
    builders.install("docker", fails="version")
    builders.install("buildah")
    assert build("--tag", TAG).exit_code == 0
    assert [call[:3] for call in builders.calls] == [["buildah", "build", "--layers"]]


def test_the_builder_that_is_named_is_taken_and_no_other(project: Path, builders: Builders) -> None:
    builders.install("docker")
    builders.install("podman")
    assert build("--tag", TAG, "--builder", "podman").exit_code == 0
    done = build("--tag", TAG, "--builder", "buildah")
    assert done.exit_code == 1
    assert "buildah: is not installed" in done.output
    assert [call[0] for call in builders.calls] == ["podman"]


def test_without_a_builder_all_are_named_with_what_is_wrong_and_the_way_without(
    project: Path, builders: Builders
) -> None:
    builders.install("docker", fails="version")
    done = build("--tag", TAG)
    assert done.exit_code == 1
    for words in (
        "docker: does not work: disk full", "podman: is not installed",
        "buildah: is not installed", "needs no image",
    ):  # fmt: skip
        assert words in done.output
    assert not builders.calls


@pytest.mark.parametrize("verb", ["build", "push"])
def test_a_failure_is_one_error_with_the_builders_last_words(
    project: Path, builders: Builders, verb: str
) -> None:
    builders.install("docker", fails=verb)
    done = build("--tag", TAG, "--push")
    assert done.exit_code == 1
    assert f"docker could not {verb} {TAG} (exit code 3)" in done.output
    assert done.output.rstrip().endswith("  one\n  two\n  disk full")
    assert f"built {TAG}" not in done.output


def test_an_image_is_pushed_when_it_is_built(project: Path, builders: Builders) -> None:
    builders.install("docker")
    done = build("--tag", TAG, "--push")
    assert [call[1] for call in builders.calls] == ["build", "push"]
    assert builders.calls[1] == ["docker", "push", TAG]
    assert f"built and pushed {TAG}" in done.output


def test_the_dockerfile_can_be_seen_without_a_builder(project: Path, builders: Builders) -> None:
    done = build("--print")
    assert done.exit_code == 0
    assert done.output == image.dockerfile(BASE, wheel.file_name(), Needs.LIST)


@pytest.mark.parametrize(
    ("words", "said"), [((), "--tag is missing"), (("--base", "torch", "--tag", TAG), "no version")]
)
def test_a_wrong_call_is_refused(
    project: Path, builders: Builders, words: tuple[str, ...], said: str
) -> None:
    done = build(*words)
    assert done.exit_code == 2
    assert said in done.output
