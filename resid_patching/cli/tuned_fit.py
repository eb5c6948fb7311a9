"""`tuned-lens fit`: from a text to a lens in a folder."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resid_patching.cli.frame import UsageError, ignore_launcher, load_model
from resid_patching.cli.lens_reading import describe
from resid_patching.cli.output import deliver_kl, require_files
from resid_patching.cli.text import require_texts
from resid_patching.errors import LostProcessError
from resid_patching.texts import has_rows, read_text

if TYPE_CHECKING:
    from resid_patching.lens.tuned import TunedLens
    from resid_patching.models import ModelView
    from resid_patching.processes import Team

_OF_FILES = (
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".html",
    ".csv",
    ".tsv",
    ".json",
    ".jsonl",
    ".ndjson",
    ".py",
)
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")


def fit(arguments: argparse.Namespace) -> None:
    """Fits a lens, writes it and prints its validation KL by layer.

    Of several processes, the first alone reads, writes and prints.
    """
    from resid_patching.processes import team as join

    team = join()
    is_dataset = team.first(lambda: _checked(arguments))
    texts = validation = None
    if team.is_first:
        texts = _dataset(arguments) if is_dataset else _files(arguments.text)
        validation = None if arguments.validation is None else _files([arguments.validation])
    before = _lenses(arguments.out)
    model, stand_in = load_model(arguments)

    from resid_patching.models import ModelView

    view = ModelView(model)
    try:
        lens = _fit(view, texts, validation, arguments, team)
        if not team.is_first:
            return
        if _lenses(arguments.out) != before:
            raise UsageError(
                f"{arguments.out} was given a lens by another process meanwhile, which was not "
                "replaced; give each fit an --out of its own"
            )
        lens.save(arguments.out)
        _deliver(view, lens, arguments, stand_in, team)
    except KeyboardInterrupt:
        ignore_launcher()
        raise KeyboardInterrupt(_what_is_left(arguments)) from None
    except LostProcessError as error:
        ignore_launcher()
        raise LostProcessError(f"{error} {_what_is_left(arguments)}") from error


def _checked(arguments: argparse.Namespace) -> bool:
    """Whether --text names a dataset, once nothing stands in the way of the fit."""
    is_dataset = _is_dataset(arguments)
    _require_out(arguments)
    require_files(arguments)
    _require_optimizer(arguments)
    return is_dataset


# What was asked


def _is_dataset(arguments: argparse.Namespace) -> bool:
    """Whether --text names a dataset; a file comes first.

    Raises:
        UsageError: it can be neither, or flags do not go with what it is.
    """
    name, path = arguments.text[0], Path(arguments.text[0])
    held = [] if arguments.validation is None else [arguments.validation]
    several = len(arguments.text) > 1
    if several or path.exists() or not _DATASET.fullmatch(name) or path.suffix in _OF_FILES:
        require_texts([*arguments.text, *held], arguments.text_key)
        for flag in ("dataset_config", "split"):
            if getattr(arguments, flag) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')} is for a dataset, but {name} is a file"
                )
        return False
    require_texts(held, arguments.text_key if any(map(has_rows, held)) else None)
    if arguments.tokens is None:
        raise UsageError(
            f"{name} is no file here; to read it as a Hugging Face dataset, say how much of it: "
            "--tokens N"
        )
    return True


def _require_out(arguments: argparse.Namespace) -> None:
    """Refuses to begin where a lens or an unfinished fit lies, or to go on where none does."""
    from resid_patching.lens import checkpoint, legacy, resume

    out = Path(arguments.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out is a folder")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out} cannot be made: there is no folder {out.parent}")
    unfinished = (out / resume.STATE).is_file()
    if arguments.resume and not unfinished:
        raise UsageError(f"{out} holds no unfinished fit; leave out --resume to begin one")
    if unfinished and not arguments.resume:
        raise UsageError(
            f"{out} holds an unfinished fit; --resume goes on with it, and to begin anew give "
            "another --out, or remove it"
        )
    if not unfinished and any((out / n).is_file() for n in (checkpoint.PARAMS, legacy.PARAMS)):
        raise UsageError(f"{out} holds a lens already; give another --out, or remove it")


def _lenses(folder: str) -> list[tuple[str, int, int]]:
    """The lens files in a folder, each as it is on the disk: another one there shows."""
    from resid_patching.lens import checkpoint, legacy

    paths = [Path(folder, name) for name in (checkpoint.PARAMS, legacy.PARAMS)]
    found = [(path.name, path.stat()) for path in paths if path.is_file()]
    return [(name, stat.st_ino, stat.st_mtime_ns) for name, stat in found]


def _require_optimizer(arguments: argparse.Namespace) -> None:
    import torch

    if arguments.optimizer == "muon" and arguments.steps and not hasattr(torch.optim, "Muon"):
        raise UsageError(
            f"--optimizer muon needs torch 2.9 or later, and this is {torch.__version__}; give "
            "--optimizer adam"
        )


def _files(paths: list[str]) -> list[Any]:
    """What the files hold, a text each; files of rows are read row by row when wanted."""
    return [Path(path) if has_rows(path) else read_text(path) for path in paths]


def _dataset(arguments: argparse.Namespace) -> Any:
    """The rows of a Hugging Face dataset, as they come.

    Raises:
        UsageError: the package is missing, or cannot load it.
    """
    name = arguments.text[0]
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{name} is no file here; to read it as a Hugging Face dataset, install the package "
            "datasets"
        ) from None
    split = arguments.split or "train"
    try:
        return datasets.load_dataset(name, arguments.dataset_config, split=split, streaming=True)
    except Exception as error:  # whatever the hub, the network or a dataset's files raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{name} is no file here, and no dataset that can be loaded (split {split}): {reason}"
        ) from None


# Fitting


def _fit(
    view: ModelView, texts: Any, validation: Any, arguments: argparse.Namespace, team: Team
) -> TunedLens:
    from resid_patching.lens.fit import fit_tuned_lens

    return fit_tuned_lens(
        view,
        texts,
        tokens=arguments.tokens,
        validation=validation,
        validation_tokens=arguments.validation_tokens,
        length=arguments.length,
        text_key=arguments.text_key or "text",
        prepend_bos=arguments.prepend_bos,
        site=arguments.site,
        ridge=arguments.ridge,
        steps=arguments.steps,
        step_tokens=arguments.step_tokens,
        step_windows=arguments.step_windows,
        optimizer=arguments.optimizer,
        rate=arguments.rate,
        products=arguments.products,
        seed=arguments.seed,
        folder=arguments.out,
        save_every=arguments.save_every,
        team=team,
    )


def _what_is_left(arguments: argparse.Namespace) -> str:
    from resid_patching.lens import checkpoint, resume

    out = Path(arguments.out)
    about, _ = resume.read(out)
    if about is None:
        if (out / checkpoint.PARAMS).is_file():
            return f"{out} holds the lens, finished"
        return "nothing was written"
    return (
        f"{arguments.out} holds the fit as of step {about['step']} of {arguments.steps}; the "
        "same command with --resume goes on with it"
    )


# What was found


def _columns(lens: TunedLens) -> dict[str, list[Any]]:
    found = lens.record["validation"]
    columns = {"logit lens": found["logit_lens"], "ridge": found["ridge"], "tuned": found["tuned"]}
    return {name: values for name, values in columns.items() if values}


def _origin(view: ModelView) -> Any:
    from resid_patching.prompts import prepare
    from resid_patching.result import provenance
    from resid_patching.run import Run

    return provenance(Run(view, prepare(view, [[0]])), "fit")


def _source(arguments: argparse.Namespace) -> str:
    """What was read, in words."""
    names = ", ".join(arguments.text)
    has_key = arguments.text_key is not None or any(map(has_rows, arguments.text))
    return f"{names} (rows by {arguments.text_key or 'text'!r})" if has_key else names


def _deliver(
    view: ModelView,
    lens: TunedLens,
    arguments: argparse.Namespace,
    stand_in: str | None,
    team: Team,
) -> None:
    made, held = lens.record["fit"], lens.record["validation"]
    size = sum(path.stat().st_size for path in Path(arguments.out).iterdir()) / 2**20
    cut = f"{_source(arguments)}, windows of {made['window']} tokens, {held['tokens']} tokens"
    facts = [("lens", describe(lens, arguments.out, view))]
    facts += [("text", f"{cut} held out: {held['held_out']}")]
    facts += [("written", f"{arguments.out} ({size:.1f} MiB)")]
    if team.size > 1:
        facts.insert(0, ("launch", f"{team.size} processes"))
    deliver_kl(
        arguments,
        lens,
        _columns(lens),
        title="KL(final || lens) on held-out tokens, in nats",
        over=f"mean over {held['tokens']:,} tokens held out of the fit ({held['held_out']})",
        facts=tuple(facts),
        view=view,
        origin=_origin(view),
        stand_in=stand_in,
        known={
            "command": "tuned-lens fit",
            "folder": arguments.out,
            "text": arguments.text[0] if len(arguments.text) == 1 else arguments.text,
            "text_key": arguments.text_key,
            "site": lens.site,
            "fingerprint": lens.fingerprint.as_dict(),
            "record": lens.record,
        },
    )
