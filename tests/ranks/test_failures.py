"""What is a symptom and what a cause, and which rank a symptom points to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddpforge.ranks.watch import Watch

from ddpforge.errors import CheckpointError, ExitCode, PeerFailed, StrategyError
from ddpforge.ranks.failures import Failures, Peer, is_symptom, phrase, told_causes
from ddpforge.ranks.writers import OutOfTouch

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
LOST = RuntimeError(GLOO)


def out_of_touch() -> CheckpointError:
    error = CheckpointError("rank 1 is out of touch")
    error.__cause__ = OutOfTouch(GLOO)
    return error


class DistNetworkError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LOST, True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation"), True),
        (RuntimeError("NCCL Error 6: remote process exited or there was a network error"), True),
        (DistNetworkError("The client socket has timed out after 600000ms"), True),
        (out_of_touch(), True),
        (PeerFailed(ExitCode.FAILED), True),
        (RuntimeError("NCCL error: invalid usage: Duplicate GPU detected"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # a dataset's own, from a server of its own
        (TimeoutError("timed out"), False),
        (StrategyError("the launcher started 2 processes"), False),
        (KeyError("x"), False),
    ],
)
def test_a_symptom_is_that_other_ranks_did_not_answer(error: BaseException, expected: bool) -> None:
    assert is_symptom(error) is expected


def test_an_error_without_words_is_its_type() -> None:
    assert phrase(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert phrase(ValueError("no")) == "ValueError: no"


def ranks(logs: Path, *peers: Peer, token: str = "this") -> list[Failures]:
    return [Failures(logs, token, peer, peers) for peer in peers]


def elsewhere(rank: int) -> Peer:
    return Peer(rank, f"node{rank}", f"node{rank} 1", 1000 + rank)


def no_sleep(_: float) -> None:
    raise AssertionError("nothing is left to wait for")


def test_a_cause_of_another_rank_is_found_with_its_exit_code(tmp_path: Path) -> None:
    zero, one, two = ranks(tmp_path, *map(elsewhere, range(3)))
    two.tell(LOST, 1)
    one.tell(StrategyError("no such device"), 3)
    zero.tell(LOST, 1)
    for failures in (zero, two):
        cause = failures.explain(no_sleep)
        assert cause is not None
        assert (cause.rank, cause.error, cause.exit_code) == (1, "StrategyError: no such device", 3)
    assert [report.rank for report in told_causes(tmp_path)] == [1]


def test_where_all_have_symptoms_nobody_is_blamed(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, *map(elsewhere, range(2)))
    zero.tell(LOST, 1)
    one.tell(LOST, 1)
    assert zero.explain(no_sleep) is None


def test_the_rank_that_stays_silent_is_blamed(tmp_path: Path) -> None:
    zero, _, two = ranks(tmp_path, *map(elsewhere, range(3)))
    zero.tell(LOST, 1)
    two.tell(LOST, 1)
    cause = zero.explain(patience=0.0)
    assert cause is not None
    assert (cause.rank, cause.error) == (1, "process 1001 on node1 does not answer")


def test_reports_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    peers = [elsewhere(0), elsewhere(1)]
    ranks(tmp_path, *peers, token="earlier")[1].tell(KeyError("x"), 1)
    assert ranks(tmp_path, *peers)[0].cause() is None
    Failures.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_cause_is_first_also_after_a_symptom(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, *map(elsewhere, range(2)))
    symptom, cause = zero.tell(LOST, 1), one.tell(KeyError("x"), 1)
    assert [zero.is_first(symptom), one.is_first(cause), zero.is_first(cause), one.is_first(symptom)] == [
        *(True, True, False, False)
    ]


# ---------------------------------------------------------------------------------------------- processes beside it
@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def beside(child: "subprocess.Popen[bytes]") -> list[Peer]:
    me = Peer.me(0)
    return [me, Peer(1, me.host, me.place, child.pid)]


def test_a_process_that_has_ended_is_known_at_once(tmp_path: Path, child: "subprocess.Popen[bytes]") -> None:
    failures = ranks(tmp_path, *beside(child))[0]
    assert not failures.someone_failed()
    child.kill()
    child.wait()
    assert failures.someone_failed()
    failures.tell(LOST, 1)
    cause = failures.explain(no_sleep)
    assert cause is not None
    assert (cause.rank, cause.error.partition(" ended")[2]) == (1, " without a word: it was killed, or crashed")


def test_a_process_that_is_stopped_is_known_and_can_be_ended(tmp_path: Path, child: "subprocess.Popen[bytes]") -> None:
    failures = ranks(tmp_path, *beside(child))[0]
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert failures.local.frozen().keys() == {1}
    failures.end_frozen()
    assert child.wait() == -signal.SIGKILL


def test_a_process_of_that_number_on_another_host_is_not_looked_at(
    tmp_path: Path, child: "subprocess.Popen[bytes]"
) -> None:
    me, other = beside(child)
    failures = ranks(tmp_path, me, Peer(1, "node7", "node7 1", other.pid))[0]
    child.kill()
    child.wait()
    assert not failures.someone_failed()
    assert not failures.local.frozen()


# ---------------------------------------------------------------------------------------------- the watch
def test_a_watch_gives_up_on_a_rank_that_does_not_notice(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, *map(elsewhere, range(2)))
    given_up: list[tuple[int, str]] = []
    watch = Watch(zero, lambda cause: given_up.append((cause.rank, cause.error)), look=0.001, grace=0.001)
    assert one.is_first(one.tell(KeyError("x"), 1))
    watch._thread.join(300)
    assert given_up == [(1, "KeyError: 'x'")]


def test_a_watch_leaves_a_rank_alone_that_notices_and_one_whose_peers_are_well(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, *map(elsewhere, range(2)))
    given_up: list[object] = []
    well = Watch(zero, given_up.append, look=0.001, grace=0.001)
    well.stop()
    noticing = Watch(zero, given_up.append, look=0.001, grace=1000.0)
    assert one.is_first(one.tell(KeyError("x"), 1))
    noticing.stop()
    assert given_up == []
    assert not noticing._thread.is_alive()


def test_a_rank_that_others_blame_gives_up_too(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, *map(elsewhere, range(2)))
    zero.tell(LOST, 1)
    blamed = zero.explain(patience=0.0)
    assert blamed is not None
    assert zero.is_first(blamed)
    given_up: list[str] = []
    Watch(one, lambda cause: given_up.append(cause.error), look=0.001, grace=0.001)._thread.join(300)
    assert given_up == ["did not answer"]
