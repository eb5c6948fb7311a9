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
    require_equal(difference)
    name = "all positions" if position is None else f"position {position}"
    return {
        "row": f"zero sweep of {len(targets)} targets, {name}",
        "ours": seconds["ours"],
        "forwards": None,
        "peer": "run_with_hooks",
        "peer_seconds": seconds["theirs"],
        "ratio": seconds["theirs"] / seconds["ours"],
        "difference": difference,
    }


# Paths


# Where base and source differ: the second name alone, as in the pairs of TransformerLens's own demo
# (a swapped subject), or from the first name on (three other names).
ONE_TOKEN, THREE_TOKENS = (10,), (3, 5, 10)


def path_prompts(places: Sequence[int] = THREE_TOKENS) -> tuple[Tensor, Tensor]:
    """Base and source ids that differ at some places."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randint(50257, (PROMPTS, LENGTH), generator=generator)
    source = base.clone()
    source[:, list(places)] = torch.randint(50257, (PROMPTS, len(places)), generator=generator)
    return base, source


def paths(model: Any, to: Any, name: str, repeats: int) -> dict[str, Any]:
    """One row: all heads to some readers at the last position, in plain forward passes.

    Both captures are made anew each time. The peer is the paper's passes with hooks, one sender
    at a time, on a few senders and scaled to all.
    """
    base, source = path_prompts()
    metric = rp.logit_diff(ANSWER, FOIL)
    senders = rp.heads(model)
    some = senders[:: len(senders) // 4]

    def plain() -> Tensor:
        with torch.no_grad():
            return model(base)

    def ours(heads: Sequence[Any]) -> Tensor:
        runs = rp.capture(model, base), rp.capture(model, source)
        how = rp.Path(to=to, using=rp.Resample(runs[1]), mlps="recompute")
        return rp.ablate(runs[0], heads, how, metric=metric, positions=-1).total

    def theirs() -> Tensor:
        return three_passes(model, base, source, some, to)

    ours(some)
    seconds, values = in_turn(repeats, plain=plain, ours=lambda: ours(senders), theirs=theirs)
    chosen = values["ours"][[senders.index(head) for head in some]]
    difference = float((chosen - values["theirs"]).abs().nan_to_num().max())
    require_equal(difference)
    scaled = seconds["theirs"] * len(senders) / len(some)
    return {
        "row": name,
        "ours": seconds["ours"],
        "forwards": seconds["ours"] / seconds["plain"],
        "peer": f"three passes a sender, {len(some)} timed and scaled",
        "peer_seconds": scaled,
        "ratio": scaled / seconds["ours"],
        "difference": difference,
    }


def three_passes(
    model: Any, base: Tensor, source: Tensor, senders: Sequence[Any], to: Any
) -> Tensor:
    """The same by the paper's algorithm, one sender at a time [sender, prompt]."""
    layers = range(model.cfg.n_layers)
    effects = []
    readers = [] if to == "logits" else [rp.parse(text) for text in to]
    with torch.no_grad():
        logits, clean = model.run_with_cache(base)
        _, other = model.run_with_cache(source)
        baseline = _difference(logits)
        for head in senders:
            hooks = [(hook_name(Attn(n)), _holding(clean[hook_name(Attn(n))])) for n in layers]
            z = clean[hook_name(head)].clone()
            z[:, -1, head.head] = other[hook_name(head)][:, -1, head.head]
            hooks[head.layer] = (hook_name(Head(head.layer, 0)), _holding(z))
            seen: dict[str, Tensor] = {}
            hooks += [(hook_name(reader), _keeping(seen, hook_name(reader))) for reader in readers]
            logits = model.run_with_hooks(base, fwd_hooks=hooks)
            if readers:
                writes = [
                    (hook_name(reader), _writing(seen[hook_name(reader)], reader.head))
                    for reader in readers
                ]
                logits = model.run_with_hooks(base, fwd_hooks=writes)
            effects.append(_difference(logits) - baseline)
    return torch.stack(effects)


def _holding(value: Tensor) -> Callable[..., Tensor]:
    return lambda activation, hook: value


def _keeping(seen: dict[str, Tensor], name: str) -> Callable[..., None]:
    def keep(activation: Tensor, hook: Any) -> None:
        seen[name] = activation.clone()

    return keep


def _writing(value: Tensor, head: int) -> Callable[..., Tensor]:
    def write(activation: Tensor, hook: Any) -> Tensor:
        activation = activation.clone()
        activation[:, -1, head] = value[:, -1, head]
        return activation

    return write


