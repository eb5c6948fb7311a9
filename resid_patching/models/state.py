"""What a model computes with, as it was at one moment, and whether it still is.

A run is one model at one moment. Everything that changes a forward pass is part of that moment:

    parameters and buffers    which tensors, their dtype, device and content
    hooks                     TransformerLens's and PyTorch's, on any module
    functions                 a replaced `forward`, `act_fn` and the like
    numbers and flags         on modules and configurations: `eps`, `attn_scale`, `training`

A model is compared with a `State` of it in two looks. The first compares identities, tensor
versions and a sample of every tensor's content (about a millisecond for GPT-2 small). Only where
that differs, the second compares by meaning: a weight that was edited and put back, or a hook
that was taken off and put on again, is no change. Before activations that were kept are used
again, every tensor is read whole.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn.modules import module as torch_module

from resid_patching.models.rope import length_ropes

# Registers of a module, which are read one by one, and what has no part in a forward pass.
_TENSORS, _HOOKS = ("_parameters", "_buffers"), ("_forward_pre_hooks", "_forward_hooks")
_REGISTERS = (*_TENSORS, "_modules", *_HOOKS)
_GLOBAL_HOOKS = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
_NAMES = ("tokenizer", "name", "model_name", "tokenizer_name", "tokenizer_prepends_bos")
_UNREAD = {*vars(torch.nn.Module()), *_NAMES, "default_prepend_bos"} - {"training"}
# Hooks and replaced functions of these packages are parts of the model that they load.
_LIBRARIES = ("transformer_lens", "transformers", "accelerate", "torch", "resid_patching")
_SAMPLE = 256
_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class State:
    """A model at one moment.

    It keeps no part of the model alive, so that it may be remembered for as long as the model is.

    Attributes:
        user_hooks: what the caller has put on: hooks and replaced functions, by place.
        findings: what was found out about the model as it is here, by who found it.
    """

    def __init__(self, look: Look) -> None:
        self.findings: dict[Any, Any] = {}
        model = look.model
        # Of the names that TransformerBridge has for a hook, the last is the usual one.
        points = {id(point): name for name, point in model.hook_dict.items()}
        self._parts = {
            name: _Part(module, points.get(id(module)) or _place(name))
            for name, module in model.named_modules()
        }
        self._tensors = {name: _Content(tensor) for name, tensor in _tensors_of(model)}
        self._global = _functions(_GLOBAL_HOOKS)
        self.user_hooks = tuple(self._interference())
        self._keep(look)

    def _keep(self, look: Look) -> None:
        self._mark = look.mark()
        # An identity says something only while nothing else can have taken its place.
        self._held = [_weak(function) for function in look.functions()]

    def is_seen_by(self, look: Look) -> bool:
        """Whether a first look sees this state."""
        return look.mark() == self._mark and None not in [held() for held in self._held]

    def changes(self, look: Look) -> list[str]:
        """What is different now, in words; none where nothing that is computed with is.

        Args:
            look: of the same model.
        """
        if self.is_seen_by(look):
            return []
        look.begin()
        found = list(self._differences(look.model))
        if not found:
            self._keep(look)
        return found

    def _differences(self, model: torch.nn.Module) -> Iterator[str]:
        parts = dict(model.named_modules())
        for name in self._parts.keys() ^ parts.keys():
            yield f"{_place(name)} was {'added' if name in parts else 'removed'}"
        for name in self._parts.keys() & parts.keys():
            yield from self._parts[name].differences(parts[name])
        tensors = dict(_tensors_of(model))
        for name in self._tensors.keys() ^ tensors.keys():
            yield f"{_place(name)} was {'added' if name in tensors else 'removed'}"
        for name in self._tensors.keys() & tensors.keys():
            if change := self._tensors[name].difference(tensors[name]):
                yield f"{_place(name)} {change}"
        if _functions(_GLOBAL_HOOKS) != self._global:
            yield "PyTorch's global forward hooks are others"

    def edits(self, model: torch.nn.Module) -> list[str]:
        """What is different in the tensors, however little, by reading them whole."""
        known = self._tensors
        found = {name: known[name].difference(tensor) for name, tensor in _tensors_of(model)}
        return [f"{_place(name)} {change}" for name, change in found.items() if change]

    @property
    def digest(self) -> str:
        """Of the content of all tensors, as they lie."""
        whole = xxhash.xxh3_128()
        for name, tensor in self._tensors.items():
            whole.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode() + tensor.digest)
        return f"xxh3 {whole.hexdigest()}"

    def _interference(self) -> Iterator[str]:
        for part in self._parts.values():
            yield from part.interference()
        if any(not function.is_of_library for function in self._global):
            yield "every module (a global PyTorch hook)"


def state_of(look: Look) -> State:
    """The state of a model now; the same object for as long as nothing changes."""
    known = _states.get(look.model)
    if known is None or known.changes(look):
        known = _states[look.model] = State(look)
    return known


_states: weakref.WeakKeyDictionary[torch.nn.Module, State] = weakref.WeakKeyDictionary()


class Look:
    """A quick look at a model: what is compared without asking what it means.

    Attributes:
        model: the model.
        modules: every module of it, once.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.begin()

    def begin(self) -> None:
        """Lists the model's modules anew, after some were replaced."""
        # Written out in place: each is done for every attribute of every module.
        self.modules = list(self.model.modules())
        self._classes = list({type(module) for module in self.modules})
        points = [vars(m) for m in self.modules if "fwd_hooks" in vars(m)]
        others = [vars(m) for m in self.modules if "fwd_hooks" not in vars(m)]
        configs = {
            id(value): value
            for attributes in others
            for value in attributes.values()
            if type(value).__name__.endswith("Config")
        }
        self._configs = [vars(config) for config in configs.values()]
        # Everything is seen to grow. A hook point is read for its hooks alone, a module but for
        # what it notes about itself while it runs.
        registers = [vars(m)[name] for m in self.modules for name in _REGISTERS]
        self._all = [*registers, *points, *others, *_GLOBAL_HOOKS]
        self._registers = [*filter(None, registers), *_GLOBAL_HOOKS]
        self._attributes = [
            (attributes, key)
            for attributes in others
            for key in attributes
            if not key.startswith("_") or key in _REGISTERS
        ]
        weights = [vars(m)[kind] for m in self.modules for kind in _TENSORS if vars(m)[kind]]
        tensors = {id(t): t for register in weights for t in register.values() if t is not None}
        self._plain = [tensor for tensor in tensors.values() if _is_plain(tensor)]
        self._counted = [tensor for tensor in self._plain if not tensor.is_inference()]
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in self._plain:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(_sampled(tensor))
        self._samples = list(kinds.values())

    def mark(self) -> tuple[Any, ...]:
        """Compares equal for as long as nothing is seen to have changed."""
        return (
            list(map(len, self._all)),
            list(map(id, self._values())),
            [id(cls.forward) for cls in self._classes],
            [(tensor.data_ptr(), tensor.dtype) for tensor in self._plain],
            [tensor._version for tensor in self._counted],
            [_hash(torch.cat(tensors)) for tensors in self._samples],
        )

    def functions(self) -> list[Any]:
        """The functions whose identity the mark holds."""
        return [value for value in self._values() if callable(value) and _is_function(value)]

    def _values(self) -> Iterator[Any]:
        """What modules and configurations hold."""
        own = (attributes.get(key) for attributes, key in self._attributes)
        held = map(dict.values, (*self._registers, *self._configs))
        return itertools.chain(own, itertools.chain.from_iterable(held))


