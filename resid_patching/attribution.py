"""Direct logit attribution: what each component wrote towards a token, exactly.

For a final stream state x = sum c_i at a position, final norm with gain gamma and bias beta,
unembedding W_U and b_U, and the answer direction u = W_U[:, answer] - W_U[:, foil]:

    logit difference = sum_i ((c_i - mean c_i) / sigma) . (gamma * u)
                       + beta . u + b_U[answer] - b_U[foil]

sigma is the model's own divisor at that position, one for every part (RMSNorm: no mean, no beta).
With the two constants, the rows *are* the logit difference; the result carries the gap, and the
call refuses where it is not rounding.

Sign: positive rows push the answer up against the foil. A row is what was written *directly*: a
component that matters only through later ones scores near zero, and two components that write
and erase the same vector both score high. Ablation answers what depends on a component.

    dla = direct_logit_attribution(run, answer=" Mary", foil=" John", by="head")
    dla.total, dla.model_value, dla.gap

Any vector d of the stream may take the place of u: it is applied to the normed last state, as the
columns of W_U are, and there is no b_U. The rows sum to N(x) . d.

Source: Elhage et al. 2021; Wang et al. 2022 (arXiv 2211.00593), section 3.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.address import FinalNormBias, UnembedBias
from resid_patching.decomposition import By, Parts, decompose
from resid_patching.errors import GapError, TokenError
from resid_patching.markup import quoted
from resid_patching.models import TOLERANCE, ModelView, exact, require, require_finite_at
from resid_patching.prompts import Positions, Tokens, tokens_for
from resid_patching.result import Axis, Result, insert_tokens, position_axis, provenance
from resid_patching.run import Run
from resid_patching.tokens import token_text

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Result):
    """Direct logit attribution: values [component, batch, pos], in logits.

    Of a direction they are dot products of the normed last state with it.

    Attributes:
        by: the grain: component, head or neuron.
        model_value: the model's own logit difference [batch, pos], before any output softcap; of a
            direction the dot product with the model's own normed last state.
        capped_value: the same after the softcap, or None where the model has none.
        answers: the answer's id for each row; none of a direction.
        foils: the foil's id for each row, or None: against the mean over the vocabulary.
        answer_texts, foil_texts: the same as text.
        token_texts: the tokens of each row as text.
        position_index: the position of each cell [batch, pos], -1 where a row has none.
        direction: a direction, in words: its length, and the sha256 of its numbers; None of tokens.
    """

    kind: ClassVar[str] = "attribution"

    by: By
    model_value: Float[Tensor, "batch pos"]
    capped_value: Float[Tensor, "batch pos"] | None
    answers: tuple[int, ...]
    foils: tuple[int, ...] | None
    answer_texts: tuple[str, ...]
    foil_texts: tuple[str, ...] | None
    token_texts: tuple[tuple[str, ...], ...]
    position_index: Int[Tensor, "batch pos"]
    direction: str | None = None

    @property
    def total(self) -> Float[Tensor, "batch pos"]:
        """The sum of all rows."""
        return self.values.sum(0)

    @property
    def gap(self) -> Float[Tensor, "batch pos"]:
        """|total - model_value|: how far the rows are from adding up."""
        return (self.total - self.model_value).abs()

    @property
    def components(self) -> tuple[str, ...]:
        """The rows' addresses, as text."""
        return tuple(map(str, self.axis("component").labels))

    @property
    def constants(self) -> tuple[str, ...]:
        """The rows that no prompt changes: the biases of final norm and unembedding."""
        norm_bias, unembed_bias = str(FinalNormBias()), str(UnembedBias())
        return (norm_bias,) if self.direction is not None else (norm_bias, unembed_bias)

    @property
    def own_value(self) -> str:
        """What `model_value` is called."""
        what = "difference" if self.direction is None else "dot product"
        return f"the model's own {what}"

    @property
    def _n_prompts(self) -> int:
        return len(self.token_texts)

    adds_up: ClassVar[bool] = True

    @property
    def grid_name(self) -> str:
        """What the values of a grid are; there is none of several positions."""
        return "written" if len(self.axis("pos").labels) == 1 else ""

    def table(self) -> pandas.DataFrame:
        """One row a component and position: component, layer, head, position, (se,) value.

        With one prompt, the token at each position stands beside it. With several, `position` is
        the one that was asked for ("own": each prompt has its own), values are means over prompts
        with their standard error, and they are NaN at positions that not every prompt has.
        """
        if self._n_prompts > 1:
            return super().table()
        return self.to_frame().drop(columns="prompt")

    def headings(self) -> dict[str, str]:
        """Component, position and token where there are several, value and standard error."""
        columns = {"component": "component"}
        if len(self.axis("pos").labels) > 1:
            columns["position"] = "position"
            columns |= {"token": "token"} if self._n_prompts == 1 else {}
        columns["value"] = self.unit
        return columns | ({"se": "se"} if self.has_error else {})

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What is scored, the sum of the rows, the model's own value and the gap."""
        mean = "mean " if self._n_prompts > 1 else ""
        rows = [
            (f"{mean}sum of all {len(self.components)} rows", self._mean(self.total)),
            (self.own_value, self._mean(self.model_value)),
            ("largest gap", f"{float(self.gap[self.gap.isfinite()].max()):.1e}"),
        ]
        means = self.values.detach().cpu().double().nanmean((1, 2))
        parts = [f"{n} {float(means[self.components.index(n)]):+.4f}" for n in self.constants]
        rows.append(("constants", ", ".join(parts)))
        if self.capped_value is not None:
            rows.append(("after the output softcap", self._mean(self.capped_value)))
        if self.direction is not None:
            rows.insert(0, ("score", f"the normed last state along {self.direction}"))
        elif self._n_prompts == 1:
            against = "the vocabulary mean"
            if self.foil_texts is not None:
                against = quoted(self.foil_texts[0])
            rows.insert(0, ("score", f"{quoted(self.answer_texts[0])} against {against}"))
        return (*rows, *super().facts())

    def _mean(self, values: Tensor) -> str:
        return f"{float(values.detach().cpu().double().nanmean()):+.4f} {self.unit}"

    def caveats(self) -> tuple[str, ...]:
        """A row is a direct effect."""
        return ("A row is a direct effect: a part that acts through later parts scores near zero.",)

    def pictures(self) -> tuple[str, ...]:
        """Its grid of heads or positions, its bars and its sum along depth."""
        if len(self.axis("pos").labels) > 1:
            return ("show",)
        heads = ("heatmap",) if self.by == "head" else ()
        return (*heads, "attribution_bars", "accumulated")

    def sel(self, **labels: object) -> Tensor:
        """Values at labels, those axes dropped.

        `pos` is a position of the prompt; a negative one counts from each row's last token.

        Raises:
            KeyError: an axis or label does not exist, or a row has no such position.
        """
        if "pos" not in labels:
            return super().sel(**labels)
        rest = {name: label for name, label in labels.items() if name != "pos"}
        wanted = int(labels["pos"])  # type: ignore[call-overload]
        lengths = torch.tensor([len(texts) for texts in self.token_texts], device="cpu")
        target = lengths + wanted if wanted < 0 else torch.full_like(lengths, wanted)
        found = (self.position_index.cpu() == target[:, None]) & (target[:, None] >= 0)
        if not found.any(1).all():
            raise KeyError(f"not every prompt has position {wanted} in this result")
        column = found.long().argmax(1).to(self.values.device)
        values = self.values[:, torch.arange(len(column), device=column.device), column]
        reduced = Result(values, self.axes[:2], self.unit, self.provenance)
        return reduced.sel(**rest)

    def to_frame(self) -> pandas.DataFrame:
        """Long form: component, layer, head, prompt, position, token, value.

        One row a cell that exists.
        """
        frame = super().to_frame()
        n_parts = self.values.shape[0]
        frame["position"] = self.position_index.cpu().flatten().repeat(n_parts).numpy()
        insert_tokens(frame, self.token_texts)
        return frame.loc[frame["position"] >= 0].reset_index(drop=True)


