"""Real Slurm (Debian's slurm-wlm) with several nodes on one machine, for the time of a test.

It runs on a host of its own (see `hosts.py`): nothing of it is seen or left outside, jobs included.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.hosts import Host

__all__ = ["PROGRAMS", "Job", "Slurm", "new_slurm"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")  # packages: slurmctld slurmd slurm-client munge
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=cluster
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000,requeue_delay=0,batch_sched_delay=0
ReturnToService=2
InactiveLimit=0
KillWait=30
OverTimeLimit=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName={name} NodeHostname=cluster NodeAddr={name} Port={port} CPUs={cores} Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN\n"
)
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Job:
    """A job by its number."""

    def __init__(self, slurm: "Slurm", number: str) -> None:
        self.slurm, self.number = slurm, number

    @property
    def facts(self) -> Mapping[str, str]:
        """Returns the fields of `scontrol show job`, which remembers a job for a while after its end."""
        said = self.slurm.run("scontrol", "show", "job", "-o", self.number)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    @property
    def state(self) -> str:
        """Returns PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self.facts["JobState"]

    @property
    def restarts(self) -> int:
        """Returns how often the job was requeued."""
        return int(self.facts["Restarts"])

    def begin(self) -> None:
        """Starts a requeued job now; Slurm would wait for two minutes."""
        time.sleep(1.1)  # within the second of its end, slurmd takes the requeued job for the old one and fails it
        until(self._begins, 30, lambda: f"job {self.number} does not begin: {self.facts}")

    def _begins(self) -> bool:
        if self.state == "PENDING":
            self.slurm.try_to("scontrol", "update", f"jobid={self.number}", "starttime=now")
        return self.state in ("RUNNING", *_ENDED)

    def wait(self, *states: str, timeout: float = 20) -> str:
        """Waits until the job is in one of `states` or has ended; returns its state."""
        until(lambda: self.state in (*states, *_ENDED), timeout, lambda: f"job {self.number}: {self.facts}")
        return self.state


class Slurm:
    """`nodes` nodes n1, n2, ... with `cores` cores each; partitions `low` and `high`, which preempts the other."""

    def __init__(self, folder: Path, *, nodes: int, cores: int) -> None:
        self.folder = folder
        self.host = Host("cluster", "10.77.0.1", folder)
        names = " ".join(["cluster", *(f"n{number}" for number in range(1, nodes + 1))])
        self.host.names.write_text(f"127.0.0.1 localhost\n{self.host.address} {names}\n")
        for words in ("link add eth0 type veth peer name peer", "addr add 10.77.0.1/24 dev eth0", "link set eth0 up"):
            self.host.run("ip", *words.split())  # Slurm resolves no name on a machine with loopback alone
        self._configure(nodes, cores)
        self._start(nodes)

    def _configure(self, nodes: int, cores: int) -> None:
        lines = [_NODE.format(name=f"n{number}", port=6820 + number, cores=cores) for number in range(1, nodes + 1)]
        text = _CONFIGURATION.format(folder=self.folder)
        head, partitions = text.split("PartitionName=low", 1)
        (self.folder / "slurm.conf").write_text(head + "".join(lines) + "PartitionName=low" + partitions)
        (self.folder / "state").mkdir()
        munge = self.folder / "munge"
        munge.mkdir()
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        munge.chmod(0o755)

    def _start(self, nodes: int) -> None:
        munge = self.folder / "munge"
        files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
        options = [f"--{option}-file={munge / name}" for option, name in files.items() if option != "socket"]
        self._daemon("munged", *options, f"--socket={munge / 'socket'}", "--force")
        self._daemon("slurmctld", "-c")
        for number in range(1, nodes + 1):
            self._daemon("slurmd", "-c", "-N", f"n{number}")
        until(lambda: self.idle() == nodes, 20, lambda: (self.folder / "slurmctld.log").read_text())

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.err").open("a") as errors:
            command = self.host.command(words, self.folder)
            subprocess.run(command, env=self.variables, stdout=errors, stderr=errors, check=True)

    @property
    def variables(self) -> dict[str, str]:
        """Returns the environment of Slurm's commands: this process's without variables of another Slurm."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**ours, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def idle(self) -> int:
        return len(set(self.run("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N").split()))

    def run(self, *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Runs a command that must succeed; returns its output."""
        ended = self.try_to(*words, cwd=cwd, env=env)
        assert ended.returncode == 0, f"{words} ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def try_to(
        self, *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command, which may fail, by default in Slurm's own folder."""
        command = self.host.command(words, cwd or self.folder)
        return subprocess.run(command, env={**self.variables, **(env or {})}, text=True, capture_output=True)

    def submit(self, script: Path, *flags: str, cwd: Path, env: Mapping[str, str] | None = None) -> Job:
        """Submits a script from `cwd`."""
        return Job(self, self.run("sbatch", "--parsable", *flags, script, cwd=cwd, env=env).strip())


def until(check: Callable[[], bool], timeout: float, otherwise: Callable[[], str] = lambda: "") -> None:
    """Waits until `check()` is true; at the timeout, fails the test with the text of `otherwise()`."""
    deadline = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.05)


@contextmanager
def new_slurm(folder: Path, *, nodes: int = 2, cores: int = 2) -> Iterator[Slurm]:
    """Yields a Slurm whose state and logs are in `folder`."""
    slurm = Slurm(folder, nodes=nodes, cores=cores)
    try:
        yield slurm
    finally:
        slurm.host.end()
