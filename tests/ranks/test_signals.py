"""Stop requests: handled from the start of the process, and repeated signals count as one request."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support.doubles import Clock

from ddpforge.local_world import VERDICT
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
def test_every_stop_signal_is_recorded(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequests() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_repeated_signal_within_seconds_is_one_request_and_a_later_one_interrupts(
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


def test_second_ctrl_c_interrupts_and_signals_of_another_kind_do_not() -> None:
    with StopRequests():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_process_that_hangs_at_startup_ends_on_a_stop_request() -> None:
    """Works also if the main thread waits and runs no handler."""
    left = threading.Event()
    with StopRequests() as stop, stopping_early(left.set, patience=0.01):
        assert not stop_requested()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert left.wait(60)
        assert stop.requested
        assert stop_requested()
    assert signal.set_wakeup_fd(-1) == -1


def test_process_does_not_end_early_once_training_begins() -> None:
    left = threading.Event()
    with StopRequests() as stop, stopping_early(left.set, patience=0.0):
        training_begins()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert not left.wait(0.1)


def test_signal_to_a_forked_process_does_not_stop_its_parent() -> None:
    left = threading.Event()
    with StopRequests(), stopping_early(left.set, patience=0.0):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        os.waitpid(child, 0)
        assert not left.wait(0.1)


def test_stop_request_ends_the_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.ranks.signals._NO_DATA", 0.05)
    with StopRequests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.2)  # other waits are not interrupted
        with pytest.raises(NoData), waiting_for_data:
            threading.Event().wait(60)
        assert stop.requested


def test_stop_request_does_not_end_the_wait_for_data_of_one_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.ranks.signals._NO_DATA", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with StopRequests(), waiting_for_data:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.2)


def test_signal_blocked_while_python_starts_is_handled() -> None:
    """Slurm scripts of ddpforge block the signal for their tasks with `env --block-signal`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # threads of libraries in this process do not block it
    with StopRequests() as stop:
        assert stop.requested


def test_signal_during_a_write_to_stderr_is_logged_after_the_write() -> None:
    """Python rejects a nested write: `reentrant call inside <_io.BufferedWriter name='<stderr>'>`."""
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


def test_signals_after_training_do_not_interrupt() -> None:
    with StopRequests() as stop:
        stop.over()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested


def test_stop_request_during_startup_is_passed_to_the_trainer() -> None:
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
def test_sighup_under_nohup_is_not_a_stop_request() -> None:
    with StopRequests() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_stop_request_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddpforge"), StopRequests():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert [record.message for record in caplog.records] == ["SIGTERM: finishing this step, then saving a checkpoint"]


def test_log_names_no_signal_under_a_launcher(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERDICT, "some file")
    with caplog.at_level(logging.INFO, "ddpforge"), StopRequests():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [record.message for record in caplog.records] == [
        "stop requested: finishing this step, then saving a checkpoint"
    ]
