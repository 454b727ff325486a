"""Machines of a run: their number, the number of this one, and the endpoint of their rendezvous."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ddpforge.errors import UsageError

__all__ = ["ALONE", "ENDPOINT", "NODES", "Nodes", "announced", "fixed_number", "local_address"]

NODES = "DDPFORGE_NODES"  # the environment variable that passes `--nnodes` to the ranks
ENDPOINT = "DDPFORGE_ENDPOINT"  # the environment variable with the first node's endpoint, on the other nodes
# A single machine uses 127.0.0.1: its own host name may not resolve.
ALONE = ("--standalone", "--local-addr=127.0.0.1")
PORT = 29500  # torchrun's default

# torch's rendezvous compares heartbeats by the wall clocks of two nodes. With a fixed number of nodes, all are needed:
# the limit is long, so that clocks may differ. With a variable number, the others wait this long for a dead node.
_FIXED = {"keep_alive_interval": 5, "keep_alive_max_attempt": 9}
_VARIES = {"keep_alive_interval": 2, "keep_alive_max_attempt": 5, "last_call_timeout": 10}
_RANGE = re.compile(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Nodes:
    """From `fewest` to `most` machines with a rendezvous at `endpoint`, HOST:PORT; `rank` is this one's, if known."""

    fewest: int = 1
    most: int = 1
    rank: int | None = None
    endpoint: str | None = None

    @classmethod
    def of(cls, number: str | int | None, rank: str | int | None, endpoint: str | None) -> Nodes:
        """Parses the options --nnodes, --node-rank and --endpoint. Raises UsageError if they are invalid."""
        found = _RANGE.fullmatch(str(number or 1))
        fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 0 < fewest <= most:
            raise UsageError(f"--nnodes {number} is not a number of nodes", hints=["e.g. 2, or 1:3 for one to three"])
        rank = None if rank is None else int(rank)
        if rank is not None and not 0 <= rank < most:
            hints = [f"expected 0 to {most - 1}"] if most > 1 else ["set --nnodes N and --rdzv-endpoint HOST:PORT, too"]
            raise UsageError(f"--node-rank {rank}: --nnodes is {most}", hints=hints)
        if most > 1 and endpoint is None:
            raise UsageError(
                f"{most} nodes need an endpoint for their rendezvous, the same on each",
                hints=["set --rdzv-endpoint HOST: the name or address of the first node that the others can reach"],
            )
        return cls(fewest, most, rank, None if endpoint is None or most == 1 else _with_port(endpoint))

    @cached_property  # computed before anything starts: afterwards this launch itself answers at the endpoint
    def is_first(self) -> bool:
        """True for the launch that hosts the rendezvous: the first one on the endpoint's machine."""
        if self.endpoint is None or self.rank is not None:
            return not self.rank
        host, _, port = self.endpoint.rpartition(":")
        return is_mine(host) and not _answers(host, int(port))

    @property
    def is_fixed(self) -> bool:
        """True if training needs all of the nodes."""
        return self.fewest == self.most

    @property
    def tolerance(self) -> int:
        """Returns the allowed difference of clocks in seconds. Above it, torch's rendezvous treats nodes as dead."""
        found = _FIXED if self.is_fixed else _VARIES
        return found["keep_alive_interval"] * (found["keep_alive_max_attempt"] - 1)

    def variables(self) -> dict[str, str]:
        """Returns environment variables for this machine's launcher and ranks: the number of nodes, the endpoint."""
        if self.endpoint is None:
            return {}
        number = str(self.most) if self.is_fixed else f"{self.fewest}:{self.most}"
        return {NODES: number} | ({} if self.is_first else {ENDPOINT: self.endpoint})

    @property
    def store(self) -> str | None:
        """Returns the address of the watchdogs' store, the port after the endpoint's; None without an endpoint."""
        host, _, port = (self.endpoint or "").rpartition(":")
        return f"{host}:{int(port) + 1}" if port else None

    def flags(self, run_id: str) -> list[str]:
        """Returns torchrun's flags for the rendezvous `run_id`."""
        if self.endpoint is None:
            return [*ALONE]
        number = str(self.most) if self.is_fixed else f"{self.fewest}:{self.most}"
        # Set `is_host`: torchrun compares host names, and finds no host if /etc/hosts has 127.0.1.1 for this machine.
        settings = {"is_host": int(self.is_first), **(_FIXED if self.is_fixed else _VARIES)}
        # Set the address: torchrun publishes this machine's host name, which others may not resolve.
        address = local_address(self.endpoint, is_first=self.is_first)
        return [
            *(f"--nnodes={number}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={run_id}"),
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in settings.items())}",
            *([f"--local-addr={address}"] if address else []),
        ]

    def worlds(self, nproc: int) -> Sequence[int]:
        """Returns all possible world sizes with `nproc` ranks on each machine."""
        return [nodes * nproc for nodes in range(self.fewest, self.most + 1)]


