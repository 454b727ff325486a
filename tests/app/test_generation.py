"""Text generation: sampling of tokens, and generation with models of trained runs."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.forked import in_ranks, refused
from torch import Tensor, nn

import ddpforge
from ddpforge.app.generation import Sampling, answers, check_language, generate
from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.moe import MoEGPT
from ddpforge.builtin.tasks.classification import Classification
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.cli import main
from ddpforge.errors import ForgeError, PluginError, UsageError
from ddpforge.interfaces import AttentionContext

TEXT = "abcdefghij" * 300
RECIPE = """\
recipe = 2
name = "{name}"
model = {{ use = "gpt", vocab_size = 256, block_size = 16, layers = 1, heads = 2, width = 32 }}
data.train = {{ use = "text", split = "train", path = "text.txt", block_size = 16, level = "{level}" }}
data.eval = {{ use = "text", split = "eval", path = "text.txt", block_size = 16, level = "{level}" }}
task = {{ use = "language_modeling" }}
optimizer = {{ use = "adamw", lr = 1e-2 }}
strategy = {{ use = "single" }}
train = {{ length = "40st", global_batch = 16, device = "cpu", eval_every = "40st" }}
checkpoint = {{ every = "40st" }}
"""


class Letters:
    """Data with the tokens 0 to 9."""

    def encode(self, text: str) -> list[int]:
        return [int(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(str, tokens))


class Counts(nn.Module):
    """Model with ten tokens: token n + 1 follows n with probability 3/4, and n + 2 with 1/4."""

    block_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens.shape[1])
        logits = torch.full((*tokens.shape, 10), -30.0)
        logits.scatter_(2, (tokens[..., None] + 1) % 10, 1.0986123)
        return logits.scatter_(2, (tokens[..., None] + 2) % 10, 0.0)


def drawn(*prompts: str, model: Any = None, **how: Any) -> list[str]:
    return list(generate(model or Counts(), Letters(), prompts, Sampling(**how)))


def test_sampling_probabilities() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for how, expected in (
        ({}, [0.5, 0.25, 0.125, 0.125]),
        ({"temperature": 0.5}, [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.5}, [0.5, 0, 0, 0]),  # the first token alone reaches top_p
        ({"top_p": 0.51}, [0.5, 0.25, 0, 0]),
    ):
        assert Sampling(**how).probabilities(logits).tolist() == pytest.approx(expected), how


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"tokens": 0}, "tokens = 0: it must be 1 or more"),
        ({"temperature": 0.0}, "it must be more than 0 | to always take the most probable token, use greedy"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"greedy": True, "top_k": 3}, "greedy takes the most probable token; top_k is only"),
    ],
)
def test_invalid_sampling_options_are_rejected(how: Any, said: str) -> None:
    assert said in refused(UsageError, lambda: Sampling(**how))


def test_greedy_takes_the_most_probable_token_and_a_truncated_context_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Counts()
    logging.getLogger("ddpforge").propagate = True
    assert drawn("78", "123456", model=model, tokens=3, greedy=True) == ["901", "789"]
    assert model.seen == [2, 3, 4, 4, 4, 4]
    assert caplog.messages == [
        "the model uses only the last 4 tokens at a time, of 5",
        "the model uses only the last 4 tokens at a time, of 9",
    ]


def test_model_with_its_own_generate_and_config_is_not_a_model_of_transformers() -> None:
    """Regression: nanoGPT has both, and was called as `generate(input_ids=…, attention_mask=…)`."""

    class Own(Counts):
        config = ("layers", 1)

        def generate(self, idx: torch.Tensor, max_new_tokens: int) -> None:
            raise AssertionError

    assert drawn("1", model=Own(), tokens=3, greedy=True) == drawn("1", tokens=3, greedy=True) == ["234"]


def test_text_of_a_seed_does_not_depend_on_other_prompts() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (first,) = drawn("0", tokens=400)
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn("0", "5", tokens=400)[0] == first
    assert drawn("0", tokens=400, seed=1) != [first]
    steps = [(int(b) - int(a)) % 10 for a, b in zip("0" + first, first, strict=False)]
    assert set(steps) == {1, 2}
    assert steps.count(2) == pytest.approx(100, abs=30)


def test_mixture_of_experts_generates_text() -> None:
    torch.manual_seed(0)
    model = MoEGPT(vocab_size=10, block_size=8, layers=1, heads=2, width=8, experts=4).eval()
    (text,) = drawn("12", model=model, tokens=3, greedy=True)
    assert int(text[0]) == model(torch.tensor([[1, 2]])).logits[0, -1].argmax()


def seen(model: nn.Module) -> list[int]:
    """Returns a list that receives the number of tokens of each later call of the model."""
    found: list[int] = []
    model.register_forward_pre_hook(lambda module, args: found.append(args[0].shape[1]))
    return found


@pytest.mark.parametrize("how", [{"greedy": True}, {}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8, "seed": 3}])
@pytest.mark.parametrize("form", [{"layers": 1}, {"layers": 3, "tie_embeddings": False, "bias": False}])
def test_cached_generation_computes_each_token_once_with_the_same_text(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], form: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=10, block_size=48, heads=2, width=32, **form).eval()
    for parameter in model.parameters():  # with the initial weights, all tokens have nearly the same probability
        parameter.data *= 5
    calls = seen(model)
    texts = drawn("1234", "5", model=model, tokens=60, **how)
    assert calls == [4, *[1] * 44, *[48] * 15, 1, *[1] * 47, *[48] * 12]  # beyond the block size all positions shift
    monkeypatch.setattr("ddpforge.app.generation._Cache.of", lambda model: None)
    calls.clear()
    assert drawn("1234", "5", model=model, tokens=60, **how) == texts
    assert calls[:60] == [*range(4, 49), *[48] * 15]
    assert len(set(texts[0])) > 1


@pytest.mark.parametrize(
    "model",
    [
        GPT(vocab_size=10, block_size=8, layers=2, heads=2, width=8, causal=False),
        MoEGPT(vocab_size=10, block_size=8, layers=1, heads=2, width=8, experts=4),
    ],
    ids=["sees later tokens", "tokens compete for experts"],
)
def test_model_whose_earlier_tokens_depend_on_later_ones_is_not_cached(model: nn.Module) -> None:
    calls = seen(model.eval())
    (text,) = drawn("12", model=model, tokens=4, greedy=True)
    assert calls == [2, 3, 4, 5]
    logits = model(torch.tensor([[1, 2, *map(int, text[:3])]]))
    assert int(text[3]) == getattr(logits, "logits", logits)[0, -1].argmax()
    assert type(getattr(model, "context", None)) is AttentionContext


def test_other_tasks_and_data_without_encode_are_rejected() -> None:
    assert "does not predict the next token" in refused(UsageError, lambda: check_language(Classification(), Letters()))
    assert "encode(text)" in refused(PluginError, lambda: check_language(LanguageModeling(), [1]))
    assert "has no tokens" in refused(UsageError, lambda: drawn("1", ""))


# ---------------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    for level in ("bytes", "characters"):
        (folder / f"{level}.toml").write_text(RECIPE.format(name=level, level=level))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        in_ranks(1, lambda _: [ddpforge.run(f"{level}.toml").exit_code for level in ("bytes", "characters")])
    return folder


def test_trained_model_continues_a_prompt_with_its_tokenizer(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    for level in ("bytes", "characters"):
        run = ddpforge.load(f"runs/{level}")
        assert run.generate("abcd", "ghij", tokens=24, greedy=True) == [(TEXT * 2)[4:28], TEXT[:24]]
    said = refused(ForgeError, lambda: ddpforge.load("runs/characters").generate("abz"))
    assert said.startswith("'z' is not among the 10 characters of the training text: 'abcdefghij'")


def test_generate_command(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    Path("prompts.txt").write_text("abcd\n\nefgh\n")

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["generate", "bytes", *arguments, "-n", "6"])
        assert done.exception is None, done.exception
        return done.stdout

    assert said("--prompt", "bcde", "--greedy") == "bcdefghija\n"
    assert said("--prompts", "prompts.txt", "--greedy") == "abcdefghij\n---\nefghijabcd\n"
    rows = [json.loads(line) for line in said("--prompts", "prompts.txt", "--greedy", "--json").splitlines()]
    assert rows == [{"prompt": "abcd", "text": "efghij"}, {"prompt": "efgh", "text": "ijabcd"}]
    assert said("-p", "abc", "--temperature", "9", "--seed", "3") == said(
        "-p", "abc", "--temperature", "9", "--seed", "3"
    )

    for arguments in ([], ["--prompt", "a", "--prompts", "prompts.txt"]):
        assert (
            "expected exactly one of --prompt and --prompts"
            in CliRunner().invoke(main, ["generate", "bytes", *arguments]).output
        )


class Chats(Letters):
    """Letters with chats: the role of a message is one token, an answer begins with 0 and ends at 7."""

    end_tokens = (7,)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if messages[-1]["content"] == "9":
            raise ValueError("the chat template refuses the messages: no nines")
        roles = {"system": "8", "user": "9", "assistant": "0"}
        return self.encode("".join(roles[one["role"]] + one["content"] for one in messages) + "0")


def test_answers_end_at_an_end_token_and_are_part_of_the_next_prompt() -> None:
    model = Counts()
    asked: list[str] = []

    class Noting(Chats):
        def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
            asked.append(",".join(f"{one['role']}:{one['content']}" for one in messages))
            return super().encode_chat(messages)

    how = Sampling(tokens=20, greedy=True)
    assert list(answers(model, Noting(), ["12", "3"], how, system="5")) == ["1234567", "1234567"]
    assert asked == ["system:5,user:12", "system:5,user:12,assistant:1234567,user:3"]
    drawn = [list(answers(model, Chats(), ["1"], Sampling(tokens=20, seed=seed))) for seed in (0, 0, 1, 2)]
    assert drawn[0] == drawn[1]
    assert all(one[0].endswith("7") or len(one[0]) == 20 for one in drawn)


def test_chats_without_a_template_and_refused_messages_are_named() -> None:
    with pytest.raises(UsageError, match="Letters has no chat template"):
        list(answers(Counts(), Letters(), ["1"], Sampling()))
    with pytest.raises(UsageError, match="no nines"):
        list(answers(Counts(), Chats(), ["9"], Sampling()))
