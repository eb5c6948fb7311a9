"""Small models with every parameter random, for tests: unit gains and zero biases hide errors.

Three layers, d_model 32, four heads, float64 unless asked otherwise. A `Cell` is one combination
of what blocks can be; `build` makes it as a HookedTransformer (where the installed TransformerLens
has one) or as a TransformerBridge over a Hugging Face model. `named` gives further architectures
as bridges, `text_model` models with a tokenizer that were loaded from a folder.
"""

from __future__ import annotations

import atexit
import copy
import functools
import itertools
import json
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module

import resid_patching as rp

torch.set_num_threads(1)  # on models this small, threads only wait for each other

N_LAYERS, D_MODEL, N_HEADS, D_MLP, D_VOCAB, N_CTX, EPS = 3, 32, 4, 64, 50, 64, 1e-3

try:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    HAS_HOOKED = True
except ImportError:  # TransformerLens 4
    HAS_HOOKED = False
BACKENDS = ("hooked", "bridge") if HAS_HOOKED else ("bridge",)
GRAINS = ("component", "head", "neuron")
RAGGED = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28], [31, 41, 5, 9, 26]]
"""Token ids of three prompts of different lengths."""


@dataclass(frozen=True)
class Cell:
    """One combination of what a model can be made of."""

    norm: str = "LN"
    parallel: bool = False
    grouped: bool = False
    tied: bool = False
    folded: bool = False

    def __str__(self) -> str:
        words = (
            self.norm,
            "parallel" if self.parallel else "sequential",
            "grouped" if self.grouped else "full",
            "tied" if self.tied else "untied",
            "folded" if self.folded else "raw",
        )
        return "-".join(words)


MATRIX = tuple(Cell(*choice) for choice in itertools.product(("LN", "RMS"), *[(False, True)] * 4))


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every parameter: gains around 1, everything else around 0 with spread 1/4."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = parameter.ndim == 1 and name.endswith(("weight", ".w"))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / 4 + (1.0 if is_gain else 0.0))


@functools.cache
def build(backend: str, cell: Cell = Cell(), dtype: torch.dtype = torch.float64) -> Any:
    """Return the model of a cell; shared between tests, so nobody may change it."""
    return fresh(backend, cell, dtype)


def fresh(backend: str, cell: Cell = Cell(), dtype: torch.dtype = torch.float64) -> Any:
    """Return the model of a cell, a new one that may be changed."""
    return _hooked(cell, dtype) if backend == "hooked" else _bridge_of(cell, dtype)


# HookedTransformer


def _hooked(cell: Cell, dtype: torch.dtype, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "n_layers": N_LAYERS,
        "d_model": D_MODEL,
        "n_heads": N_HEADS,
        "d_head": D_MODEL // N_HEADS,
        "d_mlp": D_MLP,
        "d_vocab": D_VOCAB,
        "n_ctx": N_CTX,
        "eps": EPS,
        "act_fn": "gelu_new",
        "normalization_type": cell.norm,
        "final_rms": cell.norm == "RMS",
        "parallel_attn_mlp": cell.parallel,
        "n_key_value_heads": 2 if cell.grouped else None,
        "model_name": "toy",
        "dtype": dtype,
        "device": "cpu",
        "seed": 0,
    }
    model = HookedTransformer(HookedTransformerConfig(**{**settings, **changes}))
    randomise(model)
    if cell.tied:
        model.unembed.W_U.data = model.embed.W_E.data.T.contiguous()
    if cell.folded:
        model.load_and_process_state_dict(
            {key: value.clone() for key, value in model.state_dict().items()},
            fold_ln=True,
            center_writing_weights=cell.norm == "LN",
            center_unembed=True,
            fold_value_biases=True,
        )
    return model.eval()


