"""What other programs wrote becomes a checkpoint with the same numbers, or is refused; none of it runs as code."""

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
    """What two ranks saved under DeepSpeed and FSDP."""
    folder = tmp_path_factory.mktemp("foreign")
    in_ranks(RANKS, lambda _: save_all(folder))
    return folder


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same training in one process, with plain torch."""
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
    """Weights and optimizer state are those of the training in one process, up to the order of sums."""
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
    assert newest(Path("out")) == (done.path, []), "every byte is as the manifest says"


@pytest.mark.parametrize("source", [*ZERO, "zero2-bf16", "zero3-bf16"])
def test_weights_are_bit_by_bit_what_deepspeed_itself_says(foreign: Path, source: str) -> None:
    """Except where gradients go round robin: there its accessor takes elements of other parameters."""
    weights = weights_in(import_checkpoint(foreign / source, "out", trust=True).path)

    for name, tensor in load_file(foreign / source / "public.safetensors").items():
        assert same(weights[name], tensor), name
    assert weights["emb.weight"].dtype == torch.float32, "not the bf16 copy"
    assert weights["frozen.weight"].dtype == (torch.bfloat16 if "bf16" in source else torch.float32)


def test_the_folder_of_one_tag_will_do(foreign: Path) -> None:
    assert import_checkpoint(foreign / "zero1" / f"global_step{STEPS}", "out", trust=True).step == STEPS


def zero_copy(foreign: Path, name: str) -> Path:
    return Path(shutil.copytree(foreign / name / f"global_step{STEPS}", "copy"))


def swap(copy: Path) -> None:
    """The partition of rank 0 under the name of rank 1."""
    one, other = sorted(copy.glob("*_optim_states.pt"))
    one.rename("spare")
    other.rename(one)
    Path("spare").rename(other)


def roll(copy: Path) -> None:
    """Every master weight in the place of its neighbour."""
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
    """One parameter said to be larger than it is."""
    for file in copy.glob("*_model_states.pt"):
        changed(file, file, lambda content: content["param_shapes"][-1].update(scale=torch.Size([4])))


def mix(copy: Path) -> None:
    """What saving another stage under the same tag leaves."""
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
def test_a_zero_checkpoint_that_contradicts_itself_is_refused(
    foreign: Path, source: str, damage: Callable[[Path], None], complaint: str
) -> None:
    copy = zero_copy(foreign, source)
    damage(copy)

    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(copy, "out", trust=True)
    assert not Path("out").exists()


def test_state_that_cannot_be_told_apart_is_left_out_and_said_so(foreign: Path) -> None:
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
    """As where some parameters are trained from a later step on."""
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


def test_a_tag_cannot_lead_out_of_the_folder(foreign: Path) -> None:
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
    assert again.tensors == done.tensors - 1, "the hint says how to leave the second copy out"
    assert CheckpointReader(done.path).manifest.tensors["model"]["emb.weight"].chunks[1].region.numel == 3 * 5


@pytest.mark.parametrize("flatten", [False, True])
def test_a_dcp_checkpoint_of_one_process_too(
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


def test_a_bare_state_dict_saved_by_dcp_is_a_model() -> None:
    weights = {"model.layer": torch.arange(4.0), "head": torch.ones(2, 2)}
    dcp.save(weights, checkpoint_id="dcp")

    done = import_checkpoint(Path("dcp"), "out", trust=True)

    assert all(same(tensor, weights[name]) for name, tensor in weights_in(done.path).items())
    assert (done.tensors, done.optimizer, done.step) == (2, 0, 0)


def crafted(change: Callable[[Any], None]) -> Path:
    """A DCP folder whose metadata were changed."""
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
def test_crafted_dcp_metadata_are_refused(change: Callable[[Any], None], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(crafted(change), "out", trust=True)
    assert not Path("out").exists()


def test_a_shard_that_is_a_link_is_refused() -> None:
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
def test_no_pickle_runs_code_unless_the_user_trusts_it(make: Callable[[Bomb], Path]) -> None:
    marker = Path("marker").absolute()
    source = make(Bomb(marker))

    with pytest.raises(UsageError, match="can run any code") as caught:
        import_checkpoint(source, "out")

    assert not marker.exists()
    assert not Path("out").exists()
    assert "--trust" in caught.value.hints[0]
    with suppress(UsageError):  # some of these hold nothing else
        import_checkpoint(source, "out", trust=True)
    assert marker.exists(), "the bomb is a real one"


# ---------------------------------------------------------------------------------------------- weights alone
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


def test_a_training_checkpoint_gives_its_weights_and_says_that_numbers_are_no_names(
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


def test_safetensors_keep_the_ties_that_their_metadata_tell() -> None:
    save_file({"a": torch.arange(3.0)}, "weights.safetensors", metadata={"format": "pt", "b": "a"})

    done = import_checkpoint(Path("weights.safetensors"), "out")

    assert (done.aliases, done.dtypes) == ({"b": "a"}, {"float32": 1})
    assert same(weights_in(done.path)["a"], torch.arange(3.0))


def hf_folder(files: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, object] | None = None) -> Path:
    """A folder as transformers writes it; `places` stands in the index where given."""
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
def test_weights_that_transformers_split_over_files_are_put_together(kind: str) -> None:
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
def test_an_index_that_lies_is_refused(places: Any, complaint: str) -> None:
    folder = hf_folder({"model-1.safetensors": {"a": torch.ones(2)}}, places)

    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(folder, "out")
    assert not Path("out").exists()


def test_links_in_a_folder_are_refused_and_a_link_that_the_user_names_is_not() -> None:
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
def test_files_that_are_nothing_are_usage_errors(content: bytes) -> None:
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
def test_what_a_checkpoint_cannot_hold_is_refused(content: object, complaint: str) -> None:
    torch.save(content, "file.pt")

    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(Path("file.pt"), "out")
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["nothing", "folder"])
def test_a_source_that_is_no_checkpoint_is_a_usage_error(name: str) -> None:
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
def test_prefixes_stay_unless_the_user_says_otherwise() -> None:
    save_file({"module._orig_mod.a": torch.ones(2), "module._orig_mod.b": torch.zeros(2)}, "a.safetensors")

    done = import_checkpoint(Path("a.safetensors"), "out")
    assert weights_in(done.path).keys() == {"module._orig_mod.a", "module._orig_mod.b"}
    (hint,) = done.hints
    suggested = hint.split("'")[-2]

    done = import_checkpoint(Path("a.safetensors"), "out", maps=[suggested])
    assert weights_in(done.path).keys() == {"a", "b"}
    assert not done.hints


def test_maps_apply_in_order_and_to_optimizer_and_ties() -> None:
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
def test_maps_that_do_not_work_are_usage_errors(rule: str, complaint: str) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, "a.safetensors")

    with pytest.raises(UsageError, match=complaint):
        import_checkpoint(Path("a.safetensors"), "out", maps=[rule])
    assert not Path("out").exists()


def test_a_map_that_gives_two_names_to_the_same_numbers_ties_them_and_says_so() -> None:
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
def test_numbers_are_the_same_in_type_shape_and_value_or_not_at_all(other: Tensor) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": other}, "a.safetensors")

    with pytest.raises(UsageError, match="the name a to several tensors that differ"):
        import_checkpoint(Path("a.safetensors"), "out", maps=["b=a"])
    assert import_checkpoint(Path("a.safetensors"), "out").hints == []


def test_two_parameters_cannot_share_one_optimizer_state() -> None:
    """Their weights may be the same, when nothing was trained."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].load_state_dict(model["a"].state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    sum(part(torch.ones(1, 2)).sum() for part in model.values()).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id="dcp")

    with pytest.raises(UsageError, match=r"gives the name a\.weight to the optimizer state of several parameters"):
        import_checkpoint(Path("dcp"), "out", trust=True, maps=["b=a"])


