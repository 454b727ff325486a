"""Blocks of documents in models whose layers have a state: each document has the outputs that it has alone."""

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hybrids import HYBRIDS, MIXING
from test_packing import many_chats
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from ddpforge_transformers.models import causal_lm
from ddpforge_transformers.probe import packing_fault
from ddpforge_transformers.token_mixers import Documents

# Documents below the 4 tokens of the convolutions, and below, at and above chunks of 16 and 64; a row of one document.
ROWS = ((1, 2, 37, 64, 3, 16, 5), (65, 1, 40, 2, 20), (128,))
FAST = ("lfm2", "qwen3_next")
FULL = pytest.mark.full
KINDS = [pytest.param(kind, marks=() if kind in FAST else FULL) for kind in HYBRIDS]
Spans = list[tuple[int, slice]]


def built(kind: str) -> Any:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    return causal_lm(model_type=kind, options=(HYBRIDS | MIXING)[kind]).train()


def block() -> tuple[Tensor, Tensor, Spans]:
    """Returns tokens and positions, int64 [3, 128], and the row and place of each document."""
    tokens = torch.randint(3, 400, (len(ROWS), 128), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in ROWS])
    spans = [
        (row, slice(sum(sizes[:number]), sum(sizes[: number + 1])))
        for row, sizes in enumerate(ROWS)
        for number in range(len(sizes))
    ]
    return tokens, positions, spans


def losses(model: Any, tokens: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits [B, T, V], and the loss of each next token [B, T - 1]."""
    logits = model(input_ids=tokens, use_cache=False, **inputs).logits
    return logits, F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


# ---------------------------------------------------------------------------------------------- one model
@pytest.mark.parametrize("kind", KINDS)
def test_documents_in_a_block_have_logits_losses_and_gradients_of_each_alone(kind: str) -> None:
    model, (tokens, positions, spans) = built(kind), block()
    logits, each = losses(model, tokens, position_ids=positions)
    within = positions[:, 1:] > 0  # the first token of a document is not a target
    (each * within).sum().backward()
    packed = gradients(model)
    for row, span in spans:
        alone, wanted = losses(model, tokens[row : row + 1, span])
        wanted.sum().backward()
        torch.testing.assert_close(logits[row, span], alone[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(each[row, span.start : span.stop - 1], wanted[0], rtol=0, atol=1e-5)
    one_by_one, count = gradients(model), within.sum()
    assert packed.keys() == one_by_one.keys()
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient / count, one_by_one[name] / count, rtol=0, atol=1e-5, msg=name)
    mixed, _ = losses(model, tokens)
    assert (mixed - logits).abs().max() > 1e-2 * logits.abs().max()  # without positions they see each other
    assert not packing_fault(model)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_padded_on_the_right_have_logits_and_gradients_of_each_alone(kind: str) -> None:
    model, (tokens, _, _) = built(kind), block()
    sizes = (2, 37, 70)
    mask = (torch.arange(70) < torch.tensor(sizes)[:, None]).long()
    padded, each = losses(model, tokens[:, :70] * mask, attention_mask=mask)
    (each * mask[:, 1:]).sum().backward()
    together = gradients(model)
    for row, size in enumerate(sizes):
        alone, wanted = losses(model, tokens[row : row + 1, :size])
        wanted.sum().backward()
        torch.testing.assert_close(padded[row, :size], alone[0], rtol=0, atol=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(together[name] / mask.sum(), gradient / mask.sum(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", MIXING)
def test_models_whose_other_layers_mix_documents_are_still_refused(kind: str) -> None:
    assert "document 2 of a block has logits that differ" in packing_fault(built(kind))


def test_a_gated_delta_rule_of_packed_documents_is_the_recurrence_of_each() -> None:
    """Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), equation 10, token by token."""
    model, (tokens, positions, spans) = built("qwen3_next"), block()
    mixer: Any = model.model.layers[0].linear_attn
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        outputs.append(output)

    mixer.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=tokens, position_ids=positions, use_cache=False)
        for row, span in spans:
            wanted = delta_rule(mixer, inputs[0][row, span])
            torch.testing.assert_close(outputs[0][row, span], wanted, rtol=0, atol=1e-5)


def delta_rule(mixer: Any, x: Tensor) -> Tensor:
    """Returns the output [T, D] of Qwen3-Next's linear attention for the inputs [T, D] of one document."""
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x[None]), mixer.in_proj_ba(x[None]))
    joined = torch.cat([one.flatten(2) for one in (q, k, v)], dim=-1)[0]
    weight = mixer.conv1d.weight[:, 0]
    width = weight.shape[1]
    before = torch.cat([joined.new_zeros(width - 1, joined.shape[1]), joined])
    mixed = F.silu(torch.stack([(before[t : t + width] * weight.T).sum(0) for t in range(len(x))]))
    q, k, v = (one.view(len(x), -1, 8) for one in mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=1))
    copies = v.shape[1] // k.shape[1]
    q, k = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
    q, k = (one.repeat_interleave(copies, dim=1) for one in (q * 8**-0.5, k))
    decay = (-mixer.A_log.exp() * F.softplus(a[0] + mixer.dt_bias)).exp()
    state, found = x.new_zeros(v.shape[1], 8, 8), []
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        error = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * b[0, t].sigmoid()[:, None]
        state = state + torch.einsum("hk,hv->hkv", k[t], error)
        found.append(torch.einsum("hk,hkv->hv", q[t], state))
    gated = mixer.norm(torch.stack(found).reshape(-1, 8), z.reshape(-1, 8))
    return mixer.out_proj(gated.reshape(len(x), -1))


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model, (tokens, positions, _) = built("lfm2"), block()
    other = copy.deepcopy(model)
    with torch.no_grad():
        before, _ = losses(other, tokens, position_ids=positions)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(losses(other, tokens, position_ids=positions)[0], before)
        assert not losses(model, tokens, position_ids=positions)[0].any()


