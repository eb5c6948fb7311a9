"""`resid-patching tuned-lens`: fit, eval, show and convert tuned lenses."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from resid_patching.cli import tuned_fit, tuned_use
from resid_patching.cli.flags import (
    DEBUG,
    PROMPTS,
    add_flags,
    answer_flags,
    positive,
    whole,
)
from resid_patching.cli.frame import Parser, add_command_flags, add_model_flags
from resid_patching.cli.lens_reading import place_flags

_ACTIONS = {
    "fit": ("fit a lens of a model on a text", tuned_fit.fit),
    "eval": ("its KL by layer on a text, beside the logit lens's", tuned_use.evaluate),
    "show": ("compare logit and tuned lens on a prompt", tuned_use.show),
    "convert": (
        "move a lens to other weights (raw, centred) or another format, if that is exact",
        tuned_use.convert,
    ),
}
_LENS = {"--lens FOLDER !": "a lens: ours, the tuned-lens package's, or demo"}
_FLAGS: dict[str, dict[str, Any]] = {
    "fit": {
        "--out FOLDER !": "where the lens goes",
        "--text FILE|DATASET... !": "a UTF-8 text, a .jsonl file with one in each row, or the name "
        "of a Hugging Face dataset (needs the package datasets); files may be given several times",
        "--dataset-config NAME": "which part of a dataset",
        "--split NAME": "a dataset's split (default: train)",
        "--text-key COLUMN": "what holds the text in the rows of a dataset or a .jsonl file "
        "(default: text)",
        "--length N": "tokens of a window, its first token included (unset: 256, or the context "
        "where that is shorter)",
        "--tokens N": "training tokens (unset: all of the text; needed for a dataset)",
        "--validation FILE": "validate on this text (unset: on the first documents of --text, or "
        "the end of one)",
        "--validation-tokens N = 1024": "tokens to validate on",
        "fit": {
            "--no-ridge": {
                "dest": "ridge",
                "action": "store_false",
                "help": "begin the steps at the logit lens, without the regression in closed form",
            },
            "--steps N = 100": "KL steps; 0 for the regression alone",
            "--step-tokens N = 256": "positions of each layer in a step",
            "--step-windows N = 2": "windows that a step runs",
            "--optimizer muon|adam|sgd = muon": "the optimizer of the KL steps",
            "--rate R": "learning rate (unset: the optimizer's own)",
            "--products float32|bfloat16 = float32": "precision of the large matrix products of a "
            "step; bfloat16 is faster where the processor has it",
            "--site resid_pre|resid_mid|attn_out|mlp_out = resid_pre": "what the lens reads at "
            "each layer",
            "--seed N = 0": "the seed of every draw",
            "--resume": "continue the unfinished fit that is in --out",
            "--save-every N = 20": "steps after which the unfinished fit is saved again",
        },
    },
    "eval": {
        **_LENS,
        "--text FILE !": "a UTF-8 text of any length, or a .jsonl file with one in each row",
        "--text-key COLUMN": "what holds the text in a .jsonl file (default: text)",
        "--length N": "tokens of a window, its first token included (unset: the lens's own)",
        "--limit N": "windows taken from the text (unset: all)",
    },
    "show": {
        **_LENS,
        **PROMPTS,
        **place_flags("with both side by side"),
        "--top N = 3": "top tokens",
        **answer_flags(),
    },
    "convert": {
        **_LENS,
        "--to raw|centred|tuned-lens|ours !": "raw: for the weights as they are; centred: for "
        "--processing folded; tuned-lens: that package's files; ours: this package's files",
        "--out FOLDER !": "where the new lens goes",
    },
}


def build_parser(prog: str) -> Parser:
    """The flags of `tuned-lens`, one sub-command each."""
    parser = Parser(
        prog=prog,
        description="A tuned lens moves each state by an affine map of its own layer before the "
        "model's own final norm and unembedding, fitted to come near the model's output. It says "
        "what can be read linearly from a state, not what causes what.",
        epilog=f"Each explains itself: {prog} fit --help",
    )
    names = parser.add_subparsers(
        title="commands", dest="action", metavar="fit|eval|show|convert", required=True
    )
    for name, (text, _) in _ACTIONS.items():
        inner = names.add_parser(name, help=text, description=f"{name}: {text}.")
        if name != "convert":
            add_command_flags(inner, _FLAGS[name], steps=whole, rate=positive, seed=whole)
            continue
        add_flags(inner, _FLAGS[name])
        add_model_flags(inner)
        add_flags(inner, DEBUG)
    return parser


def run(arguments: Namespace) -> None:
    """Does what was asked."""
    _, act = _ACTIONS[arguments.action]
    act(arguments)