def test_a_matrix_that_is_there_twice_is_pointed_out() -> None:
    """A vector, or a matrix of one number, may well be the same by chance."""
    tied, ones = torch.randn(3, 3), torch.ones(3, 3)
    weights = {"emb.weight": tied, "head+": tied, "norm": tied[0], "bias": tied[0], "gate": ones, "scale": ones}
    save_file({name: tensor.clone() for name, tensor in weights.items()}, "a.safetensors")

    done = import_checkpoint(Path("a.safetensors"), "out")
    (hint,) = done.hints
    assert hint.startswith("head+ is the same as emb.weight; if the model ties them, merge them: --map ")

    done = import_checkpoint(Path("a.safetensors"), "out", maps=[hint.split("'")[-2]])
    assert weights_in(done.path).keys() == weights.keys() - {"head+"}


def test_a_prefix_is_one_only_if_all_names_have_it() -> None:
    save_file({"module.a": torch.ones(2), "b": torch.zeros(2)}, "a.safetensors")

    assert import_checkpoint(Path("a.safetensors"), "out").hints == []


@pytest.mark.parametrize("given", [{}, {"step": 0, "samples": 0}, {"step": 5, "samples": 9}])
def test_where_training_was_is_what_the_user_says_or_the_source_or_the_beginning(given: dict[str, int]) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(3, dtype=torch.int64)}, "a.safetensors")

    done = import_checkpoint(Path("a.safetensors"), "out", **given)  # type: ignore[arg-type]

    facts = CheckpointReader(done.path).metadata
    expected = given or {"step": 0, "samples": 0}
    assert {"step": facts.step, "samples": facts.samples} == {"step": done.step, "samples": done.samples} == expected
    assert (facts.strategy, facts.world_size) == ("imported from safetensors", 1)
    assert facts.position == {"seconds": 0.0, "skipped": 0, "left_out": []}
    assert (done.tensors, done.bytes, done.dtypes) == (2, 32, {"float32": 1, "int64": 1})
    assert (done.optimizer, done.keys, done.aliases, done.left_out) == (0, [], {}, [])


