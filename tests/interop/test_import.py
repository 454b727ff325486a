"""Imports: files of other programs become a checkpoint with the same numbers, or are rejected; no code in them runs."""

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.doubles import Bomb, same
from interop.foreign_ranks import RANKS, STEPS, adamw, build, loss_of, save_all
from safetensors.torch import load_file, save_file
from support.forked import in_ranks
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.retention import newest
from ddpforge.errors import UsageError
from ddpforge.interop.imports import Imported, import_checkpoint

ZERO = ["zero1", "zero2", "zero3"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def foreign(deepspeed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the checkpoints of two ranks under DeepSpeed and FSDP."""
    folder = tmp_path_factory.mktemp("foreign")
    in_ranks(RANKS, lambda _: save_all(folder))
    return folder


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Runs the same training in one process, with plain torch."""
    model = build()
    optimizer = adamw(model)
    for step in range(STEPS):
        (sum(loss_of(model, step, rank) for rank in range(RANKS)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def weights_in(path: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(path)
    found = {name: reader.read("model", name) for name in reader.names("model")}
    reader.finish()
    return found


def state_in(path: Path) -> dict[str, dict[str, Any]]:
    return {
        name: {key: x.read() if hasattr(x, "read") else x for key, x in values.items()}
        for name, values in CheckpointReader(path).state().optimizer.items()
    }


def assert_trained(done: Imported, trained: tuple[nn.Module, torch.optim.Optimizer], *, tied: bool = True) -> None:
    """Checks that weights and optimizer state equal those of one process, up to the order of sums."""
    model, optimizer = trained
    weights, state = weights_in(done.path), state_in(done.path)
    expected = model.state_dict()
    if tied:
        del expected["head.weight"]
        assert CheckpointReader(done.path).aliases == {"head.weight": "emb.weight"}
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)

    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert name not in state
            continue
        assert state[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in optimizer.state[parameter].items():
            torch.testing.assert_close(torch.as_tensor(state[name][key]), value, rtol=1e-4, atol=1e-8)


def changed(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Writes a file of `torch.save` with something changed."""
    content = torch.load(source, weights_only=False)
    change(content)
    torch.save(content, target)


# ---------------------------------------------------------------------------------------------- DeepSpeed
@pytest.mark.parametrize("source", [*ZERO, "zero2-robin"])
def test_a_zero_checkpoint_keeps_master_weights_and_optimizer_state(
    foreign: Path, trained: tuple[nn.Module, torch.optim.Optimizer], source: str
) -> None:
    done = import_checkpoint(foreign / source, "out", trust=True)

    assert_trained(done, trained)
    assert (done.kind, done.step, done.samples) == (f"DeepSpeed ZeRO-{source[4]}", STEPS, STEPS * 2 * RANKS)
    assert (done.optimizer, done.left_out) == (6, [])
    assert newest(Path("out")) == (done.path, []), "every file matches the manifest"


@pytest.mark.parametrize("source", [*ZERO, "zero2-bf16", "zero3-bf16"])
def test_zero_weights_equal_deepspeeds_own_accessor(foreign: Path, source: str) -> None:
    """Excludes round_robin_gradients: with it, DeepSpeed's accessor returns elements of other parameters."""
    weights = weights_in(import_checkpoint(foreign / source, "out", trust=True).path)

    for name, tensor in load_file(foreign / source / "public.safetensors").items():
        assert same(weights[name], tensor), name
    assert weights["emb.weight"].dtype == torch.float32, "not the bf16 copy"
    assert weights["frozen.weight"].dtype == (torch.bfloat16 if "bf16" in source else torch.float32)


def test_folder_of_one_tag_can_be_imported(foreign: Path) -> None:
    assert import_checkpoint(foreign / "zero1" / f"global_step{STEPS}", "out", trust=True).step == STEPS


def zero_copy(foreign: Path, name: str) -> Path:
    return Path(shutil.copytree(foreign / name / f"global_step{STEPS}", "copy"))


def swap(copy: Path) -> None:
    """Swaps the file names of the partitions of ranks 0 and 1."""
    one, other = sorted(copy.glob("*_optim_states.pt"))
    one.rename("spare")
    other.rename(one)
    Path("spare").rename(other)


def roll(copy: Path) -> None:
    """Moves every master weight to the next position."""
    for file in copy.glob("*_optim_states.pt"):

        def move(content: dict[str, Any]) -> None:
            groups = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
            groups[0] = groups[0].detach().roll(1)

        changed(file, file, move)


def lose_a_rank(copy: Path) -> None:
    sorted(copy.glob("*_optim_states.pt"))[0].unlink()


def lose_the_last(copy: Path) -> None:
    sorted(copy.glob("*_optim_states.pt"))[1].unlink()


def resize(copy: Path) -> None:
    """Makes the recorded shape of a parameter too large."""
    for file in copy.glob("*_model_states.pt"):
        changed(file, file, lambda content: content["param_shapes"][-1].update(scale=torch.Size([4])))


def mix(copy: Path) -> None:
    """Adds a file as if another stage had been saved under the same tag."""
    (file, *_) = copy.glob("*_model_states.pt")
    shutil.copy(file, copy / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def split(copy: Path) -> None:
    (copy / "expert_0_mp_rank_00_model_states.pt").write_bytes(b"")


def empty(copy: Path) -> None:
    for file in copy.glob("*_optim_states.pt"):
        torch.save({"optimizer_state_dict": {"zero_stage": 2}}, file)


@pytest.mark.parametrize(
    ("source", "damage", "complaint"),
    [
        ("zero1", swap, "positions of parameters are uncertain"),
        ("zero2", roll, "positions of parameters are uncertain"),
        ("zero1", lose_a_rank, "the file of rank 0 is missing"),
        ("zero2", lose_the_last, "it has files of 1 ranks, but in them the number of ranks is 2"),
        ("zero3", lose_the_last, "it has files of 1 ranks, but in them the number of ranks is 2"),
        ("zero2", resize, "group 1 has 19 elements, and its partitions have 16"),
        ("zero3", resize, "elements, not"),
        ("zero2", split, "split over several processes or experts"),
        ("zero2", mix, "files of several checkpoints"),
        ("zero2", empty, "its files have no"),
    ],
)
def test_inconsistent_zero_checkpoint_is_rejected(
    foreign: Path, source: str, damage: Callable[[Path], None], complaint: str
) -> None:
    copy = zero_copy(foreign, source)
    damage(copy)

    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(copy, "out", trust=True)
    assert not Path("out").exists()


def test_optimizer_state_with_another_layout_is_skipped_and_reported(foreign: Path) -> None:
    copy = zero_copy(foreign, "zero2")
    for file in copy.glob("*_optim_states.pt"):

        def shorten(content: dict[str, Any]) -> None:
            state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
            state["exp_avg"] = state["exp_avg"][:3].clone()

        changed(file, file, shorten)

    done = import_checkpoint(copy, "out", trust=True)

    assert (done.optimizer, done.tensors) == (0, 10)
    assert done.left_out == ["optimizer: the layout of exp_avg differs from that of the weights"]


def test_each_group_has_its_own_step(foreign: Path) -> None:
    """Covers parameters that are trained from a later step on."""
    copy = zero_copy(foreign, "zero1")
    for file in copy.glob("*_optim_states.pt"):

        def age(content: dict[str, Any]) -> None:
            content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 90

        changed(file, file, age)

    state = state_in(import_checkpoint(copy, "out", trust=True).path)

    steps = {name: float(values["step"]) for name, values in state.items()}
    assert steps == dict.fromkeys(["emb.weight", "low.weight"], 3) | dict.fromkeys(
        ["scale", "low.bias", "norm.weight", "norm.bias"], 93
    )


def test_tag_outside_of_the_folder_is_rejected(foreign: Path) -> None:
    Path("copy").mkdir()
    shutil.copytree(foreign / "zero2" / f"global_step{STEPS}", "copy/here")
    for tag in ("../elsewhere", "/etc", "..", ""):
        Path("copy/latest").write_text(tag)
        with pytest.raises(UsageError, match="not the name of a folder next to it"):
            import_checkpoint(Path("copy"), "out", trust=True)


# ---------------------------------------------------------------------------------------------- DCP
def test_a_sharded_dcp_checkpoint_keeps_everything(
    foreign: Path, trained: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    done = import_checkpoint(foreign / "dcp", "out", trust=True)

    assert_trained(done, trained, tied=False)  # DCP writes tied weights twice
    assert "step: not a tensor" in done.left_out
    (hint,) = done.hints
    again = import_checkpoint(foreign / "dcp", "out", trust=True, maps=[hint.split("'")[-2]])
    assert again.tensors == done.tensors - 1, "the hint shows how to skip the second copy"
    assert CheckpointReader(done.path).manifest.tensors["model"]["emb.weight"].chunks[1].region.numel == 3 * 5


@pytest.mark.parametrize("flatten", [False, True])
def test_dcp_checkpoint_of_one_process_is_imported(
    trained: tuple[nn.Module, torch.optim.Optimizer], *, flatten: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, state = get_state_dict(*trained, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id="dcp")

    done = import_checkpoint(Path("dcp"), "out", trust=True, maps=[r"^head\.weight$=emb.weight"])

    model, _ = trained
    assert weights_in(done.path).keys() == model.state_dict().keys() - {"head.weight"}
    assert all(same(tensor, model.state_dict()[name]) for name, tensor in weights_in(done.path).items())
    assert done.optimizer == 6
    assert "head.weight: the same as emb.weight" in done.left_out


def test_plain_state_dict_saved_by_dcp_is_a_model() -> None:
    weights = {"model.layer": torch.arange(4.0), "head": torch.ones(2, 2)}
    dcp.save(weights, checkpoint_id="dcp")

    done = import_checkpoint(Path("dcp"), "out", trust=True)

    assert all(same(tensor, weights[name]) for name, tensor in weights_in(done.path).items())
    assert (done.tensors, done.optimizer, done.step) == (2, 0, 0)


def crafted(change: Callable[[Any], None]) -> Path:
    """Writes a DCP folder with changed metadata."""
    folder = Path("dcp")
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def elsewhere(path: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (elsewhere("../secret"), "not a plain file name"),
        (elsewhere("/etc/passwd"), "not a plain file name"),
        (elsewhere("gone.distcp"), "No such file"),
        (lambda metadata: metadata.storage_data.clear(), "it has no part of w"),
        (lambda metadata: setattr(metadata, "planner_data", None), "lack the places of tensors in the state_dict"),
        (lambda metadata: metadata.state_dict_metadata.clear(), 'none of its tables is called "model"'),
        (
            lambda metadata: setattr(metadata.state_dict_metadata["model.w"], "size", torch.Size([8])),
            r"w: element \[4\] is missing",
        ),
        (lambda metadata: setattr(metadata, "state_dict_metadata", 5), "contradict"),
    ],
)
def test_crafted_dcp_metadata_are_rejected(change: Callable[[Any], None], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(crafted(change), "out", trust=True)
    assert not Path("out").exists()


def test_shard_that_is_a_link_is_rejected() -> None:
    folder = crafted(lambda metadata: None)
    (shard,) = folder.glob("*.distcp")
    shard.rename("elsewhere")
    shard.symlink_to(Path("elsewhere").absolute())

    with pytest.raises(UsageError, match="it is a link"):
        import_checkpoint(folder, "out", trust=True)


# ---------------------------------------------------------------------------------------------- pickles
def bare_pickle(bomb: Bomb) -> Path:
    Path("bomb.pt").write_bytes(pickle.dumps({"w": bomb}))
    return Path("bomb.pt")


def saved_by_torch(bomb: Bomb) -> Path:
    torch.save({"w": torch.ones(2), "more": bomb}, "bomb.bin")
    return Path("bomb.bin")


def dcp_metadata(bomb: Bomb) -> Path:
    Path("dcp").mkdir()
    Path("dcp/.metadata").write_bytes(pickle.dumps(bomb))
    return Path("dcp")


def deepspeed_folder(bomb: Bomb) -> Path:
    Path("ds").mkdir()
    torch.save({"module": {"w": torch.ones(2)}, "more": bomb}, "ds/mp_rank_00_model_states.pt")
    return Path("ds")


def transformers_folder(bomb: Bomb) -> Path:
    Path("hf").mkdir()
    torch.save({"w": torch.ones(2), "more": bomb}, "hf/pytorch_model.bin")
    return Path("hf")


@pytest.mark.parametrize(
    "make", [bare_pickle, saved_by_torch, dcp_metadata, deepspeed_folder, transformers_folder], ids=lambda f: f.__name__
)
def test_pickle_runs_no_code_without_trust(make: Callable[[Bomb], Path]) -> None:
    marker = Path("marker").absolute()
    source = make(Bomb(marker))

    with pytest.raises(UsageError, match="can run any code") as caught:
        import_checkpoint(source, "out")

    assert not marker.exists()
    assert not Path("out").exists()
    assert "--trust" in caught.value.hints[0]
    with suppress(UsageError):  # some of these contain nothing else
        import_checkpoint(source, "out", trust=True)
    assert marker.exists(), "the bomb is a real one"


# ---------------------------------------------------------------------------------------------- only weights
def test_a_state_dict_needs_no_trust_and_keeps_its_ties() -> None:
    model = build()
    torch.save(model.state_dict(), "weights.pt")

    done = import_checkpoint(Path("weights.pt"), "out", step=7, samples=70)

    assert_same_weights(done, model)
    assert (done.kind, done.step, done.samples, done.optimizer) == ("state_dict", 7, 70, 0)


def assert_same_weights(done: Imported, model: nn.Module) -> None:
    weights, expected = weights_in(done.path), model.state_dict()
    assert CheckpointReader(done.path).aliases == {"head.weight": "emb.weight"}
    assert weights.keys() == expected.keys() - {"head.weight"}
    assert all(same(tensor, expected[name]) for name, tensor in weights.items())


def test_training_checkpoint_gives_weights_and_reports_optimizer_state_without_names(
    trained: tuple[nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = trained
    content = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}
    torch.save(content, "checkpoint.pt", _use_new_zipfile_serialization=False)

    done = import_checkpoint(Path("checkpoint.pt"), "out")

    assert_same_weights(done, model)
    assert done.left_out == [
        "optimizer_state_dict: optimizer state by number; the names of its parameters are unknown",
        "epoch: not weights",
    ]


def test_ties_in_safetensors_metadata_are_kept() -> None:
    save_file({"a": torch.arange(3.0)}, "weights.safetensors", metadata={"format": "pt", "b": "a"})

    done = import_checkpoint(Path("weights.safetensors"), "out")

    assert (done.aliases, done.dtypes) == ({"b": "a"}, {"float32": 1})
    assert same(weights_in(done.path)["a"], torch.arange(3.0))


def hf_folder(files: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, object] | None = None) -> Path:
    """Writes a folder in the format of transformers; `places` replaces the index's map."""
    folder = Path("hf")
    folder.mkdir()
    for name, tensors in files.items():
        (save_file if name.endswith("safetensors") else torch.save)(dict(tensors), folder / name)
    found = {name: file for file, tensors in files.items() for name in tensors}
    kind = "model.safetensors" if any(name.endswith("safetensors") for name in files) else "pytorch_model.bin"
    index = {"metadata": {}, "weight_map": found if places is None else places}
    (folder / f"{kind}.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_sharded_weights_of_transformers_are_merged(kind: str) -> None:
    one, two = {"a": torch.ones(3)}, {"b": torch.zeros(2, dtype=torch.bfloat16)}

    folder = hf_folder({f"x-1.{kind}": one, f"x-2.{kind}": two})
    (folder / "optimizer.pt").write_bytes(b"never read")

    done = import_checkpoint(folder, "out")

    assert all(same(tensor, (one | two)[name]) for name, tensor in weights_in(done.path).items())
    assert done.dtypes == {"float32": 1, "bfloat16": 1}
    assert done.left_out == ["optimizer.pt: only weights are imported from such a folder"]


@pytest.mark.parametrize(
    ("places", "complaint"),
    [
        ({"a": "../model-1.safetensors"}, "not a plain file name"),
        ({"a": "/etc/passwd"}, "not a plain file name"),
        ({"a": ".."}, "not a plain file name"),
        ({"a": 5}, "not a plain file name"),
        ({"a": "model-2.safetensors"}, "No such file"),
        ({"a": "model-1.safetensors", "b": "model-1.safetensors"}, "its tensors are not the tensors that .* names: b"),
        ({}, "not an index"),
        ([], "not an index"),
    ],
)
def test_inconsistent_index_is_rejected(places: Any, complaint: str) -> None:
    folder = hf_folder({"model-1.safetensors": {"a": torch.ones(2)}}, places)

    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(folder, "out")
    assert not Path("out").exists()


def test_links_in_a_folder_are_rejected_and_a_link_given_by_the_user_is_accepted() -> None:
    save_file({"a": torch.ones(2)}, "real.safetensors")
    Path("hf").mkdir()
    Path("hf/model.safetensors").symlink_to(Path("real.safetensors").absolute())

    with pytest.raises(UsageError, match="it is a link") as caught:
        import_checkpoint(Path("hf"), "out")
    assert "cp -rL" in caught.value.hints[0]
    assert import_checkpoint(Path("hf/model.safetensors"), "out").tensors == 1


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        (1 << 60).to_bytes(8, "little") + HEADER,  # a header longer than the file
        len(HEADER).to_bytes(8, "little") + HEADER,  # no data
        len(HEADER).to_bytes(8, "little") + HEADER + bytes(9),  # too much data
        len(HEADER).to_bytes(8, "little") + HEADER.replace(b"[2]", b"[9]") + bytes(8),  # a shape that is not there
        b"PK\x03\x04 no zip",
        b"\x80\x02garbage",
        pickle.dumps([1, 2]),
    ],
)
def test_invalid_files_are_usage_errors(content: bytes) -> None:
    Path("file").write_bytes(content)

    with pytest.raises(UsageError, match="file cannot be imported"):
        import_checkpoint(Path("file"), "out")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"a": torch.ones(2, dtype=torch.complex64)}, "a has dtype complex64"),
        ({"a": torch.ones(2).to_sparse()}, "not a dense tensor"),
        ({"a": torch.empty(2, device="meta")}, "a is on the meta device"),
        ({"": torch.ones(2)}, "has no name"),
        ({"x": 3}, "no tensors by name; it contains x"),
        ({}, "it contains nothing"),
        (torch.ones(2), "a Tensor, not tensors by name"),
    ],
)
def test_unsupported_content_is_rejected(content: object, complaint: str) -> None:
    torch.save(content, "file.pt")

    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(Path("file.pt"), "out")
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["nothing", "folder"])
def test_source_without_a_checkpoint_is_a_usage_error(name: str) -> None:
    Path("folder").mkdir()
    with pytest.raises(UsageError, match=r"nothing does not exist|no checkpoint of a known format"):
        import_checkpoint(Path(name), "out")


def test_a_checkpoint_of_ddpforge_is_not_imported() -> None:
    save_file({"a": torch.ones(2)}, "a.safetensors")
    done = import_checkpoint(Path("a.safetensors"), "out")

    with pytest.raises(UsageError, match="already a checkpoint of ddpforge"):
        import_checkpoint(done.path, "out")
    with pytest.raises(UsageError, match="is a checkpoint"):
        import_checkpoint(Path("a.safetensors"), str(done.path))
    with pytest.raises(UsageError, match="is a file"):
        import_checkpoint(Path("a.safetensors"), "a.safetensors")


# ---------------------------------------------------------------------------------------------- names
def test_prefixes_are_kept_without_a_map() -> None:
    save_file({"module._orig_mod.a": torch.ones(2), "module._orig_mod.b": torch.zeros(2)}, "a.safetensors")

    done = import_checkpoint(Path("a.safetensors"), "out")
    assert weights_in(done.path).keys() == {"module._orig_mod.a", "module._orig_mod.b"}
    (hint,) = done.hints
    suggested = hint.split("'")[-2]

    done = import_checkpoint(Path("a.safetensors"), "out", maps=[suggested])
    assert weights_in(done.path).keys() == {"a", "b"}
    assert not done.hints


def test_maps_apply_in_order_to_weights_and_optimizer_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id="dcp")

    done = import_checkpoint(Path("dcp"), "out", trust=True, maps=[r"^0\.=layer.", r"layer\.(w\w+)=body.\1"])

    assert weights_in(done.path).keys() == {"body.weight", "layer.bias"}
    assert state_in(done.path).keys() == {"body.weight", "layer.bias"}


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("prefix", "expected PATTERN=REPLACEMENT"),
        ("=x", "expected PATTERN=REPLACEMENT"),
        ("(=x", "--map"),
        (r"a=\9", "--map"),
        (".=same", "several tensors that differ"),
        (".=", "several tensors that differ"),
    ],
)
def test_invalid_maps_are_usage_errors(rule: str, complaint: str) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, "a.safetensors")

    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(Path("a.safetensors"), "out", maps=[rule])
    assert not Path("out").exists()


