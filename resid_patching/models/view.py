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
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.address import MLP, PosEmbed, hook_name
from resid_patching.errors import (
    AddressError,
    HeadMismatchError,
    HookNotFiredError,
    ModelChangedError,
    NeuronMismatchError,
    ReadoutMismatchError,
    TrainingModeError,
    UnsupportedModelError,
)
from resid_patching.models.norm import Norm, read_norm
from resid_patching.models.precision import exact
from resid_patching.models.rope import LengthRope, independent, length_ropes
from resid_patching.models.state import Look, State, state_of
from resid_patching.models.weights import optional_weight, why_unread

HookFunction = Callable[[Tensor], Tensor | None]
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


_revisions: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def note_revision(model: Any, commit: str) -> None:
    """Remembers which commit a model's weights are, for as long as the model lives."""
    _revisions[model] = commit


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision our sums are made in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class ModelView:
    """A read-only view of a model at one moment: facts, weights, hooks, forward passes.

    Attributes:
        model: the model.
        state: what it computes with, as it was when the view was made.

    Args:
        model: a HookedTransformer or a TransformerBridge, raw or processed.

    Raises:
        TypeError: the object is no hooked transformer.
        UnsupportedModelError: it has no layers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, HookedModel):
            raise TypeError(
                f"a HookedTransformer or TransformerBridge is needed, got {type(model).__name__}. "
                'Load one with rp.load("gpt2"), or pass the one you have.'
            )
        if len(model.blocks) == 0:
            raise UnsupportedModelError("the model has no layers, so there is no stream to read")
        self.model: Any = model
        self.cfg = model.cfg
        self._look, self._is_seen = Look(model), False
        self.state: State = state_of(self._look)

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

    @cached_property
    def _length_ropes(self) -> tuple[LengthRope, ...]:
        return length_ropes(self._look.modules)

    def length_class(self, length: int) -> tuple[int, ...]:
        """Equal for lengths of prompts that the model may run together.

        Where rotary frequencies depend on the longest prompt of a batch, prompts of two classes
        would change each other's result. All lengths are equal in other models.
        """
        return tuple(rope.length_class(length) for rope in self._length_ropes)

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, or None."""
        return getattr(self.model, "tokenizer", None)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.W_U.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The precision our own sums are made in."""
        return compute_dtype(self.dtype)

    @cached_property
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
        """The unembedding.

        Raises:
            ReadoutMismatchError: it cannot be read.
        """
        weight = optional_weight(self.model.unembed, "W_U")
        if weight is None:
            why = why_unread(self.model.unembed, "W_U") or "it shows no W_U"
            raise ReadoutMismatchError(
                f"the unembedding of {self.name} ({self.kind}) cannot be read: {why}"
            )
        return weight

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The unembedding's bias; zeros where the model has none."""
        bias = optional_weight(self.model.unembed, "b_U")
        return self.W_U.new_zeros(self.W_U.shape[1]) if bias is None else bias

    def _block_weight(self, layer: int, part: str, name: str) -> Tensor | None:
        return optional_weight(getattr(self.model.blocks[layer], part), name)

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """The output projection of a layer's heads.

        Raises:
            HeadMismatchError: it cannot be read.
        """
        weight = self._block_weight(layer, "attn", "W_O")
        if weight is None:
            why = why_unread(self.model.blocks[layer].attn, "W_O") or "it shows no W_O"
            raise HeadMismatchError(
                f"the heads of layer {layer} of {self.name} ({self.kind}) cannot be told apart: "
                f"{why}. Use by='component', or the whole attn.{layer}."
            )
        return weight.to(self.device).reshape(self.n_heads, -1, self.d_model)

    def d_head(self, layer: int) -> int:
        """Width of what a layer's heads mix, also where W_O cannot be read."""
        weight = self._block_weight(layer, "attn", "W_O")
        return int(self.cfg.d_head) if weight is None else self.W_O(layer).shape[1]

    def b_O(self, layer: int) -> Float[Tensor, " d_model"]:
        """The output bias of an attention layer; zeros where the model has none."""
        return self._bias(self._block_weight(layer, "attn", "b_O"))

    def W_out(self, layer: int) -> Float[Tensor, "d_mlp d_model"]:
        """The output projection of a layer's neurons.

        Raises:
            NeuronMismatchError: there is no single one that can be read.
        """
        return self._W_out(layer).to(self.device)

    def _W_out(self, layer: int) -> Tensor:
        weight = self._block_weight(layer, "mlp", "W_out")
        if weight is None or weight.ndim != 2:
            why = why_unread(self.model.blocks[layer].mlp, "W_out") or "it has no single W_out"
            raise NeuronMismatchError(
                f"the neurons of layer {layer} of {self.name} ({self.kind}) cannot be told apart: "
                f"{why}. Use by='component', or the whole mlp.{layer}."
            )
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
        return self.norm(getattr(self.model, "ln_final", None))

    def norm(self, module: Any | None) -> Norm:
        """A norm of the model, in our precision; one that changes nothing for None."""
        return read_norm(self.cfg, module, self.d_model, self.compute_dtype, self.device)

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

    @functools.cached_property
    def hook_points(self) -> Mapping[str, Any]:
        """Every hook of the model by name."""
        return self.model.hook_dict

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Looks once for all that is done inside, where nothing of the caller's is called."""
        self.require_unchanged()
        self._is_seen = True
        try:
            yield
        finally:
            self._is_seen = False

    def require_unchanged(self, *, whole: bool = False) -> None:
        """Raises where the model no longer computes with what it did when the view was made.

        Args:
            whole: also read every weight, where a sample would not do: before what was computed
                earlier is used again.

        Raises:
            ModelChangedError: what changed is named.
        """
        changes = [] if self._is_seen else self.state.changes(self._look)
        if whole and not changes:
            changes = self.state.edits(self.model)
        if changes:
            more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
            raise ModelChangedError(
                f"{self.name} changed since this run was captured: {'; '.join(changes[:3])}{more}. "
                "Capture again, with all runs that are used together."
            )

    def user_hooks(self) -> list[str]:
        """Where hooks and replaced functions of the caller are on, TransformerLens's and PyTorch's.

        Those that TransformerLens and transformers put on of their own are part of the model.
        """
        return list(self.state.user_hooks)

    def require_eval(self) -> None:
        """Raises TrainingModeError where a module in training mode would drop activations."""
        training = [module for module in self._look.modules if module.training]
        if not any(map(_drops, training)):
            return
        for name, module in self.model.named_modules():
            if module.training and _drops(module):
                raise TrainingModeError(
                    f"{name} is in training mode and drops activations at random, so two equal "
                    "runs differ. Call model.eval() first."
                )

    @contextlib.contextmanager
    def attached(self, functions: Mapping[str, HookFunction]) -> Iterator[None]:
        """Attaches functions to hooks by name and takes exactly them off again.

        A hook point calls its hooks in the order they were added, so ours run after any hook of
        the caller and see what it left.

        Raises:
            AddressError: the model has no hook of that name.
        """
        points = self.hook_points
        handles: list[tuple[Any, Any]] = []
        try:
            for name, function in functions.items():
                if name not in points:
                    raise AddressError(f"{self.name} ({self.kind}) has no hook {name}")
                point = points[name]
                before = list(point.fwd_hooks)
                point.add_hook(_as_hook(function))
                added = [h for h in point.fwd_hooks if all(h is not old for old in before)]
                handles += [(point, handle) for handle in added]
            yield
        finally:
            for point, handle in handles:
                handle.hook.remove()
                point.fwd_hooks[:] = [h for h in point.fwd_hooks if h is not handle]

    @contextlib.contextmanager
    def watched(self, functions: Mapping[str, HookFunction]) -> Iterator[None]:
        """`attached`, for functions that the analysis relies on.

        Raises:
            HookNotFiredError: at the end, where a hook was never called.
        """
        fired: set[str] = set()
        counted = {name: _counted(name, function, fired) for name, function in functions.items()}
        with self.attached(counted):
            yield
        if missing := [name for name in functions if name not in fired]:
            raise HookNotFiredError(
                f"these hooks of {self.name} ({self.kind}) never fired: {', '.join(missing)}. "
                "The analysis would have been of nothing."
            )

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        functions: Mapping[str, HookFunction],
        *,
        logits: HookFunction | None = None,
        at: Int[Tensor, "batch n"] | None = None,
    ) -> Float[Tensor, "batch n d_vocab"]:
        """One forward pass on right-padded tokens, with functions attached.

        Args:
            tokens: ids [batch, pos]; padding, if any, follows the real tokens, which causal
                attention cannot see.
            functions: hook name -> callable.
            logits: called with the unembedding's own output, before any softcap.
            at: positions whose logits are wanted (a negative one reads the first); None for all.
                The model's own unembedding then works on these alone.

        Returns:
            The model's logits [batch, n, d_vocab], as it returns them.

        Raises:
            HookNotFiredError: a hook of `functions` was never called.
        """
        if at is not None and self.user_hooks():  # the caller's hooks see the whole pass
            whole = logits and (lambda output: logits(take(output, at)))
            return take(self.forward(tokens, functions, logits=whole), at)
        with exact(), self.watched(functions), self._on_unembed(logits, at):
            return self._call(tokens)

    def forward_blocks(
        self, tokens: Int[Tensor, "batch pos"], functions: Mapping[str, HookFunction]
    ) -> None:
        """One forward pass that ends before the unembedding, a third of GPT-2 small's work.

        Args:
            tokens: as in `forward`.
            functions: as in `forward`; none may be of the unembedding.

        Raises:
            HookNotFiredError: a hook of `functions` was never called.
        """
        if self.user_hooks():  # the caller's hooks see the whole pass
            self.forward(tokens, functions)
            return

        def stop(_module: Any, _inputs: Any) -> None:
            raise _Enough

        with exact(), self.watched(functions):
            handle = self.model.unembed.register_forward_pre_hook(stop)
            try:
                self._call(tokens)
            except _Enough:
                pass
            finally:
                handle.remove()

    @contextlib.contextmanager
    def reading_normed(self, function: HookFunction) -> Iterator[None]:
        """Calls a function with what the unembedding is given [batch, pos, d_model], in each pass.

        It sees all positions, also where logits are wanted of some alone.
        """

        def read(_module: Any, inputs: Any) -> None:
            function(inputs[0])

        handle = self.model.unembed.register_forward_pre_hook(read)
        try:
            yield
        finally:
            handle.remove()

    def _call(self, tokens: Tensor) -> Tensor:
        with independent(self._length_ropes):
            return self.model(tokens, return_type="logits", **self._mask(tokens))

    def _mask(self, tokens: Tensor) -> dict[str, Tensor]:
        """Keeps HookedTransformer from guessing a mask where its tokenizer pads on the left."""
        if getattr(self.tokenizer, "padding_side", "right") != "left":
            return {}
        return {"attention_mask": torch.ones_like(tokens)}

    @contextlib.contextmanager
    def _on_unembed(self, function: HookFunction | None, at: Tensor | None) -> Iterator[None]:
        handles = []
        if at is not None:

            def choose(_module: Any, inputs: Any) -> Any:
                return (take(inputs[0], at), *inputs[1:])

            handles.append(self.model.unembed.register_forward_pre_hook(choose))
        if function is not None:

            def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
                function(output)

            handles.append(self.model.unembed.register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


Model: TypeAlias = torch.nn.Module | ModelView
"""A HookedTransformer or TransformerBridge, or the view of one."""


def as_view(model: Model) -> ModelView:
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


def _as_hook(function: HookFunction) -> Callable[..., Tensor | None]:
    return lambda tensor, hook: function(tensor)


def _counted(name: str, function: HookFunction, fired: set[str]) -> HookFunction:
    return functools.partial(_count_and_read, name, function, fired)


def _count_and_read(
    name: str, function: HookFunction, fired: set[str], tensor: Tensor
) -> Tensor | None:
    fired.add(name)
    return function(tensor)


def _drops(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0
    rates = ("attention_dropout", "dropout", "hidden_dropout", "attn_dropout", "resid_dropout")
    found = (module.__dict__.get(name) for name in rates)
    return any(isinstance(rate, float) and rate > 0 for rate in found)
