"""What lenses say, as grids of tokens, tables at one position, and KL by layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resid_patching.markup import quoted
from resid_patching.show.report import GridCell, Table, TextGrid
from resid_patching.shown import under_headings

if TYPE_CHECKING:
    import pandas

    from resid_patching.lens.readout import LensReadout
    from resid_patching.lens.results import LensResult, TopTokens


@dataclass(frozen=True, eq=False)
class TrackedToken:
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
class LensOutput:
    """What one lens says about a run.

    Attributes:
        name: `logit lens` or `tuned lens`.
        readout: the lens on the run.
        top: the most probable tokens.
        entropy: in nats.
        kl: from the model's output, in nats.
        tracked: the tokens that are followed.
    """

    name: str
    readout: LensReadout
    top: TopTokens
    entropy: LensResult
    kl: LensResult
    tracked: tuple[TrackedToken, ...]

    @classmethod
    def of(
        cls,
        name: str,
        readout: LensReadout,
        top: int,
        answers: Sequence[str] | None,
        foils: Sequence[str] | None,
    ) -> LensOutput:
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
        tracked = [TrackedToken(what, answers, found["prob"], found["rank"])]
        if foils is not None:
            other = readout.measure("prob", "rank", tokens=foils)
            tracked.append(TrackedToken("foil", foils, other["prob"], other["rank"]))
        tokens: Any = found["top_tokens"]
        return cls(name, readout, tokens, found["entropy"], found["kl"], tuple(tracked))

    def frame(self) -> pandas.DataFrame:
        """One row for each layer, prompt, position and rank, with all that was read there."""
        columns = {"entropy": self.entropy, "kl": self.kl}
        for token in self.tracked:
            columns |= {f"{token.what}_rank": token.rank, f"{token.what}_prob": token.prob}
        cell = ["layer", "prompt", "position"]
        frame = self.top.to_frame()
        for name, result in columns.items():
            values = result.to_frame().rename(columns={"value": name})
            frame = frame.merge(values[[*cell, name]], on=cell, how="left")
        frame.insert(0, "lens", self.name)
        return frame

    def body(self) -> dict[str, Any]:
        """As JSON: the top tokens, readable by `TopTokens.from_json`, and all else beside them."""
        body = self.top.to_dict()
        body |= {"lens": self.name, "entropy": self.entropy.to_dict(), "kl": self.kl.to_dict()}
        for token in self.tracked:
            body[token.what] = {
                "tokens": token.texts,
                "prob": token.prob.to_dict(),
                "rank": token.rank.to_dict(),
            }
        return body

    def token_name(self, token: TrackedToken, prompt: int, place: int) -> str:
        """The token that is followed in one prompt, at one position."""
        if token.texts is not None:
            return short_token(token.texts[prompt])
        final = int(self.top.ids[-1, prompt, place, 0])
        return f"{short_token(dict(self.top.texts)[final])} (final)"


# Grids of all positions


def token_grid(
    output: LensOutput, frame: pandas.DataFrame, prompt: int, first: int | None
) -> TextGrid:
    """The top token of one prompt by layer and position, shaded by its probability.

    Args:
        output: what the lens says.
        frame: `output.frame()`.
        prompt: which prompt.
        first: the first position that a terminal shows; None for as many of the last as fit.
    """
    here = frame.loc[frame["prompt"] == prompt]
    cells: dict[str, list[GridCell | None]] = {label: [] for label in output.readout.labels}
    for (label, _), rows in here.groupby(["layer", "position"], sort=False):
        cells[label].append(_token_cell(output, rows, prompt))
    title = "top token by layer, for what follows each position, with its probability"
    grid = _grid_of_tokens(output, title, list(cells.values()), prompt, first)
    return dataclasses.replace(grid, shares=True, on="both")


def _token_cell(output: LensOutput, rows: pandas.DataFrame, prompt: int) -> GridCell:
    top = rows.iloc[0]
    said = [f"{quoted(token)} {prob:.2%}" for token, prob in _top_tokens(rows)]
    said += [f"entropy {top.entropy:.3f} nats", f"KL(final || lens) {top.kl:.3f} nats"]
    for token in output.tracked:
        rank, prob = top[f"{token.what}_rank"], top[f"{token.what}_prob"]
        if not math.isnan(rank):
            name = "the final top token" if token.texts is None else quoted(token.texts[prompt])
            said.append(f"{name}: rank {rank:.0f}, {prob:.2%}")
    return GridCell(quoted(top.top_token), float(top.value), "\n".join(said))


def rank_grids(output: LensOutput, prompt: int, first: int | None) -> list[TextGrid]:
    """The rank of each token that was asked for, by layer and position."""
    grids = []
    for token in output.tracked:
        if token.texts is None:
            continue
        n = len(output.top.token_texts[prompt])
        ranks, probs = (r.values[:, prompt, :n].tolist() for r in (token.rank, token.prob))
        cells = [
            [GridCell(f"{rank:.0f}", prob) for rank, prob in zip(*row, strict=True)]
            for row in zip(ranks, probs, strict=True)
        ]
        title = f"rank of {quoted(token.texts[prompt])}, from 0"
        grids.append(_grid_of_tokens(output, title, cells, prompt, first))
    return grids


def _grid_of_tokens(
    output: LensOutput,
    title: str,
    cells: Sequence[Sequence[GridCell | None]],
    prompt: int,
    first: int | None,
) -> TextGrid:
    texts = output.top.token_texts[prompt]
    heads = [(str(place), quoted(text)) for place, text in enumerate(texts)]
    rows = output.readout.labels
    return TextGrid(f"{output.name}: {title}", rows, heads, cells, of_tokens=True, first=first)


# Tables


def depth_table(output: LensOutput, frame: pandas.DataFrame, prompt: int, place: int) -> Table:
    """Every layer at one position: entropy, KL, followed tokens, top tokens."""
    import pandas

    rows = []
    for label, cell in _layers_at(frame, prompt, place):
        top = cell.iloc[0]
        row: dict[str, Any] = {"layer": label, "entropy": top.entropy, "KL": top.kl}
        for token in output.tracked:
            rank, prob = top[f"{token.what}_rank"], percent(top[f"{token.what}_prob"])
            row[output.token_name(token, prompt, place)] = f"{rank:.0f} {prob:>6}"
        rows.append(row | {"top tokens": _shown_tops(cell)})
    title = f"{output.name} {_position_text(output, prompt, place)}; entropy and KL(final || lens) "
    title += "in nats, below a token its rank (0 is the top) and probability"
    return Table(pandas.DataFrame(rows), title)


def comparison_table(
    outputs: Sequence[LensOutput], frames: Sequence[pandas.DataFrame], prompt: int, place: int
) -> Table:
    """Two lenses side by side at one position."""
    import pandas

    first, token = outputs[0], outputs[0].tracked[0]
    columns: dict[str, list[Any]] = {"layer": list(first.readout.labels)}
    for output, frame in zip(outputs, frames, strict=True):
        cells = [cell for _, cell in _layers_at(frame, prompt, place)]
        tops, short = [cell.iloc[0] for cell in cells], output.name.split()[0]
        columns[f"{short} KL"] = [float(top.kl) for top in tops]
        columns[f"{short} rank"] = [int(top[f"{token.what}_rank"]) for top in tops]
        columns[output.name] = [_shown_tops(cell) for cell in cells]
    name = first.token_name(token, prompt, place)
    title = (
        f"{_position_text(first, prompt, place)}; KL(final || lens) in nats; rank of {name}, from 0"
    )
    return Table(pandas.DataFrame(columns), title)


def _layers_at(frame: pandas.DataFrame, prompt: int, place: int) -> Any:
    """The rows of each layer at one position: a row for each of the top tokens."""
    here = frame.loc[(frame["prompt"] == prompt) & (frame["position"] == place)]
    return here.groupby("layer", sort=False)


def _top_tokens(cell: pandas.DataFrame) -> Iterator[tuple[str, float]]:
    """The top tokens of a cell with their probabilities."""
    return zip(cell["top_token"], cell["value"], strict=True)


def _shown_tops(cell: pandas.DataFrame) -> tuple[str, ...]:
    return tuple(f"{short_token(token)} {percent(prob)}" for token, prob in _top_tokens(cell))


def _position_text(output: LensOutput, prompt: int, place: int) -> str:
    texts = output.top.token_texts
    several = f" of prompt {prompt}" if len(texts) > 1 else ""
    return f"after position {place}{several}, {quoted(texts[prompt][place])}"


def cells_table(frames: Sequence[pandas.DataFrame]) -> Table:
    """The top token of every cell, for a page."""
    import pandas

    frame = pandas.concat(frames)
    names = ("lens", "layer", "prompt", "position", "token")
    headings = {name: name for name in names} | {"top_token": "says", "value": "probability"}
    headings |= {"entropy": "entropy", "kl": "KL"}
    shown = under_headings(frame.loc[frame["rank"] == 0], headings)
    return Table(shown, "Entropy and KL(final || lens) in nats", on="page")


def kl_table(
    title: str,
    columns: Mapping[str, Sequence[float]],
    labels: Sequence[str],
    errors: Mapping[str, Sequence[float]] | None = None,
) -> Table:
    """KL by layer, with the means last; `logit lens` and `tuned` give their ratio.

    Args:
        title: the line above.
        columns: numbers for each layer, by what read it.
        labels: the layers.
        errors: standard errors for each layer and then for the mean over layers, by their heading.
    """
    import pandas

    frame = pandas.DataFrame({"layer": list(labels), **columns})
    below = int((frame["tuned"] < frame["logit lens"]).sum())
    after = f"The tuned lens is below the logit lens at {below} of {len(labels)} layers."
    frame.loc[len(labels)] = {"layer": "mean", **frame[list(columns)].mean()}
    place = list(frame.columns).index("tuned") + 1
    frame.insert(place, "tuned / logit", frame["tuned"] / frame["logit lens"])
    return Table(frame.assign(**errors or {}), title, after=(after,))


# Text


def percent(prob: float) -> str:
    """A probability; small ones as powers of ten."""
    return f"{prob:.1%}" if prob >= 0.001 or prob == 0 else f"{prob:.0e}"


def short_token(text: str) -> str:
    """A token in quotes, cut where it is long."""
    from resid_patching.show.text import clipped

    return clipped(quoted(text))
