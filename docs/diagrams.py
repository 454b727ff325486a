"""Draws how ddpforge works, from its own functions and from a run: `python docs/diagrams.py` writes docs/assets/*.svg.

Each function of DIAGRAMS draws one picture: a step, the layout of ranks, schedules of pipelines, a checkpoint.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import create_autospec

import svg

from ddpforge.checkpoint import retention
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.data.batch_assignment import AssignmentTerms, BatchAssigner, RankShare
from ddpforge.interfaces.regions import FlatRange, Simple, overlaps
from ddpforge.interfaces.sampler import Shuffled
from ddpforge.recipe.schema import TrainSection
from ddpforge.strategies.fsdp.mesh import ParallelDims
from ddpforge.strategies.pipeline.schedules import SCHEDULES, StageLayout, schedule_for
from ddpforge.strategies.pipeline.strategy import Pipeline
from ddpforge.testing.ranks import run_ddpforge
from ddpforge.tools.simulation.fake import fake_world

ASSETS = Path(__file__).parent / "assets"
WIDTH, LEFT, RIGHT = 560, 16, 544
COLORS = ("one", "two", "three", "four", "five")
STYLE = "\n".join(
    [
        ".mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }",
        ".faint { stroke: var(--faint); fill: none; } .idle { fill: var(--faint); } .arrow { stroke: var(--soft); }",
        ".half { fill-opacity: .28; } .full { fill-opacity: .6; }",
        *(
            f"rect.{name} {{ stroke: var(--{name}); fill: none; stroke-width: 1.5; }} "
            f"text.{name} {{ fill: var(--{name}); }} path.{name} {{ stroke: var(--{name}); }} "
            f"rect.{name}.half, rect.{name}.full {{ fill: var(--{name}); }}"
            for name in COLORS
        ),
    ]
)


def picture(height: float, parts: Sequence[str], title: str, description: str) -> str:
    """Returns a picture of the common width."""
    return svg.document(WIDTH, height, parts, title=title, description=description, style=svg.common(STYLE))


# ---------------------------------------------------------------------------------------------- a step
SAMPLES, GLOBAL_BATCH, RANKS, MICRO_BATCH, STEP = 36, 12, 2, 3, 2


def batches_of_ranks() -> list[list[list[int]]]:
    """Returns the samples of each micro-batch of each rank in one step."""
    found = []
    for rank in range(RANKS):
        share = RankShare(rank, RANKS, MICRO_BATCH)
        terms = AssignmentTerms(global_batch=GLOBAL_BATCH, share=share, seed=0, drop_last=False)
        assigner = BatchAssigner(order=_order(), samples=SAMPLES, terms=terms)
        found.append([request.ids for request in assigner.requests(STEP, STEP + 1)])
    return found


def _order() -> Shuffled:
    return Shuffled(range(SAMPLES), seed=0, global_batch=GLOBAL_BATCH, drop_last=False)


def step() -> str:
    """Draws the way of samples to ranks and micro-batches, and to one update."""
    ranks, order = batches_of_ranks(), _order()
    owner = {sample: rank for rank, batches in enumerate(ranks) for batch in batches for sample in batch}
    parts = [svg.text(LEFT, 28, f"An epoch of {SAMPLES} samples, in the order of the seed", "bold")]
    for number in range(order.steps_per_epoch):
        y = 42 + 36 * number
        here = number == STEP
        parts.append(svg.text(LEFT, y + 20, f"step {number + 1}", "small" if here else "small soft"))
        for place, sample in enumerate(order(number)):
            style = COLORS[owner[sample]] if here else "faint"
            parts += _cell(70 + 39.7 * place, y, 37, sample, style)
    for rank, batches in enumerate(ranks):
        x, color = LEFT + 272 * rank, COLORS[rank]
        parts += [
            svg.arrow((189 + 238 * rank, 148), (x + 128, 178), "arrow"),
            svg.rect(x, 182, 256, 132, color, rx=6),
            svg.text(x + 12, 204, f"rank {rank}", f"bold {color}"),
        ]
        for number, batch in enumerate(batches):
            left = x + 12 + 120 * number
            parts.append(svg.text(left, 228, f"micro-batch {number + 1}", "small"))
            for place, sample in enumerate(batch):
                parts += _cell(left + 38 * place, 238, 36, sample, color)
        count = sum(map(len, batches))
        parts += [
            svg.text(x + 12, 288, "forward and backward for each;", "small soft"),
            svg.text(x + 12, 306, f"the gradients of {count} losses are added", "small soft"),
            svg.arrow((x + 128, 318), (180 + 200 * rank, 346), "arrow"),
        ]
    parts += [
        svg.rect(LEFT, 350, 528, 34, "box", rx=6),
        svg.text(WIDTH / 2, 372, f"all-reduce: sum over the ranks / {GLOBAL_BATCH} samples", "middle"),
        svg.arrow((WIDTH / 2, 386), (WIDTH / 2, 406), "arrow"),
        svg.rect(LEFT, 410, 528, 34, "box", rx=6),
        svg.text(WIDTH / 2, 432, "clip the gradient, then one update: the same on every rank", "middle"),
    ]
    shares = "; ".join(f"rank {rank} computes the micro-batches {batches}" for rank, batches in enumerate(ranks))
    return picture(
        460,
        parts,
        "The parts of a step: samples, ranks, micro-batches, one update",
        f"Step {STEP + 1} trains on {GLOBAL_BATCH} of {SAMPLES} samples: {shares}. The ranks add their gradients, "
        f"divide by {GLOBAL_BATCH}, clip, and make the same update.",
    )


def _cell(x: float, y: float, width: float, words: object, style: str, height: float = 28) -> list[str]:
    letters = "small middle soft" if style == "faint" else "small middle"
    return [
        svg.rect(x, y, width, height, style, rx=4),
        svg.text(x + width / 2, y + height / 2 + 5, str(words), letters),
    ]


# ---------------------------------------------------------------------------------------------- the layout of ranks
class Place(NamedTuple):
    """Place of a rank in the grid: row, column, number within the tensor group; `data` of `datas` see its samples."""

    row: int
    column: int
    tensor: int
    data: int
    datas: int


SIXTEEN = 16
FSDP, PIPELINE = ParallelDims(replicas=2, tensor=2), Pipeline(stages=4, tensor=2)


def fsdp_places() -> list[Place]:
    """Returns the places of 16 ranks under `fsdp` with replicas and tensor parallelism."""
    found = []
    for rank in range(SIXTEEN):
        with fake_world(SIXTEEN, rank) as world:
            groups = FSDP.places(world)
            ((replica, row),) = [(n, row) for n, row in enumerate(groups.mesh.mesh.tolist()) if rank in row]
            assert groups.tensor_mesh is not None
            tensor = groups.tensor_mesh.mesh.tolist().index(rank)
            found.append(Place(replica, row.index(rank), tensor, groups.data.rank, groups.data.size))
    return found


def pipeline_places() -> list[Place]:
    """Returns the places of 16 ranks under `pipeline` with tensor parallelism."""
    found = []
    train = TrainSection.model_validate({"length": "1st", "global_batch": SIXTEEN, "device": "cpu"})
    for rank in range(SIXTEEN):
        with fake_world(SIXTEEN, rank) as world:
            data = PIPELINE.setup(train, world).dp_ranks
            (stage,) = [number for number, ranks in enumerate(PIPELINE.grid) if rank in ranks]
            assert PIPELINE.sharers_mesh is not None
            tensor = PIPELINE.sharers_mesh.mesh.tolist().index(rank)
            found.append(Place(data.rank, stage, tensor, data.rank, data.size))
    return found


def layout() -> str:
    """Draws the grids of 16 ranks under `fsdp` and `pipeline`."""
    grids = (
        ('strategy = { use = "fsdp", replicas = 2, tensor = 2 }', "replica", "shard", fsdp_places()),
        ('strategy = { use = "pipeline", stages = 4, tensor = 2 }', "pipeline", "stage", pipeline_places()),
    )
    parts = []
    for number, (settings, rows, columns, places) in enumerate(grids):
        parts += _grid(28 + 262 * number, settings, rows, columns, places)
    parts.append(
        svg.text(LEFT, 530, "Same color: the same part of the weights. A box: ranks that compute each layer", "small")
    )
    parts.append(svg.text(LEFT, 548, "together, half of it each, for the same samples.", "small"))
    groups = "; ".join(
        f"{settings}: "
        + ", ".join(f"rank {rank} is {rows} {p.row}, {columns} {p.column}" for rank, p in enumerate(places))
        for settings, rows, columns, places in grids
    )
    return picture(564, parts, f"The layout of {SIXTEEN} ranks under FSDP and in pipelines", groups)


def _grid(top: float, settings: str, rows: str, columns: str, places: Sequence[Place]) -> Iterator[str]:
    height, width, count = 1 + max(p.row for p in places), 1 + max(p.column for p in places), places[0].datas
    sizes = (
        f"{height} {rows}s × {width} {columns}s × 2 tensor"
        if rows == "replica"
        else (f"{width} {columns}s × {height} {rows}s × 2 tensor")
    )
    yield svg.text(LEFT, top, settings, "small mono")
    yield svg.text(LEFT, top + 22, f"{len(places)} ranks = {sizes}", "bold")
    for column in range(width):
        yield svg.text(148 + 112 * column, top + 48, f"{columns} {column}", f"small middle {COLORS[column]}")
    for rank, place in enumerate(places):
        x, y = 98 + 112 * place.column, top + 56 + 84 * place.row
        if place.column == 0 and place.tensor == 0:
            yield svg.text(LEFT, y + 28, f"{rows} {place.row}", "small")
        if place.tensor == 0:
            yield svg.rect(x, y, 100, 72, "faint", rx=6)
            yield svg.text(x + 50, y + 62, f"samples {place.data + 1} of {count}", "tiny middle soft")
        yield from _cell(x + 8 + 44 * place.tensor, y + 10, 40, rank, COLORS[place.column], 34)


# ---------------------------------------------------------------------------------------------- schedules of pipelines
STAGES, MICRO_BATCHES = 4, 8
FORWARD, BACKWARD = 1.0, 2.0  # time of a micro-batch in a stage: a backward pass takes twice the time of a forward pass


@dataclass(frozen=True)
class Work:
    """Forward or backward pass of one micro-batch in one part of the model, with its times."""

    part: int
    micro_batch: int
    backward: bool
    start: float
    end: float


def orders(name: str) -> dict[int, list[tuple[int, int, bool]]]:
    """Returns the passes of each rank in torch's order: the part, the micro-batch, and True for a backward pass."""
    layout = StageLayout(0, STAGES, SCHEDULES[name])
    stages = []
    for part in layout.mine:
        stage: Any = create_autospec(_stage_class(), instance=True)
        stage.stage_index, stage.num_stages = part, layout.parts
        stage.group_rank, stage.group_size, stage.submod = 0, STAGES, None
        stages.append(stage)
    found: dict[int, list[tuple[int, int, bool]]] = {}
    for rank, actions in schedule_for(layout, stages, MICRO_BATCHES, sum).pipeline_order.items():
        # Micro-batches come in their order. They are counted here: torch's list of 1F1B begins at 1 on the last rank.
        passes: dict[tuple[int, bool], int] = {}
        for action in actions:
            kind = action.computation_type.name if action else ""
            if kind in ("FORWARD", "FULL_BACKWARD"):
                key = (action.stage_index, kind != "FORWARD")
                found.setdefault(rank, []).append((key[0], passes.setdefault(key, 0), key[1]))
                passes[key] += 1
    return found