@functools.cache
def hooked_variant(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return a HookedTransformer with changes to its configuration; nobody may change it."""
    return _hooked(Cell(), dtype, **changes)


SOFTCAP = 2.0


def softcapped(backend: str) -> Any:
    """Return a model that caps its logits; as a bridge it is a Gemma-2."""
    if backend == "hooked":
        return hooked_variant(output_logits_soft_cap=SOFTCAP)
    return named("gemma2")


# TransformerBridge


_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "intermediate_size": D_MLP,
    "vocab_size": D_VOCAB,
    "max_position_embeddings": N_CTX,
}
_RMS_LIKE = {**_LLAMA_LIKE, "rms_norm_eps": EPS}
_GPT2_LIKE: dict[str, Any] = {
    "n_embd": D_MODEL,
    "n_layer": N_LAYERS,
    "n_head": N_HEADS,
    "vocab_size": D_VOCAB,
    "n_positions": N_CTX,
    "layer_norm_epsilon": EPS,
}
_NEOX_LIKE = {**_LLAMA_LIKE, "layer_norm_eps": EPS}

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(**_GPT2_LIKE, tie_word_embeddings=True),
    "gpt2_untied": lambda: transformers.GPT2Config(**_GPT2_LIKE, tie_word_embeddings=False),
    "neox_parallel": lambda: transformers.GPTNeoXConfig(**_NEOX_LIKE, use_parallel_residual=True),
    "neox_sequential": lambda: transformers.GPTNeoXConfig(
        **_NEOX_LIKE, use_parallel_residual=False
    ),
    "pythia": lambda: transformers.GPTNeoXConfig(
        **_NEOX_LIKE,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama": lambda: transformers.LlamaConfig(
        **_RMS_LIKE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama_grouped": lambda: transformers.LlamaConfig(**_RMS_LIKE, num_key_value_heads=2),
    "mistral": lambda: transformers.MistralConfig(
        **_RMS_LIKE, num_key_value_heads=2, sliding_window=4
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_RMS_LIKE, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**_RMS_LIKE, num_key_value_heads=2, head_dim=8),
    "gemma": lambda: transformers.GemmaConfig(**_RMS_LIKE, num_key_value_heads=1, head_dim=8),
    "gptj": lambda: transformers.GPTJConfig(**_GPT2_LIKE, rotary_dim=4),
    "phi": lambda: transformers.PhiConfig(**_NEOX_LIKE),
    "phi3": lambda: transformers.Phi3Config(
        **_RMS_LIKE, num_key_value_heads=2, sliding_window=4, pad_token_id=0
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=D_MODEL,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        ffn_dim=D_MLP,
        vocab_size=D_VOCAB,
        max_position_embeddings=N_CTX,
        word_embed_proj_dim=D_MODEL,
    ),
    "neo": lambda: transformers.GPTNeoConfig(
        hidden_size=D_MODEL,
        num_layers=N_LAYERS,
        num_heads=N_HEADS,
        vocab_size=D_VOCAB,
        max_position_embeddings=N_CTX,
        attention_types=[[["global", "local", "global"], 1]],
        window_size=4,
    ),
    "falcon": lambda: transformers.FalconConfig(
        hidden_size=D_MODEL,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        vocab_size=D_VOCAB,
        alibi=False,
        new_decoder_architecture=False,
        parallel_attn=True,
        multi_query=True,
    ),
    "bloom": lambda: transformers.BloomConfig(
        hidden_size=D_MODEL, n_layer=N_LAYERS, n_head=N_HEADS, vocab_size=D_VOCAB
    ),
    "mpt": lambda: transformers.MptConfig(
        d_model=D_MODEL, n_layers=N_LAYERS, n_heads=N_HEADS, vocab_size=D_VOCAB, max_seq_len=N_CTX
    ),
    # What follows normalises or rescales where parts cannot be told apart, or is no decoder.
    "gemma2": lambda: transformers.Gemma2Config(
        **_RMS_LIKE,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=SOFTCAP,
        sliding_window=8,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_RMS_LIKE,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmo": lambda: transformers.OlmoConfig(**_LLAMA_LIKE),
    "olmo2": lambda: transformers.Olmo2Config(**_RMS_LIKE, attention_bias=True),
    "mixtral": lambda: transformers.MixtralConfig(
        **_RMS_LIKE, num_key_value_heads=2, num_local_experts=4
    ),
    "granite": lambda: transformers.GraniteConfig(
        **_RMS_LIKE, residual_multiplier=0.3, embedding_multiplier=2.0, logits_scaling=3.0
    ),
    "granite_unscaled": lambda: transformers.GraniteConfig(
        **_RMS_LIKE,
        residual_multiplier=0.3,
        embedding_multiplier=2.0,
        logits_scaling=1.0,
        attention_bias=True,
        mlp_bias=True,
    ),
    "cohere": lambda: transformers.CohereConfig(**_NEOX_LIKE, logit_scale=0.25),
    "bert": lambda: transformers.BertConfig(**_LLAMA_LIKE, is_decoder=False),
}
EXACT = (
    "gpt2",
    "gpt2_untied",
    "neox_parallel",
    "neox_sequential",
    "llama",
    "llama_grouped",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gptj",
    "phi",
    "opt",
    "neo",
    "falcon",
    "mpt",
)
"""Architectures whose components, heads and neurons are all exact."""


def hugging_face(
    config: Any, dtype: torch.dtype = torch.float64, *, seed: int = 0, rms: bool = False
) -> Any:
    """Return a Hugging Face model of a config, every parameter random, norms in its own dtype.

    Args:
        config: the config.
        dtype: dtype of the weights.
        seed: of the weights.
        rms: put an RMSNorm for every norm.
    """
    factory = transformers.AutoModelForCausalLM
    if config.model_type == "bert":
        factory = transformers.AutoModelForMaskedLM
    model = factory.from_config(config).to(dtype)
    randomise(model, seed)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        is_norm = isinstance(module, torch.nn.LayerNorm) or "RMSNorm" in type(module).__name__
        if rms and is_norm:
            setattr(model.get_submodule(parent), last, _rms_norm_like(module))
        elif "RMSNorm" in type(module).__name__:
            module.forward = types.MethodType(_rms_forward, module)
    return model.eval()


def _rms_norm_like(module: Any) -> torch.nn.RMSNorm:
    weight = module.weight
    norm = torch.nn.RMSNorm(weight.shape[0], eps=EPS, dtype=weight.dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
    return norm


def _rms_forward(self: Any, x: Tensor) -> Tensor:
    """Hugging Face's RMSNorm without its detour through float32; Gemma stores its gain less 1."""
    eps = getattr(self, "variance_epsilon", None) or self.eps
    gain = self.weight + 1 if type(self).__name__.startswith("Gemma") else self.weight
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


# A part of the model, as if transformers had it: else it counts as replaced by the caller.
_rms_forward.__module__ = "transformers.tests"


def watching(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that only looks as if a library had put it on: it is no change of the model."""
    hook.__module__ = "transformers.tests"
    return hook


def bridge(hf_model: Any, *, folded: bool = False, rms: bool = False, tokenizer: Any = None) -> Any:
    """Return a TransformerBridge over a copy of a Hugging Face model.

    `rms` says that its LayerNorms were replaced, which the configuration does not know.
    """
    dtype = next(hf_model.parameters()).dtype
    source = copy.deepcopy(hf_model)
    model = build_bridge_from_module(
        source, type(source).__name__, hf_config=source.config, tokenizer=tokenizer, dtype=dtype
    )
    model.eval()
    if rms:
        model.cfg.normalization_type = "RMS"
        model.cfg.uses_rms_norm = model.cfg.final_rms = True
    if folded:
        model.enable_compatibility_mode(disable_warnings=True)
        restore_dtype(model, dtype)
    return model


def restore_dtype(model: Any, dtype: torch.dtype) -> None:
    """Undo a slip of TransformerLens 3.9: folding adds missing biases as float32 zeros."""
    for parameter in model.parameters():
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
                setattr(module, name, value.to(dtype))


def _bridge_of(cell: Cell, dtype: torch.dtype) -> Any:
    """StableLM is LayerNorm, rotary, with all other choices; RMSNorm is put in where asked."""
    config = transformers.StableLmConfig(
        **_LLAMA_LIKE,
        layer_norm_eps=EPS,
        num_key_value_heads=2 if cell.grouped else N_HEADS,
        use_parallel_residual=cell.parallel,
        tie_word_embeddings=cell.tied,
        use_qkv_bias=True,
    )
    rms = cell.norm == "RMS"
    return bridge(hugging_face(config, dtype, rms=rms), folded=cell.folded, rms=rms)


@functools.cache
def named(name: str, *, folded: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """Return a bridge over the architecture of this name; shared, so nobody may change it."""
    return fresh_named(name, folded=folded, dtype=dtype)


def fresh_named(name: str, *, folded: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """Return a bridge over the architecture of this name, a new one that may be changed."""
    return bridge(hugging_face(CONFIGS[name](), dtype), folded=folded)


# Tokenizers and folders


CORPUS = (
    "When Mary and John went to the store, John gave a drink to Mary. "
    "After Tom and Anna sat in the park, Anna handed a book to Tom. "
    "The dog saw the cat and the cat saw the dog; 3 + 5 = 8. "
) * 20


def byte_level_tokenizer(**options: Any) -> Any:
    """Return a byte-level BPE tokenizer like GPT-2's: `<|endoftext|>` begins, ends and pads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    end = "<|endoftext|>"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end, **options
    )


def metaspace_tokenizer(**options: Any) -> Any:
    """Return a tokenizer like Llama's: spaces as U+2581, and it begins every text with `<s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        **options,
    )


@functools.cache
def scratch() -> Path:
    """Return a folder that lasts as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="zoo-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def save(folder: Path, config: Any, tokenizer: Any = None, *, seed: int = 0) -> Path:
    """Save a random float32 model of a config as a Hugging Face folder."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def gpt2_config(d_vocab: int = D_VOCAB, **changes: Any) -> Any:
    """Return the configuration of a small GPT-2 with an untied head."""
    settings = {**_GPT2_LIKE, "vocab_size": d_vocab, "tie_word_embeddings": False, **changes}
    return transformers.GPT2Config(**settings)


@functools.cache
def text_folder(kind: str = "byte_level") -> Path:
    """Return the folder of a random model with a tokenizer.

    `byte_level`: GPT-2; `byte_level_left`: the same, padding on the left; `metaspace`: Llama.
    """
    folder = scratch() / f"text_{kind}"
    if kind == "metaspace":
        tokenizer = metaspace_tokenizer()
        config = transformers.LlamaConfig(
            **{**_RMS_LIKE, "vocab_size": len(tokenizer), "num_key_value_heads": 2}
        )
    else:
        side = "left" if kind == "byte_level_left" else "right"
        tokenizer = byte_level_tokenizer(padding_side=side)
        config = gpt2_config(len(tokenizer))
    return save(folder, config, tokenizer)


@functools.cache
def gpt2_tokenizer_folder(tokenizer_files: Path) -> Path:
    """Return the folder of a small random GPT-2 that reads GPT-2's own vocabulary."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        save_config(scratch() / "gpt2_tokenizer_config", gpt2_config(50257), tokenizer_files)
    )
    return save(scratch() / "gpt2_tokenizer", gpt2_config(50257), tokenizer)


