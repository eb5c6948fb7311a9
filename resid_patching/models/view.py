"""What the analyses read from a model, the same for HookedTransformer and TransformerBridge.

`ModelView` wraps a model by duck typing and answers for its weights, norms and facts in whatever
processing state the model is in. It owns nothing and changes nothing: weights are read through
the model each time, hooks are attached for the length of one forward pass and taken off again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.address import MLP, PosEmbed, hook_name
from resid_patching.errors import (
    AddressError,
    HookNotFiredError,
    TrainingModeError,
    UnsupportedModelError,
)
from resid_patching.models.inventory import Inventory
from resid_patching.models.precision import exact

Reader = Callable[[Tensor], Tensor | None]
"""Called with an activation [batch, pos, ...]; what it returns, if anything, replaces it."""


@runtime_checkable
class HookedModel(Protocol):
    """The part of HookedTransformer and TransformerBridge that this package relies on."""

    cfg: Any
    blocks: Any
    unembed: Any

    @property
    def hook_dict(self) -> dict[str, Any]:
        """Every hook point by name."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        ...


@dataclass(frozen=True)
class Norm:
    """A normalisation y = ((x - mean(x)) / sigma) * gain + bias, or without the mean for RMSNorm.

    Attributes:
        kind: `LN`, `RMS`, or None where the model has no norm.
        gain: gamma [d_model].
        bias: beta [d_model].
        eps: added to the variance before the root.
    """

    kind: Literal["LN", "RMS"] | None
    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    eps: float

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, " *batch"]:
        """The divisor sigma at each position, from the statistics of x itself."""
        if self.kind is None:
            return torch.ones_like(x[..., 0])
        if self.kind == "LN":
            x = x - x.mean(-1, keepdim=True)
        return (x.pow(2).mean(-1) + self.eps).sqrt()

    def __call__(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """The norm of states.

        Args:
            x: [*batch, d_model].
            scale: another divisor than x's own (None: live statistics), broadcast over *batch.
        """
        sigma = (self.scale(x) if scale is None else scale)[..., None]
        if self.kind == "LN":
            x = x - x.mean(-1, keepdim=True)
        return x / sigma * self.gain + self.bias

    def fold(self, direction: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_model"]:
        """The direction g for which (y - bias) . direction = (x . g) / sigma, exactly."""
        folded = direction * self.gain
        return folded - folded.mean(-1, keepdim=True) if self.kind == "LN" else folded


@dataclass(frozen=True)
class Processing:
    """Which of TransformerLens's weight simplifications the weights show, as found in them."""

    norms_folded: bool
    writes_centred: bool
    unembed_centred: bool
    values_folded: bool

    def __str__(self) -> str:
        names = {
            "norms folded": self.norms_folded,
            "writing weights centred": self.writes_centred,
            "unembedding centred": self.unembed_centred,
            "value biases folded": self.values_folded,
        }
        found = [name for name, holds in names.items() if holds]
        return "processed: " + ", ".join(found) if found else "raw"


_revisions: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def note_revision(model: Any, commit: str) -> None:
    """Remembers which commit a model's weights are, for as long as the model lives."""
    _revisions[model] = commit


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision our sums are made in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class ModelView:
    """A read-only view of a model: facts, weights, hooks, forward passes.

    Args:
        model: a HookedTransformer or a TransformerBridge, raw or processed.

    Raises:
        TypeError: the object is no hooked transformer.
        UnsupportedModelError: it has no layers.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, HookedModel):
            raise TypeError(
                f"a HookedTransformer or TransformerBridge is needed, got {type(model).__name__}. "
                'Load one with rp.load("gpt2"), or pass the one you have.'
            )
        if len(model.blocks) == 0:
            raise UnsupportedModelError("the model has no layers, so there is no stream to read")
        self.model: Any = model
        self.cfg = model.cfg
        self._inventory: Inventory | None = None

    def __repr__(self) -> str:
        return f"ModelView({self.name}, {self.kind}, {self.n_layers} layers)"

    # Facts

    @property
    def kind(self) -> str:
        """The TransformerLens class: HookedTransformer or TransformerBridge."""
        return type(self.model).__name__

    @property
    def name(self) -> str:
        """The name that the model's configuration carries."""
        return str(getattr(self.cfg, "model_name", None) or "unnamed")

    @property
    def revision(self) -> str | None:
        """The hub's commit of the weights, where they were loaded by hub name with `load`."""
        return _revisions.get(self.model)

    @cached_property
    def transformer_lens_version(self) -> str:
        """The installed TransformerLens."""
        return importlib.metadata.version("transformer-lens")

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return int(self.cfg.n_layers)

    @property
    def n_heads(self) -> int:
        """Query heads of a layer."""
        return int(self.cfg.n_heads)

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads of a layer; equal to n_heads without grouped-query attention."""
        return int(getattr(self.cfg, "n_key_value_heads", None) or self.n_heads)

    @property
    def d_model(self) -> int:
        """Width of the stream."""
        return int(self.cfg.d_model)

    @property
    def d_vocab(self) -> int:
        """Number of token ids that may go in."""
        return int(self.cfg.d_vocab)

    @property
    def n_ctx(self) -> int:
        """Longest prompt, in tokens."""
        return int(self.cfg.n_ctx)

    @property
    def softcap(self) -> float | None:
        """The output softcap c of c * tanh(logit / c), or None."""
        cap = getattr(self.cfg, "output_logits_soft_cap", None)
        return float(cap) if cap is not None and cap > 0 else None

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP of a block read the same state."""
        return bool(getattr(self.cfg, "parallel_attn_mlp", False))

    @cached_property
    def attn_only(self) -> bool:
        """Whether the blocks have no MLP."""
        # HookedTransformer has the hook in every block, whether or not there is an MLP.
        said = bool(getattr(self.cfg, "attn_only", False))
        return said or hook_name(MLP(0)) not in self.hook_points

    @cached_property
    def has_pos_embed(self) -> bool:
        """Whether a learned position embedding is added to the stream."""
        kind = getattr(self.cfg, "positional_embedding_type", None) or "standard"
        return kind == "standard" and hook_name(PosEmbed()) in self.hook_points

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, or None."""
        return getattr(self.model, "tokenizer", None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.W_U.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The precision our own sums are made in."""
        return compute_dtype(self.dtype)

    @property
    def device(self) -> torch.device:
        """Where the unembedding, and so our sums, live."""
        return self.W_U.device

    @property
    def input_device(self) -> torch.device:
        """Where tokens go in."""
        return torch.device(getattr(self.cfg, "device", None) or self.device)

    # Weights

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding."""
        return self.model.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The unembedding's bias; zeros where the model has none."""
        bias = getattr(self.model.unembed, "b_U", None)
        return self.W_U.new_zeros(self.W_U.shape[1]) if bias is None else bias

    def _block_weight(self, layer: int, part: str, name: str) -> Tensor | None:
        return getattr(getattr(self.model.blocks[layer], part), name, None)

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """The output projection of a layer's heads."""
        weight = self._block_weight(layer, "attn", "W_O")
        if weight is None:
            raise AddressError(f"layer {layer} of {self.name} shows no W_O")
        return weight.to(self.device).reshape(self.n_heads, -1, self.d_model)

    def b_O(self, layer: int) -> Float[Tensor, " d_model"]:
        """The output bias of an attention layer; zeros where the model has none."""
        return self._bias(self._block_weight(layer, "attn", "b_O"))

    def W_out(self, layer: int) -> Float[Tensor, "d_mlp d_model"]:
        """The output projection of a layer's neurons."""
        return self._W_out(layer).to(self.device)

    def _W_out(self, layer: int) -> Tensor:
        weight = self._block_weight(layer, "mlp", "W_out")
        if weight is None or weight.ndim != 2:
            raise AddressError(f"layer {layer} of {self.name} has no single W_out")
        return weight

    def n_neurons(self, layer: int) -> int:
        """Neurons of a layer's MLP; 0 where there is none."""
        return 0 if self.attn_only else self._W_out(layer).shape[0]

    def b_out(self, layer: int) -> Float[Tensor, " d_model"]:
        """The output bias of an MLP; zeros where the model has none."""
        return self._bias(self._block_weight(layer, "mlp", "b_out"))

    def _bias(self, bias: Tensor | None) -> Tensor:
        return self.W_U.new_zeros(self.d_model) if bias is None else bias.to(self.device)

    @property
    def final_norm(self) -> Norm:
        """The norm before the unembedding, in our precision."""
        return self._norm(getattr(self.model, "ln_final", None))

    def _norm(self, module: Any | None) -> Norm:
        dtype, device = self.compute_dtype, self.device
        ones = torch.ones(self.d_model, dtype=dtype, device=device)
        kind = self._norm_kind(module)
        if kind is None:
            return Norm(None, ones, torch.zeros_like(ones), 0.0)
        gain = _first(module, "w", "weight")
        bias = _first(module, "b", "bias") if kind == "LN" else None
        gain = ones if gain is None else gain.detach().to(device, dtype)
        if self._gain_is_offset(module):
            gain = gain + 1
        bias = torch.zeros_like(ones) if bias is None else bias.detach().to(device, dtype)
        return Norm(kind, gain, bias, self._eps(module))

    def _norm_kind(self, module: Any | None) -> Literal["LN", "RMS"] | None:
        if module is None or getattr(self.cfg, "normalization_type", "LN") is None:
            return None
        if (uses_rms := getattr(module, "uses_rms_norm", None)) is not None:
            return "RMS" if uses_rms else "LN"
        return "RMS" if "RMS" in type(module).__name__ else "LN"

    def _gain_is_offset(self, module: Any) -> bool:
        """Gemma's bridges store gain - 1; HookedTransformer stores the gain."""
        if (offset := getattr(module, "uses_weight_offset", None)) is not None:
            return bool(offset)
        is_bridge = hasattr(module, "original_component")
        return is_bridge and bool(getattr(self.cfg, "rmsnorm_uses_offset", False))

    def _eps(self, module: Any) -> float:
        original = getattr(module, "original_component", None)
        for owner, name in ((original, "eps"), (original, "variance_epsilon"), (module, "eps")):
            value = getattr(owner, name, None)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return float(getattr(self.cfg, "eps", 1e-5))

    def unembed_columns(self, ids: Int[Tensor, " n"]) -> Float[Tensor, "n d_model"]:
        """Rows W_U[:, id] for each id, in our precision."""
        # Indexing rows of the transpose: index_select would first copy a transposed weight whole.
        return self.W_U.detach().T[ids.to(self.device)].to(self.compute_dtype)

    def unembed_bias(self, ids: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """b_U[id] for each id, in our precision."""
        return self.b_U.detach()[ids.to(self.device)].to(self.compute_dtype)

    def readout(
        self, resid: Float[Tensor, "*batch d_model"], scale: Tensor | None = None
    ) -> Float[Tensor, "*batch d_vocab"]:
        """Our own final norm and unembedding of a stream state, before any softcap.

        Args:
            resid: the state.
            scale: a divisor for the norm instead of the state's own, broadcast over *batch.
        """
        dtype = self.compute_dtype
        normed = self.final_norm(resid.to(dtype), scale)
        return normed @ self.W_U.to(dtype) + self.b_U.to(dtype)

    # Runs

    @property
    def hook_points(self) -> Mapping[str, Any]:
        """Every hook of the model by name."""
        return self.model.hook_dict

    @property
    def inventory(self) -> Inventory:
        """The modules as they are now."""
        if self._inventory is None or not self._inventory.is_current():
            self._inventory = Inventory(self.model)
        return self._inventory

    def fingerprint(self) -> tuple[int, ...]:
        """Changes when weights are edited or replaced, hooks come or go, or modes change."""
        state = (getattr(self.cfg, "normalization_type", None), self.kind)
        return (*self.inventory.fingerprint(), hash(state))

    def user_hooks(self) -> list[str]:
        """Names of the hook points that carry temporary hooks of the caller.

        Permanent hooks count as part of the model: TransformerLens puts some on of its own.
        """
        if not self.inventory.has_temporary_hooks():
            return []
        return [
            name
            for name, point in self.hook_points.items()
            if any(not getattr(handle, "is_permanent", False) for handle in point.fwd_hooks)
        ]

    def require_eval(self) -> None:
        """Raises TrainingModeError where a module in training mode would drop activations."""
        training = [module for module in self.inventory.modules if module.training]
        if not any(map(_drops, training)):
            return
        for name, module in self.model.named_modules():
            if module.training and _drops(module):
                raise TrainingModeError(
                    f"{name} is in training mode and drops activations at random, so two equal "
                    "runs differ. Call model.eval() first."
                )

    @contextlib.contextmanager
    def attached(self, readers: Mapping[str, Reader]) -> Iterator[None]:
        """Attaches readers to hooks by name and takes exactly them off again.

        A hook point calls its hooks in the order they were added, so ours run after any hook of
        the caller and see what it left.

        Raises:
            AddressError: the model has no hook of that name.
        """
        points = self.hook_points
        handles: list[tuple[Any, Any]] = []
        try:
            for name, reader in readers.items():
                if name not in points:
                    raise AddressError(f"{self.name} ({self.kind}) has no hook {name}")
                point = points[name]
                before = list(point.fwd_hooks)
                point.add_hook(_as_hook(reader))
                added = [h for h in point.fwd_hooks if all(h is not old for old in before)]
                handles += [(point, handle) for handle in added]
            yield
        finally:
            for point, handle in handles:
                handle.hook.remove()
                point.fwd_hooks[:] = [h for h in point.fwd_hooks if h is not handle]

    @contextlib.contextmanager
    def watched(self, readers: Mapping[str, Reader]) -> Iterator[None]:
        """`attached`, for readers that the analysis relies on.

        Raises:
            HookNotFiredError: at the end, where a hook was never called.
        """
        fired: set[str] = set()
        counted = {name: _counted(name, reader, fired) for name, reader in readers.items()}
        with self.attached(counted):
            yield
        if missing := [name for name in readers if name not in fired]:
            raise HookNotFiredError(
                f"these hooks of {self.name} ({self.kind}) never fired: {', '.join(missing)}. "
                "The analysis would have been of nothing."
            )

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        readers: Mapping[str, Reader],
        *,
        logits: Reader | None = None,
        at: Int[Tensor, "batch n"] | None = None,
    ) -> Float[Tensor, "batch n d_vocab"]:
        """One forward pass on right-padded tokens, with readers attached.

        Args:
            tokens: ids [batch, pos]; padding, if any, follows the real tokens, which causal
                attention cannot see.
            readers: hook name -> callable.
            logits: called with the unembedding's own output, before any softcap.
            at: positions whose logits are wanted (a negative one reads the first); None for all.
                The model's own unembedding then works on these alone.

        Returns:
            The model's logits [batch, n, d_vocab], as it returns them.

        Raises:
            HookNotFiredError: a hook of `readers` was never called.
        """
        if at is not None and self.user_hooks():  # the caller's hooks see the whole pass
            whole = logits and (lambda output: logits(take(output, at)))
            return take(self.forward(tokens, readers, logits=whole), at)
        with exact(), self.watched(readers), self._on_unembed(logits, at):
            return self._call(tokens)

    def forward_blocks(
        self, tokens: Int[Tensor, "batch pos"], readers: Mapping[str, Reader]
    ) -> None:
        """One forward pass that ends before the unembedding, a third of GPT-2 small's work.

        Args:
            tokens: as in `forward`.
            readers: as in `forward`; none may be of the unembedding.

        Raises:
            HookNotFiredError: a hook of `readers` was never called.
        """
        if self.user_hooks():  # the caller's hooks see the whole pass
            self.forward(tokens, readers)
            return

        def stop(_module: Any, _inputs: Any) -> None:
            raise _Enough

        with exact(), self.watched(readers):
            handle = self.model.unembed.register_forward_pre_hook(stop)
            try:
                self._call(tokens)
            except _Enough:
                pass
            finally:
                handle.remove()

    def _call(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, return_type="logits", **self._mask(tokens))

    def _mask(self, tokens: Tensor) -> dict[str, Tensor]:
        """Keeps HookedTransformer from guessing a mask where its tokenizer pads on the left."""
        if getattr(self.tokenizer, "padding_side", "right") != "left":
            return {}
        return {"attention_mask": torch.ones_like(tokens)}

    @contextlib.contextmanager
    def _on_unembed(self, reader: Reader | None, at: Tensor | None) -> Iterator[None]:
        handles = []
        if at is not None:

            def choose(_module: Any, inputs: Any) -> Any:
                return (take(inputs[0], at), *inputs[1:])

            handles.append(self.model.unembed.register_forward_pre_hook(choose))
        if reader is not None:

            def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
                reader(output)

            handles.append(self.model.unembed.register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def as_view(model: Any) -> ModelView:
    """The view of a model; a view is returned as it is.

    Raises:
        TypeError: the object is no hooked transformer.
    """
    return model if isinstance(model, ModelView) else ModelView(model)


class _Enough(Exception):
    """Ends a forward pass whose logits nobody reads."""


def take(values: Tensor, index: Int[Tensor, "rows n"]) -> Tensor:
    """[rows, pos, ...] at positions [rows, n] -> [rows, n, ...]; a negative one reads the first."""
    index = index.to(values.device).clamp(0, values.shape[1] - 1)
    return values[torch.arange(index.shape[0], device=index.device)[:, None], index]


T = TypeVar("T")


class Memory(Generic[T]):
    """Findings about models, each kept while its model lives and is as it was found.

    Args:
        find: makes the finding for a model that is new or has changed.
    """

    def __init__(self, find: Callable[[ModelView], T]) -> None:
        self._find = find
        self._known: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], T]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, view: ModelView) -> T:
        """The finding for a model as it is now."""
        fingerprint = view.fingerprint()
        known = self._known.get(view.model)
        if known is None or known[0] != fingerprint:
            known = self._known[view.model] = (fingerprint, self._find(view))
        return known[1]


def _first(owner: Any, *names: str) -> Tensor | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, Tensor):
            return value
    return None


def _as_hook(reader: Reader) -> Callable[..., Tensor | None]:
    return lambda tensor, hook: reader(tensor)


def _counted(name: str, reader: Reader, fired: set[str]) -> Reader:
    return functools.partial(_count_and_read, name, reader, fired)


def _count_and_read(name: str, reader: Reader, fired: set[str], tensor: Tensor) -> Tensor | None:
    fired.add(name)
    return reader(tensor)


def _drops(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0
    rates = ("attention_dropout", "dropout", "hidden_dropout", "attn_dropout", "resid_dropout")
    found = (module.__dict__.get(name) for name in rates)
    return any(isinstance(rate, float) and rate > 0 for rate in found)