def _stage_class() -> type:
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage


def timed(name: str) -> dict[int, list[Work]]:
    """Returns the passes of each rank with their times; sending takes none."""
    waiting, parts = orders(name), STAGES * SCHEDULES[name].parts
    done: dict[tuple[int, int, bool], float] = {}
    found: dict[int, list[Work]] = {rank: [] for rank in waiting}
    while any(waiting.values()):
        for rank, queue in waiting.items():
            while queue and (needs := _needs(queue[0], parts)) <= done.keys():
                part, micro_batch, backward = one = queue.pop(0)
                free = found[rank][-1].end if found[rank] else 0.0
                start = max([free, *(done[each] for each in needs)])
                end = start + (BACKWARD if backward else FORWARD) / SCHEDULES[name].parts
                found[rank].append(Work(part, micro_batch, backward, start, end))
                done[one] = end
    return found


def _needs(one: tuple[int, int, bool], parts: int) -> set[tuple[int, int, bool]]:
    """Returns the passes that end before this one begins."""
    part, micro_batch, backward = one
    if not backward:
        return {(part - 1, micro_batch, False)} if part else set()
    return {(part, micro_batch, False)} | ({(part + 1, micro_batch, True)} if part + 1 < parts else set())


def idle(work: Mapping[int, Sequence[Work]]) -> float:
    """Returns the share of the step in which a rank waits."""
    end = max(one.end for each in work.values() for one in each)
    return 1 - sum(one.end - one.start for each in work.values() for one in each) / end / len(work)


