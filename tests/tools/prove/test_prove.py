"""`ddpforge prove`: relations hold for a right script, and each planted error breaks one, with its factor and cause."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from ddpforge.api import Rounding
from ddpforge.cli import main
from ddpforge.tools.prove.certificate import Certificate, Relation
from ddpforge.tools.prove.changes import ScriptChange, trainer_of
from ddpforge.tools.prove.meaning import meaning
from ddpforge.tools.prove.relations import RelationLimits, Tried, _without_random, judged, without_effect
from ddpforge.tools.prove.runs import Observed, Options, ScriptRuns

LOOP = """
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--ga", type=int, default=1)
parser.add_argument("--bug", default="")
parser.add_argument("--steps", type=int, default=0)
parser.add_argument("--out", default="")
parser.add_argument("--resume", default="")
parser.add_argument("--eval", action="store_true")
given = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Sequential(
    torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
)
replica = model if given.bug == "no DDP" else torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, given.bs, sampler=DistributedSampler(data, seed=3))
passes = 0
if given.resume:
    kept = torch.load(given.resume)
    model.load_state_dict(kept["model"])
    passes = kept["passes"]
    if given.bug != "no optimizer state":
        optimizer.load_state_dict(kept["optimizer"])
start = 0 if given.bug == "samples again" else passes
for epoch in range(10):
    for inputs, targets in list(loader)[start if not epoch else 0 :]:
        outputs = replica(inputs)
        if given.bug == "place":
            outputs = outputs * torch.linspace(0.5, 1.5, len(outputs))[:, None]
        loss = F.cross_entropy(outputs, targets, reduction="sum" if given.bug == "sum" else "mean")
        if given.bug != "not divided":
            loss = loss / given.ga
        if given.bug == "world":
            loss = loss / dist.get_world_size()
        loss.backward()
        passes += 1
        if passes % given.ga == 0:
            if given.bug == "half":
                model[4].weight.grad *= 1 / given.ga
            if given.bug != "no clipping":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if given.eval:
                model.eval()
                with torch.no_grad():
                    model(x)
                if given.bug != "stays in eval":
                    model.train()
            if passes // given.ga == given.steps:
                kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "passes": passes}
                torch.save(kept, given.out)
                raise SystemExit
