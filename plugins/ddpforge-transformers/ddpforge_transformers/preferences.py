"""Tasks of preference training: `dpo`, `orpo`, `kto` and `reward`. Losses are sums over pairs or answers."""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from ddpforge.builtin.tasks.forms import IGNORED, cross_entropy
from ddpforge.errors import UsageError
from ddpforge.interfaces import AuxiliaryModule, Task, Total, World
from pydantic import Field
from torch import Tensor, nn

from ddpforge_transformers.output_layer import OutputLayer, check_output_layer, token_log_probabilities
from ddpforge_transformers.preference_data import FeedbackData, PreferenceData
from ddpforge_transformers.reference_model import (
    Beginning,
    adapted_layers,
    check_adapters,
    evaluating,
    without_adapters,
)
from ddpforge_transformers.tasks import LossChunk, check_attention, check_fit

__all__ = ["DPO", "KTO", "ORPO", "LogProbabilities", "Reward"]

ddpforge_plugin_api = 3

Batch = Mapping[str, Tensor]
Outputs = Mapping[str, Tensor]

_Beta = Annotated[
    float, Field(gt=0, le=100, description="Strength of the reference: rewards are beta * log(p / p_reference).")
]
_Reference = Annotated[
    Literal["copy", "adapters", "data"] | None,
    Field(
        description='Reference model: "copy" is a frozen copy of the initial model; "adapters" is the model with its '
        'adapters switched off; "data" reads log-probabilities from the dataset (`reference`). Absent: "adapters" if '
        'the model has adapters, else "copy".'
    ),
]


class _Answers(Task):
    """Task whose samples have two answers: a batch is {input_ids, attention_mask, labels}, int64 [B, 2, T]."""

    items = "pairs"
    names = ("chosen", "rejected")
    data: type = PreferenceData

    def __init__(self, loss_chunk: int | None = None) -> None:
        self.loss_in_model = loss_chunk is not None
        self.log_probabilities = LogProbabilities(loss_chunk)

    def start(self, model: nn.Module, world: World) -> None:
        """Raises UsageError for an attention that cannot be trained on the device."""
        check_attention(model, world)

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError if the data has no answers, or if it exceeds the model's vocabulary or length."""
        if not isinstance(data, self.data):
            kind = "feedback" if self.data is FeedbackData else "preferences"
            raise ValueError(f'this task needs the dataset `{kind}`, not {type(data).__name__}: set its use = "{kind}"')
        check_fit(model, data)
        if self.loss_in_model:
            check_output_layer(model, "loss_chunk")


