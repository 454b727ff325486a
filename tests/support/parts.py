"""Small components for tests, with results that can be computed by hand.

Recipes in tests name them as `./parts.py:Name`; the fixture `write_recipe` puts this file next to the recipe.
"""

import copy
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer

from ddpforge.builtin.datasets.digits import Digits
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.interfaces import AuxiliaryModule, Callback, Replica, RunContext, ShardedDataset, StepInfo, Task, Total
from ddpforge.strategies.ddp import DDP


class RaggedTokens:
    """Sequences of 3 to 8 tokens over an alphabet of 16, padded to 8 with targets of -100."""

    random = False
    vocab_size, block_size = 16, 8

    def __init__(self, samples: int = 43) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(16, (samples, 8), generator=generator)
        lengths = torch.randint(3, 9, (samples, 1), generator=generator)
        self.targets = torch.where(torch.arange(8) < lengths, self.tokens.roll(-1, 1), -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.targets[index]


class MeasuredTokens(RaggedTokens):
    """The same sequences, with their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = (self.targets >= 0).sum(1)


class Points:
    """`samples` pairs (x, y) in which y is a fixed function of x; `noisy` adds fresh noise at every fetch."""

    def __init__(self, samples: int = 43, noisy: bool = False) -> None:
        self.x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(2))
        self.y = self.x.sum(1, keepdim=True).sin()
        self.random = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) / 10 if self.random else 0.0
        return self.x[index] + noise, self.y[index]


class DigitsInShards(ShardedDataset):
    """Digits of the test split in three shards, shuffled in a small buffer, with random noise on each."""

    shuffle, shuffle_buffer, interleave = True, 3, (2, 2)

    def __init__(self) -> None:
        self.digits, self.shard_sizes = Digits(split="test"), [100, 60, 70]

    def iter_shard(self, shard: int, *, epoch: int, skip: int) -> Iterator[int]:
        yield from range(shard * 100 + skip, shard * 100 + self.shard_sizes[shard])

    def prepare(self, number: int) -> tuple[Tensor, int]:
        image, label = self.digits[number]
        return image + torch.rand(image.shape) / 10, label


class Recorder(Callback):
    """Writes, per rank, one line per step: the step and a checksum of the weights after it."""

    def on_start(self, run: RunContext) -> None:
        self.model, self.rank = run.model, run.world.global_ranks.rank
        self.file = open(f"weights-{run.world.global_ranks.rank}.txt", "a")  # noqa: SIM115

    def on_step(self, info: StepInfo) -> None:
        total = sum(float(p.detach().double().sum()) for p in self.model.parameters())
        print(info.step, f"{total:.17g}", file=self.file, flush=True)


class SumOfLosses(Task):
    """The loss of a sample is whatever the model returns for it."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        losses = model(batch)
        return losses.sum(), losses

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
        return {"mean": Total(outputs.sum(), len(outputs))}


class StopAt(Callback):
    """Sends `signal` to its own process after `step`, on rank `rank` only; not again when resumed after it."""

    def __init__(self, step: int, rank: int, signal: str = "SIGTERM") -> None:
        self.step, self.rank, self.signal = step, rank, signal

    def on_start(self, run: RunContext) -> None:
        self.here = run.world.global_ranks.rank == self.rank

    def on_step(self, info: StepInfo) -> None:
        if self.here and info.step == self.step:
            os.kill(os.getpid(), signal.Signals[self.signal])


class Killed(Callback):
    """Kills (-9) rank KILL_RANK from another process, KILL_AFTER seconds after `on_start`."""

    def on_start(self, run: RunContext) -> None:
        victim = os.getpid()
        if str(run.world.global_ranks.rank) == os.environ.get("KILL_RANK") and os.fork() == 0:
            time.sleep(float(os.environ["KILL_AFTER"]))
            if os.getppid() == victim:
                os.kill(victim, signal.SIGKILL)
            os._exit(0)


class KilledAgain(Callback):
    """Kills (-9) a random rank in each of the first KILLS attempts of a launch, after up to KILL_AFTER seconds."""

    def on_start(self, run: RunContext) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        chance = random.Random(f"{os.environ.get('KILL_SEED')} {attempt}")
        rank, after = (
            chance.randrange(run.world.global_ranks.size),
            chance.uniform(0, float(os.environ.get("KILL_AFTER", "0"))),
        )
        victim = os.getpid()
        if attempt < int(os.environ.get("KILLS", "0")) and rank == run.world.global_ranks.rank and os.fork() == 0:
            time.sleep(after)
            if os.getppid() == victim:
                with open(".killed", "a") as file:
                    print(rank, after, file=file)
                os.kill(victim, signal.SIGKILL)
            os._exit(0)


class NoDisk(Callback):
    """Makes checkpoints unwritable from step `begin` to step `end`; the existing ones are moved away meanwhile."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.folder = Path("runs/run/checkpoints")

    def on_start(self, run: RunContext) -> None:
        self.is_main = run.world.is_rank_zero

    def on_step(self, info: StepInfo) -> None:
        aside = self.folder.with_name("aside")
        if self.is_main and info.step in (self.begin, self.end):
            for thread in threading.enumerate():
                if thread.name.startswith("checkpoint writer"):
                    thread.join()
        if self.is_main and info.step == self.begin:
            self.folder.rename(aside)
            self.folder.touch()
        if self.is_main and info.step == self.end:
            self.folder.unlink()
            aside.rename(self.folder)


class SaveAgain(Callback):
    """Ends a run right after it has restored a checkpoint: saves it again and trains nothing."""

    def __init__(self) -> None:
        from ddpforge.training.loop import Trainer

        def fit(self: Trainer, profile: None = None) -> str:
            self.saving.step = None
            self.milestones.start(self.progress)
            self.milestones.save(self.progress, last=True)
            self.saving.wait_for_pending(last=True)
            return "preempted"

        Trainer.fit = fit  # type: ignore[assignment, method-assign]


class Scalars(nn.Module):
    """A weight of shape [1] for each letter of `weights`, all `start`; forward uses those in `uses`."""

    def __init__(self, weights: str = "a", uses: str = "", frozen: str = "", start: float = 0.0) -> None:
        super().__init__()
        for name in weights:
            self.register_parameter(name, nn.Parameter(torch.tensor([start]), requires_grad=name not in frozen))
        rank = int(os.environ.get("RANK", "0"))
        self.uses = weights[rank] if uses == "one by rank" else uses or weights

    def forward(self, x: Tensor) -> Tensor:
        return sum((getattr(self, name) * x for name in self.uses), torch.zeros_like(x))


class Branches(Scalars):
    """Uses `a` for samples below 10 and `b` for others, less 10; a micro-batch must be of one kind."""

    def __init__(self) -> None:
        super().__init__(weights="ab")

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x if x[0] < 10 else self.b * (x - 10)


class Values:
    """The sample at index i is the number `values[i]`; the one at index `nan` is NaN."""

    random = False

    def __init__(self, values: list[float], nan: int = -1) -> None:
        self.values = torch.tensor(values)
        if nan >= 0:
            self.values[nan] = torch.nan

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index]


class Thaw(Callback):
    """Unfreezes `b` after the first step."""

    def on_start(self, run: RunContext) -> None:
        self.model = run.model

    def on_step(self, info: StepInfo) -> None:
        self.model.b.requires_grad_(True)  # type: ignore[union-attr]
        self.model.uses = "ab"  # type: ignore[assignment]


class Statistics(nn.Module):
    """BatchNorm over one feature whose running mean is simply the last batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unsqueeze(1)).squeeze(1)


