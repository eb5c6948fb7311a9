"""Finds the heads that the demo model's answers rest on, and knocks them out.

Direct attribution and a mean-ablation sweep each rank the heads; the first of both are then
mean-ablated together, and so are random sets of as many other heads. Everything is found by the
sweep, nothing is written here.

    python scripts/knock_out.py [--prompts N] [--heads K] [--seed N]
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import resid_patching as rp  # noqa: E402

NAMES = ("Mary", "John", "Tom", "James", "Dan", "Sid", "Martin", "Amy")
PLACES = ("store", "park", "school", "garden")


def indirect_object_set(rng: random.Random, n: int) -> tuple[list[str], list[str], list[str]]:
    """Prompts, their recipients and their givers; givers stand first or second."""
    prompts, recipients, givers = [], [], []
    for _ in range(n):
        first, second = rng.sample(NAMES, 2)
        giver, recipient = rng.sample((first, second), 2)
        place = rng.choice(PLACES)
        prompts.append(f"When {first} and {second} went to the {place}, {giver} gave a drink to")
        recipients.append(f" {recipient}")
        givers.append(f" {giver}")
    return prompts, recipients, givers


def three_name_set(rng: random.Random, n: int) -> list[str]:
    """The same sentences with a giver who was not named before: nothing to copy."""
    prompts = []
    for _ in range(n):
        first, second, giver = rng.sample(NAMES, 3)
        place = rng.choice(PLACES)
        prompts.append(f"When {first} and {second} went to the {place}, {giver} gave a drink to")
    return prompts


def knock_out(n_prompts: int, n_heads: int, seed: int) -> dict[str, object]:
    """Ranks, knocks out, and compares with random other heads."""
    rng = random.Random(seed)
    model = rp.load("demo")
    prompts, recipients, givers = indirect_object_set(rng, n_prompts)
    run = rp.capture(model, prompts)
    mean = rp.Mean(rp.capture(model, three_name_set(rng, n_prompts)), over=("batch",))
    metric = rp.logit_diff(recipients, givers)

    dla = rp.direct_logit_attribution(run, recipients, givers, by="head")
    sweep = rp.ablate(run, rp.heads(model), mean, metric=metric)
    direct = {head: float(dla.sel(component=head).mean()) for head in sweep.targets}
    total = dict(zip(sweep.targets, sweep.total.mean(1).tolist(), strict=True))
    by_attribution = sorted(direct, key=lambda head: -direct[head])[:n_heads]
    by_sweep = sorted(total, key=lambda head: total[head])[:n_heads]
    found = list(dict.fromkeys([*by_attribution, *by_sweep]))

    def without(heads: list[str]) -> tuple[float, float]:
        patched = rp.ablate(run, heads, mean, metric=metric, joint=True).patched[0]
        return float((patched > 0).double().mean()), float(patched.mean())

    others = [head for head in sweep.targets if head not in found]
    sets = list(itertools.combinations(others, len(found)))
    controls = [list(heads) for heads in rng.sample(sets, 5)]
    clean = sweep.baseline
    return {
        "by attribution": by_attribution,
        "by sweep": by_sweep,
        "clean": (float((clean > 0).double().mean()), float(clean.mean())),
        "found": (found, *without(found)),
        "controls": [(heads, *without(heads)) for heads in controls],
    }


def main() -> None:
    """Prints what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    result = knock_out(arguments.prompts, arguments.heads, arguments.seed)
    print("first by attribution:", *result["by attribution"])  # type: ignore[misc]
    print("first by mean-ablation sweep:", *result["by sweep"])  # type: ignore[misc]
    print(f"{'heads mean-ablated':<24}accuracy  logit difference")
    rows = [("none", *result["clean"])]  # type: ignore[misc]
    for heads, accuracy, value in [result["found"], *result["controls"]]:  # type: ignore[misc]
        rows.append((" ".join(heads), accuracy, value))
    for name, accuracy, value in rows:
        print(f"{name:<24}{accuracy:>8.0%}{value:>+18.2f}")


if __name__ == "__main__":
    main()
