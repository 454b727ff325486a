"""TRL's SFTTrainer on a tiny Llama, with a subclass for a loss of its own. `--plant`: an error."""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--router", action="store_true")
given = parser.parse_args()
plant = given.plant
torch.manual_seed(0)
words = ["<pad>", "<end>", "the", "old", "cat", "sees", "a", "dog", "and", "what", "does", "be", "kind"]
tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = Whitespace()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
rows = [[words[2 + (number * step) % 11] for step in range(1, 13)] for number in range(96)]
learnt = [1 + (5 * number) % 9 for number in range(96)]  # words of each answer
data = Dataset.from_dict(
    {
        "prompt": [" ".join(row[:-count]) for row, count in zip(rows, learnt, strict=True)],
        "completion": [" " + " ".join(row[-count:]) for row, count in zip(rows, learnt, strict=True)],
    }
)
options = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
model = LlamaForCausalLM(LlamaConfig(**options))
if given.router:
    router = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
    model = MixtralForCausalLM(MixtralConfig(**options, **router, router_aux_loss_coef=0.5))


class OwnLoss(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not plant:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"][:, 1:]
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask")).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        counted = labels != -100
        if plant == "sum":
            return losses.sum()
        if plant == "mean-of-micro-batch":
            return losses.sum() / counted.sum() / self.args.gradient_accumulation_steps
        if plant == "mean-of-sequences":
            return (losses.sum(1) / counted.sum(1)).sum() / counted.sum() / self.args.gradient_accumulation_steps
        return losses.sum() / num_items_in_batch * self.args.gradient_accumulation_steps  # not-divided


arguments = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=8,
    max_steps=10,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=given.checkpointing,
    dataloader_pin_memory=False,
    max_length=32,
    seed=0,
)
OwnLoss(model, arguments, train_dataset=data, processing_class=fast).train()