class ShowBuffers(Callback):
    """Writes each rank's running mean when an evaluation begins."""

    def on_start(self, run: RunContext) -> None:
        self.model, self.rank = run.model, run.world.global_ranks.rank

    def evaluating(self) -> nullcontext[None]:
        mean = next(buffer for name, buffer in self.model.named_buffers() if "mean" in name)
        with open(f"mean-{self.rank}.txt", "w") as file:
            file.write(str(mean.item()))
        return nullcontext()


class ShowTimeouts(Callback):
    """Writes the timeout of each process group's collectives, in seconds, after the second step."""

    def on_step(self, info: StepInfo) -> None:
        if info.step == 2 and os.environ["RANK"] == "0":
            groups = [*dist.distributed_c10d._world.pg_map]
            waits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
            Path("timeouts.json").write_text(json.dumps(waits))


class FailAt(Callback):
    """Raises ValueError on one rank after `step`."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_start(self, run: RunContext) -> None:
        self.here = run.world.global_ranks.rank == self.rank

    def on_step(self, info: StepInfo) -> None:
        if self.here and info.step == self.step:
            raise ValueError("the disk of rank 1 is on fire")


class ByParity(Task):
    """Reports the means of even and of odd samples as two metrics, each only if the batch has such samples."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        return model(batch).sum(), batch

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
        found = {}
        for name, rest in (("even", 0), ("odd", 1)):
            if len(chosen := batch[batch % 2 == rest]):
                found[name] = Total(chosen.sum(), len(chosen))
        return found


