"""Checks before torchrun's rendezvous: that the first node's ports are free, its store answers, and clocks agree."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from ddpforge.errors import SetupError
from ddpforge.launchers.nodes import Nodes
from ddpforge.launchers.store import clock_at

__all__ = ["LOST", "QUIET", "check_loopback", "meet", "reject_held_ports", "saying_after"]

LOST = (
    "check that the nodes' clocks agree (`date`) and that their ports are open to each other: run `ddpforge doctor` "
    "under a launcher",
)
_MEETING = 600.0  # seconds until the first node must answer: torchrun's timeout
QUIET = 10.0  # seconds; a longer wait is reported
_LOOK = 0.5
_ANSWER = 15.0  # seconds until a store of torch must answer
_APART = 3.0  # seconds; a larger difference between clocks is reported
_ROUNDS = 3


def reject_held_ports(endpoint: str) -> None:
    """Raises SetupError unless the endpoint's port and the next one are free on this machine, the first node.

    torch's store uses the first port, the watchdogs' store uses the second.
    """
    host, _, text = endpoint.rpartition(":")
    for port in (int(text), int(text) + 1):
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
        except (OSError, OverflowError) as error:
            reason = str(error) if isinstance(error, OverflowError) else os.strerror(error.errno or 0)
            raise SetupError(
                f"--rdzv-endpoint {endpoint}: cannot listen on port {port} of {socket.gethostname()}: {reason}",
                hints=[
                    f"if another program uses it, find it with `ss -ltnp 'sport = :{port}'`",
                    f"set --rdzv-endpoint {host}:PORT on all nodes; "
                    "PORT and the next port must be free on the first node",
                ],
            ) from error


def check_loopback() -> None:
    """Raises SetupError if this machine cannot connect to itself: its ranks would never find each other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            socket.create_connection(server.getsockname(), timeout=_ANSWER).close()
        except OSError as error:
            raise SetupError(
                f"this machine cannot connect to itself at 127.0.0.1: {error.strerror or error}",
                hints=["bring its loopback interface up: ip link set lo up", "or train in one process: ddpforge run"],
            ) from error


@contextmanager
def saying_after(seconds: float, words: str) -> Iterator[None]:
    """Prints `words` once if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, print, [words], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def meet(endpoint: str, store: str | None, nodes: str) -> None:
    """Waits until torch's store answers at `endpoint`, and compares this machine's clock with that of `store`.

    `store` is the address of the watchdogs' store, `nodes` is the value of `--nnodes`. Raises SetupError if
    nothing listens at the endpoint within ten minutes, if another program does, or if the clock is so far off that the
    nodes of an elastic run would treat each other as dead.
    """
    _find(endpoint, store)
    _reject_strangers(endpoint)
    if store and (found := _clock_of(store)):
        _compare(*found, Nodes.of(nodes, None, endpoint))


def _find(endpoint: str, store: str | None) -> None:
    """Waits until a program listens at the endpoint. Raises SetupError if none does, or if a port is taken."""
    begin, said = time.monotonic(), False
    while True:
        try:
            socket.create_connection(_place(endpoint), timeout=5.0).close()
            return
        except OSError as error:
            waited, reason = time.monotonic() - begin, error.strerror or str(error)
            if waited > _MEETING:
                raise SetupError(
                    f"the first node did not answer at {endpoint} within {_MEETING / 60:.0f} minutes: {reason}",
                    hints=["check that the launch on that machine is running, and that the port is open"],
                ) from error
            if waited > QUIET and not said:
                said = True
                # Another program has the store's port. The first node did not start for this reason.
                if store and _answers(store) and not clock_at(store):
                    raise _held(store, endpoint) from error
                print(f"waiting for the first node at {endpoint} ({reason})", file=sys.stderr, flush=True)
        time.sleep(_LOOK)


def _reject_strangers(endpoint: str) -> None:
    """Raises SetupError unless torch's store listens at the endpoint."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = _place(endpoint)
    limit = timedelta(seconds=_ANSWER)

    def talk() -> bool:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        return store.num_keys() >= 0

    with _deaf_to_cpp(), suppress(RuntimeError):
        if _within(_ANSWER, talk):
            return
    raise _held(endpoint, endpoint)


def _held(place: str, endpoint: str) -> SetupError:
    host, port = _place(place)
    return SetupError(
        f"--rdzv-endpoint {endpoint}: the program on port {port} of {host} is not a launch of ddpforge",
        hints=[f"set --rdzv-endpoint {host}:PORT on all nodes; PORT and the next port must be free on {host}"],
    )


def _answers(place: str) -> bool:
    with suppress(OSError):
        socket.create_connection(_place(place), timeout=5.0).close()
        return True
    return False


@contextmanager
def _deaf_to_cpp() -> Iterator[None]:
    """Discards output to stderr inside: torch's C++ code writes pages about a failed connection."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _within(limit: float, action: Callable[[], bool]) -> bool:
    """Returns the result of `action`, or False if it takes longer than `limit` seconds. Raises its exceptions."""
    found: list[bool] = []
    errors: list[Exception] = []

    def act() -> None:
        try:
            found.append(action())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=act, name="handshake", daemon=True)  # torch waits for some answers without limit
    thread.start()
    thread.join(limit)
    if errors:
        raise errors[0]
    return bool(found and found[0])


def _clock_of(store: str) -> tuple[str, float] | None:
    """Returns the name of the store's machine and the seconds its clock is ahead; None if it does not answer."""
    best: tuple[float, str, float] | None = None
    for _ in range(_ROUNDS):
        sent = time.time()
        answer = clock_at(store)
        received = time.time()
        if answer is not None:
            found = received - sent, str(answer["host"]), float(answer["clock"]) - (sent + received) / 2
            best = min(best or found, found)
    return best and best[1:]


def _compare(host: str, ahead: float, nodes: Nodes) -> None:
    """Prints a warning if clocks differ. Raises SetupError if they differ too much for an elastic run."""
    if abs(ahead) <= _APART:
        return
    here = socket.gethostname()
    said = f"the clock of {host} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {here}"
    mend = "synchronize both with chrony or ntpd"
    if not nodes.is_fixed and abs(ahead) > nodes.tolerance - _APART:
        raise SetupError(f"{said}: the nodes would treat each other as dead", hints=[mend])
    print(f"warning: {said}: {mend}", file=sys.stderr, flush=True)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
