"""Silent corruption: hashes of what must be equal on replicas, and gradients that a second rank computes again."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ddpforge.data import MicroBatch
from ddpforge.errors import SetupError, UsageError
from ddpforge.features.bit_hash import BitHash, TensorHashes
from ddpforge.features.corruption_check import CorruptionCheck
from ddpforge.features.second_pass import SecondPass
from ddpforge.interfaces import Replica, Task, TensorShard, World
from ddpforge.strategies.ddp_replica import DDPReplica
from ddpforge.training.features import Assembled, Feature

__all__ = ["Corruption", "SilentCorruption", "SilentCorruptionError", "minority"]

log = logging.getLogger("ddpforge")

LOCAL, REDUCED, WEIGHTS, OPTIMIZER = "local gradient", "reduced gradient", "weights", "optimizer state"
_AGAIN = "gradient computed again"  # of another rank's micro-batch


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """Finding: the kind of the tensors, the ranks that may be at fault, and the names of different tensors.

    `ranks` is one rank if a majority of the ranks agrees; otherwise one of `ranks` is at fault.
    """

    kind: str
    ranks: tuple[int, ...]
    names: tuple[str, ...]


class SilentCorruptionError(SetupError):
    """Error for bits that changed without an error of a device, of memory or of the network; see `found`."""

    def __init__(self, message: str, found: Sequence[Corruption], *, hints: Sequence[str]) -> None:
        super().__init__(message, hints=hints)
        self.found = tuple(found)


def minority(values: Sequence[Any]) -> list[int]:
    """Returns the indices of the values that differ from the majority; of all if no majority is equal."""
    (most, count), *others = Counter(values).most_common()
    if not others:
        return []
    return [i for i, one in enumerate(values) if one != most or 2 * count <= len(values)]


# ---------------------------------------------------------------------------------------------- feature
class SilentCorruption(Feature):
    """Comparison of ranks every N steps, see `CorruptionCheck`."""

    def __init__(self, world: World, replica: Replica, task: Task, options: CorruptionCheck, key: str) -> None:
        self._ranks, self._replica, self._task = world.global_ranks, replica, task
        self._options, self._key = options, key
        self._hash = BitHash()
        self._hosts = self._ranks.all_gather_object(os.uname().nodename)
        parts = [(name, part.shape, part.region) for name, part in replica.weights.shards().items()]
        held = self._ranks.all_gather_object(hashlib.blake2b(repr(parts).encode()).hexdigest())
        self._groups = [[rank for rank, one in enumerate(held) if one == kind] for kind in dict.fromkeys(held)]
        if all(len(group) == 1 for group in self._groups):
            raise UsageError(
                f"{key} finds nothing to compare: no two of {self._ranks.size} rank(s) hold the same weights",
                hints=['use two or more ranks and strategy.use = "ddp", or remove the callback'],
                key=key,
            )
        self._twice: SecondPass | None = None
        if options.local_gradients and isinstance(replica, DDPReplica):
            self._twice = SecondPass(world, replica, task, self._hash, key)
        elif options.local_gradients:
            log.info("%s compares replicas, but computes no local gradient again: it does so under ddp", key)
        self._begun = False  # True after the first check
        self._clean: int | None = None  # step of the last check without a finding
        self._equal: int | None = None  # step at which replicas were last equal; a later one at a checkpoint
        options.compare = self.compare

    @classmethod
    @override
    def of(cls, run: Assembled) -> Self | None:
        """Returns the feature if the recipe has its callback."""
        for name, one in run.parts.callbacks.items():
            if isinstance(one, CorruptionCheck) and run.trains:
                return cls(run.world, run.replica, run.parts.task, one, f"callbacks.{name}")
        return None

    @override
    def start(self, stateful: nn.Module) -> None:
        if self._twice:
            self._twice.wrap_loss(stateful)

    @override
    def around_update(self, optimizer: Optimizer) -> Callable[[Callable[[], Any]], Tensor] | None:
        if getattr(optimizer, "passes", 1) > 1:
            raise UsageError(
                f"{self._key} does not work with {type(optimizer).__name__}, which makes several passes per step",
                hints=["remove the callback, or use an optimizer that makes one pass"],
                key=self._key,
            )
        return None

    @property
    def _due(self) -> bool:
        return not self._begun or self._task.step_of_run % self._options.every == 0

    @override
    def before_pass(self, micro: MicroBatch) -> None:
        if self._twice and micro.last and self._due:
            self._twice.arm(micro)

    def compare(self) -> None:
        """Compares all ranks if the step is to be checked; called before the update. Collective.

        Raises SilentCorruptionError for a finding, and UsageError if the model's gradients cannot be compared.
        """
        if not self._due:
            return
        mine = {REDUCED: self._hashes(self._replica.gradients_by_name()), **self._state()}
        same = True
        if self._twice:
            own, again, same = self._twice.hashes(measures=not self._begun)
            mine |= {LOCAL: own, _AGAIN: again}
        self._report(self._find(mine, same))
        self._begun, self._clean = True, self._task.step_of_run
        if self._twice:
            self._twice.release()

    @override
    def before_save(self) -> None:
        if self._begun:
            self._report(self._find(self._state(), True))

    def _state(self) -> dict[str, TensorHashes]:
        optimizer = {
            f"{name} ({key})": value
            for name, entry in self._replica.state().optimizer.items()
            for key, value in entry.items()
        }
        return {WEIGHTS: self._hashes(self._replica.weights.shards()), OPTIMIZER: self._hashes(optimizer)}

    def _hashes(self, tensors: Mapping[str, Any]) -> TensorHashes:
        held = {name: one.tensor if isinstance(one, TensorShard) else one for name, one in tensors.items()}
        return TensorHashes({name: self._hash(one) for name, one in held.items() if isinstance(one, Tensor)})

    # -- decision: the same on every rank
    def _find(self, mine: Mapping[str, TensorHashes], same: bool) -> list[Corruption]:
        table = self._ranks.all_gather_object(({kind: one.digest for kind, one in mine.items()}, same))
        digests = [row for row, _ in table]
        found = []
        for kind in (one for one in mine if one not in (LOCAL, _AGAIN)):
            odd = [[group[i] for i in minority([digests[rank][kind] for rank in group])] for group in self._groups]
            if any(odd):
                names = self._ranks.all_gather_object(mine[kind].by_name)  # the second look
                found += [_of_replicas(kind, *one, names) for one in zip(self._groups, odd, strict=True) if one[1]]
        if LOCAL not in mine or any(one.kind == WEIGHTS for one in found):  # other weights have other gradients
            return found
        if not all(deterministic for _, deterministic in table):
            raise UsageError(
                f"{self._key}.local_gradients compares bits, but two backward passes of one micro-batch differ on "
                "a rank: the model is not deterministic",
                hints=["set train.deterministic = true", f"or set {self._key}.local_gradients = false"],
                key=f"{self._key}.local_gradients",
            )
        return [*found, *self._find_local(mine, digests)]

    def _find_local(self, mine: Mapping[str, TensorHashes], digests: Sequence[Mapping[str, str]]) -> list[Corruption]:
        twice = self._twice
        assert twice is not None
        differ = [rank for rank in range(len(digests)) if digests[rank][LOCAL] != digests[twice.other(rank)][_AGAIN]]
        if not differ:
            return []
        if not self._begun and len(differ) == len(digests) > 2:
            raise UsageError(
                f"{self._key}.local_gradients found that each rank computes another gradient of a micro-batch than the "
                "rank next to it: the loss or the model depends on the rank",
                hints=[f"set {self._key}.local_gradients = false"],
                key=f"{self._key}.local_gradients",
            )
        third = twice.third(differ)
        looks = self._ranks.all_gather_object((mine[LOCAL].by_name, mine[_AGAIN].by_name, third and third.by_name))
        found = []
        for rank in differ:
            other = twice.other(rank)
            first, second, judge = looks[rank][0], looks[other][1], looks[twice.judge(rank)][2]
            ranks = tuple(sorted((rank, other)))
            if judge == second:
                ranks = (rank,)
            elif judge == first and self._ranks.size > 2:
                ranks = (other,)
            found.append(Corruption(kind=LOCAL, ranks=ranks, names=_different([first, second])))
        return found

    def _report(self, found: Sequence[Corruption]) -> None:
        step = self._task.step_of_run
        if not found:
            self._equal = step
            return
        clean = self._clean if any(one.kind == LOCAL for one in found) else self._equal
        text = f"step {step}: silent corruption: {'; '.join(map(self._text, dict.fromkeys(found)))}"
        hosts = sorted({self._hosts[rank] for one in found for rank in one.ranks})
        hints = [
            f"start the run without {', '.join(hosts)}, and test the devices, the memory and the network there",
            "`ddpforge ckpt ls RUN` lists the checkpoints: move those away that are newer than "
            + (f"step {clean}, the last check without a finding" if clean is not None else "this attempt"),
            "the same command then resumes from the newest checkpoint that is left",
        ]
        if self._options.stops:
            raise SilentCorruptionError(text, found, hints=hints)
        if self._ranks.is_rank_zero:
            log.warning("%s; %s", text, hints[0])

    def _text(self, one: Corruption) -> str:
        places = " or ".join(f"rank {rank} on {self._hosts[rank]}" for rank in one.ranks)
        names = ", ".join(f"`{name}`" for name in one.names[:3])
        more = f" and {len(one.names) - 3} more" if len(one.names) > 3 else ""
        return f"wrong {one.kind} of {names}{more} on {places}"


def _of_replicas(
    kind: str, group: Sequence[int], odd: Sequence[int], hashes: Sequence[Mapping[str, int]]
) -> Corruption:
    return Corruption(kind=kind, ranks=tuple(odd), names=_different([hashes[rank] for rank in group]))


def _different(hashes: Iterable[Mapping[str, int]]) -> tuple[str, ...]:
    """Returns the names whose hashes are not equal everywhere."""
    each = list(hashes)
    return tuple(name for name in dict.fromkeys(n for one in each for n in one) if len({h.get(name) for h in each}) > 1)
