"""Identities that hold on every device in every dtype, each with what rounding may make of it.

A number is rounded by up to u = eps / 2 of it, and n of these errors, of either sign, add up to
about sqrt(n) of one:

    allowed = SAFETY * sqrt(n) * u * size

`u` is that of our sums (float32, or float64 in float64 models) where both sides are ours, and that
of the model where one side is what the model itself computed. n and size stand with each identity:
n counts the writes that are added to the stream and, where a product is summed in the same dtype
(in bfloat16 it is summed in float32 and rounded once), the width it is summed over. Where nothing
may be rounded, nothing is allowed.

A figure of the model is compared with the same in float64 on the CPU, from the very same weights.
Moving every weight by up to u in float64 stands for rounding every product of it once:

    allowed = SAFETY * sqrt(width summed over in the dtype) * what that does to the figure
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import resid_patching as rp
from devices.models import D_MODEL, D_VOCAB, LENGTH, N_LAYERS, PROMPTS, Subject
from resid_patching.address import Attn, Head, hook_name
from resid_patching.lens.ridge import Statistics
from resid_patching.lens.steps import Teacher, kl_and_gradient
from resid_patching.lens.unembed import Unembedding

SAFETY = 8.0
ANSWER, FOIL = 11, 29
METRIC = rp.logit_diff(ANSWER, FOIL)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Finding:
    """One identity of one model.

    Attributes:
        name: the identity.
        error: how far its sides are apart.
        allowed: how far rounding may take them.
        why: how that was derived.
    """

    name: str
    error: float
    allowed: float
    why: str

    @property
    def holds(self) -> bool:
        """Whether it does; NaN does not."""
        return self.error <= self.allowed


Check = Callable[[Subject], Iterator[Finding]]


def check(subject: Subject) -> Iterator[Finding]:
    """Every identity of a model. One that raises is a finding too."""
    for one in CHECKS:
        try:
            yield from one(subject)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            yield Finding(one.__name__.replace("_", " "), math.inf, 0.0, text[:300])


def _wide_sums(subject: Subject) -> bool:
    """Whether products of the model are summed in a wider dtype than its own."""
    return subject.dtype in (torch.bfloat16, torch.float16)


def _rounding(
    subject: Subject, name: str, error: Tensor, n: int, size: Tensor, *, width: int = 0
) -> Finding:
    """An identity with the model's own numbers on one side.

    Args:
        subject: the model.
        name: the identity.
        error: one side less the other.
        n: roundings that do not depend on how products are summed.
        size: the size of what is rounded.
        width: terms of a product that is summed in the model's dtype.
    """
    n += 0 if _wide_sums(subject) else width
    return _allowed(name, error, n, size, torch.finfo(subject.dtype).eps / 2, "the model's u")


def _our_rounding(subject: Subject, name: str, error: Tensor, n: int, size: Tensor) -> Finding:
    """An identity of our own sums, in float32 or in float64."""
    dtype = torch.float64 if subject.dtype == torch.float64 else torch.float32
    return _allowed(name, error, n, size, torch.finfo(dtype).eps / 2, "our u")


def _allowed(name: str, error: Tensor, n: int, size: Tensor, u: float, whose: str) -> Finding:
    allowed = SAFETY * math.sqrt(n) * u * float(size.abs().max())
    return Finding(name, float(error.abs().max()), allowed, f"{SAFETY:g} sqrt({n}) {whose} x size")


def _exactly(name: str, error: Tensor | float) -> Finding:
    return Finding(name, float(torch.as_tensor(error).abs().max()), 0.0, "exact")


# Attribution


def attribution(subject: Subject) -> Iterator[Finding]:
    """Rows sum to the model's logit difference. n: writes and width; size: sum of |rows|."""
    run, _ = subject.runs(subject.model)
    for by in ("component", "head", "neuron"):
        found = rp.direct_logit_attribution(run, ANSWER, FOIL, by=by)
        size = found.values.abs().sum(0) + _logit_size(run)
        yield _rounding(
            subject,
            f"attribution by {by} = the model's value",
            found.total - found.model_value,
            2 * N_LAYERS,
            size,
            width=D_MODEL,
        )


def _logit_size(run: rp.Run) -> Tensor:
    return run.logits_at(-1)[..., [ANSWER, FOIL]].abs().sum(-1).to(run.view.compute_dtype)


