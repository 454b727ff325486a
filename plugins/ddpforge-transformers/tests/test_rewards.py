"""Mistakes in rewards, prompts, logs of rollouts and settings are refused by name; a server generates."""

import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from chats import byte_tokenizer
from ddpforge.builtin.models.lora import Adapters
from ddpforge.errors import ForgeError, UsageError
from ddpforge.ranks.collectives import SingleRank
from tiny import TINY

from ddpforge_transformers.models import causal_lm
from ddpforge_transformers.policy_optimization import GRPO, RLOO
from ddpforge_transformers.prompt_data import PromptData
from ddpforge_transformers.rewards import RewardFunction
from ddpforge_transformers.rollout_server import RolloutServer
from ddpforge_transformers.rollouts import Replay, Rollout, rollout_line, write_rollouts
from ddpforge_transformers.sampling import Completion, SamplingSettings

OPTIONS = TINY["llama"] | {"vocab_size": 400, "max_position_embeddings": 64}
USER = {"role": "user", "content": "What does the cat see?"}


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def prompts(tmp_path: Path, words: Path) -> Callable[..., PromptData]:
    def build(*rows: Any, **options: Any) -> PromptData:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return PromptData(**{"path": file, "tokenizer": str(words), "max_length": 48, **options})

    return build


def ones(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0 for _ in completions]


# ---------------------------------------------------------------------------------------------- rewards
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned None, not a list of 2 numbers"),
        (1.0, "returned the float '1.0', not a list of 2 numbers"),
        ("no", "returned the str 'no', not a list of 2 numbers"),
        ({0: 1.0}, "not a list of 2 numbers"),
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        ([1.0, None], "returned None for completion 1, not a finite number"),
        ([float("nan"), 0.0], "returned the float 'nan' for completion 0, not a finite number"),
        ([0.0, float("-inf")], "returned the float '-inf' for completion 1, not a finite number"),
        ([0.0, "1.0"], "returned the str '1.0' for completion 1, not a finite number"),
        ([[1.0], [0.0]], "returned the list '[1.0]' for completion 0, not a finite number"),
        (torch.zeros(2, 1), "for completion 0, not a finite number"),
    ],
)
def test_other_values_than_finite_numbers_are_refused_with_the_place_of_the_function(returned: Any, said: str) -> None:
    def judge(completions: list[str]) -> Any:
        return returned

    with pytest.raises(UsageError) as found:
        RewardFunction(judge)("a prompt", ["one", "two"], [[1], [2]], {})
    assert said in found.value.message
    assert re.search(rf"judge \({re.escape(__file__)}:\d+\)", found.value.message)


def test_an_error_in_a_reward_is_refused_with_its_line() -> None:
    def judge(completions: list[str], **columns: Any) -> list[float]:
        return [1 / len(one) for one in completions]

    with pytest.raises(UsageError, match=r"judge \(.*\) raised ZeroDivisionError: .*test_rewards.py:\d+\)"):
        RewardFunction(judge)("a prompt", ["", "two"], [[1], [2]], {})


