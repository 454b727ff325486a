"""Checkpoint format: bitwise round trips, refusal of unsupported state, and safe loading of untrusted files."""

import json
import math
import pickle
import platform
import re
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from checkpoint.doubles import Bomb, Checkpoint, checkpoint_of, read, reseal, same, tensors_of_every_kind, write
from safetensors.torch import load_file, save_file
from torch import Tensor

import ddpforge
from ddpforge.checkpoint import commit, manifest
from ddpforge.checkpoint.manifest import damages, read_manifest
from ddpforge.checkpoint.retention import newest
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState
from ddpforge.interop.compare import compare

SHARD = "shard-00000-of-00001.safetensors"


def reload(folder: Path, **changes: Any) -> Checkpoint:
    return read(write(folder, checkpoint_of(7, **changes)))


# ---------------------------------------------------------------------------------------------- round trips
def test_tensors_are_restored_bit_for_bit_in_order(folder: Path) -> None:
    model = tensors_of_every_kind()

    state = CanonicalState(model=model, optimizer={"a/b": {**model}}, aliases={"tied": "nan"})

    loaded = reload(folder, state=state).state

    assert list(loaded.model) == list(model)
    assert loaded.aliases == {"tied": "nan"}
    for name, tensor in model.items():
        assert same(loaded.model[name], tensor), name
        assert same(loaded.optimizer["a/b"][name], tensor), name  # type: ignore[arg-type]
        assert not loaded.model[name].requires_grad


@pytest.mark.parametrize(
    "number",
    [
        torch.tensor(12.0),
        torch.tensor(0.1),
        torch.tensor(-0.0),
        torch.tensor(1e-45),
        torch.tensor(math.inf),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(0.1, dtype=torch.bfloat16),
        torch.tensor(2**63 - 1),
        torch.tensor(True),
    ],
    ids=str,
)
def test_0d_optimizer_tensors_are_saved_as_numbers_and_restored_bit_for_bit(folder: Path, number: Tensor) -> None:
    state = CanonicalState(model={"w": torch.ones(2)}, optimizer={"w": {"step": number}})
    path = write(folder, checkpoint_of(7, state=state))

    assert not read_manifest(path).tensors["optimizer"]
    assert same(read(path).state.optimizer["w"]["step"], number)  # type: ignore[arg-type]


def test_plain_values_are_restored_with_their_types(folder: Path) -> None:
    plain = {"int": 3, "float": 3.0, "big": 2**80, "tiny": 5e-324, "inf": math.inf, "true": True, "none": None}
    state = CanonicalState(model={"w": torch.ones(2)}, optimizer={"w": dict(plain), "never stepped": {}})
    callbacks = {"early_stopping": {**plain, "text": "é"}, "stateless": {}}

    loaded = reload(folder, state=state, callbacks=callbacks)

    assert repr(loaded.state.optimizer) == repr(state.optimizer)
    assert repr(loaded.callbacks) == repr(callbacks)


def test_metadata_is_restored(folder: Path) -> None:
    facts: dict[str, Any] = {
        "samples": 2**40,
        "strategy": "ddp",
        "world_size": 4,
        "recipe": 'name = "digits"\n',
        "lineage": [{"step": 0, "recipe": "ab"}],
        "position": {"epoch": 3, "left_out": [5, 6]},
        "loop": {"scale": 65536.0},
    }

    loaded = reload(folder, **facts)

    assert {name: getattr(loaded, name) for name in facts} == facts


def test_tensors_with_64_dimensions_are_restored(folder: Path) -> None:
    state = CanonicalState(model={"w": torch.ones((1,) * 64), "v": torch.ones((1,) * 63)}, optimizer={})

    loaded = reload(folder, state=state, callbacks={}).state.model

    assert {name: tensor.ndim for name, tensor in loaded.items()} == {"w": 64, "v": 63}


def test_metrics_may_be_nan_or_infinite(folder: Path) -> None:
    metrics = reload(folder, metrics={"eval/loss": math.nan, "train/loss": -math.inf, "eval/accuracy": 0.1}).metrics

    assert math.isnan(metrics["eval/loss"])
    assert (metrics["train/loss"], metrics["eval/accuracy"]) == (-math.inf, 0.1)


