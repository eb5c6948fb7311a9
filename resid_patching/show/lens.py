"""What lenses say, as grids of tokens, tables at one position, and KL by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resid_patching.markup import quoted
from resid_patching.show.report import Cell, Grid, Table

if TYPE_CHECKING:
    import pandas

    from resid_patching.lens.readout import LensReadout
    from resid_patching.lens.results import LensResult, TopTokens

_CELL = ["layer", "prompt", "position"]


@dataclass(frozen=True, eq=False)
class Followed:
    """A token that is followed through the layers.

    Attributes:
        what: answer, foil, or final_top: what the model itself finds most probable there.
        texts: the token of each prompt; None for final_top.
        prob: its probability [layer, batch, pos].
        rank: how many tokens are above it [layer, batch, pos].
    """

    what: str
    texts: Sequence[str] | None
    prob: LensResult
    rank: LensResult


@dataclass(frozen=True, eq=False)
class Reading:
    """What one lens reads.

    Attributes:
        name: `logit lens` or `tuned lens`.
        readout: the lens on the run.
        top: the most probable tokens.
        entropy: in nats.
        kl: from the model's output, in nats.
        followed: the tokens that are followed.
    """

    name: str
    readout: LensReadout
    top: TopTokens
    entropy: LensResult
    kl: LensResult
    followed: tuple[Followed, ...]

    @classmethod
    def of(
        cls,
        name: str,
        readout: LensReadout,
        top: int,
        answers: Sequence[str] | None,
        foils: Sequence[str] | None,
    ) -> Reading:
        """Reads everything that is shown or written.

        Args:
            name: what the lens is called.
            readout: the lens on a run.
            top: how many of the most probable tokens.
            answers: a token for each prompt; None for what the model finds most probable.
            foils: likewise; None for none.

        Raises:
            TokenError: not one token.
            ValueError: more tokens than there are.
        """
        found = readout.measure("entropy", "kl", "prob", "rank", top=top, tokens=answers)
        what = "final_top" if answers is None else "answer"
        followed = [Followed(what, answers, found["prob"], found["rank"])]
        if foils is not None:
            other = readout.measure("prob", "rank", tokens=foils)
            followed.append(Followed("foil", foils, other["prob"], other["rank"]))
        tokens: Any = found["top_tokens"]
        return cls(name, readout, tokens, found["entropy"], found["kl"], tuple(followed))

    def frame(self) -> pandas.DataFrame:
        """One row for each layer, prompt, position and rank, with all that was read there."""
        frame = self.top.to_frame()
        columns = {"entropy": self.entropy, "kl": self.kl}
        for one in self.followed:
            columns[f"{one.what}_rank"] = one.rank
            columns[f"{one.what}_prob"] = one.prob
        for name, result in columns.items():
            values = result.to_frame()[[*_CELL, "value"]].set_axis([*_CELL, name], axis=1)
            frame = frame.merge(values, on=_CELL, how="left")
        frame.insert(0, "lens", self.name)
        return frame

    def body(self) -> dict[str, Any]:
        """As JSON: the top tokens, readable by `TopTokens.from_json`, and all else beside them."""
        body = json.loads(self.top.to_json())
        body["lens"] = self.name
        for name in ("entropy", "kl"):
            body[name] = json.loads(getattr(self, name).to_json())
        for one in self.followed:
            body[one.what] = {
                "tokens": None if one.texts is None else list(one.texts),
                "prob": json.loads(one.prob.to_json()),
                "rank": json.loads(one.rank.to_json()),
            }
        return body


# Grids of all positions


def token_grid(reading: Reading, frame: pandas.DataFrame, prompt: int, first: int | None) -> Grid:
    """The top token of one prompt by layer and position, shaded by its probability.

    Args:
        reading: what the lens reads.
        frame: `reading.frame()`.
        prompt: which prompt.
        first: the first position that a terminal shows; None for as many of the last as fit.
    """
    found = {cell: rows for cell, rows in frame.loc[frame["prompt"] == prompt].groupby(_CELL)}
    texts = reading.top.token_texts[prompt]
    title = f"{reading.name}: top token by layer, for what follows each position, with its"
    return Grid(
        f"{title} probability",
        reading.readout.labels,
        [(str(place), quoted(text)) for place, text in enumerate(texts)],
        [
            [_token_cell(reading, found[label, prompt, p], prompt) for p in range(len(texts))]
            for label in reading.readout.labels
        ],
        of_tokens=True,
        shares=True,
        first=first,
        on="both",
    )


def _token_cell(reading: Reading, rows: pandas.DataFrame, prompt: int) -> Cell:
    top = rows.iloc[0]
    said = [f"{quoted(token)} {p:.2%}" for token, p in _said(rows)]
    said += [f"entropy {top.entropy:.3f} nats", f"KL(final || lens) {top.kl:.3f} nats"]
    for one in reading.followed:
        rank, share = top[f"{one.what}_rank"], top[f"{one.what}_prob"]
        if not math.isnan(rank):
            name = "the final top token" if one.texts is None else quoted(one.texts[prompt])
            said.append(f"{name}: rank {rank:.0f}, {share:.2%}")
    return Cell(quoted(top.top_token), float(top.value), "\n".join(said))


def rank_grids(reading: Reading, prompt: int, first: int | None) -> list[Grid]:
    """The rank of each token that was asked for, by layer and position."""
    texts = reading.top.token_texts[prompt]
    return [
        Grid(
            f"{reading.name}: rank of {quoted(one.texts[prompt])}, from 0",
            reading.readout.labels,
            [(str(place), quoted(text)) for place, text in enumerate(texts)],
            [
                [
                    Cell(f"{float(rank):.0f}", float(prob))
                    for rank, prob in zip(ranks[: len(texts)], probs, strict=False)
                ]
                for ranks, probs in zip(
                    one.rank.values[:, prompt], one.prob.values[:, prompt], strict=True
                )
            ],
            of_tokens=True,
            first=first,
        )
        for one in reading.followed
        if one.texts is not None
    ]


# Tables


def depth_table(reading: Reading, frame: pandas.DataFrame, prompt: int, place: int) -> Table:
    """Every layer at one position: entropy, KL, followed tokens, top tokens."""
    import pandas

    rows = []
    for label, cell in _at(frame, prompt, place):
        top = cell.iloc[0]
        row: dict[str, Any] = {"layer": label, "entropy": top.entropy, "KL": top.kl}
        for one in reading.followed:
            share = percent(top[f"{one.what}_prob"])
            row[_name(reading, one, prompt, place)] = f"{top[f'{one.what}_rank']:.0f} {share:>6}"
        rows.append(row | {"top tokens": _tops(cell)})
    title = (
        f"{reading.name} {_where(reading, prompt, place)}; entropy and KL(final || lens) in nats, "
        "below a token its rank (0 is the top) and probability"
    )
    return Table(pandas.DataFrame(rows), title)


def comparison_table(
    readings: Sequence[Reading], frames: Sequence[pandas.DataFrame], prompt: int, place: int
) -> Table:
    """Two lenses side by side at one position."""
    import pandas

    columns: dict[str, list[Any]] = {"layer": list(readings[0].readout.labels)}
    for reading, frame in zip(readings, frames, strict=True):
        cells = [cell for _, cell in _at(frame, prompt, place)]
        short = reading.name.split()[0]
        rank = f"{reading.followed[0].what}_rank"
        columns[f"{short} KL"] = [float(cell.iloc[0].kl) for cell in cells]
        columns[f"{short} rank"] = [int(cell.iloc[0][rank]) for cell in cells]
        columns[reading.name] = [_tops(cell) for cell in cells]
    name = _name(readings[0], readings[0].followed[0], prompt, place)
    where = _where(readings[0], prompt, place)
    title = f"{where}; KL(final || lens) in nats; rank of {name}, from 0"
    return Table(pandas.DataFrame(columns), title)


def _at(frame: pandas.DataFrame, prompt: int, place: int) -> Any:
    here = frame.loc[(frame["prompt"] == prompt) & (frame["position"] == place)]
    return here.groupby("layer", sort=False)


def _tops(cell: pandas.DataFrame) -> tuple[str, ...]:
    return tuple(f"{short_token(token)} {percent(p)}" for token, p in _said(cell))


def _said(cell: pandas.DataFrame) -> Iterator[tuple[str, float]]:
    """The top tokens of a cell with their probabilities."""
    return zip(cell["top_token"], cell["value"], strict=True)


def _name(reading: Reading, one: Followed, prompt: int, place: int) -> str:
    """The token that is followed in one prompt, at one position."""
    if one.texts is not None:
        return short_token(one.texts[prompt])
    token = int(reading.top.ids[-1, prompt, place, 0])
    return f"{short_token(dict(reading.top.texts)[token])} (final)"


def _where(reading: Reading, prompt: int, place: int) -> str:
    texts = reading.top.token_texts[prompt]
    several = f" of prompt {prompt}" if len(reading.top.token_texts) > 1 else ""
    return f"after position {place}{several}, {quoted(texts[place])}"


def cells_table(frames: Sequence[pandas.DataFrame]) -> Table:
    """The top token of every cell, for a page."""
    import pandas

    frame = pandas.concat(frames)
    top = frame.loc[frame["rank"] == 0]
    names = {"lens": "lens", "layer": "layer", "prompt": "prompt", "position": "position"}
    names |= {"token": "token", "top_token": "says", "value": "probability"}
    names |= {"entropy": "entropy", "kl": "KL"}
    shown = top[list(names)].set_axis(list(names.values()), axis=1)
    return Table(shown, "Entropy and KL(final || lens) in nats", on="page")


def kl_table(title: str, columns: Mapping[str, Sequence[float]], labels: Sequence[str]) -> Table:
    """KL by layer, with the means last; `logit lens` and `tuned` give their ratio."""
    import pandas

    frame = pandas.DataFrame({"layer": list(labels), **columns})
    means = {name: frame[name].mean() for name in columns}
    below = int((frame["tuned"] < frame["logit lens"]).sum())
    after = f"The tuned lens is below the logit lens at {below} of {len(labels)} layers."
    frame = pandas.concat([frame, pandas.DataFrame([{"layer": "mean", **means}])])
    place = list(frame.columns).index("tuned") + 1
    frame.insert(place, "tuned / logit", frame["tuned"] / frame["logit lens"])
    return Table(frame, title, after=(after,))


# Text


def percent(prob: float) -> str:
    """A probability; small ones as powers of ten."""
    return f"{prob:.1%}" if prob >= 0.001 or prob == 0 else f"{prob:.0e}"


def short_token(text: str) -> str:
    """A token in quotes, cut where it is long."""
    from resid_patching.show.text import clipped

    return clipped(quoted(text))
