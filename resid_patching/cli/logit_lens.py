"""`resid-patching logit-lens`: what each layer would say next, as a table, JSON and CSV."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from resid_patching.cli.flags import add_flags
from resid_patching.cli.frame import (
    Parser,
    UsageError,
    add_model_flags,
    add_output_flags,
    load_model,
)
from resid_patching.cli.inputs import add_answer_flags, add_prompt_flags, read_prompts
from resid_patching.cli.lens_reading import (
    add_place_flags,
    beside,
    deliver_readings,
    every,
    require_answers,
    require_lens,
)
from resid_patching.cli.output import require_files

if TYPE_CHECKING:
    from resid_patching.lens.tuned import TunedLens
    from resid_patching.run import Run


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of `logit-lens`."""
    parser = Parser(
        prog=prog,
        description="Reads every state of the stream through the model's own final norm and "
        "unembedding: what the model would say next if it stopped there. The norm is recomputed "
        "at each layer. This is not what the model believes midway (earlier states are not what "
        "the unembedding was trained on), and says nothing of causes.",
    )
    add_prompt_flags(parser)
    _add_view_flags(parser)
    add_answer_flags(parser)
    add_model_flags(parser)
    add_output_flags(parser)
    return parser


def _add_view_flags(parser: argparse.ArgumentParser) -> None:
    add_place_flags(parser, "in depth")
    add_flags(
        parser,
        {
            "--mid": "also read between attention and MLP of each layer",
            "--layers-every N = 1": "read every so many layers; the last is always read",
            "--top N = 5": "top tokens in depth and in files",
            "--lens FOLDER": "read through this tuned lens instead: ours, the tuned-lens "
            "package's, or demo",
            "--beside": "with --lens: also the logit lens, for comparison",
        },
    )


def run(arguments: argparse.Namespace) -> None:
    """Reads the prompts through the lens and prints what it says."""
    asked = read_prompts(arguments)
    require_answers(*asked[1:])
    _require_flags(arguments)
    require_files(arguments)
    model, stand_in = load_model(arguments)

    from resid_patching.run import capture

    captured = capture(model, asked[0], prepend_bos=arguments.prepend_bos)
    lens, readouts = _readouts(captured, arguments)
    deliver_readings(captured, readouts, asked, arguments, lens=lens, stand_in=stand_in)


def _require_flags(arguments: argparse.Namespace) -> None:
    if arguments.lens is None:
        if arguments.beside:
            raise UsageError("--beside sets the logit lens beside a --lens FOLDER; none was given")
        return
    if arguments.mid:
        raise UsageError(
            "--mid does not go with --lens: a tuned lens reads the states that it was fitted on"
        )
    require_lens(arguments.lens)


def _readouts(
    captured: Run, arguments: argparse.Namespace
) -> tuple[TunedLens | None, dict[str, Any]]:
    from resid_patching.lens.logit import logit_lens

    stride = arguments.layers_every
    if arguments.lens is None:
        plain = logit_lens(captured, mid=arguments.mid, stride=stride)
        return None, {"logit lens": plain}
    from resid_patching.lens.tuned import TunedLens

    lens = TunedLens.load(arguments.lens, captured.view)
    tuned = lens(captured)
    found = {"tuned lens": every(tuned, stride)}
    if arguments.beside:
        found = {"logit lens": every(beside(tuned, captured), stride), **found}
    return lens, found