class _Part:
    """A module as it was: its numbers, flags and functions, and its hooks."""

    def __init__(self, module: torch.nn.Module, place: str) -> None:
        self.place, self.type_name = place, type(module).__name__
        self.settings = _settings(module)
        self.hooks = {name: _users_hooks(module, name) for name in _HOOKS}
        self.is_point = hasattr(module, "fwd_hooks")
        self.is_dispatched = hasattr(module, "_hf_hook")
        self.forward = _Function(type(module).forward)

    def differences(self, module: torch.nn.Module) -> Iterator[str]:
        """What differs from a module that is there now, in words."""
        place = self.place
        if _Function(type(module).forward) != self.forward:
            yield f"{place} has another class or forward"
            return
        found = _settings(module)
        for key in self.settings.keys() | found.keys():
            old, new = self.settings.get(key), found.get(key)
            if old != new:
                yield f"{place}.{key} {_changed(old, new)}"
        for kind in _HOOKS:
            hooks = _users_hooks(module, kind)
            if hooks != self.hooks[kind]:
                word = "hooks" if self.is_point else f"PyTorch {kind[1:].replace('_', ' ')}"
                yield f"{place} has other {word} ({len(self.hooks[kind])} then, {len(hooks)} now)"

    def interference(self) -> Iterator[str]:
        """What the caller has put on this module."""
        place = self.place
        for kind, functions in self.hooks.items():
            if functions:
                plain = self.is_point and kind == "_forward_hooks"
                word = "pre-hook" if kind == "_forward_pre_hooks" else "hook"
                yield place if plain else f"{place} (a PyTorch {word})"
        for key, value in self.settings.items():
            if isinstance(value, _Function) and not value.is_of_library:
                if key != "forward" or not self.is_dispatched:
                    yield f"{place}.{key} (replaced)"
        if not self.forward.is_of_library and not _is_users_own_class(self.forward):
            yield f"{place} ({self.type_name}.forward, replaced)"