def accumulated_attribution(subject: Subject) -> Iterator[Finding]:
    """Rows up to a layer = its state on the folded direction, over the last state's scale."""
    run, _ = subject.runs(subject.model)
    view, norm = run.view, run.view.final_norm
    found = rp.direct_logit_attribution(run, ANSWER, FOIL, by="component").values[:, :, 0]
    columns = view.unembed_columns(torch.tensor([ANSWER, FOIL], device=CPU))
    direction = norm.fold((columns[0] - columns[1])[None])[0]
    states = [run.fetch(rp.parse(f"resid_post.{n}"))[:, -1] for n in range(N_LAYERS)]
    wide = torch.stack([state.to(view.device, view.compute_dtype) for state in states])
    expected = wide @ direction / norm.scale(wide[-1])
    first = len(found) - 2 - 2 * N_LAYERS  # the embeddings; the last two are constants
    sums = found[:-2].cumsum(0)[first + 1 :: 2]
    yield _rounding(
        subject,
        "accumulated attribution = attribution of the stream",
        sums - expected,
        2 * N_LAYERS,
        found.abs().sum(0),
        width=D_MODEL,
    )


# Lenses


def logit_lens(subject: Subject) -> Iterator[Finding]:
    """The last row is the model's output; final norm and unembedding of the last state too."""
    run, _ = subject.runs(subject.model)
    logits = run.logits_at(None).to(run.view.compute_dtype)
    lens = rp.logit_lens(run)
    last = lens.logits(layer=f"resid_post.{N_LAYERS - 1}", positions=None)
    name = "logit lens, last layer = the model's logits"
    yield _rounding(subject, name, last - logits, 1, logits)
    with torch.no_grad():
        ours = run.view.readout(run.fetch(rp.parse(f"resid_post.{N_LAYERS - 1}")))
    name = "norm and unembedding of the last state = the model's logits"
    yield _rounding(subject, name, ours - logits, 2, logits, width=D_MODEL)


