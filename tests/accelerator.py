"""A device that is not there: tensors that say they are elsewhere, computed on the CPU.

What a real accelerator refuses is refused here too, so that the package can be held to it on a
machine without one: an operation of tensors on both sides, a random number there drawn from a
generator here, `numpy()` of a tensor there, and, as on Apple's, any float64.

    with accelerator.present(float64=False):
        model = accelerator.move(zoo.fresh_named("gpt2", dtype=torch.float32))
        rp.capture(model, ids)

A number (no axes) on the CPU may meet tensors there, and so may indices, as on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)  # a type that torch knows, and that no build has anything for
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_MOVES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXED = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)


class There(Tensor):
    """A tensor on the device; `held` is where its numbers are."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        there = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        there.held = held
        return there

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _perform(op, args, kwargs or {}, float64=True)

    def __repr__(self, **_: Any) -> str:
        return f"There({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor there to numpy; copy it to host memory first")


class _Mode(TorchDispatchMode):
    def __init__(self, *, float64: bool) -> None:
        super().__init__()
        self.float64 = float64

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _perform(op, args, kwargs or {}, float64=self.float64)


@contextlib.contextmanager
def present(*, float64: bool = True) -> Iterator[None]:
    """The device exists.

    Args:
        float64: whether it has that dtype.
    """
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) builds here, then moves
    try:
        with _Mode(float64=float64):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def move(model: Any) -> Any:
    """Puts a model's parameters and buffers there; the model is returned."""
    moved: dict[int, Tensor] = {}

    def there(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            held = There(tensor.detach().clone())
            moved[id(tensor)] = nn.Parameter(held) if isinstance(tensor, nn.Parameter) else held
        return moved[id(tensor)]

    for module in model.modules():
        # TransformerBridge also remembers parameters in plain attributes.
        for tensors in (module._parameters, module._buffers, vars(module)):
            tensors |= {name: there(t) for name, t in tensors.items() if isinstance(t, Tensor)}
    model.cfg.device = str(DEVICE)
    return model


def _perform(op: Any, args: Any, kwargs: dict[str, Any], *, float64: bool) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    _require_one_device(op, args, tensors, there)
    device = kwargs.get("device")
    goes_there = bool(there) if device is None else torch.device(device).type == DEVICE.type
    if op is _aten.copy_.default:
        goes_there = isinstance(args[0], There)
    _require_generator(op, kwargs.get("generator"), goes_there)
    if goes_there and device is not None:
        kwargs = {**kwargs, "device": _CPU}
    found = op(*tree_map(_held, args), **tree_map(_held, kwargs))
    if not goes_there:
        return found
    same = {id(tensor.held): tensor for tensor in there}  # in place, or returned as it is
    wrap = _wrapping(op, same, float64)
    return tree_map(wrap, found)


def _wrapping(op: Any, same: dict[int, There], float64: bool) -> Callable[[Any], Any]:
    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in same:
            return same[id(value)]
        if value.dtype == torch.float64 and not float64:
            raise TypeError(f"{op}: the device has no float64")
        return There(value)

    return wrap


def _require_one_device(op: Any, args: Any, tensors: list[Tensor], there: list[There]) -> None:
    if not there or op in _MOVES:
        return
    if op in _INDEXED:
        if isinstance(args[0], There):
            tensors = [t for t in (args[0], *args[2:3]) if isinstance(t, Tensor)]
        else:
            raise RuntimeError(f"{op}: a tensor on the CPU, indexed from {DEVICE}")
    here = [tensor for tensor in tensors if not isinstance(tensor, There) and tensor.ndim]
    if here:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in here)
        raise RuntimeError(f"{op}: tensors on {DEVICE} and, of shape {shapes}, on the CPU")


def _require_generator(op: Any, generator: Any, goes_there: bool) -> None:
    if generator is not None and goes_there:
        raise RuntimeError(f"{op}: a generator on the CPU for numbers on {DEVICE}")


def _held(value: Any) -> Any:
    return value.held if isinstance(value, There) else value