@exact()
def direct_logit_attribution(
    run: Run,
    answer: Tokens | None = None,
    foil: Tokens | None = None,
    *,
    direction: Float[Tensor, " d_model"] | Float[Tensor, "batch d_model"] | None = None,
    by: By = "component",
    positions: Positions = -1,
) -> Attribution:
    """What each component wrote towards the answer and against the foil, or along a direction.

    Args:
        run: a run, from `capture`.
        answer: a token as text or id, or one for each prompt.
        foil: the token it is scored against, or one for each prompt. None scores against the mean
            over the vocabulary, and the result says so: absolute logits cannot be compared
            between a centred and an uncentred unembedding, differences can.
        direction: instead of an answer, any direction of the stream [d_model], or one for each
            prompt [batch, d_model]. It is applied to the normed last state, as the columns of the
            unembedding are, and is not scaled. So it belongs to these weights: folding the final
            norm into the unembedding changes what one direction reads.
        by: `component`, `head` or `neuron`.
        positions: the scored position of every prompt (-1, the last real token), one for each
            prompt, or None for all.

    Returns:
        An `Attribution` [component, batch, pos] in logits, whose rows sum to the model's own
        logit difference. Of a direction it is in dot products, whose rows sum to that of the
        model's own normed last state with the direction; there is no row of the unembedding's bias.

    Raises:
        TokenError: an answer or foil that is not one token; or not exactly one of answer and
            direction.
        ValueError: a direction of another shape, or that is NaN or infinite.
        PositionError: a prompt has no such position.
        NotFiniteError: the model's last state or logits are NaN or infinite.
        GapError: the rows do not add up to the model's own value.
        HeadMismatchError, NeuronMismatchError: the model has no such exact parts.

    Warns:
        AnswerWarning: an answer without its leading space that is another token.
    """
    with run.view.unchanged():
        parts = decompose(run, by=by)
        require(run.view, "readout")
        if direction is not None and answer is None and foil is None:
            return _attribute(run, parts, _AlongDirection(run, direction, positions), positions)
        if direction is not None or answer is None:
            both = "neither" if direction is None else "both"
            raise TokenError(
                "what is scored is an answer, with or without a foil, or a direction: give "
                f"exactly one of answer and direction=; got {both}"
            )
        return _attribute(run, parts, _OfTokens(run, answer, foil, positions), positions)


