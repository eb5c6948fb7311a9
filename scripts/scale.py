"""What a lens fit and a full path sweep cost on a model of any size, from its shape.

Prints the tables of docs/scale.md, where the formulas stand with their symbols. `--measure` runs
a fit and a sweep on a small random GPT-2 here and sets what torch counts beside the formulas.

    python scripts/scale.py [--tokens N] [--steps N] [--prompts N] [--length N] [--measure]
        [--write docs/scale.md]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from marks import put_between  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_mlp: int
    d_vocab: int
    gated: bool = False
    weight_bytes: int = 4

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_heads

    @property
    def attention(self) -> int:
        """Weights of a block's attention."""
        return 2 * self.d_model * self.d_head * (self.n_heads + self.n_kv_heads)

    @property
    def mlp(self) -> int:
        """Weights of a block's MLP."""
        return (3 if self.gated else 2) * self.d_model * self.d_mlp

    @property
    def unembedding(self) -> int:
        """Weights of the unembedding."""
        return self.d_model * self.d_vocab

    @property
    def weights(self) -> int:
        """All matrices; an untied embedding is as large as the unembedding."""
        embeddings = self.unembedding * (2 if self.gated else 1)
        return self.n_layers * (self.attention + self.mlp) + embeddings

    def block(self, keys: float) -> float:
        """Operations of one block on one token that attends to so many keys."""
        return 2 * (self.attention + self.mlp) + 4 * keys * self.n_heads * self.d_head


SHAPES = (
    Shape("GPT-2 small", 12, 768, 12, 12, 3072, 50257),
    Shape("GPT-2 XL", 48, 1600, 25, 25, 6400, 50257),
    Shape("8B like Llama 3", 32, 4096, 32, 8, 14336, 128256, gated=True, weight_bytes=2),
    Shape("70B like Llama 3", 80, 8192, 64, 8, 28672, 128256, gated=True, weight_bytes=2),
)
SMALL = Shape("random GPT-2", 4, 96, 6, 6, 384, 3001)
WIDE = Shape("random GPT-2", 8, 512, 8, 8, 512, 3001)  # for memory: squares of d_model show


@dataclass(frozen=True)
class Fit:
    """The settings of a lens fit; those of `rp.fit_tuned_lens` by default."""

    tokens: int = 1_000_000
    steps: int = 100
    length: int = 256
    step_windows: int = 2
    step_tokens: int = 256
    validation_tokens: int = 1024

    @property
    def step_positions(self) -> int:
        """Positions of a step's windows; the first of each is left out."""
        return self.step_windows * (self.length - 1)


WIDE_FIT = Fit(tokens=8192, steps=20, length=64, step_windows=8)


def fit_flops(shape: Shape, fit: Fit) -> dict[str, float]:
    """Operations of a fit by part, two a multiply-add."""
    s, L, d = shape, shape.n_layers, shape.d_model
    fitted = fit.tokens * (fit.length - 1) / fit.length
    ran = fit.step_windows * fit.length * (L * s.block(fit.length) + 2 * s.unembedding)
    teacher = 2 * fit.step_positions * s.unembedding
    a_layer = fit.step_tokens * (4 * s.unembedding + 4 * d**2)
    return {
        "harvest": fit.tokens * L * s.block(fit.length),
        "statistics": 4 * fitted * L * d**2,
        "regressions": L * 23 * d**3,
        "steps: model": fit.steps * ran,
        "steps: unembedding": fit.steps * (teacher + L * a_layer),
        "steps: Muon": fit.steps * L * 30 * d**3,
    }


def fit_bytes(shape: Shape, fit: Fit) -> dict[str, float]:
    """What a fit holds, in bytes."""
    L, d = shape.n_layers, shape.d_model
    return {
        "weights": shape.weight_bytes * shape.weights,
        "statistics": 2 * statistics_bytes(shape),  # those of a batch beside those of all
        "translators": 4 * 4 * L * (d**2 + d),  # the lens, the master, its best, its momentum
        "states": 4 * (fit.validation_tokens + 1024) * (L + 1) * d,  # validation's, a batch's
        "logits": 4 * (fit.step_windows * fit.length * shape.d_vocab + 2**24),
    }


def statistics_bytes(shape: Shape) -> float:
    """The regression's sums, in float64."""
    L, d = shape.n_layers, shape.d_model
    return 8 * (L * (2 * d**2 + d) + d + 1)


