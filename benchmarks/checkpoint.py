"""Time and memory to save and load a checkpoint: ddpforge, a raw write, safetensors, torch.save and torch's DCP.

    python benchmarks/checkpoint.py                      a state of 512 MiB, in /dev/shm
    python benchmarks/checkpoint.py --folder /scratch    on a disk, loading from the page cache
    python benchmarks/checkpoint.py --folder /scratch --cold    the same, loading from the disk
    python benchmarks/checkpoint.py --ranks 2            two ranks that hold the same state

The state is a model with AdamW's two moments, in fp32. All tools run in turn in one process per rank, in a random order
in every round, and every number is the median over rounds. Every tool that can syncs its files to the disk. ddpforge's
hashes are on.

    blocking    time until `save` returns, with everything on disk. All tools write new files and remove those of the
                previous round later; ddpforge does so in a thread, after the new checkpoint is complete. "Over an old
                file" overwrites the same file, which includes the time to free its blocks
    stall       time until a background save returns, plus the time that the update after a pass of 0.3 s waits for it.
                Copying and writing also use a core, which a pass on CPUs may lack
    load        time to load into existing tensors; ddpforge verifies every block that it reads
    memory      peak memory of the process during the save, minus its memory before, ÷ the bytes that it writes

A target follows each ratio that has one. The script exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.interfaces import CanonicalState, FlatRange, Ranks, read_all
from ddpforge.launchers.scheduling import set_batch_policy
from ddpforge.ranks.collectives import ProcessGroup, SingleRank
from ddpforge.ranks.writers import WriterGroup
from ddpforge.recipe.schema import CheckpointSection, KeepSection

BLOCK = 64 << 20  # bytes per write of the raw write
WIDTH = 1024
PASS = 0.3  # seconds
STALL, WRITE, LOAD, MEMORY = 0.1, 1.1, 1.2, 1.1


class Line(NamedTuple):
    """Line of the table."""

    what: str
    seconds: float
    ratio: float | None = None
    of: str = ""
    target: float | None = None


def make_state(mebibytes: int) -> CanonicalState[Tensor]:
    """Builds weights and moments of `mebibytes` MiB in total."""
    layers = max(1, mebibytes * 2**20 // (3 * 4 * WIDTH * WIDTH))
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{number}.weight" for number in range(layers)]
    draw = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(3 * layers)]
    model = dict(zip(names, draw[:layers], strict=True))
    moments = {
        name: {"step": torch.tensor(9.0), "exp_avg": draw[layers + i], "exp_avg_sq": draw[2 * layers + i]}
        for i, name in enumerate(names)
    }
    return CanonicalState(model, moments)


def flat(state: CanonicalState[Tensor]) -> dict[str, Tensor]:
    """Returns all tensors of a state by name."""
    moments = {
        f"{name}/{key}": value
        for name, entry in state.optimizer.items()
        for key, value in entry.items()
        if isinstance(value, Tensor) and value.ndim
    }
    return {**state.model, **moments}


class Bench:
    """Measurements of one rank."""

    def __init__(self, ranks: Ranks, peers: WriterGroup, folder: Path, mebibytes: int) -> None:
        self.ranks, self.peers, self.folder = ranks, peers, folder
        self.state = make_state(mebibytes)
        self.tensors = flat(self.state)
        self.target = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.checkpoints = {name: self._checkpoints(name) for name in ("blocking", "background")}
        self.turn = 0
        self.factor = torch.randn(256, 256)  # matrix to multiply in a pass

    def _checkpoints(self, name: str) -> Checkpoints:
        settings = CheckpointSection(async_save=name == "background", keep=KeepSection(last=1))
        return Checkpoints(self.folder / name, settings, peers=self.peers, ranks=self.ranks)

    def begin(self, name: str) -> None:
        facts = CheckpointMetadata(step=1, samples=1, strategy="ddp", world_size=self.ranks.size)
        self.checkpoints[name].save(facts, RankState.of(self.state, {}))

    # -- ddpforge
    def blocking(self) -> None:
        self.begin("blocking")
        self.checkpoints["blocking"].wait()

    def load(self) -> None:
        (path,) = (self.folder / "blocking").glob("step-*")
        saved = CheckpointReader(path).state()
        parts: dict[str, Any] = {**saved.model}
        parts |= {f"{name}/{key}": value for name, entry in saved.optimizer.items() for key, value in entry.items()}
        read_all((parts[name], FlatRange(0, tensor.numel()), tensor.view(-1)) for name, tensor in self.target.items())

    # -- others
    def raw(self) -> None:
        """Writes this rank's share of the bytes, and nothing else."""
        self._write(self._file("raw"))

    def overwrite(self) -> None:
        """Overwrites the file of the previous round, as a loop does that always saves under one name."""
        self._write(self.folder / f"over-{self.ranks.rank}")

    def _write(self, path: Path) -> None:
        share = self.bytes // self.ranks.size
        with path.open("wb") as file:
            for tensor in self.tensors.values():
                data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
                for start in range(0, len(data), BLOCK):
                    if file.tell() < share:
                        file.write(data[start : start + BLOCK][: share - file.tell()])
            file.flush()
            os.fsync(file.fileno())

    def safetensors_save(self) -> None:
        if self.ranks.is_rank_zero:
            save_file(self.tensors, self._file("safetensors"))
            sync(self._file("safetensors"))
        self.ranks.barrier()

    def safetensors_load(self) -> None:
        self._take(load_file(self._file("safetensors", rank=0)))

    def torch_save(self) -> None:
        if self.ranks.is_rank_zero:
            torch.save(self.tensors, self._file("pt"))
            sync(self._file("pt"))
        self.ranks.barrier()

    def torch_load(self) -> None:
        self._take(torch.load(self._file("pt", rank=0), weights_only=True))

    def dcp_save(self) -> None:
        dcp.save(dict(self.tensors), checkpoint_id=self._file("dcp", rank=0), no_dist=self.ranks.size == 1)

    def dcp_load(self) -> None:
        dcp.load(dict(self.target), checkpoint_id=self._file("dcp", rank=0), no_dist=self.ranks.size == 1)

    def _file(self, name: str, rank: int | None = None) -> Path:
        return self.folder / f"{self.turn}-{name}-{self.ranks.rank if rank is None else rank}"

    def next_turn(self) -> None:
        """Removes the files of the previous round; until then both exist, as with ddpforge."""
        self.checkpoints["blocking"].finish()
        self.ranks.barrier()
        for path in self.folder.glob(f"{self.turn - 1}-*-{self.ranks.rank}"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.turn += 1

    def _take(self, loaded: dict[str, Tensor]) -> None:
        for name, tensor in self.target.items():
            tensor.copy_(loaded[name])

    # -- measuring
    def stall(self) -> tuple[float, float]:
        """Returns the seconds that training waits for a background save, and the memory ratio of the save."""
        saving = self.checkpoints["background"]
        with watched_memory() as most:
            begins = self.timed(lambda: self.begin("background"))
            until = time.perf_counter() + PASS
            while time.perf_counter() < until:
                torch.mm(self.factor, self.factor)
            began = time.perf_counter()
            saving.before_update()
            stalled = begins + time.perf_counter() - began
            saving.wait()
        return stalled, most[0] / (self.bytes / self.ranks.size)

    def timed(self, action: Callable[[], None]) -> float:
        self.ranks.barrier()
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    def forget(self) -> None:
        """Drops every file from the page cache, after syncing it to the disk."""
        for file in self.folder.rglob("*"):
            if file.is_file():
                sync(file)
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def lines(self, repeats: int, *, cold: bool) -> tuple[list[Line], float]:
        """Measures everything; returns the table and the memory ratio."""
        _, memory = self.stall()  # the first save allocates the buffers
        saves = [self.raw, self.overwrite, self.blocking, self.safetensors_save, self.torch_save, self.dcp_save]
        self.overwrite()  # the file that the first round overwrites
        loads = [self.load, self.safetensors_load, self.torch_load, self.dcp_load]
        times: dict[str, list[float]] = {}
        draw = random.Random(0)  # the same on all ranks
        for _ in range(repeats):
            # Random order: the previous action determines the content of caches and the free memory.
            for action in (*draw.sample(saves, len(saves)), *draw.sample(loads, len(loads))):
                if cold and action in loads:
                    self.ranks.barrier()
                    self.forget()
                times.setdefault(action.__name__, []).append(self.timed(action))
            times.setdefault("stall", []).append(self.stall()[0])
            self.next_turn()
        median = {name: statistics.median(values) for name, values in times.items()}

        def line(what: str, name: str, of: str = "", label: str = "", target: float | None = None) -> Line:
            return Line(what, median[name], median[name] / median[of] if of else None, label, target)

        for name, tensor in self.tensors.items():
            assert torch.equal(self.target[name], tensor), name
        return [
            line("write  raw bytes and fsync", "raw"),
            line("       the same over an old file", "overwrite"),
            line("       ddpforge, blocking", "blocking", "raw", "raw", WRITE),
            line("       the same", "blocking", "overwrite", "over an old file"),
            line("       ddpforge, stall", "stall", "blocking", "blocking", STALL),
            line("       safetensors", "safetensors_save", "raw", "raw"),
            line("       torch.save", "torch_save", "raw", "raw"),
            line("       DCP", "dcp_save", "raw", "raw"),
            line("load   safetensors", "safetensors_load"),
            line("       ddpforge, verified", "load", "safetensors_load", "safetensors", LOAD),
            line("       torch.load", "torch_load", "safetensors_load", "safetensors"),
            line("       DCP", "dcp_load", "safetensors_load", "safetensors"),
        ], memory


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Yields the peak of resident bytes minus those at the start, sampled every millisecond, without pages of files."""
    ended, most, start = threading.Event(), [0], anonymous()

    def watch() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], anonymous() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def anonymous() -> int:
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def run_rank(rank: int, options: argparse.Namespace, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks)  # set by launchers; a rank computes its share of cores from it
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    ranks: Ranks = SingleRank()
    if options.ranks > 1:
        set_batch_policy()  # as the ranks of a run do
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options.ranks)
        ranks = ProcessGroup(dist.group.WORLD)
    bench = Bench(ranks, WriterGroup.of(ranks, timedelta(minutes=5)), Path(folder), options.mb)
    lines, memory = bench.lines(options.repeats, cold=options.cold)
    missed = False
    if rank == 0:
        print(f"{bench.bytes / 2**20:.0f} MiB, {options.ranks} rank(s), {options.folder}, medians of {options.repeats}")
        for line in lines:
            ratio = "" if line.ratio is None else f"{line.ratio:6.2f} × {line.of}"
            verdict = "" if line.target is None else f" (target {line.target})"
            print(f"  {line.what:30} {line.seconds * 1000:8.1f} ms  {ratio}{verdict}")
        print(f"  memory of a background save: {memory:.2f} × the bytes that the rank writes (target {MEMORY})")
        missed = memory > MEMORY or any(x.ratio > x.target for x in lines if x.target and x.ratio)
    if options.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    if missed:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512, help="MiB of state")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache before each load")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.ranks == 1:
            run_rank(0, options, folder, 0)
        else:
            try:
                mp.spawn(run_rank, (options, folder, 29517), nprocs=options.ranks)
            except mp.ProcessExitedException as missed:
                sys.exit(missed.exit_code)


if __name__ == "__main__":
    main()
