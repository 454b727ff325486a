"""Conformance kit: it finds the faults of components, and names each with its place."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.doubles import Clock

from ddpforge.interfaces import Tracker
from ddpforge.testing import Kit, Result
from ddpforge.testing.cases import find_cases
from ddpforge.testing.checks.tracker import never_raises
from ddpforge.testing.report import Breach

FILE = Path(__file__).with_name("broken.py")


def failures(name: str, *, quick: bool = True) -> dict[str, Result]:
    with Kit(find_cases(f"{FILE}:{name}"), quick=quick) as kit:
        return {result.check: result for result in kit.run() if result.status == "failed"}


def line_of(text: str) -> int:
    return FILE.read_text().splitlines().index(text) + 1


@pytest.mark.parametrize(
    ("name", "check", "says"),
    [
        ("Undocumented", "docstring", "found     none of its own"),
        ("Undocumented", "options-documented", "none of `often`\n"),
        ("TakesUse", "options-reachable", "an option `use`, which no recipe can set"),
        ("ForgetsOutputs", "takes-a-batch", "`loss` to return a pair"),
        ("Loose", "options-strict", "`thing` accepted"),
        ("UnusedLayer", "unused-parameters", "`extra.weight`, `extra.bias` got no gradient"),
        ("RandomNames", "stable-names", "only in one: layer"),
        ("OwnGenerator", "stable-names", "`body.weight` differs between two models built after torch.manual_seed(5)"),
        ("ReadsValues", "meta-device", "a build on the meta device"),
        ("ForgetsAStep", "pipeline-steps", "one after the other, to be its forward pass\nfound     another result"),
        ("UsesMore", "pipeline-steps", "step `leave` to use only its entries in `pipeline`: head"),
        ("Infinite", "finite", "a finite loss at the initial weights"),
        ("NeedsOptions", "builds", "width: Field required"),
        ("FitsNothing", "takes-a-batch", "missing 1 required positional argument: 'b'"),
        ("Repeats", "each-sample-once", "20 of the first 40 are copies of others: samples are repeated"),
        ("RepeatsInBatches", "batched-fetching", "to return the samples of __getitem__"),
        ("Restless", "deterministic", "the same samples when built twice from one seed"),
        ("SecretlyRandom", "deterministic", "no use of random numbers, because it declares `random = False`"),
        ("NotPicklable", "picklable", "for loader processes"),
        ("Empty", "each-sample-once", "expected  at least one sample\nfound     Empty of length 0"),
        ("IsALoader", "each-sample-once", "a DataLoader, which IsALoader reads, is a loader, not a dataset"),
        ("LosesSamples", "each-sample-once", "a list (float32 [3, 2], int64 [3]) for 4 samples"),
        ("ForgetsWhere", "shard-sizes", "iter_shard(0, epoch=0, skip=1) to continue from sample 1"),
        (
            "TooShort",
            "shard-sizes",
            "the 5 samples that `shard_sizes` has for part 0\nfound     `iter_shard` yields 4\n",
        ),
        ("Rolls", "pure", "a pure function of the step"),
        ("Overshoots", "whole-steps", "at least one sample of 0 to 99\nfound     [100] at step 50\n"),
        ("SaysOnce", "once-an-epoch", "no sample twice in an epoch, because it declares `once = True`"),
        ("LooksAround", "any-places", "the sample at a place to depend only on that place"),
        ("AveragesPerBatch", "loss-is-a-sum", "it averages within a batch"),
        ("LooksAtPlaces", "keeps-relations", "relation `order`: the samples of a batch in reverse order"),
        ("HalvesABatch", "keeps-relations", "relation `split`: the gradients of the pieces of a batch"),
        ("HalvesABatch", "keeps-relations", "` × 3"),
        ("DropsItsScale", "keeps-relations", "relation `scale`: a loss that is multiplied"),
        ("by_first", "keeps-relations", "relation `order`: parameters in reverse order"),
        ("NoisyAverage", "loss-is-a-sum", "it averages within a batch"),
        ("SeesItsOwn", "loss-is-a-sum", "with half of the batch each\nfound     a loss of "),
        ("LosesGradients", "loss-is-a-sum", "another gradient of `"),
        ("HasTwoLosses", "loss-from-outputs", "`loss_from_outputs` of pieces of a batch to add up to `loss`"),
        ("CountsOnes", "count-is-additive", "1 instead of 6"),
        ("AveragesMetrics", "metrics-are-additive", "the sum of size is"),
        ("LosesState", "state-comes-back", "another `seen`"),
        ("MeanMetric", "total-is-additive", "the sum of mean is"),
        ("forgetful", "resumes-exactly", "other weights after step 6"),
        ("by_norm", "element-wise", "it depends on whole parameters"),
        ("one_group", "parameter-groups", "the two groups that were passed\nfound     1\n"),
        ("counting", "pure", "a pure function of the step"),
        ("negative", "finite", "at step 51 of 100"),
        ("undefined", "finite", "a factor for step 100\nfound     IndexError"),
        ("Raises", "never-raises", "`log` not to raise"),
        ("NeedsItsFolder", "survives-a-broken-target", "`start` not to raise if its folder cannot be written"),
    ],
)
def test_fault_is_reported_with_the_component_file(name: str, check: str, says: str) -> None:
    found = failures(name)
    assert check in found
    assert says in found[check].text()
    assert found[check].where.startswith(f"{FILE}:"), found[check].where


def test_loss_over_the_whole_batch_is_not_a_fault() -> None:
    assert not failures("LooksAtAll")


@pytest.mark.parametrize(
    ("name", "check", "line"),
    [
        ("Raises", "never-raises", "            int(value)"),
        ("ReadsValues", "meta-device", "        self.scale = self.body.weight.std().item()"),
        ("undefined", "finite", "    return lambda step: factors[step]"),
        (
            "AveragesPerBatch",
            "loss-is-a-sum",
            "    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:",
        ),
    ],
)
def test_fault_is_reported_with_its_line(name: str, check: str, line: str) -> None:
    assert failures(name)[check].where == f"{FILE}:{line_of(line)}"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("model", "expected  a torch.nn.Module, as its kind is `model`\nfound     a StateByRank\n"),
        ("optimizer", "expected  a torch.optim.Optimizer, "),
        ("strategy", "expected  a ddpforge.interfaces.Strategy, "),
        ("schedule", "expected  a function of the step, "),
        ("data", "expected  data with __len__ and __getitem__, or with __iter__, "),
    ],
)
def test_component_of_another_kind_fails_one_check(kind: str, says: str) -> None:
    with Kit(find_cases(f"{FILE}:StateByRank", kind=kind), quick=True) as kit:
        (failed,) = [result for result in kit.run() if result.status == "failed"]
    assert failed.check == "builds"
    assert failed.text().startswith(says)
    assert failed.where.startswith(f"{FILE}:")


def test_iterable_dataset_of_torch_is_accepted() -> None:
    assert not failures("Endless")


def test_one_fault_fails_only_its_own_checks() -> None:
    """Checks of correct properties pass."""
    for name, expected in (
        ("AveragesPerBatch", {"loss-is-a-sum"}),
        ("Repeats", {"each-sample-once"}),
        ("counting", {"pure"}),
        ("Raises", {"never-raises", "survives-a-broken-target"}),
        ("UnusedLayer", {"unused-parameters"}),
        ("FitsNothing", {"takes-a-batch"}),
        ("ForgetsOutputs", {"takes-a-batch"}),
        ("TakesUse", {"options-reachable"}),
    ):
        assert failures(name).keys() == expected, name


def test_hint_shows_the_missing_settings_and_their_file() -> None:
    hint = failures("NeedsOptions")["builds"].hints[0]
    assert "write `options = { width = 2 }` below [model.NeedsOptions]" in hint
    assert "ddpforge_testing.toml next to the component" in hint
    hint = failures("FitsNothing")["takes-a-batch"].hints[0]
    assert 'write `data = { use = "…", … }` and `task = { use = "…", … }` below [model.FitsNothing]' in hint


class Waits(Tracker):
    """Tracker whose `log` takes the next of `seconds`, in a cycle."""

    def __init__(self, clock: Clock, seconds: Sequence[float]) -> None:
        self.clock, self.seconds = clock, cycle(seconds)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.clock.now += next(self.seconds)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [([1.1], "`log` took 1.1 s or more, every time"), ([5, 3, 9, 4], "`log` took 3.0 s or more"), ([0.9, 60], "")],
)
def test_tracker_that_is_slow_at_every_row_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], said: str
) -> None:
    """Single slow rows are not a fault: the machine may be busy."""
    clock = Clock()
    monkeypatch.setattr("ddpforge.testing.checks.tracker.time", SimpleNamespace(monotonic=clock))
    case: Any = SimpleNamespace(build=lambda: Waits(clock, seconds))
    with pytest.raises(Breach) if said else nullcontext() as caught:
        never_raises(case, None)  # type: ignore[arg-type]
    if said:
        assert said in str(caught.value)


# ---------------------------------------------------------------------------------------------- several ranks
RANKS = {
    "DependsOnRank": ("same-on-two-ranks", "train/loss differs at step 1"),
    "ShardsItself": ("same-on-every-rank", "sample 0 of rank 1 differs from that of rank 0"),
    "StopsAlone": ("agrees-on-all-ranks", "on_step at step 4 is False on rank 0 and True on rank 1"),
    "StateByRank": ("agrees-on-all-ranks", "its state is {'rank': 0} on rank 0 and {'rank': 1} on rank 1"),
    "ForgetsItsCount": ("state-round-trip", "`seen` is 3, not 6"),
    "LeavesWeights": ("agrees-on-all-ranks", "the weights after `evaluating` differ"),
    "UnusedLayer": ("same-on-two-ranks", "got no gradient on rank"),
    "ForgetsToAverage": ("trains-like-ddp", "even without accumulation and clipping: gradients are not averaged"),
    "TrainsApart": ("trains-like-ddp", "even without accumulation and clipping: weights are not averaged over ranks"),
    "LosesMicroBatches": ("trains-like-ddp", "the gradients of micro-batches are not summed"),
    "ClipsEachParameter": ("trains-like-ddp", "gradients are clipped by another norm"),
    "SavesRounded": ("trains-like-ddp", "weights differs at step 12"),
    "CountsTwice": ("trains-like-ddp", "CountsTwice declares 1 data-parallel rank(s), but a sum over them counts 2"),
    "PromisesTooMuch": ("trains-like-ddp", "PromisesTooMuch promises that 2 ranks hold each trainable weight once"),
    "ForgetsMomentum": ("resumes-on-any-ranks", "after a resume at step 6, train/loss differs at step 2"),
}
SOUND = ["SeesTheSame"]


@pytest.fixture(scope="module")
def found() -> Callable[[str], dict[str, Result]]:
    """Returns a function that gives a component's failures. Components of `make test` share a kit, as do others."""

    @cache
    def together(*, full: bool) -> dict[str, dict[str, Result]]:
        names = [*RANKS] if full else SOUND
        results: dict[str, dict[str, Result]] = {name: {} for name in names}
        with Kit([case for name in names for case in find_cases(f"{FILE}:{name}")]) as kit:
            for result in kit.run():
                if result.status == "failed":
                    results[result.name][result.check] = result
        return results

    return lambda name: together(full=name in RANKS)[name]


@pytest.mark.full
@pytest.mark.parametrize("name", RANKS)
def test_fault_that_needs_several_ranks_is_found(found: Callable[[str], dict[str, Result]], name: str) -> None:
    """Cases share launches: a case that fails does not hide the faults of the next."""
    check, says = RANKS[name]
    assert check in found(name)
    assert says in found(name)[check].text()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_unusual_but_correct_components_pass(found: Callable[[str], dict[str, Result]], name: str) -> None:
    assert not found(name)
