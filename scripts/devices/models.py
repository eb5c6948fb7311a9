"""Random models of a few architectures, in any dtype on any device, beside the same in float64.

Every parameter is random (unit gains and zero biases hide errors). The reference holds the very
numbers that the model holds, after rounding to its dtype, in float64 on the CPU. A third model is
the reference with every weight moved by one rounding more: what that does to a figure is how much
of it the dtype can carry at all.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

import resid_patching as rp

N_LAYERS, D_MODEL, N_HEADS, D_MLP, D_VOCAB, N_CTX, EPS = 3, 48, 4, 96, 131, 32, 1e-3
PROMPTS, LENGTH = 3, 9


@dataclass(frozen=True)
class Architecture:
    """One kind of model.

    Attributes:
        title: what it is.
        config: makes its Hugging Face configuration.
        hooked: build it as a HookedTransformer, which TransformerLens 4 no longer has.
    """

    title: str
    config: Callable[[], Any]
    hooked: bool = False


def _gpt2() -> Any:
    return transformers.GPT2Config(
        bos_token_id=0,
        eos_token_id=0,
        n_embd=D_MODEL,
        n_layer=N_LAYERS,
        n_head=N_HEADS,
        n_inner=D_MLP,
        vocab_size=D_VOCAB,
        n_positions=N_CTX,
        layer_norm_epsilon=EPS,
    )


def _llama() -> Any:
    return transformers.LlamaConfig(
        hidden_size=D_MODEL,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=2,
        intermediate_size=D_MLP,
        vocab_size=D_VOCAB,
        max_position_embeddings=N_CTX,
        rms_norm_eps=EPS,
    )


def _neox() -> Any:
    return transformers.GPTNeoXConfig(
        hidden_size=D_MODEL,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        intermediate_size=D_MLP,
        vocab_size=D_VOCAB,
        max_position_embeddings=N_CTX,
        layer_norm_eps=EPS,
        use_parallel_residual=True,
    )


GPT2 = Architecture("GPT-2", _gpt2)
LLAMA = Architecture("Llama, grouped queries", _llama)
NEOX = Architecture("GPT-NeoX, parallel", _neox)
HOOKED = Architecture("GPT-2, HookedTransformer", _gpt2, hooked=True)


def architectures(*, quick: bool) -> list[Architecture]:
    """Those that the installed TransformerLens can build; two where `quick`."""
    if quick:
        return [GPT2, LLAMA]
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return [GPT2, LLAMA, NEOX]
    return [GPT2, LLAMA, NEOX, HOOKED]


@dataclass(frozen=True)
class Subject:
    """One architecture in one dtype on one device."""

    architecture: Architecture
    dtype: torch.dtype
    device: torch.device
    seed: int = 0

    @cached_property
    def model(self) -> Any:
        """The model that is checked."""
        return self._build(self._weights, self.dtype, self.device)

    @cached_property
    def reference(self) -> Any:
        """The same numbers in float64 on the CPU."""
        return self._build(self._weights, torch.float64, torch.device("cpu"))

    @cached_property
    def nudged(self) -> Any:
        """The reference with each weight moved by up to one rounding of the dtype."""
        generator = torch.Generator("cpu").manual_seed(1)
        u = torch.finfo(self.dtype).eps / 2
        weights = {
            name: weight * (1 + u * (2 * _uniform(weight.shape, generator) - 1))
            for name, weight in self._weights.items()
        }
        return self._build(weights, torch.float64, torch.device("cpu"))

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        """Random weights in float64, rounded to the dtype."""
        generator = torch.Generator("cpu").manual_seed(self.seed)
        model = self._empty()
        parameters = dict(model.named_parameters())
        found = {}
        for name, parameter in parameters.items():
            is_gain = parameter.ndim == 1 and name.endswith(("weight", ".w"))
            noise = 2 * _uniform(parameter.shape, generator) - 1
            found[name] = (noise * 0.4 + is_gain).to(self.dtype).double()
        return found

    def _empty(self) -> Any:
        config = self.architecture.config()
        if not self.architecture.hooked:
            return transformers.AutoModelForCausalLM.from_config(config)
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        return HookedTransformer(
            HookedTransformerConfig(
                n_layers=N_LAYERS,
                d_model=D_MODEL,
                d_head=D_MODEL // N_HEADS,
                n_heads=N_HEADS,
                d_mlp=D_MLP,
                d_vocab=D_VOCAB,
                n_ctx=N_CTX,
                eps=EPS,
                act_fn="gelu_new",
                device="cpu",
            )
        )

    def _build(self, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> Any:
        model = torch.nn.Module.to(self._empty(), torch.float64)  # HookedTransformer's prints
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        model = torch.nn.Module.to(model, device, dtype).eval()
        if self.architecture.hooked:
            model.cfg.dtype, model.cfg.device = dtype, str(device)
            return model
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.forward = types.MethodType(_rms_norm, module)
        return build_bridge_from_module(
            model, type(model).__name__, hf_config=model.config, dtype=dtype, device=device
        ).eval()

    def runs(self, model: Any) -> tuple[rp.Run, rp.Run]:
        """A base and a source run of a model."""
        return rp.capture(model, ids(0)), rp.capture(model, ids(1))


def _uniform(shape: Any, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    """Hugging Face's RMSNorm without its detour through float32, where x is wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * normed.to(x.dtype)


def ids(seed: int) -> Tensor:
    """Ids of the prompts [PROMPTS, LENGTH]; those of two seeds share the first token."""
    generator = torch.Generator("cpu").manual_seed(seed)
    found = torch.randint(D_VOCAB, (PROMPTS, LENGTH), generator=generator, device="cpu")
    found[:, 0] = 7
    return found


def subjects(device: torch.device, dtypes: list[torch.dtype], *, quick: bool) -> Iterator[Subject]:
    """Every architecture in every dtype."""
    for dtype in dtypes:
        for architecture in architectures(quick=quick):
            yield Subject(architecture, dtype, device)
