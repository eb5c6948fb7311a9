"""Transformer blocks in our own arithmetic, for running many changed rows at once.

    q, k, v = rotate(LN1(x) W + b)        z = softmax(q k / sqrt(d_head)) v
    mid = x + z W_O + b_O                 post = mid + MLP(LN2(mid))      (parallel: MLP(LN2(x)))

It covers plain blocks: pre-norm, LayerNorm or RMSNorm, learned or rotary positions, grouped-query
attention, gated and ungated MLPs, sequential and parallel. Nothing is assumed of a model: before
use, every block is compared with the model's own on the same prompts, and where one differs, the
model's blocks are called instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from resid_patching.models import ModelView, Norm

Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


class NotPlain(Exception):
    """The model's blocks are not of the kind that this file computes."""


@dataclass(frozen=True)
class Rotary:
    """Rotation tables: cos and sin [pos, d_rotary], and whether pairs are adjacent."""

    cos: Tensor
    sin: Tensor
    adjacent: bool

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x [variant, batch, row, head, d_head], whose rows stand at [batch, row].

        Rows at position -1 are turned as the first.
        """
        positions = positions.clamp_min(0)
        size = self.cos.shape[-1]
        turned, rest = x[..., :size], x[..., size:]
        if self.adjacent:
            pairs = turned.unflatten(-1, (-1, 2))
            flipped = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            flipped = torch.cat([-second, first], -1)
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        turned = turned * cos + flipped * sin
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


@dataclass(frozen=True)
class Weights:
    """One block's weights, laid out for single matrix products."""

    ln1: Norm
    ln2: Norm | None
    qkv: Callable[[], tuple[Tensor, Tensor]]
    W_O: Tensor
    b_O: Tensor
    W_in: Tensor | None
    b_in: Tensor | None
    W_gate: Tensor | None
    b_gate: Tensor | None
    W_out: Tensor | None
    b_out: Tensor | None
    d_head: int

    @property
    def W_QKV(self) -> Tensor:
        """The joined projection [d_model, (heads + 2 kv_heads) * d_head]."""
        return self._joined[0]

    @property
    def b_QKV(self) -> Tensor:
        """Its bias."""
        return self._joined[1]

    @cached_property
    def _joined(self) -> tuple[Tensor, Tensor]:
        """Made when first needed: it is a copy, and paths to the logits never read it."""
        return self.qkv()


