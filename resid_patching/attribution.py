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

Source: Elhage et al. 2021; Wang et al. 2022 (arXiv 2211.00593), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.address import FinalNormBias, UnembedBias
from resid_patching.decomposition import By, decompose
from resid_patching.errors import GapError, TokenError
from resid_patching.markup import quoted
from resid_patching.models import TOLERANCE, ModelView, exact, require, require_finite_at
from resid_patching.prompts import PositionIndex, Positions, Tokens, tokens_for
from resid_patching.result import Axis, Result, insert_tokens, position_axis, provenance
from resid_patching.run import RowReader, Run
from resid_patching.tokens import token_text

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Result):
    """Direct logit attribution: values [component, batch, pos], in logits.

    Attributes:
        by: the grain: component, head or neuron.
        model_value: the model's own logit difference [batch, pos], before any output softcap.
        capped_value: the same after the softcap, or None where the model has none.
        answers: the answer's id for each row.
        foils: the foil's id for each row, or None: against the mean over the vocabulary.
        answer_texts, foil_texts: the same as text.
        token_texts: the tokens of each row as text.
        position_index: the position of each cell [batch, pos], -1 where a row has none.
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
        """The two rows that no prompt changes: the biases of final norm and unembedding."""
        return (str(FinalNormBias()), str(UnembedBias()))

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
        if len(self.answers) > 1:
            return super().table()
        return self.to_frame().drop(columns="prompt")

    def headings(self) -> dict[str, str]:
        """Component, position and token where there are several, value and standard error."""
        columns = {"component": "component"}
        if len(self.axis("pos").labels) > 1:
            columns["position"] = "position"
            columns |= {"token": "token"} if len(self.answers) == 1 else {}
        columns["value"] = self.unit
        return columns | ({"se": "se"} if self.has_error else {})

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What is scored, the sum of the rows, the model's own difference and the gap."""
        mean = "mean " if len(self.answers) > 1 else ""
        rows = [
            (f"{mean}sum of all {len(self.components)} rows", self._mean(self.total)),
            ("the model's own difference", self._mean(self.model_value)),
            ("largest gap", f"{float(self.gap[self.gap.isfinite()].max()):.1e}"),
        ]
        means = self.values.detach().cpu().double().nanmean((1, 2))
        parts = [f"{n} {float(means[self.components.index(n)]):+.4f}" for n in self.constants]
        rows.append(("constants", ", ".join(parts)))
        if self.capped_value is not None:
            rows.append(("after the output softcap", self._mean(self.capped_value)))
        if len(self.answers) == 1:
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
    answer: Tokens,
    foil: Tokens | None = None,
    *,
    by: By = "component",
    positions: Positions = -1,
) -> Attribution:
    """What each component wrote towards the answer and against the foil.

    Args:
        run: a run, from `capture`.
        answer: a token as text or id, or one for each prompt.
        foil: the token it is scored against, or one for each prompt. None scores against the mean
            over the vocabulary, and the result says so: absolute logits cannot be compared
            between a centred and an uncentred unembedding, differences can.
        by: `component`, `head` or `neuron`.
        positions: the scored position of every prompt (-1, the last real token), one for each
            prompt, or None for all.

    Returns:
        An `Attribution` [component, batch, pos] in logits, whose rows sum to the model's own
        logit difference.

    Raises:
        TokenError: an answer or foil that is not one token.
        PositionError: a prompt has no such position.
        NotFiniteError: the model's last state or logits are NaN or infinite.
        GapError: the rows do not add up to the model's own value.
        HeadMismatchError, NeuronMismatchError: the model has no such exact parts.

    Warns:
        AnswerWarning: an answer without its leading space that is another token.
    """
    with run.view.unchanged():
        return _attribute(run, answer, foil, by, positions)


