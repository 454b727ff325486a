"""Chooses the network interface for gloo if this machine's name resolves only to a loopback address."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from ddpforge.errors import SetupError

__all__ = ["GLOO", "addresses_of", "best_interface", "choose_interface", "interfaces", "is_only_here"]

GLOO = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: nothing is sent, the kernel only returns the route


def choose_interface(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets GLOO_SOCKET_IFNAME if ranks on other machines could not reach this machine by its own name.

    Raises SetupError if no interface can be chosen, or if the variable names an interface that does not exist.
    """
    # Gloo publishes the address of this machine's name. With 127.0.1.1 for it in /etc/hosts (Debian), the others
    # would try to connect to themselves.
    if not _has_others(environ):
        return
    if wanted := environ.get(GLOO):
        _reject_absent(wanted)
    elif is_only_here(found := addresses_of(name := socket.gethostname())):
        if (interface := best_interface(environ.get("MASTER_ADDR", ""))) is None:
            raise SetupError(
                f"{name} has the address {', '.join(found) or 'unknown'} here, which other machines cannot reach",
                hints=[f"export {GLOO}=…: {', '.join(interfaces()) or 'but no interface is up'}", "or fix /etc/hosts"],
            )
        environ[GLOO] = interface


def best_interface(other: str) -> str | None:
    """Returns the interface of the route to `other`; else the only interface, or that of the default route."""
    return _towards(other) or _only_one() or _towards(_ELSEWHERE)


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of every interface that is up, by its name; without the loopback."""
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
    """Returns the addresses that a name resolves to here; empty if it does not resolve."""
    with suppress(OSError):
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})
    return []


def is_only_here(addresses: list[str]) -> bool:
    """True if all addresses are loopback addresses, which other machines cannot reach."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _has_others(environ: Mapping[str, str]) -> bool:
    """True if a launcher has announced ranks on other machines."""
    size = environ.get("WORLD_SIZE", "1")
    return size != environ.get("LOCAL_WORLD_SIZE", size)


def _reject_absent(wanted: str) -> None:
    there = {name for _, name in socket.if_nameindex()}
    if absent := [name for name in wanted.split(",") if name not in there]:
        raise SetupError(
            f"{GLOO}={wanted}, but {socket.gethostname()} has no interface {', '.join(absent)}",
            hints=[f"use one of {', '.join(interfaces())}", "if machines differ, set it on each machine"],
        )


def _towards(host: str) -> str | None:
    """Returns the interface of the route to `host`; None if there is none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address = probe.getsockname()[0]
        return next((name for name, addresses in interfaces().items() if address in addresses), None)
    return None


def _only_one() -> str | None:
    names = list(interfaces())
    return names[0] if len(names) == 1 else None
