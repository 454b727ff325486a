"""`ddpforge certify`: the layouts that strategies declare, and rows that compare each with one process."""

import json
from collections import Counter
from pathlib import Path
from shutil import copy

import pytest
from support import SUPPORT

from ddpforge.components.registry import Registry
from ddpforge.errors import ForgeError, SetupError, UsageError
from ddpforge.strategies.ddp import DDP as DDPStrategy
from ddpforge.strategies.deepspeed import DeepSpeed
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.pipeline import Pipeline
from ddpforge.strategies.tensor.tensor_parallel import TensorParallel
from ddpforge.testing.ranks import run_ddpforge
from ddpforge.tools.certify.certificate import LayoutCertificate, Row, certify
from ddpforge.tools.certify.layouts import Layout, declared, settings_of, shuffled
from ddpforge.tools.certify.page import picture
from ddpforge.tools.certify.typed import _TypedMoves, typed_rows
from ddpforge.tools.certify.versions import certify_versions, versions_of

RECIPE = """
recipe = 2
name = "run"
model = { use = "gpt", vocab_size = 256, block_size = 16, layers = 2, heads = 2, width = 16 }
data.train = { use = "text", split = "train", block_size = 16 }
task = { use = "language_modeling" }
optimizer = { use = "adamw", lr = 1e-3 }
train = { length = "12st", global_batch = 8, device = "cpu" }
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return "recipe.toml"


# ---------------------------------------------------------------------------------------------- layouts
def test_strategies_declare_grids_whose_sizes_divide_the_ranks() -> None:
    assert list(DDPStrategy.layouts(8)) == [{}]
    assert list(DeepSpeed.layouts(2)) == [{"stage": 1}, {"stage": 2}, {"stage": 3}]
    grids = list(FSDP.layouts(4))
    assert {"replicas": 2, "context": 2} in grids
    assert {"tensor": 4, "loss_parallel": True} in grids
    assert {"experts": 4} in grids
    assert not any(4 % (one.get("replicas", 1) * one.get("context", 1) * one.get("tensor", 1)) for one in grids)
    assert {"stages": 2, "tensor": 2, "schedule": "ZBVZeroBubble"} in list(Pipeline.layouts(4))
    assert {"stages": 2, "schedule": "GPipe", "data": "fsdp"} in list(Pipeline.layouts(4))
    assert list(Pipeline.layouts(1)) == []


def test_every_declared_layout_has_options_that_the_strategy_accepts() -> None:
    registry = Registry.installed()
    for name in ("single", "ddp", "fsdp", "pipeline", "deepspeed"):
        for ranks in range(1, 9):
            for options in registry.load("strategy", name).layouts(ranks):  # type: ignore[attr-defined]
                registry.options_model("strategy", name).model_validate(options)


def test_layouts_are_tried_in_turns_of_strategies_and_in_an_order_of_the_seed() -> None:
    layouts = declared(Registry.installed(), most=4, strategies=["ddp", "fsdp", "deepspeed"])
    first = shuffled(layouts, 0)

    assert len(first) == len(layouts) == len(set(first))
    assert [one.spec.use for one in first[:6]] == ["ddp", "fsdp", "deepspeed"] * 2
    assert first == shuffled(layouts, 0) != shuffled(layouts, 1)
    own = [one.spec.text for one in first[:12]]
    assert len(set(own)) == len(own), "each of a strategy's own layouts comes before the same one with other settings"


def test_layout_is_text_and_settings(recipe: str) -> None:
    registry = Registry.installed()
    layout = next(
        one for one in declared(registry, most=4, strategies=["fsdp"]) if one.text.startswith("fsdp:tensor=2@4")
    )
    assert layout.text == "fsdp:tensor=2@4"
    several = Layout(layout.spec, 2, "selective")
    assert several.text == "fsdp:tensor=2@4, 2 micro-batches, selective checkpointing"

    assert settings_of(several, recipe, registry)[-1] == "train.micro_batch=2"  # 8 samples, 2 data-parallel ranks


@pytest.mark.parametrize(
    ("use", "text", "message"),
    [
        ("fsdp", "fsdp:tensor=3@3", "not a multiple|does not divide"),
        ("fsdp", "fsdp:experts=2@2", "has no such experts"),
        ("pipeline", "pipeline:stages=5:schedule=1F1B@5", "too few for 5 parts"),
        ("ddp", "ddp@3", "global_batch = 8 is not a multiple of 3"),
    ],
)
def test_layout_that_the_model_or_the_batch_excludes_is_refused_by_name(
    recipe: str, use: str, text: str, message: str
) -> None:
    registry = Registry.installed()
    layout = next(one for one in declared(registry, most=5, strategies=[use]) if one.text == text)

    with pytest.raises(ForgeError, match=message):
        settings_of(layout, recipe, registry)


def test_unknown_strategy_is_refused() -> None:
    with pytest.raises(UsageError, match="no strategy named `dpp`"):
        declared(Registry.installed(), most=2, strategies=["dpp"])


# ---------------------------------------------------------------------------------------------- rows
def row(state: str = "trained", **differences: float | None) -> Row:
    found = {
        name: {"largest": one, "allowed": 1e-5, "step": 3, "tensor": "head.weight"} for name, one in differences.items()
    }
    return Row("ddp@2", "ddp", 2, state, found, "" if state == "trained" else "why", 1.0)  # type: ignore[arg-type]


def test_row_is_the_same_if_rounding_explains_every_difference() -> None:
    assert row(loss=9e-6, weights=0.0).verdict == "same"
    assert row(loss=9e-6, weights=0.0).share == pytest.approx(0.9)
    assert row(loss=1e-6, weights=2e-5).verdict == "differs"
    assert row(loss=1e-6, weights=2e-5).worst == "weights at step 3 in head.weight"
    assert row(loss=None).verdict == "differs", "not finite"
    assert [row(state).verdict for state in ("refused", "failed")] == ["refused", "failed"]
    assert row("failed").worst == "why"


def test_picture_has_a_dot_for_each_layout_that_trained_and_a_text_alternative() -> None:
    rows = [row(loss=1e-6), row(loss=1.0), row("failed"), row("refused")]
    svg = picture(LayoutCertificate({}, 9, rows))

    assert Counter(part.split('"')[1] for part in svg.split("<circle ")[1:]) == {"same": 1, "differs": 1, "failed": 1}
    assert '<desc id="desc">1 of 3 layouts differ from one process by no more than rounding.</desc>' in svg


# ---------------------------------------------------------------------------------------------- real runs
@pytest.mark.slow
def test_layouts_train_like_one_process_and_a_second_call_goes_on_with_the_rows(recipe: str, tmp_path: Path) -> None:
    out, said = tmp_path / "out", list[str]()
    strategies = ["ddp", "fsdp", "pipeline"]
    first = certify(recipe, out=out, most=2, steps=4, strategies=strategies, rows=3)
    assert [one.verdict for one in first.rows if one.state != "refused"] == ["same"] * 3

    (out / "runs" / "0123").mkdir()  # of a call that was killed
    second = certify(recipe, out=out, most=2, steps=4, strategies=strategies, rows=5, say=said.append)
    assert list(second.rows[: len(first.rows)]) == list(first.rows)
    assert [one.verdict for one in second.rows if one.state != "refused"] == ["same"] * 5
    assert [line.partition(":")[0] for line in said] == ["4", "5"], "the reference is not trained again"

    with pytest.raises(UsageError, match="has rows of another steps: 4 instead of 5"):
        certify(recipe, out=out, most=2, steps=5, strategies=strategies)


@pytest.mark.slow
def test_command_names_layouts_that_differ_and_exits_with_1(recipe: str, tmp_path: Path) -> None:
    copy(SUPPORT / "wrong_strategies.py", tmp_path)
    wrong = "./wrong_strategies.py:ForgetsToAverage"

    done = run_ddpforge(
        "certify",
        recipe,
        "--ranks",
        "2",
        "--steps",
        "3",
        "--strategies",
        f"ddp,{wrong}",
        "--layouts",
        "4",
        cwd=tmp_path,
    )

    assert done.returncode == 1, done.stderr
    assert f"{wrong}@2" in done.stdout
    assert "differs" in done.stdout
    saved = json.loads((tmp_path / "certificate/certificate.json").read_text())
    verdicts = {(one["use"], one["ranks"], one["verdict"]) for one in saved["rows"]}
    assert verdicts <= {("ddp", 1, "same"), ("ddp", 2, "same"), (wrong, 1, "same"), (wrong, 2, "differs")}
    assert (wrong, 2, "differs") in verdicts
    page = (tmp_path / "certificate/certificate.html").read_text()
    assert f"{wrong}@2" in page
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.slow
def test_layout_that_the_strategy_refuses_with_the_model_at_hand_is_refused_and_did_not_fail(tmp_path: Path) -> None:
    sets = ["train.virtual_ranks=2", "train.device=cpu"]
    found = certify("digits", out=tmp_path / "out", most=2, steps=2, sets=sets, strategies=["pipeline"], budget=15)

    assert {row.verdict for row in found.rows} == {"refused"}
    assert any("BatchNorm" in row.reason for row in found.rows)


def test_folder_with_other_files_is_not_used(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("")
    done = run_ddpforge("certify", recipe, "--out", "mine", cwd=tmp_path)

    assert (done.returncode, "mine is not empty, and has no rows" in done.stderr) == (2, True), done.stderr


# ---------------------------------------------------------------------------------------------- types
def types(recipe: str, *sizes: int, sets: tuple[str, ...] = ()) -> dict[str, str]:
    return {row.layout: f"{row.verdict} {row.reason}".strip() for row in typed_rows(recipe, sizes, sets)}


def test_activations_of_tensor_parallelism_have_the_right_types_on_up_to_64_ranks(recipe: str) -> None:
    found = types(
        recipe, 2, 64, sets=("model.heads=64", "model.width=128", "model.block_size=64", "data.train.block_size=64")
    )

    assert found == {
        "tensor=2": "typed",
        "tensor=2, sequence_parallel": "typed",
        "tensor=64": "typed",
        "tensor=64, sequence_parallel": "typed",
    }


def test_a_size_that_does_not_divide_the_layers_is_refused(recipe: str) -> None:
    assert "does not divide" in types(recipe, 3)["tensor=3"]


@pytest.mark.parametrize(
    ("forgotten", "style"),
    [
        ("gradients of norms", {"summed": ()}),
        ("the sum after a layer", {"rowwise": "leave"}),
        ("the sum of gradients before a layer", {"colwise": "enter"}),
    ],
)
def test_a_forgotten_sum_is_an_error_of_types(
    recipe: str, forgotten: str, style: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "summed" in style:
        monkeypatch.setattr(TensorParallel, "_summed", lambda self, model: set())
        layout = "tensor=2, sequence_parallel"
    else:
        (move,) = style.values()
        monkeypatch.setattr(_TypedMoves, str(move), lambda self, x: x)
        layout = "tensor=2"

    assert types(recipe, 2)[layout].startswith("mistyped"), forgotten


def test_command_prints_types_and_refuses_other_numbers(recipe: str, tmp_path: Path) -> None:
    done = run_ddpforge("certify", recipe, "--types", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (
        0,
        ["tensor=2", "typed", "tensor=2,", "sequence_parallel", "typed"],
    )

    done = run_ddpforge("certify", recipe, "--types", "two", cwd=tmp_path)
    assert (done.returncode, "not a list of numbers" in done.stderr) == (2, True), done.stderr


# ---------------------------------------------------------------------------------------------- versions of torch
def test_versions_are_a_range_or_a_list() -> None:
    assert versions_of("2.9..2.11") == ["2.9", "2.10", "2.11"]
    assert versions_of("2.10, 2.15") == ["2.10", "2.15"]


@pytest.mark.parametrize("text", ["2", "2.10..", "2.12..2.10", "2.10..3.1", "newest"])
def test_another_text_is_refused(recipe: str, tmp_path: Path, text: str) -> None:
    done = run_ddpforge("certify", recipe, "--torch", text, cwd=tmp_path)

    assert (done.returncode, f"--torch {text} is not a list of versions" in done.stderr) == (2, True), done.stderr


def test_version_that_cannot_be_installed_is_named_with_pip_s_words(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")

    with pytest.raises(SetupError, match=r"torch 0\.1 cannot be installed(.|\n)*No matching distribution"):
        next(certify_versions(["0.1"], [recipe], tmp_path / "out", lambda text: None))
    assert not (tmp_path / "out/torch-0.1/installed").exists()
