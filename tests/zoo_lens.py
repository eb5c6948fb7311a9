"""Lenses and texts for tests."""

import copy
from typing import Any

import torch
import zoo

import resid_patching as rp


def random_lens(model: Any, *, site: str = "resid_pre", seed: int = 0, size: float = 0.5) -> Any:
    """Return a lens with every parameter random."""
    lens = rp.TunedLens.identity(model, site=site)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (lens.weight, lens.bias):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = size / parameter.shape[-1] ** 0.5 if parameter.ndim == 3 else size
            parameter.copy_(scale * noise)
    return lens


def random_windows(count: int, length: int = 16, d_vocab: int = 50, seed: int = 0) -> torch.Tensor:
    """Return ids [count, length] of a language with some structure: steps of a walk."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (count, length), generator=generator)
    return (steps.cumsum(1) + torch.randint(d_vocab, (count, 1), generator=generator)) % d_vocab


def twins(how: str) -> tuple[Any, Any]:
    """Return one GPT-2 as a bridge, and again with its weights processed by hand in float64.

    TransformerLens's own processing goes through float32. `fold`: the final norm's gain; `centre
    unembed`; `centre writes`: all weights that write to the stream.
    """
    original = zoo.hugging_face(zoo.gpt2_config())
    other = copy.deepcopy(original)
    body = other.transformer
    with torch.no_grad():
        if "fold" in how:
            other.lm_head.weight.mul_(body.ln_f.weight)
            body.ln_f.bias.div_(body.ln_f.weight)
            body.ln_f.weight.fill_(1)
        if "unembed" in how:
            other.lm_head.weight.sub_(other.lm_head.weight.mean(0))
        if "writes" in how:
            written = [body.wte.weight, body.wpe.weight]
            for block in body.h:
                for layer in (block.attn.c_proj, block.mlp.c_proj):
                    written += [layer.weight, layer.bias]
            for weight in written:
                weight.sub_(weight.mean(-1, keepdim=True))
    return zoo.bridge(original), zoo.bridge(other)
