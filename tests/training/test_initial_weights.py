"""Initial weights: the tensors loaded from another source, and reports of the others. For strategies see
tests/distributed.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import conftest
from checkpoint.doubles import Checkpoint, checkpoint_of, write
from safetensors.torch import save_file
from support.doubles import Plain
from torch import Tensor, nn

from ddpforge.errors import CheckpointError, UsageError
from ddpforge.interfaces import CanonicalState, Ranks, TensorShard
from ddpforge.interfaces.regions import Box, FlatRange
from ddpforge.ranks.collectives import SingleRank
from ddpforge.runs.folder import RunFolder
from ddpforge.strategies.named_state import restore, tensors
from ddpforge.training.initial_weights import find_initial, load_initial

_fast_disk, folder = conftest._fast_disk, conftest.folder
INDEX = "model.safetensors.index.json"


class Tied(nn.Module):
    """Model with two names of one matrix, a vector, and an integer counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(4, 3))
        self.head = self.embed
        self.norm = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))


class Here(Plain):
    """Replica that loads the shard of each tensor that `part_of` returns.

    With `main`, this is the second of two ranks, and receives the broadcasts of `main`.
    """

    def __init__(
        self, part_of: Callable[[Tensor], TensorShard] = TensorShard.whole, main: "Here | None" = None
    ) -> None:
        super().__init__(ranks=2, rank=int(main is not None))
        self.part_of = part_of
        self.told: list[Any] = [] if main is None else main.told
        self.ranks.broadcast = self._tell  # type: ignore[method-assign]

    def _tell(self, value: Any) -> Any:
        if self.world.is_rank_zero:
            self.told.append(value)
            return value
        return self.told.pop(0)

    def state(self) -> CanonicalState[Any]:
        held, aliases = tensors(self.unwrapped)
        return CanonicalState({name: self.part_of(tensor.detach()) for name, tensor in held.items()}, {}, aliases)

    def load_state(self, state: CanonicalState[Any], *, partial: bool = False) -> None:
        restore(self.unwrapped, self.optimizer, state, partial=partial, part_of=lambda _, tensor: self.part_of(tensor))


WEIGHTS = {"embed": torch.arange(1.0, 13.0).view(4, 3), "norm": torch.tensor([0.5, 0.25, 2.0]), "seen": torch.tensor(7)}


def began(source: Path, replica: Here | None = None, *, skip: Sequence[str] = ()) -> dict[str, Tensor]:
    """Returns a model's tensors after it has loaded those of `source`."""
    model = Tied()
    replica = (replica or Here()).holding(model, torch.optim.SGD(model.parameters()))  # type: ignore[assignment]
    _load(source, replica, replica.ranks, skip=skip)
    assert model.head is model.embed
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name != "head"}


def _load(source: Path, replica: Plain, ranks: Ranks, *, skip: Sequence[str] = ()) -> None:
    def take(saved: Mapping[str, Any]) -> None:
        replica.load_state(CanonicalState(saved, {}), partial=True)

    state = replica.state()
    load_initial(str(source), state.model, state.aliases, take, ranks, skip=skip)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def saved(path: Path, weights: Mapping[str, Tensor] = WEIGHTS, **changes: Tensor) -> Path:
    """Writes a safetensors file and returns its path."""
    save_file({**weights, **changes}, path)
    return path


def checkpoint(step: int, **changes: Tensor) -> Checkpoint:
    return checkpoint_of(step, state=CanonicalState({**WEIGHTS, **changes}, {}, {"head": "embed"}))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[str, str]]]:
    """Returns a function that gives the levels and messages logged since its last call."""
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    caplog.set_level(logging.INFO, "ddpforge")

    def look() -> list[tuple[str, str]]:
        found = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return found

    return look


# ---------------------------------------------------------------------------------------------- sources
def test_sources_are_a_file_a_folder_of_transformers_or_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    single, several = tmp_path / "single", tmp_path / "several"
    single.mkdir()
    several.mkdir()
    sources = [saved(tmp_path / "some.safetensors"), saved(single / "model.safetensors").parent]
    sources += [several, write(folder, checkpoint(7))]
    saved(several / "a.safetensors", {"embed": WEIGHTS["embed"]})
    saved(several / "b.safetensors", {name: WEIGHTS[name] for name in ("norm", "seen")})
    places = {"embed": "a.safetensors", "norm": "b.safetensors", "seen": "b.safetensors"}
    (several / INDEX).write_text(json.dumps({"weight_map": places}))

    for source in sources:
        assert find_initial(str(source)) == source
        assert same(began(source), WEIGHTS), source