def test_a_checkpoint_before_the_first_step_has_no_optimizer_state(folder: Path) -> None:
    loaded = reload(folder, state=CanonicalState(model={"w": torch.ones(2)}, optimizer={}), callbacks={})

    assert (loaded.state.optimizer, loaded.callbacks) == ({}, {})


def test_loaded_tensors_do_not_share_memory_with_the_file(folder: Path) -> None:
    path = write(folder, checkpoint_of(7))
    weight = read(path).state.model["layer.weight"]

    with (path / SHARD).open("r+b") as file:
        file.truncate(0)

    assert weight.eq(7).all()


# ---------------------------------------------------------------------------------------------- on disk
def test_a_shard_is_plain_safetensors_with_the_bare_models_names(folder: Path) -> None:
    path = write(folder, checkpoint_of(7))

    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in load_file(path / SHARD).items()} == {
        "layer.weight": (torch.float32, (3, 5)),
        "layer.bias": (torch.bfloat16, (3,)),
        "norm.num_batches_tracked": (torch.int64, ()),
        "layer.weight/exp_avg": (torch.float32, (3, 5)),
        "layer.bias/exp_avg": (torch.float32, (3,)),
        "ema/layer.weight": (torch.float32, (3, 5)),
    }


def test_other_tools_read_tensors_of_every_kind(folder: Path) -> None:
    state = CanonicalState(model=tensors_of_every_kind(), optimizer={})

    found = load_file(write(folder, checkpoint_of(7, state=state, callbacks={})) / SHARD)

    assert found.keys() == state.model.keys()
    assert all(same(found[name], tensor) for name, tensor in state.model.items())


def test_a_file_holds_its_tensors_aligned(folder: Path) -> None:
    content = (write(folder, checkpoint_of(7)) / SHARD).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])

    assert (8 + length) % 8 == 0
    assert header["norm.num_batches_tracked"]["data_offsets"] == [0, 8]
    assert header["layer.weight"]["data_offsets"] == [8, 68]
    assert header["layer.bias"]["data_offsets"] == [200, 206]


