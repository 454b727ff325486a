"""Checks one machine: packages, memory, limits, disk, host name and environment variables."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import requires
from pathlib import Path

from ddpforge.components.installed import version
from ddpforge.data.workers import takes_sockets
from ddpforge.launchers.network_interface import GLOO, addresses_of, best_interface, interfaces, is_only_here
from ddpforge.machine import shared_memory_folder, usable_cores
from ddpforge.secret_redaction import redact
from ddpforge.tools.doctor.findings import Finding, error, note, ok, warning

__all__ = ["files", "limits", "names", "packages", "shared_memory", "variables", "writing_speed"]

_GIB = 1 << 30
_ENOUGH_FILES = 4096  # a run opens a few for each loader process, shard and connection
_INFINIBAND = Path("/sys/class/infiniband")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_PROBE = 64 << 20  # bytes that are written to measure a disk
_SLOW_LOOK_UP = 1.0  # seconds

_WORTH_KNOWING = re.compile(
    "(NCCL|GLOO|TORCH|PYTORCH|ACCELERATE|CUDA|OMP|MKL|DDPFORGE|FI|UCX|HSA|PET|TORCHELASTIC|PYTHONHASH)(_.*|SEED)"
)
_BY_LAUNCHER = re.compile(
    "TORCHELASTIC_.*|PET_.*|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|TORCH_CPP_LOG_LEVEL|TORCH_NCCL_ASYNC_ERROR_HANDLING|OMP_NUM_THREADS"
)
_HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": ("the CPU waits for every kernel, which makes training slow", r"[^0]"),
    "TORCH_DISTRIBUTED_DEBUG": ("torch checks every collective, which makes training slow", "DETAIL"),
    "NCCL_P2P_DISABLE": ("GPUs of one machine communicate through host memory", r"[^0]"),
    "NCCL_SHM_DISABLE": ("GPUs of one machine may communicate over the network", r"[^0]"),
    "NCCL_IB_DISABLE": ("InfiniBand is not used", r"[^0]"),
    "NCCL_DEBUG": ("NCCL logs a lot", "INFO|TRACE"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("every tensor needs a call of the driver", r"[^0]"),
    "TORCH_NCCL_BLOCKING_WAIT": ("the CPU waits for every collective", r"[^0]"),
}


def packages(distribution: str = "ddpforge") -> Iterator[Finding]:
    """Compares the installed packages with the versions that ddpforge requires; packages of extras may be absent."""
    from packaging.requirements import Requirement

    python = ".".join(map(str, sys.version_info[:3]))
    shown = [f"Python {python}", f"{distribution} {version(distribution)}"]
    for text in requires(distribution) or ():
        wanted = Requirement(text)
        if "bench" in str(wanted.marker):  # its pins are the measured versions, not the only ones that work
            continue
        extra = "extra" in str(wanted.marker)
        if (found := version(wanted.name)) is None:
            if not extra:
                yield error(f"{wanted.name} is not installed", f"pip install '{wanted.name}{wanted.specifier}'")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            say = warning if extra else error
            fix = f"pip install '{wanted.name}{wanted.specifier}'"
            yield say(f"{wanted.name} is {found}, but {distribution} requires {wanted.specifier}", fix)
        if wanted.name in ("torch", "accelerate", "deepspeed", "wandb"):
            shown.append(f"{wanted.name} {found}")
    yield ok(", ".join(dict.fromkeys(shown)))


def shared_memory(workers: int | None, place: Path | None = None) -> Iterator[Finding]:
    """Checks the size of /dev/shm, which loader processes and NCCL use; a Docker container has 64 MiB by default."""
    place = place or shared_memory_folder()
    if place is None:  # the system has shared memory without a folder, as macOS
        return
    total = shutil.disk_usage(place).total if place.is_dir() else 0
    size = f"{place} has {total / _GIB:.1f} GiB" if total >= _GIB else f"{place} has {total >> 20} MiB"
    if total >= _GIB:
        yield ok(size)
    elif workers == 0:
        yield note(f"{size}: enough for data.workers = 0")
    else:
        yield warning(
            f"{size}, and loader processes pass batches through it", "docker run --shm-size=8g, or data.workers = 0"
        )


def limits(ranks: int = 1, workers: int | None = None) -> Iterator[Finding]:
    """Checks the limits of this process: open files, locked memory, cores, memory.

    `ranks` is the number of ranks on this machine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _ENOUGH_FILES:
        more = min(65536, hard) if hard > soft else 65536
        raising = f"ulimit -n {more}" if hard > soft else "raise the hard limit: docker run --ulimit nofile=65536"
        yield warning(f"a process may open {soft} files", raising)
    else:
        yield ok(f"a process may open {soft} files")
    if workers != 0 and not takes_sockets(folder := tempfile.gettempdir()):
        fix = "set TMPDIR to a shorter path, such as /tmp"
        yield error(f"the path of the folder for temporary files is too long for loader processes: {folder}", fix)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and _INFINIBAND.is_dir():
        fix = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        yield warning(f"only {locked >> 10} KiB of memory may be locked, and InfiniBand needs more", fix)
    yield from _cores(ranks * (1 + (workers or 0)))
    if _MEMORY_LIMIT.exists() and (text := _MEMORY_LIMIT.read_text().strip()).isdecimal():
        yield note(f"this container is limited to {int(text) / _GIB:.1f} GiB of memory")


