"""Time of a checkpoint of many small tensors: what training waits for, the write in the background, and the load.

    python benchmarks/small_tensors.py                   100,000 parameters of AdamW, in /dev/shm
    python benchmarks/small_tensors.py --parameters 1000
    python benchmarks/small_tensors.py --profile         the functions that take the time
    python benchmarks/small_tensors.py --merge 1024      rank 0's merge of the records of 1,024 ranks

`stall` is the time until a background save returns, `write` the time until the checkpoint is committed, `load` the time
to open it and to read every tensor, in CPU seconds of this process. The best of `--rounds` each; the first one
allocates memory.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ddpforge.checkpoint import writer
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.manifest import layout
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.schema import Chunk, RankManifest, TensorEntry, TensorFile
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.interfaces import CanonicalState, FlatRange, read_all
from ddpforge.ranks.collectives import SingleRank
from ddpforge.ranks.writers import WriterGroup
from ddpforge.recipe.schema import CheckpointSection, KeepSection


def state_of(parameters: int) -> CanonicalState[torch.Tensor]:
    """Builds weights of four elements each, with AdamW's state."""
    model = {f"layers.{number}.weight": torch.full((4,), float(number)) for number in range(parameters)}
    optimizer = {
        name: {"step": torch.tensor(1.0), "exp_avg": weight.clone(), "exp_avg_sq": weight.clone()}
        for name, weight in model.items()
    }
    return CanonicalState(model, optimizer)


@contextmanager
def profiled(wanted: bool, what: str) -> Iterator[None]:
    """Prints the functions with the most own time inside."""
    if not wanted:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    print(f"--- {what}")
    pstats.Stats(profile).sort_stats("tottime").print_stats(14)


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds that `action` takes."""
    gc.collect()
    began = time.process_time()
    action()
    return time.process_time() - began


def save_and_load(folder: Path, parameters: int, profile: bool, rounds: int) -> None:
    """Prints the seconds of stall, write and load."""
    state = state_of(parameters)
    settings = CheckpointSection(keep=KeepSection(last=1))
    store = Checkpoints(folder, settings, peers=WriterGroup.alone(), ranks=SingleRank(torch.device("cpu")))
    found: dict[str, list[float]] = {"stall": [], "write": [], "load": []}
    for step in range(1, rounds + 1):
        facts = CheckpointMetadata(step=step, samples=step, strategy="single", world_size=1)
        last = profile and step == rounds
        with profiled(last, "stall"):
            found["stall"].append(
                timed(lambda facts=facts: (store.save(facts, RankState.of(state)), store.before_update()))
            )
        found["write"].append(timed(store.wait))
        store.finish()
        if last:  # the thread that writes is not profiled: the same once more in this one
            with profiled(True, "write"):
                writer.write(folder, facts, RankState.of(state), WriterGroup.alone())
        path = max(folder.glob("step-*"))
        with profiled(last, "load"):
            found["load"].append(timed(lambda path=path: load(path, state)))
    for what, seconds in found.items():
        print(f"{what:6} {min(seconds):6.2f} s   first {seconds[0]:.2f} s")


def load(path: Path, state: CanonicalState[torch.Tensor]) -> None:
    """Reads all tensors of a checkpoint into those of `state`, as a replica does."""
    reader = CheckpointReader(path)
    saved = reader.state()
    reads = [(saved.model[name], FlatRange(0, tensor.numel()), tensor) for name, tensor in state.model.items()]
    for name, values in state.optimizer.items():
        for key, value in values.items():
            if value.ndim:
                reads.append((saved.optimizer[name][key], FlatRange(0, value.numel()), value))
    read_all(reads)
    reader.finish()


def merge(folder: Path, ranks: int, tensors: int, profile: bool, rounds: int) -> None:
    """Prints the seconds of rank 0's part after all ranks have written: shards of `tensors` tensors on each rank."""
    draft = folder / "draft"
    draft.mkdir()
    size = 4096
    for rank in range(ranks):
        file = f"shard-{rank:05d}-of-{ranks:05d}.safetensors"
        region = FlatRange(rank * size, (rank + 1) * size)
        named = {
            f"layers.{number}.weight": TensorEntry(
                dtype="float32",
                shape=(ranks * size,),
                chunks=(Chunk(file=file, entry=f"layers.{number}.weight[{rank}]", region=region, hashes=("0" * 32,)),),
            )
            for number in range(tensors)
        }
        entry = TensorFile(bytes=tensors * size * 4 + 8, header_xxh3="0" * 32)
        record = RankManifest(rank=rank, file=file, entry=entry, tensors={"model": named}, optimizer={}, callbacks={})
        (draft / f"rank-{rank:05d}.json").write_bytes(record.model_dump_json(indent=1).encode())
        with (draft / file).open("wb") as shard:
            shard.truncate(entry.bytes)
    facts = CheckpointMetadata(step=1, samples=1, strategy="fsdp", world_size=ranks)
    first = writer.describe(facts, {})

    def publish() -> None:
        with profiled(profile, f"merge of {ranks} ranks"):
            manifest = writer._merged(draft, first, ranks)
            writer.check_files(draft, manifest)
            layout(manifest)
            manifest.dumps()

    print(f"merge of {ranks} ranks with {tensors} tensors each: {min(timed(publish) for _ in range(rounds)):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--merge", type=int, metavar="RANKS", help="measure rank 0's merge instead")
    parser.add_argument("--tensors", type=int, default=100, help="tensors of a rank in --merge")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.merge:
            merge(Path(folder), given.merge, given.tensors, given.profile, given.rounds)
        else:
            save_and_load(Path(folder), given.parameters, given.profile, given.rounds)


if __name__ == "__main__":
    main()
