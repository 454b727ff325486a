"""Several nodes: the flags of torchrun, and the errors before anything starts."""

import socket
from collections.abc import Mapping

import psutil
import pytest

from ddpforge.errors import UsageError
from ddpforge.launchers import nodes
from ddpforge.launchers.nodes import Nodes, announced, is_mine


def test_one_node_runs_standalone() -> None:
    assert Nodes.of(None, None, None).flags("id") == ["--standalone", "--local-addr=127.0.0.1"]
    assert Nodes.of("1", 0, "node01").flags("id") == ["--standalone", "--local-addr=127.0.0.1"]


def test_flags_of_torchrun_for_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with a fixed number of nodes wait long for a heartbeat, as clocks differ; elastic runs wait briefly."""
    monkeypatch.setattr(nodes, "local_address", lambda *_, **__: "10.0.0.7")
    assert Nodes.of("2", 1, "node01").flags("tiny-me") == [
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node01:29500", "--rdzv-id=tiny-me"),
        "--rdzv-conf=is_host=0,keep_alive_interval=5,keep_alive_max_attempt=9",
        "--local-addr=10.0.0.7",
    ]
    assert Nodes.of("1:3", 0, "[fe80::1]:7").flags("x") == [
        *("--nnodes=1:3", "--rdzv-backend=c10d", "--rdzv-endpoint=[fe80::1]:7", "--rdzv-id=x"),
        "--rdzv-conf=is_host=1,keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=10",
        "--local-addr=10.0.0.7",
    ]


def test_clocks_of_nodes_may_differ_by_the_time_of_all_heartbeats_but_one() -> None:
    assert (Nodes.of("2", 1, "node01").tolerance, Nodes.of("1:3", 0, "node01").tolerance) == (5 * 8, 2 * 4)


def test_watchdog_store_is_at_the_port_after_the_endpoint() -> None:
    assert Nodes.of("2", 1, "node01").store == "node01:29501"
    assert Nodes.of("1:3", 0, "[fe80::1]:7").store == "[fe80::1]:8"
    assert Nodes.of("1", 0, "node01").store is Nodes.of(None, None, None).store is None


def test_environment_has_the_number_of_nodes_and_the_endpoint() -> None:
    assert Nodes.of(None, None, None).variables() == {}
    assert Nodes.of("2", 0, "node01").variables() == {"DDPFORGE_NODES": "2"}
    assert Nodes.of("2:2", 1, "node01:7").variables() == {"DDPFORGE_NODES": "2", "DDPFORGE_ENDPOINT": "node01:7"}
    assert Nodes.of("1:2", 0, "node01").variables() == {"DDPFORGE_NODES": "1:2"}


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("--nnodes=2 --rdzv-backend=c10d", 2),
        ("torchrun --nnodes 3", 3),
        ("--nnodes=2:2", 2),
        ("--nnodes=1:2", None),
        ("--rdzv-backend=c10d", None),
        ("--nnodes", None),
    ],
)
def test_a_fixed_number_of_nodes_is_read_from_flags_of_torchrun(words: str, number: int | None) -> None:
    assert nodes.fixed_number(words.split()) == number


def test_local_address_is_the_address_of_the_route_to_the_endpoint() -> None:
    assert nodes.local_address("127.0.0.1:29500", is_first=False) == "127.0.0.1"
    assert nodes.local_address("[::1]:29500", is_first=False) in ("::1", None)  # None: a host without IPv6
    assert nodes.local_address("localhost:29500", is_first=True) == "localhost"  # a name that other hosts resolve
    assert nodes.local_address("no-such-host.invalid:29500", is_first=False) is None


def test_worlds_lists_all_possible_world_sizes() -> None:
    assert Nodes.of("1:3", 0, "a").worlds(4) == [4, 8, 12]
    assert Nodes.of(None, None, None).worlds(4) == [4]


@pytest.mark.parametrize(
    ("number", "rank", "endpoint", "complaint"),
    [
        ("0", None, "a", "--nnodes 0 is not a number of nodes"),
        ("3:2", None, "a", "--nnodes 3:2 is not a number"),
        ("two", None, "a", "--nnodes two is not a number"),
        ("2", 2, "a", "--node-rank 2: --nnodes is 2"),
        ("2", 0, None, "2 nodes need an endpoint"),
        ("2", 0, "a:http", "--rdzv-endpoint a:http is not an address"),
        ("2", 0, "a:70000", "--rdzv-endpoint a:70000 is not an address"),
        ("2", 0, ":29500", "is not an address"),
        ("2", 0, "fe80::1", "is not an address"),
    ],
)
def test_invalid_node_options_are_rejected(number: str, rank: int | None, endpoint: str | None, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Nodes.of(number, rank, endpoint)


class Card:
    def __init__(self, address: str) -> None:
        self.address = address


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes a host that is 10.0.0.1 for others and 127.0.1.1 for itself, as on Debian."""
    names = {"node01": "127.0.1.1", "node01.cluster": "10.0.0.1", "node02": "10.0.0.2", "10.0.0.1": "10.0.0.1"}

    def resolve(name: str, _: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (names[name], 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "node01")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node01")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(nodes, "local_address", lambda *_, **__: None)
    monkeypatch.setattr(nodes, "_answers", lambda host, port: port == 4711)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [Card("127.0.0.1")], "eth0": [Card("10.0.0.1")]})


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("host", "mine"), [("node01", True), ("node01.cluster", True), ("10.0.0.1", True), ("node02", False)]
)
def test_is_mine_recognizes_all_addresses_of_the_host(host: str, mine: bool) -> None:
    """torchrun itself compares with the address of its host name, 127.0.1.1, so that no node would host the store."""
    assert is_mine(host) is mine
    (settings,) = [flag for flag in Nodes.of("2", None, host).flags("x") if flag.startswith("--rdzv-conf=")]
    assert settings.startswith(f"--rdzv-conf=is_host={int(mine)},")


@pytest.mark.usefixtures("network")
def test_second_launch_on_one_host_joins_the_first() -> None:
    assert not Nodes.of("2", None, "node01:4711").is_first


@pytest.mark.usefixtures("network")
def test_endpoint_name_that_cannot_be_resolved_is_rejected() -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint node99: this machine cannot resolve that name"):
        is_mine("node99")


SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-7",
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "0",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"PET_MASTER_PORT": "1234"}, {}),
        (
            SKYPILOT,
            {"nnodes": "2", "node_rank": "1", "endpoint": "10.0.0.1", "nproc": "8", "run_id": "sky-7"},
        ),
        (
            SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_NODE_IPS": ""},
            {"nnodes": "2", "node_rank": "1", "run_id": "sky-7"},
        ),
        (KUBEFLOW, {"nnodes": "2", "node_rank": "0", "endpoint": "job-node-0-0.job:29400", "nproc": "4"}),
        ({"PET_NNODES": "2", "SKYPILOT_NUM_NODES": "3"}, {"nnodes": "3"}),
        ({"PET_NPROC_PER_NODE": "auto", "PET_MAX_RESTARTS": "3"}, {"max_restarts": "3"}),
    ],
)
def test_options_are_read_from_variables_of_other_engines(
    environ: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    assert announced(environ) == expected