def _cores(processes: int) -> Iterator[Finding]:
    ours, there = usable_cores(), os.cpu_count() or 1
    text = f"{ours} of {there} CPU cores" if ours < there else f"{ours} CPU cores"
    if ours < processes:
        yield warning(
            f"{text} for {processes} processes", "request more (Slurm: --cpus-per-task), or use fewer data.workers"
        )
    else:
        yield ok(text)


def names(master: str = "") -> Iterator[Finding]:
    """Checks the address of this host for other machines, and the network interfaces named in variables."""
    host, begin = socket.gethostname(), time.perf_counter()
    found = addresses_of(host)
    if (took := time.perf_counter() - begin) > _SLOW_LOOK_UP:
        yield warning(f"it took {took:.1f} s to look up {host}", "fix the name server, or list the host in /etc/hosts")
    yield _reached(host, found, master)
    there = {name for _, name in socket.if_nameindex()}
    for variable, prefixes in ((GLOO, False), ("NCCL_SOCKET_IFNAME", True)):
        wanted = os.environ.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        absent = [
            name
            for name in wanted.lstrip("=").split(",")
            if name not in there and not (prefixes and any(each.startswith(name) for each in there))
        ]
        if absent:
            yield error(
                f"{variable}={wanted}, but there is no interface {', '.join(absent)}",
                f"use one of {', '.join(interfaces())}",
            )


def _reached(host: str, found: list[str], master: str) -> Finding:
    if not is_only_here(found):
        return ok(f"{host} is {', '.join(found)}")
    chosen, said = os.environ.get(GLOO) or best_interface(master), ", ".join(found) or "unknown"
    if chosen:
        return note(f"{host} has only a local address here: {said}; gloo uses {chosen} for other machines")
    there = ", ".join(interfaces())
    if not there:
        return note(f"{host} has only a local address here: {said}; there is no network")
    fix = f"export {GLOO}=… ({there}), or correct /etc/hosts"
    return warning(f"{host} has only a local address here: {said}; other machines would not find it", fix)


def variables(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Lists environment variables that affect a run, and warns about values that make it slow."""
    listed = []
    for name, value in sorted(environ.items()):
        says, bad = _HARMFUL.get(name, ("", None))
        if bad and re.match(bad, value):
            yield warning(f"{name}={value}: {says}", f"unset {name}")
        elif _WORTH_KNOWING.fullmatch(name) and not _BY_LAUNCHER.fullmatch(name):
            listed.append(f"{name}={redact(value)}")
    if listed:
        yield note(f"set: {' '.join(listed)}")


def files(folder: Path, checkpoint: int | None, keeps: int) -> Iterator[Finding]:
    """Checks free space and speed of the disk for runs.

    `checkpoint` is the size of a checkpoint in bytes, None if unknown. `keeps` is the number of checkpoints to keep.
    """
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    free = shutil.disk_usage(there).free
    try:
        speed = writing_speed(there)
    except OSError as failed:
        yield error(f"{there} cannot be written: {failed.strerror}", "use --out DIR, or output_dir in the recipe")
        return
    text = f"{free / _GIB:.1f} GiB are free for {folder}, written at {speed / 2**20:.0f} MiB/s"
    if checkpoint is None:
        yield ok(text)
        return
    size, needed = f"{checkpoint / 2**20:,.1f} MiB", checkpoint * (keeps + 1)  # plus the one that is being written
    if needed > free:
        fix = "use another --out or checkpoint.keep.last = 1, or free some space"
        yield error(f"{text}; {keeps + 1} checkpoints of {size} do not fit", fix)
    else:
        yield ok(f"{text}: {checkpoint / speed:.2f} s for a checkpoint of at most {size}")


def writing_speed(folder: Path) -> float:
    """Measures the bytes per second that reach the disk: writes, syncs and removes a file."""
    data = os.urandom(1 << 20)
    path = folder / f".ddpforge-doctor-{os.getpid()}"
    begin = time.perf_counter()
    try:
        with path.open("xb") as file:
            for _ in range(_PROBE // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return _PROBE / (time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)
