"""The command line and the configuration file of horovodrun, down to what the ranks are given."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from farandole.core.errors import UsageError
from farandole.horovod.runner import jobs
from farandole.horovod.runner.common.util import config_parser
from farandole.horovod.runner.launch import parse_args
from farandole.horovod.runner.options import OPTIONS, Arguments, environment_of, without_effect
from farandole.launch import early


def parse(monkeypatch: pytest.MonkeyPatch, *words: str) -> Arguments:
    monkeypatch.setattr(sys, "argv", ["horovodrun", *words])
    return parse_args()


def test_options_end_where_the_program_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-np", "2", "-H", "localhost:2", "python", "train.py", "-np", "7", "--verbose"]
    arguments = parse(monkeypatch, *words)
    assert arguments.num_proc == 2
    assert arguments.verbose is None
    assert arguments.command == words[4:]


def test_every_option_is_understood_and_reaches_the_ranks_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = {int: "1", float: "0.5", str: "text"}
    for option in OPTIONS:
        for flag in option.on:
            value = option.choices[0] if option.choices else sample.get(option.kind, "")  # type: ignore[arg-type]
            arguments = parse(monkeypatch, flag, *[value] * ((option.count or 1) * bool(value)))
            assert getattr(arguments, option.name) is not None
            if option.why_not:
                (line,) = without_effect(arguments, {})
                assert f"{option.on[0]} has no effect: {option.why_not}" in line
            else:
                assert without_effect(arguments, {}) == []
                assert option.help, f"{flag} has an effect that --help does not tell"
        for flag in option.off:
            assert getattr(parse(monkeypatch, flag), option.name) is False


def test_variables_without_effect_are_named_too() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_AUTOTUNE": "0", "HOROVOD_FUSION_THRESHOLD": "1"}
    assert without_effect(Arguments(), environ) == [
        "HOROVOD_CYCLE_TIME has no effect: nothing waits for a cycle."
    ]


def test_the_ranks_are_given_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--fusion-threshold-mb 8 --stall-check-warning-time-seconds 5 --tcp --log-level INFO "
        "--autotune --autotune-log-file log --autotune-steps-per-sample 7 --no-stall-check"
    )
    variables = dict(environment_of(parse(monkeypatch, *words.split())))
    assert variables == {
        "HOROVOD_FUSION_THRESHOLD": str(8 << 20),
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "NCCL_IB_DISABLE": "1",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "log",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "7",
    }


def test_what_adds_to_something_not_asked_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parse(monkeypatch, "--timeline-mark-cycles", "--autotune-log-file", "x")
    assert dict(environment_of(arguments)) == {}


CONFIG = """
controller: gloo
params:
  fusion_threshold_mb: 32
timeline:
  filename: timeline.json
stall_check:
  enabled: false
logging:
  level: DEBUG
  hide_timestamp: true
"""


def test_the_command_line_overrides_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    arguments = parse(
        monkeypatch, "--config-file", str(path), "--fusion-threshold-mb", "4", "--stall-check"
    )
    assert arguments.use_gloo is True
    assert arguments.fusion_threshold_mb == 4
    assert arguments.timeline_filename == "timeline.json"
    assert arguments.no_stall_check is False
    assert arguments.log_level == "DEBUG"
    assert arguments.log_with_timestamp is False
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("params: {fusion_threshold_mb: many}", "fusion_threshold_mb='many' must be a number"),
        ("params: {cycle_time_ms: -1}", "cycle_time_ms=-1 must be >= 0"),
        ("autotune: {enabled: 1}", "autotune.enabled: 1 is not accepted. Write true or false"),
        ("timeline: {filename: 3}", "timeline.filename: 3 is not accepted"),
        ("logging: {level: loud}", "logging.level: 'loud' is not one of TRACE"),
        ("controller: carrier pigeon", "controller: 'carrier pigeon' is not accepted"),
        ("- params", "must hold sections"),
        ("params: {", "is not YAML"),
    ],
)
def test_a_configuration_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, wrong: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=wrong):
        parse(monkeypatch, "--config-file", str(path))


def test_a_configuration_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--config-file nowhere\.yaml: No such file"):
        parse(monkeypatch, "--config-file", "nowhere.yaml")


def test_what_a_configuration_says_in_vain_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("params: {fusion_treshold_mb: 4}\nhosts: a\n")
    parse(monkeypatch, "--config-file", str(path))
    lines = capsys.readouterr().err.splitlines()
    assert "Did you mean params.fusion_threshold_mb?" in lines[0]
    assert "hosts is not known and has no effect." in lines[1]


@pytest.mark.parametrize(
    "words",
    [
        ["--fusion-threshold-mb", "-1"],
        ["--autotune-gaussian-process-noise", "1.5"],
        ["-np", "0"],
    ],
)
def test_a_number_out_of_range(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse(monkeypatch, *words)


def test_the_variables_are_names_of_the_module() -> None:
    assert config_parser.HOROVOD_CYCLE_TIME == "HOROVOD_CYCLE_TIME"
    with pytest.raises(AttributeError, match="HOROVOD_NO_SUCH"):
        getattr(config_parser, "HOROVOD_NO_SUCH")  # noqa: B009


def test_arguments_become_a_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    said: list[str] = []
    words = "-np 3 -H localhost:2,127.0.0.1:2 --output-filename out --network-interfaces b,a"
    arguments = parse(monkeypatch, *words.split(), "--mpi", "--", "python", "train.py", "-x")
    arguments.command = ["--", sys.executable, "train.py", "-x"]
    task = jobs.task_of(arguments, said.append)
    assert (task.size, task.hosts, task.output_dir) == (3, (), "out")
    assert (task.program.form, task.program.argv) == ("script", ("train.py", "-x"))
    assert task.environment["HOROVOD_GLOO_IFACE"] == "a"
    assert [line.partition(" ")[0] for line in said] == ["--mpi", "of"]


def test_ssh_options_are_passed_to_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-p", "2222", "-i", "my key", "-H", "node.invalid:2", "echo"]
    task = jobs.task_of(parse(monkeypatch, *words))
    assert task.ssh == ("ssh", "-p", "2222", "-i", "my key")
    assert [(share.host, len(share.ranks)) for share in task.hosts] == [("node.invalid", 2)]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["-np", "2"], "no program"),
        (["-np", "2", "--"], "no program"),
        (["-np", "3", "-H", "a:2", "echo"], "3 ranks are wanted"),
        (["--reset-limit", "1", "-np", "2", "--min-np", "3", "echo"], "--min-np 3 must be from 1"),
    ],
)
def test_arguments_that_ask_for_the_impossible(
    monkeypatch: pytest.MonkeyPatch, words: list[str], wrong: str
) -> None:
    with pytest.raises(UsageError, match=wrong):
        jobs.task_of(parse(monkeypatch, *words))


def test_the_guess_of_the_workers_environment_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    guesses = []
    monkeypatch.setattr(early, "start_agent", guesses.append)
    task = jobs.task_of(
        parse(monkeypatch, "-np", "2", "--log-level", "INFO", "python", "-m", "this")
    )
    jobs.agent_for(task)
    guessed = early.guessed_environment(guesses[0], dict(os.environ))
    assert guessed is None or guessed["HOROVOD_LOG_LEVEL"] == "INFO"
    assert (guessed is None) == (not task.fork)