def test_index_takes_precedence_over_a_single_file(tmp_path: Path) -> None:
    saved(tmp_path / "model.safetensors", embed=torch.ones(4, 3))
    saved(tmp_path / "part.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "part.safetensors")}))

    assert same(began(tmp_path), WEIGHTS)


def test_newest_intact_checkpoint_of_a_run_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(Path("runs/base"))
    run.create(text="", resolved="", local_files={})
    paths = [write(run.checkpoints, checkpoint(step, norm=torch.full((3,), float(step)))) for step in (1, 2, 3)]
    (paths[2] / "COMMIT").unlink()

    assert find_initial("base") == find_initial("runs/base") == paths[1]
    assert began(Path("base"))["norm"].eq(2).all()


def test_tilde_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = saved(tmp_path / "some.safetensors")

    assert find_initial("~/some.safetensors") == path


def test_error_of_a_missing_source_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'checkpoint.init_from = ".*nowhere": there is no run'):
        find_initial(str(tmp_path / "nowhere"))


def test_rank_0_finds_the_source_and_broadcasts_it(tmp_path: Path) -> None:
    main = Here()
    began(saved(tmp_path / "some.safetensors"), main)

    assert same(began(tmp_path / "not to be looked for", Here(main=main)), WEIGHTS)
    assert main.told == []


# ---------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("kind", ["file", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["rows", "line"])
def test_rank_loads_its_shard_in_its_own_dtype(
    folder: Path, tmp_path: Path, kind: str, dtype: torch.dtype, how: str
) -> None:
    """Loads a middle range of the matrix and of the vector; other memory of the model is unchanged."""

    def part_of(tensor: Tensor) -> TensorShard:
        if not tensor.ndim:
            return TensorShard.whole(tensor)
        if how == "rows":
            region = Box((1, *(0,) * (tensor.ndim - 1)), (2, *tensor.shape[1:]))
            return TensorShard(tensor[1:3], (*tensor.shape,), region)
        return TensorShard(tensor.view(-1)[1:3], (*tensor.shape,), FlatRange(1, 3))

    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in WEIGHTS.items()}
    source = saved(tmp_path / "some.safetensors", weights)
    if kind == "checkpoint":
        source = write(folder, checkpoint(7, **weights))

    found = began(source, Here(part_of))

    expected = {name: torch.zeros_like(value) for name, value in WEIGHTS.items()}
    for name, value in WEIGHTS.items():
        part_of(expected[name]).tensor.copy_(part_of(value).tensor)
    assert same(found, expected)


def test_column_shard_of_a_matrix_is_loaded(tmp_path: Path) -> None:
    def columns(tensor: Tensor) -> TensorShard:
        if tensor.ndim != 2:
            return TensorShard.whole(tensor)
        return TensorShard(tensor[:, 1:], (*tensor.shape,), Box((0, 1), (4, 2)))

    found = began(saved(tmp_path / "some.safetensors"), Here(columns))["embed"]

    assert found[:, 1:].equal(WEIGHTS["embed"][:, 1:])
    assert not found[:, 0].any()


@pytest.mark.parametrize("both", [False, True])
def test_tied_weight_is_found_under_either_name(tmp_path: Path, said: Any, *, both: bool) -> None:
    """Uses the first name if the source has both; neither is reported as unexpected."""
    weights = {"head": WEIGHTS["embed"] + both, "norm": WEIGHTS["norm"], "seen": WEIGHTS["seen"]}
    if both:
        weights["embed"] = WEIGHTS["embed"]
    path = saved(tmp_path / "some.safetensors", weights)

    assert same(began(path), WEIGHTS)
    assert said() == [("INFO", f"initial weights: 3 tensors from {path}")]


def test_rank_0_logs_missing_unexpected_and_skipped_tensors(tmp_path: Path, said: Any) -> None:
    path = saved(tmp_path / "some.safetensors", {"embed": WEIGHTS["embed"], "norm": torch.ones(9), "x": torch.ones(2)})

    main = Here()
    found = began(path, main, skip=["n*"])

    assert same(found, {"embed": WEIGHTS["embed"], "norm": torch.zeros(3), "seen": torch.tensor(0)})
    assert said() == [
        ("INFO", f"initial weights: 1 tensors from {path}"),
        ("WARNING", "initial weights: 1 tensors not in it: seen"),
        ("WARNING", "initial weights: 1 tensors not in the model: x"),
        ("WARNING", "initial weights: 1 tensors skipped by init_ignore: norm"),
    ]
    began(path, Here(main=main), skip=["n*"])
    assert said() == []


@pytest.mark.parametrize(("extra", "end"), [(8, "x7"), (9, "x7 and 1 more")])
def test_log_lists_at_most_eight_names_in_order(tmp_path: Path, said: Any, extra: int, end: str) -> None:
    more = {f"x{number}": torch.ones(1) for number in reversed(range(extra))}

    began(saved(tmp_path / "some.safetensors", **more))

    (_, words) = said()[1]
    assert words == f"initial weights: {extra} tensors not in the model: x0, x1, x2, x3, x4, x5, x6, {end}"


