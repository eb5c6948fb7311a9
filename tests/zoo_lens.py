"""Lenses and texts for tests."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import zoo
from safetensors import safe_open

import resid_patching as rp
from resid_patching.lens import checkpoint


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


def rewrite(
    folder: Path,
    change: Callable[[dict[str, Any]], Any],
    tensors: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Change a lens in a folder as one who knows its format would: both copies, new checksum."""
    with safe_open(str(folder / checkpoint.PARAMS), "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
    config = json.loads((folder / checkpoint.CONFIG).read_text(encoding="utf-8"))
    if tensors is not None:
        tensors(found)
        config["params_sha256"] = checkpoint.hash_tensors(found)
    change(config)
    text = json.dumps(config)
    (folder / checkpoint.PARAMS).write_bytes(safetensors.torch.save(found, {"config": text}))
    (folder / checkpoint.CONFIG).write_text(text, encoding="utf-8")


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
