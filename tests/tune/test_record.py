"""The log of autotuning: what stands in it, and what is read from it again."""

from __future__ import annotations

import json
import logging

import pytest

from farandole.core.errors import UsageError
from farandole.tune.record import Record, read_choice
from farandole.tune.session import Trial

START, BEST = {"size": 1}, {"size": 4}


def write(path: str, job: str = "job") -> None:
    record = Record(path, job, START)
    record.trial(Trial(1, START, 0.5))
    record.trial(Trial(2, BEST, 0.25))
    record.choice(BEST)


def test_what_stands_in_it(tmp_path):
    path = tmp_path / "log"
    path.write_text("of an earlier run\n")
    write(str(path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"job": "job", "start": START},
        {"trial": 1, "seconds": 0.5, "setting": START},
        {"trial": 2, "seconds": 0.25, "setting": BEST},
        {"job": "job", "chosen": BEST},
    ]


def test_a_choice_is_used_for_the_same_job_only(tmp_path):
    path = str(tmp_path / "log")
    assert read_choice(path, "job") is None
    write(path)
    assert read_choice(path, "job") == BEST
    assert read_choice(path, "other") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fusion,score\n1,2\n",
        "[]\n",
        '{"job": "job"}\n',
        '{"job": "job", "chosen": 3}\n',
        "\xff{",
    ],
)
def test_no_choice_in_a_file_of_other_contents(tmp_path, text):
    path = tmp_path / "log"
    path.write_bytes(text.encode("latin-1"))
    assert read_choice(str(path), "job") is None


def test_a_log_that_was_cut_off_has_no_choice(tmp_path):
    path = tmp_path / "log"
    write(str(path))
    whole = path.read_text()
    for length in range(len(whole) - 1):
        path.write_text(whole[:length])
        assert read_choice(str(path), "job") is None


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        Record(str(tmp_path / "no folder" / "log"), "job", START)
    with pytest.raises(UsageError, match="cannot be read"):
        read_choice(str(tmp_path), "job")


def test_a_disk_that_fills_up_later_ends_no_training(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    record = Record(str(folder / "log"), "job", START)
    (folder / "log").unlink()
    folder.rmdir()
    with caplog.at_level(logging.WARNING, logger="farandole"):
        record.choice(BEST)
    assert "cannot be written" in caplog.text