def _attribute(run: Run, parts: Parts, score: _Score, positions: Positions) -> Attribution:
    view = run.view
    if run.cache is None or view.user_hooks():
        with score.reading():
            values, states = parts.sweep(score.folded, score.which, positions, **score.readers())
    else:  # against one pass of the model itself, made once for all analyses of the cache
        score.read_final(run.own_final)
        values, states = parts.sweep(score.folded, score.which, positions)
    sigma = view.final_norm.scale(states)
    constants = score.constants(sigma)
    rows = torch.cat([values / sigma, constants])
    model_value, capped = score.values()
    require_finite_at(model_value, score.positions.valid, view.dtype, "the model's own logits")
    _require_gap(view, rows, model_value, score)
    biases = (str(FinalNormBias()), str(UnembedBias()))
    return Attribution(
        values=rows,
        axes=(
            Axis("component", (*map(str, parts.writers), *biases[: len(constants)])),
            Axis("batch", tuple(range(len(run)))),
            position_axis(positions, rows.shape[-1]),
        ),
        unit=score.unit,
        provenance=provenance(run, f"direct logit attribution by {parts.by}, {score.plan}"),
        by=parts.by,
        model_value=model_value,
        capped_value=capped,
        token_texts=run.prompts.token_texts,
        position_index=score.positions.index.to(rows.device),
        **score.names(),
    )


class _Score:
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


class _OfTokens(_Score):
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
        def read(logits: Tensor, rows: slice) -> None:
            self._capped.append(self._difference(logits, rows))

        def read_raw(logits: Tensor, rows: slice) -> None:
            self._raw.append(self._difference(logits, rows))

        return {"logits": read, "raw_logits": read_raw}

    def read_final(self, final: Tensor) -> None:
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


class _AlongDirection(_Score):
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
        return self.view.reading_normed(self._hold)

    def _hold(self, normed: Tensor) -> None:
        self._normed = normed.detach()

    def readers(self) -> dict[str, Any]:
        def read(logits: Tensor, rows: slice) -> None:
            """Of the pass whose normed states are held."""
            assert self._normed is not None
            normed = self.positions.take(self._normed, rows)
            normed = normed.to(self.view.device, self.view.compute_dtype)
            own = self.directions[self.which[rows]]
            self._raw.append(torch.einsum("bnm,bm->bn", normed, own))

        return {"logits": read}

    def read_final(self, final: Tensor) -> None:
        self._raw.append(self._of_states(final))

    def names(self) -> dict[str, Any]:
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


def _require_gap(view: ModelView, rows: Tensor, model_value: Tensor, score: _Score) -> None:
    gap = (rows.sum(0) - model_value).abs()
    scale = torch.maximum(rows.abs().amax(0), model_value.abs()).maximum(score.floor)
    allowed = TOLERANCE[view.dtype] * scale
    wrong = gap > allowed
    if bool((wrong | (gap.isnan() & score.positions.valid.to(gap.device))).any()):
        row, column = divmod(int((gap - allowed).nan_to_num(torch.inf).argmax()), gap.shape[1])
        hooks = view.user_hooks()
        note = f" Hooks of yours are on at {', '.join(hooks[:3])}." if hooks else ""
        raise GapError(
            f"prompt {row}: the rows sum to {float(rows.sum(0)[row, column]):.5g}, but the model "
            f"says {float(model_value[row, column]):.5g}; the gap {float(gap[row, column]):.1e} "
            f"is above {float(allowed[row, column]):.1e}, so nothing is returned. A cache of "
            f"other prompts, or a hook that edits the stream, does this.{note}"
        )