def _attribute(
    run: Run, answer: Tokens, foil: Tokens | None, by: By, positions: Positions
) -> Attribution:
    view, prompts = run.view, run.prompts
    parts = decompose(run, by=by)
    require(view, "readout")
    answers = tokens_for(view, prompts, answer, "answer")
    foils = None if foil is None else tokens_for(view, prompts, foil, "foil")
    if foils is not None and (same := [i for i, a in enumerate(answers) if a == foils[i]]):
        raise TokenError(f"prompt {same[0]}: answer and foil are the same token {answers[same[0]]}")

    score = _Score(view, answers, foils, run.locate(positions))
    if run.cache is None or view.user_hooks():
        readers: dict[str, Any] = {"logits": score.read, "raw_logits": score.read_raw}
    else:  # against one pass of the model itself, made once for all analyses of the cache
        readers = {}
        score.read_final(run.own_final)
    values, states = parts.sweep(score.folded, score.which, positions, **readers)
    sigma = view.final_norm.scale(states)
    rows = torch.cat([values / sigma, score.constants(sigma)])
    model_value, capped = score.values()
    require_finite_at(model_value, score.positions.valid, view.dtype, "the model's own logits")
    _require_gap(view, rows, model_value, score)

    names = [*map(str, parts.writers), str(FinalNormBias()), str(UnembedBias())]
    against = "the vocabulary mean" if foils is None else "foil"
    plan = f"direct logit attribution by {by}, answer against {against}"
    if view.softcap is not None:
        plan += f", before the output softcap of {view.softcap:g}"
    return Attribution(
        values=rows,
        axes=(
            Axis("component", tuple(names)),
            Axis("batch", tuple(range(len(run)))),
            position_axis(positions, values.shape[-1]),
        ),
        unit="logits",
        provenance=provenance(view, prompts, plan),
        by=by,
        model_value=model_value,
        capped_value=capped,
        answers=tuple(answers),
        foils=None if foils is None else tuple(foils),
        answer_texts=tuple(token_text(view.tokenizer, a) for a in answers),
        foil_texts=None if foils is None else tuple(token_text(view.tokenizer, f) for f in foils),
        token_texts=prompts.token_texts,
        position_index=run.locate(positions).index.to(rows.device),
    )


class _Score:
    """The answer directions, the constants, and the model's own values."""

    def __init__(
        self,
        view: ModelView,
        answers: list[int],
        foils: list[int] | None,
        positions: PositionIndex,
    ) -> None:
        self.view = view
        self.positions = positions
        pairs = list(zip(answers, foils or [None] * len(answers), strict=True))
        unique = list(dict.fromkeys(pairs))
        place = {pair: number for number, pair in enumerate(unique)}
        self.which = torch.tensor([place[pair] for pair in pairs], device=view.device)
        self.answers = torch.tensor(answers, device=view.device)
        self.foils = None if foils is None else torch.tensor(foils, device=view.device)
        self.direction, self.bias = self._directions(unique, foils is None)
        self.folded = view.final_norm.fold(self.direction)
        self._capped: list[Tensor] = []
        self._raw: list[Tensor] = []

    def _directions(
        self, unique: list[tuple[int, int | None]], against_mean: bool
    ) -> tuple[Tensor, Tensor]:
        view = self.view
        ids = torch.tensor([answer for answer, _ in unique], device=view.device)
        direction, bias = view.unembed_columns(ids), view.unembed_bias(ids)
        if against_mean:
            mean = view.W_U.detach().mean(1, dtype=view.compute_dtype)
            return direction - mean, bias - view.b_U.detach().mean(dtype=view.compute_dtype)
        other = torch.tensor([foil for _, foil in unique], device=view.device)
        return direction - view.unembed_columns(other), bias - view.unembed_bias(other)

    def constants(self, sigma: Tensor) -> Tensor:
        """The two constant rows [2, batch, n]; NaN where sigma is."""
        norm_bias = (self.direction @ self.view.final_norm.bias)[self.which]
        rows = torch.stack([norm_bias, self.bias[self.which]])[..., None]
        return rows.expand(2, *sigma.shape).clone() + 0 * sigma

    @property
    def read(self) -> RowReader:
        """Keeps the model's difference from its logits."""

        def keep(logits: Tensor, rows: slice) -> None:
            self._capped.append(self._difference(logits, rows))

        return keep

    @property
    def read_raw(self) -> RowReader:
        """Keeps the difference before any softcap, from the unembedding's output."""

        def keep(logits: Tensor, rows: slice) -> None:
            self._raw.append(self._difference(logits, rows))

        return keep

    def read_final(self, final: Tensor) -> None:
        """Keeps the differences of the last stream states [batch, pos, d_model], read by us."""
        view, rows = self.view, slice(0, len(final))
        states = self.positions.take(final, rows).to(view.device, view.compute_dtype)
        if view.softcap is None:
            normed, bias = view.final_norm(states), self.bias[self.which][:, None]
            value = torch.einsum("bnm,bm->bn", normed, self.direction[self.which]) + bias
            self._raw.append(value)
            self._capped.append(value.clone())
            return
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

    def values(self) -> tuple[Tensor, Tensor | None]:
        """The model's differences before and (where it has one) after the softcap."""
        absent = ~self.positions.valid.to(self.view.device)
        raw, capped = torch.cat(self._raw), torch.cat(self._capped)
        raw[absent] = torch.nan
        capped[absent] = torch.nan
        return raw, None if self.view.softcap is None else capped


def _column(logits: Tensor, ids: Tensor) -> Tensor:
    index = ids[:, None, None].expand(-1, logits.shape[1], 1)
    return logits.gather(-1, index)[..., 0]


def _require_gap(view: ModelView, rows: Tensor, model_value: Tensor, score: _Score) -> None:
    gap = (rows.sum(0) - model_value).abs()
    scale = torch.maximum(rows.abs().amax(0), model_value.abs()).clamp_min(1.0)
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