def save_config(folder: Path, config: Any, files: Path) -> Path:
    """Save a config beside copies of the files of a tokenizer."""
    shutil.copytree(files, folder)
    config.save_pretrained(folder)
    return folder


@functools.cache
def text_model(backend: str, kind: str = "byte_level", dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with a tokenizer, loaded from its folder; nobody may change it."""
    return rp.load(text_folder(kind), backend=backend, dtype=dtype)


# What a model is made of, in plain tensors


def plain_cache(model: Any, tokens: list[int]) -> dict[str, Tensor]:
    """Return every activation of one prompt by name, from TransformerLens's own cache."""
    with torch.no_grad():
        _, cache = model.run_with_cache(torch.tensor([tokens]))
    return cache


def plain_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights that attribution reads, by TransformerLens's own names for them."""
    zeros = torch.zeros(D_MODEL, dtype=model.unembed.W_U.dtype)
    final = getattr(model, "ln_final", None)
    gain, shift = _tensor(final, "w", "weight"), _tensor(final, "b", "bias")
    found = {
        "W_U": model.unembed.W_U,
        "b_U": model.unembed.b_U,
        "gain": zeros + 1 if gain is None else gain,
        "shift": zeros if shift is None else shift,
        "W_O": torch.stack([block.attn.W_O for block in model.blocks]),
        "b_O": torch.stack([_or(block.attn.b_O, zeros) for block in model.blocks]),
        "W_out": torch.stack([block.mlp.W_out for block in model.blocks]),
        "b_out": torch.stack([_or(block.mlp.b_out, zeros) for block in model.blocks]),
    }
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _tensor(owner: Any, *names: str) -> Tensor | None:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, Tensor)), None)


