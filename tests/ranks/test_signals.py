"""Requests to stop: heard from the start, and one request however often it is sent."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support.doubles import Clock

from ddpforge.launchers.exit_record import VERDICT
from ddpforge.ranks.signals import (
    NoData,
    StopRequests,
    stop_requested,
    stopping_early,
    training_begins,
    waiting_for_data,
)

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@pytest.mark.parametrize("number", ALL)
def test_every_request_is_noted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequests() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_scheduler_and_a_launcher_may_both_pass_on_one_request_and_a_second_one_ends_at_once(
    number: signal.Signals,
) -> None:
    clock = Clock()
    with StopRequests(clock) as stop:
        os.kill(os.getpid(), number)
        clock.now += 4
        os.kill(os.getpid(), number)
        assert stop.requested
        clock.now += 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_a_second_ctrl_c_ends_at_once_and_another_kind_is_another_first() -> None:
    with StopRequests():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_process_that_hangs_while_it_starts_is_left_when_it_is_asked_to_stop() -> None:
    """Also where the main thread waits and runs no handler."""
    left = threading.Event()
    with StopRequests() as stop, stopping_early(left.set, patience=0.01):
        assert not stop_requested()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert left.wait(60)
        assert stop.requested
        assert stop_requested()
    assert signal.set_wakeup_fd(-1) == -1


def test_once_training_begins_a_request_to_stop_waits_for_a_checkpoint() -> None:
    left = threading.Event()
    with StopRequests() as stop, stopping_early(left.set, patience=0.0):
        training_begins()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert not left.wait(0.1)


def test_a_forked_process_that_is_signalled_does_not_stop_its_parent() -> None:
    left = threading.Event()
    with StopRequests(), stopping_early(left.set, patience=0.0):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        os.waitpid(child, 0)
        assert not left.wait(0.1)


def test_a_request_to_stop_ends_the_wait_for_data_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.ranks.signals._NO_DATA", 0.05)
    with StopRequests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.2)  # anything else is not interrupted
        with pytest.raises(NoData), waiting_for_data:
            threading.Event().wait(60)
        assert stop.requested


def test_of_several_ranks_none_gives_up_waiting_for_data_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.ranks.signals._NO_DATA", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with StopRequests(), waiting_for_data:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.2)


def test_a_request_that_was_held_back_while_python_started_is_heard() -> None:
    """As a job's script has it done for its tasks, by `env --block-signal`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # threads of libraries here do not hold it back
    with StopRequests() as stop:
        assert stop.requested


def test_a_request_within_a_write_to_the_same_stream_is_heard_and_told_after_it() -> None:
    """Python refuses the second write: `reentrant call inside <_io.BufferedWriter name='<stderr>'>`."""
    program = """
import io, logging, os, signal, sys
from ddpforge.ranks.signals import StopRequests

class Slow(io.RawIOBase):
    def writable(self):
        return True
    def write(self, data):
        if bytes(data).startswith(b"a row"):
            os.kill(os.getpid(), signal.SIGTERM)
        return os.write(1, data)

sys.stderr = io.TextIOWrapper(io.BufferedWriter(Slow()), write_through=True)
log = logging.getLogger("ddpforge")
log.addHandler(logging.StreamHandler())
log.setLevel(logging.INFO)
with StopRequests() as stop:
    sys.stderr.write("a row\\n")
    sys.stderr.flush()
    assert stop.requested
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a row\nSIGTERM: finishing this step, then saving a checkpoint\n"


def test_nothing_interrupts_what_comes_after_training() -> None:
    with StopRequests() as stop:
        stop.over()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested


def test_what_was_asked_while_the_process_started_is_known_to_the_trainer() -> None:
    with StopRequests():
        os.kill(os.getpid(), signal.SIGUSR1)
        with StopRequests() as trainers:
            assert trainers.requested
        with StopRequests() as another:
            assert another.requested
    with StopRequests() as later:
        assert not later.requested


@pytest.fixture
def _nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_nohup")
def test_under_nohup_a_terminal_that_closes_is_no_request() -> None:
    with StopRequests() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddpforge"), StopRequests():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert [record.message for record in caplog.records] == ["SIGTERM: finishing this step, then saving a checkpoint"]


def test_under_a_launcher_that_passes_on_whatever_was_pressed_no_signal_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERDICT, "some file")
    with caplog.at_level(logging.INFO, "ddpforge"), StopRequests():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [record.message for record in caplog.records] == [
        "stop requested: finishing this step, then saving a checkpoint"
    ]
