from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from farandole.core.config import MIB, Knob, Settings, environment, knobs
from farandole.core.errors import UsageError
from farandole.core.secret import Secret

HEX = "0123456789abcdef" * 4
DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"

DEFAULTS = {
    "engine": "auto",
    "hierarchical_allreduce": None,
    "hierarchical_allgather": None,
    "bucket_bytes": 25 * MIB,
    "first_bucket_bytes": MIB,
    "autotune": False,
    "autotune_log": None,
    "autotune_warmup_samples": 3,
    "autotune_steps_per_sample": 5,
    "autotune_compression": "none",
    "start_timeout": 120.0,
    "stall_warning": 60.0,
    "stall_timeout": 1800.0,
    "block_notice": 0.1,
    "deadlock_after": 2.0,
    "join_average": "all",
    "network_interface": None,
    "store_address": None,
    "secret": None,
    "chaos": None,
    "worker": None,
    "driver_timeout": 0.0,
    "timeline": None,
    "timeline_mark_cycles": False,
    "log_level": "warning",
}

READ = [
    ("FARANDOLE_ENGINE", "torch", "engine", "torch"),
    ("FARANDOLE_ENGINE", " Threads ", "engine", "threads"),
    ("FARANDOLE_HIERARCHICAL_ALLREDUCE", "1", "hierarchical_allreduce", True),
    ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0", "hierarchical_allreduce", False),
    ("FARANDOLE_HIERARCHICAL_ALLGATHER", "0", "hierarchical_allgather", False),
    ("HOROVOD_HIERARCHICAL_ALLGATHER", "1", "hierarchical_allgather", True),
    ("FARANDOLE_BUCKET_BYTES", "0", "bucket_bytes", 0),
    ("HOROVOD_FUSION_THRESHOLD", "134217728", "bucket_bytes", 134217728),
    ("FARANDOLE_FIRST_BUCKET_BYTES", "4096", "first_bucket_bytes", 4096),
    ("FARANDOLE_AUTOTUNE", "1", "autotune", True),
    ("HOROVOD_AUTOTUNE", "0", "autotune", False),
    ("FARANDOLE_AUTOTUNE_LOG", "log", "autotune_log", "log"),
    ("HOROVOD_AUTOTUNE_LOG", "log.csv", "autotune_log", "log.csv"),
    ("FARANDOLE_AUTOTUNE_WARMUP_SAMPLES", "0", "autotune_warmup_samples", 0),
    ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "2", "autotune_warmup_samples", 2),
    ("FARANDOLE_AUTOTUNE_STEPS_PER_SAMPLE", "1", "autotune_steps_per_sample", 1),
    ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "10", "autotune_steps_per_sample", 10),
    ("FARANDOLE_AUTOTUNE_COMPRESSION", "bf16", "autotune_compression", "bf16"),
    ("FARANDOLE_START_TIMEOUT", "2.5", "start_timeout", 2.5),
    ("HOROVOD_START_TIMEOUT", "30", "start_timeout", 30.0),
    ("FARANDOLE_STALL_WARNING", "0", "stall_warning", 0.0),
    ("FARANDOLE_JOIN_AVERAGE", "participants", "join_average", "participants"),
    ("HOROVOD_STALL_CHECK_TIME_SECONDS", "5", "stall_warning", 5.0),
    ("FARANDOLE_STALL_TIMEOUT", "7", "stall_timeout", 7.0),
    ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0", "stall_timeout", 0.0),
    ("FARANDOLE_BLOCK_NOTICE", "0.5", "block_notice", 0.5),
    ("FARANDOLE_DEADLOCK_AFTER", "1e1", "deadlock_after", 10.0),
    ("FARANDOLE_INTERFACE", "eth0", "network_interface", "eth0"),
    ("HOROVOD_GLOO_IFACE", "ib0", "network_interface", "ib0"),
    ("FARANDOLE_STORE", "node7:4711", "store_address", "node7:4711"),
    ("FARANDOLE_STORE", "[fe80::1]:4711", "store_address", "[fe80::1]:4711"),
    ("FARANDOLE_SECRET", HEX, "secret", Secret.from_hex(HEX)),
    ("FARANDOLE_CHAOS", "kill:rank=1@step=3", "chaos", "kill:rank=1@step=3"),
    ("FARANDOLE_WORKER", "3", "worker", 3),
    ("FARANDOLE_DRIVER_TIMEOUT", "600", "driver_timeout", 600.0),
    ("FARANDOLE_TIMELINE", "/tmp/t.json", "timeline", "/tmp/t.json"),
    ("HOROVOD_TIMELINE", "t.json", "timeline", "t.json"),
    ("FARANDOLE_TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles", True),
    ("HOROVOD_TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles", True),
    ("FARANDOLE_LOG_LEVEL", "INFO", "log_level", "info"),
    ("HOROVOD_LOG_LEVEL", "trace", "log_level", "trace"),
    ("HOROVOD_LOG_LEVEL", "fatal", "log_level", "fatal"),
]