def tuned_lens(subject: Subject) -> Iterator[Finding]:
    """Before any fit it is the logit lens; from a file it is what was saved."""
    run, _ = subject.runs(subject.model)
    lens = rp.TunedLens.identity(subject.model)
    names = ("entropy", "kl", "cross_entropy")
    ours, theirs = lens(run).measure(*names), rp.logit_lens(run).measure(*names)
    apart = max(_apart(ours[name].values, theirs[name].values) for name in names)
    yield _exactly("tuned lens before any fit = logit lens", apart)
    generator = torch.Generator("cpu").manual_seed(2)
    with torch.no_grad():
        for parameter in lens.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=CPU)
            parameter.copy_(noise / D_MODEL)
    with tempfile.TemporaryDirectory() as folder:
        lens.save(folder)
        again = rp.TunedLens.load(folder, subject.model)
    apart = max(_apart(a, b) for a, b in zip(lens.parameters(), again.parameters(), strict=True))
    apart = max(apart, _apart(lens(run).kl.values, again(run).kl.values))
    yield _exactly("tuned lens saved and loaded = itself", apart)
    found = rp.direct_logit_attribution(run, ANSWER, FOIL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        path.write_text(found.to_json(), encoding="utf-8")
        read = rp.Attribution.from_json(path.read_text(encoding="utf-8"))
    yield _exactly("result as JSON and back = itself", _apart(read.values, found.values.cpu()))


def _apart(left: Tensor, right: Tensor) -> float:
    both = left.isnan() & right.isnan()
    return float((left - right).masked_fill(both, 0).detach().abs().max())


def ridge_statistics(subject: Subject) -> Iterator[Finding]:
    """Of two parts merged = of all in float64 on the CPU. n: tokens; size: largest entry."""
    run, _ = subject.runs(subject.model)
    states = [run.fetch(rp.parse(f"resid_post.{n}")).flatten(0, 1) for n in range(N_LAYERS)]
    cast = Unembedding.of(run.view).cast
    states = [cast(state) for state in states]
    home = rp.models.float64_home(run.view.device)
    found = Statistics.empty(N_LAYERS, D_MODEL, home)
    half = len(states[0]) // 2
    for part in (slice(0, half), slice(half, None)):
        found.add([state[part] for state in states], states[-1][part])
    last = states[-1].to(CPU, torch.float64)
    weight = 1 / last.pow(2).sum(-1)
    weights = weight[:, None] / weight.sum()
    centred = last - (weights * last).sum(0)
    error, size = torch.zeros(()), torch.zeros(())
    for number, state in enumerate(states):
        x = state.to(CPU, torch.float64)
        x = x - (weights * x).sum(0)
        for ours, theirs in ((found.xx[number], x), (found.xy[number], centred)):
            exact = (weight[:, None] * x).T @ theirs
            error = torch.maximum(error, (ours.cpu() - exact).abs().max())
            size = torch.maximum(size, exact.abs().max())
    n = PROMPTS * LENGTH
    yield _our_rounding(subject, "ridge statistics = float64", error, n, size)


def kl_step(subject: Subject) -> Iterator[Finding]:
    """KL and gradient = autograd's in float64 on the CPU. n: width and vocabulary."""
    run, _ = subject.runs(subject.model)
    unembedding = Unembedding.of(run.view)
    logits = run.logits_at(None).flatten(0, 1)
    states = unembedding.cast(run.fetch(rp.parse("resid_post.0")).flatten(0, 1))
    kl, gradient = kl_and_gradient(unembedding, states, Teacher.of(unembedding, logits))

    x = states.to(CPU, torch.float64).requires_grad_()
    norm = unembedding.norm
    exact = type(norm)(norm.kind, _wide(norm.gain), _wide(norm.bias), norm.eps)
    z = exact(x) @ _wide(unembedding.W_U) + _wide(unembedding.b_U)
    log_p = _wide(logits).log_softmax(-1)
    expected = (log_p.exp() * (log_p - z.log_softmax(-1))).sum(-1)
    expected.sum().backward()
    assert x.grad is not None
    size = z.detach().abs().max()  # KL is a difference of logits
    n = D_MODEL + D_VOCAB
    error = _wide(kl) - expected.detach()
    yield _our_rounding(subject, "KL of a step = autograd", error, n, size)
    # dKL/dx = N'(x)' W_U (q - p): the products are of width and vocabulary, at the size of W_U.
    size = _wide(unembedding.W_U).abs().max() * exact.gain.abs().max() / exact.scale(x).min()
    error = _wide(gradient) - x.grad
    name = "gradient of a KL step = autograd"
    yield _our_rounding(subject, name, error, n, 2 * size.detach())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(CPU, torch.float64)


# The model run again


def replay(subject: Subject) -> Iterator[Finding]:
    """A source's whole state put into the base gives the source's logits, by every route."""
    base, source = subject.runs(subject.model)
    expected, size = rp.measure(source, METRIC), _logit_size(source)
    for route in ("plain", "replay", "full"):
        routes = [route, "full"]
        found = rp.ablate(base, "resid_pre.1", rp.Resample(source), metric=METRIC, routes=routes)
        name = f"re-run from a source's state ({'/'.join(found.routes)}) = the source's logits"
        yield _rounding(
            subject,
            name,
            found.patched[0] - expected,
            2 * N_LAYERS,
            size,
            width=D_MODEL,
        )


def resampling(subject: Subject) -> Iterator[Finding]:
    """A run patched with itself changes nothing, and neither does a path from itself."""
    base, _ = subject.runs(subject.model)
    same, _ = subject.runs(subject.model)
    targets = [*rp.heads(subject.model), "attn.1", "mlp.1", "resid_post.1"]
    found = rp.ablate(base, targets, rp.Resample(same), metric=METRIC)
    yield _exactly("resampling from itself changes nothing", found.total)
    yield _exactly("resampling from itself has no direct effect", found.direct)
    how = rp.Path(to=["2.0.q", "2.1.v"], using=rp.Resample(same), mlps="recompute")
    found = rp.ablate(base, rp.heads(subject.model), how, metric=METRIC)
    yield _exactly("a path from itself changes nothing", found.total.nan_to_num())


def zero_sweep(subject: Subject) -> Iterator[Finding]:
    """Zeroed heads and layers = the same by run_with_hooks."""
    model, (base, _) = subject.model, subject.runs(subject.model)
    targets: list[Any] = [*rp.heads(model), *(Attn(layer) for layer in range(N_LAYERS))]
    found = rp.ablate(base, targets, rp.Zero(), metric=METRIC, positions=-1)
    effects = []
    with torch.no_grad():
        clean = _difference(model(base.prompts.tokens))
        for target in targets:
            hooks = [(hook_name(target), _zeroing(target))]
            logits = model.run_with_hooks(base.prompts.tokens, fwd_hooks=hooks)
            effects.append(_difference(logits) - clean)
    yield _rounding(
        subject,
        "zero sweep = run_with_hooks",
        found.total.to(CPU) - torch.stack(effects).to(CPU),
        2 * N_LAYERS,
        _logit_size(base) * 2,
        width=D_MODEL,
    )


def _difference(logits: Tensor) -> Tensor:
    last = logits[:, -1].to(CPU, torch.float64)
    return last[:, ANSWER] - last[:, FOIL]


def _zeroing(target: Any) -> Callable[..., Tensor]:
    def zero(activation: Tensor, hook: Any) -> Tensor:
        activation = activation.clone()
        if isinstance(target, Head):
            activation[:, -1, target.head] = 0
        else:
            activation[:, -1] = 0
        return activation

    return zero


def paths(subject: Subject) -> Iterator[Finding]:
    """The closed form = forward passes with hooks (in low precision both are such passes)."""
    base, source = subject.runs(subject.model)
    heads = rp.heads(subject.model)
    for to in ("logits", ("2.0.q", "2.1.v")):
        for mlps in ("freeze", "recompute"):
            ends = to if isinstance(to, str) else list(to)
            how = rp.Path(to=ends, using=rp.Resample(source), mlps=mlps)
            ours = rp.ablate(base, heads, how, metric=METRIC, positions=-1)
            hooked = rp.ablate(base, heads, how, metric=METRIC, positions=-1, routes=["full"])
            name = f"path to {to if isinstance(to, str) else ', '.join(to)}, {mlps} = hooked"
            yield _rounding(
                subject,
                name,
                (ours.total - hooked.total).nan_to_num(),
                2 * N_LAYERS,
                _logit_size(base) * 2,
                width=D_MODEL,
            )


# Beside float64 on the CPU


def _figures(subject: Subject, model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Figures, each with what its rounding is that of: an effect is a difference of two passes."""
    base, source = subject.runs(model)
    lens = rp.logit_lens(base).measure("entropy", "kl")
    path = rp.Path(to=["2.0.q", "2.1.v"], using=rp.Resample(source), mlps="recompute")
    heads = rp.heads(model)
    zero = rp.ablate(base, heads, rp.Zero(), metric=METRIC)
    resampled = rp.ablate(base, heads, rp.Resample(source), metric=METRIC)
    sent = rp.ablate(base, heads, path, metric=METRIC, positions=-1)
    alone = {
        "attribution": rp.direct_logit_attribution(base, ANSWER, FOIL, by="head").values,
        "logits": base.logits_at(None),
        "entropy of the logit lens": lens["entropy"].values,
        "KL of the logit lens": lens["kl"].values,
        "direct effects": zero.direct,
        "write shares": rp.stream_report(base).share,
    }
    effects = {"zero sweep": zero, "resampling": resampled, "paths": sent}
    return {name: (values, values) for name, values in alone.items()} | {
        name: (effect.total, effect.patched) for name, effect in effects.items()
    }


def beside_float64(subject: Subject) -> Iterator[Finding]:
    """Every figure = the same in float64 on the CPU, as near as the dtype can carry it."""
    found = _figures(subject, subject.model)
    exact = _figures(subject, subject.reference)
    nudged = _figures(subject, subject.nudged)
    width = 1 if _wide_sums(subject) else D_MODEL
    for name, (expected, rounded) in exact.items():
        error = _apart(found[name][0].to(CPU, torch.float64), expected)
        allowed = SAFETY * math.sqrt(width) * _apart(nudged[name][1], rounded)
        why = f"{SAFETY:g} sqrt({width}) x what one rounding of all weights does in float64"
        if subject.dtype == torch.float64 and subject.device != CPU:
            # Tables of rotary positions are made in float32, on either device its own.
            size = float(rounded.nan_to_num().abs().max())
            allowed += SAFETY * torch.finfo(torch.float32).eps * size
            why += ", and of rotary tables in float32"
        yield Finding(f"{name} = float64 on the CPU", error, allowed, why)


CHECKS: tuple[Check, ...] = (
    attribution,
    accumulated_attribution,
    logit_lens,
    tuned_lens,
    ridge_statistics,
    kl_step,
    replay,
    resampling,
    zero_sweep,
    paths,
    beside_float64,
)
