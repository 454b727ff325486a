"""The network interface by which other machines reach this one, where its own name leads nowhere but to itself."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from ddpforge.errors import EnvironmentProblem

__all__ = ["GLOO", "addresses_of", "best_interface", "choose_interface", "interfaces", "is_only_here"]

GLOO = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: nothing is sent, the kernel only says by which way it would be


def choose_interface(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sees to it that gloo tells other machines an address by which they find this one.

    Gloo asks for the addresses of this machine's own name, and Debian's /etc/hosts says 127.0.1.1: without another word
    the others would wait for it at their own. Raises EnvironmentProblem where no interface can be chosen.
    """
    if not _has_others(environ):
        return
    if wanted := environ.get(GLOO):
        _refuse_absent(wanted)
    elif is_only_here(found := addresses_of(name := socket.gethostname())):
        if (interface := best_interface(environ.get("MASTER_ADDR", ""))) is None:
            raise EnvironmentProblem(
                f"{name} is {', '.join(found) or 'unknown'} to itself, where gloo would tell other machines to find it",
                hints=[f"export {GLOO}=…: {', '.join(interfaces()) or 'but no interface is up'}", "or mend /etc/hosts"],
            )
        environ[GLOO] = interface


def best_interface(other: str) -> str | None:
    """The interface by which this machine reaches another; else its only one, or that of its default route."""
    return _towards(other) or _only_one() or _towards(_ELSEWHERE)


def interfaces() -> dict[str, list[str]]:
    """The addresses of every interface that is up, by its name; without the loopback."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    internet = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [each.address.partition("%")[0] for each in addresses if each.family in internet]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }
    return {name: addresses for name, addresses in found.items() if addresses and not is_only_here(addresses)}


def addresses_of(host: str) -> list[str]:
    """The addresses that this machine finds for a name; none where it knows no such name."""
    with suppress(OSError):
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})
    return []


def is_only_here(addresses: list[str]) -> bool:
    """True if no other machine can find this one at any of these."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _has_others(environ: Mapping[str, str]) -> bool:
    """True if a launcher has announced ranks on other machines."""
    size = environ.get("WORLD_SIZE", "1")
    return size != environ.get("LOCAL_WORLD_SIZE", size)


def _refuse_absent(wanted: str) -> None:
    there = {name for _, name in socket.if_nameindex()}
    if absent := [name for name in wanted.split(",") if name not in there]:
        raise EnvironmentProblem(
            f"{GLOO}={wanted}, and {socket.gethostname()} has no {', '.join(absent)}",
            hints=[f"one of {', '.join(interfaces())}", "machines that differ need it set on each"],
        )


def _towards(host: str) -> str | None:
    """The interface by which this machine reaches another."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address = probe.getsockname()[0]
        return next((name for name, addresses in interfaces().items() if address in addresses), None)
    return None


def _only_one() -> str | None:
    names = list(interfaces())
    return names[0] if len(names) == 1 else None
