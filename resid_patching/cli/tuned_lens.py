"""`resid-patching tuned-lens`: fit, eval, show and convert tuned lenses."""

from __future__ import annotations

import argparse
import math

from resid_patching.cli import tuned_fit, tuned_use
from resid_patching.cli.frame import Parser, add_model_flags, add_output_flags
from resid_patching.cli.inputs import add_answer_flags, add_prompt_flags, count
from resid_patching.cli.lens_reading import add_place_flags
from resid_patching.cli.text import add_text_key_flag

_WHAT = {
    "fit": "fit a lens of a model on a text",
    "eval": "its KL by layer on a text, beside the logit lens's",
    "show": "compare logit and tuned lens on a prompt",
    "convert": "other weights (raw, centred) or another format, where that is exact",
}


def build_parser(prog: str) -> argparse.ArgumentParser:
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
    add_flags = {"fit": _fit, "eval": _evaluate, "show": _show, "convert": _convert}
    for name, text in _WHAT.items():
        add_flags[name](names.add_parser(name, help=text, description=f"{name}: {text}."))
    return parser


def _fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FOLDER", required=True, help="where the lens goes")
    _add_text_flags(parser)
    parser.add_argument(
        "--tokens",
        type=count,
        metavar="N",
        help="training tokens (unset: all of the text; needed for a dataset)",
    )
    parser.add_argument(
        "--validation",
        metavar="FILE",
        help="validate on this text (unset: on the first documents of --text, or the end of one)",
    )
    _add_number(parser, "--validation-tokens", count, 1024, "tokens to validate on")
    _add_step_flags(parser.add_argument_group("fit"))
    add_model_flags(parser)
    add_output_flags(parser)


def _add_step_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--no-ridge",
        dest="ridge",
        action="store_false",
        help="begin the steps at the logit lens, without the regression in closed form",
    )
    _add_number(group, "--steps", whole, 100, "KL steps; 0 for the regression alone")
    _add_number(group, "--step-tokens", count, 256, "positions of each layer in a step")
    _add_number(group, "--step-windows", count, 2, "windows that a step runs")
    group.add_argument(
        "--optimizer",
        default="muon",
        choices=("muon", "adam", "sgd"),
        help="of the KL steps (default: muon)",
    )
    group.add_argument(
        "--rate", type=positive, metavar="R", help="learning rate (unset: the optimizer's own)"
    )
    group.add_argument(
        "--products",
        default="float32",
        choices=("float32", "bfloat16"),
        help="precision of the large matrix products of a step; bfloat16 is faster where the "
        "processor has it (default: float32)",
    )
    group.add_argument(
        "--site",
        default="resid_pre",
        choices=("resid_pre", "resid_mid", "attn_out", "mlp_out"),
        help="what the lens reads at each layer (default: resid_pre)",
    )
    _add_number(group, "--seed", whole, 0, "of every draw")
    group.add_argument(
        "--resume", action="store_true", help="go on with the unfinished fit that is in --out"
    )
    _add_number(group, "--save-every", count, 20, "steps between writes of the unfinished fit")


def _evaluate(parser: argparse.ArgumentParser) -> None:
    _add_lens_flag(parser)
    parser.add_argument(
        "--text",
        metavar="FILE",
        required=True,
        help="a UTF-8 text of any length, or a .jsonl file with one in each row",
    )
    add_text_key_flag(parser)
    _add_length_flag(parser, "the lens's own")
    parser.add_argument(
        "--limit", type=count, metavar="N", help="windows taken from the text (unset: all)"
    )
    add_model_flags(parser)
    add_output_flags(parser)


def _show(parser: argparse.ArgumentParser) -> None:
    _add_lens_flag(parser)
    add_prompt_flags(parser)
    add_place_flags(parser, "with both side by side")
    _add_number(parser, "--top", count, 3, "top tokens")
    add_answer_flags(parser)
    add_model_flags(parser)
    add_output_flags(parser)


def _convert(parser: argparse.ArgumentParser) -> None:
    _add_lens_flag(parser)
    parser.add_argument(
        "--to",
        required=True,
        choices=("raw", "centred", "tuned-lens", "ours"),
        help="raw: for the weights as they are; centred: for --processing folded; tuned-lens: "
        "that package's files; ours: this package's files",
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="where the new lens goes")
    add_model_flags(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks and library warnings")


def _add_lens_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lens",
        metavar="FOLDER",
        required=True,
        help="a lens: ours, the tuned-lens package's, or demo",
    )


def _add_text_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        metavar="FILE|DATASET",
        required=True,
        action="append",
        help="a UTF-8 text, a .jsonl file with one in each row, or the name of a Hugging Face "
        "dataset (needs the package datasets); files may be given several times",
    )
    parser.add_argument("--dataset-config", metavar="NAME", help="which part of a dataset")
    parser.add_argument("--split", metavar="NAME", help="a dataset's split (default: train)")
    add_text_key_flag(parser, "the rows of a dataset or a .jsonl file")
    _add_length_flag(parser, "256, or the context where that is shorter")


def _add_length_flag(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--length",
        type=count,
        metavar="N",
        help=f"tokens of a window, its first token included (unset: {default})",
    )


def _add_number(
    parser: argparse._ActionsContainer, flag: str, kind: object, default: int, text: str
) -> None:
    parser.add_argument(
        flag,
        type=kind,  # type: ignore[arg-type]
        default=default,
        metavar="N",
        help=f"{text} (default: {default})",
    )


def whole(text: str) -> int:
    """A whole number from 0, as a flag's value."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def positive(text: str) -> float:
    """A number above 0, as a flag's value."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def run(arguments: argparse.Namespace) -> None:
    """Does what was asked."""
    match arguments.action:
        case "fit":
            tuned_fit.fit(arguments)
        case "eval":
            tuned_use.evaluate(arguments)
        case "show":
            tuned_use.show(arguments)
        case _:
            tuned_use.convert(arguments)