def most_held(name: str, work: Sequence[Work]) -> float:
    """Returns the largest number of micro-batches whose activations a rank holds; those of one part count less."""
    held = most = 0
    for one in work:
        held += -1 if one.backward else 1
        most = max(most, held)
    return most / SCHEDULES[name].parts


def pipeline() -> str:
    """Draws three schedules of a pipeline."""
    work = {name: timed(name) for name in ("GPipe", "1F1B", "Interleaved1F1B")}
    longest = max(one.end for each in work.values() for one in each[0])
    unit, left = (RIGHT - 66) / longest, 66
    parts = [svg.text(LEFT, 28, f"{STAGES} ranks, {MICRO_BATCHES} micro-batches; time runs to the right", "bold")]
    for x, style, name in ((LEFT, "one half", "forward"), (110, "two half", "backward"), (214, "idle", "idle")):
        parts += [svg.rect(x, 42, 18, 14, style), svg.text(x + 25, 54, name, "small")]
    parts.append(svg.text(RIGHT, 54, "darker: the rank's second part", "small end"))
    facts = []
    for number, (name, ranks) in enumerate(work.items()):
        top = 92 + 146 * number
        held = most_held(name, ranks[0])
        fact = f"idle {idle(ranks):.0%}; rank 0 holds up to {held:g} micro-batches".replace("%", " %")
        facts.append(f"{name}: {fact}")
        parts += [svg.text(LEFT, top, name, "bold"), svg.text(RIGHT, top, fact, "small end")]
        end = max(one.end for each in ranks.values() for one in each)
        for rank, works in ranks.items():
            y = top + 12 + 26 * rank
            parts.append(svg.text(LEFT, y + 16, f"rank {rank}", "small"))
            parts.append(svg.rect(left, y, end * unit, 22, "idle"))
            for one in works:
                x, width = left + one.start * unit, (one.end - one.start) * unit
                color, shade = "two" if one.backward else "one", "full" if one.part >= STAGES else "half"
                parts.append(svg.rect(x, y, width, 22, "paper"))
                parts.append(svg.rect(x, y, width, 22, f"{color} {shade}"))
                if width > 10:
                    parts.append(svg.text(x + width / 2, y + 15, str(one.micro_batch + 1), "tiny middle"))
    return picture(
        92 + 146 * len(work) - 10,
        parts,
        f"Schedules of a pipeline with {STAGES} stages and {MICRO_BATCHES} micro-batches",
        "; ".join(facts) + ". A backward pass is drawn with twice the time of a forward pass.",
    )