def gradient_bytes(shape: Shape) -> float:
    """The gradients of a step, in float64."""
    return 8 * shape.n_layers * (shape.d_model**2 + shape.d_model)


@dataclass(frozen=True)
class Sweep:
    """Every head to every later head's q, of some prompts, at all their positions."""

    prompts: int = 8
    length: int = 15

    @property
    def rows(self) -> int:
        """Tokens."""
        return self.prompts * self.length


def edges(shape: Shape) -> int:
    """How many (sender, reader) pairs."""
    return shape.n_heads**2 * shape.n_layers * (shape.n_layers - 1) // 2


def sweep_flops(shape: Shape, sweep: Sweep) -> dict[str, float]:
    """Operations of a sweep by part."""
    s, L, h, rows = shape, shape.n_layers, shape.n_heads, sweep.rows
    captures = 2 * rows * L * s.block(sweep.length)
    carried = sum(2 * rows * h * (layer + 1) * s.mlp for layer in range(L - 1))
    read = edges(s) * 2 * rows * s.d_model * s.d_head
    again = 0.0
    for layer in range(1, L):
        last = layer == L - 1
        own = 4 * sweep.length * s.d_head + 2 * s.d_head * s.d_model + 2 * s.mlp
        share = 1 / sweep.length if last else 1.0  # in the last layer only the rows that are read
        again += h * h * layer * rows * share * own
        if not last:
            again += h * h * layer * rows * (L - 2 - layer) * s.block(sweep.length)
            keys_and_values = 2 * 2 * s.d_model * s.n_kv_heads * s.d_head
            one = 2 * s.attention - keys_and_values + 2 * s.mlp + 4 * sweep.length * s.d_model
            again += h * h * layer * (rows * keys_and_values + sweep.prompts * one)
    return {"captures": captures, "closed form": carried + read, "run again": again}


# Tables


def tables(fit: Fit, sweep: Sweep) -> str:
    """The tables, as Markdown."""
    parts = [
        f"A fit on {fit.tokens:,} tokens in windows of {fit.length}, {fit.steps} steps of "
        f"{fit.step_windows} windows and {fit.step_tokens} positions a layer; operations in "
        "TFLOP.\n",
        _table("model", SHAPES, lambda shape: _all(fit_flops(shape, fit), 1e12)),
        "Memory of that fit, in GB (model weights in float32 for GPT-2, in bfloat16 for the "
        "others).\n",
        _table("model", SHAPES, lambda shape: _all(fit_bytes(shape, fit), 1e9)),
        "What the processes of a fit add up: the regression's sums once, the gradients each "
        "step; in MB, in float64.\n",
        _table(
            "model",
            SHAPES,
            lambda shape: {
                "sums, once": statistics_bytes(shape) / 1e6,
                "gradients, a step": gradient_bytes(shape) / 1e6,
                "gradients, all steps": fit.steps * gradient_bytes(shape) / 1e6,
            },
        ),
        f"All heads to the q of all later heads, {sweep.prompts} prompts of {sweep.length} "
        "tokens; operations in TFLOP. The last column is the same by one forward pass an edge.\n",
        _table(
            "model",
            SHAPES,
            lambda shape: {
                "edges": edges(shape),
                **_all(sweep_flops(shape, sweep), 1e12),
                "a pass an edge": edges(shape)
                * sweep.rows
                * shape.n_layers
                * shape.block(sweep.length)
                / 1e12,
            },
        ),
    ]
    return "\n".join(parts)


def _all(parts: dict[str, float], unit: float) -> dict[str, float]:
    found = {name: value / unit for name, value in parts.items()}
    return found | {"all": sum(found.values())}