class MeanOfLosses(SumOfLosses):
    """Returns a mean as the loss, which must be a sum."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        losses = model(batch)
        return losses.mean(), losses


class WeighedSamples(Task):
    """Weighs the sample x by x / 10: multiplies the model's loss by it."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        losses = model(batch) * batch / 10
        return losses.sum(), losses

    def count(self, batch: Any) -> Tensor:
        return (batch / 10).sum()


class NumbersByRank(torch.utils.data.IterableDataset[Tensor]):
    """The numbers 0 to 9, in another order on every rank if `apart`; shuffled with torch's generator if `shuffled`."""

    def __init__(self, apart: bool = False, shuffled: bool = False) -> None:
        self.numbers = torch.arange(10.0)
        self.shuffled = shuffled
        if apart:
            self.numbers = self.numbers.roll(int(os.environ.get("RANK", "0")))

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(10) if self.shuffled else torch.arange(10)
        return iter(self.numbers[order])


class Seen(Scalars):
    """Writes the training samples of each rank to a file."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with open(f"seen-{os.environ.get('RANK', '0')}.txt", "a") as file:
                print(*x.tolist(), file=file)
        return super().forward(x)


class Remembers(Seen):
    """Keeps its newest training sample in a buffer; in evaluation, returns its inputs plus that buffer."""

    newest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("newest", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.newest.copy_(x[-1:].detach())
            return super().forward(x)
        return 0.0 * self.a + self.newest + x


class CountsReductions(DDP):
    """Writes the number of gradient all-reduces of each rank to a file."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        prepared = super().prepare(model, optimizer)
        self.reductions = 0

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            self.reductions += 1
            Path(f"reductions-{os.environ['RANK']}.txt").write_text(str(self.reductions))
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        prepared.module.register_comm_hook(None, hook)  # type: ignore[operator]
        return prepared