REFUSED = [
    ("FARANDOLE_ENGINE", "mpi"),
    ("HOROVOD_HIERARCHICAL_ALLREDUCE", "2"),
    ("FARANDOLE_BUCKET_BYTES", "-1"),
    ("FARANDOLE_BUCKET_BYTES", "25MB"),
    ("FARANDOLE_BUCKET_BYTES", "1.5"),
    ("HOROVOD_FUSION_THRESHOLD", "many"),
    ("FARANDOLE_FIRST_BUCKET_BYTES", "-2"),
    ("FARANDOLE_START_TIMEOUT", "0"),
    ("FARANDOLE_START_TIMEOUT", "inf"),
    ("HOROVOD_START_TIMEOUT", "nan"),
    ("FARANDOLE_STALL_WARNING", "-1"),
    ("FARANDOLE_STALL_TIMEOUT", "soon"),
    ("HOROVOD_STALL_CHECK_DISABLE", "maybe"),
    ("FARANDOLE_BLOCK_NOTICE", "0"),
    ("FARANDOLE_DEADLOCK_AFTER", "0"),
    ("FARANDOLE_INTERFACE", "eth0 eth1"),
    ("FARANDOLE_STORE", "node7"),
    ("FARANDOLE_STORE", "node7:99999"),
    ("FARANDOLE_CHAOS", "kill:everybody"),
    ("FARANDOLE_WORKER", "-1"),
    ("FARANDOLE_DRIVER_TIMEOUT", "-1"),
    ("FARANDOLE_TIMELINE_MARK_CYCLES", "often"),
    ("FARANDOLE_LOG_LEVEL", "loud"),
]


def test_defaults_are_frozen_here() -> None:
    assert dataclasses.asdict(Settings()) == DEFAULTS
    assert Settings.from_environment({}) == Settings()


@pytest.mark.parametrize(("variable", "text", "name", "value"), READ)
def test_each_variable_sets_its_knob_and_no_other(
    variable: str, text: str, name: str, value: object
) -> None:
    settings = Settings.from_environment({variable: text})
    assert getattr(settings, name) == value
    assert settings == dataclasses.replace(Settings(), **{name: value})


def test_every_variable_is_tried_above() -> None:
    tried = {variable for variable, *_ in READ} | {"HOROVOD_STALL_CHECK_DISABLE"}
    assert tried == {variable for knob in knobs() for variable in knob.variables}


@pytest.mark.parametrize(("variable", "text"), REFUSED)
def test_a_bad_value_is_refused_naming_variable_value_and_what_is_accepted(
    variable: str, text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Settings.from_environment({variable: text})
    assert variable in caught.value.message
    assert repr(text) in caught.value.message
    assert "accepted is" in caught.value.message


@pytest.mark.parametrize("text", ["zz" * 16, "ab" * 15, "not hex at all"])
def test_a_bad_secret_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(UsageError, match="FARANDOLE_SECRET") as caught:
        Settings.from_environment({"FARANDOLE_SECRET": text})
    assert text not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "knob", [knob for knob in knobs() if len(knob.variables) > 1], ids=lambda knob: knob.name
)
def test_our_own_variable_wins_over_horovods(knob: Knob) -> None:
    ours, *theirs = knob.variables
    assert ours.startswith("FARANDOLE_")
    assert all(each.startswith("HOROVOD_") for each in theirs)
    flag = knob.kind.accepted == "0 or 1"
    text = {"network_interface": "eth3", "log_level": "error"}.get(knob.name, "1" if flag else "17")
    other = {"network_interface": "eth4", "log_level": "info"}.get(knob.name, "0" if flag else "1")
    both = Settings.from_environment({**dict.fromkeys(theirs, other), ours: text})
    alone = Settings.from_environment({ours: text})
    assert getattr(both, knob.name) == getattr(alone, knob.name) != knob.default


