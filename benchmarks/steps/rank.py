"""One rank of a session: runs the contenders in turn in threads of one process; writes the time of each turn."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Task, by_ddpforge, loss_of
from relay import Relay, Side
from torch import nn
from work import MODELS, make_data


def probe_of(work: str) -> Callable[[nn.Module], float]:
    """Returns a function that computes the loss of a model on the first samples."""
    samples = make_data(work)

    def probe(model: nn.Module) -> float:
        was_training = model.training
        with torch.no_grad():
            loss = loss_of(model.eval()(samples.inputs[:256]), samples.targets[:256])
        model.train(was_training)
        return loss.item()

    return probe


def run(relay: Relay, train: Callable[[Task], None], task: Task) -> None:
    """Runs one contender from its first turn to its end; an error ends the rank."""
    try:
        relay.take(task.side.name)
        train(task)
        relay.hand_over()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    work, ranks, strategy, folder = asked["work"], asked["ranks"], asked["strategy"], Path(asked["folder"])
    clip, fused = asked["clip"], asked["fused"]
    if ranks > 1:
        dist.init_process_group("gloo")
    hand, *_ = CONTENDERS[strategy]
    others = {name: train for name, train in CONTENDERS[strategy].items() if name in (hand, *asked["others"])}
    names = [*others, "ddpforge"]
    relay = Relay(names, steps=MODELS[work].steps, turns=asked["turns"])
    sides = {name: Side(relay, name, probe_of(work)) for name in names}
    tasks = {name: Task(work, ranks, strategy, clip, side, folder, fused=fused) for name, side in sides.items()}
    for name, train in others.items():
        threading.Thread(target=run, args=(relay, train, tasks[name]), daemon=True).start()
    run(relay, by_ddpforge, tasks["ddpforge"])  # on the main thread, which alone can handle signals
    rank = int(os.environ.get("RANK", "0"))
    found = {name: {"turns": side.turns, "loss": side.probed} for name, side in sides.items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # a normal exit sometimes aborts in threads of DeepSpeed


main()
