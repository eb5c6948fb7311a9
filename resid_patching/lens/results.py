"""What a readout returns: values for each layer, prompt and position, and the top tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from resid_patching.result import Result

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

    def _ranked(self) -> tuple[pandas.DataFrame, str]:
        return self.to_frame(), ""  # each token of each prompt is a cell of its own

    def to_frame(self) -> pandas.DataFrame:
        """Long form, with the token at each position; one row a cell that exists."""
        frame = super().to_frame()
        texts = self.token_texts
        cells = zip(frame["batch"], frame["pos"], strict=True)
        tokens = [texts[b][p] if p < len(texts[b]) else None for b, p in cells]
        frame.insert(list(frame.columns).index("pos") + 1, "token", tokens)
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

    def _rows_shown(self) -> tuple[pandas.DataFrame, str]:
        """The top token of each layer after the last token of each prompt."""
        frame = self.to_frame()
        last = frame["batch"].map({n: len(t) - 1 for n, t in enumerate(self.token_texts)})
        chosen = frame.loc[(frame["rank"] == 0) & (frame["pos"] == last)]
        return chosen, "the top token of each layer at each prompt's last position"

    def to_frame(self) -> pandas.DataFrame:
        """Long form: layer, batch, pos, token, rank, top_token, top_id, logit, value."""
        frame = Result.to_frame(self)
        ids = self.ids.flatten().tolist()
        names = dict(self.texts)
        texts = self.token_texts
        cells = list(zip(frame["batch"], frame["pos"], strict=True))
        frame.insert(3, "token", [texts[b][p] if p < len(texts[b]) else None for b, p in cells])
        frame.insert(5, "top_token", [names.get(i) for i in ids])
        frame.insert(6, "top_id", ids)
        frame.insert(7, "logit", self.logits.to("cpu", torch.float64).flatten().numpy())
        return frame.loc[frame["top_id"] >= 0].reset_index(drop=True)


def _nested(ids: Any, names: dict[int, str]) -> Any:
    if isinstance(ids, list):
        return [_nested(item, names) for item in ids]
    return names.get(ids)
