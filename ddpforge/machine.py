"""Services of the operating system that differ between systems: Linux's own calls, each with a portable way.

Every call that only Linux has is in this module, and in `launchers.scheduling`. Imports only the standard library,
because the watchdog's process does; other systems need psutil, which is imported when it is called.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import select
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    *("STACKS", "available_memory", "catches", "create_shared_file", "descendants", "end_poll", "ephemeral_ports"),
    *(
        "has_nvidia_gpu",
        "is_locked",
        "map_without_forks",
        "nvidia_driver",
        "open_files",
        "opens_nvidia_gpu",
        "peak_memory",
        "process_created",
        "process_state",
    ),
    *("read_sequentially", "resident_memory", "shared_memory_folder", "terminate_with_parent", "usable_cores"),
    *("wait_for_end", "wait_status"),
]

# Signal at which a rank writes its stacks; no other code uses it. SIGINFO, which macOS has, is ignored by default.
STACKS: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGINFO", signal.SIGUSR2)

_PDEATHSIG = 1  # from <linux/prctl.h>
_LOOK = 0.05  # seconds between two checks if a process has ended


# ---------------------------------------------------------------------------------------------- cores and memory
def usable_cores() -> int:
    """Returns the number of CPU cores that this process may use; on macOS, that the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_memory(pid: int | None = None) -> int:
    """Returns the resident memory of a process, by default of this one, in bytes; 0 if it has ended."""
    with suppress(OSError, IndexError), open(f"/proc/{pid or 'self'}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def available_memory() -> int:
    """Returns the memory of the machine that programs can get without swapping, in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def map_without_forks(size: int) -> mmap.mmap:
    """Returns `size` bytes of memory that processes forked later do not have; on macOS they have it."""
    # Linux copies memory that a GPU has locked at each fork, e.g. at the start of a loader process: 0.3 s per GiB.
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


def shared_memory_folder() -> Path | None:
    """Returns the folder of Linux's shared memory; None if the system has shared memory without a folder."""
    place = Path("/dev/shm")
    return place if place.is_dir() else None


def create_shared_file(name: str) -> int:
    """Returns the descriptor of a new empty file, in memory if possible, that ends with its last process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# ---------------------------------------------------------------------------------------------- files and network
def open_files() -> int:
    """Returns the number of open files of this process; an estimate if the system does not list them."""
    for place in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return len(os.listdir(place))
    return 64


def read_sequentially(descriptor: int) -> None:
    """Announces that a file will be read from its beginning to its end, so that the system reads ahead."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def is_locked(descriptor: int) -> bool:
    """True if another process holds an exclusive lock of `fcntl.lockf` on a file. Raises OSError if that is unknown."""
    # struct flock. Linux, 64 bits: type, whence, start, length, process. macOS: start, length, process, type, whence.
    if sys.platform == "darwin":
        layout, place = "qqihh", 3
        words = (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
    else:
        layout, place = "hhqqi0q", 0
        words = (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    found = struct.unpack(layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(layout, *words)))
    return bool(found[place] != fcntl.F_UNLCK)


def ephemeral_ports() -> str:
    """Returns the range of ports that the system takes for outgoing connections, e.g. "32768-60999"."""
    with suppress(OSError):
        return "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return "49152-65535"  # the default of macOS, and the range that IANA has reserved


# ---------------------------------------------------------------------------------------------- GPUs
def has_nvidia_gpu() -> bool:
    """True if the driver of an NVIDIA GPU has made its device file; under WSL2, that of Windows's GPUs."""
    return any(Path(place).exists() for place in ("/dev/nvidiactl", "/dev/dxg"))


def opens_nvidia_gpu(pid: int) -> bool:
    """True if a process has mapped an NVIDIA GPU. Always False on systems other than Linux, which have none."""
    with suppress(OSError):
        return "/dev/nvidia" in Path(f"/proc/{pid}/maps").read_text()
    return False


def nvidia_driver() -> str:
    """Returns the NVIDIA driver's text about its version; "" without a driver."""
    with suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text()
    return ""


# ---------------------------------------------------------------------------------------------- processes
def terminate_with_parent() -> None:
    """Makes the kernel send SIGTERM to this process when its parent ends, even by kill -9. Only Linux can: prctl(2).

    Elsewhere the ranks of a killed launcher train on.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PDEATHSIG, int(signal.SIGTERM))


def process_state(pid: int) -> str:
    """Returns the kernel's letter for the state of a process: "T" or "t" if stopped, "Z" if ended, "X" if unknown."""
    if stat := _stat(pid):
        return stat[0]
    if _has_proc():
        return "X"
    import psutil

    letters = {psutil.STATUS_STOPPED: "T", psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_DEAD: "X"}
    with suppress(psutil.Error):
        return letters.get(psutil.Process(pid).status(), "S")
    return "X"


def wait_status(pid: int) -> int | None:
    """Returns the wait status of an ended process that its parent has not reaped; None if the system hides it."""
    stat = _stat(pid) or []
    return int(stat[49]) if len(stat) > 49 and stat[0] == "Z" else None


def process_created() -> float:
    """Returns the time at which this process was created, in seconds since 1970."""
    if stat := _stat(os.getpid()):
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    import psutil

    return float(psutil.Process().create_time())


def wait_for_end(pid: int, poll: select.poll | None, seconds: float) -> bool:
    """True if a process, this one's parent, has ended; waits for that at most `seconds`. See `end_poll`."""
    if poll is not None:
        return bool(poll.poll(seconds * 1000)) or os.getppid() != pid
    import time

    deadline = time.monotonic() + seconds
    while os.getppid() == pid and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(_LOOK, left))
    return os.getppid() != pid


def end_poll(pid: int) -> select.poll | None:
    """Returns an object that wakes `wait_for_end` at once; None if the system has none."""
    with suppress(OSError, AttributeError):  # macOS and old kernels have no pidfd_open
        poll = select.poll()
        poll.register(os.pidfd_open(pid), select.POLLIN)  # readable when the process has ended
        return poll
    return None


def catches(pid: int, number: int) -> bool | None:
    """True if a process has a handler for a signal; None if the system hides it."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False if _has_proc() else None


def descendants(parent: int, *, without: Collection[int] = ()) -> Iterator[int]:
    """Yields the descendants of a process that are in its process group, except the processes `without`."""
    if not _has_proc():
        yield from _descendants_by_psutil(parent, without)
        return
    group = (_stat(parent) or [])[2:3]
    found: dict[int, list[str]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := _stat(int(name))) and stat[2:3] == group and int(name) not in without:
            found[int(name)] = stat
    reached = {parent}
    while new := {pid for pid, stat in found.items() if int(stat[1]) in reached} - reached:
        reached |= new
        yield from new


def _descendants_by_psutil(parent: int, without: Collection[int]) -> Iterator[int]:
    import psutil

    children: list[Any] = []
    with suppress(psutil.Error):
        children = psutil.Process(parent).children(recursive=True)
    for child in children:
        with suppress(OSError):  # it has ended
            if child.pid not in without and os.getpgid(child.pid) == os.getpgid(parent):
                yield child.pid


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the state on; None if there is no such file."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return None


def _has_proc() -> bool:
    return os.path.exists("/proc/self/stat")
