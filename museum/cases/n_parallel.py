"""Tensor, context and pipeline parallelism: parts that are added twice, or normalized in parts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from museum import oracle
from museum.case import Case
from museum.trainers import forge
from museum.training import ENTROPY, Rows, Training

THEME = "Tensor and pipeline parallelism"
VOCABULARY = 16


def small_gpt() -> nn.Module:
    """Returns a GPT of two layers, whose output layer is the embedding."""
    from ddpforge.builtin.models.builders import gpt

    return gpt(vocab_size=VOCABULARY, block_size=8, layers=2, heads=2, width=16, dropout=0.0)


def tokens(*counts: int) -> Rows:
    """Rows of 8 tokens, of which the first ones are counted."""
    inputs = torch.randint(0, VOCABULARY, (len(counts), 8), generator=torch.Generator().manual_seed(1))
    targets = inputs.roll(-1, 1)
    for row, count in enumerate(counts):
        targets[row, count:] = -100
    return Rows(inputs, targets)


GPT = Training(
    model=small_gpt, data=lambda: tokens(1, 7, 3, 5, 8, 2, 4, 6), loss=ENTROPY, micro=4, epochs=1, counted=True,
    optimizer=partial(torch.optim.SGD, lr=0.1), clip=0.5,
)  # fmt: skip


def _beside_one_process(strategy: dict[str, Any], **more: Any) -> Callable[[Path], Any]:
    """Returns a trial of ddpforge: loss and norm of two ranks, divided by those of one process in float64."""

    def trial(folder: Path) -> Any:
        given = Training(**{**GPT.__dict__, **more})
        forge.STRATEGIES["given"] = strategy
        forge.Items.by_position = "context" in strategy
        on_ranks = Training(**{**given.__dict__, "strategy": "given"})
        found, right = forge.train(on_ranks, folder, "whole"), oracle.train(given)
        pairs = [(found.losses, right.losses), (found.norms, right.norms)]
        ratios = [[one / other for one, other in zip(*pair, strict=True)] for pair in pairs]
        return [max(each, key=lambda ratio: abs(ratio - 1)) for each in ratios]

    return trial


def _tensor_parallel_torch(folder: Path) -> Any:
    """Returns loss and norm of a column- and a row-parallel layer with a bias, divided by those of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.distributed.init_process_group("gloo")
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for split in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4))
        if split:
            mesh = init_device_mesh("cpu", (2,))
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        loss = model(data).square().mean()
        loss.backward()
        gradients: list[Any] = [one.grad for one in model.parameters()]
        whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in gradients]
        found.append([loss.item(), torch.nn.utils.get_total_norm(whole).item()])
    return [one / other for one, other in zip(*found, strict=True)]


def _pipeline_torch(folder: Path) -> Any:
    """Returns the loss of a pipeline of two micro-batches, divided by the mean over all tokens of one process."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    data = tokens(1, 7, 3, 5)

    def loss_of(outputs: Any, targets: Any) -> Any:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)

    stage = PipelineStage(whole[rank], rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)
    losses: list[Any] = []
    if rank == 0:
        schedule.step(data.inputs)
    else:
        schedule.step(target=data.targets, losses=losses)
    mine = whole[rank].weight.grad.norm()  # type: ignore[union-attr,operator]
    norms = [torch.zeros(()) for _ in range(2)]
    torch.distributed.all_gather(norms, mine)
    whole.zero_grad()
    loss_of(whole(data.inputs), data.targets).backward()
    right = [whole[number].weight.grad.norm() for number in range(2)]  # type: ignore[union-attr,operator]
    return [float(one / other) for one, other in zip(norms, right, strict=True)]


def _flattened_torch(folder: Path) -> Any:
    """Returns the sizes of 1 … 17 whose rows are lost when they are gathered over two flattened axes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh._flatten("ab")
    wrong = 0
    for size in range(1, 18):
        whole = torch.arange(float(size))
        back = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).full_tensor()
        wrong += not torch.equal(back, whole)
    return wrong


def _uneven_forge(folder: Path) -> Any:
    """Returns the number of wrong weights of layers with 5 and 7 rows on 4 ranks, as 2 × 2."""
    from museum.cases.a_denominators import classes
    from museum.training import Perceptron

    forge.STRATEGIES["given"] = {"use": "fsdp", "replicas": 2}
    training = Training(
        model=partial(Perceptron, width=5, outputs=7), data=lambda: classes(16), loss=ENTROPY, micro=1, ranks=4,
        strategy="given",
    )  # fmt: skip
    found, right = forge.train(training, folder, "whole"), oracle.train(training)
    if not found.weights:
        return 0  # rank 0 has them
    pairs = [(torch.tensor(one), torch.tensor(right.weights[name])) for name, one in found.weights.items()]
    return sum(int((~torch.isclose(one, other, atol=1e-5)).sum()) for one, other in pairs)


CASES = [
    Case(
        name="tensor-parallel-norm",
        wrong="Parameters that all tensor-parallel ranks have count several times in the gradient's norm, a replicated "
        "bias is added by every rank.",
        references=["NeMo-RL#3788", "Megatron-Bridge#6133", "torchtitan#4245", "torchtitan#4054"],
        trials={
            "forge": _beside_one_process({"use": "fsdp", "tensor": 2}),
            "loop": _tensor_parallel_torch,
        },
        right=lambda: [1.0, 1.0],
        ranks=2,
        tolerance=1e-4,
        seconds=150,
    ),
    Case(
        name="context-parallel-tokens",
        wrong="Under context parallelism the loss is divided by the tokens of a rank's part.",
        references=["Megatron-LM#7452", "Megatron-LM#7513", "transformers#48570"],
        trials={"forge": _beside_one_process({"use": "fsdp", "context": 2})},
        right=lambda: [1.0, 1.0],
        ranks=2,
        tolerance=1e-4,
        seconds=150,
    ),
    Case(
        name="pipeline-tokens",
        wrong="A pipeline divides by its micro-batches, whose tokens are not equally many.",
        references=["AReaL#1273", "torchtitan#4194", "DeepSpeed#8154"],
        trials={"forge": _beside_one_process({"use": "pipeline"}, micro=1, accumulate=4), "loop": _pipeline_torch},
        right=lambda: [1.0, 1.0],
        ranks=2,
        tolerance=1e-4,
        seconds=150,
        notes={"loop": "documented: the losses of micro-batches are averaged (scale_grads)"},
    ),
    Case(
        name="gather-over-two-axes",
        wrong="A tensor whose rows do not divide loses rows when it is gathered over two axes of a mesh.",
        references=["pytorch#194457"],
        trials={"loop": _flattened_torch, "forge": _uneven_forge},
        right=lambda: 0,
        ranks=4,
        seconds=150,
    ),
]
