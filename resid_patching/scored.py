"""What an attribution scores: answers against foils, or directions of the caller.

Each is a vector that the normed last state is multiplied with. Beside it stands the model's own
value, which the rows must add up to.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch
from torch import Tensor

from resid_patching.errors import TokenError
from resid_patching.models import ModelView
from resid_patching.prompts import Positions, Tokens, tokens_for
from resid_patching.run import Run
from resid_patching.tokens import token_text


class Scored:
    """What is scored: directions of the normed last state, constants, and the model's own values.

    Attributes:
        directions: the different directions [unique, d_model].
        bias: what the unembedding's bias adds to each [unique]; None where it is not applied.
        which: the direction of each prompt [batch].
        unit: of the values.
        plan: in words.
        floor: what a gap is small beside, where all rows are smaller [batch, 1].
    """

    def __init__(
        self,
        run: Run,
        positions: Positions,
        directions: Tensor,
        bias: Tensor | None,
        which: Tensor,
    ) -> None:
        self.view, self.positions = run.view, run.locate(positions)
        self.directions, self.bias, self.which = directions, bias, which
        self.folded = self.view.final_norm.fold(directions)
        self.unit, self.plan = "logits", ""
        self.floor = torch.ones(len(run), 1, dtype=directions.dtype, device=directions.device)
        self._raw: list[Tensor] = []
        self._capped: list[Tensor] = []

    def constants(self, sigma: Tensor) -> Tensor:
        """The constant rows [1 or 2, batch, n]; NaN where sigma is."""
        rows = [(self.directions @ self.view.final_norm.bias)[self.which]]
        if self.bias is not None:
            rows.append(self.bias[self.which])
        found = torch.stack(rows)[..., None]
        return found.expand(len(rows), *sigma.shape).clone() + 0 * sigma

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """What is read of a forward pass besides the logits; here nothing."""
        return contextlib.nullcontext()

    def readers(self) -> dict[str, Any]:
        """What reads the logits of a forward pass, as arguments of a sweep."""
        raise NotImplementedError

    def read_final(self, final: Tensor) -> None:
        """Keeps the values of the last stream states [batch, pos, d_model], read by us."""
        raise NotImplementedError

    def names(self) -> dict[str, Any]:
        """What is scored, as fields of the result."""
        raise NotImplementedError

    def values(self) -> tuple[Tensor, Tensor | None]:
        """The model's own values before and (where it has one) after the softcap."""
        absent = ~self.positions.valid.to(self.view.device)
        raw = torch.cat(self._raw)
        raw[absent] = torch.nan
        if not self._capped or self.view.softcap is None:
            return raw, None
        capped = torch.cat(self._capped)
        capped[absent] = torch.nan
        return raw, capped

    def _of_states(self, final: Tensor) -> Tensor:
        """The dot products of our own normed last states [batch, n], without any bias."""
        states = self.positions.take(final, slice(0, len(final)))
        normed = self.view.final_norm(states.to(self.view.device, self.view.compute_dtype))
        return torch.einsum("bnm,bm->bn", normed, self.directions[self.which])


class ScoredTokens(Scored):
    """Answers, each against a foil or the mean over the vocabulary."""

    def __init__(self, run: Run, answer: Tokens, foil: Tokens | None, positions: Positions) -> None:
        view = run.view
        answers = tokens_for(view, run.prompts, answer, "answer")
        foils = None if foil is None else tokens_for(view, run.prompts, foil, "foil")
        if foils is not None and (same := [i for i, a in enumerate(answers) if a == foils[i]]):
            raise TokenError(
                f"prompt {same[0]}: answer and foil are the same token {answers[same[0]]}"
            )
        self.answers = torch.tensor(answers, device=view.device)
        self.foils = None if foils is None else torch.tensor(foils, device=view.device)
        pairs = list(zip(answers, foils or [None] * len(answers), strict=True))
        unique = list(dict.fromkeys(pairs))
        place = {pair: number for number, pair in enumerate(unique)}
        which = torch.tensor([place[pair] for pair in pairs], device=view.device)
        super().__init__(run, positions, *_directions(view, unique), which)
        self.plan = f"answer against {'the vocabulary mean' if foils is None else 'foil'}"
        if view.softcap is not None:
            self.plan += f", before the output softcap of {view.softcap:g}"

    def readers(self) -> dict[str, Any]:
        """What keeps the model's differences of logits, after and before any softcap."""

        def read(logits: Tensor, rows: slice) -> None:
            self._capped.append(self._difference(logits, rows))

        def read_raw(logits: Tensor, rows: slice) -> None:
            self._raw.append(self._difference(logits, rows))

        return {"logits": read, "raw_logits": read_raw}

    def read_final(self, final: Tensor) -> None:
        """Keeps the differences of the last stream states [batch, pos, d_model], read by us."""
        view = self.view
        if view.softcap is None:
            assert self.bias is not None
            self._raw.append(self._of_states(final) + self.bias[self.which][:, None])
            return
        states = self.positions.take(final, slice(0, len(final)))
        states = states.to(view.device, view.compute_dtype)
        for row in range(len(final)):
            rows = slice(row, row + 1)
            logits = view.readout(states[rows])
            self._raw.append(self._difference(logits, rows))
            capped = view.softcap * (logits / view.softcap).tanh()
            self._capped.append(self._difference(capped, rows))

    def _difference(self, logits: Tensor, rows: slice) -> Tensor:
        taken = logits.to(self.view.device, self.view.compute_dtype)
        answer = self.answers[rows]
        value = _column(taken, answer)
        other = taken.mean(-1) if self.foils is None else _column(taken, self.foils[rows])
        return value - other

    def names(self) -> dict[str, Any]:
        """Answers and foils, as ids and as texts."""

        def texts(ids: tuple[int, ...]) -> tuple[str, ...]:
            return tuple(token_text(self.view.tokenizer, one) for one in ids)

        answers = tuple(self.answers.tolist())
        foils = None if self.foils is None else tuple(self.foils.tolist())
        return {
            "answers": answers,
            "foils": foils,
            "answer_texts": texts(answers),
            "foil_texts": None if foils is None else texts(foils),
        }


