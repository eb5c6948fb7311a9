"""What a lens returns: values for each layer, prompt and position, and the top tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.result import (
    Result,
    insert_before_value,
    insert_tokens,
    standard_error_over_positions,
)

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False, repr=False)
class LensResult(Result):
    """Values [layer, batch, pos]; NaN where a prompt has no such position.

    Attributes:
        token_texts: the tokens of each prompt as text.
    """

    kind: ClassVar[str] = "lens"

    token_texts: tuple[tuple[str, ...], ...]

    def sel(self, **labels: Any) -> Tensor:
        """Values at labels, those axes dropped.

        `pos` is a position of the prompt; a negative one counts from each row's last token.

        Raises:
            KeyError: an axis or label does not exist, or a prompt has no such position.
        """
        wanted = labels.get("pos")
        if not isinstance(wanted, int) or wanted >= 0:
            return super().sel(**labels)
        places = [len(texts) + wanted for texts in self.token_texts]
        if min(places) < 0:
            raise KeyError(f"position {wanted} is not in every prompt")
        rows = torch.arange(len(places), device=self.values.device)
        values = self.values[:, rows, torch.tensor(places, device=self.values.device)]
        rest = {name: label for name, label in labels.items() if name != "pos"}
        axes = tuple(axis for axis in self.axes if axis.name != "pos")
        return Result(values, axes, self.unit, self.provenance).sel(**rest)

    ordered: ClassVar[bool] = True

    def table(self) -> pandas.DataFrame:
        """One row a layer, in order: layer, n (cells averaged), (se,) value.

        Means are over all positions of all prompts. `se` is their standard error over prompts (see
        `standard_error_over_positions`); there is none where there is one prompt.
        """
        cells = self.to_frame().groupby("layer", sort=False)["value"]
        frame = cells.agg(n="count", value="mean").reset_index()
        if self.has_error:
            frame.insert(2, "se", standard_error_over_positions(self.values).numpy())
        return frame

    @property
    def averaged(self) -> str:
        """What the rows of the table are means over."""
        return f"mean over {sum(map(len, self.token_texts))} positions"

    def headings(self) -> dict[str, str]:
        """Layer, number of cells, and their mean."""
        columns = {"layer": "layer", "n": "n", "value": self.unit}
        return columns | ({"se": "se"} if self.has_error else {})

    def caveats(self) -> tuple[str, ...]:
        """What a lens is not."""
        return limits_of(self.provenance.plan)

    def to_frame(self) -> pandas.DataFrame:
        """Long form, with the token at each position; only cells that exist."""
        frame = super().to_frame()
        insert_tokens(frame, self.token_texts)
        return frame.loc[frame["token"].notna()].reset_index(drop=True)


@dataclass(frozen=True, eq=False, repr=False)
class TopTokens(LensResult):
    """The most probable tokens: values [layer, batch, pos, rank] are their probabilities.

    Attributes:
        ids: the tokens' ids, -1 where a prompt has no such position.
        logits: their logits.
        texts: each id that occurs, as text.
    """

    kind: ClassVar[str] = "lens_top_tokens"

    ids: Int[Tensor, "layer batch pos rank"]
    logits: Float[Tensor, "layer batch pos rank"]
    texts: tuple[tuple[int, str], ...]

    def tokens(self, **labels: Any) -> Any:
        """Token texts at labels, as nested lists: `tokens(layer="resid_post.3", pos=-1)`."""
        ids = LensResult(self.ids, self.axes, "id", self.provenance, self.token_texts).sel(**labels)
        return _nested(ids.tolist(), dict(self.texts))

    def table(self) -> pandas.DataFrame:
        """The top token of each layer after the last token of each prompt.

        Returns:
            A data frame: layer, prompt, position, token, top_token, top_id, logit, value.
        """
        frame = self.to_frame()
        last = frame["prompt"].map({n: len(t) - 1 for n, t in enumerate(self.token_texts)})
        chosen = frame.loc[(frame["rank"] == 0) & (frame["position"] == last)]
        return chosen.drop(columns="rank").sort_values("prompt", kind="stable")

    @property
    def caption(self) -> str:
        """What the rows of the table are."""
        return "the top token of each layer at each prompt's last position"

    def headings(self) -> dict[str, str]:
        """Layer, prompt and position, the token there, what the layer says next."""
        columns = {"layer": "layer", "prompt": "prompt", "position": "position", "token": "token"}
        return {**columns, "top_token": "says", "value": "probability"}

    def pictures(self) -> tuple[str, ...]:
        """The token that each state would say."""
        return ("trajectory",)

    def to_frame(self) -> pandas.DataFrame:
        """Long form: layer, prompt, position, token, rank, top_token, top_id, logit, value."""
        frame = Result.to_frame(self)
        ids = self.ids.flatten().tolist()
        names = dict(self.texts)
        insert_tokens(frame, self.token_texts)
        frame.insert(5, "top_token", [names.get(i) for i in ids])
        frame.insert(6, "top_id", ids)
        insert_before_value(frame, {"logit": self.logits})
        return frame.loc[frame["top_id"] >= 0].reset_index(drop=True)


def limits_of(plan: str) -> tuple[str, ...]:
    """What a lens does not say, by the text of its plan."""
    if "tuned lens" in plan:
        what = "A tuned lens says what can be read linearly from a state, not what causes what."
    else:
        what = "A logit lens shows neither beliefs nor causes: "
        what += "the unembedding was trained on the last state."
    own = "The norm is recomputed at each layer; the last row is the model's own output."
    return what, own


def _nested(ids: Any, names: dict[int, str]) -> Any:
    if isinstance(ids, list):
        return [_nested(item, names) for item in ids]
    return names.get(ids)