def test_skipped_tensors_are_not_missing(tmp_path: Path, said: Any) -> None:
    path = saved(tmp_path / "some.safetensors", {"embed": WEIGHTS["embed"]})

    began(path, skip=["norm", "seen"])

    assert [words for level, words in said() if level == "WARNING"] == [
        "initial weights: 2 tensors skipped by init_ignore: norm, seen"
    ]


# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("changes", "skip", "error", "complaint"),
    [
        ({"embed": torch.zeros(3, 4)}, [], UsageError, r"`embed` is \[4, 3\] in the model and \[3, 4\] in"),
        ({"norm": torch.zeros(3, dtype=torch.int32)}, [], UsageError, "`norm` is float32 in the model and int32"),
        ({"seen": torch.tensor(7.0)}, [], UsageError, "`seen` is int64 in the model and float32 in"),
        ({"seen": torch.tensor(7, dtype=torch.int32)}, [], UsageError, "`seen` is int64 in the model and int32"),
        ({}, ["Embed"], UsageError, 'checkpoint.init_ignore: "Embed" matches no tensor of the model'),
        ({}, ["norm", "x*"], UsageError, r'checkpoint.init_ignore: "x\*" matches no tensor of the model'),
        ({}, ["*"], UsageError, "checkpoint.init_ignore matches all tensors of the model"),
    ],
)
def test_mismatch_is_an_error_and_the_model_is_unchanged(
    tmp_path: Path, changes: dict[str, Tensor], skip: list[str], error: type[Exception], complaint: str
) -> None:
    model = Tied()

    with pytest.raises(error, match=complaint):
        _load(
            saved(tmp_path / "some.safetensors", **changes),
            Here().holding(model, torch.optim.SGD(model.parameters())),
            SingleRank(),
            skip=skip,
        )

    assert not any(tensor.any() for tensor in model.state_dict().values())


def test_all_mismatches_are_reported_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path / "some.safetensors", embed=torch.zeros(3, 4), norm=torch.zeros(2), seen=torch.tensor(7.0))

    with pytest.raises(UsageError) as caught:
        began(path)

    assert caught.value.message == (
        "`embed` is [4, 3] in the model and [3, 4] in checkpoint.init_from; "
        "`norm` is [3] in the model and [2] in checkpoint.init_from; "
        "`seen` is int64 in the model and float32 in checkpoint.init_from"
    )
    assert caught.value.hints == (
        'to keep the model\'s own values: checkpoint.init_ignore = ["embed", "norm", "seen"]',
    )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("skip", [[], ["norm"]])
def test_error_without_a_common_name_lists_both_sides(tmp_path: Path, skip: list[str]) -> None:
    path = saved(tmp_path / "some.safetensors", {"b": torch.zeros(2), "a": torch.zeros(2)})

    with pytest.raises(UsageError, match="none of its tensors has the name of one in the model") as caught:
        began(path, skip=skip)

    assert caught.value.hints == ("it has a, b", "the model has embed, norm, seen")


def test_an_empty_file_has_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none of its tensors") as caught:
        began(saved(tmp_path / "some.safetensors", {}))

    assert caught.value.hints[0] == "it has no tensors"


@pytest.mark.parametrize("place", ["../part.safetensors", "sub/part.safetensors", "/part.safetensors"])
def test_index_outside_of_its_folder_is_rejected(tmp_path: Path, place: str) -> None:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    for path in (tmp_path, inside / "sub"):
        saved(path / "part.safetensors")
    (inside / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, place)}))

    with pytest.raises(CheckpointError, match="names files outside its folder"):
        began(inside)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "absent"}}']
)
def test_invalid_index_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)

    with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be read as safetensors"):
        began(tmp_path)


def test_damaged_checkpoint_is_rejected(folder: Path) -> None:
    path = write(folder, checkpoint(7))
    shard = path / "shard-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the first byte of the first tensor
    shard.write_bytes(content)

    with pytest.raises(CheckpointError, match="are not as written"):
        began(path)


def test_tensors_of_other_ranks_are_loaded_and_counted(
    tmp_path: Path, said: Callable[[], list[tuple[str, str]]]
) -> None:
    """Fakes a pipeline stage with one tensor, and another stage with the other tensors."""
    replica, taken = Here(), dict[str, Any]()
    theirs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in WEIGHTS.items() if name != "norm"}
    replica.ranks.all_gather_object = lambda mine: [mine, theirs]  # type: ignore[method-assign]
    source = str(saved(tmp_path / "some.safetensors"))

    load_initial(source, {"norm": torch.zeros(3)}, {}, taken.update, replica.ranks, skip=["se*"])

    assert taken.keys() == {"norm", "embed"}
    assert said() == [
        ("INFO", f"initial weights: 2 tensors from {source}"),
        ("WARNING", "initial weights: 1 tensors skipped by init_ignore: seen"),
    ]
