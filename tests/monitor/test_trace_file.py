"""The file is whole for any reader at any moment, whoever dies and whatever is added when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.core.errors import UsageError
from farandole.monitor.trace_file import SHARE, TraceFile


def content(path: Path) -> list[object]:
    return list(json.loads(path.read_text()))


def test_the_file_is_there_and_valid_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text("an old one")
    TraceFile(str(path))
    assert content(path) == []
    assert os.listdir(tmp_path) == ["timeline.json"]


acts = st.lists(
    st.one_of(
        st.just("publish"),
        st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=3)), max_size=4),
    ),
    max_size=20,
)


@settings(max_examples=60)
@given(acts)
def test_after_every_act_the_file_holds_what_was_published_in_order(
    happened: list[str | list[dict[str, str]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        file = TraceFile(str(path))
        added: list[object] = []
        published: list[object] = []
        for act in happened:
            if isinstance(act, str):
                file.publish()
                published = list(added)
            else:
                file.add(json.dumps(each) for each in act)
                added.extend(act)
            assert content(path) == published
        assert os.listdir(folder) == ["timeline.json"]


def test_a_reader_that_is_slow_reads_one_state(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    file = TraceFile(str(path))
    file.add(["1", "2"])
    file.publish()
    with path.open() as reader:
        begin = reader.read(3)
        file.add(["3"])
        file.publish()
        file.add(["4"])
        file.publish()
        assert json.loads(begin + reader.read()) == [1, 2]
    assert content(path) == [1, 2, 3, 4]


def test_readers_that_never_rest_meet_valid_json_only(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    file = TraceFile(str(path))
    done = threading.Event()
    lengths: list[int] = []

    def parse() -> None:
        while not done.is_set():
            lengths.append(len(content(path)))

    reader = threading.Thread(target=parse)
    reader.start()
    for number in range(200):
        file.add([json.dumps({"number": number, "text": "x" * 3000})])
        file.publish()
    done.set()
    reader.join(20.0)
    assert lengths == sorted(lengths)
    assert len(content(path)) == 200


WRITER = """
import json, sys
from farandole.monitor.trace_file import TraceFile
file = TraceFile(sys.argv[1])
for number in range(10**9):
    file.add([json.dumps({"number": number, "text": "x" * 20000})])
    file.publish()
    if number == 20:
        print("under way", flush=True)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path, attempt: int) -> None:
    path = tmp_path / "timeline.json"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "under way\n"
    for _ in range(attempt * 7):
        content(path)
    writer.send_signal(signal.SIGKILL)
    writer.wait(20.0)
    writer.stdout.close()
    numbers = [record["number"] for record in json.loads(path.read_text())]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 20


def test_publishing_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    clock = [100.0]

    def now() -> float:
        clock[0] += 0.5  # what lies between the two looks at the clock takes half a second
        return clock[0]

    file = TraceFile(str(tmp_path / "timeline.json"), now=now)
    file.add(["1"])
    file.publish()
    assert file.pause == SHARE * 0.5 - 0.5


def test_a_file_that_somebody_took_away_is_left_to_them(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    file = TraceFile(str(path))
    path.unlink()
    file.add(["1"])
    with pytest.raises(FileNotFoundError):
        file.publish()
    (tmp_path / "mine").write_text("mine")
    os.replace(tmp_path / "mine", path)
    with pytest.raises(FileNotFoundError):
        file.publish()
    assert path.read_text() == "mine"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    path = tmp_path / "timeline.json"
    path.symlink_to(tmp_path / "disk" / "real.json")
    file = TraceFile(str(path))
    file.add(["1"])
    file.publish()
    assert path.is_symlink()
    assert content(path) == [1]


def test_what_cannot_be_written_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*No such file or directory"):
        TraceFile(str(tmp_path / "nowhere" / "timeline.json"))
    with pytest.raises(UsageError, match="not a plain file"):
        TraceFile("/dev/null")
    with pytest.raises(UsageError, match="not a plain file"):
        TraceFile(str(tmp_path))
