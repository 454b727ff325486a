"""Exports: plain safetensors with the model's own names, readable by other tools."""

import errno
import json
from itertools import count
from pathlib import Path

import pytest
import torch
from checkpoint.doubles import checkpoint_of, write
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from ddpforge import disk
from ddpforge.errors import CheckpointError, UsageError
from ddpforge.interfaces import CanonicalState
from ddpforge.interop.export import export, export_folder


@pytest.fixture
def checkpoint(folder: Path) -> Path:
    ema = {"layer.weight": torch.full((3, 5), 0.5), "updates": 3}
    return write(folder, checkpoint_of(7, callbacks={"ema": ema, "mine": {"seen": torch.ones(9)}, "plain": {"x": 1}}))


def test_model_is_exported_unchanged(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"

    done = export(checkpoint, out)

    loaded = load_file(out)
    assert {name: (x.dtype, x.flatten()[0].item()) for name, x in loaded.items()} == {
        "layer.weight": (torch.float32, 7),
        "layer.bias": (torch.bfloat16, 7),
        "norm.num_batches_tracked": (torch.int64, 7),
    }
    assert (done.file, done.step, done.tensors, done.bytes) == (out, 7, 3, out.stat().st_size)
    assert done.sha256 == disk.sha256(out)


def test_ema_weights_replace_the_models_weights(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "ema.safetensors", weights="ema")

    loaded = load_file(tmp_path / "ema.safetensors")
    assert loaded["layer.weight"].eq(0.5).all()
    assert loaded["layer.bias"].eq(7).all(), "weights that the callback does not average come from the model"


def test_scalar_ema_weight_is_exported(folder: Path, tmp_path: Path) -> None:
    state = CanonicalState(model={"w": torch.tensor(1.0)}, optimizer={})
    path = write(folder, checkpoint_of(7, state=state, callbacks={"ema": {"w": torch.tensor(0.25)}}))

    export(path, tmp_path / "ema.safetensors", weights="ema")

    assert load_file(tmp_path / "ema.safetensors")["w"].item() == 0.25


@pytest.mark.parametrize("weights", ["mine", "plain", "nobody", "em"])
def test_unknown_weights_are_a_usage_error(checkpoint: Path, tmp_path: Path, weights: str) -> None:
    with pytest.raises(UsageError, match=f"contains no weights called '{weights}'") as caught:
        export(checkpoint, tmp_path / "out", weights=weights)
    assert caught.value.hints == ("callbacks that saved tensors: ema, mine",)


def test_only_exports_tensors_that_match_a_glob(folder: Path, tmp_path: Path) -> None:
    """Matches any name of a tied tensor; ties of other tensors are not in the metadata."""
    checkpoint = sized(folder, 4, 8, 12, other="c")
    chosen = export(checkpoint, tmp_path / "some.safetensors", only=["a", "oth*"])
    with safe_open(chosen.file, framework="pt") as file:
        assert set(file.keys()) == {"a", "c"}
        assert file.metadata()["other"] == "c"
    fewer = export(checkpoint, tmp_path / "fewer.safetensors", only=["a"])
    with safe_open(fewer.file, framework="pt") as file:
        assert "other" not in file.metadata()
    with pytest.raises(UsageError, match="--include v matches no tensor") as caught:
        export(checkpoint, tmp_path / "none.safetensors", only=["a", "v"])
    assert "near it are" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_only_floating_point_tensors_are_converted(
    checkpoint: Path, tmp_path: Path, dtype: str, expected: torch.dtype
) -> None:
    export(checkpoint, tmp_path / "out", dtype=dtype)  # type: ignore[arg-type]

    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "out").items()}
    assert dtypes == {"layer.weight": expected, "layer.bias": expected, "norm.num_batches_tracked": torch.int64}


def test_weight_too_large_for_the_dtype_is_rejected(folder: Path, tmp_path: Path) -> None:
    state = CanonicalState(model={"w": torch.tensor([1.0, 1e6, -2.0])}, optimizer={})
    path = write(folder, checkpoint_of(7, state=state))

    with pytest.raises(UsageError, match="w has values too large for float16"):
        export(path, tmp_path / "out", dtype="fp16")
    export(path, tmp_path / "out", dtype="bf16")


