"""`resid-patching logit-lens`: what each layer would say next, as a table, JSON and CSV."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import resid_patching as rp
from resid_patching.cli.flags import PROMPTS, answer_flags
from resid_patching.cli.frame import Parser, UsageError, command_parser, load_model
from resid_patching.cli.inputs import refuse
from resid_patching.cli.lens_reading import (
    beside,
    deliver_readings,
    place_flags,
    read_asked,
    require_lens,
)


def build_parser(prog: str) -> Parser:
    """The flags of `logit-lens`."""
    return command_parser(
        prog,
        "Reads every state of the stream through the model's own final norm and unembedding: what "
        "the model would say next if it stopped there. The norm is recomputed at each layer. This "
        "is not what the model believes midway (earlier states are not what the unembedding was "
        "trained on), and says nothing of causes.",
        {
            **PROMPTS,
            **place_flags("in depth"),
            "--mid": "also read between attention and MLP of each layer",
            "--layers-every N = 1": "read every Nth layer; the last is always read",
            "--top N = 5": "top tokens in depth and in files",
            "--lens FOLDER": "read through this tuned lens instead: ours, the tuned-lens "
            "package's, or demo",
            "--beside": "with --lens: also the logit lens, for comparison",
            **answer_flags(),
        },
    )


def run(arguments: Namespace) -> None:
    """Reads the prompts through the lens and prints what it says."""
    asked = read_asked(arguments)
    if arguments.lens is None:
        if arguments.beside:
            raise UsageError("--beside sets the logit lens beside a --lens FOLDER; none was given")
    else:
        why = "does not go with --lens: a tuned lens reads the states that it was fitted on"
        refuse(arguments, why, "mid")
        require_lens(arguments.lens)
    captured = rp.capture(load_model(arguments), asked[0], prepend_bos=arguments.prepend_bos)
    lens, readouts = None, {}
    if arguments.lens is None:
        options = {"mid": arguments.mid, "stride": arguments.layers_every}
        readouts["logit lens"] = rp.logit_lens(captured, **options)
    else:
        lens = rp.TunedLens.load(arguments.lens, captured.view)
        tuned = lens(captured)
        if arguments.beside:
            readouts["logit lens"] = _every(arguments.layers_every, beside(tuned))
        readouts["tuned lens"] = _every(arguments.layers_every, tuned)
    deliver_readings(arguments, captured, readouts, asked, lens=lens)


def _every(stride: int, readout: rp.LensReadout) -> rp.LensReadout:
    """A lens's first row, every so many after it, and always the last."""
    last, translate = len(readout.rows) - 1, readout.translate
    kept = [number for number in range(last + 1) if number % stride == 0 or number == last]

    def moved(row: int, states: Any) -> Any:
        return states if translate is None else translate(kept[row], states)

    rows = tuple(readout.rows[number] for number in kept)
    return dataclasses.replace(readout, rows=rows, translate=moved, _memo={})
