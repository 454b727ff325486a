"""Base of tasks that train by rewards: the policy answers prompts, functions reward the answers, a log keeps both."""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from ddpforge.errors import UsageError
from ddpforge.features.memory_tracker import is_fake
from ddpforge.interfaces import AuxiliaryModule, RunContext, StepInfo, Task, Total, World
from torch import Tensor, nn

from ddpforge_transformers.prompt_data import PromptData
from ddpforge_transformers.reference_model import (
    Beginning,
    adapted_layers,
    check_adapters,
    evaluating,
    without_adapters,
)
from ddpforge_transformers.rewards import Rewards
from ddpforge_transformers.rollout_server import RolloutServer
from ddpforge_transformers.rollouts import Replay, Rollout, rollout_line, write_rollouts
from ddpforge_transformers.sampling import Completion, Policy, SamplingSettings, sample
from ddpforge_transformers.tasks import check_attention, check_fit

__all__ = ["Batch", "PolicyTask", "Scored", "Settings"]

Batch = Mapping[str, Any]
Outputs = Mapping[str, Tensor]


class Scored(NamedTuple):
    """Tensors of a micro-batch of B prompts with G completions each, N = B * G rows."""

    logps: Tensor  # float32 [N, T - 1], 0 for other tokens than those of completions
    reference: Tensor | None  # as logps
    sampled: Tensor  # float32 [N, T - 1]: log-probabilities when they were sampled
    mask: Tensor  # float32 [N, T - 1]: 1 for tokens of completions
    rewards: Tensor  # float32 [B, G], the weighted sums


class Settings(NamedTuple):
    """Options that all these tasks have."""

    rewards: Rewards
    num_generations: int
    sampling: SamplingSettings
    beta: float
    reference: Literal["copy", "adapters"] | None
    rollouts: Path | None
    server: RolloutServer | None
    keep_rollouts: bool


class _OfStep:
    """State of a task within a step, which no checkpoint needs: a resume begins with a new step."""

    __slots__ = ("evaluated", "found", "lines", "sampler", "step")

    def __init__(self) -> None:
        self.step = -1
        self.found: dict[int, Rollout] = {}  # by the seeds of samples
        self.evaluated: dict[int, Rollout] = {}
        self.lines: dict[int, str] = {}  # for the log
        self.sampler: tuple[int, nn.Module] | None = None  # the step, and the module that samples in it


