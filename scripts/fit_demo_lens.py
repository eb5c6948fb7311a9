"""Fits the tuned lens that is shipped beside the demo model, on text of the demo's own language.

    python scripts/fit_demo_lens.py [--out FOLDER] [--tokens N] [--steps N] [--seed N]

Prints the validation KL of every layer, as the model's card shows it. The same versions of the
libraries give the same lens.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import train_demo  # noqa: E402

import resid_patching as rp  # noqa: E402
from resid_patching.models import DEMO_FOLDER  # noqa: E402

LENGTH = 128


def windows(n_tokens: int, seed: int) -> torch.Tensor:
    """Documents of the demo's language end to end, cut into windows that begin with the BOS."""
    model = rp.load("demo")
    rng = random.Random(seed)
    bos = model.tokenizer.bos_token_id
    stream: list[int] = []
    while len(stream) < n_tokens:
        text = train_demo.write_document(rng, held_out=False)
        stream += [*model.tokenizer(text, add_special_tokens=False)["input_ids"], bos]
    step = LENGTH - 1
    return torch.tensor(
        [[bos, *stream[start : start + step]] for start in range(0, n_tokens - step, step)]
    )


def main() -> None:
    """Fits, saves and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", default=str(DEMO_FOLDER / "lens"))
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--validation", type=int, default=8_192)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # so that sums are made in one order
    lens = rp.fit_tuned_lens(
        rp.load("demo"),
        windows(arguments.tokens, arguments.seed),
        validation=windows(arguments.validation, arguments.seed + 1),
        validation_tokens=arguments.validation // LENGTH * LENGTH,
        length=LENGTH,
        steps=arguments.steps,
        seed=arguments.seed,
    )
    lens.save(arguments.out)
    found = lens.record["validation"]
    print("| reads | logit lens, nats | ridge | tuned |")
    print("|---|---|---|---|")
    columns = (found["layers"], found["logit_lens"], found["ridge"], found["tuned"])
    for label, *values in zip(*columns, strict=True):
        print(f"| `{label}` | " + " | ".join(f"{value:.3f}" for value in values) + " |")


if __name__ == "__main__":
    main()
