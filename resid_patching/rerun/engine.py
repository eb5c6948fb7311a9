"""Running variants of a clean run: exact, and at the cost of what they change.

Three routes give the same numbers; the result says which was taken.

    plain    our own blocks, from the first changed stage, and only the rows from the first changed
             position on (they read the clean keys and values before it)
    replay   the model's own blocks, from the first changed layer, all rows
    full     whole forward passes with hooks

`plain` takes models whose blocks it reproduces on these very prompts; `replay` takes the rest, and
patterns that are replaced behind another change; `full` takes models whose blocks cannot be called
alone, and any model that carries hooks of the caller, so that these act in the clean and the
changed run alike. Variants are stacked on the batch axis, and only the rows and columns of the
logits that the metric reads are unembedded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.address import HeadNode, Stream, hook_name
from resid_patching.errors import ReadoutMismatchError, UnsupportedModelError
from resid_patching.models import READOUT_TOLERANCE, Memory, ModelView, exact, note_on_hooks, take
from resid_patching.rerun.changes import Changes, Stage
from resid_patching.rerun.clean import Clean, hooks_to_keep, take_rows
from resid_patching.rerun.deltas import Deltas
from resid_patching.rerun.edits import Variant, require_acting, stage
from resid_patching.rerun.plain import NotPlain, PlainBlocks, Weights
from resid_patching.rerun.scores import Reading, Scores
from resid_patching.rerun.share import EVERYTHING, Piece, Route, Share, put_together
from resid_patching.rerun.walk import Walk
from resid_patching.run import Run

# Tokens of a stack. Larger stacks are no faster per token and leave the cache sooner.
STACK_TOKENS = 1024
_NOT_CALLABLE = (AttributeError, RuntimeError, ValueError, TypeError, KeyError, IndexError)


@dataclass(frozen=True, eq=False)
class Rerun:
    """What the variants did to the metric.

    Attributes:
        baseline: the clean run's value [batch].
        patched: the value with each variant's edits, the model run again [variant, batch].
        direct: the value with the same change carried to the last state, all later writes frozen
            and the final norm live [variant, batch].
        routes: the routes that were taken.
    """

    baseline: Float[Tensor, " batch"]
    patched: Float[Tensor, "variant batch"]
    direct: Float[Tensor, "variant batch"]
    routes: tuple[Route, ...]


@exact()
def rerun(
    run: Run,
    variants: Sequence[Variant],
    reading: Reading,
    *,
    routes: Sequence[Route] = ("plain", "replay", "full"),
    progress: Callable[[int], object] | None = None,
    share: Share = EVERYTHING,
) -> Rerun:
    """Evaluates variants of a run.

    Args:
        run: the clean run.
        variants: the edits of each variant.
        reading: what the metric reads.
        routes: routes that may be taken, best first; `full` is always allowed.
        progress: called with the number of (variant, prompt chunk) pairs just done.
        share: what of it is worked here.

    Raises:
        UnsupportedModelError: the model throws away what is put at a hook.
        HookNotFiredError: a hook is never called.
    """
    require_acting(run.view, (edit.site for variant in variants for edit in variant))
    pieces = share.gather(_pieces(run, variants, reading, routes, share))
    shape = (len(variants), 1, len(run))
    baseline, patched, direct, taken = put_together(pieces, run.view, shape, progress)
    return Rerun(baseline, patched[:, 0], direct[:, 0], taken)


def _pieces(
    run: Run,
    variants: Sequence[Variant],
    reading: Reading,
    routes: Sequence[Route],
    share: Share,
) -> Iterator[Piece]:
    names = hooks_to_keep(run, variants)
    for chunk in chunks(run, names, reading, routes, share):
        if not variants:
            none = chunk.baseline[None][:0]
            yield Piece(chunk.rows, [], 0, chunk.baseline, none, none, ())

        def wants(stack: int, numbers: list[int], rows: slice = chunk.rows) -> bool:
            return share.wants(rows, stack, numbers, 0)

        for numbers, total, frozen, route in chunk.evaluate(variants, wants):
            yield Piece(chunk.rows, numbers, 0, chunk.baseline, total, frozen, (route,))
        del chunk  # before the next clean pass, so that one is held at a time


def chunks(
    run: Run,
    names: set[str],
    reading: Reading,
    routes: Sequence[Route],
    share: Share = EVERYTHING,
    n_beside: int = 0,
) -> Iterator[Chunk]:
    """The run's prompts, a group at a time, each after its clean forward pass.

    Args:
        run: the clean run.
        names: the hooks to keep.
        reading: what the metric reads.
        routes: routes that may be taken.
        share: what of it is worked here.
        n_beside: states of the stream that are held beside the clean run.
    """
    means = Means(run.view, routes)
    everything = prompt_chunks(run, len(names) + n_beside)

    def begun(rows: slice) -> Chunk:
        chunk = Chunk(run, rows, names, reading, means)
        share.begins(rows, chunk.baseline)
        return chunk

    here = share.deal(everything)
    if here[:1] != everything[:1]:
        begun(everything[0])  # rows of an earlier sitting are held against its clean run
    for rows in here:
        yield begun(rows)  # not held here: the next pass begins when this one is let go


def prompt_chunks(run: Run, n_kept: int) -> list[slice]:
    """Slices of the batch that fit a stack, and whose clean run fits half the run's bound.

    Those with the longest prompts come first.
    """
    view = run.view
    size = view.W_U.element_size()
    of_logits = view.W_U.shape[1] if view.user_hooks() else 0  # whole passes, for their sake
    token_bytes = size * (of_logits + (n_kept + 4 * view.n_layers) * view.d_model)
    limit = min(STACK_TOKENS, run.max_bytes // (2 * token_bytes))
    found = run.prompts.chunks(limit, view.length_class)
    return sorted(found, key=lambda rows: -max(run.prompts.lengths[rows]))


def may_be_plain(view: ModelView, routes: Sequence[Route]) -> bool:
    """Whether `plain` is allowed and has not been seen to fail on this model."""
    means = Means(view, routes)
    return "plain" in means.routes and means.structure.get("plain", True)


class Means:
    """What one call runs with, whatever the prompts: routes, checks, weights laid out once."""

    def __init__(self, view: ModelView, routes: Sequence[Route]) -> None:
        self.hooked = bool(view.user_hooks())
        self.routes: Sequence[Route] = ("full",) if self.hooked else routes
        self.structure = _structure.of(view)
        self.weights: dict[int, Weights] = {}


class Chunk:
    """The variants of some prompts."""

    def __init__(
        self,
        run: Run,
        rows: slice,
        names: set[str],
        reading: Reading,
        means: Means,
    ) -> None:
        self.view = run.view
        self.rows = rows
        self.reading = reading
        self.means = means
        self.whole = means.hooked
        self.read_at = reading.positions.index[rows].to(self.view.device)
        # The model's own logits, where our readout of these very rows is not held to them yet.
        read = (rows.start, rows.stop, *self.read_at.flatten().tolist())
        self.reads_anew = not self.whole and read not in run.held_readouts
        wanted = self.read_at if self.reads_anew else self.read_at[:, :0]
        self.clean = Clean(run, rows, names, None if self.whole else wanted)
        # What the clean run and the projections laid out for it hold is not there for the stacks.
        self.max_bytes = max(run.max_bytes - self.clean.n_bytes, run.max_bytes // 4)
        self.plain = self._own_blocks()
        self._is_control_due = False
        self.deltas = Deltas(self.clean, self.plain, lambda: self.replays)
        self.clean_rows = take(self.clean.final, self.read_at)
        self.scores = Scores(self.view, reading, rows, self.clean_rows, self.max_bytes)
        self.score = self.scores.of_states
        self.baseline = self._baseline()
        run.held_readouts.add(read)

    def _own_blocks(self) -> PlainBlocks | None:
        """Our blocks, where this model has the parts of which they are made."""
        structure = self.means.structure
        if "plain" not in self.means.routes or not structure.get("plain", True):
            return None
        try:
            blocks = PlainBlocks(self.view, self.clean.calls.arguments(0), self.means.weights)
            if "plain" not in structure:
                for layer in range(self.view.n_layers):
                    _ = blocks.weights(layer).W_QKV
        except (NotPlain, *_NOT_CALLABLE):
            structure["plain"] = False
            return None
        structure["plain"] = True
        return blocks

    def again(self, run: Run, names: set[str]) -> Chunk:
        """The same prompts after another clean pass that keeps other activations."""
        return Chunk(run, self.rows, names, self.reading, self.means)

    def _baseline(self) -> Tensor:
        if self.whole:
            return self._score_logits(self._own_logits()[None])[0]
        if self.reads_anew:
            self._require_readout()
            self.clean.logits = torch.empty(0)
        return self.score(self.clean_rows[None])[0]

    def _score_logits(self, logits: Tensor) -> Tensor:
        """The model's own logits [variant, rows, pos, d_vocab] -> the metric [variant, rows]."""
        return self.scores.of_logits(logits, self._own_logits(), self.read_at)

    def _own_logits(self) -> Tensor:
        if not self.clean.logits.numel():
            self.clean.logits = self.view.forward(self.clean.tokens, self.clean.hooks([()]))
        return self.clean.logits

    def evaluate(
        self,
        variants: Sequence[Variant],
        wants: Callable[[int, list[int]], bool] | None = None,
    ) -> Iterator[tuple[list[int], Tensor, Tensor, Route]]:
        """Yields (numbers of variants, patched, direct, route) stack by stack.

        Args:
            variants: all of them, whichever are wanted: stacks are made up of these.
            wants: told of a stack's number and its variants' numbers; None for all.
        """
        for place, (numbers, route, is_first) in enumerate(self._stacks(variants)):
            self._is_control_due |= is_first
            if wants is not None and not wants(place, numbers):
                continue
            stack = [variants[number] for number in numbers]
            found = self._evaluated(stack, route, is_first)
            if found is not None:
                yield numbers, *found, route
                continue
            # Our blocks are not the model's on these prompts: by the next route.
            for own, total, direct, other in self.evaluate(stack):
                yield [numbers[number] for number in own], total, direct, other

    def _evaluated(
        self, stack: list[Variant], route: Route, is_first: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Patched and direct of a stack [variant, rows]; None where its route disagrees."""
        if route == "plain" and self.plain is None:
            return None
        changes = Changes(self.clean, stack)
        changed = self._reaching(changes)
        base = self.baseline.expand(len(stack), -1)
        if not bool(changed.any()):
            return base, base
        direct = self._direct(stack, changes, route)
        direct = torch.where(changed, direct, base)
        total = self._total(stack, changes, route, is_first)
        return None if total is None else (torch.where(changed, total, base), direct)

    def _reaching(self, changes: Changes) -> Tensor:
        """Where [variant, rows] a value differs from which causality leads to what is read."""
        if self.whole:  # a hook of the caller may look ahead
            return changes.changed
        return changes.changed & (self.read_at.amax(1) >= changes.first_moved)

    def _direct(self, stack: list[Variant], changes: Changes, route: Route) -> Tensor:
        if all(map(self.deltas.closed, stack)):
            delta = self.deltas.direct(changes, self.read_at)
        else:
            delta = torch.stack([self.deltas.measured(edits, self.read_at) for edits in stack])
        clean = self.clean_rows.to(delta.dtype)
        direct = self.score(clean + delta)
        # With hooks of the caller on, the clean value is the model's own.
        return self.baseline + direct - self.score(clean[None]) if self.whole else direct

    def _total(
        self, stack: list[Variant], changes: Changes, route: Route, is_first: bool
    ) -> Tensor | None:
        if route == "plain":
            final = self._propagate(changes, is_first)
            return None if final is None else self.score(final)
        if route == "replay":
            return self.score(self._replayed(stack))
        tokens = self.clean.tokens.repeat(len(stack), 1)
        logits = self.view.forward(tokens, self.clean.hooks(stack))
        return self._score_logits(logits.unflatten(0, (len(stack), len(self.clean))))

    # Stacks

    def _stacks(self, variants: Sequence[Variant]) -> Iterator[tuple[list[int], Route, bool]]:
        """Numbers of variants that run together, their route, and whether they lead their group.

        A group has one route and similar rows; its stacks are in order of start.
        """
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, variant in enumerate(variants):
            route = self._route(variant)
            begins = bool(variant) if route == "plain" else self._start(variant)[0]
            groups.setdefault((route, begins, self._n_rows(variant)), []).append(number)
        for (route, _, n_rows), numbers in groups.items():
            numbers.sort(key=lambda number: self._start(variants[number]))
            size = self._stack_size(route, n_rows)
            for begin in range(0, len(numbers), size):
                yield numbers[begin : begin + size], route, begin == 0

    def _start(self, variant: Variant) -> tuple[int, int]:
        return min((self.clean.stage(e.site) for e in variant), default=(self.view.n_layers, 0))

    def _route(self, variant: Variant) -> Route:
        if self.plain is not None and self._is_walked(variant) and self.deltas.closed(variant):
            return "plain"
        return "replay" if self.replays else "full"

    def _is_walked(self, variant: Variant) -> bool:
        """Whether our blocks can put all of it in: a pattern only where the variant starts."""
        start = self._start(variant)
        behind = [e.site for e in variant if self.clean.stage(e.site) != start]
        behind += [e.site for e in self.clean.held if self.clean.stage(e.site) >= start]
        return not any(isinstance(s, HeadNode) and s.which == "pattern" for s in behind)

    def _n_rows(self, variant: Variant) -> int:
        first = self._first_changed(variant)
        return max(1, int((self.clean.lengths.to(first.device) - first).max()))

    def _first_changed(self, variant: Variant) -> Tensor:
        first = self.clean.lengths.clone().to(self.view.device)
        for edit in variant:
            index = edit.positions.index[self.rows].to(first.device)
            index = torch.where(index < 0, self.clean.width, index)
            first = torch.minimum(first, index.amin(1))
        return first

    def _stack_size(self, route: Route, n_rows: int) -> int:
        """Variants of a stack, by tokens and by the run's bound on memory."""
        view, size = self.view, self.view.compute_dtype.itemsize
        prompts = len(self.clean)
        rows = n_rows if route == "plain" else self.clean.width
        by_tokens = STACK_TOKENS // (prompts * rows)
        if route == "full" and not self._stacks_whole:
            return 1
        per_variant = prompts * self.clean.width * view.d_model * size * 8
        if route == "full":
            per_variant += prompts * self.clean.width * view.W_U.shape[1] * size
        else:
            per_variant += prompts * rows * view.d_model * size * 16
        return max(1, min(by_tokens, self.max_bytes // per_variant))

    # Plain route

    def _propagate(self, changes: Changes, is_first: bool) -> Tensor | None:
        """Variants by our own blocks -> last states at the rows that are read.

        The unchanged run goes along with the first stack of a group, as a control; where that
        stack is worked elsewhere, it goes alone. (With other numbers of rows a product may round
        otherwise, so a stack has the same members whoever works it.) None where it does not come
        out as the model's own.
        """
        first = torch.minimum(changes.first_moved.amin(0), self.clean.lengths.to(self.view.device))
        start = min(changes.starts)
        control, self._is_control_due = self._is_control_due, False
        if control and not is_first and not self.repeats(start[0], first):
            return None
        final = self._walk(changes, first, start if control and is_first else None)
        if control and is_first:
            if not self._is_clean(final[0], first):
                return None
            final = final[1:]
        unread = (self.read_at < first[:, None])[None, :, :, None]
        return torch.where(unread, self.clean_rows, final)

    def _walk(self, changes: Changes, first: Tensor, control: Stage | None) -> Tensor:
        assert self.plain is not None
        parts = (self.plain, self.clean, self.deltas, changes, first, self.read_at)
        return Walk(*parts, control).run()

    def _is_clean(self, final: Tensor, first: Tensor) -> bool:
        """Whether last states [rows, n, d_model] are the model's own; if not, ours are given up."""
        real = (self.read_at >= first[:, None]) & (self.read_at >= 0)
        if self.clean.agree(final[real], self.clean_rows[real]):
            return True
        self.plain = self.deltas.plain = None
        return False

    # Controls: the unchanged run by the route that the variants take

    def repeats(self, layer: int, first: Tensor) -> bool:
        """Whether our own blocks, from a layer on, give the model's clean last states.

        Args:
            layer: the layer from which they are run.
            first: the first row that is run in each prompt [rows].
        """
        try:
            final = self._walk(Changes(self.clean, []), first, (layer, 0))[0]
        except _NOT_CALLABLE:
            return False
        return self._is_clean(final, first)

    @functools.cached_property
    def replays(self) -> bool:
        """Whether the model's own blocks, called on stacked states, give its clean states."""
        if "replay" not in self.means.routes:
            return False
        clean = self.clean
        try:
            return all(
                self.clean.agree(half, clean.after(layer, "post"))
                for layer in range(self.view.n_layers)
                for half in self._twice(layer).chunk(2)
            )
        except _NOT_CALLABLE:
            return False

    def _twice(self, layer: int) -> Tensor:
        """A block on two copies of its clean input -> what the next block reads."""
        clean, nothing = self.clean, [(), ()]
        with self.view.watched(clean.hooks(nothing, range(layer, layer + 1))):
            after = clean.calls.call(layer, clean.act_pre(layer).repeat(2, 1, 1))
        put = clean.hooks(nothing, range(layer + 1, layer + 2))
        put = put.get(hook_name(Stream(layer + 1, "pre")), lambda states: None)
        changed = put(after)
        return after if changed is None else changed

    @functools.cached_property
    def _stacks_whole(self) -> bool:
        """Whether whole passes of stacked prompts give each what it gets in a pass of its own.

        They do unless a hook of the caller's makes prompts of a batch act on each other, or knows
        how many there are.

        Raises:
            UnsupportedModelError: two equal passes differ.
        """
        own = take(self._own_logits(), self.read_at)
        try:
            stacked = self.view.forward(self.clean.tokens.repeat(2, 1), self.clean.hooks([(), ()]))
            if all(self._agree_logits(half, own) for half in stacked.chunk(2)):
                return True
        except Exception:  # of a hook; if it is no matter of the number of prompts, it comes again
            if not self.view.user_hooks():
                raise
        again = self.view.forward(self.clean.tokens, self.clean.hooks([()]))
        if not self._agree_logits(again, own):
            raise UnsupportedModelError(
                f"two equal runs of {self.view.name} ({self.view.kind}) differ, so the effect of a "
                "change cannot be told from chance. Take off what is random or remembers earlier "
                f"calls.{note_on_hooks(self.view)}"
            )
        return False

    def _agree_logits(self, logits: Tensor, own: Tensor) -> bool:
        real = self.read_at >= 0
        return self.clean.agree(take(logits, self.read_at)[real], own[real])

    def _require_readout(self) -> None:
        """Raises where our final norm and unembedding do not give the model's logits."""
        error = self.scores.error_of_readout(self.clean.logits)
        if not error <= READOUT_TOLERANCE.get(self.view.dtype, 5e-2):
            raise ReadoutMismatchError(
                f"{self.view.name} ({self.view.kind}): final norm and unembedding of the last "
                f"state differ from the model's logits by {error:.1e} of their size on prompts "
                f"{self.rows.start} to {self.rows.stop - 1}.{note_on_hooks(self.view)}"
            )

    # Replay route

    def _replayed(self, stack: list[Variant]) -> Tensor:
        view, clean = self.view, self.clean
        first = min(stage(edit.site)[0] for variant in stack for edit in variant)
        states = clean.act_pre(first).repeat(len(stack), 1, 1)
        with view.watched(clean.hooks(stack, range(first, view.n_layers))):
            for layer in range(first, view.n_layers):
                states = clean.calls.call(layer, states)
        states = states.unflatten(0, (len(stack), len(clean)))
        return take_rows(states, self.read_at)


# Whether a model has the parts that our blocks are made of. That they agree is never remembered.
_structure: Memory[dict[Route, bool]] = Memory(lambda view: {})