def test_positions_of_one_document_change_nothing() -> None:
    model, (tokens, _, _) = built("lfm2"), block()
    assert Documents.of(torch.arange(128)[None], rows=3) is None
    with torch.no_grad():
        assert torch.equal(
            losses(model, tokens, position_ids=torch.arange(128).expand(3, -1))[0], losses(model, tokens)[0]
        )


def test_documents_are_batches_by_ranges_of_lengths_and_equally_many_in_each_block() -> None:
    _, positions, _ = block()
    found = Documents.of(positions, rows=3)
    assert found is not None
    assert [tuple(one.shape) for one in found.batches] == [(11, 64), (2, 128)]
    short = Documents.of(torch.arange(2).repeat(64)[None], rows=1)
    assert short is not None
    assert [tuple(one.shape) for one in short.batches] == [(64, 2), (1, 1)]
    x = torch.randn(3, 128, 4)
    joined, nothing = found.apply(lambda x, mask: (x.cumsum(1), mask), (x,), {"mask": None})
    assert nothing is None
    torch.testing.assert_close(joined[0, 1:3], x[0, 1:3].cumsum(0))


# ---------------------------------------------------------------------------------------------- runs
RECIPE = """
recipe = 2
name = "{name}"
[model]
use = "causal_lm"
model_type = "{kind}"
options = {options}
[data.train]
use = "packed"
block_size = 80
[data.train.of]
use = "chat"
path = "chats.jsonl"
tokenizer = "tokenizer"
[task]
use = "causal_lm"
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "6st"
global_batch = 8
micro_batch = 2
[checkpoint]
every = "6st"
[track]
every = "1st"
"""
MIXERS = {"qwen3_next": "Qwen3NextGatedDeltaNet", "nemotron_h": "NemotronHMamba2Mixer"}
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one-micro-batch": (1, ("--set=train.micro_batch=8",)),
    "checkpointed": (1, ("--set=train.activation_checkpointing=true",)),
    "checkpointed-mixers": (
        1,
        ("--set=train.activation_checkpointing=true", '--set=train.blocks=["MIXER"]'),
    ),
    "loss-chunk": (1, ("--set=task.loss_chunk=32",)),
    "two": (2, ()),
    "fsdp": (2, ("--set=strategy.use=fsdp",)),
    "compiled": (1, ("--set=train.compile=default",)),
    "fsdp-checkpointed": (2, ("--set=strategy.use=fsdp", "--set=train.activation_checkpointing=true")),
    "zero-3": (2, ("--set=strategy.use=deepspeed", "--set=strategy.stage=3")),
}


def table(value: Any) -> str:
    """Returns a value in TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {table(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)


def write(folder: Path, kind: str) -> None:
    many_chats(folder)
    (folder / "packed.toml").write_text(RECIPE.format(name="packed", kind=kind, options=table(HYBRIDS[kind])))


def curve(folder: Path) -> list[float]:
    """Returns loss and gradient norm of each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if "train/loss" in row for key in ("train/loss", "train/grad_norm")]


def compare(ddpforge: Callable[..., str], folder: Path, kind: str, names: Iterable[str]) -> None:
    write(folder, kind)
    ddpforge("run", "packed.toml")
    single = curve(folder / "runs/packed")
    assert len(single) == 12
    assert single[-2] < single[0]
    for name in names:
        ranks, sets = RUNS[name][0], [one.replace("MIXER", MIXERS[kind]) for one in RUNS[name][1]]
        ddpforge("run", "packed.toml", f"--set=name={name}", *sets, ranks=ranks)
        found = curve(folder / "runs" / name)
        print(name, max(abs(one - other) for one, other in zip(found, single, strict=True)))
        assert found == pytest.approx(single, abs=1e-5), name


@pytest.mark.slow
def test_a_packed_run_has_the_same_curve_on_two_ranks_with_fsdp_and_checkpointing(
    ddpforge: Callable[..., str], tmp_path: Path
) -> None:
    compare(ddpforge, tmp_path, "qwen3_next", ["fsdp-checkpointed"])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h"])
def test_a_packed_run_has_the_same_curve_on_any_ranks_and_strategy(
    kind: str, ddpforge: Callable[..., str], tmp_path: Path
) -> None:
    compare(ddpforge, tmp_path, kind, RUNS)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h"])
def test_a_packed_run_resumes_with_the_same_curve(kind: str, ddpforge: Callable[..., str], tmp_path: Path) -> None:
    write(tmp_path, kind)
    ddpforge("run", "packed.toml", ranks=2)
    ddpforge("run", "packed.toml", "--set=name=cut", "--set=train.length=3st", ranks=2)
    ddpforge("run", "packed.toml", "--set=name=cut")
    assert curve(tmp_path / "runs/cut") == pytest.approx(curve(tmp_path / "runs/packed"), abs=1e-5)