def _table(
    head: str, shapes: tuple[Shape, ...], values: Callable[[Shape], dict[str, float]]
) -> str:
    rows = [(shape.name, values(shape)) for shape in shapes]
    lines = [(head, *rows[0][1]), *[(name, *map(_number, found.values())) for name, found in rows]]
    lines.insert(1, ("---",) * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 1 else f"{value:.3g}"


# Measured


def measure() -> str:
    """What torch counts on a small random GPT-2, beside the formulas."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    alone, together = _in_processes(1), _in_processes(2)
    of_steps = 8 * WIDE_FIT.steps * WIDE.n_layers * (WIDE.d_model**2 + WIDE.d_model + 1)
    added = statistics_bytes(WIDE) + of_steps
    rows = [*_measure_fit(), *_measure_sweep(), *_measure_sums(), *_measure_memory()]
    rows.append(
        (f"bytes that each of two adds up in {WIDE_FIT.steps} steps", added, together["bytes"])
    )
    lines = [("what", "formula", "counted", "counted / formula"), ("---",) * 4]
    lines += [(n, f"{a:.4g}", f"{b:.4g}", f"{b / a:.3f}") for n, a, b in rows]
    about = (
        f"{SMALL.n_layers} layers, d_model {SMALL.d_model}, {SMALL.n_heads} heads, d_mlp "
        f"{SMALL.d_mlp}, vocabulary {SMALL.d_vocab}, random weights in float32; operations as "
        f"`torch.utils.flop_counter` counts them, torch {torch.__version__}.\n"
    )
    times = (
        f"\nA fit of d_model {WIDE.d_model}, {WIDE.n_layers} layers, {WIDE_FIT.tokens:,} tokens "
        f"and {WIDE_FIT.steps} steps of {WIDE_FIT.step_windows} windows, one thread a process: "
        f"{alone['seconds']:.1f} s in one process; {together['seconds']:.1f} s in two on this "
        f"machine, {together['in_sums']:.1f} s of them in sums (with the wait for the slower one), "
        f"over which {together['bytes'] / 1e6:.0f} MB went: gloo, no network between.\n"
    )
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return about + "\n" + table + times


def _model(shape: Shape = SMALL) -> Any:
    import torch
    import transformers
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=shape.d_model,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        n_inner=shape.d_mlp,
        vocab_size=shape.d_vocab,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=config).eval()


def _counted(call: Callable[[], Any]) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())


def _measure_fit() -> list[tuple[str, float, float]]:
    import torch

    import resid_patching as rp
    from resid_patching.lens.harvest import harvest
    from resid_patching.lens.ridge import Statistics
    from resid_patching.lens.steps import Teacher, kl_and_gradient
    from resid_patching.lens.tuned import site_rows
    from resid_patching.lens.unembed import Unembedding

    view = rp.ModelView(_model())
    fit = Fit(tokens=1024, length=64, steps=1, step_tokens=128)
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(SMALL.d_vocab, (16, 64), generator=generator, device="cpu")
    rows = site_rows("resid_pre", SMALL.n_layers)[:-1]
    expected = fit_flops(SMALL, fit)
    kept: list[Any] = []
    found = [
        (
            "fit: harvest",
            expected["harvest"],
            _counted(lambda: kept.append(harvest(view, ids, rows, logits=False))),
        )
    ]
    statistics = Statistics.empty(SMALL.n_layers, SMALL.d_model)
    counted = _counted(lambda: statistics.add(kept[0].states, kept[0].last))
    found.append(("fit: statistics", expected["statistics"], counted))
    unembedding = Unembedding.of(view)

    def step() -> None:
        got = harvest(view, ids[:2], rows, logits=True)
        teacher = Teacher.of(unembedding, got.logits)
        for states in got.states:
            x = states[: fit.step_tokens]
            moved = x + torch.nn.functional.linear(x, torch.zeros(SMALL.d_model, SMALL.d_model))
            _, gradient = kl_and_gradient(unembedding, moved, teacher.take(slice(0, len(x))))
            _ = gradient.T @ x

    # 126 positions of two windows, so that a layer takes all of them.
    real = Fit(tokens=1024, length=64, steps=1, step_tokens=fit.step_positions)
    expected = fit_flops(SMALL, real)
    formula = expected["steps: model"] + expected["steps: unembedding"]
    found.append(("fit: a step without Muon", formula, _counted(step)))
    weight = torch.randn(SMALL.d_model, SMALL.d_model, generator=generator)
    weight.grad = torch.randn(SMALL.d_model, SMALL.d_model, generator=generator)
    muon = torch.optim.Muon([weight], lr=0.0, weight_decay=0.0)
    one = expected["steps: Muon"] / SMALL.n_layers
    found.append(("fit: Muon, one layer", one, _counted(muon.step)))
    return found


def _measure_sweep() -> list[tuple[str, float, float]]:
    import torch

    import resid_patching as rp

    model = _model()
    sweep = Sweep(prompts=4, length=12)
    generator = torch.Generator("cpu").manual_seed(0)
    size = (2, sweep.prompts, sweep.length)
    base, source = torch.randint(SMALL.d_vocab, size, generator=generator, device="cpu")
    rp.ablate(rp.capture(model, base), "0.0", rp.Zero(), metric=rp.logit_diff(1, 2))

    def run() -> None:
        runs = rp.capture(model, base), rp.capture(model, source)
        how = rp.Path(to=_queries(), using=rp.Resample(runs[1]), mlps="recompute")
        rp.ablate(runs[0], rp.heads(model), how, metric=rp.logit_diff(1, 2))

    formula = sum(sweep_flops(SMALL, sweep).values())
    return [("sweep: every head to every later q", formula, _counted(run))]


def _queries() -> Any:
    import resid_patching as rp

    layers, heads = range(1, SMALL.n_layers), range(SMALL.n_heads)
    return rp.readers(*[f"{layer}.{head}.q" for layer in layers for head in heads])


def _measure_sums() -> list[tuple[str, float, float]]:
    import torch

    from resid_patching.lens.ridge import Statistics

    held = vars(Statistics.empty(SMALL.n_layers, SMALL.d_model)).values()
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    counted = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return [("bytes of the regression's sums", statistics_bytes(SMALL), float(counted))]


def _measure_memory() -> list[tuple[str, float, float]]:
    import torch
    from bench.common import peak_mb

    import resid_patching as rp

    model = _model(WIDE)
    fit = Fit(tokens=4096, length=64, steps=3)
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(WIDE.d_vocab, (64 + 16, 64), generator=generator, device="cpu")
    settings: dict[str, Any] = {"steps": fit.steps, "length": fit.length, "progress": False}
    held = fit_bytes(WIDE, fit)
    formula = (sum(held.values()) - held["weights"]) / 1e6
    peak = peak_mb(lambda: rp.fit_tuned_lens(model, ids, **settings)) * 2**20 / 1e6
    return [(f"MB of a fit above its model, d_model {WIDE.d_model}", formula, peak)]


def _in_processes(n: int) -> dict[str, float]:
    """A fit under torchrun: its seconds, those in sums, and bytes that a process added up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        command = [sys.executable, *launch, __file__, "--team-fit", str(path)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(path.read_text(encoding="utf-8"))


def _fit_in_team(path: Path) -> None:
    import torch

    import resid_patching as rp

    spent = {"bytes": 0.0, "in_sums": 0.0}
    plain = rp.Team.sum

    def counted(self: Any, tensor: Any) -> Any:
        start = time.perf_counter()
        plain(self, tensor)
        spent["in_sums"] += time.perf_counter() - start
        spent["bytes"] += tensor.numel() * tensor.element_size()
        return tensor

    model = _model(WIDE)
    generator = torch.Generator("cpu").manual_seed(0)
    n_windows = WIDE_FIT.tokens // WIDE_FIT.length + 16
    ids = torch.randint(WIDE.d_vocab, (n_windows, WIDE_FIT.length), generator=generator)
    team = rp.team()
    rp.Team.sum = counted  # type: ignore[method-assign]
    team.barrier()
    start = time.perf_counter()
    rp.fit_tuned_lens(
        model,
        ids,
        steps=WIDE_FIT.steps,
        step_windows=WIDE_FIT.step_windows,
        length=WIDE_FIT.length,
        progress=False,
        team=team,
    )
    found = {"seconds": time.perf_counter() - start, **spent}
    if team.is_first:
        path.write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """Prints the tables, and writes them between their marks where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=Fit.tokens)
    parser.add_argument("--steps", type=int, default=Fit.steps)
    parser.add_argument("--prompts", type=int, default=Sweep.prompts)
    parser.add_argument("--length", type=int, default=Sweep.length, help="of the sweep's prompts")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("--team-fit", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.team_fit:
        _fit_in_team(Path(arguments.team_fit))
        return
    fit = Fit(tokens=arguments.tokens, steps=arguments.steps)
    found = {"tables": tables(fit, Sweep(arguments.prompts, arguments.length))}
    if arguments.measure:
        found["measured"] = measure()
    for name, text in found.items():
        print(text)
        if arguments.write:
            put_between(Path(arguments.write), f"<!-- {name} -->", f"<!-- {name}: end -->", text)


if __name__ == "__main__":
    main()
