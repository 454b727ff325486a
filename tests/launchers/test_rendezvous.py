"""Rendezvous of nodes: the program at the endpoint, and the difference of the nodes' clocks."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from ddpforge.errors import SetupError
from ddpforge.launchers import rendezvous, store
from ddpforge.launchers.rendezvous import check_loopback, meet, reject_held_ports, saying_after


@contextmanager
def stranger(answer: bytes = b"") -> Iterator[int]:
    """Runs another program that accepts connections; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            held = []
            while True:
                try:
                    held.append(server.accept()[0])
                    if answer:
                        held[-1].recv(64)
                        held.pop().sendall(answer)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """Waits for abandoned handshakes: a process must not end while one of them runs C++ code."""
    yield
    for thread in threading.enumerate():
        if thread.name == "handshake":
            thread.join(30)


def pair() -> int:
    """Returns a free port whose next port is free, too, below the range of ephemeral ports."""
    for port in range(12_000, 20_000, 2):
        try:
            reject_held_ports(f"node01:{port}")
        except SetupError:
            continue
        return port
    raise AssertionError("no two ports are free")


def test_a_machine_without_loopback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_loopback()

    def refused(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refused)
    with pytest.raises(SetupError, match=r"cannot connect to itself at 127\.0\.0\.1: Network is unreachable") as caught:
        check_loopback()
    assert "ip link set lo up" in caught.value.hints[0]


def test_words_are_printed_only_if_a_block_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    with saying_after(600.0, "waiting"):
        pass
    assert capsys.readouterr().err == ""
    gate = threading.Event()
    with saying_after(0.0, "waiting for node 2"):
        while "waiting" not in capsys.readouterr().err:
            gate.wait(0.01)


@pytest.mark.parametrize("later", [0, 1])
def test_first_node_rejects_an_endpoint_whose_port_or_next_port_is_in_use(later: int) -> None:
    port = pair()
    held = port + later
    with (
        socket.create_server(("127.0.0.1", held)),
        pytest.raises(SetupError, match=f"cannot listen on port {held} of .*: Address already in use"),
    ):
        reject_held_ports(f"node01:{port}")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"])
def test_node_reports_another_program_at_the_endpoint(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER", 1.0)
    with stranger(answer) as held, pytest.raises(SetupError, match=f"the program on port {held}"):
        meet(f"127.0.0.1:{held}", None, "2")


def test_node_does_not_wait_for_a_launch_whose_second_port_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports the reason on the node that waits, because the first node has refused to start."""
    monkeypatch.setattr(rendezvous, "QUIET", 0.0)
    monkeypatch.setattr(rendezvous, "_LOOK", 0.01)
    with stranger() as free:
        pass
    with stranger(b"no\n") as held, pytest.raises(SetupError, match=f"the program on port {held}"):
        meet(f"127.0.0.1:{free}", f"127.0.0.1:{held}", "2")


def test_endpoint_without_a_listener_raises_an_error_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_MEETING", 0.1)
    monkeypatch.setattr(rendezvous, "QUIET", 0.0)
    monkeypatch.setattr(rendezvous, "_LOOK", 0.15)
    with stranger() as held:
        pass
    with pytest.raises(SetupError, match=f"the first node did not answer at 127.0.0.1:{held}"):
        meet(f"127.0.0.1:{held}", None, "2")
    assert capsys.readouterr().err == f"waiting for the first node at 127.0.0.1:{held} (Connection refused)\n"


@contextmanager
def first_node() -> Iterator[tuple[str, str]]:
    """Yields the endpoint, which has a store of torch, and the address of the launcher's store."""
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with store.serving() as port:
        yield f"127.0.0.1:{torchs.port}", f"127.0.0.1:{port}"


def test_clock_difference_is_reported_with_both_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with first_node() as (endpoint, place):
        meet(endpoint, place, "2")
        meet(endpoint, None, "2")  # as behind a service that forwards only one port
        assert capsys.readouterr().err == ""
        now = time.time
        monkeypatch.setattr(store, "time", type("Time", (), {"time": staticmethod(lambda: now() + 20)}))
        monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: "nodea")
        meet(endpoint, place, "2")
        said = capsys.readouterr().err
        assert (
            said
            == "warning: the clock of nodea is 20.0 s ahead of that of nodea: synchronize both with chrony or ntpd\n"
        )
        with pytest.raises(SetupError, match=r"20.0 s ahead of .* would treat each other as dead"):
            meet(endpoint, place, "1:2")  # elastic: the run continues without a node that seems dead
