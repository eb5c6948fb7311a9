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

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.address import FinalNormBias, UnembedBias
from resid_patching.decomposition import By, Parts, decompose
from resid_patching.errors import GapError, TokenError
from resid_patching.markup import quoted
from resid_patching.models import TOLERANCE, ModelView, exact, require, require_finite_at
from resid_patching.prompts import Positions, Tokens
from resid_patching.result import Axis, Result, insert_tokens, position_axis, provenance
from resid_patching.run import Run
from resid_patching.scored import Scored, ScoredDirection, ScoredTokens

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
        if direction is None and answer is not None:
            scored: Scored = ScoredTokens(run, answer, foil, positions)
        elif direction is not None and answer is None and foil is None:
            scored = ScoredDirection(run, direction, positions)
        else:
            both = "neither" if direction is None else "both"
            raise TokenError(
                "what is scored is an answer, with or without a foil, or a direction: give "
                f"exactly one of answer and direction=; got {both}"
            )
        return _attribute(run, parts, scored, positions)


def _attribute(run: Run, parts: Parts, scored: Scored, positions: Positions) -> Attribution:
    view = run.view
    if run.cache is None or view.user_hooks():
        with scored.reading():
            values, states = parts.sweep(scored.folded, scored.which, positions, **scored.readers())
    else:  # against one pass of the model itself, made once for all analyses of the cache
        scored.read_final(run.own_final)
        values, states = parts.sweep(scored.folded, scored.which, positions)
    sigma = view.final_norm.scale(states)
    constants = scored.constants(sigma)
    rows = torch.cat([values / sigma, constants])
    model_value, capped = scored.values()
    require_finite_at(model_value, scored.positions.valid, view.dtype, "the model's own logits")
    _require_gap(view, rows, model_value, scored)
    biases = (str(FinalNormBias()), str(UnembedBias()))
    return Attribution(
        values=rows,
        axes=(
            Axis("component", (*map(str, parts.writers), *biases[: len(constants)])),
            Axis("batch", tuple(range(len(run)))),
            position_axis(positions, rows.shape[-1]),
        ),
        unit=scored.unit,
        provenance=provenance(run, f"direct logit attribution by {parts.by}, {scored.plan}"),
        by=parts.by,
        model_value=model_value,
        capped_value=capped,
        token_texts=run.prompts.token_texts,
        position_index=scored.positions.index.to(rows.device),
        **scored.names(),
    )


def _require_gap(view: ModelView, rows: Tensor, model_value: Tensor, scored: Scored) -> None:
    gap = (rows.sum(0) - model_value).abs()
    scale = torch.maximum(rows.abs().amax(0), model_value.abs()).maximum(scored.floor)
    allowed = TOLERANCE[view.dtype] * scale
    wrong = gap > allowed
    if bool((wrong | (gap.isnan() & scored.positions.valid.to(gap.device))).any()):
        row, column = divmod(int((gap - allowed).nan_to_num(torch.inf).argmax()), gap.shape[1])
        hooks = view.user_hooks()
        note = f" Hooks of yours are on at {', '.join(hooks[:3])}." if hooks else ""
        raise GapError(
            f"prompt {row}: the rows sum to {float(rows.sum(0)[row, column]):.5g}, but the model "
            f"says {float(model_value[row, column]):.5g}; the gap {float(gap[row, column]):.1e} "
            f"is above {float(allowed[row, column]):.1e}, so nothing is returned. A cache of "
            f"other prompts, or a hook that edits the stream, does this.{note}"
        )