class _Content:
    """A tensor's content as it was."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.device, self.shape = tensor.dtype, tensor.device, tensor.shape
        self.digest = _digest(tensor)

    def difference(self, tensor: Tensor) -> str | None:
        """How a tensor that is there now differs, in words."""
        for what in ("dtype", "device", "shape"):
            old, new = getattr(self, what), getattr(tensor, what)
            if old != new:
                return f"has another {what} ({_shown(old)} then, {_shown(new)} now)"
        return None if _digest(tensor) == self.digest else "has other values"


class _Function:
    """A function, compared by identity; it is not kept alive where that can be helped."""

    def __init__(self, function: Any) -> None:
        self.owner = _weak(getattr(function, "__self__", None))
        function = getattr(function, "__func__", function)
        self.function = _weak(function)
        plain = function.func if isinstance(function, functools.partial) else function
        module = getattr(plain, "__module__", None) or getattr(type(plain), "__module__", "")
        self.is_of_library = str(module).partition(".")[0] in (*_LIBRARIES, "builtins")
        self.module = str(module)

    @property
    def is_alive(self) -> bool:
        """Whether the function still exists."""
        return self.function() is not None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Function)
            and self.function() is other.function()
            and self.owner() is other.owner()
            and self.is_alive
        )

    __hash__ = None  # type: ignore[assignment]


def _weak(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # None, and what is built in
        return lambda: value


def _is_function(value: Any) -> bool:
    is_callable = callable(value) and not isinstance(value, type | torch.nn.Module | Tensor)
    return is_callable and not hasattr(value, "encode")  # a tokenizer


def _is_users_own_class(forward: _Function) -> bool:
    """Whether a class's forward was written with the class, and not put in its place."""
    function = forward.function()
    return "." in getattr(function, "__qualname__", "") and "<locals>" not in getattr(
        function, "__qualname__", ""
    )


def _functions(registers: Any) -> list[_Function]:
    """The functions of hook registers, those of TransformerLens without their wrapper."""
    return [_Function(_unwrapped(hook)) for register in registers for hook in register.values()]


def _users_hooks(module: torch.nn.Module, kind: str) -> list[_Function]:
    """The hooks of one kind that no library has put on a module of its own."""
    return [hook for hook in _functions([vars(module)[kind]]) if not hook.is_of_library]


