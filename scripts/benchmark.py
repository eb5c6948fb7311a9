"""Times this package beside TransformerLens's own route to the same numbers.

Both sides run in one process, in turn, with one thread setting; the medians and their ratio are
reported, after checking that both sides computed the same numbers. The model has GPT-2 small's
shape and random weights, so that nothing is downloaded.

    python scripts/benchmark.py [--repeats N] [--threads N] [--backend hooked|bridge] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import resid_patching as rp  # noqa: E402
from resid_patching.address import MLP, Attn, Head, hook_name  # noqa: E402

PROMPTS, LENGTH, ANSWER, FOIL = 8, 15, 100, 200


def gpt2_shaped(backend: str) -> Any:
    """A model of GPT-2 small's shape with random weights."""
    if backend == "hooked":
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        config = HookedTransformerConfig(
            n_layers=12,
            d_model=768,
            n_ctx=1024,
            d_head=64,
            n_heads=12,
            d_mlp=3072,
            d_vocab=50257,
            act_fn="gelu_new",
            normalization_type="LN",
            seed=0,
        )
        return HookedTransformer(config).eval()
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(attn_implementation="eager")).eval()
    return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config).eval()


def sweep_targets(model: Any) -> list[Any]:
    """144 heads, 12 attention layers, 12 MLPs."""
    layers = range(model.cfg.n_layers)
    return [*rp.heads(model), *(Attn(layer) for layer in layers), *(MLP(layer) for layer in layers)]


def by_hooks(model: Any, tokens: Tensor, targets: Sequence[Any], position: int | None) -> Tensor:
    """The same zero sweep, one `run_with_hooks` a target: effects [target, prompt]."""
    with torch.no_grad():
        baseline = _difference(model(tokens))
        effects = []
        for target in targets:
            hooks = [(hook_name(target), _zeroing(target, position))]
            effects.append(_difference(model.run_with_hooks(tokens, fwd_hooks=hooks)) - baseline)
    return torch.stack(effects)


def _difference(logits: Tensor) -> Tensor:
    return logits[:, -1, ANSWER] - logits[:, -1, FOIL]


def _zeroing(target: Any, position: int | None) -> Callable[..., Tensor]:
    where = slice(None) if position is None else position

    def zero(activation: Tensor, hook: Any) -> Tensor:
        activation = activation.clone()
        if isinstance(target, Head):
            activation[:, where, target.head] = 0
        else:
            activation[:, where] = 0
        return activation

    return zero


def in_turn(
    repeats: int, **sides: Callable[[], Tensor]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Median seconds of each side, run in turn, and what each computed."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    values: dict[str, Tensor] = {}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            values[name] = side()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}, values


def zero_sweep(model: Any, position: int | None, repeats: int) -> dict[str, Any]:
    """One row: the zero sweep of 168 targets, ours against `run_with_hooks`."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50257, (PROMPTS, LENGTH), generator=generator)
    targets = sweep_targets(model)
    run = rp.capture(model, tokens)
    metric = rp.logit_diff(ANSWER, FOIL)

    def ours() -> Tensor:
        return rp.ablate(run, targets, rp.Zero(), metric=metric, positions=position).total

    def theirs() -> Tensor:
        return by_hooks(model, tokens, targets, position)

    rp.ablate(run, targets[:2], rp.Zero(), metric=metric)  # the first call of a process is slower
    seconds, values = in_turn(repeats, ours=ours, theirs=theirs)
    difference = float((values["ours"] - values["theirs"]).abs().max())
    if not difference < 1e-3:
        raise SystemExit(f"the two sides differ by {difference:.1e}; nothing is reported")
    name = "all positions" if position is None else f"position {position}"
    return {
        "row": f"zero sweep of {len(targets)} targets, {name}",
        "ours": seconds["ours"],
        "run_with_hooks": seconds["theirs"],
        "ratio": seconds["theirs"] / seconds["ours"],
        "difference": difference,
    }


def main() -> None:
    """Runs the rows and prints them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--backend", choices=("hooked", "bridge"), default="bridge")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    model = gpt2_shaped(arguments.backend)
    rows = [zero_sweep(model, position, arguments.repeats) for position in (None, -1)]
    print(f"{arguments.backend}, {arguments.threads} threads, {PROMPTS} x {LENGTH} tokens")
    print("| row | ours, s | run_with_hooks, s | ratio | largest difference |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['row']} | {row['ours']:.2f} | {row['run_with_hooks']:.2f} | "
            f"{row['ratio']:.1f} | {row['difference']:.1e} |"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
