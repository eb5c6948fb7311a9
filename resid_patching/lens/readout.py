"""LensReadout: what a lens reads at every layer, prompt and position.

    logits = softcap(N(T(x)) W_U + b_U)     x a state of the stream, T the lens's translator

The statistics of the final norm N are those of T(x) itself, at every layer anew: a lens asks what
the model would say if it stopped here. (Direct logit attribution asks how the one final sum came
about, and shares the one final scale.) The last row is the model's own output, as it returned it.

What a lens reads in the middle is not what the model "believes" there: early states lie outside of
what the unembedding was trained on, and tokens whose unembedding rows have unusual norms come out
on top of early layers. Nothing is renormalised against that; `rank` of the wanted token helps.

Memory does not grow with layers x positions x vocabulary: logits live in one small buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from resid_patching.address import Address, Stream, parse
from resid_patching.errors import AddressError, LensMismatchError
from resid_patching.lens import quantities
from resid_patching.lens.quantities import Final, Wanted
from resid_patching.lens.results import LensResult, TopTokens, limits_of
from resid_patching.lens.states import StateChunk, chunks_of, read_chunk
from resid_patching.lens.unembed import Unembedding
from resid_patching.models import exact, float64_home
from resid_patching.prompts import Positions, Tokens, tokens_for
from resid_patching.result import Axis, Result, provenance
from resid_patching.run import Run
from resid_patching.shown import Shown
from resid_patching.tokens import token_text

if TYPE_CHECKING:
    import pandas

Translate = Callable[[int, Tensor], Tensor]
"""Called with the number of a row and its states [..., d_model]; gives what is unembedded."""

_ALWAYS = ("entropy", "kl", "cross_entropy")
_UNIT_OF = {"entropy": "nats", "kl": "nats", "cross_entropy": "nats", "prob": "probability"}


@dataclass(frozen=True, eq=False)
class LensReadout(Shown):
    """A lens on a run, read when asked.

    Attributes:
        run: the run.
        rows: the state that each row reads; the last is the end of the stream.
        plan: which lens this is, in words.
        translate: the lens's translators, or None for the logit lens.
    """

    run: Run
    rows: tuple[Address, ...]
    plan: str
    translate: Translate | None = None
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"LensReadout({self.plan}; {len(self.rows)} rows on {self.run!r})"

    @property
    def labels(self) -> tuple[str, ...]:
        """The rows' addresses, as text."""
        return tuple(map(str, self.rows))

    # How it is shown

    ordered: ClassVar[bool] = True

    def table(self) -> pandas.DataFrame:
        """What each layer says after the last token of each prompt.

        Returns:
            A data frame: layer, prompt, position, token, top_token, top_id, logit, value (its
            probability), entropy and kl.
        """
        found = self.measure("entropy", "kl", top=1)
        frame = found["top_tokens"].table()
        for name in ("entropy", "kl"):
            cells = found[name].to_frame().rename(columns={"value": name})
            frame = frame.merge(cells, on=["layer", "prompt", "position", "token"])
        return frame

    def headings(self) -> dict[str, str]:
        """Layer, prompt and position, the token there, what the layer says next, and how surely."""
        columns = {"layer": "layer", "prompt": "prompt", "position": "position", "token": "token"}
        columns |= {"top_token": "says", "value": "probability"}
        return columns | {"entropy": "entropy", "kl": "KL"}

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Which lens this is, on which model."""
        return (("lens", self.plan), ("in", "nats"), *self.kl.facts())

    def caveats(self) -> tuple[str, ...]:
        """What a lens is not."""
        return limits_of(self.plan)

    def pictures(self) -> tuple[str, ...]:
        """The token that each state would say, and KL by layer."""
        return ("trajectory", "lens_by_layer")

    # What is read

    @property
    def entropy(self) -> LensResult:
        """The entropy of each prediction, in nats [layer, batch, pos]."""
        return self._scalar("entropy")

    @property
    def kl(self) -> LensResult:
        """KL(final || lens), in nats [layer, batch, pos]."""
        return self._scalar("kl")

    @property
    def cross_entropy(self) -> LensResult:
        """-log p(next token), in nats [layer, batch, pos]; NaN at each prompt's last token."""
        return self._scalar("cross_entropy")

    def top_tokens(self, k: int = 10) -> TopTokens:
        """The k most probable tokens of each prediction [layer, batch, pos, rank].

        Raises:
            ValueError: k is no number from 1 to the size of the vocabulary.
        """
        found = self.measure(top=k)["top_tokens"]
        assert isinstance(found, TopTokens)
        return found

    def prob(self, tokens: Tokens | None = None) -> LensResult:
        """The probability of a token [layer, batch, pos].

        Args:
            tokens: one for all prompts, or one for each; None for what the model itself finds
                most probable at each position.

        Raises:
            TokenError: not one token, or not one for each prompt.
        """
        return self.measure("prob", tokens=tokens)["prob"]

    def rank(self, tokens: Tokens | None = None) -> LensResult:
        """How many tokens are above a token [layer, batch, pos]; 0 is the top prediction.

        Args:
            tokens: as in `prob`.
        """
        return self.measure("rank", tokens=tokens)["rank"]

    def _scalar(self, name: str) -> LensResult:
        self._require_unchanged()
        if name not in self._memo:
            self._memo.update(self.measure(*_ALWAYS))
        return self._memo[name]

    @exact()
    def measure(
        self, *scalars: str, top: int = 0, tokens: Tokens | None = None
    ) -> dict[str, LensResult]:
        """Several quantities from one pass of the unembedding.

        Args:
            scalars: any of `entropy`, `kl`, `cross_entropy`, `prob`, `rank`.
            top: how many of the most probable tokens; 0 for none.
            tokens: the token of `prob` and `rank`, as in `prob`.

        Returns:
            A result for each name, and `top_tokens` where asked.

        Raises:
            ValueError: an unknown quantity, nothing, or an impossible `top` was asked for.
            TokenError: not one token, or not one for each prompt.
        """
        wanted = self._wanted(scalars, top)
        needs_token = wanted.scalars & {"prob", "rank"}
        ids = None
        if needs_token and tokens is not None:
            ids = torch.tensor(
                tokens_for(self.run.view, self.run.prompts, tokens, "token"), device="cpu"
            )
        cells = _Cells(len(self.rows), self.run)
        for chunk in self._chunks():
            for where, row, found in self._read_chunk(chunk, wanted, ids):
                cells.put(chunk, where, row, found)
        return self._results(cells.found, wanted, tokens)

    def _wanted(self, scalars: Sequence[str], top: int) -> Wanted:
        if unknown := [name for name in scalars if name not in quantities.SCALARS]:
            known = ", ".join(quantities.SCALARS)
            raise ValueError(f"{unknown[0]!r} is no quantity of a lens; there are {known}")
        d_vocab = self.run.view.W_U.shape[1]
        if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= d_vocab:
            raise ValueError(f"the number of top tokens is from 1 to {d_vocab}, got {top!r}")
        if not scalars and not top:
            raise ValueError("nothing was asked for; give a quantity, or top=10")
        return Wanted(frozenset(scalars), top)

    def _read_chunk(
        self, chunk: StateChunk, wanted: Wanted, ids: Tensor | None
    ) -> Iterator[tuple[Tensor, int, dict[str, Tensor]]]:
        unembedding = Unembedding.of(self.run.view)
        size = min(unembedding.block_rows, len(chunk.real))
        room, scratch = unembedding.buffer(size), unembedding.buffer(size)
        following = self._following(chunk)
        for where, take in chunk.blocks(size):
            own = take(chunk.final).to(unembedding.device, unembedding.dtype)
            final = Final.of(own) if "kl" in wanted.scalars else None
            tokens = None
            if wanted.scalars & {"prob", "rank"}:
                tokens = own.argmax(-1) if ids is None else self._own_tokens(chunk, where, ids)
            for row in range(len(self.rows)):
                logits = self._block(row, take(chunk.states[row]), own, unembedding, room)
                found = quantities.read(
                    logits,
                    wanted,
                    final=final,
                    tokens=tokens,
                    following=following[where] if "cross_entropy" in wanted.scalars else None,
                    scratch=scratch[: len(where)],
                )
                if "kl" in found and row == len(self.rows) - 1:
                    found["kl"].zero_()  # of the model's output from itself
                yield where, row, found

    def _block(
        self, row: int, states: Tensor, own: Tensor, unembedding: Unembedding, room: Tensor
    ) -> Tensor:
        """The logits of one row at a block of tokens, in the buffer; the last are the model's."""
        room = room[: len(own)]
        if row == len(self.rows) - 1:
            return room.copy_(own)
        return unembedding.logits(self._translated(row, unembedding.cast(states)), out=room)

    def _translated(self, row: int, states: Tensor) -> Tensor:
        return states if self.translate is None else self.translate(row, states)

    def _own_tokens(self, chunk: StateChunk, where: Tensor, ids: Tensor) -> Tensor:
        return ids.to(where.device)[where // chunk.width + chunk.rows.start]

    def _following(self, chunk: StateChunk) -> Tensor:
        """The next token of each cell, -1 where there is none."""
        prompts = self.run.prompts
        tokens, mask = prompts.tokens[chunk.rows], prompts.mask[chunk.rows]
        following = torch.full_like(tokens, -1)
        following[:, :-1] = tokens[:, 1:].masked_fill(~mask[:, 1:], -1)
        return following[:, : chunk.width].flatten().to(self.run.view.device)

    # Logits themselves

    @exact()
    def logits(
        self, *, layer: Address | str, positions: Positions = -1
    ) -> Float[Tensor, "batch n d_vocab"]:
        """The lens's logits at one layer.

        Args:
            layer: the row, by its label; `embed` is another name of the first state, and
                `resid_pre.l` of `resid_post.l-1`.
            positions: one for all prompts, one for each, or None for all.

        Returns:
            [batch, n, d_vocab]; NaN where a prompt has no such position. The last row is what the
            model returned, in its own dtype.

        Raises:
            AddressError: no such row.
            PositionError: a prompt has no such position.
        """
        row = self.row(layer)
        where = self.run.locate(positions)
        unembedding = Unembedding.of(self.run.view)
        parts: list[Tensor] = []
        for chunk in self._chunks():
            index = where.index[chunk.rows]
            cells = index.clamp_min(0) + chunk.width * torch.arange(len(index))[:, None].to(index)
            found = self._logits_of(row, chunk, cells.flatten(), unembedding)
            found = found.unflatten(0, (len(index), -1))
            found[index.to(found.device) < 0] = torch.nan
            parts.append(found)
        return torch.cat(parts)

    def _logits_of(
        self, row: int, chunk: StateChunk, cells: Tensor, unembedding: Unembedding
    ) -> Tensor:
        cells = cells.to(chunk.final.device)
        if row == len(self.rows) - 1:
            return chunk.final[cells]
        blocks = cells.split(unembedding.block_rows)
        states = chunk.states[row]
        inputs = (unembedding.cast(states[block.to(states.device)]) for block in blocks)
        return torch.cat([unembedding.logits(self._translated(row, x)) for x in inputs])

    def row(self, layer: Address | str) -> int:
        """The number of a row.

        Raises:
            AddressError: the lens has no such row.
        """
        address = self.rows[0] if layer == "embed" else parse(layer)
        if isinstance(address, Stream) and address.place == "pre" and address.layer:
            address = Stream(address.layer - 1, "post")
        if address not in self.rows:
            raise AddressError(
                f"this lens has no row {str(layer)!r}; its rows are {', '.join(self.labels)}"
            )
        return self.rows.index(address)

    # Against another readout, and over all tokens

    @exact()
    def js(self, other: LensReadout) -> LensResult:
        """The Jensen-Shannon divergence from another readout, in nats [layer, batch, pos].

        Raises:
            LensMismatchError: the other reads other prompts, rows or another vocabulary.
        """
        plan = "Jensen-Shannon divergence"
        return self._compare(other, quantities.jensen_shannon, "nats", plan)

    @exact()
    def total_variation(self, other: LensReadout) -> LensResult:
        """Half the sum of |p - q| over the vocabulary [layer, batch, pos].

        Raises:
            LensMismatchError: the other reads other prompts, rows or another vocabulary.
        """
        plan = "total variation"
        return self._compare(other, quantities.total_variation, "probability", plan)

    def _compare(self, other: LensReadout, distance: Any, unit: str, plan: str) -> LensResult:
        _require_comparable(self, other)
        cells = _Cells(len(self.rows), self.run)
        ours = Unembedding.of(self.run.view)
        theirs = Unembedding.of(other.run.view)
        for rows in chunks_of(self.run, self.rows):
            left = read_chunk(self.run, self.rows, rows)
            right = read_chunk(other.run, other.rows, rows)
            size = max(1, ours.block_rows // 4)  # it takes several tensors of this size
            for where, _ in left.blocks(size):
                for row in range(len(self.rows)):
                    p = self._logits_of(row, left, where, ours).to(ours.dtype)
                    q = other._logits_of(row, right, where, theirs).to(p)
                    cells.put(left, where, row, {"value": distance(p, q)})
        name = f"{plan} of {self.plan} and {other.plan}"
        return self._result(cells.found["value"], unit, name)

    @exact()
    def marginal_bias(self) -> Result:
        """KL(mean final || mean lens), in nats [layer]: a shift that all tokens share.

        The means of the distributions are over all real tokens of all prompts.

        Source: Belrose et al. 2023 (arXiv 2303.08112), section 3.
        """
        unembedding = Unembedding.of(self.run.view)
        home = float64_home(unembedding.device)
        total = torch.zeros(len(self.rows), unembedding.d_vocab, dtype=torch.float64, device=home)
        count = 0
        for chunk in self._chunks():
            count += len(chunk.real)
            for where, _ in chunk.blocks(unembedding.block_rows):
                for row in range(len(self.rows)):
                    logits = self._logits_of(row, chunk, where, unembedding)
                    total[row] += logits.to(unembedding.dtype).softmax(-1).sum(0).to(total)
        log_mean = (total / count).log()
        final = total[-1] / count
        values = torch.xlogy(final, final) - final * log_mean
        values = values.masked_fill(final == 0, 0)  # where 0 log 0 is 0
        plan = f"KL of the marginals, mean over {count} tokens, {self.plan}"
        axes = (Axis("layer", self.labels),)
        return Result(values.sum(-1).clamp_min(0), axes, "nats", self._provenance(plan))

    # Keeping and laying out

    def _chunks(self) -> Iterator[StateChunk]:
        """The run in chunks; kept for the next time where it is small."""
        self._require_unchanged()
        if "chunks" in self._memo:
            yield from self._memo["chunks"]
            return
        kept: list[StateChunk] | None = []
        for rows in chunks_of(self.run, self.rows):
            chunk = read_chunk(self.run, self.rows, rows)
            if kept is not None:
                kept.append(chunk)
                kept = kept if sum(c.bytes for c in kept) <= self.run.max_bytes // 4 else None
            yield chunk
            del chunk
        if kept is not None:
            self._memo["chunks"] = kept

    def _require_unchanged(self) -> None:
        self.run.view.require_unchanged(whole=bool(self._memo))
        if self.run.view.user_hooks():  # what they do may depend on anything
            self._memo.clear()

    def _results(
        self, found: dict[str, Tensor], wanted: Wanted, tokens: Tokens | None
    ) -> dict[str, LensResult]:
        results: dict[str, LensResult] = {}
        for name in sorted(wanted.scalars):
            what = name
            if name in ("prob", "rank"):
                what += " of the model's top token" if tokens is None else " of given tokens"
            results[name] = self._result(
                found[name], _UNIT_OF.get(name, "tokens"), f"{what}, {self.plan}"
            )
        if wanted.top:
            results["top_tokens"] = self._top(found)
        return results

    def _result(self, values: Tensor, unit: str, plan: str) -> LensResult:
        return LensResult(
            values, self._axes(), unit, self._provenance(plan), self.run.prompts.token_texts
        )

    def _top(self, found: dict[str, Tensor]) -> TopTokens:
        ids = found["top_ids"].nan_to_num(-1).long()
        tokenizer = self.run.view.tokenizer
        names = tuple((i, token_text(tokenizer, i)) for i in ids.unique().tolist() if i >= 0)
        k = ids.shape[-1]
        return TopTokens(
            values=found["top_probs"],
            axes=(*self._axes(), Axis("rank", tuple(range(k)))),
            unit="probability",
            provenance=self._provenance(f"top {k} tokens, {self.plan}"),
            token_texts=self.run.prompts.token_texts,
            ids=ids,
            logits=found["top_logits"],
            texts=names,
        )

    def _axes(self) -> tuple[Axis, ...]:
        width = max(self.run.prompts.lengths)
        return (
            Axis("layer", self.labels),
            Axis("batch", tuple(range(len(self.run)))),
            Axis("pos", tuple(range(width))),
        )

    def _provenance(self, plan: str) -> Any:
        plan += ", norm recomputed at each layer"
        return provenance(self.run, plan)


class _Cells:
    """Values laid out [layer, batch, pos, ...], NaN where nothing was put."""

    def __init__(self, n_rows: int, run: Run) -> None:
        self.n_rows = n_rows
        self.shape = (len(run), max(run.prompts.lengths))
        self.found: dict[str, Tensor] = {}

    def put(self, chunk: StateChunk, where: Tensor, row: int, values: dict[str, Tensor]) -> None:
        batch, pos = where // chunk.width + chunk.rows.start, where % chunk.width
        for name, value in values.items():
            # Ids are exact in float32 (to 2^24), and NaN says that there is none.
            dtype = value.dtype if value.is_floating_point() else torch.float32
            if name not in self.found:
                full = (self.n_rows, *self.shape, *value.shape[1:])
                self.found[name] = torch.full(full, torch.nan, dtype=dtype, device=value.device)
            self.found[name][row, batch, pos] = value.to(dtype)


def _require_comparable(left: LensReadout, right: LensReadout) -> None:
    pairs = (
        ("prompts", left.run.prompts.hash, right.run.prompts.hash),
        ("rows", ", ".join(left.labels), ", ".join(right.labels)),
        ("vocabulary", left.run.view.W_U.shape[1], right.run.view.W_U.shape[1]),
    )
    for what, one, other in pairs:
        if one != other:
            raise LensMismatchError(
                f"two readouts are compared cell by cell, but their {what} differ: {one} and "
                f"{other}. Read both on the same prompts with the same kind of rows."
            )
