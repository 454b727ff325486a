"""A notebook: twelve cells train objects of the notebook, watch, resume, compare, load, evaluate and predict."""

import re
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

CELLS = [
    "import ddpforge, torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset",
    "torch.manual_seed(0)\nx = torch.randn(96, 8)\ndata = TensorDataset(x, x[:, :3].argmax(1))",
    """class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, inputs):
        return self.layers(inputs)""",
    """recipe = {"name": "cell", "train": {"length": "2ep", "global_batch": 16},
          "task": {"use": "classification", "metrics": ["accuracy"]}, "optimizer": {"use": "adamw", "lr": 0.01}}
model = Net()
outcome = ddpforge.train(recipe, model=model, train_data=data, eval_data=data)""",
    "outcome",
    "[row['step'] for row in ddpforge.load('cell').metrics() if 'eval/loss' in row]",
    "ddpforge.train(recipe | {'train.length': '4ep'}, model=Net(), train_data=data, eval_data=data)",
    "ddpforge.train(recipe | {'name': 'wide', 'train.length': '4ep'}, model=Net(64), train_data=data, eval_data=data)",
    "{name: ddpforge.load(name).metrics()[-1]['eval/accuracy'] > 0.3 for name in ('cell', 'wide')}",
    "trained = ddpforge.load('cell', model=Net()).model()\ntrained(x).argmax(1).shape",
    "ddpforge.evaluate('cell', model=Net(), eval_data=data).step",
    "ddpforge.predict('cell', 'found.jsonl', model=Net(), eval_data=data).samples",
]
RESULTS = {
    4: r"Outcome\(runs/cell: done at step 12, eval/loss [\d.]+, eval/accuracy [\d.]+\)",
    5: r"\[6, 12\]",
    6: r"Outcome\(runs/cell: done at step 24, .*\)",
    7: r"Outcome\(runs/wide: done at step 24, .*\)",
    8: r"\{'cell': True, 'wide': True\}",
    9: r"torch.Size\(\[96\]\)",
    10: "24",
    11: "96",
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Returns the messages that each cell of the notebook has sent."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    manager, client = start_new_kernel(cwd=str(folder))
    found: list[list[dict[str, Any]]] = []
    try:
        for cell in CELLS:
            found.append([])
            reply = client.execute_interactive(cell, output_hook=found[-1].append, timeout=300)
            assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return found


def test_twelve_cells_give_their_results(messages: list[list[dict[str, Any]]]) -> None:
    results = {
        number: message["content"]["data"]["text/plain"]
        for number, sent in enumerate(messages)
        for message in sent
        if message["msg_type"] == "execute_result"
    }
    assert results.keys() == RESULTS.keys()
    for number, pattern in RESULTS.items():
        assert re.fullmatch(pattern, results[number]), results[number]


def test_progress_is_one_line_that_is_updated(messages: list[list[dict[str, Any]]]) -> None:
    sent = messages[3]
    displays = [message["content"] for message in sent if message["msg_type"] == "display_data"]
    updates = [message["content"] for message in sent if message["msg_type"] == "update_display_data"]
    assert len(displays) == 1
    assert {update["transient"]["display_id"] for update in updates} == {displays[0]["transient"]["display_id"]}
    assert re.search(r"step 12/12 \(100%\) loss", updates[-1]["data"]["text/plain"])
    printed = "".join(message["content"]["text"] for message in sent if message["msg_type"] == "stream")
    assert printed.count("eval step") == 2
    assert "step 12/12" not in printed
