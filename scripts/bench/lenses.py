"""Rows on lenses: reading, a KL step, ridge statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import resid_patching as rp
from bench.common import VOCAB, Case, Cases, D, forward_flops, ids

PROMPTS, LENGTH, STEP_TOKENS = 8, 128, 256


def reading(model: Any) -> Cases:
    """Top-10 and entropy at every layer and position."""
    tokens = ids(PROMPTS, LENGTH)
    view = rp.ModelView(model)
    n_rows = view.n_layers + 1

    def ours() -> Tensor:
        found = rp.logit_lens(rp.capture(model, tokens)).measure("entropy", top=10)
        return found["entropy"].values

    products = 2.0 * n_rows * tokens.numel() * D * VOCAB
    name = f"logit lens, top-10 and entropy at {n_rows} rows, {PROMPTS} x {LENGTH}"
    flops = forward_flops(PROMPTS, LENGTH) + products
    try:
        from transformer_lens.tools.analysis import logit_lens
    except ImportError:

        def theirs() -> Tensor:
            with torch.no_grad():
                _, cache = model.run_with_cache(tokens)
                stack = cache.accumulated_resid(incl_mid=False)
                found = []
                for state in stack:
                    logits = model.unembed(model.ln_final(state))
                    log_p = logits.log_softmax(-1)
                    logits.topk(10)
                    found.append(-(log_p.exp() * log_p).sum(-1))
            return torch.stack(found)

        peer = "accumulated_resid, ln_final and unembed, layer by layer"
    else:

        def theirs() -> Tensor:
            with torch.no_grad():
                found = logit_lens(model, tokens, positions=None, top_k=10)
            return found.readout.entropy

        peer = "tools.analysis.logit_lens"
    yield Case(name, ours, peer, theirs, flops=flops)


def fitting(model: Any) -> Cases:
    """A step on the KL divergence at every layer, and the statistics of the regression."""
    for products in ("float32", "bfloat16"):
        yield kl_step(model, products)
    yield ridge(model)


def kl_step(model: Any, products: str) -> Case:
    """Gradients of a KL step at every layer, beside a plain autograd loop."""
    from resid_patching.lens.harvest import harvest
    from resid_patching.lens.steps import Teacher, kl_and_gradient
    from resid_patching.lens.tuned import site_rows
    from resid_patching.lens.unembed import LowUnembedding, Unembedding

    view = rp.ModelView(model)
    rows = site_rows("resid_pre", view.n_layers)[:-1]
    found = harvest(view, ids(3, LENGTH), rows, logits=True)
    states = [state[:STEP_TOKENS] for state in found.states]
    assert found.logits is not None
    final = found.logits[:STEP_TOKENS]
    generator = torch.Generator().manual_seed(3)
    weights = [
        (torch.randn(D, D, generator=generator) / 100).to(view.device, view.compute_dtype)
        for _ in rows
    ]
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

    flops = 4.0 * len(rows) * STEP_TOKENS * (D * VOCAB + D * D)
    return Case(
        f"KL step, {len(rows)} layers of {STEP_TOKENS} tokens, {products} products",
        ours,
        "plain autograd in float32",
        theirs,
        flops=flops,
        tolerance=2e-3,
    )


def ridge(model: Any) -> Case:
    """Statistics of the regression, beside KL steps on as many tokens."""
    from resid_patching.lens.harvest import harvest
    from resid_patching.lens.loop import Layer, Plan, equip, take_step
    from resid_patching.lens.ridge import Statistics
    from resid_patching.lens.tuned import site_rows
    from resid_patching.lens.unembed import Unembedding

    view, tokens = rp.ModelView(model), ids(PROMPTS, LENGTH)
    rows = site_rows("resid_pre", view.n_layers)[:-1]
    n_tokens = PROMPTS * (LENGTH - 1)

    def ours() -> Tensor:
        statistics = Statistics.empty(len(rows), view.d_model)
        found = harvest(view, tokens, rows, logits=False)
        statistics.add(found.states, found.last)
        return torch.zeros(())

    zero = torch.zeros(D, D), torch.zeros(D)
    plan = Plan(100, n_tokens, PROMPTS, "muon", 0.02, 1.0, 20, 3, seed=0)
    layers = [
        Layer(str(row), *(t.clone() for t in zero), 1.0, 0.0, *(t.clone() for t in zero))
        for row in rows
    ]
    for layer in layers:
        equip(layer, plan, 1.0)

    def theirs() -> Tensor:
        found = harvest(view, tokens, rows, logits=True)
        take_step(layers, plan, 0, [found], Unembedding.of(view))
        return torch.zeros(())

    flops = forward_flops(PROMPTS, LENGTH) + len(rows) * n_tokens * 4.0 * D * D
    return Case(
        f"ridge statistics of {n_tokens} tokens at {len(rows)} layers",
        ours,
        "our own KL step on as many tokens (no numbers in common)",
        theirs,
        flops=flops,
    )