def _unwrapped(hook: Any) -> Any:
    """The function that was given to TransformerLens's `add_hook`."""
    if isinstance(hook, types.FunctionType) and hook.__module__.startswith("transformer_lens"):
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        if "hook" in cells:
            return cells["hook"].cell_contents
    return hook


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    """Numbers, flags and functions of a module and of its configurations."""
    if hasattr(module, "fwd_hooks"):
        return {key: _Function(vars(module)[key]) for key in ("forward",) if key in vars(module)}
    by_length = length_ropes([module])
    found: dict[str, Any] = {}
    for key, value in vars(module).items():
        # What a module notes about itself while it runs is private.
        if key.startswith("_") or key in _UNREAD:
            continue
        if isinstance(value, _SIMPLE):
            if not (by_length and isinstance(value, float | int)):
                found[key] = value
        elif type(value).__name__.endswith("Config"):
            found |= {f"{key}.{k}": v for k, v in _comparable(vars(value)).items()}
        else:
            found |= _comparable({key: value})
    return found


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings whose values can be compared later."""
    found = {}
    for key, value in settings.items():
        simple = value if isinstance(value, _SIMPLE) else _simple(value)
        if simple is not _OTHER and key not in _UNREAD:
            found[key] = simple
    return found


_OTHER = object()


def _simple(value: Any) -> Any:
    """A value that can be compared later: simple values, lists of them, and functions."""
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, list | tuple):
        items = [_simple(item) for item in value]
        return _OTHER if any(item is _OTHER for item in items) else items
    if isinstance(value, dict):
        return _comparable({str(key): item for key, item in value.items()})
    return _Function(value) if _is_function(value) else _OTHER


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by name, once, but tables made anew for an input's length."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for kind in _TENSORS:
            register = vars(module)[kind]
            if not register or (kind == "_buffers" and length_ropes([module])):
                continue
            for key, tensor in register.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{name}.{key}" if name else key, tensor


@torch.no_grad()
def _sampled(tensor: Tensor) -> Tensor:
    """About `_SAMPLE` entries, spread over all rows and columns; no copy."""
    span, step = _spread(tuple(tensor.shape), tensor.stride())
    size = ((span - 1) // step + 1,)
    return torch.as_strided(tensor.detach(), size, (step,), tensor.storage_offset())


@functools.lru_cache(maxsize=1024)
def _spread(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, int]:
    """Entries from a tensor's first to its last, and every how many of them one is read."""
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    step = max(1, span // _SAMPLE)
    while step > 1 and any(math.gcd(step, size) > 1 for size in shape if size > 1):
        step += 1
    return span, step


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory can be read as it lies."""
    kind = type(tensor) in (Tensor, torch.nn.Parameter)
    return kind and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


@torch.no_grad()
def _digest(tensor: Tensor) -> bytes:
    """Of a tensor's whole content; on an accelerator, of the sums along each of its axes."""
    if not _is_plain(tensor):
        return b""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return _hash(tensor.contiguous())
    wide = torch.float32 if tensor.is_floating_point() else torch.int64
    sums = [tensor.sum(axis, dtype=wide).flatten() for axis in range(tensor.ndim)]
    return _hash(torch.cat(sums or [tensor[None].to(wide)]))


def _hash(tensor: Tensor) -> bytes:
    tensor = tensor.cpu()
    try:
        return xxhash.xxh3_128_digest(tensor.numpy().data)
    except TypeError:  # a dtype that numpy lacks
        return xxhash.xxh3_128_digest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _place(name: str) -> str:
    return name.replace("._original_component", "") or "the model"


def _changed(old: Any, new: Any) -> str:
    if isinstance(old, _Function) or isinstance(new, _Function):
        return "was replaced"
    return f"changed from {_shown(old)} to {_shown(new)}"


def _shown(value: Any) -> str:
    return repr(value).removeprefix("torch.") if len(repr(value)) < 40 else "another value"