# ---------------------------------------------------------------------------------------------- a checkpoint
RECIPE = """
recipe = 2
name = "moved"
model = { use = "mlp", inputs = 64, hidden = [10], outputs = 10 }
data.train = { use = "digits", split = "train" }
task.use = "classification"
optimizer = { use = "adamw", lr = 1e-3 }
strategy.use = "fsdp"
train = { length = "4st", global_batch = 12, device = "cpu" }
checkpoint = { every = "2st", keep.last = 2 }
"""
TENSOR = "layers.0.weight"


class Saved(NamedTuple):
    """Files of a checkpoint, and the shape of TENSOR with its region in each file."""

    files: list[str]
    shape: tuple[int, ...]
    regions: dict[str, Simple]


def checkpoints(folder: Path) -> tuple[Saved, Saved]:
    """Trains on two ranks to step 2, continues on three, and returns the checkpoints of both."""
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    for ranks, more in ((2, ["train.length=2st"]), (3, ["--allow-change=run"])):
        run = run_ddpforge("run", "recipe.toml", *more, cwd=folder, ranks=ranks, timeout=300)
        if run.returncode:
            sys.exit(run.stdout + run.stderr)
    found, _ = retention.committed(folder / "runs/moved/checkpoints")
    later, first = (_saved(path) for path, _ in found)
    return first, later


