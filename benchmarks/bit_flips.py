"""Flips single bits in training on three ranks, and counts the flips that the check for silent corruption finds.

    python benchmarks/bit_flips.py                  # 300 flips, 300 clean checks, and the cost
    python benchmarks/bit_flips.py --flips 40 --clean 40

The flips are drawn by a seed: a rank, a parameter, an element, one of 32 bits of all significance, and one of four
places: the local gradient before the reduction, the reduced gradient on one rank, a weight, and AdamW's momentum.
Half of them are in fp32, half under bf16 autocast. The network has BatchNorm and dropout; a step has two micro-batches.

A flip is found if the check of its step ends the step, whether or not the bit would have mattered: bits are compared,
not rounded values. The rank is right if it is the only one that is named; the place is right if the kind and the
parameter are named. A false alarm is an error in a check without a flip.

The cost is the CPU time of a check, divided by the CPU time of N steps of a GPT with 2 layers of width 128 on two
ranks; N is the default of `every`. Each rank has one thread.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from support.bit_flips import PLACES, Checked, drawn
from support.forked import in_ranks

from ddpforge.builtin.models.gpt import GPT
from ddpforge.features.corruption_check import CorruptionCheck
from ddpforge.features.silent_corruption import SilentCorruptionError

RANKS = 3
EVERY = CorruptionCheck().every


def counts(flips: int, clean: int, _: int) -> Counter[str]:
    """Flips bits and counts the findings, in one process group."""
    total: Counter[str] = Counter()
    for precision in ("fp32", "bf16"):
        draw, checked = random.Random(precision), Checked(micro_batches=2, precision=precision)
        for _ in range(3):
            checked.step()
        checked.remember()
        for number in range(flips // 2):
            flip = drawn(draw, PLACES[number % 4], RANKS, checked.parameters)
            total[f"{flip.place}: flips"] += 1
            try:
                checked.step(flip)
            except SilentCorruptionError as error:
                named = {rank for one in error.found for rank in one.ranks}
                fits = any(
                    one.kind == flip.place and any(flip.name in name for name in one.names) for one in error.found
                )
                total[f"{flip.place}: found"] += 1
                total[f"{flip.place}: right rank"] += named == {flip.rank}
                total[f"{flip.place}: right place"] += fits
            checked.reset()
        for _ in range(clean // 2):
            total["clean checks"] += 1
            try:
                checked.step()
            except SilentCorruptionError:
                total["false alarms"] += 1
    return total


def tokens(draw: torch.Generator) -> Any:
    """Returns a micro-batch for the GPT: eight sequences of 128 tokens, and the next ones."""
    found = torch.randint(0, 256, (8, 129), generator=draw)
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def seconds(micro_batches: int, _: int) -> tuple[float, float]:
    """Returns the CPU time of a step without the check, and of one with it."""
    found = []
    for checks in (False, True):
        build = partial(GPT, vocab_size=256, block_size=128, layers=2, width=128)
        checked = Checked(build=build, batch=tokens, micro_batches=micro_batches, checks=checks)
        for _ in range(3):
            checked.step()
        rounds = []
        for _ in range(15):
            began = time.process_time()
            checked.step()
            rounds.append(time.process_time() - began)
        found.append(sorted(rounds)[len(rounds) // 2])
    return found[0], found[1]


def main() -> None:
    """Prints the counts and the cost."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--flips", type=int, default=300)
    options.add_argument("--clean", type=int, default=300)
    given = options.parse_args()
    total = in_ranks(RANKS, partial(counts, given.flips, given.clean), timeout=600)[0]
    for place in PLACES:
        row = {key: total[f"{place}: {key}"] for key in ("flips", "found", "right rank", "right place")}
        print(f"{place:17}", ", ".join(f"{key} {number}" for key, number in row.items()))
    print(f"clean checks {total['clean checks']}, false alarms {total['false alarms']}")
    for micro_batches in (1, 4):
        plain, checked = in_ranks(2, partial(seconds, micro_batches), timeout=300)[0]
        share = (checked - plain) / plain / EVERY
        print(
            f"{micro_batches} micro-batch(es): step {1e3 * plain:.0f} ms, check {1e3 * (checked - plain):.0f} ms: "
            f"{share:.2%} of the time at every = {EVERY}"
        )


if __name__ == "__main__":
    main()
