"""What is a symptom and what a cause, and which rank a symptom points to."""

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


def ranks(logs: Path, size: int, token: str = "this") -> list[Failures]:
    return [Failures(logs, token, rank, size) for rank in range(size)]


def nobody_to_call() -> None:
    raise AssertionError("the cause is known")


def no_sleep(_: float) -> None:
    raise AssertionError("nothing is left to wait for")


def test_a_cause_of_another_rank_is_found_with_its_exit_code(tmp_path: Path) -> None:
    zero, one, two = ranks(tmp_path, 3)
    two.record(LOST, 1)
    one.record(StrategyError("no such device"), 3)
    zero.record(LOST, 1)
    for failures in (zero, two):
        cause = failures.explain(nobody_to_call, no_sleep)
        assert cause is not None
        assert (cause.rank, cause.error, cause.exit_code) == (1, "StrategyError: no such device", 3)
        assert str(cause) == "rank 1: StrategyError: no such device"
    assert [report.rank for report in recorded_causes(tmp_path)] == [1]


def test_on_a_full_disk_a_failure_is_told_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddpforge.ranks.failures.disk.replace", full)
    zero, one, two = ranks(tmp_path, 3)
    one.record(StrategyError("no room in /runs/x: 100 % full; " + 300 * "ä"), 3)
    two.record(LOST, 1)
    cause = zero.explain(nobody_to_call, no_sleep)
    assert cause is not None
    assert (cause.rank, cause.exit_code, cause.symptom) == (1, 3, False)
    assert cause.error.startswith("StrategyError: no room in /runs/x: 100 % full; ää")
    Failures.clear(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_where_all_have_symptoms_nobody_is_blamed(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, 2)
    zero.record(LOST, 1)
    one.record(LOST, 1)
    assert zero.explain(nobody_to_call, no_sleep) is None


def test_where_nobody_tells_everybody_is_called_and_one_says_who_is_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpforge.ranks.failures._PATIENCE", 0.0)
    zero, _, two = ranks(tmp_path, 3)
    zero.record(LOST, 1)
    called: list[str] = []
    found = FailureRecord(
        "this", 1, "made no progress in data of step 15 for 9 s; the others waited for it", 1, False, told=False
    )

    def answer(_: float) -> None:
        two.record_for(found)

    cause = zero.explain(lambda: called.append("called"), answer)
    assert cause == found
    assert str(cause) == "rank 1 made no progress in data of step 15 for 9 s; the others waited for it"
    assert called == ["called"]


def test_a_silence_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PATIENCE", "_ANSWER"):
        monkeypatch.setattr(f"ddpforge.ranks.failures.{name}", 0.0)
    zero, _ = ranks(tmp_path, 2)
    zero.record(LOST, 1)
    assert zero.explain(lambda: None) is None


def test_reports_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    ranks(tmp_path, 2, token="earlier")[1].record(KeyError("x"), 1)
    for name in ("failure-alarm", "phase-rank-0.json", "stacks-rank-1.txt"):
        (tmp_path / name).touch()
    assert ranks(tmp_path, 2)[0].cause() is None
    Failures.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_cause_is_first_also_after_a_symptom(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, 2)
    symptom, cause = zero.record(LOST, 1), one.record(KeyError("x"), 1)
    assert not zero.any_failed()
    assert [zero.claim_first(symptom), one.claim_first(cause), zero.claim_first(cause), one.claim_first(symptom)] == [
        *(True, True, False, False)
    ]
    assert zero.any_failed()