class PlainBlocks:
    """The blocks of one model.

    Args:
        view: the model.
        arguments: what each block was called with in a clean run, for rotation tables.
        weights: layers already laid out; what this lays out is added.

    Raises:
        NotPlain: the model has what this arithmetic does not cover.
    """

    def __init__(
        self, view: ModelView, arguments: dict[str, Any], weights: dict[int, Weights]
    ) -> None:
        if view.dtype not in (torch.float32, torch.float64):
            raise NotPlain(f"{view.dtype} weights are run by the model itself")
        self.view = view
        self.n_heads, self.n_kv_heads = view.n_heads, view.n_kv_heads
        self.activation = _activation(view)
        self.rotary = _rotary(view, arguments)
        self.scale = _score_scale(view)
        self._weights = weights

    def weights(self, layer: int) -> Weights:
        """One block's weights, laid out once."""
        if layer not in self._weights:
            self._weights[layer] = _layer_weights(self.view, layer)
        return self._weights[layer]

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States [..., d_model] -> q, k (not rotated) and v of a layer [..., head, d_head]."""
        W = self.weights(layer)
        sizes = [n * W.d_head for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]
        parts = (_norm(W.ln1, x) @ W.W_QKV + W.b_QKV).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, W.d_head)) for part in parts)
        return q, k, v

    def normed(self, layer: int, x: Tensor, base: Tensor | None = None) -> Tensor:
        """States as the heads of a layer read them; see `_norm` for `base`."""
        return _norm(self.weights(layer).ln1, x, base)

    def inputs(self, layer: int, which: str, heads: list[int], normed: Tensor) -> Tensor:
        """Normed states [..., d_model] -> some heads' q, k or v, not rotated [..., n, d_head]."""
        W = self.weights(layer)
        start = {"q": 0, "k": self.n_heads, "v": self.n_heads + self.n_kv_heads}[which]
        weight = W.W_QKV.unflatten(1, (-1, W.d_head))
        bias = W.b_QKV.unflatten(0, (-1, W.d_head))
        columns = [start + head for head in heads]
        if columns == list(range(start, start + len(heads))):  # a view, where a choice is a copy
            span = slice(start, start + len(heads))
            chosen, shift = weight[:, span].flatten(1), bias[span].flatten()
        else:
            chosen, shift = weight[:, columns].flatten(1), bias[columns].flatten()
        return (normed @ chosen + shift).unflatten(-1, (len(heads), W.d_head))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Applies rotary positions where the model has them."""
        return x if self.rotary is None else self.rotary(x, positions)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Tensor,
        keys: Tensor,
        clean: tuple[Tensor, Tensor] | None = None,
        first: Tensor | None = None,
    ) -> Tensor:
        """Changed rows: z [v, b, m, head, d_head]; each row sees itself and those before it.

        Args:
            q: [v, b, m, head, d_head].
            k: changed keys [v, b, r, kv_head, d_head].
            v: changed values, as k.
            queries: positions of q [b, m]; what is found for -1 is not meaningful.
            keys: positions of k [b, r]; -1 where there is none.
            clean: clean keys and values [b, pos, kv_head, d_head], of which those before the first
                changed row are seen; None where every row is changed.
            first: that first changed position of each prompt [b].
        """
        if clean is None and queries is keys:
            q, k, v = (self._by_head(t.flatten(0, 1), 2).transpose(1, 2) for t in (q, k, v))
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return z.transpose(1, 2).unflatten(0, (-1, len(queries)))
        seen = (keys[:, None] <= queries.clamp_min(0)[:, :, None]) & (keys >= 0)[:, None]
        if clean is not None:
            assert first is not None
            before = torch.arange(int(first.max()), device=q.device) < first[:, None]
            seen = torch.cat([before[:, None].expand(-1, q.shape[2], -1), seen], -1)
            clean = (clean[0][:, : before.shape[1]], clean[1][:, : before.shape[1]])
        # Where few rows look at clean keys that all variants share, these are not copied for each:
        # a last position of a long prompt takes 22 % less.
        if 4 * q.shape[2] <= seen.shape[2]:
            return self._attend_few(q, k, v, seen, clean)
        if clean is not None:
            k, v = (
                torch.cat([old.expand(len(q), *old.shape), new], 2)
                for old, new in zip(clean, (k, v), strict=True)
            )
        mask = seen[None, :, None].expand(len(q), -1, -1, -1, -1).flatten(0, 1)
        q, k, v = (self._by_head(t.flatten(0, 1), 2).transpose(1, 2) for t in (q, k, v))
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return z.transpose(1, 2).unflatten(0, (-1, len(queries)))

    def _attend_few(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, clean: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """`attend` by sums over the changed keys and over the clean ones, [b, m, keys] seen."""
        k, v = self._by_head(k, 3), self._by_head(v, 3)
        scores = torch.einsum("vbmhd,vbrhd->bhvmr", q, k)
        n_clean = seen.shape[2] - k.shape[2]
        if clean is not None:
            old = self._by_head(clean[0], 2)
            scores = torch.cat([torch.einsum("vbmhd,bphd->bhvmp", q, old), scores], -1)
        scores = (scores * self.scale).masked_fill(~seen[:, None, None], -torch.inf)
        pattern = scores.softmax(-1)
        z = torch.einsum("bhvmr,vbrhd->vbmhd", pattern[..., n_clean:], v)
        if clean is not None:
            old = self._by_head(clean[1], 2)
            z = z + torch.einsum("bhvmp,bphd->vbmhd", pattern[..., :n_clean], old)
        return z

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, queries: Tensor) -> Tensor:
        """Rows of single heads over whole keys and values: z [pair, b, m, d_head].

        Args:
            q: one head's queries in each pair [pair, b, m, d_head].
            k: its keys [pair, b, pos, d_head].
            v: its values, as k.
            queries: positions of q [b, m]; what is found for -1 is not meaningful.
        """
        seen = torch.arange(k.shape[2], device=q.device) <= queries.clamp_min(0)[:, :, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)

    def _by_head(self, t: Tensor, dim: int) -> Tensor:
        """Keys or values for each query head: those of a key-value head repeated for its group."""
        groups = self.n_heads // t.shape[dim]
        return t if groups == 1 else t.repeat_interleave(groups, dim)

    def attention_write(self, layer: int, z: Tensor) -> Tensor:
        """Z [..., head, d_head] -> what the layer adds to the stream."""
        W = self.weights(layer)
        return z.flatten(-2) @ W.W_O + W.b_O

    def mlp_write(self, layer: int, x: Tensor, base: Tensor | None = None) -> Tensor:
        """The state the MLP reads -> what it adds to the stream; see `_norm` for `base`."""
        return self.mlp_out(layer, self.mlp_post(layer, x, base))

    def mlp_post(self, layer: int, x: Tensor, base: Tensor | None = None) -> Tensor:
        """The state the MLP reads -> its neurons' activations [..., d_mlp]."""
        W = self.weights(layer)
        assert W.ln2 is not None and W.W_in is not None and W.b_in is not None
        inside = _norm(W.ln2, x, base)
        if W.W_gate is None:
            return self.activation(inside @ W.W_in + W.b_in)
        gate = inside @ W.W_gate if W.b_gate is None else inside @ W.W_gate + W.b_gate
        return self.activation(gate) * (inside @ W.W_in) + W.b_in

    def mlp_out(self, layer: int, post: Tensor) -> Tensor:
        """Neurons' activations [..., d_mlp] -> what the MLP adds to the stream."""
        W = self.weights(layer)
        assert W.W_out is not None and W.b_out is not None
        return post @ W.W_out + W.b_out


