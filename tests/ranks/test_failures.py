"""Failures of ranks: symptoms, causes, and the rank that is the cause of a symptom."""

from pathlib import Path

import pytest

from ddpforge.errors import CheckpointError, ExitCode, PeerFailed, StrategyError
from ddpforge.ranks.failures import FailureRecord, Failures, is_symptom, phrase, recorded_causes
from ddpforge.ranks.writers import PeerUnreachable

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
LOST = RuntimeError(GLOO)


def out_of_touch() -> CheckpointError:
    error = CheckpointError("rank 1 is out of touch")
    error.__cause__ = PeerUnreachable(GLOO)
    return error


class DistNetworkError(RuntimeError):
    """Exception with the name of torch's."""


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
        (ConnectionResetError("Connection reset by peer"), False),  # of a dataset that reads from a server
        (TimeoutError("timed out"), False),
        (StrategyError("the launcher started 2 processes"), False),
        (KeyError("x"), False),
    ],
)
def test_errors_of_unreachable_peers_are_symptoms(error: BaseException, expected: bool) -> None:
    assert is_symptom(error) is expected


def test_causes_in_a_circle_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_symptom(first)


def test_phrase_of_an_error_without_message_is_its_type() -> None:
    assert phrase(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert phrase(ValueError("no")) == "ValueError: no"


def ranks(logs: Path, size: int, token: str = "this") -> list[Failures]:
    return [Failures(logs, token, rank, size) for rank in range(size)]


def no_alarm() -> None:
    raise AssertionError("the cause is known")


def no_sleep(_: float) -> None:
    raise AssertionError("nothing is left to wait for")


def test_explain_finds_the_cause_of_another_rank_with_its_exit_code(tmp_path: Path) -> None:
    zero, one, two = ranks(tmp_path, 3)
    two.record(LOST, 1)
    one.record(StrategyError("no such device"), 3)
    zero.record(LOST, 1)
    for failures in (zero, two):
        cause = failures.explain(no_alarm, no_sleep)
        assert cause is not None
        assert (cause.rank, cause.error, cause.exit_code) == (1, "StrategyError: no such device", 3)
        assert str(cause) == "rank 1: StrategyError: no such device"
    assert [report.rank for report in recorded_causes(tmp_path)] == [1]


def test_failure_is_recorded_also_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddpforge.ranks.failures.disk.replace", full)
    zero, one, two = ranks(tmp_path, 3)
    one.record(StrategyError("no room in /runs/x: 100 % full; " + 300 * "ä"), 3)
    two.record(LOST, 1)
    cause = zero.explain(no_alarm, no_sleep)
    assert cause is not None
    assert (cause.rank, cause.exit_code, cause.symptom) == (1, 3, False)
    assert cause.error.startswith("StrategyError: no room in /runs/x: 100 % full; ää")
    Failures.clear(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_explain_returns_none_if_all_ranks_have_symptoms(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, 2)
    zero.record(LOST, 1)
    one.record(LOST, 1)
    assert zero.explain(no_alarm, no_sleep) is None


def test_explain_raises_the_alarm_without_a_record_and_returns_the_watchdogs_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpforge.ranks.failures._PATIENCE", 0.0)
    zero, _, two = ranks(tmp_path, 3)
    zero.record(LOST, 1)
    called: list[str] = []
    found = FailureRecord(
        "this",
        1,
        "made no progress in data of step 15 for 9 s; the others waited for it",
        1,
        False,
        self_reported=False,
    )

    def answer(_: float) -> None:
        two.record_for(found)

    cause = zero.explain(lambda: called.append("called"), answer)
    assert cause == found
    assert str(cause) == "rank 1 made no progress in data of step 15 for 9 s; the others waited for it"
    assert called == ["called"]


def test_explain_returns_none_after_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PATIENCE", "_ANSWER"):
        monkeypatch.setattr(f"ddpforge.ranks.failures.{name}", 0.0)
    zero, _ = ranks(tmp_path, 2)
    zero.record(LOST, 1)
    assert zero.explain(lambda: None) is None


def test_records_of_an_earlier_attempt_are_ignored(tmp_path: Path) -> None:
    ranks(tmp_path, 2, token="earlier")[1].record(KeyError("x"), 1)
    for name in ("failure-alarm", "phase-rank-0.json", "stacks-rank-1.txt"):
        (tmp_path / name).touch()
    assert ranks(tmp_path, 2)[0].cause() is None
    Failures.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_one_cause_is_claimed_first_also_after_a_symptom(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, 2)
    symptom, cause = zero.record(LOST, 1), one.record(KeyError("x"), 1)
    assert not zero.any_failed()
    assert [zero.claim_first(symptom), one.claim_first(cause), zero.claim_first(cause), one.claim_first(symptom)] == [
        *(True, True, False, False)
    ]
    assert zero.any_failed()
