"""From words to a task, and the guess that is made before the words are read properly."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from farandole.cli.run import command
from farandole.core.errors import UsageError
from farandole.core.topology import topology_of
from farandole.launch import early, environment, host, plan, spec
from farandole.launch.task import Program


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["train.py", "-x"], Program(form="script", argv=("train.py", "-x"))),
        ([sys.executable, "train.py"], Program(form="script", argv=("train.py",))),
        ([sys.executable, "-m", "a.b", "c"], Program(form="module", argv=("a.b", "c"))),
        ([sys.executable, "-u", "x"], Program(form="command", argv=(sys.executable, "-u", "x"))),
        (["sh", "-c", "true"], Program(form="command", argv=("sh", "-c", "true"))),
    ],
)
def test_what_a_program_is(words: list[str], program: Program) -> None:
    assert plan.recognise(words) == program


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.py"], "no file absent.py"),
        (["./notes.txt"], "neither a Python script"),
        (["no-such-command"], "no command no-such-command"),
        ([], "no program"),
    ],
)
def test_what_is_no_program(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan.recognise(words)


def test_options_go_before_the_job_file_which_goes_before_defaults(folder: Path) -> None:
    (folder / "job.yaml").write_text(
        "command: ['train.py', '--name', 'two words']\nranks: 3\ngrace: 5\n"
        "env: {A: '1', B: '1'}\nstart_timeout: 7\noutput_dir: logs\n"
    )
    task = plan.resolve(["job.yaml", "--more"], ranks=2, env=["B=2"], grace=0.0)
    assert task.program.argv == ("train.py", "--name", "two words", "--more")
    assert (task.size, task.grace, task.start_timeout) == (2, 0.0, 7.0)
    assert task.environment == {"A": "1", "B": "2"}
    assert task.output_dir == "logs"


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("nodes: 2:4", "nodes", "2:4"),
        ("nodes: '2:4'", "nodes", "2:4"),
        ("nodes: 4", "nodes", 4),
        ("output_dir: 1:30.5", "output_dir", "1:30.5"),
        ("grace: 2.5", "grace", 2.5),
        ("grace: 1_000", "grace", 1000),
    ],
)
def test_numbers_with_colons_between_them_are_text(
    folder: Path, line: str, field: str, value: object
) -> None:
    (folder / "job.yaml").write_text(f"command: train.py\n{line}\n")
    assert getattr(spec.load("job.yaml"), field) == value


def test_a_timeline_is_asked_for_in_the_workers_environment(folder: Path) -> None:
    (folder / "job.yaml").write_text("command: train.py\ntimeline: a.json\n")
    variables = plan.resolve(["job.yaml"]).environment
    assert variables == {"FARANDOLE_TIMELINE": str(folder / "a.json")}
    options = {"timeline_filename": "b.json", "timeline_mark_cycles": True}
    variables = plan.resolve(["job.yaml"], **options).environment  # type: ignore[arg-type]
    assert variables == {
        "FARANDOLE_TIMELINE": str(folder / "b.json"),
        "FARANDOLE_TIMELINE_MARK_CYCLES": "1",
    }


def test_autotuning_is_asked_for_in_the_workers_environment(folder: Path) -> None:
    (folder / "job.yaml").write_text("command: train.py\nautotune: true\nautotune_log_file: a\n")
    asked = {"FARANDOLE_AUTOTUNE": "1", "FARANDOLE_AUTOTUNE_LOG": str(folder / "a")}
    assert plan.resolve(["job.yaml"]).environment == asked
    assert plan.resolve(["train.py"], autotune=True, autotune_log_file="a").environment == asked
    counts = {"autotune_warmup_samples": 0, "autotune_steps_per_sample": 10}
    assert plan.resolve(["job.yaml"], **counts).environment == {  # type: ignore[arg-type]
        **asked,
        "FARANDOLE_AUTOTUNE_WARMUP_SAMPLES": "0",
        "FARANDOLE_AUTOTUNE_STEPS_PER_SAMPLE": "10",
    }


def test_hosts_are_dealt_the_ranks(folder: Path) -> None:
    task = plan.resolve(["train.py"], hosts="10.255.0.1:2,localhost:1,10.255.0.2:2", ranks=4)
    assert [(share.host, [*share.ranks]) for share in task.hosts] == [
        ("10.255.0.1", [0, 1]), ("localhost", [2]), ("10.255.0.2", [3]),
    ]  # fmt: skip
    assert (task.size, task.remote_python, task.ssh) == (4, sys.executable, ("ssh",))
    said = plan.describe(task)
    assert "10.255.0.1   ranks 0-1" in said
    assert "FARANDOLE_STORE=ADDRESS:PORT" in said
    assert "LOCAL_WORLD_SIZE=2" in said
    (folder / "job.yaml").write_text(
        "command: train.py\nhostfile: nodes\nremote_python: /x\nssh: ssh -p 22 -i 'a b'\n"
    )
    (folder / "nodes").write_text("10.255.0.1 slots=3\n")
    task = plan.resolve(["job.yaml"])
    assert [str(share.host) for share in task.hosts] == ["10.255.0.1"]
    assert (task.size, task.remote_python) == (3, "/x")
    assert task.ssh == ("ssh", "-p", "22", "-i", "a b")
    assert plan.resolve(["job.yaml"], hosts="10.255.0.2:1", ssh="other").ssh == ("other",)


def test_hosts_that_are_all_this_machine_need_no_other() -> None:
    task = plan.resolve(["train.py"], hosts="localhost:2,127.0.0.1:1")
    assert (task.size, task.hosts) == (3, ())
    with pytest.raises(UsageError, match=r"localhost and 127\.0\.0\.1 are all this machine"):
        plan.resolve(["train.py"], hosts="localhost:2,127.0.0.1:1,10.255.0.1:1")
    with pytest.raises(UsageError, match="by -H or by --hostfile, not both"):
        plan.resolve(["train.py"], hosts="localhost:2", hostfile="nodes")


def test_start_timeout_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "33")
    assert plan.resolve(["train.py"]).start_timeout == 33.0
    assert plan.resolve(["train.py"], start_timeout=4.0).start_timeout == 4.0
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="HOROVOD_START_TIMEOUT"):
        plan.resolve(["train.py"])


def test_the_stall_timeout_is_the_ranks_and_the_drivers() -> None:
    task = plan.resolve(["train.py"], ranks=2, min_np=1, stall_timeout=7.5)
    assert task.environment["FARANDOLE_STALL_TIMEOUT"] == "7.5"
    assert task.elastic is not None
    assert task.elastic.policy.stall_timeout == 7.5
    assert task.elastic.policy.stall_warning == 60.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ranks: 2", r"command: is missing"),
        ("command: a.py\nrank: 2", r"rank: there is no such field. Did you mean ranks\?"),
        ("command: a.py\nranks: 0", r"ranks: 0 is not accepted: .*greater than or equal to 1"),
        ("command: a.py\nranks: two", r"ranks: 'two' is not accepted"),
        ("command: a.py\nenv: {A: 1}", r"env.A: 1 is not accepted: .*string. Put it in quotes"),
        ("command: a.py\ngrace: -1", r"grace: -1 is not accepted"),
        ("- a", r"must hold fields"),
        ("a: [", r"is not YAML"),
    ],
)
def test_errors_in_a_job_file_name_field_value_and_remedy(
    folder: Path, text: str, said: str
) -> None:
    (folder / "job.yaml").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        spec.load("job.yaml")
    assert "job.yaml" in str(caught.value)


def test_a_job_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"absent.yaml: No such file"):
        spec.load("absent.yaml")


def test_the_guess_knows_which_options_take_a_value() -> None:
    valued = {
        name
        for option in command.params
        if isinstance(option, click.Option) and not option.is_flag
        for name in option.opts
    }
    assert valued == early.VALUED


@pytest.mark.parametrize(
    "arguments",
    [
        ["-np", "2", "train.py", "--env", "X=1"],
        ["-n", "2", "--env", "A=1", "--env", "B=2=3", "--grace", "3", "train.py"],
        ["-v", "--output-dir", "x", "--env", "OMP_NUM_THREADS=7", "-np", "2", "train.py"],
        ["--env=A=1", "-m", "package.train"],
        ["-np", "2", "--", sys.executable, "train.py"],
        ["train.py"],
    ],
)
def test_the_guess_agrees_with_what_is_read_later(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = command.make_context("run", list(arguments))
    task = plan.resolve(context.params.pop("program"), **context.params)
    environ = {"PATH": "/bin", "RANK": "3", "HOROVOD_SIZE": "9"}
    assert early.guessed_environment(arguments, environ) == environment.shared(
        environ, task.environment, local_size=task.size, cores=host.usable_cores()
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["-H", "a:1", "t.py"],
        ["--help"],
        ["-np", "2", "--dry-run", "train.py"],
        ["--no-fork", "train.py"],
        ["a.yaml"],
        [],
    ],
)
def test_no_guess_where_nothing_is_to_be_forked(arguments: list[str]) -> None:
    assert early.guessed_environment(arguments, {}) is None


def test_the_environment_of_ranks() -> None:
    shared = environment.shared(
        {"A": "1", "RANK": "7", "MASTER_PORT": "1"}, {"B": "2"}, local_size=4, cores=9
    )
    assert shared == {
        "A": "1",
        "B": "2",
        "OMP_NUM_THREADS": "2",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": environment.NAMES,
    }
    crowded = environment.shared({}, {}, local_size=4, cores=2)
    assert crowded["OMP_NUM_THREADS"] == "1"
    own = environment.own(1, 2, store="h:1", secret="s", start_timeout=5.0, master=("127.0.0.1", 9))
    assert own["RANK"] == own["FARANDOLE_LOCAL_RANK"] == own["HOROVOD_RANK"] == "1"
    assert own["WORLD_SIZE"] == own["HOROVOD_LOCAL_SIZE"] == "2"
    assert own["FARANDOLE_CROSS_RANK"] == "0"
    assert own["MASTER_PORT"] == "9"


def test_the_seat_of_a_rank_among_several_hosts() -> None:
    seat = environment.seat(topology_of(3, ["a", "b", "b", "b"]))
    assert (seat["LOCAL_RANK"], seat["LOCAL_WORLD_SIZE"]) == ("2", "3")
    assert (seat["FARANDOLE_LOCAL_RANK"], seat["HOROVOD_LOCAL_SIZE"]) == ("2", "3")
    assert (seat["FARANDOLE_CROSS_RANK"], seat["HOROVOD_CROSS_SIZE"]) == ("0", "1")