"""
WAYS = [
    *("--batch", "--bs {}", "--accumulate", "--ga {}", "--steps", "2"),
    *("--save", "--steps {steps} --out {path}", "--resume", "--resume {path}", "--evaluate", "--eval"),
]
TRIED = [
    *("again", "order", "doubled", "workers", "split", "ranks", "resume", "evaluation", "clipping", "frozen", "scale"),
    *("compile", "seed"),
]


def proved(folder: Path, *arguments: str, bug: str = "") -> dict[str, Any]:
    script = folder / "loop.py"
    script.write_text(LOOP)
    words = ["prove", str(script), "--json", *WAYS, *arguments, *(["--", "--bug", bug] if bug else [])]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == (1 if bug else 0), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------------------------------------- whole scripts
@pytest.mark.slow
def test_all_relations_hold_for_a_right_script(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = proved(tmp_path, "--html", str(page))
    results = {one["name"]: one["result"] for one in found["relations"]}
    assert results == dict.fromkeys(TRIED, "holds") | dict.fromkeys(("padding", "checkpointing"), "not tried")
    assert found["proved"]
    assert page.read_text().count('<article class="holds">') == len(TRIED)


@pytest.mark.full
@pytest.mark.parametrize(
    ("bug", "relation", "quantity", "factor"),
    [
        ("not divided", "split", "gradient", 2.0),
        ("sum", "doubled", "gradient", 2.0),
        ("world", "ranks", "gradient", 0.5),
        ("no DDP", "ranks", "gradient", None),
        ("half", "split", "gradient", 0.5),
        ("place", "order", "gradient", None),
        ("no optimizer state", "resume", "update", None),
        ("samples again", "resume", "samples", None),
        ("stays in eval", "evaluation", "mode", None),
    ],
)
def test_a_planted_error_breaks_a_relation(
    tmp_path: Path, bug: str, relation: str, quantity: str, factor: float | None
) -> None:
    found = proved(tmp_path, "--steps", "3", bug=bug)
    (broken,) = (one["broken"] for one in found["relations"] if one["name"] == relation)
    assert broken["quantity"] == quantity
    assert broken["step"] == (2 if relation in ("resume", "evaluation") else 1)
    if quantity == "gradient":
        assert broken["factor"] == (None if factor is None else pytest.approx(factor, rel=1e-3))


# ---------------------------------------------------------------------------------------------- observed runs
@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptRuns]:
    folder = tmp_path_factory.mktemp("prove")
    script = folder / "loop.py"
    alone = LOOP.replace('dist.init_process_group("gloo")', "")
    script.write_text(alone.replace(", sampler=DistributedSampler(data, seed=3)", ""))
    with ScriptRuns(script, ["--bug", "no DDP"], folder, 1, Options()) as found:
        yield found


@pytest.mark.slow
def test_an_observed_script_leaves_gradients_by_name_updates_and_the_samples_of_each_step(runs: ScriptRuns) -> None:
    found = runs.run(ScriptChange())
    assert found.gradients[0].keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}
    assert found.updates[0].keys() == found.gradients[0].keys()
    assert len({*found.samples[0]}) == 8
    assert (found.batches, found.passes) == ([8], 1)
    whole = torch.cat([*found.gradients[0].values()]).norm().item()
    assert found.norms[0] == pytest.approx(whole, rel=1e-5)  # before clipping
    assert found.counts["clipped"] == 1


@pytest.mark.slow
def test_changes_have_an_effect_that_is_counted(runs: ScriptRuns) -> None:
    base = runs.run(ScriptChange())
    twice = runs.run(ScriptChange(doubled=True))
    assert sorted(twice.samples[0]) == sorted([*base.samples[0], *base.samples[0]])
    assert runs.run(ScriptChange(order=True)).samples[0] == base.samples[0][::-1]
    assert runs.run(ScriptChange(compile=True)).counts["compiled"] == 1
    assert runs.run(ScriptChange(reseed=True)).counts["reseeded"] == 1
    scaled = runs.run(ScriptChange(scale=4.0))
    assert scaled.losses == base.losses
    assert all(torch.equal(scaled.gradients[0][name], one) for name, one in base.gradients[0].items())
    disturbed = runs.run(ScriptChange(perturbed=1)).gradients[0]
    differences = [float((disturbed[name] - one).norm() / one.norm()) for name, one in base.gradients[0].items()]
    assert 0 < max(differences) < 1e-5


# ---------------------------------------------------------------------------------------------- judgement
TIGHT = RelationLimits(*(Rounding([{}]) for _ in range(4)))
SPLIT = Tried("split", "", ScriptChange(split=2), equal_loss=False)
RESUME = Tried("resume", "", ScriptChange())


def run(*gradients: dict[str, Tensor], **more: Any) -> Observed:
    return Observed(gradients, losses=[1.0] * len(gradients), **more)


def test_the_first_step_the_parameter_and_the_factor_are_named() -> None:
    right = {"a": torch.ones(4), "router": torch.arange(4.0)}
    wrong = right | {"router": torch.arange(4.0) / 2}
    found = judged(SPLIT, run(right, right), run(right, wrong), TIGHT)
    assert found.result == "broken"
    assert found.broken is not None
    assert (found.broken.step, found.broken.parameter, found.broken.factor) == (2, "router", 0.5)
    assert [(one.name, one.multiple) for one in found.broken.worst] == [("router", 0.5)]


def test_a_difference_within_measured_rounding_holds() -> None:
    right, near = {"a": torch.ones(4)}, {"a": torch.ones(4) * (1 + 1e-3)}
    wide = replace(TIGHT, gradients=Rounding([{"a": 1e-3}]))
    found = judged(SPLIT, run(right), run(near), wide)
    assert (found.result, found.allowed) == ("holds", pytest.approx(4e-3))
    assert found.difference == pytest.approx(1e-3, rel=1e-2)
    assert judged(SPLIT, run(right), run(near), TIGHT).result == "broken"


def test_a_gradient_that_only_one_run_has_breaks_the_relation() -> None:
    found = judged(SPLIT, run({"a": torch.ones(2), "b": torch.ones(2)}), run({"a": torch.ones(2)}), TIGHT)
    assert found.broken is not None
    assert found.broken.parameter == "b"
    assert found.difference == float("inf")


@pytest.mark.parametrize(
    ("quantity", "more"),
    [("gradient norm", {"norms": [2.0]}), ("update", {"updates": [{"a": 2.0}]}), ("loss", {"losses": [2.0]})],
)
def test_norms_updates_and_losses_are_compared_if_the_gradients_are_equal(quantity: str, more: dict[str, Any]) -> None:
    one = Observed([{"a": torch.ones(2)}], losses=[1.0], norms=[1.0], updates=[{"a": 1.0}])
    found = judged(Tried("order", "", ScriptChange(order=True)), one, replace(one, **more), TIGHT)
    assert found.broken is not None
    assert (found.broken.quantity, found.broken.factor) == (quantity, 2.0)


def test_the_losses_of_micro_batches_may_be_reported_in_any_way() -> None:
    right = {"a": torch.ones(2)}
    assert judged(SPLIT, run(right), replace(run(right), losses=[2.0]), TIGHT).result == "holds"


def test_steps_after_a_resume_are_compared_with_the_later_steps() -> None:
    first, second = {"a": torch.ones(2)}, {"a": torch.full((2,), 2.0)}
    straight = run(first, second, samples=[["x"], ["y"]])
    assert judged(RESUME, straight, run(second, samples=[["y"]]), TIGHT).result == "holds"
    again = judged(RESUME, straight, run(first, samples=[["x"]]), TIGHT)
    assert again.broken is not None
    assert (again.broken.quantity, again.broken.step) == ("samples", 2)
    assert "other samples" in again.meaning


def test_a_model_that_stays_in_evaluation_mode_is_named() -> None:
    right = {"a": torch.ones(2)}
    found = judged(Tried("evaluation", "", ScriptChange()), run(right), run(right, modes=[["the model"]]), TIGHT)
    assert found.broken is not None
    assert (found.broken.quantity, found.broken.parameter) == ("mode", "the model")


@pytest.mark.parametrize(
    ("name", "ranks", "factor", "text"),
    [
        ("split", 1, 2.0, "not divided by their number"),
        ("split", 1, 0.5, "by the number of micro-batches twice"),
        ("ranks", 4, 4.0, "added over ranks"),
        ("ranks 4", 4, 0.25, "divided by the samples of all ranks"),
        ("doubled", 1, 2.0, "a sum over samples"),
        ("split", 1, 1.37, "multiplied by 1.37"),
        ("split", 1, None, "each micro-batch has its own mean"),
        ("order", 1, None, "place of a sample"),
        ("padding", 1, 0.9, "padding is counted"),
        ("scale", 1, None, "not proportional to the loss"),
    ],
)
def test_a_factor_is_explained(name: str, ranks: int, factor: float | None, text: str) -> None:
    assert text in meaning(name, factor, 2, ranks)


# ---------------------------------------------------------------------------------------------- changes
@pytest.mark.parametrize(
    ("script", "trainer"),
    [
        ("from transformers import Trainer, TrainingArguments", "transformers"),
        ("import torch\nfrom transformers import AutoModel  # ctrl", ""),  # a loop around a model
        ("    import trl, torch", "transformers"),
        ("import lightning.pytorch as pl", "lightning"),
        ("from accelerate import Accelerator", "accelerate"),
        ("import torch  # as in lightning, trl and transformers: Trainer", ""),
    ],
)
def test_the_trainer_of_a_script_is_found_by_its_imports(script: str, trainer: str) -> None:
    assert trainer_of(script) == trainer


@pytest.mark.parametrize(
    ("size", "divide", "batches", "expected"),
    [(8, 2, (8,), 4), (4, 2, (8,), 4), (8, 1, (), 4)],  # the last: split = 2
)
def test_a_batch_that_the_script_has_divided_by_its_ranks_is_not_divided_again(
    size: int, divide: int, batches: tuple[int, ...], expected: int
) -> None:
    assert ScriptChange(divide=divide, split=1 if divide > 1 else 2, batches=batches).part_of(size, 0) == expected


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(SystemExit, match="a batch of 3 cannot be divided by 2"):
        ScriptChange(split=2).part_of(3, 0)


@pytest.mark.parametrize(
    ("name", "one", "samples", "more", "why"),
    [
        ("order", ScriptChange(order=True), ["b", "a"], {}, ""),
        ("order", ScriptChange(order=True), ["a", "b"], {}, "the change has no effect"),
        ("doubled", ScriptChange(doubled=True), ["a", "b", "a", "b"], {}, ""),
        ("doubled", ScriptChange(doubled=True), ["a", "b"], {}, "the steps have other samples"),
        ("workers", ScriptChange(workers=2), ["a", "b"], {}, "the change has no effect"),
        ("workers", ScriptChange(), ["a", "b"], {}, ""),  # a setting of a recipe
        ("split", ScriptChange(split=2), ["a", "b"], {"passes": 2}, ""),
        ("split", ScriptChange(split=2), ["a", "b"], {}, "the change has no effect"),
        ("ranks", ScriptChange(divide=2), ["a", "c"], {}, "the steps have other samples"),
        ("ranks", ScriptChange(divide=2), ["b", "a"], {}, ""),
        ("padding", ScriptChange(padding=True), ["a", "b"], {}, "no batch has an attention mask"),
        ("padding", ScriptChange(padding=True), ["a", "b"], {"counts": {"padded": 1}}, ""),
        ("clipping", ScriptChange(clip=0), ["a", "b"], {}, "the script does not clip"),
        ("evaluation", ScriptChange(evaluation=True), ["a", "b"], {"counts": {"evaluated": 3}}, ""),
        ("evaluation", ScriptChange(evaluation=True), ["a", "b"], {"counts": {"evaluated": 1}}, "the change has no"),
    ],
)
def test_a_change_without_effect_proves_nothing(
    name: str, one: ScriptChange, samples: list[str], more: dict[str, Any], why: str
) -> None:
    gradients = [{"a": torch.ones(1)}]
    base = Observed(gradients, samples=[["a", "b"]], counts={"evaluated": 1})
    found = without_effect(Tried(name, "", one), base, Observed(gradients, samples=[samples], **more))
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_relations_of_samples_are_not_tried_if_the_forward_pass_draws_random_numbers() -> None:
    right, other = {"a": torch.ones(2)}, {"a": torch.zeros(2)}
    broken = [judged(Tried(name, "", ScriptChange()), run(right), run(other), TIGHT) for name in ("order", "seed")]
    assert [one.result for one in _without_random(broken)] == ["not tried", "not tried"]
    assert [one.result for one in _without_random(broken[:1])] == ["broken"]


# ---------------------------------------------------------------------------------------------- results
def certificate() -> Certificate:
    wrong = judged(SPLIT, run({"<a>": torch.ones(2)}), run({"<a>": torch.ones(2) * 2}), TIGHT)
    return Certificate("train.py", 1, 1e-7, "bfloat16", [wrong, Relation("resume", "", "not tried", "give --save")])


def test_the_text_names_relation_step_parameter_factor_and_cause() -> None:
    text = "\n".join(certificate().lines())
    assert "step 1: the gradient of `<a>` × 2" in text
    assert "the losses of micro-batches are added and not divided by their number" in text
    assert "0 of 1 relations hold over 1 steps of train.py" in text


def test_the_page_fetches_nothing_is_wide_as_the_device_and_escapes_names() -> None:
    page = certificate().page()
    assert 'content="width=device-width' in page
    assert "the gradient of `&lt;a&gt;` × 2" in page
    assert not [word for word in ("http", "<script", "<link", "<a>") if word in page]


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    lost = judged(SPLIT, run({"a": torch.ones(2)}), run({"b": torch.ones(2)}), TIGHT)
    found = Certificate("train.py", 1, 0.0, "", [lost]).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False))["relations"][0]["difference"] is None


def test_a_missing_script_is_refused() -> None:
    done = CliRunner().invoke(main, ["prove", "absent.py"])
    assert done.exit_code == 2
    assert "there is no script" in done.stderr
