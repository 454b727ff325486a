"""Number of weight elements on each rank: equal to theory, and to the table in the documentation."""

import re
from pathlib import Path

import pytest
from support.small_gpt import BLOCK, PIPELINE, SHARDED, shared, train

PAGE = Path(__file__).parents[2] / "docs/concepts/strategies.md"
TOKENS, PLACES, NORM = 16 * 16, 8 * 16, 2 * 16
WHOLE = TOKENS + PLACES + 4 * BLOCK + NORM
FIRST, LAST = TOKENS + PLACES + 2 * BLOCK, TOKENS + NORM + 2 * BLOCK  # tied embeddings are in both stages
# norms, some biases, positions: whole
LAYERS = 4 * (12 * 16**2 // 2 + 7 * 16 // 2 + 6 * 16) + TOKENS // 2 + PLACES + NORM
STAGES = PIPELINE.format("1F1B")

LAYOUTS = {
    '"ddp"': ('use = "ddp"', [WHOLE] * 2),
    '"fsdp"': ('use = "fsdp"', [WHOLE // 2] * 2),
    "… `replicas = 2`": ('use = "fsdp"\nreplicas = 2', [WHOLE // 2] * 4),
    "… `tensor = 2`": ('use = "fsdp"\ntensor = 2', [LAYERS] * 2),
    "… `tensor = 2`, 2 shards": ('use = "fsdp"\ntensor = 2', [LAYERS // 2] * 4),
    '"pipeline"': (STAGES, [FIRST, LAST]),
    "… of 2 stages": (STAGES, [FIRST] * 2 + [LAST] * 2),
    '… `data = "fsdp"`': (f"{STAGES}\n{SHARDED}", [FIRST // 2] * 2 + [LAST // 2] * 2),
    "… `tensor = 2`, 2 stages": (f"{STAGES}\ntensor = 2", [shared("1F1B", 0)] * 2 + [shared("1F1B", 1)] * 2),
}


def test_the_table_in_the_documentation_equals_theory() -> None:
    rows = re.findall(r"^\| (.+?) \| (\d) \| ([\d, ]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    said = [(name, int(ranks), held) for name, ranks, held in rows]
    assert said == [
        (f"`{name}`" if name.startswith('"') else name, len(held), ", ".join(f"{count:,}" for count in held))
        for name, (_, held) in LAYOUTS.items()
    ]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_holds_the_predicted_number_of_elements(layout: str) -> None:
    strategy, expected = LAYOUTS[layout]
    assert [one.held for one in train(strategy, len(expected), length="3st")] == expected
