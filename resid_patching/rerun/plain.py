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
InputWriter = Callable[[str, Tensor], None]
"""Called with "q", "k" or "v" and [v, b, r, head, d_head] before rotation; changes it in place."""

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
        """Rotates x [variant, batch, row, head, d_head], whose rows stand at [batch, row]."""
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

    def project(
        self, layer: int, x: Tensor, positions: Tensor, write: InputWriter | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States [v, b, r, d_model] -> rotated q, k and v [v, b, r, heads, d_head].

        Args:
            layer: whose projections.
            x: the states.
            positions: where their rows stand [b, r].
            write: puts other values in the place of some heads' q, k or v.
        """
        W = self.weights(layer)
        parts = self.split(layer, _norm(W.ln1, x) @ W.W_QKV + W.b_QKV)
        if write is not None:
            for which, part in zip("qkv", parts, strict=True):
                write(which, part)
        q, k, v = parts
        return self.rotate(q, positions), self.rotate(k, positions), v

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

    def split(self, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The joined projection, by head."""
        d_head = self.weights(layer).d_head
        sizes = [self.n_heads * d_head, self.n_kv_heads * d_head, self.n_kv_heads * d_head]
        q, k, v = (part.unflatten(-1, (-1, d_head)) for part in qkv.split(sizes, -1))
        return q, k, v

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Applies rotary positions where the model has them."""
        return x if self.rotary is None else self.rotary(x, positions)

    def attend_causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Whole rows: z [v, b, r, head, d_head], each row seeing itself and those before."""
        shape = q.shape
        q, k, v = (t.flatten(0, 1).transpose(1, 2) for t in (q, k, v))
        k, v = self._per_query_head(k, 1), self._per_query_head(v, 1)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return z.transpose(1, 2).reshape(shape)

    def attend_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Tensor,
        keys: Tensor,
        clean: tuple[Tensor, Tensor] | None,
        first: Tensor,
    ) -> Tensor:
        """Some rows: each sees the clean keys before the first changed row and the new ones after.

        Args:
            q: [v, b, m, head, d_head].
            k: new keys [v, b, r, kv_head, d_head].
            v: new values, as k.
            queries: positions of q [b, m].
            keys: positions of k [b, r]; -1 where there is none.
            clean: clean keys and values [b, pos, kv_head, d_head], or None where none are seen.
            first: first changed position of each prompt [b].
        """
        k, v = self._per_query_head(k, 3), self._per_query_head(v, 3)
        new = torch.einsum("vbmhd,vbrhd->bhvmr", q, k) * self.scale
        seen = (keys[:, None] <= queries[:, :, None]) & (keys >= 0)[:, None]
        new = new.masked_fill(~seen[:, None, None], -torch.inf)
        if clean is None:
            return torch.einsum("bhvmr,vbrhd->vbmhd", new.softmax(-1), v)
        old_k, old_v = (self._per_query_head(t, 2) for t in clean)
        old = torch.einsum("vbmhd,bphd->bhvmp", q, old_k) * self.scale
        before = torch.arange(old_k.shape[1], device=q.device) < first[:, None]
        old = old.masked_fill(~before[:, None, None, None], -torch.inf)
        pattern = torch.cat([old, new], -1).softmax(-1)
        width = old_k.shape[1]
        z = torch.einsum("bhvmp,bphd->vbmhd", pattern[..., :width], old_v)
        return z + torch.einsum("bhvmr,vbrhd->vbmhd", pattern[..., width:], v)

    def attend_behind(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, clean: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Many rows: put in the place of the clean ones among all keys and values, then attended.

        Args:
            q: [v, b, r, head, d_head].
            k: [v, b, r, kv_head, d_head].
            v: as k.
            keys: positions of these rows [b, r]; -1 where there is none.
            clean: clean keys and values [b, pos, kv_head, d_head].
        """
        row, slot = (keys >= 0).nonzero(as_tuple=True)
        whole = []
        for new, old in zip((k, v), clean, strict=True):
            full = old[None].repeat(len(new), 1, 1, 1, 1)
            full[:, row, keys[row, slot]] = new[:, row, slot]
            whole.append(self._per_query_head(full.flatten(0, 1).transpose(1, 2), 1))
        positions = torch.arange(whole[0].shape[2], device=q.device)
        seen = (positions <= keys.clamp_min(0)[:, :, None])[None].expand(len(q), -1, -1, -1)
        z = F.scaled_dot_product_attention(
            q.flatten(0, 1).transpose(1, 2),
            *whole,
            attn_mask=seen.flatten(0, 1)[:, None],
            scale=self.scale,
        )
        return z.transpose(1, 2).reshape(q.shape)

    def attend_unprojected(
        self,
        layer: int,
        own: Tensor,
        normed: Tensor,
        queries: Tensor,
        keys: Tensor,
        clean: tuple[Tensor, Tensor] | None,
        first: Tensor,
    ) -> Tensor:
        """A few rows over many new ones, without the keys and values of these.

            q . (x W_K + b_K) = (W_K q) . x + q . b_K
            sum_r a_r (x_r W_V + b_V) = (sum_r a_r x_r) W_V + (sum_r a_r) b_V

        Args:
            layer: whose projections; without rotary positions.
            own: normed states of the rows [v, b, m, d_model].
            normed: normed states of the new keys [v, b, r, d_model].
            queries: positions of the rows [b, m].
            keys: positions of the new keys [b, r]; -1 where there is none.
            clean: clean keys and values [b, pos, kv_head, d_head], or None where none are seen.
            first: first changed position of each prompt [b].
        """
        W_K, b_K = self._by_head(layer, "k")
        W_V, b_V = self._by_head(layer, "v")
        q = self.inputs(layer, "q", list(range(self.n_heads)), own)
        asked = torch.einsum("vbmhd,chd->vbmhc", q, W_K)
        new = torch.einsum("vbmhc,vbrc->bhvmr", asked, normed)
        new = (new + torch.einsum("vbmhd,hd->bhvm", q, b_K)[..., None]) * self.scale
        seen = (keys[:, None] <= queries[:, :, None]) & (keys >= 0)[:, None]
        new = new.masked_fill(~seen[:, None, None], -torch.inf)
        if clean is None:
            return self._mix(new.softmax(-1), normed, W_V, b_V)
        old_k, old_v = (self._per_query_head(t, 2) for t in clean)
        width = old_k.shape[1]
        old = torch.einsum("vbmhd,bphd->bhvmp", q, old_k) * self.scale
        before = torch.arange(width, device=q.device) < first[:, None]
        old = old.masked_fill(~before[:, None, None, None], -torch.inf)
        pattern = torch.cat([old, new], -1).softmax(-1)
        z = torch.einsum("bhvmp,bphd->vbmhd", pattern[..., :width], old_v)
        return z + self._mix(pattern[..., width:], normed, W_V, b_V)

    def _mix(self, pattern: Tensor, normed: Tensor, W_V: Tensor, b_V: Tensor) -> Tensor:
        """What rows take of normed states, mixed before they are projected."""
        mixed = torch.einsum("bhvmr,vbrc->vbmhc", pattern, normed)
        share = torch.einsum("bhvmr->vbmh", pattern)
        return torch.einsum("vbmhc,chd->vbmhd", mixed, W_V) + share[..., None] * b_V

    def _by_head(self, layer: int, which: str) -> tuple[Tensor, Tensor]:
        """Keys' or values' weights for each query head [d_model, head, d_head], and biases."""
        W = self.weights(layer)
        start = self.n_heads + (0 if which == "k" else self.n_kv_heads)
        weight = W.W_QKV.unflatten(1, (-1, W.d_head))[:, start : start + self.n_kv_heads]
        bias = W.b_QKV.unflatten(0, (-1, W.d_head))[start : start + self.n_kv_heads]
        return self._per_query_head(weight, 1), self._per_query_head(bias, 0)

    def attend_some(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Some rows of some heads, over whole keys and values.

        Args:
            q: [v, b, r, head, d_head].
            k: for each of these heads [b, pos, head, d_head], or with an axis of variants before.
            v: as k.
            positions: where the rows of q stand [b, r].
        """
        names = "vbphd" if k.ndim == 5 else "bphd"
        scores = torch.einsum(f"vbrhd,{names}->vbhrp", q, k) * self.scale
        seen = torch.arange(k.shape[-3], device=q.device) <= positions[:, :, None]
        pattern = scores.masked_fill(~seen[None, :, None], -torch.inf).softmax(-1)
        names = "vbphd" if v.ndim == 5 else "bphd"
        return torch.einsum(f"vbhrp,{names}->vbrhd", pattern, v)

    def _per_query_head(self, t: Tensor, dim: int) -> Tensor:
        groups = self.n_heads // self.n_kv_heads
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

    def add_writes(self, layer: int, states: Tensor, z: Tensor) -> Tensor:
        """The state before a block and its z -> the state after it."""
        after = states + self.attention_write(layer, z)
        if self.view.attn_only:
            return after
        return after + self.mlp_write(layer, states if self.view.parallel else after)


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