class LogProbabilities:
    """Log-probabilities of answers under a model; with `chunk`, at most `chunk` rows of logits are in memory."""

    def __init__(self, chunk: int | None = None) -> None:
        self._chunk = chunk
        self._outputs: list[OutputLayer] = []  # of the model and of its frozen copy

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the summed log-probabilities of both answers in float32, and their numbers of tokens, both [B, 2]."""
        shape = batch["input_ids"].shape
        flat = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels")}
        targets = flat["labels"][:, 1:]
        if self._chunk is not None:
            found = token_log_probabilities(self._output_of(model), model, flat, chunk=self._chunk)
        else:
            logits = model(input_ids=flat["input_ids"], attention_mask=flat["attention_mask"], use_cache=False).logits[
                :, :-1
            ]
            found = -cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        return found.sum(1).view(shape[:2]), (targets != IGNORED).sum(1).view(shape[:2])

    def _output_of(self, model: nn.Module) -> OutputLayer:
        for output in self._outputs:
            if output.belongs_to(model):
                return output
        self._outputs.append(OutputLayer(model))
        return self._outputs[-1]


class _WithReference(_Answers):
    """Task that compares the model with a reference model."""

    def __init__(
        self, beta: float, reference: Literal["copy", "adapters", "data"] | None, loss_chunk: int | None
    ) -> None:
        super().__init__(loss_chunk)
        self.beta, self.reference = beta, reference
        self._copy: nn.Module | None = None
        self.callback = self._begin = Beginning()

    def auxiliary_modules(self, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        """Returns the frozen copy, if the reference is one."""
        if self._kind(model) != "copy":
            return {}
        self._copy = copy.deepcopy(model)
        return {"reference": AuxiliaryModule(module=self._copy, follows="", momentum=1.0)}

    def check(self, model: nn.Module, data: Any) -> None:
        """Also raises ValueError for a reference that the model or the data does not have."""
        super().check(model, data)
        kind = self._kind(model)
        if (kind == "data") != data.has_reference:
            raise ValueError(
                'reference = "data" needs log-probabilities: set `reference` of the dataset'
                if kind == "data"
                else 'the dataset has log-probabilities of a reference; set task.reference = "data", or remove them'
            )
        self._begin.kind = kind
        if kind == "adapters":
            check_adapters(model)

    def _kind(self, model: nn.Module) -> str:
        return self.reference or ("adapters" if adapted_layers(model) else "copy")

    @abstractmethod
    def sum_of_losses(self, outputs: Outputs) -> Tensor:
        """Returns the summed loss of `outputs`."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the summed loss; and `logps`, `reference` and `tokens` [B, 2], with further columns of the batch."""
        with torch.no_grad():
            reference = self._reference_of(model, batch)
            if self.reference == "data" and model.training and self._begin.is_first():
                self._check_reference(model, batch)
        logps, tokens = self.log_probabilities(model, batch)
        more = {name: batch[name] for name in ("desirable",) if name in batch}
        outputs = {"logps": logps, "reference": reference, "tokens": tokens, **more}
        return self.loss_from_outputs(outputs, batch), outputs

    def loss_from_outputs(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Returns the summed loss of the outputs of `loss`."""
        return self.sum_of_losses(outputs)

    def _reference_of(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._copy is not None:
            return self.log_probabilities(self._copy, batch)[0]
        if self.reference == "data":
            return batch["reference_logps"]
        with without_adapters(model):
            return self.log_probabilities(model, batch)[0]

    def _check_reference(self, model: nn.Module, batch: Batch) -> None:
        """Raises UsageError if the log-probabilities of the file are not those of the model as training starts."""
        with evaluating(model):
            mine, tokens = self.log_probabilities(model, batch)
        given = batch["reference_logps"]
        trained = {one.dtype for one in model.parameters() if one.requires_grad}
        small = torch.is_autocast_enabled(mine.device.type) or trained & {torch.bfloat16, torch.float16}
        # Rounding errors of tokens add up like random numbers.
        allowed = (0.1 if small else 2e-3) * tokens.clamp(min=1).sqrt() + (1e-2 if small else 1e-4) * given.abs()
        wrong = ~((mine - given).abs() <= allowed)
        if wrong.any():
            row, place = wrong.nonzero()[0].tolist()
            raise UsageError(
                f"the reference file is of another model: for an answer of the first batch ({self.names[place]}) it has"
                f" the log-probability {float(given[row, place]):.4f}, but the model that training starts from gives"
                f" {float(mine[row, place]):.4f}",
                hints=[
                    "write the file again with `python -m ddpforge_transformers.reference` and this recipe",
                    'or set task.reference = "copy", and remove data.train.reference',
                ],
                key="data.train.reference",
            )

    def rewards(self, outputs: Outputs) -> Tensor:
        """Returns beta times the log-ratio of both answers to the reference, [B, 2]."""
        return self.beta * (outputs["logps"] - outputs["reference"])

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns for each answer its log-probability, that of the reference, and its reward."""
        _, outputs = self.loss(model, batch)
        found = {"logps": outputs["logps"], "reference_logps": outputs["reference"], "reward": self.rewards(outputs)}
        return {
            f"{name}_{key}": values[:, place] for key, values in found.items() for place, name in enumerate(self.names)
        }


class DPO(_WithReference):
    """Direct preference optimization: raises the probability of chosen answers over rejected ones, next to a reference.

    With the difference d of both log-ratios to the reference, `loss` is one of

    - sigmoid: -log sigmoid(beta d) of Rafailov et al., "Direct Preference Optimization" (2023); with a
      `label_smoothing` of s it is -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d), of Mitchell, "A note on DPO
      with noisy preferences" (2023)
    - hinge: max(0, 1 - beta d) of Zhao et al., "SLiC-HF" (2023)
    - ipo: (d - 1 / (2 beta))² of Azar et al., "A General Theoretical Paradigm …" (2023)

    With `length_normalized`, which is the default of ipo, the log-probabilities of d are divided by the answer's number
    of tokens. A batch is {input_ids, attention_mask, labels} [B, 2, T] of the dataset `preferences`. The loss is a mean
    over pairs. Also reported: `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies` and
    `logps/chosen`, `logps/rejected`.
    """

    predicts_next_token = True

    def __init__(
        self,
        *,
        beta: _Beta = 0.1,
        loss: Annotated[Literal["sigmoid", "hinge", "ipo"], Field(description="Form of the loss.")] = "sigmoid",
        label_smoothing: Annotated[
            float, Field(ge=0, lt=0.5, description="Probability that chosen and rejected are swapped.")
        ] = 0.0,
        length_normalized: Annotated[
            bool | None, Field(description="Divide log-probabilities by numbers of tokens; absent: only for ipo.")
        ] = None,
        reference: _Reference = None,
        loss_chunk: LossChunk = None,
    ) -> None:
        super().__init__(beta, reference, loss_chunk)
        if label_smoothing and loss != "sigmoid":
            raise ValueError(f'label_smoothing is for loss = "sigmoid", not "{loss}"')
        self._form, self._smoothing = loss, label_smoothing
        self._normalized = loss == "ipo" if length_normalized is None else length_normalized

    def sum_of_losses(self, outputs: Outputs) -> Tensor:
        """Returns the summed loss of `logps`, `reference` and `tokens`, [B, 2] each."""
        ratios = outputs["logps"] - outputs["reference"]
        if self._normalized:
            ratios = ratios / outputs["tokens"].clamp(min=1)
        difference = ratios[:, 0] - ratios[:, 1]
        if self._form == "ipo":
            return (difference - 1 / (2 * self.beta)).square().sum()
        if self._form == "hinge":
            return torch.relu(1 - self.beta * difference).sum()
        right, wrong = F.logsigmoid(self.beta * difference), F.logsigmoid(-self.beta * difference)
        return -((1 - self._smoothing) * right + self._smoothing * wrong).sum()

    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Total]:
        """Returns rewards, their margins and accuracies, and log-probabilities, as means over pairs."""
        return _of_pairs(self.rewards(outputs), outputs["logps"])


