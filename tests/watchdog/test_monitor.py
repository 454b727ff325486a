"""Monitor of a rank: the time limits of phases, the decision that the rank hangs, and the consequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from support.doubles import Clock

from ddpforge.ranks.heartbeat import BACKWARD, DATA, END, EVAL, FORWARD, SAVE, START, Heartbeat, RankStatus
from ddpforge.watchdog.culprit import Culprit
from ddpforge.watchdog.monitor import Limits, Monitor


class Job:
    """Ranks without processes, whose monitors exchange rows at once."""

    def __init__(self, ranks: int = 2, stall: float = 80.0, compiles: bool = False) -> None:
        self.clock = Clock()
        self.rows: dict[int, RankStatus] = {}
        self.alarm = self.failed = False
        self.told: list[tuple[int, Culprit]] = []
        self.ended: list[int] = []
        self.late: list[int] = []
        self.dead: set[int] = set()
        limits = Limits(stall, compiles)
        self.ranks = [Rank(self, rank) for rank in range(ranks)]
        self.sentries = [
            Monitor(one.rank, ranks, one, one, one, limits, clock=self.clock, sleep=self.pass_time)
            for one in self.ranks
        ]
        self.awake = set(range(ranks))

    def pass_time(self, seconds: float) -> None:
        """Advances the clock; after a call, the other monitors answer."""
        self.clock.now += seconds
        if self.alarm:
            for rank in sorted(self.awake):
                self.rows[rank] = self.ranks[rank].row(answers=True)

    def run(self, seconds: int) -> None:
        """Polls each monitor once a second."""
        for _ in range(seconds):
            self.clock.now += 1
            for rank in sorted(self.awake):
                if self.sentries[rank].poll():
                    self.awake.discard(rank)


class Rank:
    """Fake process, status board and reporter of one rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.pid = job, rank, 100 + rank
        self.at = Heartbeat(START, 0, 0, 0, False)
        self.stopped = False
        self.cut_off = 0.0
        self.code = ""
        self.written: Callable[[], None] = lambda: None

    def go(self, phase: int, step: int = 5, *, first: int = 1, left: bool = False) -> None:
        self.at = Heartbeat(phase, step, self.at.beats + 1, first, left)

    # the process
    def ended(self, wait: float) -> bool:
        return self.rank in self.job.ended

    def place(self) -> Heartbeat:
        return self.at

    def frozen(self) -> bool:
        return self.stopped

    def death(self) -> str:
        return "was killed by signal 9 (SIGKILL)"

    def stacks(self) -> str:
        self.written()
        return "stacks"

    def last_stacks(self) -> str:
        return self.code

    def line(self, stacks: str) -> str:
        return "x.py:1 in x"

    def end(self) -> None:
        self.job.ended.append(self.rank)

    # the board
    def publish(self, row: RankStatus) -> None:
        self.job.rows[self.rank] = row

    def call(self) -> None:
        self.job.alarm = True

    def called(self) -> bool:
        return self.job.alarm

    def rows(self) -> dict[int, RankStatus]:
        return dict(self.job.rows)

    def row(self, *, answers: bool) -> RankStatus:
        return self.job.rows[self.rank]._replace(answers=answers, frozen=self.stopped)

    # the reporter
    def any_failed(self) -> bool:
        return self.job.failed

    def keep_stacks(self, stacks: str) -> None:
        assert stacks == (self.code or ("" if self.at.left or self.rank in self.job.dead else "stacks"))

    def report_hang(self, found: Culprit, rows: Mapping[int, RankStatus]) -> None:
        if not self.job.failed:
            self.job.told.append((self.rank, found))
            self.job.failed = True

    def report_end(self, why: str) -> None:
        self.job.late.append(self.rank)


@pytest.mark.parametrize(
    ("phase", "step", "compiles", "limit"),
    [
        (DATA, 5, False, 80),
        (FORWARD, 5, True, 80),
        (FORWARD, 1, False, 240),  # the first step of the attempt
        (FORWARD, 1, True, 480),
        (EVAL, 5, False, 240),
        (SAVE, 5, False, 480),
        (START, 0, False, 480),
        (END, 5, False, 480),
    ],
)
def test_rank_is_late_after_the_limit_of_its_phase(phase: int, step: int, compiles: bool, limit: int) -> None:
    job = Job(1, compiles=compiles)
    job.ranks[0].go(phase, step)
    job.run(limit)
    assert not job.alarm
    job.run(3)
    assert job.alarm
    assert job.ended == [0]


def test_infinite_hang_timeout_disables_the_alarm() -> None:
    job = Job(1, stall=float("inf"))
    job.run(5_000)
    assert not job.alarm


@pytest.mark.parametrize("phase", [FORWARD, DATA])
def test_rank_with_a_heartbeat_while_its_stacks_are_written_is_not_late(phase: int) -> None:
    """Includes a heartbeat of the same phase of the same step: the next micro-batch."""
    job = Job(2)
    slow, waits = job.ranks
    slow.go(DATA)
    waits.at = waits.at._replace(beats=9)
    waits.go(BACKWARD)
    job.run(80)
    slow.written = lambda: slow.go(phase)
    job.run(2)
    slow.written = lambda: None
    waits.go(BACKWARD)
    job.run(70)
    assert not job.alarm
    job.run(20)
    assert job.told[0][1].ranks == [0]


def test_row_has_no_line_if_the_phase_has_changed_meanwhile() -> None:
    job = Job(2)
    moves = job.ranks[0]
    for rank in job.ranks:
        rank.go(DATA)
    job.run(30)
    moves.written = lambda: moves.go(FORWARD)
    job.alarm = True
    job.run(1)
    assert (job.rows[0].phase, int(job.rows[0].seconds), job.rows[0].at) == ("data", 30, "")
    assert (job.rows[1].phase, int(job.rows[1].seconds), job.rows[1].at) == ("data", 30, "x.py:1 in x")


