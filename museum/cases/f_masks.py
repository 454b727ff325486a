"""Masks, packing and padding of language models, and their denominators."""

from collections.abc import Sequence
from typing import Any

from museum.case import Case
from museum.language import CHATS, LLAMA, Language

THEME = "Language models: masks, packing, padding"


def language(name: str, wrong: str, references: Sequence[str], trained: Language, **more: Any) -> Case:
    """Returns a case of a fine-tuning by ddpforge, TRL and HF Trainer."""
    trials = {"forge": trained.by_forge, "trl_sft": trained.by_trl, "hf": trained.by_hf}
    given: dict[str, Any] = {"trials": trials, "ranks": trained.ranks, "right": trained.oracle, "seconds": 150, **more}
    only = given.pop("only", None)
    if only:
        given["trials"] = {trainer: given["trials"][trainer] for trainer in only}
    return Case(name=name, wrong=wrong, references=references, **given)


MIXTRAL = {
    **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 1.0
}  # fmt: skip
ROUTER = {"model": {"model_type": "mixtral", "options": MIXTRAL}}
LFM2 = {**LLAMA, "layer_types": ["conv", "full_attention"]}

CASES = [
    language(
        "chats-with-accumulation",
        "The mean over learnt tokens is taken in each micro-batch.",
        ["transformers#34191", "transformers#37474", "TRL#6478", "unsloth#3527"],
        Language(micro=2, accumulate=4),
    ),
    language(
        "chats-on-ranks",
        "The mean over learnt tokens is taken on each rank.",
        ["transformers#41530", "TRL#6478", "Megatron-LM#7452"],
        Language(micro=4, ranks=2),
    ),
    language(
        "chats-evaluated-in-batches",
        "The evaluation's loss is a mean of means over batches.",
        ["torchtitan#4167", "TRL#6380"],
        Language(micro=2, accumulate=4, steps=1, evaluation=True),
        tolerance=1e-4,
    ),
    language(
        "chats-packed",
        "Packed chats see each other, or an end token learns the begin of the next chat.",
        ["axolotl#3453", "torchtitan#4075", "TRL#6351"],
        Language(micro=4, steps=1, packed=128, chats=CHATS[:12]),
        only=["forge", "trl_sft"],
    ),
    language(
        "chats-packed-in-a-hybrid",
        "In a hybrid model the state of convolution or recurrence runs on over packed chats.",
        ["torchtitan#3984", "fla#1184", "AutoModel#2147"],
        Language(micro=4, steps=1, packed=128, chats=CHATS[:12], model={"model_type": "lfm2", "options": LFM2}),
        only=["forge", "trl_sft"],
    ),
    language(
        "chats-with-checkpointing",
        "With activation checkpointing the attention mask is dropped, so that padding is seen.",
        ["lightly#2049"],
        Language(
            trl={"gradient_checkpointing": True},
            hf={"gradient_checkpointing": True},
            train={"activation_checkpointing": True},
        ),
    ),
    language(
        "end-token-is-padding",
        "The padding token is the end token: the end is masked, and the model never learns to stop.",
        ["TRL#6357"],
        Language(model={"padding": "<|im_end|>"}),
    ),
    language(
        "template-without-marks",
        "The chat template marks no answers: the mask is all zero or all one, and the run looks healthy.",
        ["marin#7237", "Megatron-Bridge#3927"],
        Language(model={"marks": False}),
        only=["forge", "trl_sft"],
    ),
    Case(
        name="router-loss-with-accumulation",
        wrong="The balancing loss of a router is not divided by the accumulation. Here all micro-batches are equal, so "
        "that the gradient must be that of one.",
        references=["AutoModel#3359"],
        trials={
            {"forge": "forge", "trl": "trl_sft", "hf": "hf"}[trainer]: Language(
                [CHATS[3]] * 8, micro=2, accumulate=4, steps=1, **ROUTER
            ).beside(Language([CHATS[3]] * 8, micro=8, steps=1, **ROUTER), trainer)
            for trainer in ("forge", "trl", "hf")
        },
        right=lambda: 1.0,
        tolerance=1e-4,
        seconds=150,
    ),
]