class ORPO(_Answers):
    """Odds ratio preference optimization, without a reference: the loss of chosen answers, and their odds.

    The loss of a pair is the mean cross-entropy of the chosen answer's tokens, minus `beta` times log sigmoid of the
    log odds ratio. The odds are p / (1 - p) of the geometric mean p of an answer's token probabilities. See Hong et
    al., "ORPO" (2024). Batches and metrics are those of `dpo`; the rewards are beta * log p.
    """

    predicts_next_token = True

    def __init__(
        self,
        *,
        beta: Annotated[float, Field(gt=0, le=100, description="Weight of the odds.")] = 0.1,
        loss_chunk: LossChunk = None,
    ) -> None:
        super().__init__(loss_chunk)
        self.beta = beta

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the summed loss; and `logps` and `tokens` [B, 2]."""
        logps, tokens = self.log_probabilities(model, batch)
        outputs = {"logps": logps, "tokens": tokens}
        return self.loss_from_outputs(outputs, batch), outputs

    def loss_from_outputs(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Returns the summed loss of the outputs of `loss`."""
        mean = _per_token(outputs)
        # log(p / (1 - p)); log(1 - exp(x)) loses all digits near x = 0 unless it is computed by expm1.
        odds = mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7)))
        return (-mean[:, 0] - self.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])).sum()

    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Total]:
        """Returns rewards, their margins and accuracies, and log-probabilities, as means over pairs."""
        return _of_pairs(self.beta * _per_token(outputs), outputs["logps"])

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the log-probability of each answer."""
        logps, _ = self.log_probabilities(model, batch)
        return {"chosen_logps": logps[:, 0], "rejected_logps": logps[:, 1]}


class KTO(_WithReference):
    """Kahneman-Tversky optimization, from single answers that are desirable or not.

    The loss of a desirable answer is w (1 - sigmoid(beta r - z)), of another one w (1 - sigmoid(z - beta r)), with its
    log-ratio r to the reference. z ≥ 0 is beta times the mean log-ratio of answers that do not belong to their prompts,
    over the step's samples on all ranks, without a gradient. See Ethayarajh et al., "KTO" (2024). A batch is that of
    the dataset `feedback`. All samples of a step on a rank are in one forward pass, because z is a mean over the step.
    """

    predicts_next_token = True
    items = "answers"
    names = ("answer", "unrelated")
    data = FeedbackData
    whole_batch = True

    def __init__(
        self,
        *,
        beta: _Beta = 0.1,
        desirable_weight: Annotated[float, Field(ge=0, le=1000, description="Weight of desirable answers.")] = 1.0,
        undesirable_weight: Annotated[float, Field(ge=0, le=1000, description="Weight of the others.")] = 1.0,
        reference: _Reference = None,
        loss_chunk: LossChunk = None,
    ) -> None:
        super().__init__(beta, reference, loss_chunk)
        self._weights = desirable_weight, undesirable_weight

    def start(self, model: nn.Module, world: World) -> None:
        """Stores the data-parallel process group."""
        super().start(model, world)
        self._ranks = world.dp_ranks

    def sum_of_losses(self, outputs: Outputs) -> Tensor:
        """Returns the summed loss of this rank's answers. Collective."""
        rewards = self.rewards(outputs)
        every, _ = self._ranks.all_gather(rewards[:, 1].detach())
        distance = every.mean().clamp(min=0)
        desirable = outputs["desirable"]
        sign = desirable.float() * 2 - 1
        weight = torch.where(desirable, *self._weights)
        return (weight * (1 - torch.sigmoid(sign * (rewards[:, 0] - distance)))).sum()

    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Total]:
        """Returns the mean rewards of desirable and other answers, and beta times the log-ratio of unrelated ones."""
        rewards, desirable = self.rewards(outputs).detach(), outputs["desirable"]
        logps = outputs["logps"].detach()[:, 0]
        found = {"kl": Total(rewards[:, 1].sum(), len(rewards))}
        for name, chosen in (("chosen", desirable), ("rejected", ~desirable)):
            found[f"rewards/{name}"] = Total((rewards[:, 0] * chosen).sum(), chosen.sum())
            found[f"logps/{name}"] = Total((logps * chosen).sum(), chosen.sum())
        return found