class Tied(nn.Module):
    """Model whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_parameter_is_written_once_and_safetensors_ties_it_again(folder: Path, tmp_path: Path) -> None:
    source, target = Tied(), Tied()
    state = CanonicalState(
        model={"embedding.weight": source.embedding.weight},
        optimizer={},
        aliases={"head.weight": "embedding.weight"},
    )
    out = tmp_path / "tied.safetensors"

    export(write(folder, checkpoint_of(7, state=state)), out)

    assert load_file(out).keys() == {"embedding.weight"}
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    missing, unexpected = load_model(target, out)
    assert not missing
    assert not unexpected
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.head.weight, source.head.weight)


def test_a_file_that_exists_is_replaced_only_on_request(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious")

    with pytest.raises(UsageError, match="out exists"):
        export(checkpoint, out)
    assert out.read_text() == "precious"

    export(checkpoint, out, force=True)
    assert load_file(out).keys() >= {"layer.weight"}


def test_a_damaged_checkpoint_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    shard = checkpoint / "shard-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"shard-00000-of-00001\.safetensors is damaged"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parent_that_is_a_file_is_an_error_with_a_clear_message(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CheckpointError, match="out could not be written: Not a directory"):
        export(checkpoint, tmp_path / "file" / "out")


def test_full_disk_leaves_no_partial_file(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "sync", refuse)
    before = set(tmp_path.iterdir())

    with pytest.raises(CheckpointError, match="out could not be written: No space left on device"):
        export(checkpoint, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


# ---------------------------------------------------------------------------------------------- folders
def sized(folder: Path, *sizes: int, **aliases: str) -> Path:
    """Writes a checkpoint with tensors a, b, c … of these sizes, each filled with its index."""
    model = {name: torch.full((size,), float(i)) for i, (name, size) in enumerate(zip("abcdefg", sizes, strict=False))}
    return write(folder, checkpoint_of(7, state=CanonicalState(model=model, optimizer={}, aliases=aliases)))


def files_in(folder: Path) -> dict[str, set[str]]:
    """Returns the tensor names in each safetensors file."""
    return {path.name: {*load_file(path)} for path in sorted(folder.glob("*.safetensors"))}


def test_model_in_one_file_has_no_index(folder: Path, tmp_path: Path) -> None:
    done = export_folder(sized(folder, 4, 4), tmp_path / "hf", most=32)

    assert files_in(tmp_path / "hf") == {"model.safetensors": {"a", "b"}}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"model.safetensors"}
    assert (done.file, done.sha256) == (tmp_path / "hf/model.safetensors", disk.sha256(done.file))


def test_tensors_fill_files_in_order_and_the_index_maps_them(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"

    done = export_folder(sized(folder, 4, 4, 20, 2, 1, z="c"), out, most=32)

    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert files_in(out) == {names[0]: {"a", "b"}, names[1]: {"c"}, names[2]: {"d", "e"}}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 31 * 4}
    assert index["weight_map"] == {"a": names[0], "b": names[0], "c": names[1], "d": names[2], "e": names[2]}
    with safe_open(out / names[1], framework="pt") as file:
        assert file.metadata() == {"format": "pt", "z": "c"}, "the tie is in the file of its tensor"
    assert done.files == {name: disk.sha256(out / name) for name in names}
    assert (done.file, done.tensors) == (out / "model.safetensors.index.json", 5)
    assert done.bytes == sum((out / name).stat().st_size for name in names)


def test_tensor_larger_than_the_limit_has_its_own_file(folder: Path, tmp_path: Path) -> None:
    export_folder(sized(folder, 20, 1, 20), tmp_path / "hf", most=16)

    assert [*files_in(tmp_path / "hf").values()] == [{"a"}, {"b"}, {"c"}]


def test_force_replaces_only_weight_files(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    export_folder(sized(folder, 4, 4, 4), out, most=16)
    (out / "config.json").write_text("{}")

    with pytest.raises(UsageError, match=r"model-00001-of-00003\.safetensors exists"):
        export_folder(sized(folder, 4), out)
    assert len(files_in(out)) == 3
    export_folder(sized(folder, 4), out, force=True)
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    export_folder(sized(folder, 4, 4), out, force=True, most=16)
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_files_are_synced_before_the_rename_and_the_index_is_last(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ensures that the files of an index exist, even if the host crashes at any time."""
    out, done = tmp_path / "hf", list[str]()
    out.mkdir()
    rename, sync = disk.rename, disk.sync_folder
    monkeypatch.setattr(disk, "rename", lambda old, new: (done.append(new.name), rename(old, new)))
    monkeypatch.setattr(disk, "sync_folder", lambda path: (done.append(f"sync {path.name}"), sync(path)))

    export_folder(sized(folder, 4, 4), out, most=16)

    named = done.index("model-00001-of-00002.safetensors")
    assert any(done[n].startswith("sync .hf.") for n in range(named))
    assert done[named : named + 3] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("there", [False, True])