def fixed_number(words: Sequence[str]) -> int | None:
    """Returns the number of nodes in torchrun's flags; None if there is none, or if it may change."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--nnodes":
            found = _RANGE.fullmatch(value if equals else following)
            return int(found[1]) if found and found[2] in (None, found[1]) else None
    return None


def local_address(endpoint: str, *, is_first: bool) -> str | None:
    """Returns the address of this machine on its route to the endpoint, at which others reach it; None without a route.

    On the first node the endpoint's name may resolve to 127.0.1.1. Then this returns the name, for others to resolve.
    """
    host, _, port = endpoint.rpartition(":")
    name = host.strip("[]")
    try:
        family, kind, _, _, place = socket.getaddrinfo(name, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # nothing is sent: the kernel chooses the address
            address = str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, ValueError):
        return None
    return name if is_first and address.startswith("127.") else address


def announced(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns options of `ddpforge launch` from the environment variables of SkyPilot and torchrun (Kubeflow).

    torchrun itself reads PET_NNODES and so on, but flags override them, and `ddpforge launch` always passes flags.
    """
    found = {
        "nproc": environ.get("SKYPILOT_NUM_GPUS_PER_NODE"),
        "nnodes": environ.get("SKYPILOT_NUM_NODES"),
        "node_rank": environ.get("SKYPILOT_NODE_RANK"),
        "endpoint": next(iter(environ.get("SKYPILOT_NODE_IPS", "").split()), None),
        "run_id": environ.get("SKYPILOT_TASK_ID"),
    }
    address, port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT", str(PORT))
    pet = {
        "nproc": environ.get("PET_NPROC_PER_NODE"),
        "nnodes": environ.get("PET_NNODES"),
        "node_rank": environ.get("PET_NODE_RANK"),
        "endpoint": environ.get("PET_RDZV_ENDPOINT") or (f"{address}:{port}" if address else None),
        "run_id": environ.get("PET_RDZV_ID"),
        "max_restarts": environ.get("PET_MAX_RESTARTS"),
    }
    if not environ.get("PET_NPROC_PER_NODE", "").isdecimal():
        del pet["nproc"]  # "auto" or "gpu": the default of `ddpforge launch`
    if found["nproc"] == "0":
        found["nproc"] = None  # a machine without GPUs
    return {key: value for key, value in [*pet.items(), *found.items()] if value}


def default_id(name: str) -> str:
    """Returns a rendezvous id for the run `name`, so that two runs at one endpoint have different ids."""
    try:
        return f"{name}-{getpass.getuser()}"
    except (KeyError, OSError):  # no such user, as in some containers
        return name


def is_mine(host: str) -> bool:
    """True if `host` is a name or an address of this machine. Raises UsageError if it does not resolve."""
    import psutil

    name = host.strip("[]")
    if name in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except OSError as error:
        raise UsageError(
            f"--rdzv-endpoint {host}: this machine cannot resolve that name ({error.strerror or error})",
            hints=["use an address that the other machines can reach, or set --node-rank: 0 on that machine"],
        ) from error
    mine = {one.address.partition("%")[0] for each in psutil.net_if_addrs().values() for one in each}
    return not addresses.isdisjoint(mine) or any(address.startswith("127.") for address in addresses)


def _answers(host: str, port: int) -> bool:
    """True if another launch on this machine already listens there; it hosts the rendezvous."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _with_port(endpoint: str) -> str:
    bare = (endpoint.startswith("[") and endpoint.endswith("]")) or ":" not in endpoint
    host, port = (endpoint, str(PORT)) if bare else endpoint.rsplit(":", 1)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16 or (":" in host and not host.startswith("[")):
        raise UsageError(
            f"--rdzv-endpoint {endpoint} is not an address",
            hints=["expected HOST or HOST:PORT; an IPv6 address in brackets"],
        )
    return f"{host}:{port}"