class ScoredDirection(Scored):
    """A direction of the caller's, for all prompts or for each."""

    def __init__(self, run: Run, direction: Tensor, positions: Positions) -> None:
        view, n = run.view, len(run)
        shape = tuple(direction.shape) if isinstance(direction, Tensor) else ()
        if shape not in ((view.d_model,), (n, view.d_model)):
            raise ValueError(
                f"a direction is a tensor [d_model], here [{view.d_model}], or one for each "
                f"prompt, [{n}, {view.d_model}]; got {list(shape) or repr(direction)}"
            )
        directions = direction.detach().to(view.device, view.compute_dtype)
        if not bool(directions.isfinite().all()):
            raise ValueError("the direction holds NaN or infinite numbers")
        each = directions.ndim == 2
        directions = directions if each else directions[None]
        which = torch.arange(n) if each else torch.zeros(n, dtype=torch.long)
        super().__init__(run, positions, directions, None, which.to(view.device))
        lengths = directions.norm(dim=-1)
        self.floor = lengths[self.which][:, None]
        self.unit = "dot product"
        said = (
            "one direction a prompt" if each else f"a direction of length {float(lengths[0]):.4g}"
        )
        digest = hashlib.sha256(directions.cpu().double().numpy().tobytes()).hexdigest()
        self.words = f"{said} (sha256 {digest[:12]})"
        self.plan = f"the normed last state along {self.words}"
        self._normed: Tensor | None = None

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Holds what the unembedding is given in the pass that is running."""
        return self.view.reading_normed(self._hold)

    def _hold(self, normed: Tensor) -> None:
        self._normed = normed.detach()

    def readers(self) -> dict[str, Any]:
        """What keeps the dot products; the logits only tell that the pass has ended."""

        def read(logits: Tensor, rows: slice) -> None:
            assert self._normed is not None
            normed = self.positions.take(self._normed, rows)
            normed = normed.to(self.view.device, self.view.compute_dtype)
            own = self.directions[self.which[rows]]
            self._raw.append(torch.einsum("bnm,bm->bn", normed, own))

        return {"logits": read}

    def read_final(self, final: Tensor) -> None:
        """Keeps the dot products of the last stream states, normed by us."""
        self._raw.append(self._of_states(final))

    def names(self) -> dict[str, Any]:
        """The direction in words; there are no tokens."""
        return {
            "answers": (),
            "foils": None,
            "answer_texts": (),
            "foil_texts": None,
            "direction": self.words,
        }


def _directions(view: ModelView, unique: list[tuple[int, int | None]]) -> tuple[Tensor, Tensor]:
    """The direction and the unembedding's bias of each pair of answer and foil."""
    ids = torch.tensor([answer for answer, _ in unique], device=view.device)
    direction, bias = view.unembed_columns(ids), view.unembed_bias(ids)
    if unique[0][1] is None:
        mean = view.W_U.detach().mean(1, dtype=view.compute_dtype)
        return direction - mean, bias - view.b_U.detach().mean(dtype=view.compute_dtype)
    other = torch.tensor([foil for _, foil in unique], device=view.device)
    return direction - view.unembed_columns(other), bias - view.unembed_bias(other)


def _column(logits: Tensor, ids: Tensor) -> Tensor:
    index = ids[:, None, None].expand(-1, logits.shape[1], 1)
    return logits.gather(-1, index)[..., 0]
