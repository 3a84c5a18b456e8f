"""Control channels between ranks that are threads, over real sockets."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from control_ranks import LIMIT, QUICK, Ranks, eventually

from farandole.comm.control import message
from farandole.comm.control.channel import Control
from farandole.comm.control.position import Position
from farandole.core import wire
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.errors import (
    CollectiveError,
    ConnectionLost,
    DeadlineError,
    FarandoleError,
    MismatchError,
    PeerLost,
    SetupError,
    ShutDownError,
    StallError,
    UsageError,
)
from farandole.core.secret import Secret

MakeRanks = Callable[..., Ranks]


def named(number: int, what: str = 'allreduce "loss"', members: tuple[int, ...] = ()) -> Position:
    return Position("named", "0", number, what, members=members)


def bucket(number: int) -> Position:
    return Position("planned", "0", number, f"bucket 2 of step {number}", ("fc.weight", "fc.bias"))


def never(timeout: float) -> bool:
    time.sleep(min(timeout, 0.01))
    return False


def texts(results: list[Any], kind: type[FarandoleError]) -> set[str]:
    assert all(type(each) is kind for each in results), results
    return {str(each) for each in results}


class TestGathers:
    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_everybody_gets_everybodys_part_in_order(self, ranks: MakeRanks, size: int) -> None:
        def act(control: Control) -> list[list[bytes]]:
            own = str(control.rank).encode()
            return [control.allgather(f"t/{i}", own * i) for i in range(20)]

        expected = [[str(r).encode() * i for r in range(size)] for i in range(20)]
        assert ranks(size).run(act) == [expected] * size

    def test_among_some_in_their_own_order(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> list[bytes]:
            members = (2, 0) if control.rank in (0, 2) else (1, 3)
            return control.allgather("t", b"%d" % control.rank, members)

        assert ranks(4).run(act) == [[b"2", b"0"], [b"1", b"3"], [b"2", b"0"], [b"1", b"3"]]

    def test_many_at_once_from_several_threads(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> int:
            wrong: list[object] = []

            def work(line: int) -> None:
                for i in range(50):
                    own = f"{control.rank}/{line}/{i}".encode()
                    got = control.allgather(f"{line}/{i}", own)
                    if got != [f"{r}/{line}/{i}".encode() for r in range(control.size)]:
                        wrong.append(got)

            threads = [threading.Thread(target=work, args=(line,)) for line in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT)
            return len(wrong)

        assert ranks(3).run(act) == [0, 0, 0]

    def test_without_waiting(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> list[bytes]:
            pending = [control.start_allgather(f"t/{i}", b"%d" % control.rank) for i in range(9)]
            for each in reversed(pending):
                control.wait_for(each.wait, named(1))
            return pending[4].result

        assert ranks(2).run(act) == [[b"0", b"1"]] * 2

    def test_what_is_too_large_is_refused_and_the_group_lives_on(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> bool:
            part = bytes([control.rank]) * (25 << 20)
            with pytest.raises(UsageError, match="bytes together"):
                control.allgather("large", part)
            with pytest.raises(UsageError):
                control.allgather("one frame", bytes(65 << 20))
            return control.allgather("small", b"") == [b"", b""]

        assert ranks(2).run(act) == [True, True]

    def test_a_stranger_to_the_members_is_refused(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> list[bytes]:
            if control.rank == 0:
                with pytest.raises(UsageError, match="cannot gather among"):
                    control.allgather("t", b"", (1,))
                with pytest.raises(UsageError, match="cannot gather among"):
                    control.allgather("t", b"", (0, 7))
            return control.allgather("after", b"")

        assert ranks(2).run(act) == [[b"", b""]] * 2


class TestForming:
    def test_names_who_did_not_come(self, ranks: MakeRanks) -> None:
        team = ranks(4)
        results = team.each(lambda r: team.form(r, limit=0.5) if r in (0, 2) else None)
        (text,) = texts([results[0], results[2]], DeadlineError)
        assert "Ranks 1, 3 of 4 did not reach init() within 0.5 s" in text
        assert results[0].ranks == (1, 3)

    def test_names_rank_zero_if_that_is_who_did_not_come(self, ranks: MakeRanks) -> None:
        team = ranks(2)
        with pytest.raises(DeadlineError, match=r"Rank 0 of 2 did not reach init\(\)"):
            team.form(1, limit=0.2)

    def test_the_earliest_deadline_counts_for_all(self, ranks: MakeRanks) -> None:
        team = ranks(3)
        limits = {0: LIMIT, 1: 0.3}
        results = team.each(lambda r: team.form(r, limit=limits[r]) if r in limits else None)
        assert len(texts(results[:2], DeadlineError)) == 1

    def test_a_latecomer_is_told_at_once(self, ranks: MakeRanks) -> None:
        team = ranks(2)
        with pytest.raises(DeadlineError):
            team.form(0, limit=0.1)
        with pytest.raises(SetupError, match="came too late: the group did not form: Rank 1 of 2"):
            team.form(1)

    def test_a_second_process_with_the_same_rank_is_refused(self, ranks: MakeRanks) -> None:
        team = ranks(3)
        refused: list[SetupError] = []

        def come_twice(rank: int) -> Any:
            try:
                return team.form(rank)
            except SetupError as error:
                refused.append(error)

        def be(rank: int) -> Any:
            if rank == 2:
                twins = [threading.Thread(target=come_twice, args=(1,)) for _ in range(2)]
                for twin in twins:
                    twin.start()
                eventually(lambda: bool(refused))
                team.form(2)
                for twin in twins:
                    twin.join(LIMIT)
            return team.form(0) if rank == 0 else None

        results = team.each(be)
        assert isinstance(results[0], Control)
        (error,) = refused
        assert "second process claims to be rank 1" in str(error)

    def test_sizes_that_differ_are_refused(self, ranks: MakeRanks) -> None:
        team = ranks(2)

        def be(rank: int) -> Any:
            size, limit = (2, 0.5) if rank == 0 else (3, LIMIT)
            where = (team.store, rank, size, 0, QUICK, team.secret, "127.0.0.1")
            return Control.form(*where, Deadline.after(limit))

        results = team.each(be)
        assert isinstance(results[0], DeadlineError)
        assert isinstance(results[1], SetupError)
        assert "rank 1 of 3" in str(results[1])

    def test_one_that_gives_up_ends_it_for_all(self, ranks: MakeRanks) -> None:
        team = ranks(3)

        def be(rank: int) -> Any:
            if rank == 0:
                return team.form(0)
            if rank == 1:
                with pytest.raises(DeadlineError):
                    # Rank 0 hears of this deadline, and that it has passed.
                    team.form(1, limit=0.3)
            return None

        assert isinstance(team.each(be)[0], DeadlineError)

    def test_one_that_dies_meanwhile_ends_it_for_all(self, ranks: MakeRanks) -> None:
        team = ranks(3)

        def be(rank: int) -> Any:
            if rank != 2:
                return team.form(0) if rank == 0 else None
            value = json.loads(team.store.get("control/0", Deadline.after(LIMIT)))
            where = Address.parse(value["address"])
            with wire.connect(where, team.secret, Deadline.after(LIMIT)) as connection:
                place = {"rank": 2, "size": 3, "generation": 0, "remaining": None, "limit": None}
                connection.send(message.pack("hello", **place))
            return None

        assert "Rank 2 was lost" in texts(team.each(be)[:1], PeerLost).pop()

    def test_hundreds_of_generations_leak_nothing(self, ranks: MakeRanks) -> None:
        team = ranks(2)

        def be(rank: int) -> int:
            for generation in range(200):
                control = team.form(rank, generation)
                control.allgather("t", b"")
                control.close()
            return generation

        assert team.each(be) == [199, 199]
        assert team.store.keys("control/") == ["control/199"]


class TestFailure:
    def test_reaches_everybody_once(self, ranks: MakeRanks) -> None:
        calls: list[tuple[int, str]] = []

        def act(control: Control) -> None:
            control.on_failure(lambda error: calls.append((control.rank, str(error))))
            if control.rank == 1:
                control.fail(MismatchError("they differ", ranks=[0, 1]))
                control.fail(StallError("later news"))
            control.allgather("t", b"")

        (text,) = texts(ranks(3).run(act), MismatchError)
        assert text == "they differ"
        eventually(lambda: sorted(calls) == [(rank, "they differ") for rank in range(3)])

    def test_two_at_once_leave_one_cause(self, ranks: MakeRanks) -> None:
        team = ranks(4)

        def act(control: Control) -> None:
            team.meeting.wait(LIMIT)
            said = control.fail(CollectiveError(f"rank {control.rank} failed"))
            assert str(said) == str(control.failure)
            control.require_usable()

        assert len(texts(team.run(act), CollectiveError)) == 1

    def test_the_first_hand_cause_wins_over_hearsay(self, ranks: MakeRanks) -> None:
        team = ranks(3)

        def act(control: Control) -> None:
            if control.rank == 1:
                control.fail(PeerLost("some neighbour closed its connection", ranks=[2]))
            if control.rank == 2:
                eventually(lambda: hub_has_heard(team))
                control.close(reason="ValueError: a bad batch")
            else:
                control.allgather("t", b"")

        results = team.run(act)
        (text,) = texts(results[:2], PeerLost)
        assert "Rank 2 was lost: ValueError: a bad batch" in text
        assert results[0].ranks == (2,)

    def test_hearsay_counts_when_nothing_better_comes(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> None:
            if control.rank == 1:
                control.fail(PeerLost("the cable is cut", ranks=[2]))
            control.allgather("t", b"")

        assert texts(ranks(3).run(act), PeerLost) == {"the cable is cut"}

    def test_a_callback_that_fails_keeps_nobody_from_the_news(
        self, ranks: MakeRanks, caplog: pytest.LogCaptureFixture
    ) -> None:
        told: list[int] = []

        def act(control: Control) -> None:
            control.on_failure(lambda error: 1 / 0)
            control.on_failure(lambda error: told.append(control.rank))
            control.fail(MismatchError("they differ"))
            control.on_failure(lambda error: told.append(10 + control.rank))

        ranks(2).run(act)
        eventually(lambda: sorted(told) == [0, 1, 10, 11])
        assert "A callback on the failure" in caplog.text

    def test_a_callback_may_call_back(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> Any:
            done = threading.Event()

            def react(error: FarandoleError) -> None:
                control.fail(StallError("an echo"))
                control.close()
                done.set()

            control.on_failure(react)
            if control.rank == 1:
                control.fail(MismatchError("they differ"))
            assert done.wait(LIMIT)
            return control.failure

        assert texts(ranks(2).run(act), MismatchError) == {"they differ"}

    def test_a_callback_that_was_called_off_is_not_called(self, ranks: MakeRanks) -> None:
        told: list[int] = []

        def act(control: Control) -> None:
            control.on_failure(lambda error: told.append(control.rank))()
            control.fail(MismatchError("they differ"))

        ranks(2).run(act)
        assert told == []

    def test_each_raise_is_an_error_of_its_own(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> bool:
            control.fail(MismatchError("they differ"))
            caught = []
            for _ in range(2):
                with pytest.raises(MismatchError) as info:
                    control.require_usable()
                caught.append(info.value)
            return caught[0] is not caught[1]

        assert all(ranks(2).run(act))


def hub_has_heard(team: Ranks) -> bool:
    hub = team.controls[0]._hub
    return hub is not None and hub._hearsay is not None


class TestWatch:
    def test_a_deadlock_names_ranks_positions_and_parameters(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> None:
            control.wait_for(never, bucket(5) if control.rank == 0 else named(3))

        (text,) = texts(ranks(3).run(act), MismatchError)
        assert "rank 0: bucket 2 of step 5 (fc.weight, fc.bias)" in text
        assert 'ranks 1-2: allreduce "loss"' in text

    def test_a_gather_that_not_all_make(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> None:
            if control.rank == 1:
                control.allgather("t", b"", position=named(3, "the size of the vocabulary"))
            control.wait_for(never, bucket(5))

        (text,) = texts(ranks(2).run(act), MismatchError)
        assert "rank 1: the size of the vocabulary" in text

    def test_gathers_in_another_order(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> None:
            for topic in "ab" if control.rank == 0 else "ba":
                control.allgather(topic, b"")

        (text,) = texts(ranks(2).run(act), MismatchError)
        assert "rank 0: the exchange of 'a'" in text
        assert "rank 1: the exchange of 'b'" in text

    def test_the_same_position_is_slow_and_no_error(self, ranks: MakeRanks) -> None:
        team = ranks(2)
        ends = Deadline.after(4 * QUICK.deadlock_after)

        def act(control: Control) -> str:
            control.wait_for(lambda t: never(t) or ends.expired(), named(1))
            return "done"

        assert team.run(act) == ["done", "done"]

    def test_a_rank_that_computes_is_no_deadlock(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> list[bytes]:
            if control.rank == 0:
                time.sleep(4 * QUICK.deadlock_after)
                return control.allgather("late", b"")
            pending = control.start_allgather("late", b"")
            control.wait_for(pending.wait, named(control.rank))
            return pending.result

        assert ranks(3).run(act) == [[b"", b"", b""]] * 3

    def test_waits_that_come_and_go_are_no_deadlock(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> int:
            for i in range(12):
                time.sleep(0.06 * (control.rank == i % 2))
                control.allgather(f"t/{i}", b"")
            return i

        assert ranks(2).run(act) == [11, 11]

    def test_a_stall_is_told_once_with_the_stack_of_who_is_missing(
        self, ranks: MakeRanks, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings = Settings(block_notice=0.02, stall_warning=0.1)

        def reads_a_slow_disk() -> None:
            eventually(lambda: bool(caplog.messages))
            time.sleep(0.6)

        def act(control: Control) -> list[bytes]:
            if control.rank == 1:
                reads_a_slow_disk()
            return control.allgather("t", b"", position=named(1))

        with caplog.at_level(logging.WARNING, "farandole"):
            assert ranks(3, settings).run(act) == [[b"", b"", b""]] * 3
        (warning,) = caplog.messages
        assert "s for rank 1:" in warning
        assert 'ranks 0, 2: allreduce "loss"' in warning
        assert "Rank 1 is here" in warning
        assert "in reads_a_slow_disk" in warning

    def test_a_stall_ends_everybody_after_the_limit(self, ranks: MakeRanks) -> None:
        over = threading.Event()
        settings = Settings(block_notice=0.02, stall_timeout=0.5, stall_warning=0.0)

        def act(control: Control) -> None:
            if control.rank == 2:
                control.on_failure(lambda error: over.set())
                assert over.wait(LIMIT)
            control.allgather("t", b"")

        results = ranks(3, settings).run(act)
        (text,) = texts(results, StallError)
        assert "Waited more than 0.5 s" in text
        assert results[0].ranks == (2,)


class TestGoodbyes:
    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
    def test_in_any_order_nobody_minds(self, ranks: MakeRanks, order: tuple[int, ...]) -> None:
        team = ranks(3)
        errors: list[FarandoleError] = []
        turns = [threading.Event() for _ in range(3)]

        def act(control: Control) -> bool:
            control.on_failure(errors.append)
            control.allgather("last", b"")
            mine = order.index(control.rank)
            if mine > 0:
                assert turns[mine - 1].wait(LIMIT)
            begin = time.monotonic()
            control.close()
            turns[mine].set()
            return time.monotonic() - begin < 5.0

        assert team.run(act) == [True] * 3
        assert errors == []

    def test_all_at_once_after_a_gather_loses_no_answer(self, ranks: MakeRanks) -> None:
        team = ranks(3)

        def be(rank: int) -> int:
            for generation in range(40):
                control = team.form(rank, generation)
                assert control.allgather("last", b"x") == [b"x"] * 3
                control.close()
            return generation

        assert team.each(be) == [39] * 3

    @pytest.mark.parametrize("goer", [0, 1])
    def test_a_gather_that_needs_who_left_fails_at_once(self, ranks: MakeRanks, goer: int) -> None:
        survivors = threading.Barrier(2)

        def act(control: Control) -> Any:
            if control.rank == goer:
                return control.close()
            eventually(lambda: control.left == (goer,))
            assert control.failure is None
            survivors.wait(LIMIT)
            return control.allgather("t", b"", position=named(1))

        results = ranks(3).run(act)
        left = [each for each in results if each is not None]
        assert len(left) == 2
        for error in left:
            assert isinstance(error, PeerLost)
            assert f"Rank {goer} has shut down or finished" in str(error)
            assert 'allreduce "loss"' in str(error)
            assert error.ranks == (goer,)

    @pytest.mark.parametrize("goer", [0, 1])
    def test_one_that_waits_already_hears_of_it(self, ranks: MakeRanks, goer: int) -> None:
        team = ranks(3)

        def act(control: Control) -> Any:
            return control.close() if control.rank == goer else control.wait_for(never, named(1))

        left = [each for each in team.run(act) if each is not None]
        assert len(left) == 2
        assert all(isinstance(each, PeerLost) and each.ranks == (goer,) for each in left)

    def test_those_who_do_not_need_it_go_on(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> Any:
            if control.rank == 1:
                return control.close()
            eventually(lambda: control.left == (1,))
            return [control.allgather(f"t/{i}", b"", (0, 2)) for i in range(5)]

        results = ranks(3).run(act)
        assert results[0] == results[2] == [[b"", b""]] * 5

    def test_what_it_had_begun_may_end_after_it_left(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> Any:
            if control.rank == 0:
                control.note_begun(named(1))
                return control.close()
            ends = Deadline.after(1.2)
            control.wait_for(lambda t: never(t) or ends.expired(), named(1))
            return "done"

        assert ranks(2).run(act) == [None, "done"]

    def test_the_own_waits_end_with_the_own_close(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> list[str]:
            if control.rank == 1:
                return []
            ended: list[str] = []

            def wait(act: Callable[[], object]) -> None:
                with pytest.raises(ShutDownError) as info:
                    act()
                ended.append(str(info.value))

            acts = [lambda: control.allgather("t", b""), lambda: control.wait_for(never, named(1))]
            threads = [threading.Thread(target=wait, args=(each,)) for each in acts]
            for thread in threads:
                thread.start()
            eventually(lambda: len(control._reporter.waits._blocked) == 2)
            control.close()
            control.close()
            for thread in threads:
                thread.join(LIMIT)
            with pytest.raises(ShutDownError):
                control.allgather("u", b"")
            return ended

        assert len(ranks(2).run(act)[0]) == 2

    def test_with_bad_news_breaks_the_group(self, ranks: MakeRanks) -> None:
        def act(control: Control) -> None:
            if control.rank == 0:
                control.close(reason="KeyError: 'labels'")
            else:
                control.allgather("t", b"")

        (text,) = texts(ranks(3).run(act)[1:], PeerLost)
        assert "Rank 0 was lost: KeyError: 'labels'" in text


def refused(stranger: wire.Connection) -> None:
    """It may be told why, and is hung up on."""
    with contextlib.suppress(ConnectionLost):
        assert message.unpack(stranger.receive(Deadline.after(LIMIT))).kind == "failed"
    with pytest.raises(ConnectionLost):
        stranger.receive(Deadline.after(LIMIT))


class TestGarbage:
    def connect(self, team: Ranks) -> wire.Connection:
        hub = team.controls[0]._hub
        assert hub is not None
        return wire.connect(hub.address, team.secret, Deadline.after(LIMIT))

    @pytest.mark.parametrize(
        "frame",
        [
            b"",
            b"\xff\xfe",
            message.pack("gather", [b""], request=1, topic="t", what="it"),
            message.pack("hello", rank=0, size=2, generation=0, remaining=None),
            message.pack("hello", rank="0", size=[], generation={}),
            message.pack("hello", rank=7, size=2, generation=0, remaining=1.0, limit=1.0),
        ],
    )
    def test_from_outside_the_ranks_disturbs_nobody(self, ranks: MakeRanks, frame: bytes) -> None:
        team = ranks(2)

        def act(control: Control) -> list[bytes]:
            control.allgather("formed", b"")
            if control.rank == 0:
                with self.connect(team) as stranger:
                    stranger.send(frame)
                    refused(stranger)
            return control.allgather("after", b"")

        assert team.run(act) == [[b"", b""]] * 2

    def test_from_who_lacks_the_secret_disturbs_nobody(self, ranks: MakeRanks) -> None:
        team = ranks(2)

        def act(control: Control) -> list[bytes]:
            control.allgather("formed", b"")
            if control.rank == 0:
                hub = control._hub
                assert hub is not None
                with pytest.raises(FarandoleError):
                    wire.connect(hub.address, Secret.new(), Deadline.after(LIMIT))
            return control.allgather("after", b"")

        assert team.run(act) == [[b"", b""]] * 2

    @pytest.mark.parametrize(
        ("kind", "fields"),
        [
            ("nonsense", {}),
            ("gather", {"request": 1, "topic": "t", "members": [0, 99], "what": ""}),
            ("gather", {"request": 1, "topic": "t", "members": [0, 0, 1], "what": ""}),
            ("where", {"stuck": True, "waits": [{}], "begun": [], "answered": 0}),
            ("where", {"stuck": True, "waits": 7, "begun": [], "answered": 0}),
            ("where", {"stuck": True, "waits": [], "begun": [["a"]], "answered": 0}),
            ("fail", {"error": None}),
            ("goodbye", {}),
            ("stack", {"text": 5}),
        ],
    )
    def test_from_a_rank_counts_as_its_loss(
        self, ranks: MakeRanks, kind: str, fields: dict[str, Any]
    ) -> None:
        def act(control: Control) -> None:
            if control.rank == 1:
                assert control._link is not None
                control._link.send(kind, [b""] if kind == "gather" else [], **fields)
            control.allgather("t", b"")

        results = ranks(3).run(act)
        (text,) = texts(results, PeerLost)
        assert "Rank 1 was lost: it sent a message that makes no sense" in text


def test_an_error_of_the_group_survives_copying() -> None:
    error = PeerLost("gone", ranks=[3])
    twin = copy.copy(error)
    assert (twin.message, twin.ranks) == ("gone", (3,))