def path_grid(model: Any, places: Sequence[int]) -> dict[str, Any]:
    """One row: every head to every later head's query, beside TransformerLens 4.3's own tool.

    Rows before the first token that differs are the same in base and source, and cost us nothing.

    TransformerLens is timed on the 24 edges of one sender of the last layer but two, right after
    ours; the whole grid takes it thousands of forward passes.
    """
    from transformer_lens import patching

    base, source = path_prompts(places)
    metric = rp.logit_diff(ANSWER, FOIL)
    ends = rp.readers(*rp.inputs(model, "q"))
    senders = rp.heads(model)
    start = time.perf_counter()
    runs = rp.capture(model, base), rp.capture(model, source)
    how = rp.Path(to=ends, using=rp.Resample(runs[1]), mlps="freeze")
    found = rp.ablate(runs[0], senders, how, metric=metric)
    ours = time.perf_counter() - start
    n_edges = int((~found.total[..., 0].isnan()).sum())
    layer = model.cfg.n_layers - 3
    with torch.no_grad():
        _, clean = model.run_with_cache(source)
        _, corrupted = model.run_with_cache(base)
        start = time.perf_counter()
        theirs = patching.get_act_patch_direct_path(
            model,
            base,
            clean,
            corrupted,
            lambda logits: _difference(logits).mean(),
            layer,
            0,
            verbose=False,
        )
        seconds = time.perf_counter() - start
    n_timed = (model.cfg.n_layers - layer - 1) * model.cfg.n_heads
    row = found.patched[senders.index(Head(layer, 0))].mean(-1).unflatten(0, theirs.shape)
    difference = float((row - theirs)[layer + 1 :].abs().max())
    require_equal(difference)
    scaled = seconds / n_timed * n_edges
    return {
        "row": f"grid of {n_edges} head -> q edges, prompts differ at {places}",
        "ours": ours,
        "forwards": None,
        "peer": f"get_act_patch_direct_path, {n_timed} edges timed and scaled",
        "peer_seconds": scaled,
        "ratio": scaled / ours,
        "difference": difference,
    }


# Lenses

LENS_PROMPTS, LENS_LENGTH, STEP_TOKENS = 8, 128, 256


def logit_lens(model: Any, repeats: int) -> dict[str, Any]:
    """One row: top-10 and KL at every layer, beside the bare products with the unembedding."""
    tokens = lens_tokens()
    view = rp.ModelView(model)
    n_rows = view.n_layers + 1
    states = torch.randn(tokens.numel(), view.d_model)

    def ours() -> Tensor:
        found = rp.logit_lens(rp.capture(model, tokens)).measure("kl", top=10)
        return found["kl"].values[-1]

    def products() -> Tensor:
        with torch.no_grad():
            for _ in range(n_rows):
                for block in states.split(128):
                    block @ view.W_U
        return torch.zeros(LENS_PROMPTS, LENS_LENGTH)

    seconds, values = in_turn(repeats, ours=ours, products=products)
    return {
        "row": f"logit lens, top-10 and KL at {n_rows} rows, {LENS_PROMPTS} x {LENS_LENGTH}",
        "ours": seconds["ours"],
        "forwards": None,
        "peer": "the bare products with W_U (its forward pass is in ours)",
        "peer_seconds": seconds["products"],
        "ratio": seconds["products"] / seconds["ours"],
        "difference": float(values["ours"].abs().max()),  # KL(final || last row) is 0
    }