def _saved(path: Path) -> Saved:
    entry = CheckpointReader(path).manifest.tensors["model"][TENSOR]
    regions = {chunk.file: chunk.region for chunk in entry.chunks}
    return Saved(sorted(file.name for file in path.iterdir()), entry.shape, regions)


def checkpoint() -> str:
    """Draws the files of two ranks, and the rows of a weight that three ranks read from them."""
    with tempfile.TemporaryDirectory() as folder:
        written, held = checkpoints(Path(folder))
    shape, columns = written.shape, written.shape[1]
    parts = [svg.text(LEFT, 28, "A checkpoint that two ranks wrote under fsdp", "bold")]
    short = [name for name in written.files if not name.startswith("shard")]
    for number, name in enumerate([*short, *sorted(written.regions)]):
        across, down = (number % 2, number // 2) if number < len(short) else (0, number - len(short) // 2)
        parts.append(svg.text(LEFT + 180 * across, 52 + 20 * down, name, "small mono soft"))
    top = 164
    parts.append(svg.text(LEFT, top, f"{TENSOR} in the files, and on three ranks that resume", "bold"))
    top += 16
    row = 28
    for number, (file, region) in enumerate(sorted(written.regions.items())):
        first, last = rows(region, columns)
        y = top + row * first
        parts += [
            svg.rect(LEFT, y + 2, 236, row * (last + 1 - first) - 4, f"{COLORS[number]} half", rx=4),
            svg.text(LEFT + 10, y + 24, f"rows {first} to {last}", ""),
            svg.text(LEFT + 10, y + 44, file.removesuffix(".safetensors"), "small mono"),
        ]
    facts = []
    for rank, region in enumerate(region for _, region in sorted(held.regions.items())):
        first, last = rows(region, columns)
        y = top + row * first
        sources = []
        for number, (file, stored) in enumerate(sorted(written.regions.items())):
            for common in overlaps(shape, stored, region):
                begin, end = rows(common, columns)
                middle = top + row * (begin + end + 1) / 2
                sources.append(f"{_rows(begin, end)} from {file}")
                parts += [
                    svg.arrow((258, middle), (396, middle), COLORS[number]),
                    svg.text(326, middle - 6, _rows(begin, end), "small middle"),
                ]
        facts.append(f"rank {rank} reads {' and '.join(sources)}")
        parts += [
            svg.rect(402, y + 2, 142, row * (last + 1 - first) - 4, "box", rx=4),
            svg.text(414, y + 24, f"rank {rank}", "bold"),
            svg.text(414, y + 44, f"rows {first} to {last}", "small"),
        ]
    return picture(
        top + row * shape[0] + 16,
        parts,
        "A checkpoint of two ranks, and how three ranks read it",
        f"{TENSOR} has {shape[0]} rows: " + "; ".join(facts) + ".",
    )


def rows(region: Simple, columns: int) -> tuple[int, int]:
    """Returns the first and the last row of a region of whole rows."""
    if isinstance(region, FlatRange):
        return region.start // columns, region.stop // columns - 1
    return region.offset[0], region.offset[0] + region.size[0] - 1


def _rows(first: int, last: int) -> str:
    return f"rows {first} to {last}" if last > first else f"row {first}"


DIAGRAMS: Mapping[str, Callable[[], str]] = {
    "step": step,
    "layout": layout,
    "pipeline": pipeline,
    "checkpoint": checkpoint,
}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (ASSETS / f"{name}.svg").write_text(draw(), encoding="utf-8")
