"""The first node, as others find it before torchrun does: its port, whether that is a store of torch's, its clock."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from ddpforge.errors import EnvironmentProblem
from ddpforge.launchers.nodes import Nodes
from ddpforge.launchers.store import clock_at

__all__ = ["LOST", "meet", "refuse_held_ports"]

LOST = (
    "do all nodes have one clock (`date`), and does each reach the others' ports? `ddpforge doctor` under a launcher",
)
_MEETING = 600.0  # seconds until the first node must be there, as torchrun has it
_QUIET = 10.0  # seconds of waiting that need no explanation
_LOOK = 0.5
_ANSWER = 15.0  # seconds in which a store of torch's has answered
_APART = 3.0  # seconds by which clocks may differ without a word
_ROUNDS = 3


def refuse_held_ports(endpoint: str) -> None:
    """Raises EnvironmentProblem unless this machine, the first node, can take the endpoint's port and the next one.

    The first is of torch's store, the second of the watch over ranks.
    """
    host, _, text = endpoint.rpartition(":")
    for port in (int(text), int(text) + 1):
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
        except (OSError, OverflowError) as error:
            reason = str(error) if isinstance(error, OverflowError) else os.strerror(error.errno or 0)
            raise EnvironmentProblem(
                f"--rdzv-endpoint {endpoint}: port {port} of {socket.gethostname()} cannot be taken: {reason}",
                hints=[
                    f"another program may hold it: `ss -ltnp 'sport = :{port}'` names it",
                    f"--rdzv-endpoint {host}:PORT on all nodes; PORT and the next one must be free on the first",
                ],
            ) from error


def meet(endpoint: str, store: str | None, nodes: str) -> None:
    """Waits until torch's store answers at the endpoint, and compares this machine's clock with that of the `store`.

    Raises EnvironmentProblem where nothing listens there in ten minutes, or something else than a store; and for a
    clock so far off that an elastic run would take this node for dead.
    """
    _find(endpoint, store)
    _refuse_strangers(endpoint)
    if store and (found := _clock_of(store)):
        _compare(*found, Nodes.of(nodes, None, endpoint))


def _find(endpoint: str, store: str | None) -> None:
    """Returns when a program listens at the endpoint; raises EnvironmentProblem where the store's place is taken."""
    begin, said = time.monotonic(), False
    while True:
        try:
            socket.create_connection(_place(endpoint), timeout=5.0).close()
            return
        except OSError as error:
            waited, reason = time.monotonic() - begin, error.strerror or str(error)
            if waited > _MEETING:
                raise EnvironmentProblem(
                    f"there was no first node at {endpoint} in {_MEETING / 60:.0f} minutes: {reason}",
                    hints=["is the launch on that machine running, and the port open between the machines?"],
                ) from error
            if waited > _QUIET and not said:
                said = True
                if store and _answers(store) and not clock_at(store):  # for which the first node has refused to start
                    raise _held(store, endpoint) from error
                print(f"waiting for the first node at {endpoint} ({reason})", file=sys.stderr, flush=True)
        time.sleep(_LOOK)


def _refuse_strangers(endpoint: str) -> None:
    """Raises EnvironmentProblem unless what listens at the endpoint is a store of torch's."""
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


def _held(place: str, endpoint: str) -> EnvironmentProblem:
    host, port = _place(place)
    return EnvironmentProblem(
        f"--rdzv-endpoint {endpoint}: another program holds port {port} of {host}, "
        "which does not answer as a launch does",
        hints=[f"--rdzv-endpoint {host}:PORT on all nodes; PORT and the next one must be free on {host}"],
    )


def _answers(place: str) -> bool:
    with suppress(OSError):
        socket.create_connection(_place(place), timeout=5.0).close()
        return True
    return False


@contextmanager
def _deaf_to_cpp() -> Iterator[None]:
    """Drops what is written to stderr inside: C++ writes pages about a connection that fails."""
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
    """Returns what `action` returns; False if it has not within `limit` seconds. Raises what it raises."""
    found: list[bool] = []
    errors: list[Exception] = []

    def act() -> None:
        try:
            found.append(action())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=act, name="handshake", daemon=True)  # torch waits without an end for some answers
    thread.start()
    thread.join(limit)
    if errors:
        raise errors[0]
    return bool(found and found[0])


def _clock_of(store: str) -> tuple[str, float] | None:
    """Returns the name of the store's machine, and by how many seconds its clock is ahead of this one's."""
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
    """Prints a warning for clocks that differ; raises EnvironmentProblem where an elastic run cannot do with it."""
    if abs(ahead) <= _APART:
        return
    here = socket.gethostname()
    said = f"the clock of {host} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {here}"
    mend = "set both by chrony or ntpd"
    if not nodes.is_fixed and abs(ahead) > nodes.tolerance - _APART:
        raise EnvironmentProblem(f"{said}: the nodes would take each other for dead", hints=[mend])
    print(f"warning: {said}: {mend}", file=sys.stderr, flush=True)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
