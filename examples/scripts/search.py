"""For users with many runs: trains with several learning rates, and reads the results from the runs' folders.

python search.py              afterwards: ddpforge report runs/search
"""

import torch
from rings import Net, Rings

import ddpforge

found = {}
for number, lr in enumerate((1e-4, 1e-3, 1e-2)):
    torch.manual_seed(0)
    ddpforge.train(
        {
            "name": f"rate-{number}",
            "output_dir": "runs/search",
            "task": {"use": "classification", "metrics": ["accuracy"]},
            "optimizer": {"use": "adamw", "lr": lr},
            "train": {"length": "3ep", "global_batch": 64},
        },
        model=Net(),
        train_data=Rings(split="train"),
        eval_data=Rings(split="test", samples=1000),
    )
    rows = ddpforge.load(f"runs/search/rate-{number}", model=Net()).metrics()
    found[lr] = max(row["eval/accuracy"] for row in rows if "eval/accuracy" in row)
print("best rate:", max(found, key=found.__getitem__))