def test_the_manifest_is_strict_json_with_the_location_of_each_tensor(folder: Path) -> None:
    path = write(folder, checkpoint_of(7, metrics={"eval/loss": math.nan}))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    manifest = json.loads((path / "manifest.json").read_text(), parse_constant=refuse)
    assert (manifest["format"], manifest["version"], manifest["step"]) == ("ddpforge", 2, 7)
    assert manifest["versions"] == {
        "ddpforge": ddpforge.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", manifest["created"])
    assert manifest["optimizer"]["layer.weight"] == {"step": {"dtype": "float32", "value": 7.0}}
    assert manifest["files"].keys() == {SHARD, "rank-00000.json"}
    content = (path / SHARD).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert manifest["files"][SHARD] == {
        "bytes": len(content),
        "header_xxh3": xxhash.xxh3_128_hexdigest(content[:header]),
    }
    chunk = {
        "file": SHARD,
        "entry": "layer.bias",
        "region": {"start": 0, "stop": 3},
        "hashes": [xxhash.xxh3_128_hexdigest(content[header + 200 : header + 206])],
    }
    assert manifest["tensors"]["model"]["layer.bias"] == {"dtype": "bfloat16", "shape": [3], "chunks": [chunk]}


def test_saving_a_step_again_keeps_the_first_checkpoint_and_updates_the_hint(folder: Path) -> None:
    first, second = (write(folder, checkpoint_of(7)) for _ in range(2))

    assert first != second
    assert first.exists()
    assert json.loads((folder / "latest.json").read_text()) == {"dir": second.name, "step": 7}


def test_a_checkpoint_never_gets_an_existing_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter(["abcd", "abcd", "abcd", "ef01"])
    monkeypatch.setattr("secrets.token_hex", lambda count: next(ends))

    first, second = (write(folder, checkpoint_of(7)) for _ in range(2))

    assert [first.name, second.name] == ["step-000000007-abcd", "step-000000007-ef01"]


def test_files_obey_the_umask(folder: Path) -> None:
    plain = folder / "plain"
    plain.touch()

    path = write(folder, checkpoint_of(7))

    assert {file.stat().st_mode for file in path.iterdir()} == {plain.stat().st_mode}


# ---------------------------------------------------------------------------------------------- refused at saving
class More(Tensor):
    """Tensor subclass."""


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"state": CanonicalState({}, {"w": {"group": object()}})}, "group in the optimizer state of w .* object"),  # type: ignore[dict-item]
        ({"state": CanonicalState({}, {"w": {"mode": "max"}})}, "mode in the optimizer state of w .* str"),  # type: ignore[dict-item]
        ({"state": CanonicalState({}, {"w": {"a/b": torch.ones(2)}})}, "a/b in the optimizer state of w .* slash"),
        ({"state": CanonicalState({"w": torch.ones(2).to_sparse()}, {})}, "w of the model .* not dense"),
        ({"state": CanonicalState({"w": torch.ones(2, device="meta")}, {})}, "w of the model .* meta device"),
        ({"state": CanonicalState({"w": torch.ones(2, dtype=torch.complex64)}, {})}, "w of the model .* complex64"),
        (
            {"state": CanonicalState({"w": torch.ones(2).as_subclass(More)}, {})},
            "w of the model .* a More, not a plain tensor",
        ),
        ({"state": CanonicalState({}, {"w": {"z": torch.tensor(1j)}})}, "z in the optimizer state of w .* complex64"),
        ({"state": CanonicalState({}, {"w": {"z": torch.ones((), device="meta")}})}, "z in the .* the meta device"),
        ({"callbacks": {"a/b": {"x": torch.ones(2)}}}, "x in the state of callback a/b .* slash"),
        ({"callbacks": {"mine": {"when": [1, 2]}}}, "when in the state of callback mine .* list"),
        ({"position": {"epoch": {1, 2}}}, "position.epoch"),
        ({"loop": {"scale": math.nan}}, "step 7 cannot be saved"),
        ({"metrics": {"eval/loss": "low"}}, "the metric eval/loss .* str"),
    ],
)
def test_save_refuses_unsupported_values_by_name_and_writes_nothing(
    folder: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){complaint}"):
        write(folder, checkpoint_of(7, **changes))

    assert not list(folder.iterdir())


def test_save_refuses_a_manifest_that_is_too_large_to_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len((write(folder, checkpoint_of(6)) / "manifest.json").read_bytes())
    monkeypatch.setattr(commit, "MOST_TEXT", size)
    earlier = write(folder, checkpoint_of(7)).name
    monkeypatch.setattr(commit, "MOST_TEXT", size - 1)

    with pytest.raises(
        CheckpointError, match=f"the checkpoint of step 8 has a manifest of {size:,} bytes, which is too large"
    ):
        write(folder, checkpoint_of(8))

    assert {path.name[:14] for path in folder.iterdir()} == {"step-000000006", "step-000000007", "latest.json"}
    assert json.loads((folder / "latest.json").read_text())["dir"] == earlier