def _or(value: Tensor | None, default: Tensor) -> Tensor:
    return default if value is None else value


def plain_logits(model: Any, tokens: list[int]) -> Tensor:
    """Return the logits [pos, d_vocab] of one prompt, from a call of the model alone."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), return_type="logits")[0]


# What a model is in, to compare before and after


def snapshot(model: Any) -> dict[str, Any]:
    """Return everything about a model that a call must leave alone."""
    return {
        "parameters": {
            name: (id(p), p.requires_grad, None if p.grad is None else p.grad.clone())
            for name, p in model.named_parameters()
        },
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: b.detach().clone() for name, b in model.named_buffers()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: ([id(h) for h in point.fwd_hooks], [id(h) for h in point.bwd_hooks])
            for name, point in model.hook_dict.items()
        },
        "torch_hooks": {
            name: (list(m._forward_hooks), list(m._forward_pre_hooks), list(m._backward_hooks))
            for name, m in model.named_modules()
        },
        "settings": json.dumps(vars(model.cfg), default=str, sort_keys=True),
        "attributes": sorted(vars(model)),
        "grad_mode": torch.is_grad_enabled(),
        "default_dtype": torch.get_default_dtype(),
        "random_state": torch.random.get_rng_state(),
    }


def differences(before: Any, after: Any, path: str = "model") -> Iterator[str]:
    """Yield where two snapshots differ."""
    if isinstance(before, dict):
        for key in before.keys() | after.keys():
            if key not in before or key not in after:
                yield f"{path}.{key} came or went"
            else:
                yield from differences(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, tuple):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{path}[{number}]")
    elif isinstance(before, Tensor) and isinstance(after, Tensor):
        if before.shape != after.shape or not torch.equal(before, after):
            yield f"{path} changed"
    elif before is not after and not bool(before == after):
        yield f"{path}: {before!r} became {after!r}"
