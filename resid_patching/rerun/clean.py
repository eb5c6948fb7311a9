"""The clean run of some prompts: the states and activations that changed runs start from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from resid_patching.address import (
    MLP,
    Address,
    Attn,
    AttnBias,
    Embed,
    Head,
    HeadInput,
    HeadNode,
    MLPBias,
    Neuron,
    PosEmbed,
    Stream,
    hook_name,
)
from resid_patching.models import HookFunction, require_finite_at, take
from resid_patching.rerun.edits import Variant, clean_hook, site_value, stage
from resid_patching.rerun.held import beside, held_in
from resid_patching.rerun.replay import BlockCalls, hook_changes
from resid_patching.run import Run

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


class Clean:
    """What one forward pass of some prompts left behind.

    Attributes:
        rows: which prompts of the batch.
        width: positions, padding included.
        acts: activations by hook name [rows, pos, ...].
        held: the edits that the run carries; they were on.
        calls: what each block was called with.
        logits: the model's own logits, where the pass was whole or only some are read
            [rows, n, d_vocab].
    """

    def __init__(
        self, run: Run, rows: slice, names: Iterable[str], read_at: Tensor | None = None
    ) -> None:
        """Runs the model.

        Args:
            run: the run.
            rows: which of its prompts.
            names: the hooks whose activations are kept.
            read_at: the positions whose logits are wanted [rows, n]; None for all. Where there is
                none, the pass ends before the unembedding.
        """
        self.view = run.view
        self.rows = rows
        lengths = run.prompts.lengths[rows]
        self.width = max(lengths)
        self.lengths = torch.tensor(lengths, device=run.prompts.tokens.device)
        self.tokens = run.prompts.tokens[rows, : self.width]
        self.acts: dict[str, Tensor] = {}
        self.held = held_in(run)
        self.calls = BlockCalls(run.view)
        self.logits = torch.empty(0)
        readers = run.hooked({name: self._keeper(name) for name in names}, rows)

        def forward() -> None:
            if read_at is not None and not read_at.numel():
                run.view.forward_blocks(self.tokens, readers)
            else:
                self.logits = run.view.forward(self.tokens, readers, at=read_at)

        self.calls.record(forward)
        self._require_finite()

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def n_bytes(self) -> int:
        """What it holds, with the keys and values of all layers and the weights that make them."""
        view = self.view
        kept = sum(activation.nbytes for activation in self.acts.values())
        of_head = int(view.cfg.d_head) * view.n_layers * view.compute_dtype.itemsize
        seen = 2 * view.n_kv_heads * of_head * self.tokens.numel()
        joined = (view.n_heads + 2 * view.n_kv_heads) * of_head * view.d_model
        return kept + seen + joined

    def _require_finite(self) -> None:
        last = self.acts.get(hook_name(Stream(self.view.n_layers - 1, "post")))
        if last is None:
            return
        real = self.positions < self.lengths[:, None]
        what = "the model's own last state"
        require_finite_at(last, real, last.dtype, what, first=self.rows.start)

    def agree(self, found: Tensor, expected: Tensor) -> bool:
        """Whether what we computed is the model's own, up to rounding.

        Args:
            found: [rows, pos, d_model], where padding is left out; or of any other shape.
            expected: the model's own, of the same shape.
        """
        if found.ndim == 3:
            real = self.positions.to(found.device) < self.lengths.to(found.device)[:, None]
            found, expected = found[real], expected[real]
        if not len(found):
            return True
        tolerance = _TOLERANCE.get(self.view.dtype, 2e-2)
        return bool((found - expected).abs().amax() <= tolerance * expected.abs().amax())

    def _keeper(self, name: str) -> HookFunction:
        def keep(activation: Tensor) -> None:
            self.acts[name] = activation.detach().clone()

        return keep

    def hooks(
        self, variants: Sequence[Variant], layers: range | None = None
    ) -> dict[str, HookFunction]:
        """Hook functions that make the edits of a stack of variants, and those of the run.

        Args:
            variants: the edits of each variant.
            layers: the blocks that are called alone; None where the model runs whole.
        """
        return hook_changes(self.view, beside(self.held, variants, layers), self.rows)

    def act(self, address: Address) -> Tensor:
        """The activation at an address's hook [rows, pos, ...]."""
        found = self.acts[hook_name(address)]
        return found.expand(len(self), *found.shape[1:])

    def state(self, layer: int, place: str) -> Tensor:
        """A stream state; `mid` as what it is, resid_pre plus what attention added."""
        if place == "mid":
            return self.act(Stream(layer, "pre")) + self.act(Attn(layer))
        return self.act(Stream(layer, place))  # type: ignore[arg-type]

    def act_pre(self, layer: int) -> Tensor:
        """The state before a layer."""
        return self.act(Stream(layer, "pre"))

    def after(self, layer: int, place: str) -> Tensor:
        """A state of a layer, `post` as what the next layer reads."""
        if place == "post":
            return self.final if layer == self.view.n_layers - 1 else self.act_pre(layer + 1)
        return self.state(layer, place)

    @property
    def final(self) -> Tensor:
        """The last stream state."""
        return self.act(Stream(self.view.n_layers - 1, "post"))

    @property
    def positions(self) -> Tensor:
        """Positions of every row [rows, pos]."""
        return torch.arange(self.width, device=self.view.device).expand(len(self), -1)

    def stage(self, site: Address) -> tuple[int, int]:
        """The stage of a site; in parallel blocks attention and MLP are one."""
        layer, place = stage(site)
        return (layer, 1 if place == 3 and self.view.parallel else place)

    def old(self, site: Address, index: Tensor) -> Tensor:
        """A site's clean value at positions [rows, n]; zero for embeddings (edits are changes)."""
        if isinstance(site, Embed | PosEmbed):
            return torch.zeros((), device=self.view.device, dtype=self.view.compute_dtype)
        if isinstance(site, Stream):
            value = self.state(site.layer, site.place)
        else:
            name = clean_hook(site)
            value = site_value(self.view, site, None if name is None else self.acts[name])
        if value.shape[0] == 1 and value.shape[1] == 1:
            return self.ours(value)
        return self.ours(take(value.expand(len(self), *value.shape[1:]), index))

    def ours(self, value: Tensor) -> Tensor:
        """Where and in the precision that differences are made in: bfloat16 would lose them."""
        return value.to(self.view.device, self.view.compute_dtype)