def test_rewards_receive_prompts_completions_tokens_and_columns() -> None:
    seen: dict[str, Any] = {}

    def judge(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return torch.tensor([1, 0])

    assert RewardFunction(judge)("a", ["b", "c"], [[1], [2, 3]], {"answer": 7}) == [1.0, 0.0]
    assert seen == {"prompts": ["a", "a"], "completions": ["b", "c"], "completion_ids": [[1], [2, 3]], "answer": [7, 7]}

    def few(answer: Any, completions: Any) -> Any:
        return [float(one == right) for one, right in zip(completions, answer, strict=True)]

    assert RewardFunction(few)("a", ["b", "c"], [[1], [2]], {"answer": "c", "other": 1}) == [0.0, 1.0]


class _AClass:
    pass


async def asynchronous(completions: list[str]) -> list[float]:
    return [1.0]


def positional(completions: list[str], /) -> list[float]:
    return [1.0]


def unrelated(x: int, y: int) -> int:
    return x + y


def needs_answer(completions: list[str], answer: list[str]) -> list[float]:
    return [1.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rewards": [_AClass]}, "rewards: _AClass is a class"),
        ({"rewards": [asynchronous]}, "is asynchronous"),
        ({"rewards": [positional]}, "takes `completions` by position only"),
        ({"rewards": [unrelated]}, "takes no completions"),
        ({"rewards": []}, "rewards: name at least one function"),
        ({"rewards": [ones, ones]}, "two functions have the name ones"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights: 2 weights for 1 rewards: ones"),
        ({"server": "localhost:8000"}, "is not an address of HTTP"),
        ({"server_update": ones}, "server_update is for a server"),
        ({"rollouts": Path("none.jsonl")}, "rollouts: none.jsonl cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as found:
        GRPO(**{"rewards": [ones], **options})
    assert said in str(found.value)


def test_limits_of_a_reward_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward_clip: 1.0 is not below -1.0"):
        RLOO(rewards=[ones], reward_clip=(1.0, -1.0))


@pytest.mark.parametrize(
    ("task", "model", "said"),
    [
        ({"max_new_tokens": 60}, {}, "are 63 tokens, but the model takes 64"),
        ({"rewards": [needs_answer]}, {}, "needs `answer`, which is not a column of the data; its columns are: right"),
        ({"beta": 0.1, "reference": "adapters", "max_new_tokens": 4}, {}, "needs a model with adapters"),
        (
            {"server": "http://127.0.0.1:9", "max_new_tokens": 4},
            {"lora": Adapters(targets=["q_proj"], r=2)},
            "server: weights of adapters",
        ),
    ],
)
def test_what_does_not_fit_the_model_or_the_data_is_refused(
    prompts: Callable[..., PromptData], task: dict[str, Any], model: dict[str, Any], said: str
) -> None:
    data = prompts({"prompt": "The cat sees a bird", "right": 1})
    said = said.replace("63", str(len(data[0][0].tokens) + 60))
    with pytest.raises(ValueError) as found:
        GRPO(**{"rewards": [ones], **task}).check(causal_lm(model_type="llama", options=OPTIONS, **model), data)
    assert said in str(found.value)


def test_another_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match=r'needs the dataset `prompts`, not list: set its use = "prompts"'):
        GRPO(rewards=[ones]).check(causal_lm(model_type="llama", options=OPTIONS), [1, 2])


# ---------------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["{"], "line 1 is not JSON"),
        (["[1]"], "line 1 is a list"),
        ([{"question": "a"}], 'line 1: lacks "prompt"; it has the keys "question"; rename question to prompt'),
        ([{"prompt": 3}], 'line 1: "prompt" is a int: expected a text or a list of messages'),
        ([{"prompt": ""}], "line 1: the prompt has no tokens"),
        ([{"prompt": []}], "line 1"),
        ([{"prompt": [{"role": "usr", "content": "a"}]}], "prompt[0].role"),
        ([{"prompt": [USER, {"role": "assistant", "content": "a"}]}], "ends with a message of the assistant"),
        ([{"prompt": "a", "completions": 1}], '"completions" is an argument of rewards'),
        ([{"prompt": "a", "images": ["a.png"]}], 'line 1 has "images"'),
        ([{"prompt": "a"}, {"prompt": [USER]}], "line 2: its prompt is a list of messages, but that of"),
        ([{"prompt": "a", "right": 1}, {"prompt": "b"}], 'has "right", and it lacks it'),
        ([{"prompt": "a"}, {"prompt": "b", "right": 1}], 'line 2: it has "right", and'),
    ],
)
def test_invalid_prompts_are_errors_with_file_and_line(
    prompts: Callable[..., PromptData], rows: list[Any], said: str
) -> None:
    with pytest.raises(ValueError) as found:
        prompts(*rows)
    assert "prompts.jsonl, line" in str(found.value)
    assert said in str(found.value)


def test_long_prompts_are_left_out_or_refused(
    prompts: Callable[..., PromptData], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a cat"}, {"prompt": "a cat" * 40}]
    assert len(prompts(*rows)) == 1
    assert "1 have more than max_length = 48 tokens; they are left out" in caplog.text
    with pytest.raises(ValueError, match=r"line 2 has \d+ tokens, more than max_length = 48"):
        prompts(*rows, truncation="error")
    with pytest.raises(ValueError, match=r"no prompt is left; 1 have more than max_length"):
        prompts(rows[1])


def test_messages_are_rendered_with_the_prompt_for_an_answer(prompts: Callable[..., PromptData]) -> None:
    data = prompts({"prompt": [USER], "right": "a dog"}, {"prompt": [USER, USER], "right": "no"})
    shown = data.text_parts(data.collate([data[0], data[1]]))
    assert shown[0] == [("given", "<|im_start|>user\nWhat does the cat see?<|im_end|>\n<|im_start|>assistant\n")]
    assert data.ends == [2]
    batch = data.collate([(data[0][0], 5), (data[1][0], 6)])
    assert batch["prompts"] == [
        {"prompt": [USER], "columns": {"right": "a dog"}},
        {"prompt": [USER, USER], "columns": {"right": "no"}},
    ]
    assert batch["prompt_ids"][0][batch["attention_mask"][0] == 1].tolist() == data[0][0].tokens
    assert int(batch["attention_mask"][0, 0]) == 0  # padded on the left


# ---------------------------------------------------------------------------------------------- logs
def test_a_log_is_replayed_and_other_logs_are_refused(tmp_path: Path) -> None:
    one = Rollout(7, [1, 2], [Completion([3], [-0.5]), Completion([4, 5], [-1.0, -2.0])], [[1.0, 0.0]])
    write_rollouts(tmp_path / "log", 3, [rollout_line(one, ["ones"], [0.7, -0.7], step=3)])
    replay = Replay(tmp_path / "log", ["ones"], 2)
    assert replay(7, [1, 2]) == one
    with pytest.raises(UsageError, match="has no rollout of the sample 8"):
        replay(8, [1, 2])
    with pytest.raises(UsageError, match="has another prompt than the data"):
        replay(7, [1])
    for names, each, said in ((["other"], 2, "its rewards are ones"), (["ones"], 3, "it has 2 completions")):
        with pytest.raises(ValueError, match=said):
            Replay(tmp_path / "log", names, each)
    file = tmp_path / "log/step-00000003.jsonl"
    right = file.read_text()
    for text, said in (
        ("{}", "not a rollout of this version"),
        (right[:40], "cannot be replayed"),
        ("", "has no rollouts"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            Replay(file, ["ones"], 2)


# ---------------------------------------------------------------------------------------------- a server
class _Server(BaseHTTPRequestHandler):
    """Server that answers `n` completions: token 70 + number, with a log-probability of -number."""

    requests: ClassVar[list[tuple[str, Any]]] = []
    damage: Callable[[dict[str, Any]], Any] = staticmethod(lambda choice: choice)

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).requests.append((self.path, body))
        choices = [
            {
                "index": n,
                "token_ids": [70 + n],
                "logprobs": {"token_logprobs": [-float(n)], "tokens": [f"token_id:{70 + n}"]},
            }
            for n in reversed(range(body.get("n", 0)))
        ]
        self._answer({"choices": [type(self).damage(choice) for choice in choices], "success": True})

    def _answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    _Server.requests, _Server.damage = [], staticmethod(lambda choice: choice)
    served = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()
    thread.join()


def test_a_server_generates_with_the_weights_of_the_step(
    prompts: Callable[..., PromptData], server: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    data, model = prompts({"prompt": "a cat"}, {"prompt": "a dog"}), causal_lm(model_type="llama", options=OPTIONS)
    task = GRPO(rewards=[ones], num_generations=3, max_new_tokens=4, top_k=9, server=server + "/v1")
    task.check(model, data)
    alone = SingleRank(torch.device("cpu"))
    world: Any = SimpleNamespace(device=torch.device("cpu"), dp_ranks=alone, global_ranks=alone, is_rank_zero=True)
    task.start(model, world)
    task._run.folder = tmp_path
    loss, outputs = task.loss(model, data.collate([(data[0][0], 11), (data[1][0], 12)]))
    loss.backward()
    (path, sent), *requests = _Server.requests
    assert (path, sent) == ("/update_weights_from_disk", {"model_path": str(tmp_path / "policy")})
    sent = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert all(torch.equal(a, b) for a, b in zip(sent.parameters(), model.parameters(), strict=True))
    bodies = {body["seed"]: body for path, body in requests if path == "/v1/completions"}
    assert bodies[11] == {
        **{"model": "tiny", "prompt": data[0][0].tokens, "n": 3, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0},
        **{"top_k": 9, "seed": 11, "stop_token_ids": [2], "logprobs": 1},
        **{"return_token_ids": True, "return_tokens_as_token_ids": True},
        # Absent ones would be those of the model's generation_config.json.
        **{"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    }
    found = task._kept.found[11].completions
    assert [(one.tokens, one.logps) for one in found] == [([70], [0.0]), ([71], [-1.0]), ([72], [-2.0])]
    assert float(task.metrics(outputs, {})["sampling/logp_difference"].sum) > 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda one: {**one, "token_ids": None, "logprobs": {"token_logprobs": [0.0], "tokens": ["a"]}},
            "no token ids",
        ),
        (lambda one: {**one, "logprobs": None}, "returns no log-probability for each token"),
        (lambda one: {**one, "logprobs": {"token_logprobs": [None]}}, "returns no log-probability for each token"),
        (lambda one: {**one, "token_ids": [], "logprobs": {"token_logprobs": []}}, "a completion of 0 tokens"),
    ],
)
def test_answers_without_what_training_needs_are_refused(server: str, damage: Any, said: str) -> None:
    _Server.damage = staticmethod(damage)
    with pytest.raises(UsageError, match=said):
        RolloutServer(server, None).sample([[1, 2]], [3], 2, SamplingSettings(4))


def test_tokens_named_by_their_ids_are_read_and_an_absent_server_is_named(server: str) -> None:
    _Server.damage = staticmethod(lambda one: {name: value for name, value in one.items() if name != "token_ids"})
    (found,) = RolloutServer(server, None).sample([[1, 2]], [3], 2, SamplingSettings(4))
    assert [one.tokens for one in found] == [[70], [71]]
    with pytest.raises(ForgeError, match=r"the server at http://127.0.0.1:9 does not answer /v1/models"):
        RolloutServer("http://127.0.0.1:9", None).sample([[1]], [1], 2, SamplingSettings(4))
    with pytest.raises(ForgeError, match=r"does not answer the request to load weights: .*refused"):
        RolloutServer("http://127.0.0.1:9", None)._tell(Path("policy"))


def test_a_reward_that_exits_is_refused() -> None:
    def judge(completions: list[str], **columns: Any) -> list[float]:
        raise SystemExit(3)

    with pytest.raises(UsageError, match=r"judge \(.*\) raised SystemExit: 3"):
        RewardFunction(judge)("a prompt", ["", "two"], [[1], [2]], {})
