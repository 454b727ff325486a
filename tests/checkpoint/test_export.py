"""An export is plain safetensors with the model's own names, readable by every other tool."""

import errno
from pathlib import Path

import pytest
import torch
from checkpoint.doubles import checkpoint_of, write
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from ddpforge.checkpoint import files
from ddpforge.checkpoint.export import export
from ddpforge.errors import CheckpointError, UsageError
from ddpforge.interfaces import CanonicalState


@pytest.fixture
def checkpoint(folder: Path) -> Path:
    ema = {"layer.weight": torch.full((3, 5), 0.5), "updates": 3}
    return write(folder, checkpoint_of(7, callbacks={"ema": ema, "mine": {"seen": torch.ones(9)}, "plain": {"x": 1}}))


def test_the_model_is_exported_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"

    done = export(checkpoint, out)

    loaded = load_file(out)
    assert {name: (x.dtype, x.flatten()[0].item()) for name, x in loaded.items()} == {
        "layer.weight": (torch.float32, 7),
        "layer.bias": (torch.bfloat16, 7),
        "norm.num_batches_tracked": (torch.int64, 7),
    }
    assert (done.file, done.step, done.tensors, done.bytes) == (out, 7, 3, out.stat().st_size)
    assert done.sha256 == files.sha256(out)


def test_averaged_weights_take_their_place_among_the_models(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "ema.safetensors", weights="ema")

    loaded = load_file(tmp_path / "ema.safetensors")
    assert loaded["layer.weight"].eq(0.5).all()
    assert loaded["layer.bias"].eq(7).all(), "what the callback does not average is the model's"


def test_a_scalar_weight_has_an_average_too(folder: Path, tmp_path: Path) -> None:
    state = CanonicalState(model={"w": torch.tensor(1.0)}, optimizer={})
    path = write(folder, checkpoint_of(7, state=state, callbacks={"ema": {"w": torch.tensor(0.25)}}))

    export(path, tmp_path / "ema.safetensors", weights="ema")

    assert load_file(tmp_path / "ema.safetensors")["w"].item() == 0.25


@pytest.mark.parametrize("weights", ["mine", "plain", "nobody", "em"])
def test_weights_that_nobody_keeps_are_a_usage_error(checkpoint: Path, tmp_path: Path, weights: str) -> None:
    with pytest.raises(UsageError, match=f"holds no weights called '{weights}'") as caught:
        export(checkpoint, tmp_path / "out", weights=weights)
    assert caught.value.hints == ("callbacks that saved tensors: ema, mine",)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_only_floating_point_tensors_are_converted(
    checkpoint: Path, tmp_path: Path, dtype: str, expected: torch.dtype
) -> None:
    export(checkpoint, tmp_path / "out", dtype=dtype)  # type: ignore[arg-type]

    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "out").items()}
    assert dtypes == {"layer.weight": expected, "layer.bias": expected, "norm.num_batches_tracked": torch.int64}


def test_a_weight_that_would_become_infinite_is_refused(folder: Path, tmp_path: Path) -> None:
    state = CanonicalState(model={"w": torch.tensor([1e6])}, optimizer={})
    path = write(folder, checkpoint_of(7, state=state))

    with pytest.raises(UsageError, match="w holds values too large for float16"):
        export(path, tmp_path / "out", dtype="fp16")
    export(path, tmp_path / "out", dtype="bf16")


class Tied(nn.Module):
    """A head that is the embedding, transposed in use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_parameter_is_written_once_and_tied_again_by_safetensors(folder: Path, tmp_path: Path) -> None:
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


def test_a_full_disk_leaves_no_half_file(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "sync", refuse)
    before = set(tmp_path.iterdir())

    with pytest.raises(CheckpointError, match="out could not be written: No space left on device"):
        export(checkpoint, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before
