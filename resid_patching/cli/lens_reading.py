"""What a lens reads on prompts, gathered for tables and files; lenses found in folders."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import UsageError
from resid_patching.cli.screen import csv_text

if TYPE_CHECKING:
    from resid_patching.lens.readout import LensReadout
    from resid_patching.lens.results import LensResult, TopTokens
    from resid_patching.lens.tuned import TunedLens
    from resid_patching.run import Run


def add_place_flags(parser: argparse.ArgumentParser, in_depth: str) -> None:
    """Adds the flags that say which positions are shown.

    Args:
        parser: where.
        in_depth: what is shown at one position.
    """
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--position",
        type=int,
        metavar="P",
        help=f"one position {in_depth}, from 0, or from the end if negative (unset: a table of "
        "all)",
    )
    place.add_argument(
        "--from",
        dest="first",
        type=_position,
        metavar="P",
        help="the table's first position, from 0 (unset: as many of the last as fit)",
    )


def _position(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0; this position counts from the start")
    return value


@dataclass(frozen=True, eq=False)
class Scored:
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
        scored: the tokens that are followed.
    """

    name: str
    readout: LensReadout
    top: TopTokens
    entropy: LensResult
    kl: LensResult
    scored: tuple[Scored, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The rows' labels."""
        return self.readout.labels


def read(
    name: str,
    readout: LensReadout,
    top: int,
    answers: Sequence[str] | None,
    foils: Sequence[str] | None,
) -> Reading:
    """Reads everything that is printed or written.

    Args:
        name: what the lens is called.
        readout: the lens on a run.
        top: how many of the most probable tokens.
        answers: a token for each prompt; None for what the model finds most probable.
        foils: likewise; None for none.

    Raises:
        UsageError: more tokens than there are.
        TokenError: not one token.
    """
    d_vocab = readout.run.view.d_vocab
    if top > d_vocab:
        raise UsageError(f"--top {top} was asked for, but the model has {d_vocab} tokens")
    found = readout.measure("entropy", "kl", "prob", "rank", top=top, tokens=answers)
    what = "final_top" if answers is None else "answer"
    scored = [Scored(what, answers, found["prob"], found["rank"])]
    if foils is not None:
        other = readout.measure("prob", "rank", tokens=foils)
        scored.append(Scored("foil", foils, other["prob"], other["rank"]))
    tokens: Any = found["top_tokens"]
    return Reading(name, readout, tokens, found["entropy"], found["kl"], tuple(scored))


def every(readout: LensReadout, stride: int) -> LensReadout:
    """A lens's first row, every so many after it, and always the last."""
    from resid_patching.lens.readout import LensReadout

    last = len(readout.rows) - 1
    kept = [number for number in range(last + 1) if number % stride == 0 or number == last]
    translate = readout.translate

    def moved(row: int, states: Any) -> Any:
        return states if translate is None else translate(kept[row], states)

    rows = tuple(readout.rows[number] for number in kept)
    return LensReadout(readout.run, rows, readout.plan, moved)


def beside(tuned: LensReadout, run: Run) -> LensReadout:
    """The logit lens on the states that a tuned lens reads."""
    from resid_patching.lens.readout import LensReadout

    return LensReadout(run, tuned.rows, tuned.plan.replace("tuned lens", "logit lens"))


def places_of(run: Run, arguments: argparse.Namespace) -> list[int] | None:
    """The --position in each prompt, counted from 0; None for all.

    Raises:
        PositionError: a prompt has no such position, or none where the table would begin.
    """
    if arguments.first is not None:
        run.locate(arguments.first)
    if arguments.position is None:
        return None
    return run.locate(arguments.position).index[:, 0].tolist()


def require_answers(answers: list[str] | None, foils: list[str] | None) -> None:
    """Refuses foils without answers.

    Raises:
        UsageError: foils alone.
    """
    if foils is not None and answers is None:
        raise UsageError("--foil is shown beside an --answer; none was given")


def require_lens(folder: str) -> None:
    """Refuses a folder that is missing, before a model is loaded.

    Raises:
        UsageError: there is none; what lies beside it is named.
    """
    path = Path(folder)
    if folder == "demo" or path.exists():  # demo: the lens shipped with the demo model
        return
    parent = path.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    names = ", ".join(sorted(p.name for p in parent.iterdir() if p.is_dir())[:8])
    has = f"has the folders {names}" if names else "has no folders"
    raise UsageError(f"there is no lens at {path.absolute()}: {parent} {has}")


def describe(lens: TunedLens, folder: str, model: Any) -> list[str]:
    """Which tuned lens this is, and whether it is of the model, for a line."""
    about = [f"tuned lens from {folder},"]
    if lens.site != "resid_pre":
        about.append(f"on {lens.site},")
    fit = lens.record.get("fit", {})
    if "training_tokens" in fit:
        tokens = f"{fit['training_tokens']:,} tokens"
        about.append(f"fitted on {tokens}, {fit.get('steps_made', 0)} KL steps,")
    about.append(lens.mark(model).removeprefix(", ") or "checked against the model")
    return about


# Files


def write_files(
    readings: Sequence[Reading], arguments: argparse.Namespace, known: dict[str, Any]
) -> None:
    """Writes the JSON and CSV that were asked for.

    Args:
        readings: one lens or two.
        arguments: the flags --json, --csv and --lens.
        known: what else the command knows, for the JSON.
    """
    from resid_patching.files import write_text

    if arguments.json is not None:
        write_text(arguments.json, _as_json(readings, {**known, "folder": arguments.lens}))
    if arguments.csv is not None:
        write_text(arguments.csv, _as_csv(readings))


def _as_json(readings: Sequence[Reading], extra: dict[str, Any]) -> str:
    """The first reading's top tokens, readable by `TopTokens.from_json`, and all else beside it."""
    body = _body(readings[0])
    body.update(extra)
    body["others"] = [_body(reading) for reading in readings[1:]]
    return json.dumps(body, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _body(reading: Reading) -> dict[str, Any]:
    body = json.loads(reading.top.to_json())
    body["lens"] = reading.name
    for name in ("entropy", "kl"):
        body[name] = json.loads(getattr(reading, name).to_json())
    for scored in reading.scored:
        body[scored.what] = {
            "tokens": None if scored.texts is None else list(scored.texts),
            "prob": json.loads(scored.prob.to_json()),
            "rank": json.loads(scored.rank.to_json()),
        }
    return body


def _as_csv(readings: Sequence[Reading]) -> str:
    """One row for each lens, layer, prompt, position and rank."""
    import pandas

    frame = pandas.concat([_frame(reading) for reading in readings])
    return csv_text(frame)


def _frame(reading: Reading) -> Any:
    cell = ["layer", "batch", "pos"]
    frame = reading.top.to_frame()
    columns = {"entropy": reading.entropy, "kl": reading.kl}
    for scored in reading.scored:
        columns[f"{scored.what}_rank"] = scored.rank
        columns[f"{scored.what}_prob"] = scored.prob
    for name, result in columns.items():
        values = result.to_frame()[[*cell, "value"]].set_axis([*cell, name], axis=1)
        frame = frame.merge(values, on=cell, how="left")
    frame.insert(0, "lens", reading.name)
    return frame