def test_full_disk_leaves_no_partial_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, there: bool
) -> None:
    checkpoint, out = sized(folder, 4, 4), tmp_path / "hf"
    if there:
        out.mkdir()
        (out / "config.json").write_text("{}")
    calls = count()

    def refuse(file: object) -> None:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "sync", refuse)

    with pytest.raises(CheckpointError, match="hf could not be written: No space left on device"):
        export_folder(checkpoint, out, most=16)
    assert [path.name for path in out.iterdir()] == ["config.json"] if there else not out.exists()
    assert not list(tmp_path.rglob(".*"))


def test_file_at_the_path_of_the_folder_is_a_usage_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("precious")

    with pytest.raises(UsageError, match="hf is a file"):
        export_folder(sized(folder, 4), tmp_path / "hf", force=True)


# ---------------------------------------------------------------------------------------------- transformers
@pytest.mark.parametrize("most", [None, 20_000])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_loads_an_export(folder: Path, tmp_path: Path, family: str, most: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    configs = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=8, vocab_size=64),
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
        ),
    }
    config = configs[family]()
    torch.manual_seed(1)
    trained = transformers.AutoModelForCausalLM.from_config(config)
    named = dict(trained.named_parameters())
    first = {id(parameter): name for name, parameter in named.items()}
    everything = trained.named_parameters(remove_duplicate=False)
    aliases = {name: first[id(parameter)] for name, parameter in everything if name not in named}
    assert len(aliases) == (family == "gpt2"), "one of the two ties its head to the embedding"
    state = CanonicalState(model=named, optimizer={}, aliases=aliases)
    out = tmp_path / "hf"

    export_folder(write(folder, checkpoint_of(7, state=state)), out, most=most)
    config.save_pretrained(out)

    assert (out / "model.safetensors.index.json").exists() == (most is not None)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, trained.eval()(tokens).logits)


def test_callback_with_other_tensors_than_model_weights_is_rejected(folder: Path, tmp_path: Path) -> None:
    kept = {"layer.weight": torch.ones(3, 5), "mine": torch.ones(2)}
    path = write(folder, checkpoint_of(7, callbacks={"ema": kept}))

    with pytest.raises(UsageError, match="contains no weights called 'ema'"):
        export(path, tmp_path / "out.safetensors", weights="ema")
    assert not (tmp_path / "out.safetensors").exists()


def test_module_of_the_task_is_exported_separately(folder: Path, tmp_path: Path) -> None:
    """Exports a target network for `layer` with the names inside `layer`."""
    target = {"weight": torch.full((3, 5), 0.5)}
    path = write(folder, checkpoint_of(7, callbacks={"task.target": target, "ema": {"layer.weight": torch.ones(3, 5)}}))
    done = export(path, tmp_path / "target.safetensors", weights="task.target")
    assert done.tensors == 1
    assert torch.equal(load_file(tmp_path / "target.safetensors")["weight"], target["weight"])
    with pytest.raises(UsageError, match=r"contains no weights called 'task\.other'"):
        export(path, tmp_path / "other.safetensors", weights="task.other")
