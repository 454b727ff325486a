"""For users of a loop of their own: the model and the dataset are objects, the recipe replaces the loop.

python pytorch_loop.py                                    one process
torchrun --nproc-per-node 2 pytorch_loop.py               two, with the same batches and losses
"""

from functools import partial

import torch
from rings import Net, Rings

import ddpforge

torch.manual_seed(0)  # the same model on every rank
recipe = {
    "name": "pytorch-loop",
    "task": {"use": "classification", "metrics": ["accuracy"]},
    "schedule": {"use": "cosine"},
    "train": {"length": "10ep", "global_batch": 64, "clip_norm": 1.0},
}
outcome = ddpforge.train(
    recipe,
    model=Net(),
    train_data=Rings(split="train"),
    eval_data=Rings(split="test", samples=1000),
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
)
print(outcome)  # the same command resumes an interrupted run, and trains nothing if it has finished
trained = ddpforge.load("pytorch-loop", model=Net()).model()
print("inside:", trained(torch.tensor([[0.6, 0.0], [0.0, 0.0]])).argmax(1).tolist())
