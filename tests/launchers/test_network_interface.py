"""Network interface of gloo: hosts reach each other also with Debian's /etc/hosts."""

import os
import socket

import pytest
import torch
from support.forked import set_up
from support.hosts import Hosts

from ddpforge.errors import SetupError
from ddpforge.launchers import network_interface
from ddpforge.launchers.network_interface import GLOO, choose_interface
from ddpforge.strategies.ddp import DDP

FAR = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.7"}


def test_hosts_whose_name_resolves_to_loopback_reach_each_other(hosts: Hosts) -> None:
    """Without the choice of an interface this never ends: each host waits for the other at 127.0.1.1."""
    for host in hosts.values():
        host.resolves_itself_to("127.0.1.1")

    def talk(rank: int) -> tuple[str | None, float]:
        world = set_up(DDP(), collective_timeout="20s")
        return os.environ.get(GLOO), world.global_ranks.all_reduce_sum(torch.tensor(1.0 + rank)).item()

    assert hosts.in_ranks("ab", talk) == [("eth0", 3.0)] * 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Fakes a host x whose name resolves to loopback, without routes; a test adds its interfaces."""
    there: dict[str, list[str]] = {}
    monkeypatch.setattr(socket, "gethostname", lambda: "x")
    monkeypatch.setattr(network_interface, "addresses_of", lambda _: ["127.0.1.1"])
    monkeypatch.setattr(network_interface, "interfaces", lambda: there)
    monkeypatch.setattr(network_interface, "_towards", lambda _: None)
    return there


def test_the_only_interface_is_chosen(machine: dict[str, list[str]]) -> None:
    machine["ib0"] = ["10.0.0.1"]
    choose_interface(environ := dict(FAR))
    assert environ[GLOO] == "ib0"


def test_several_interfaces_are_an_error_with_a_hint(machine: dict[str, list[str]]) -> None:
    machine.update(eth0=["10.0.0.1"], eth1=["10.1.0.1"])
    with pytest.raises(SetupError, match=r"x has the address 127\.0\.1\.1 here, which other") as found:
        choose_interface(dict(FAR))
    assert found.value.hints[0] == f"export {GLOO}=…: eth0, eth1"


def test_interface_set_by_the_user_must_exist() -> None:
    with pytest.raises(SetupError, match=f"{GLOO}=nope0, but .* has no interface nope0"):
        choose_interface({**FAR, GLOO: "nope0"})
    choose_interface(environ := {**FAR, GLOO: "lo"})
    assert environ[GLOO] == "lo"


def test_no_interface_is_set_on_one_host(machine: dict[str, list[str]]) -> None:
    choose_interface(environ := {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert GLOO not in environ
