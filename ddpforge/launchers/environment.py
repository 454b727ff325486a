"""Environment of a rank that a launcher has started: before ranks join, and its reports to the launcher."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from ddpforge.errors import ExitCode, PeerFailed, SetupError
from ddpforge.interfaces import device_kind
from ddpforge.interfaces.environment import Environment
from ddpforge.launchers.exit_record import has_begun, record_begun, record_halt
from ddpforge.launchers.network_interface import choose_interface
from ddpforge.launchers.nodes import NODES, fixed_number
from ddpforge.launchers.scheduling import policy_restored, set_batch_policy

if TYPE_CHECKING:
    import torch

__all__ = ["LauncherEnvironment", "nodes_asked_for", "reject_fewer_nodes"]


class LauncherEnvironment(Environment):
    """Launcher of the ranks: torchrun, alone or under `ddpforge launch`."""

    def running(self) -> AbstractContextManager[None]:
        """Restores the scheduling policy of this process's threads."""
        return policy_restored()

    def before_join(self, device: torch.device) -> None:
        """Checks the number of nodes, chooses gloo's network interface, and sets the policy of its threads."""
        reject_fewer_nodes()
        choose_interface()
        if device_kind(device).is_host and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            set_batch_policy()

    def is_restart(self) -> bool:
        """True if the launcher has restarted the ranks."""
        return has_begun()

    def on_begin(self) -> None:
        """Reports to the launcher that ranks have the run's folder, so that it does not kill them."""
        record_begun()

    def on_halt(self) -> None:
        """Reports to the launcher that the run stops, so that it does not restart the ranks."""
        record_halt()


def reject_fewer_nodes() -> None:
    """Raises SetupError if torchrun was started for a fixed number of nodes, but continued without some."""
    # torchrun's rendezvous compares heartbeats by the nodes' wall clocks. It drops a node whose clock is wrong.
    asked, got = nodes_asked_for(), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if asked is None or got >= asked:
        return
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    raises = SetupError if speaks else partial(PeerFailed, ExitCode.ENVIRONMENT)
    raise raises(
        f"only {got} of {asked} nodes have joined: the launcher on {socket.gethostname()} considers the others dead",
        hints=[
            "compare the clocks of all nodes (`date`): the rendezvous needs equal times, so use chrony or ntpd",
            "`ddpforge launch --nnodes A:B` if fewer nodes may train",
        ],
    )


def nodes_asked_for() -> int | None:
    """Returns the fixed number of nodes that torchrun was started for; None if there is none.

    Reads it from the environment of `ddpforge launch`, or from the command line of a bare torchrun.
    """
    if number := os.environ.get(NODES):
        return fixed_number([f"--nnodes={number}"])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    import psutil

    try:
        words = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return None
    return fixed_number(words) if any("torchrun" in word or "torch.distributed" in word for word in words) else None
