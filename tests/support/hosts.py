"""Hosts on one machine: each has a network, a name, process numbers and, if a test needs them, disks of its own.

A host is a set of kernel namespaces whose first process reads a pipe of the test's. However the test's process ends,
the pipe closes, that process ends, and the kernel ends all others of the host and takes down its network. Nothing has
a name outside, so that several tests may have the same hosts at the same time.
"""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from support.forked import in_ranks

__all__ = ["Command", "Host", "Hosts", "needs_root", "new_hosts"]

_NETWORK = "10.77.0"
_READY = (
    'ip link set lo up; hostname "$1"; mount --bind "$2" /etc/hosts; mount --bind "$3" /etc/nsswitch.conf; echo ready'
)
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_FS = 0x200  # of <sched.h>
_IN_FOLDER = (
    'cd "$1" && shift && exec "$@"'  # cd inside the namespace: a working directory entered before is the one outside
)


def needs_root(*programs: str) -> None:
    """Skips the test if namespaces cannot be created, or one of `programs` is missing."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    if lacks := [name for name in ("ip", "nsenter", "unshare", *programs) if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(lacks)}")
    if subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount", "--mount-proc", "true"], check=False
    ).returncode:
        pytest.skip("this container may not make namespaces")


class Command(subprocess.Popen[str]):
    """A command on a host; `nsenter` waits for it here, and ends as it does."""

    def signal(self, number: int) -> None:
        """Sends a signal to the command."""
        for child in psutil.Process(self.pid).children():
            child.send_signal(number)

    def ended(self, timeout: float = 120) -> tuple[int, str]:
        """Waits for the end; returns exit code and output."""
        text, _ = self.communicate(timeout=timeout)
        return self.returncode, text


class Host:
    """One host, `node` and a letter; `address` is its own on the network of hosts."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        self.names, resolving = folder / f"{name}.hosts", folder / "nsswitch.conf"
        resolving.write_text("hosts: files\n")  # no name server, which would not be reached
        self.names.write_text("127.0.0.1 localhost\n")
        flags = [*(f"--{kind}" for kind in ("net", "uts", "mount", "pid")), "--fork", "--mount-proc"]
        command = ["unshare", *flags, "bash", "-c", f"{_READY}; exec cat", "_", name, str(self.names), str(resolving)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._first = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        assert self._first.stdout.readline() == "ready\n", self._first.stderr.read()
        (first,) = psutil.Process(self._first.pid).children()
        self.pid = first.pid

    def command(self, words: Sequence[str | Path], cwd: Path) -> list[str]:
        """Returns the command that runs `words` on this host."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--pid", "--mount"]
        return [*enter, "bash", "-c", _IN_FOLDER, "_", str(cwd), *map(str, words)]

    def start(
        self,
        *words: str | Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        output: IO[str] | int = subprocess.PIPE,
    ) -> Command:
        """Starts a command in `cwd`; `env` joins this process's variables."""
        return Command(
            self.command(words, cwd),
            env={**os.environ, **(env or {})},
            text=True,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def run(self, *words: str | Path, cwd: Path = Path("/"), env: Mapping[str, str] | None = None) -> str:
        """Runs a command that must succeed; returns its output."""
        code, text = self.start(*words, cwd=cwd, env=env).ended()
        assert code == 0, f"{self.name}: {words} ended with {code}\n{text}"
        return text

    @contextmanager
    def numbering(self) -> Iterator[None]:
        """Gives processes forked in this context numbers of the host; a process cannot change its own."""
        with open("/proc/self/ns/pid") as own, open(f"/proc/{self.pid}/ns/pid") as of_host:
            _enter(of_host)
            try:
                yield
            finally:
                _enter(own)

    def enter(self) -> None:
        """Moves this process, which was forked within `numbering`, to the host's network, name and disks."""
        _LIBC.unshare(_CLONE_FS)  # threads started after the fork share the working directory, which setns refuses
        with ExitStack() as opened:
            spaces = [opened.enter_context(open(f"/proc/{self.pid}/ns/{kind}")) for kind in ("net", "uts", "mnt")]
            for space in spaces:
                _enter(space)

    def own_disk(self, path: Path, store: Path) -> None:
        """Mounts `store` at `path`, on this host only."""
        path.mkdir(parents=True, exist_ok=True)
        store.mkdir(parents=True, exist_ok=True)
        self.run("mount", "--bind", store, path)

    def resolves_itself_to(self, address: str) -> None:
        """Maps the host's own name to `address` in /etc/hosts, as Debian does with 127.0.1.1."""
        names = [line for line in self.names.read_text().splitlines() if self.name not in line.split()]
        self.names.write_text("\n".join([*names, f"{address} {self.name}"]) + "\n")

    def end(self) -> None:
        """Kills all processes of the host at once, as a power failure does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._first.communicate()


class Hosts(Mapping[str, Host]):
    """Hosts on one network, by letter: `hosts["a"]` is called nodea."""

    def __init__(self, letters: str, folder: Path) -> None:
        self._switch = Host("switch", "", folder)
        self._switch.run("ip", "link", "add", "br0", "type", "bridge")
        self._switch.run("ip", "link", "set", "br0", "up")
        addresses = {letter: f"{_NETWORK}.{number}" for number, letter in enumerate(letters, 1)}
        self._hosts = {letter: Host(f"node{letter}", address, folder) for letter, address in addresses.items()}
        names = "".join(f"{host.address} {host.name}\n" for host in self._hosts.values())
        for letter, host in self._hosts.items():
            host.names.write_text(host.names.read_text() + names)
            self._plug_in(letter, host)

    def _plug_in(self, letter: str, host: Host) -> None:
        names = ["eth0", "netns", str(host.pid), "type", "veth", "peer", "name", f"to-{letter}"]
        subprocess.run(["ip", "link", "add", *names, "netns", str(self._switch.pid)], check=True)
        self.heal(letter)
        self._switch.run("ip", "link", "set", f"to-{letter}", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")

    def __getitem__(self, letter: str) -> Host:
        return self._hosts[letter]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def in_ranks(self, where: str, action: Callable[[int], Any]) -> list[Any]:
        """Returns the results of `action(rank)` in a world with one rank on each host in `where`.

        "aab": two ranks on nodea and one on nodeb. The rendezvous is on the first host.
        """

        def there(rank: int) -> Any:
            letter = where[rank]
            self[letter].enter()
            os.environ.update(
                LOCAL_RANK=str(where[:rank].count(letter)),
                LOCAL_WORLD_SIZE=str(where.count(letter)),
                MASTER_ADDR=self[where[0]].name,
            )
            return action(rank)

        return in_ranks(len(where), there, timeout=300, forking=lambda rank: self[where[rank]].numbering())

    def cut(self, letter: str) -> None:
        """Drops all packets to and from the host; the host cannot detect it."""
        self._switch.run("ip", "link", "set", f"to-{letter}", "nomaster")

    def heal(self, letter: str) -> None:
        """Undoes `cut`."""
        self._switch.run("ip", "link", "set", f"to-{letter}", "master", "br0")

    def unplug(self, letter: str) -> None:
        """Sets the host's link down, which the host can detect."""
        self._switch.run("ip", "link", "set", f"to-{letter}", "down")

    def end(self) -> None:
        """Ends all hosts."""
        for host in (*self._hosts.values(), self._switch):
            host.end()


def _enter(namespace: IO[str]) -> None:
    if _LIBC.setns(namespace.fileno(), 0) != 0:
        raise OSError(ctypes.get_errno(), f"{namespace.name} cannot be entered")


@contextmanager
def new_hosts(letters: str, folder: Path) -> Iterator[Hosts]:
    """Yields hosts with these letters; `folder` holds their few files."""
    hosts = Hosts(letters, folder)
    try:
        yield hosts
    finally:
        hosts.end()
