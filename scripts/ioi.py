"""The indirect-object study in one command, on any model.

    python scripts/ioi.py [--model demo|gpt2|FOLDER] [--prompts N] [--html FILE] [--json FILE]

    When Mary and John went to the store, John gave a drink to -> Mary, not John

    1  the prompts, their sources with other names, and how well the model does
    2  what each head writes into the logit difference by itself
    3  paths from every head to the logits; the strongest heads are found here
    4  paths from every head to the queries of these heads
    5  these heads mean-ablated together, beside random sets of as many others
    6  each of them alone: total beside direct

No head is named in this file or in those beside it: what is followed up is what step 3 finds.

Source: Wang et al. 2022 (arXiv 2211.00593), sections 3 and 4; the prompts are our own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from resid_patching.cli.flags import add_flags  # noqa: E402
from resid_patching.cli.frame import (  # noqa: E402
    Parser,
    add_model_flags,
    load_model,
    require_writable,
    run_guarded,
)
from resid_patching.show.html import page_of  # noqa: E402
from resid_patching.show.text import console, print_report  # noqa: E402

if TYPE_CHECKING:
    from ioi_study import Study


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of the study."""
    parser = Parser(
        prog=prog,
        description="Finds the heads that a model's indirect-object answers rest on: attribution, "
        "paths to the logits, paths to queries, and a knock-out of what was found.",
        epilog=f"Example: {prog} --model demo --html ioi.html",
    )
    add_flags(
        parser.add_argument_group("study"),
        {
            "--prompts N = 32": "pairs",
            "--seed N = 0": "of prompts and random sets",
            "--corrupt names|swap = names": "the source has three other names, or the other of "
            "the two as its giver",
            "--heads N = 3": "strongest heads followed",
            "--random-sets N = 20": "random sets of other heads in the knock-out",
        },
        seed=int,
    )
    add_model_flags(parser)
    add_flags(
        parser.add_argument_group("output"),
        {
            "--top N = 10": "rows shown in tables",
            "--json FILE": "write all numbers as JSON",
            "--html FILE": "write a page with tables and pictures",
            "--debug": "show tracebacks and library warnings",
        },
    )
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Does the study, prints the report and writes the files asked for."""
    require_writable(arguments.json, arguments.html)
    if arguments.html is not None:
        from resid_patching.plots import require_plotly

        require_plotly()
    view = load_model(arguments)

    import ioi_report
    from ioi_study import study

    from resid_patching.files import write_text

    found = study(
        view,
        _pairs(view, arguments),
        n_heads=arguments.heads,
        n_controls=arguments.random_sets,
        seed=arguments.seed,
        prepend_bos=arguments.prepend_bos,
    )
    report = ioi_report.report(found, top=arguments.top, stand_in=arguments.stand_in)
    flags = {f"--{n.replace('_', '-')}": value for n, value in _flags(arguments).items()}
    files = {
        arguments.json: lambda: as_json(found, arguments),
        arguments.html: lambda: page_of(report, flags).html(),
    }
    texts = {path: text() for path, text in files.items() if path is not None}
    for path, text in texts.items():
        write_text(path, text)
    print_report(console(), report)


def _pairs(view: Any, arguments: argparse.Namespace) -> Any:
    from resid_patching import indirect_object_prompts

    return indirect_object_prompts(
        view,
        arguments.prompts,
        seed=arguments.seed,
        corrupt=arguments.corrupt,
        prepend_bos=arguments.prepend_bos,
    )


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags that numbers depend on."""
    others = ("json", "html", "debug", "top", "stand_in")
    return {name: value for name, value in vars(arguments).items() if name not in others}


def as_json(found: Study, arguments: argparse.Namespace) -> str:
    """All numbers; each part that is a result is readable by its own `from_json`."""
    body = {"format": "resid_patching", "version": 1, "kind": "ioi"}
    body |= {"stand_in": arguments.stand_in, "flags": _flags(arguments), "prompts": _prompts(found)}
    body["baseline"] = {
        "base": found.base.tolist(),
        "source": found.source.tolist(),
        "answer_above_foil": _share(found.base > 0),
        "answer_is_top_prediction": _share(found.is_top),
    }
    body["attribution"] = found.attribution.to_dict()
    body["paths_to_logits"] = found.to_logits.to_dict()
    body["strongest"] = {"push_the_answer_up": found.up, "push_it_down": found.down}
    body["paths_to_queries"] = found.to_queries.to_dict()
    body["nothing_writes_before"] = found.unreached
    body["knock_out"] = _knock_out(found)
    body["alone"] = found.alone.to_dict()
    return json.dumps(body, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _share(values: Any) -> float:
    return float(values.double().mean())


def _prompts(found: Study) -> dict[str, Any]:
    pairs = found.pairs
    body: dict[str, Any] = {field.name: getattr(pairs, field.name) for field in _fields(pairs)}
    body["positions"] = dict(pairs.positions)
    body["differences"] = found.differing
    return body


def _fields(pairs: Any) -> Any:
    return [field for field in dataclasses.fields(pairs) if field.name != "positions"]


def _knock_out(found: Study) -> dict[str, Any]:
    def left(effect: Any) -> float | None:
        share = found.left(effect)
        return share if share == share else None

    shares = [share for effect in found.controls if (share := left(effect)) is not None]
    return {
        "found": found.knocked.to_dict(),
        "left": left(found.knocked),
        "random": [effect.to_dict() for effect in found.controls],
        "random_left": [left(effect) for effect in found.controls],
        "random_mean": sum(shares) / len(shares) if shares else None,
        "random_lowest": min(shares, default=None),
        "random_highest": max(shares, default=None),
    }


def main(argv: Sequence[str]) -> int:
    """Runs the study.

    Args:
        argv: the arguments, without the script's name.

    Returns:
        The exit code: 2 for a flag or a model that cannot be followed.
    """
    command = SimpleNamespace(build_parser=build_parser, run=run)
    return run_guarded("ioi.py", command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