def test_every_heartbeat_restarts_the_limit() -> None:
    """Includes heartbeats in the same phase of the same step: a step may have many micro-batches."""
    job = Job(1)
    for _ in range(20):
        job.ranks[0].go(BACKWARD)
        job.run(70)
    assert not job.alarm


def test_rank_behind_is_reported_and_all_ranks_are_killed() -> None:
    job = Job(3)
    for rank in job.ranks:
        rank.go(DATA)
    for rank in (job.ranks[0], job.ranks[2]):
        rank.go(BACKWARD)
    job.run(85)
    (_, found), *more = job.told
    assert not more
    assert found.ranks == [1]
    assert found.sentence.startswith("made no progress in data of step 5 for 8")
    assert sorted(job.ended) == [0, 1, 2]
    assert sorted(job.late) == [0, 1, 2]


def test_rank_whose_device_is_behind_is_reported_if_all_hosts_wait() -> None:
    job = Job(3)
    for rank in job.ranks:
        rank.go(BACKWARD, step=9)
        rank.at = rank.at._replace(on_device=7 if rank.rank == 2 else 8)
    job.run(85)
    assert [found.ranks for _, found in job.told] == [[2]]
    assert "its device has finished the forward passes of step 7, others those of step 8" in job.told[0][1].sentence


def test_rank_that_waits_for_several_ranks_is_not_late_while_one_of_them_is_within_its_limit() -> None:
    """Rank 1 is beyond the limit of its phase by this rank's settings, but has a longer one of its own."""
    job = Job(3)
    waits, slow, saves = job.ranks
    slow.go(DATA)
    slow.at = slow.at._replace(hang_timeout=1000.0)
    saves.go(SAVE)
    waits.at = waits.at._replace(beats=9)
    waits.go(BACKWARD)
    job.run(300)
    assert not job.alarm
    job.run(200)  # now the save is late, too
    assert job.alarm


def test_limit_of_a_slower_phase_on_another_rank_applies() -> None:
    job = Job()
    job.ranks[0].go(BACKWARD, step=5)
    job.ranks[1].go(SAVE, step=4)
    job.run(300)
    assert not job.alarm
    job.ranks[1].go(BACKWARD, step=5)
    for rank in job.ranks:
        rank.go(DATA, step=6)
    job.run(60)
    assert not job.alarm


def test_frozen_rank_is_reported_in_any_phase() -> None:
    job = Job()
    job.ranks[1].go(BACKWARD)
    job.ranks[0].go(BACKWARD)
    job.ranks[0].stopped = True
    job.run(85)
    assert [found.ranks for _, found in job.told] == [[0]]
    assert job.told[0][1].sentence.startswith("was frozen, as by SIGSTOP, in backward of step 5")


def test_rank_of_a_lost_host_is_reported() -> None:
    job = Job()
    for rank in job.ranks:
        rank.go(BACKWARD)
    job.run(5)
    job.awake.discard(1)
    job.run(90)
    assert [found.ranks for _, found in job.told] == [[1]]
    assert "did not answer (process 101 on " in job.told[0][1].sentence


def test_suspended_job_is_not_late() -> None:
    """Fakes a scheduler's SIGSTOP to all processes: only the clock advanced."""
    job = Job()
    for rank in job.ranks:
        rank.go(BACKWARD)
    job.run(5)
    job.clock.now += 10_000
    job.run(60)
    assert not job.alarm


def test_dead_rank_is_reported_by_its_agent_unless_it_has_reported_itself() -> None:
    job = Job()
    job.ranks[1].go(FORWARD)
    job.run(1)
    job.dead = {0, 1}
    job.sentries[1].died()
    ((rank, found),) = job.told
    assert (rank, found.ranks) == (1, [1])
    assert found.sentence.startswith("was killed by signal 9 (SIGKILL) in forward of step 5 (process 101 on ")
    job.sentries[0].died()  # its launcher has killed it because of the other's failure
    assert len(job.told) == 1

    spoken = Job()
    spoken.ranks[0].go(END, left=True)
    spoken.sentries[0].died()
    assert spoken.told == []


def test_crashed_rank_is_reported_with_its_line() -> None:
    job = Job()
    job.ranks[1].go(BACKWARD)
    job.ranks[1].code = "Fatal Python error: Aborted"
    job.run(1)
    job.sentries[1].died()
    assert " in backward of step 5 at x.py:1 in x (process 101 on " in job.told[0][1].sentence


def test_rank_that_does_not_notice_a_failure_of_another_rank_is_killed() -> None:
    job = Job()
    job.ranks[0].go(BACKWARD)
    job.failed = True
    job.run(9)
    assert job.ended == []
    job.run(3)
    assert sorted(job.ended) == [0, 1]


def test_frozen_rank_is_killed_at_once_and_a_rank_that_has_left_is_not() -> None:
    job = Job()
    job.ranks[0].stopped = True
    job.ranks[1].go(BACKWARD, left=True)
    job.failed = True
    job.run(1)
    assert job.ended == [0]
    job.run(60)
    assert job.ended == [0]


def test_rank_that_has_left_answers_a_call_and_is_not_killed() -> None:
    job = Job()
    job.ranks[1].go(DATA)
    job.ranks[0].go(BACKWARD)
    job.run(1)
    job.ranks[0].at = job.ranks[0].at._replace(left=True)
    job.alarm = True
    job.run(1)
    assert [found.ranks for _, found in job.told] == [[1]]
    assert job.ended == [1]