# ---------------------------------------------------------------------------------------------- refused at loading
def test_a_newer_format_is_refused_with_advice(folder: Path) -> None:
    path = write(folder, checkpoint_of(7))
    reseal(path, lambda manifest: manifest.update(version=3, unheard_of=True))

    with pytest.raises(CheckpointError, match="format 3; this ddpforge reads formats up to 2") as caught:
        read(path)
    assert caught.value.hints == ("upgrade ddpforge",)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda m: m["tensors"]["model"].pop("layer.bias"),
            f"{SHARD} .* holds layer.bias, which the manifest",
        ),
        (lambda m: m["tensors"]["model"]["layer.bias"]["chunks"][0].update(entry="new"), "it lacks new"),
        (
            lambda m: m["tensors"]["model"].update(new=m["tensors"]["model"]["layer.bias"]),
            "share the entry layer.bias of shard",
        ),
        (
            lambda m: m["tensors"]["model"]["layer.bias"].update(shape=[1, 3]),
            r"layer.bias is BF16 \[3\]; the manif",
        ),
        (lambda m: m["tensors"]["model"]["layer.bias"].update(dtype="float16"), "layer.bias is BF16"),
        (
            lambda m: m["tensors"]["model"]["layer.bias"]["chunks"][0].update(file="gone.safetensors"),
            "'gone.safetensors', which it",
        ),
        (lambda m: m["optimizer"].pop("layer.bias"), "manifest.json is damaged: 'layer.bias'"),
        (lambda m: m["optimizer"]["layer.bias"]["step"].update(dtype="import os"), "unknown dtype 'import os'"),
        (lambda m: m["optimizer"]["layer.bias"]["step"].update(dtype="int8", value=1000), "manifest.json is damaged"),
        (lambda m: m["optimizer"]["layer.bias"].update(step="text"), "manifest.json is damaged: optimizer.layer.bias"),
        (lambda m: m.pop("samples"), "manifest.json is damaged: samples: Field required"),
        (lambda m: m.update(step=-1), "manifest.json is damaged: step"),
        (lambda m: m.update(surprise=1), "manifest.json is damaged: surprise"),
        (lambda m: m.update(format="zip"), "not a ddpforge checkpoint: its format is 'zip'"),
    ],
)
def test_a_manifest_that_does_not_fit_the_files_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    path = write(folder, checkpoint_of(7))
    reseal(path, change)

    with pytest.raises(CheckpointError, match=complaint):
        read(path)


def test_a_file_with_other_tensors_than_the_manifest_lists_is_refused(folder: Path) -> None:
    path = write(folder, checkpoint_of(7))
    save_file({"layer.weight": torch.zeros(3, 5), "more": torch.zeros(99)}, path / SHARD)
    reseal(path)

    with pytest.raises(CheckpointError, match=f"{SHARD} is damaged: it lacks ema/layer.weight, layer.bias,"):
        read(path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b", "..", ".hidden", "", "a\0b"])
def test_a_file_outside_the_folder_is_never_read(folder: Path, name: str) -> None:
    path = write(folder, checkpoint_of(7))
    save_file({"layer.weight": torch.full((3, 5), 666.0)}, folder / "outside.safetensors")

    def point_outside(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(SHARD)
        for entry in manifest["tensors"]["model"].values():
            entry["chunks"][0]["file"] = name

    reseal(path, point_outside)

    with pytest.raises(CheckpointError, match="leaves the folder or is hidden"):
        read(path)


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", SHARD])
def test_links_are_refused_even_if_their_target_is_valid(folder: Path, name: str) -> None:
    path = write(folder, checkpoint_of(7))
    (path / name).rename(folder / "elsewhere")
    (path / name).symlink_to(folder / "elsewhere")

    with pytest.raises(CheckpointError, match=f"{name} is damaged: it is a link or a special file"):
        read(path)


HOSTILE_HEADERS = {
    "length 2^63": struct.pack("<Q", 2**63),
    "length 1 GB": struct.pack("<Q", 10**9) + b"{}",
    "too short": b"abc",
    "nothing": b"",
    "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "huge tensor": b'{"layer.weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,60]}}',
    "twice the same bytes": b'{"a":{"dtype":"U8","shape":[60],"data_offsets":[0,60]},'
    b'"b":{"dtype":"U8","shape":[60],"data_offsets":[0,60]}}',
}


@pytest.mark.parametrize("header", HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS.keys())
def test_an_invalid_safetensors_header_is_refused(folder: Path, header: bytes) -> None:
    path = write(folder, checkpoint_of(7))
    content = struct.pack("<Q", len(header)) + header if header.startswith(b"{") else header
    (path / SHARD).write_bytes(content + b"\0" * 300)
    reseal(path)

    with pytest.raises(CheckpointError, match=f"{SHARD} is damaged"):
        read(path)


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json"])
def test_json_files_above_the_size_limit_are_not_parsed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = write(folder, checkpoint_of(7))
    (path / name).write_bytes(b" " * 100_000)
    monkeypatch.setattr(manifest, "MOST_TEXT", 99_999)

    with pytest.raises(
        CheckpointError, match=rf"{name} is damaged: it has 100000 bytes, too many for a file of its kind"
    ):
        read(path)
    monkeypatch.setattr(manifest, "MOST_TEXT", 100_000)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: (Invalid JSON|its sha256)"):
        read(path)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"step":' + b"9" * 10_000 + b"}", b"\xff", b"", b"null", b"NaN"])