def lens_tokens() -> Tensor:
    """Random ids."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(50257, (LENS_PROMPTS, LENS_LENGTH), generator=generator)


def kl_step(model: Any, repeats: int, products: str) -> dict[str, Any]:
    """One row: gradients of a KL step at every layer, beside a plain autograd loop."""
    from resid_patching.lens.harvest import harvest
    from resid_patching.lens.steps import Teacher, kl_and_gradient
    from resid_patching.lens.tuned import site_rows
    from resid_patching.lens.unembed import LowUnembedding, Unembedding

    view = rp.ModelView(model)
    rows = site_rows("resid_pre", view.n_layers)[:-1]
    found = harvest(view, lens_tokens()[:3], rows, logits=True)
    states = [state[:STEP_TOKENS] for state in found.states]
    assert found.logits is not None
    final = found.logits[:STEP_TOKENS]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(768, 768, generator=generator) / 100 for _ in rows]
    readout = (LowUnembedding if products == "bfloat16" else Unembedding).of(view)

    def ours() -> Tensor:
        teacher = Teacher.of(readout, final)
        buffer = readout.buffer(min(readout.block_rows, STEP_TOKENS))
        kls = []
        for h, A in zip(states, weights, strict=True):
            kl, gradient = kl_and_gradient(readout, h + h @ A.T, teacher, buffer)
            _ = gradient.T @ h / len(h)
            kls.append(kl.mean())
        return torch.stack(kls)

    def theirs() -> Tensor:
        log_p = final.log_softmax(-1)
        p, kls = log_p.exp(), []
        for h, A in zip(states, weights, strict=True):
            A = A.clone().requires_grad_()
            normed = view.final_norm(h + h @ A.T)
            log_q = (normed @ view.W_U.detach() + view.b_U.detach()).log_softmax(-1)
            kl = (p * (log_p - log_q)).sum(-1).mean()
            kl.backward()
            kls.append(kl.detach())
        return torch.stack(kls)

    seconds, values = in_turn(repeats, ours=ours, theirs=theirs)
    difference = float((values["ours"] - values["theirs"]).abs().max())
    require_equal(difference, 2e-3)
    return {
        "row": f"KL step, {len(rows)} layers of {STEP_TOKENS} tokens, {products} products",
        "ours": seconds["ours"],
        "forwards": None,
        "peer": "plain autograd in float32",
        "peer_seconds": seconds["theirs"],
        "ratio": seconds["theirs"] / seconds["ours"],
        "difference": difference,
    }


def ridge(model: Any, repeats: int) -> dict[str, Any]:
    """One row: statistics of the regression, beside KL steps on as many tokens."""
    from resid_patching.lens.harvest import harvest
    from resid_patching.lens.loop import Layer, Plan, equip, take_step
    from resid_patching.lens.ridge import Statistics
    from resid_patching.lens.tuned import site_rows
    from resid_patching.lens.unembed import Unembedding

    view, tokens = rp.ModelView(model), lens_tokens()
    rows = site_rows("resid_pre", view.n_layers)[:-1]
    n_tokens = LENS_PROMPTS * (LENS_LENGTH - 1)

    def ours() -> Tensor:
        statistics = Statistics.empty(len(rows), view.d_model)
        found = harvest(view, tokens, rows, logits=False)
        statistics.add(found.states, found.last)
        return statistics.total

    zero = torch.zeros(768, 768), torch.zeros(768)
    plan = Plan(100, n_tokens, LENS_PROMPTS, "muon", 0.02, 1.0, 20, 3, seed=0)
    layers = [
        Layer(str(row), *(t.clone() for t in zero), 1.0, 0.0, *(t.clone() for t in zero))
        for row in rows
    ]
    for layer in layers:
        equip(layer, plan, 1.0)

    def theirs() -> Tensor:
        found = harvest(view, tokens, rows, logits=True)
        take_step(layers, plan, 0, found, Unembedding.of(view))
        return torch.zeros(())

    seconds, _ = in_turn(repeats, ours=ours, theirs=theirs)
    return {
        "row": f"ridge statistics of {n_tokens} tokens at {len(rows)} layers",
        "ours": seconds["ours"],
        "forwards": None,
        "peer": "our own KL step on as many tokens of each layer",
        "peer_seconds": seconds["theirs"],
        "ratio": seconds["theirs"] / seconds["ours"],
        "difference": 0.0,
    }


def require_equal(difference: float, tolerance: float = 1e-3) -> None:
    """Stops where the two sides did not compute the same numbers."""
    if not difference < tolerance:
        raise SystemExit(f"the two sides differ by {difference:.1e}; nothing is reported")


def main() -> None:
    """Runs the rows and prints them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--backend", choices=("hooked", "bridge"), default="bridge")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=("sweeps", "paths", "lens", "grid", "grid-early"),
        default=("sweeps", "paths", "lens"),
        help="the grids take minutes, and need TransformerLens 4.3",
    )
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    model = gpt2_shaped(arguments.backend)
    rows = []
    if "sweeps" in arguments.rows:
        rows += [zero_sweep(model, position, arguments.repeats) for position in (None, -1)]
    if "paths" in arguments.rows:
        rows.append(paths(model, "logits", "144 heads -> logits, last position", arguments.repeats))
        queries = ["9.9.q", "9.6.q", "10.0.q"]
        name = "144 heads -> q of three heads together, last position"
        rows.append(paths(model, queries, name, arguments.repeats))
    if "lens" in arguments.rows:
        rows.append(logit_lens(model, arguments.repeats))
        for products in ("float32", "bfloat16"):
            rows.append(kl_step(model, arguments.repeats, products))
        rows.append(ridge(model, arguments.repeats))
    if "grid" in arguments.rows:
        rows.append(path_grid(model, ONE_TOKEN))
    if "grid-early" in arguments.rows:
        rows.append(path_grid(model, THREE_TOKENS))
    print(f"{arguments.backend}, {arguments.threads} threads, {PROMPTS} x {LENGTH} tokens")
    print("| row | ours, s | plain forwards | peer, s | ratio | difference | peer |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        forwards = "" if row["forwards"] is None else f"{row['forwards']:.1f}"
        print(
            f"| {row['row']} | {row['ours']:.2f} | {forwards} | {row['peer_seconds']:.2f} | "
            f"{row['ratio']:.1f} | {row['difference']:.1e} | {row['peer']} |"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