def test_an_import_says_what_optimizer_state_it_took() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id="dcp")

    done = import_checkpoint(Path("dcp"), "out", trust=True)

    assert (done.tensors, done.bytes, done.optimizer) == (2, 24, 2)
    assert done.keys == ["exp_avg", "exp_avg_sq", "step"]


def test_a_new_folder_may_be_deep_and_cannot_be_inside_a_file() -> None:
    save_file({"a": torch.ones(2)}, "a.safetensors")

    assert import_checkpoint(Path("a.safetensors"), "some/where/out").path.parent == Path("some/where/out")
    with pytest.raises(UsageError, match=r"a.safetensors/deep/out cannot be created: .*(exists|Not a directory)"):
        import_checkpoint(Path("a.safetensors"), "a.safetensors/deep/out")


def test_a_file_without_tensors_is_refused() -> None:
    save_file({}, "a.safetensors")

    with pytest.raises(UsageError, match="it contains no tensor"):
        import_checkpoint(Path("a.safetensors"), "out")


def test_a_tied_name_that_a_map_makes_the_name_of_its_tensor_is_no_second_name() -> None:
    tensor = torch.ones(2)
    torch.save({"a": tensor, "b": tensor, "c": tensor}, "a.pt")
    done = import_checkpoint(Path("a.pt"), "out", maps=["b=a"])
    reader = CheckpointReader(done.path)
    assert (list(reader.names("model")), reader.aliases) == (["a"], {"c": "a"})


def test_a_folder_of_checkpoints_among_runs_takes_another() -> None:
    save_file({"a": torch.ones(2)}, "a.safetensors")
    import_checkpoint(Path("a.safetensors"), "imported/x", step=1)
    Path("imported").rename("runs")
    import_checkpoint(Path("a.safetensors"), "runs/x", step=2)
    assert len([*Path("runs/x").glob("step-*")]) == 2
    with pytest.raises(UsageError, match="would be the folder of a run called y"):
        import_checkpoint(Path("a.safetensors"), "runs/y")