def test_hostile_json_is_refused(folder: Path, text: bytes) -> None:
    path = write(folder, checkpoint_of(7))
    (path / "manifest.json").write_bytes(text)
    (path / "COMMIT").write_text(json.dumps({"manifest_sha256": sha256(text).hexdigest()}))

    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read(path)


@pytest.mark.parametrize("sealed", [False, True], ids=["as it is", "with all hashes right"])
@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", SHARD])
def test_no_file_of_a_checkpoint_can_run_code(folder: Path, name: str, sealed: bool) -> None:
    path = write(folder, checkpoint_of(7))
    payload = pickle.dumps(Bomb(folder / "marker"))
    (path / name).write_bytes(payload)
    if sealed and name == "manifest.json":
        (path / "COMMIT").write_text(json.dumps({"manifest_sha256": sha256(payload).hexdigest()}))
    elif sealed and name != "COMMIT":
        reseal(path)

    with pytest.raises(CheckpointError, match=name):
        read(path)
    assert not (folder / "marker").exists()


def nested(depth: int) -> Any:
    """Returns a list nested `depth` levels deep."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"recipe": ".".join(["a"] * 100_000) + " = 1"}, "a key in it has more parts than any recipe's"),
        ({"recipe": "[" + '"a" . ' * 100_000 + "a]"}, "a key in it has more parts than any recipe's"),
        ({"position": {"skipped": 1 << 63}}, r"position\.skipped holds a value that no run writes"),
        ({"recipe": "a = 1 #" + "x" * (5 << 20)}, "more than any recipe"),
        ({"recipe": "a = " + "[" * 100_000}, "nested too deeply|its recipe or its metrics"),
        ({"recipe": "what is this"}, "its recipe or its metrics cannot be read"),
        ({"position": {"left_out": nested(100)}}, "position"),
        ({"position": {"left_out": "12"}}, r"position\.left_out cannot be a str"),
        ({"position": {"left_out": [-1]}}, r"position\.left_out holds a value that no run writes"),
        ({"position": {"left_out": [True]}}, r"position\.left_out holds a value that no run writes"),
        ({"position": {"seconds": "1"}}, r"position\.seconds cannot be a str"),
        ({"position": {"skipped": -1}}, r"position\.skipped holds a value that no run writes"),
        ({"position": {"other": nested(100)}}, "position is nested too deeply"),
        ({"lineage": [nested(100)]}, "lineage is nested too deeply"),
        ({"loop": {"loss_scale": "high"}}, r"loop\.loss_scale is not a number"),
        ({"metrics": {"eval/loss": "abc"}}, "its recipe or its metrics cannot be read"),
        ({"metrics": {"eval/loss": {"dtype": "float", "value": "abc"}}}, "its recipe or its metrics cannot be read"),
        ({"step": 10**40}, "step"),
    ],
)
def test_a_checkpoint_with_values_that_no_run_writes_is_damaged_and_skipped(
    folder: Path, change: dict[str, Any], complaint: str
) -> None:
    write(folder, checkpoint_of(5))
    path = write(folder, checkpoint_of(7))
    reseal(path, lambda manifest: manifest.update(change))
    (found,) = damages(path)
    assert re.search(complaint, found.problem), found.problem
    chosen, _ = newest(folder)
    assert chosen is not None
    assert chosen != path


def test_compare_refuses_a_tensor_that_exceeds_free_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(folder, checkpoint_of(step)) for step in (5, 7)]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8))
    with pytest.raises(CheckpointError, match=r"cannot be compared: it needs .* bytes of memory, but only 8 are free"):
        compare(*paths)