def hooks_to_keep(run: Run, variants: Iterable[Variant]) -> set[str]:
    """The activations that a clean run must keep for these variants."""
    view = run.view
    states = {hook_name(Stream(layer, "pre")) for layer in range(view.n_layers)}
    states.add(hook_name(Stream(view.n_layers - 1, "post")))
    for variant in (*variants, held_in(run)):
        for edit in variant:
            name = clean_hook(edit.site)
            if name is not None:
                states.add(name)
            states |= _beside(edit.site)
    return states


def _beside(site: Address) -> set[str]:
    """What else of the layer is needed to start again behind a site."""
    match site:
        case HeadInput(layer, _, _) | HeadNode(layer, _, "pattern"):
            inputs = {hook_name(HeadInput(layer, 0, which)) for which in ("q", "k", "v")}
            return {hook_name(Attn(layer)), hook_name(Head(layer, 0)), *inputs}
        case Stream(layer, "mid") | Head(layer, _) | HeadNode(layer, _, _) | AttnBias(layer):
            return {hook_name(Attn(layer))}
        case Neuron(layer, _) | MLPBias(layer):
            return {hook_name(MLP(layer))}
        case _:
            return set()


def take_rows(states: Tensor, index: Tensor) -> Tensor:
    """[variant, rows, pos, *] at [rows, n] -> [variant, rows, n, *]; -1 is read as 0."""
    index = index.to(states.device).clamp_min(0)
    row = torch.arange(index.shape[0], device=index.device)[:, None]
    return states[:, row, index]