def _norm(norm: Norm, x: Tensor, base: Tensor | None = None) -> Tensor:
    """The norm of x, with its own statistics, or divided by the scale that `base` has."""
    if base is not None:
        return norm(x, norm.scale(base))
    if norm.kind == "LN":
        return F.layer_norm(x, x.shape[-1:], norm.gain, norm.bias, norm.eps)
    if norm.kind == "RMS":
        return F.rms_norm(x, x.shape[-1:], norm.gain, norm.eps)
    return x


def _layer_weights(view: ModelView, layer: int) -> Weights:
    block = view.model.blocks[layer]
    W_O = view.W_O(layer)
    d_head = W_O.shape[1]

    def qkv() -> tuple[Tensor, Tensor]:
        q = _projection(view, block.attn, "Q", view.n_heads, d_head)
        k = _projection(view, block.attn, "K", view.n_kv_heads, d_head)
        v = _projection(view, block.attn, "V", view.n_kv_heads, d_head)
        return torch.cat([q[0], k[0], v[0]], 1), torch.cat([q[1], k[1], v[1]])

    mlp = None if view.attn_only else block.mlp
    gate = getattr(mlp, "W_gate", None)
    W_in = None if mlp is None else mlp.W_in.detach()
    if W_in is not None and W_in.ndim != 2:
        raise NotPlain("the MLP has no single input matrix")
    norm2 = getattr(block, "ln2", None)
    return Weights(
        ln1=view.norm(block.ln1) if hasattr(block, "ln1") else view.norm(None),
        ln2=view.norm(norm2 if norm2 is not None or not view.parallel else block.ln1),
        qkv=qkv,
        W_O=W_O.detach().reshape(-1, view.d_model),
        b_O=view.b_O(layer).detach(),
        W_in=W_in,
        b_in=None if W_in is None else _vector(getattr(mlp, "b_in", None), W_in),
        W_gate=None if gate is None else gate.detach(),
        b_gate=getattr(mlp, "b_gate", None),
        W_out=None if mlp is None else view.W_out(layer).detach(),
        b_out=None if mlp is None else view.b_out(layer).detach(),
        d_head=d_head,
    )


def _projection(
    view: ModelView, attention: Any, which: str, heads: int, d_head: int
) -> tuple[Tensor, Tensor]:
    """Weight [d_model, heads * d_head] and bias [heads * d_head] of q, k or v."""
    weight = getattr(attention, f"_W_{which}", None)
    weight = getattr(attention, f"W_{which}") if weight is None else weight
    bias = getattr(attention, f"_b_{which}", None)
    bias = getattr(attention, f"b_{which}", None) if bias is None else bias
    if weight.ndim != 3 or tuple(weight.shape) != (heads, view.d_model, d_head):
        raise NotPlain(f"W_{which} is {tuple(weight.shape)}")
    flat = weight.detach().transpose(0, 1).reshape(view.d_model, heads * d_head)
    if bias is None:
        return flat, flat.new_zeros(heads * d_head)
    return flat, bias.detach().reshape(heads * d_head)


def _vector(bias: Tensor | None, weight: Tensor) -> Tensor:
    return weight.new_zeros(weight.shape[1]) if bias is None else bias.detach()


def _activation(view: ModelView) -> Activation:
    if view.attn_only:
        return F.relu
    config = getattr(getattr(view.model, "original_model", None), "config", None)
    names = [getattr(config, n, None) for n in ("hidden_act", "activation_function", "activation")]
    names.append(getattr(view.cfg, "act_fn", None))
    for name in names:
        if name in _ACTIVATIONS:
            return _ACTIVATIONS[name]
    raise NotPlain(f"the activation {names[-1]!r}")


def _score_scale(view: ModelView) -> float:
    if not getattr(view.cfg, "use_attn_scale", True):
        return 1.0
    scale = getattr(view.cfg, "attn_scale", None)
    return 1.0 / (scale if scale and scale > 0 else math.sqrt(view.W_O(0).shape[1]))


def _rotary(view: ModelView, arguments: dict[str, Any]) -> Rotary | None:
    kind = getattr(view.cfg, "positional_embedding_type", None) or "standard"
    if kind == "standard":
        return None
    if kind != "rotary":
        raise NotPlain(f"{kind} positions")
    attention = view.model.blocks[0].attn
    cos, sin = getattr(attention, "rotary_cos", None), getattr(attention, "rotary_sin", None)
    if isinstance(cos, Tensor) and isinstance(sin, Tensor):
        return Rotary(cos, sin, bool(getattr(view.cfg, "rotary_adjacent_pairs", False)))
    tables = arguments.get("position_embeddings")
    if not isinstance(tables, tuple | list) or len(tables) != 2:
        raise NotPlain("rotation tables are not handed to the blocks")
    cos, sin = (table[0] if table.ndim == 3 else table for table in tables)
    return Rotary(cos.detach(), sin.detach(), False)