class Reward(_Answers):
    """Reward model of Bradley and Terry: the loss of a pair is -log sigmoid(r(chosen) - r(rejected) - margin).

    The model is a `sequence_classification` with `classes = 1`. A batch is that of the dataset `preferences`. With
    `center`, center * (r(chosen) + r(rejected))² is added, which keeps rewards around 0 (Eisenstein et al., "Helping or
    Herding?", 2023).
    """

    def __init__(
        self,
        *,
        center: Annotated[float, Field(ge=0, le=1000, description="Weight of the squared sum of rewards.")] = 0.0,
    ) -> None:
        super().__init__()
        self._center = center

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the summed loss; and the `rewards` [B, 2]."""
        shape = batch["input_ids"].shape
        flat = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
        rewards = model(**flat).logits.float().view(shape[:2])
        outputs = {"rewards": rewards, **({"margin": batch["margin"]} if "margin" in batch else {})}
        return self.loss_from_outputs(outputs, batch), outputs

    def loss_from_outputs(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Returns the summed loss of the outputs of `loss`."""
        rewards = outputs["rewards"]
        difference = rewards[:, 0] - rewards[:, 1] - outputs.get("margin", 0.0)
        return -F.logsigmoid(difference).sum() + self._center * rewards.sum(1).square().sum()

    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Total]:
        """Returns rewards, their margins and accuracies, as means over pairs."""
        return _of_pairs(outputs["rewards"])

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the reward of each answer."""
        _, outputs = self.loss(model, batch)
        return {f"{name}_reward": outputs["rewards"][:, place] for place, name in enumerate(self.names)}

    def check(self, model: nn.Module, data: Any) -> None:
        """Also raises ValueError if the model does not return one number, or if its padding token is not the data's."""
        config: Any = getattr(model, "config", None)
        if getattr(config, "num_labels", None) != 1 or not hasattr(model, "outputs"):
            raise ValueError('a reward is one number: set model.use = "sequence_classification", classes = 1')
        super().check(model, data)
        if config.get_text_config().pad_token_id != data.pad_token:
            raise ValueError(
                "the model finds the last token of an answer by the padding token: set model.options.pad_token_id ="
                f" {data.pad_token}"
            )


# ---------------------------------------------------------------------------------------------- shared parts
def _per_token(outputs: Outputs) -> Tensor:
    return outputs["logps"] / outputs["tokens"].clamp(min=1)


def _of_pairs(rewards: Tensor, logps: Tensor | None = None) -> Mapping[str, Total]:
    """Returns the metrics of pairs from rewards and log-probabilities, [B, 2] each."""
    rewards, count = rewards.detach(), len(rewards)
    margins = rewards[:, 0] - rewards[:, 1]
    found = {
        "rewards/chosen": Total(rewards[:, 0].sum(), count),
        "rewards/rejected": Total(rewards[:, 1].sum(), count),
        "rewards/margins": Total(margins.sum(), count),
        "rewards/accuracies": Total((margins > 0).sum(), count),
    }
    if logps is not None:
        found |= {
            "logps/chosen": Total(logps.detach()[:, 0].sum(), count),
            "logps/rejected": Total(logps.detach()[:, 1].sum(), count),
        }
    return found
