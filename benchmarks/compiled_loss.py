"""Peak memory of a compiled language model's step, by hand and with ddpforge's task, on the CPU.

    python benchmarks/compiled_loss.py

The model is small, and the logits [512, 50304] are not. Each side runs in its own process. Printed is the peak of
torch's CPU allocator in one step, above the weights, as torch's profiler counts it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

TOKENS, CLASSES = 256, 50304


def loss_of(side: str) -> Callable[[], Any]:
    """Returns a function that computes the loss: "by hand", "ddpforge", or "two graphs" for model and loss."""
    import torch
    from torch.nn.functional import cross_entropy

    from ddpforge.builtin.models.gpt import GPT
    from ddpforge.builtin.tasks.language_modeling import LanguageModeling

    torch.manual_seed(0)
    model, task = GPT(vocab_size=CLASSES, block_size=TOKENS, layers=1, heads=1, width=32), LanguageModeling()
    text = torch.randint(CLASSES, (2, TOKENS + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if side == "by hand":
        compiled = torch.compile(lambda: cross_entropy(model(tokens).flatten(0, -2), targets.flatten()))
    elif side == "ddpforge":
        compiled = torch.compile(lambda: task.loss(model, (tokens, targets))[0])
    else:
        model.compile()
        task.sum_of_losses = torch.compile(task.sum_of_losses)  # type: ignore[method-assign]
        return lambda: task.loss(model, (tokens, targets))[0]
    return compiled


def measure(side: str) -> None:
    """Prints the peak of a side's third step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    loss = loss_of(side)
    for step in range(3):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=step == 2) as profiler:
            with torch.autocast("cpu", torch.bfloat16):
                found = loss()
            found.backward()
    changes = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]  # type: ignore[union-attr]
    now = peak = 0
    for one in sorted(changes, key=lambda one: one.start_ns()):
        now += one.nbytes()
        peak = max(peak, now)
    print(f"{side}: {peak / 2**20:.1f} MiB; the logits in bf16 have {2 * TOKENS * CLASSES * 2 / 2**20:.1f} MiB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        for side in ("by hand", "ddpforge", "two graphs"):
            subprocess.run([sys.executable, __file__, side], check=True)