def test_empty_variables_count_as_not_set() -> None:
    empty = {variable: " " for knob in knobs() for variable in knob.variables}
    assert Settings.from_environment(empty) == Settings()
    assert Settings.from_environment(
        {"FARANDOLE_INTERFACE": "", "HOROVOD_GLOO_IFACE": "ib0"}
    ).network_interface == ("ib0")


def test_horovods_word_for_a_later_timeline_records_nothing() -> None:
    assert Settings.from_environment({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline is None


def test_stall_check_disable_switches_both_stall_limits_off_and_only_when_set() -> None:
    off = Settings.from_environment(
        {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "9"}
    )
    assert (off.stall_warning, off.stall_timeout) == (0.0, 0.0)
    on = Settings.from_environment(
        {"HOROVOD_STALL_CHECK_DISABLE": "0", "HOROVOD_STALL_CHECK_TIME_SECONDS": "9"}
    )
    assert (on.stall_warning, on.stall_timeout) == (9.0, 1800.0)
    ours = Settings.from_environment(
        {"HOROVOD_STALL_CHECK_DISABLE": "1", "FARANDOLE_STALL_TIMEOUT": "5"}
    )
    assert (ours.stall_warning, ours.stall_timeout) == (0.0, 5.0)


@pytest.mark.parametrize(
    "given",
    [
        {"bucket_bytes": -1},
        {"bucket_bytes": 1.0},
        {"bucket_bytes": True},
        {"engine": "mpi"},
        {"start_timeout": 0},
        {"start_timeout": float("inf")},
        {"start_timeout": "5"},
        {"store_address": 4711},
        {"secret": HEX},
        {"network_interface": ""},
    ],
    ids=repr,
)
def test_the_constructor_refuses_what_the_environment_may_not_say(given: dict[str, object]) -> None:
    (name,) = given
    with pytest.raises(UsageError, match=f"Settings\\({name}="):
        Settings(**given)  # type: ignore[arg-type]


def test_settings_are_frozen_keyword_only_and_hide_the_secret() -> None:
    settings = Settings(secret=Secret.from_hex(HEX))
    assert HEX not in repr(settings)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.engine = "torch"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings("torch")  # type: ignore[misc]


def test_the_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_BUCKET_BYTES", "12345")
    assert Settings.from_environment().bucket_bytes == 12345
    assert environment()["FARANDOLE_BUCKET_BYTES"] == "12345"
    snapshot = environment()
    snapshot["FARANDOLE_BUCKET_BYTES"] = "1"
    assert Settings.from_environment().bucket_bytes == 12345


def test_the_document_has_a_row_for_each_knob_as_the_table_in_the_code_says() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    assert rows == [_row(knob) for knob in knobs()], "docs/settings.md: rows must be these"


def _row(knob: Knob) -> str:
    default = f"`{knob.default}`"
    if knob.default is None:
        default = "not set"
    elif isinstance(knob.default, bool):
        default = f"`{knob.default:d}`"
    elif isinstance(knob.default, float):
        default = f"`{knob.default:g}`"
    elif isinstance(knob.default, int):
        default = f"`{knob.default}` ({knob.default // MIB} MiB)"
    variables = ", ".join(f"`{variable}`" for variable in knob.variables)
    unit = knob.unit or knob.kind.accepted
    return f"| `{knob.name}` | {variables} | {unit} | {default} | {knob.meaning} |"