class PolicyTask(Task):
    """Task whose samples are prompts: it generates a group of completions for each, rewards them, and learns.

    A group is one sample, and all statistics are those of a group: a loss does not depend on other samples of a batch.
    """

    predicts_next_token = True

    def __init__(self, of: Settings) -> None:
        self.rewards, self.num_generations, self.sampling = of.rewards, of.num_generations, of.sampling
        self.beta, self.reference, self._server = of.beta, of.reference, of.server
        if of.rollouts is not None and of.server is not None:
            raise ValueError("rollouts: a replay generates nothing; remove server or rollouts")
        self._replay = None if of.rollouts is None else Replay(of.rollouts, of.rewards.names, of.num_generations)
        self._policy, self._kept = Policy(), _OfStep()
        self._model: nn.Module | None = None
        self._copy: nn.Module | None = None
        self._world: World | None = None
        self._data: PromptData | None = None
        self.callback = self._run = _Run(self, of.keep_rollouts)

    # ------------------------------------------------------------------------------------------ before training
    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError for another dataset than `prompts`, and for prompts that do not fit the model."""
        if not isinstance(data, PromptData):
            raise ValueError(
                f'this task needs the dataset `prompts`, not {type(data).__name__}: set its use = "prompts"'
            )
        check_fit(model, data)
        for one in self.rewards.functions:
            one.check(data.columns)
        config: Any = model.config
        most = getattr(config, "max_position_embeddings", None)
        longest = int(data.lengths().max()) + self.sampling.max_tokens
        if most is not None and longest > most:
            raise ValueError(
                f"the longest prompt and max_new_tokens = {self.sampling.max_tokens} are {longest} tokens, but the"
                f" model takes {most}; lower task.max_new_tokens or max_length of the data"
            )
        self._data = data
        if self._kind(model) == "adapters" and self.beta:
            check_adapters(model)
            self._run.kind = "adapters"
        if self._server is not None and adapted_layers(model):
            raise ValueError("server: weights of adapters are not sent to a server; remove server or model.lora")
        if self._replay is None:
            self._policy.prepare(model)

    def start(self, model: nn.Module, world: World) -> None:
        """Keeps the model, with which `count` generates; raises UsageError for an attention that cannot be trained."""
        check_attention(model, world)
        self._model, self._world = model, world

    def auxiliary_modules(self, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        """Returns the frozen copy, if the KL needs one."""
        if not self.beta or self._kind(model) != "copy":
            return {}
        self._copy = copy.deepcopy(model)
        return {"reference": AuxiliaryModule(module=self._copy, follows="", momentum=1.0)}

    def _kind(self, model: nn.Module) -> str:
        return self.reference or ("adapters" if adapted_layers(model) else "copy")

    # ------------------------------------------------------------------------------------------ rollouts
    def _rollouts(self, model: nn.Module, batch: Batch, *, again: bool = False) -> list[Rollout]:
        """Returns the rollouts of a batch: the ones of this step, or new ones."""
        kept, seeds = self._kept, batch["seed"].tolist()
        known = kept.evaluated if self.evaluates else kept.found
        if not self.evaluates and kept.step != self.step:
            kept.step = self.step
            known.clear()
            kept.lines.clear()
        if again or any(seed not in known for seed in seeds):
            if self.evaluates and len(known) > 4096:
                known.clear()
            known |= {one.seed: one for one in self._new(model, batch, seeds)}
        return [known[seed] for seed in seeds]

    def _new(self, model: nn.Module, batch: Batch, seeds: list[int]) -> list[Rollout]:
        if is_fake(batch["prompt_ids"]):  # an estimate of memory: the longest rollouts
            tokens = [0] * self.sampling.max_tokens
            each = [Completion(tokens, [0.0] * len(tokens)) for _ in range(self.num_generations)]
            rewards = [[0.0] * self.num_generations for _ in self.rewards.names]
            return [Rollout(seed, [0] * batch["prompt_ids"].shape[1], each, rewards) for seed in seeds]
        rows = zip(batch["prompt_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
        prompts = [[token for token, kept in zip(*row, strict=True) if kept] for row in rows]
        if self._replay is not None:
            if self.evaluates:
                raise UsageError(
                    "a log of rollouts has none of an evaluation",
                    hints=["remove [data.eval] and train.eval_every for a replay"],
                    key="task.rollouts",
                )
            return [self._replay(seed, prompt) for seed, prompt in zip(seeds, prompts, strict=True)]
        sampler = self._sampler(model)
        if self._server is not None:
            found = self._server.sample(prompts, seeds, self.num_generations, self._how)
        else:
            place = next(sampler.parameters(), torch.zeros(0)).device
            ids, mask = (batch[name].to(place) for name in ("prompt_ids", "attention_mask"))
            pad = 0 if self._data is None else self._data.pad_token
            with evaluating(sampler):
                found = sample(sampler, ids, mask, seeds, self.num_generations, self._how, pad)
        return [
            Rollout(seed, prompt, each, self._rewarded(each, **row))
            for seed, prompt, each, row in zip(seeds, prompts, found, batch["prompts"], strict=True)
        ]

    @property
    def _how(self) -> SamplingSettings:
        ends = () if self._data is None else tuple(self._data.ends)
        return SamplingSettings(**{**vars(self.sampling), "ends": ends})

    def _sampler(self, model: nn.Module) -> nn.Module:
        """Returns the module that samples; collective, once per step, if weights are sharded or sent to a server."""
        model = model if self._model is None else self._model
        if not self.evaluates and self._kept.sampler is not None and self._kept.sampler[0] == self.step:
            return self._kept.sampler[1]
        if self._server is None:
            self._kept.sampler = (self.step, self._policy.of(model))
        else:
            if self._run.folder is not None and self._world is not None:  # not in the checks before a run
                self._server.push(model, self._policy.form, self._run.folder / "policy", self._world)
            self._kept.sampler = (self.step, model)
        found = self._kept.sampler[1]
        if self.evaluates:
            self._kept.sampler = None
        return found

    def _rewarded(self, found: Sequence[Any], prompt: Any, columns: Mapping[str, Any]) -> list[list[float]]:
        """Returns the rewards of each function for the completions of one prompt."""
        ids = [one.tokens for one in found]
        texts: list[Any] = self._texts(ids)
        if isinstance(prompt, list):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        return self.rewards(prompt, texts, ids, columns)

    def _texts(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return ["" if self._data is None else self._data.decode(one) for one in ids]

    # ------------------------------------------------------------------------------------------ the loss
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the summed loss, and the outputs [B] or [B, …] that `metrics` reads."""
        found = self._rollouts(model, batch, again=self.evaluates)
        inputs, mask, sampled = self._inputs(found, batch["seed"].device)
        with torch.no_grad():
            reference = self._reference_of(model, inputs, mask) if self.beta else None
        logps, entropy = self._log_probabilities(model, inputs, mask)
        rewards = [self.rewards.total(one.rewards) for one in found]
        scored = Scored(logps, reference, sampled, mask, torch.tensor(rewards, device=mask.device))
        losses, advantages, kl = self.losses_of(scored)
        if not self.evaluates and self._run.keeps:
            self._note(found, advantages.tolist(), batch)

        def groups(values: Tensor) -> Tensor:  # [N, T - 1] to sums of groups [B]
            return (values.detach() * mask).view(len(found), -1).sum(1)

        ends = set(self._how.ends)
        outputs = {
            "losses": losses,
            "rewards": scored.rewards,
            "each": torch.tensor([one.rewards for one in found], device=mask.device),
            "lengths": mask.sum(1).view(len(found), -1),
            "clipped": torch.tensor(
                [[float(each.tokens[-1] not in ends) for each in one.completions] for one in found], device=mask.device
            ),
            "entropy": groups(entropy),
            "difference": groups((logps - sampled).abs()),
            **({} if kl is None else {"kl": groups(kl)}),
        }
        return losses.sum(), outputs

    @abstractmethod
    def losses_of(self, scored: Scored) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the losses of groups [B], the advantages [B, G], and the KL of each token [N, T - 1]."""

    def loss_from_outputs(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Returns the summed loss of the outputs of `loss`."""
        return outputs["losses"].sum()

    def _inputs(self, found: Sequence[Rollout], device: torch.device) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Returns prompts with completions [N, T], padded on the right; the mask; and sampled log-probabilities."""
        rows = [(one.prompt_ids, each) for one in found for each in one.completions]
        longest = max(len(prompt) + len(each.tokens) for prompt, each in rows)
        pad = 0 if self._data is None else self._data.pad_token

        def filled(values: Sequence[Sequence[float]], free: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([[*one, *[free] * (longest - len(one))] for one in values], dtype=dtype, device=device)

        inputs = {
            "input_ids": filled([[*prompt, *each.tokens] for prompt, each in rows], pad, torch.int64),
            "attention_mask": filled([[1] * len(prompt + each.tokens) for prompt, each in rows], 0, torch.int64),
        }
        mask = filled([[0] * len(prompt) + [1] * len(each.tokens) for prompt, each in rows], 0, torch.float32)
        sampled = filled([[0] * len(prompt) + each.logps for prompt, each in rows], 0, torch.float32)
        return inputs, mask[:, 1:], sampled[:, 1:]

    def _log_probabilities(self, model: Any, inputs: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of completions, with gradients, and entropies without, float32 [N, T - 1]."""
        logits = model(**inputs, use_cache=False).logits[:, :-1].float() / self.sampling.temperature
        logs = logits.log_softmax(-1)
        found = logs.gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)
        with torch.no_grad():
            entropy = -(logs.exp() * logs).sum(-1)
        return found * mask, entropy * mask

    def _reference_of(self, model: nn.Module, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        if self._copy is not None:
            return self._log_probabilities(self._copy, inputs, mask)[0]
        with without_adapters(model):
            return self._log_probabilities(model, inputs, mask)[0]

    def _note(self, found: Sequence[Rollout], advantages: Sequence[Sequence[float]], batch: Batch) -> None:
        """Keeps the lines of the log until the end of the step."""
        for one, values, row in zip(found, advantages, batch["prompts"], strict=True):
            texts = self._texts([each.tokens for each in one.completions])
            more = {"step": self.step, "prompt": row["prompt"], "completions": texts}
            self._kept.lines[one.seed] = rollout_line(one, self.rewards.names, values, **more)

    def take_lines(self) -> list[str]:
        """Returns the lines of this rank's rollouts of the step."""
        lines, self._kept.lines = [*self._kept.lines.values()], {}
        return lines

    # ------------------------------------------------------------------------------------------ metrics
    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Total]:
        """Returns rewards, lengths and the numbers of tokens, as means over completions, tokens or groups."""
        rewards, lengths = outputs["rewards"], outputs["lengths"]
        tokens, deviation = lengths.sum(), rewards.std(1)
        found = {
            "reward": Total(rewards.sum(), rewards.numel()),
            "reward_std": Total(deviation.sum(), len(rewards)),
            "frac_reward_zero_std": Total((deviation <= 1e-8).sum(), len(rewards)),
            "completions/mean_length": Total(tokens, lengths.numel()),
            "completions/clipped_ratio": Total(outputs["clipped"].sum(), lengths.numel()),
            "entropy": Total(outputs["entropy"].sum(), tokens),
            "sampling/logp_difference": Total(outputs["difference"].sum(), tokens),
        }
        if "kl" in outputs:
            found["kl"] = Total(outputs["kl"].sum(), tokens)
        for place, name in enumerate(self.rewards.names):
            each = outputs["each"][:, place]
            found[f"rewards/{name}/mean"] = Total(each.sum(), each.numel())
            found[f"rewards/{name}/std"] = Total(each.std(1).sum(), len(each))
        return found

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Returns for each prompt its completions, and their rewards."""
        self.loss(model, batch)
        found = self._rollouts(model, batch)
        return {
            "completions": [self._texts([each.tokens for each in one.completions]) for one in found],
            "rewards": [self.rewards.total(one.rewards) for one in found],
        }


class _Run(Beginning):
    """Writes the rollouts of each step to the run's folder, and checks adapters as they are before training."""

    def __init__(self, task: PolicyTask, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.folder: Path | None = None
        self._task = task
        self._context: RunContext | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Run":
        """Returns a callback without a run: copies of a task, which check it, write nothing."""
        return _Run(copy.deepcopy(self._task, memo), False)

    def on_start(self, run: RunContext) -> None:
        """Keeps the run's folder; raises UsageError as `Beginning` does."""
        super().on_start(run)
        self.folder, self._context = run.folder, run

    def forward(self) -> Any:
        """Returns the context of a forward pass in training: autocast."""
        return nullcontext() if self._context is None else self._context.forward()

    def on_step(self, info: StepInfo) -> None:
        """Writes the rollouts of the step. Collective."""
        if not self.keeps or self._context is None:
            return
        world = self._context.world
        lines = world.dp_ranks.all_gather_object(self._task.take_lines())
        if world.is_rank_zero:
            assert self.folder is not None
            write_rollouts(self.folder / "rollouts", info.step, [line for of_rank in lines for line in of_rank])