def test_map_merges_equal_tensors_and_reports_it() -> None:
    same_twice = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(2, 3)}
    save_file(same_twice, "a.safetensors")

    done = import_checkpoint(Path("a.safetensors"), "out", maps=["b=a"])

    assert weights_in(done.path).keys() == {"a"}
    assert done.left_out == ["b: the same as a"]


@pytest.mark.parametrize(
    "other",
    [
        torch.arange(6.0).view(2, 3).double(),
        torch.arange(6.0).view(3, 2),
        torch.arange(6.0).view(2, 3).nextafter(torch.tensor(9.0)),
    ],
    ids=["dtype", "shape", "a bit"],
)
def test_map_rejects_tensors_that_differ_in_dtype_shape_or_value(other: Tensor) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": other}, "a.safetensors")

    with pytest.raises(UsageError, match="the name a to several tensors that differ"):
        import_checkpoint(Path("a.safetensors"), "out", maps=["b=a"])
    assert import_checkpoint(Path("a.safetensors"), "out").hints == []


def test_two_parameters_cannot_share_one_optimizer_state() -> None:
    """Covers equal weights of two parameters that were not trained."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].load_state_dict(model["a"].state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    sum(part(torch.ones(1, 2)).sum() for part in model.values()).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id="dcp")

    with pytest.raises(UsageError, match=r"gives the name a\.weight to the optimizer state of several parameters"):
        import_checkpoint(Path("dcp"), "out", trust=True, maps=["b=a"])


def test_duplicate_matrix_gives_a_hint() -> None:
    """Ignores vectors and constant matrices, which may be equal by chance."""
    tied, ones = torch.randn(3, 3), torch.ones(3, 3)
    weights = {"emb.weight": tied, "head+": tied, "norm": tied[0], "bias": tied[0], "gate": ones, "scale": ones}
    save_file({name: tensor.clone() for name, tensor in weights.items()}, "a.safetensors")

    done = import_checkpoint(Path("a.safetensors"), "out")
    (hint,) = done.hints
    assert hint.startswith("head+ is the same as emb.weight; if the model ties them, merge them: --map ")

    done = import_checkpoint(Path("a.safetensors"), "out", maps=[hint.split("'")[-2]])
    assert weights_in(done.path).keys() == weights.keys() - {"head+"}


def test_prefix_hint_requires_the_prefix_in_all_names() -> None:
    save_file({"module.a": torch.ones(2), "b": torch.zeros(2)}, "a.safetensors")

    assert import_checkpoint(Path("a.safetensors"), "out").hints == []


@pytest.mark.parametrize("given", [{}, {"step": 0, "samples": 0}, {"step": 5, "samples": 9}])
def test_step_and_samples_are_given_or_zero(given: dict[str, int]) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(3, dtype=torch.int64)}, "a.safetensors")

    done = import_checkpoint(Path("a.safetensors"), "out", **given)  # type: ignore[arg-type]

    facts = CheckpointReader(done.path).metadata
    expected = given or {"step": 0, "samples": 0}
    assert {"step": facts.step, "samples": facts.samples} == {"step": done.step, "samples": done.samples} == expected
    assert (facts.strategy, facts.world_size) == ("imported from safetensors", 1)
    assert facts.position == {"seconds": 0.0, "skipped": 0, "left_out": []}
    assert (done.tensors, done.bytes, done.dtypes) == (2, 32, {"float32": 1, "int64": 1})
    assert (done.optimizer, done.keys, done.aliases, done.left_out) == (0, [], {}, [])


def test_import_reports_the_optimizer_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id="dcp")

    done = import_checkpoint(Path("dcp"), "out", trust=True)

    assert (done.tensors, done.bytes, done.optimizer) == (2, 24, 2)
    assert done.keys == ["exp_avg", "exp_avg_sq", "step"]


def test_output_folder_is_created_with_its_parents_but_not_inside_a_file() -> None:
    save_file({"a": torch.ones(2)}, "a.safetensors")

    assert import_checkpoint(Path("a.safetensors"), "some/where/out").path.parent == Path("some/where/out")
    with pytest.raises(UsageError, match=r"a.safetensors/deep/out cannot be created: .*(exists|Not a directory)"):
        import_checkpoint(Path("a.safetensors"), "a.safetensors/deep/out")


def test_file_without_tensors_is_rejected() -> None:
    save_file({}, "a.safetensors")

    with pytest.raises(UsageError, match="it contains no tensor"):
        import_checkpoint(Path("a.safetensors"), "out")


def test_alias_mapped_to_its_own_tensor_is_dropped() -> None:
    tensor = torch.ones(2)
    torch.save({"a": tensor, "b": tensor, "c": tensor}, "a.pt")
    done = import_checkpoint(Path("a.pt"), "out", maps=["b=a"])
    reader = CheckpointReader(done.path)
    assert (list(reader.names("model")), reader.aliases) == (["a"], {"c": "a"})


def test_import_adds_a_checkpoint_to_an_imported_folder_among_runs() -> None:
    save_file({"a": torch.ones(2)}, "a.safetensors")
    import_checkpoint(Path("a.safetensors"), "imported/x", step=1)
    Path("imported").rename("runs")
    import_checkpoint(Path("a.safetensors"), "runs/x", step=2)
    assert len([*Path("runs/x").glob("step-*")]) == 2
    with pytest.raises(UsageError, match="would be the folder of a run called y"):
        import_checkpoint(Path("a.safetensors"), "runs/y")