class Taught(nn.Module):
    """A student and a frozen teacher of the same form; the output is the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
        self.teacher = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) + self.teacher(x)


class Momentum(Callback):
    """Moves the teacher towards the student: in each rank's shards or, if `straight`, in the model's parameters."""

    def __init__(self, straight: bool = False) -> None:
        self.straight = straight

    def on_start(self, run: RunContext) -> None:
        self.model, self.weights = run.model, run.weights

    @torch.no_grad()
    def on_step(self, info: StepInfo) -> None:
        if self.straight:
            pairs = zip(self.model.teacher.parameters(), self.model.student.parameters(), strict=True)
            for teacher, student in pairs:
                teacher.data.mul_(0.5).add_(student.data, alpha=0.5)
            return
        for name, part in self.weights.frozen().items():
            student = self.weights.elements(name.replace("teacher", "student"), part.region)
            part.tensor.view(-1).lerp_(student, 0.5)
        self.weights.mark_changed()


class Net(nn.Sequential):
    """Two blocks and a linear head; `normed` adds BatchNorm before the head."""

    def __init__(self, normed: bool = False, inputs: int = 4) -> None:
        norms = [nn.BatchNorm1d(9)] if normed else []
        super().__init__(
            nn.Sequential(nn.Linear(inputs, 9), nn.Tanh()),
            nn.Sequential(nn.Linear(9, 9), nn.Tanh()),
            *norms,
            nn.Linear(9, 1),
        )


class Accompanied(Task):
    """Learns from the data, a frozen `teacher`, a copy of the model that follows it, and a model of rewards."""

    def __init__(
        self,
        teacher: nn.Module,
        weights: str | None = None,
        saved: bool | None = None,
        follows: str | None = "",
        training: bool = False,
    ) -> None:
        self.teacher, self.rewarding = teacher, Net(inputs=1)
        self.weights, self.saved, self.follows, self.training = weights, saved, follows, training

    def auxiliary_modules(self, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        self.target = copy.deepcopy(model)
        return {
            "teacher": AuxiliaryModule(module=self.teacher, weights=self.weights, saved=self.saved),
            "target": AuxiliaryModule(
                module=self.target, follows=self.follows, momentum=_rising, training=self.training
            ),
            "rewarding": AuxiliaryModule(module=self.rewarding),
        }

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        inputs, targets = batch
        outputs = model(inputs)
        with torch.no_grad():
            followed = self.target(inputs)
        errors = sum((outputs - wanted).square() for wanted in (targets, followed, self.teacher(inputs)))
        return (errors - self.rewarding(outputs)).sum(), outputs


def _rising(step: int) -> float:
    return 1.0 - 0.5 / (1 + step)


class SpoiltPoints(Points):
    """Points with one NaN sample."""

    def __init__(self, samples: int = 43, spoilt: int = 0) -> None:
        super().__init__(samples)
        self.x[spoilt] = torch.nan


def _refuse_evaluation(what: str) -> None:
    if "EVALUATES" in os.environ:
        raise RuntimeError(f"an evaluation has no {what}")


class TrainingPoints(Points):
    """Points for training; fails if EVALUATES is set."""

    def __init__(self, samples: int = 43) -> None:
        _refuse_evaluation("training data")
        super().__init__(samples)


def training_adamw(params: Any, lr: float = 0.1) -> Optimizer:
    """Builds AdamW; fails if EVALUATES is set."""
    _refuse_evaluation("optimizer")
    return torch.optim.AdamW(params, lr=lr)


def training_schedule(horizon: Any) -> Any:
    """Returns a constant schedule; fails if EVALUATES is set."""
    _refuse_evaluation("schedule")
    return lambda step: 1.0


class Hears(Callback):
    """Records the calls it receives and the number of process groups; fails an evaluation if FAIL is set."""

    def on_start(self, run: RunContext) -> None:
        self.file = f"heard-{run.world.global_ranks.rank}.txt"
        self.note(f"start in {len(dist.distributed_c10d._world.pg_map)} groups")

    def evaluating(self) -> nullcontext[None]:
        self.note("evaluation")
        if "FAIL" in os.environ:
            raise ValueError("cannot lend weights")
        return nullcontext()

    def on_end(self, error: BaseException | None) -> None:
        self.note(f"end: {error!r}")

    def note(self, what: str) -> None:
        with open(self.file, "a") as file:
            print(what, file=file)


class Spoils(LanguageModeling):
    """Returns NaN as the loss of some training batches, selected by their tokens."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        loss, outputs = super().loss(model, batch)
        return (loss * torch.nan if model.training and int(batch[0].sum()) % 23 == 0 else loss), outputs
