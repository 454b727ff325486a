"""What saving and loading a checkpoint costs: ddpforge beside a raw write, safetensors, torch.save and torch's DCP.

    python benchmarks/checkpoint.py                      a state of 512 MiB, in /dev/shm
    python benchmarks/checkpoint.py --folder /scratch    on a disk, loading what is still in the page cache
    python benchmarks/checkpoint.py --folder /scratch --cold    the same, loading from the disk itself
    python benchmarks/checkpoint.py --ranks 2            what each of two ranks does with a state that both hold alike

The state is a model with AdamW's two moments, in fp32. All sides take turns in one process per rank, in an order that
is drawn anew for every turn, and every number is the median of the turns. Files are synced to the disk on every side
that can do it, ddpforge's hashes are on.

    blocking    until `save` comes back, with everything on disk. All sides write beside what the turn before wrote,
                and remove that later; ddpforge does so in a thread, once the new checkpoint is complete. "Over an old
                file" is a loop that saves under one name, and waits until the bytes before are gone
    stall       until a save in the background comes back, and what the update after a pass of 0.3 s waits for it. What
                copies and writes meanwhile takes a core, too, which a pass on CPUs may miss
    load        into the tensors that there are; ddpforge verifies every block that it reads
    memory      the most that the process held during the save beyond what it held before, ÷ the bytes it writes

A target follows each ratio that has one; the script exits with 1 when one is missed.
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
from ddpforge.ranks.collectives import ProcessGroup, SingleRank
from ddpforge.ranks.scheduling import set_batch_policy
from ddpforge.ranks.writers import WriterGroup
from ddpforge.recipe.schema import CheckpointSection, KeepSection

BLOCK = 64 << 20  # bytes per write of the raw side
WIDTH = 1024
PASS = 0.3  # seconds
STALL, WRITE, LOAD, MEMORY = 0.1, 1.1, 1.2, 1.1


class Line(NamedTuple):
    """A line of the table."""

    what: str
    seconds: float
    ratio: float | None = None
    of: str = ""
    target: float | None = None


def make_state(mebibytes: int) -> CanonicalState[Tensor]:
    """Weights and moments of so many MiB together."""
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
    """All its tensors, by one name each."""
    moments = {
        f"{name}/{key}": value
        for name, entry in state.optimizer.items()
        for key, value in entry.items()
        if isinstance(value, Tensor) and value.ndim
    }
    return {**state.model, **moments}


class Bench:
    """One rank's turns."""

    def __init__(self, ranks: Ranks, peers: WriterGroup, folder: Path, mebibytes: int) -> None:
        self.ranks, self.peers, self.folder = ranks, peers, folder
        self.state = make_state(mebibytes)
        self.tensors = flat(self.state)
        self.target = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.checkpoints = {name: self._checkpoints(name) for name in ("blocking", "background")}
        self.turn = 0
        self.factor = torch.randn(256, 256)  # of a pass

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
        """This rank's share of the bytes, and nothing else."""
        self._write(self._file("raw"))

    def overwrite(self) -> None:
        """The same over what the turn before wrote, as a loop does that always saves under one name."""
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
        """Removes what the turn before this one wrote; until then both were there, as with ddpforge."""
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
        """Seconds for which a save in the background keeps training waiting, and the memory ratio of the save."""
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
        """Drops every file from the page cache; they are on the disk already."""
        for file in self.folder.rglob("*"):
            if file.is_file():
                sync(file)
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def lines(self, repeats: int, *, cold: bool) -> tuple[list[Line], float]:
        """The table, and the memory ratio."""
        _, memory = self.stall()  # the first one, which makes the buffers
        saves = [self.raw, self.overwrite, self.blocking, self.safetensors_save, self.torch_save, self.dcp_save]
        self.overwrite()  # what the first turn writes over
        loads = [self.load, self.safetensors_load, self.torch_load, self.dcp_load]
        times: dict[str, list[float]] = {}
        draw = random.Random(0)  # on all ranks alike
        for _ in range(repeats):
            # What ran before decides what is in caches, and which memory the machine has at hand.
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
    """The most resident bytes beyond those at the start, sampled every millisecond; pages of files do not count."""
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
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks)  # as launchers say, by which a rank knows its share of cores
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    ranks: Ranks = SingleRank()
    if options.ranks > 1:
        set_batch_policy()  # as ranks of a run do
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
        print(f"  memory of a save in the background: {memory:.2f} × what the rank writes (target {MEMORY})")
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
