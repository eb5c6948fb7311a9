"""`tuned-lens fit`: from a text to a lens in a folder."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import resid_patching as rp
from resid_patching.cli.frame import UsageError, ignore_launcher, load_model
from resid_patching.cli.inputs import refuse
from resid_patching.cli.lens_reading import deliver_kl, describe
from resid_patching.cli.text import require_texts
from resid_patching.cli.tuned_use import require_folder
from resid_patching.errors import LostProcessError
from resid_patching.texts import has_rows, read_text

_OF_FILES = ".txt .text .md .rst .html .csv .tsv .json .jsonl .ndjson .py".split()
_SETTINGS = (
    "tokens validation_tokens length prepend_bos site ridge steps step_tokens step_windows "
    "optimizer rate products seed save_every"
).split()  # flags that the library calls alike
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")


def fit(arguments: Namespace) -> None:
    """Fits a lens, writes it and prints its validation KL by layer.

    Of several processes, the first alone reads, writes and prints.
    """
    team, out = rp.team(), Path(arguments.out)
    is_dataset = team.first(lambda: _checked(arguments))
    texts: Any = None
    validation: Any = None
    if team.is_first:
        texts = _dataset(arguments) if is_dataset else _files(arguments.text)
        validation = None if arguments.validation is None else _files([arguments.validation])
    before = _lenses(out)
    view = load_model(arguments)
    try:
        lens = rp.fit_tuned_lens(
            view,
            texts,
            validation=validation,
            text_key=arguments.text_key or "text",
            folder=out,
            team=team,
            **{name: getattr(arguments, name) for name in _SETTINGS},
        )
        if not team.is_first:
            return
        if _lenses(out) != before:
            raise UsageError(
                f"another process has written a lens to {out} meanwhile, and it was not replaced; "
                "give each fit an --out of its own"
            )
        lens.save(out)
        _deliver(view, lens, arguments, team)
    except KeyboardInterrupt:
        ignore_launcher()
        raise KeyboardInterrupt(_what_is_left(out, arguments.steps)) from None
    except LostProcessError as error:
        ignore_launcher()
        raise LostProcessError(f"{error} {_what_is_left(out, arguments.steps)}") from error


# What was asked


def _checked(arguments: Namespace) -> bool:
    """Whether --text names a dataset, once nothing stands in the way of the fit."""
    import torch

    is_dataset = _is_dataset(arguments)
    _require_out(Path(arguments.out), arguments.resume)
    if arguments.optimizer == "muon" and arguments.steps and not hasattr(torch.optim, "Muon"):
        raise UsageError(
            f"--optimizer muon needs torch 2.9 or later, and this is {torch.__version__}; give "
            "--optimizer adam"
        )
    return is_dataset


def _is_dataset(arguments: Namespace) -> bool:
    """Whether --text names a dataset; a file comes first."""
    name, path = arguments.text[0], Path(arguments.text[0])
    held = [] if arguments.validation is None else [arguments.validation]
    several = len(arguments.text) > 1
    if several or path.exists() or not _DATASET.fullmatch(name) or path.suffix in _OF_FILES:
        require_texts([*arguments.text, *held], arguments.text_key)
        refuse(arguments, f"is for a dataset, but {name} is a file", "dataset_config", "split")
        return False
    require_texts(held, arguments.text_key if any(map(has_rows, held)) else None)
    if arguments.tokens is None:
        raise UsageError(
            f"{name} is no file here; to read it as a Hugging Face dataset, say how much of it: "
            "--tokens N"
        )
    return True


def _require_out(out: Path, resumes: bool) -> None:
    """Refuses to begin where a lens or an unfinished fit lies, or to continue where none does."""
    from resid_patching.lens import resume

    require_folder(out)
    unfinished = (out / resume.STATE).is_file()
    if resumes and not unfinished:
        raise UsageError(f"{out} holds no unfinished fit; leave out --resume to begin one")
    if unfinished and not resumes:
        raise UsageError(
            f"{out} holds an unfinished fit; continue it with --resume, or give another --out"
        )
    if not unfinished and _lenses(out):
        raise UsageError(f"{out} holds a lens already; give another --out, or remove it")


def _lenses(out: Path) -> list[tuple[str, int, int]]:
    """The lens files in a folder, with what tells whether one of them was replaced."""
    from resid_patching.lens import checkpoint, legacy

    paths = [out / name for name in (checkpoint.PARAMS, legacy.PARAMS)]
    found = [(path.name, path.stat()) for path in paths if path.is_file()]
    return [(name, stat.st_ino, stat.st_mtime_ns) for name, stat in found]


def _files(paths: list[str]) -> list[Any]:
    """The text of each file; files of rows are read later, row by row."""
    return [Path(path) if has_rows(path) else read_text(path) for path in paths]


def _dataset(arguments: Namespace) -> Any:
    """The rows of a Hugging Face dataset, as they come."""
    name, split = arguments.text[0], arguments.split or "train"
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{name} is no file here; to read it as a Hugging Face dataset, install the package "
            "datasets"
        ) from None
    try:
        return datasets.load_dataset(name, arguments.dataset_config, split=split, streaming=True)
    except Exception as error:  # whatever the hub, the network or a dataset's files raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{name} is no file here, and no dataset that can be loaded (split {split}): {reason}"
        ) from None


# What was found


def _what_is_left(out: Path, steps: int) -> str:
    from resid_patching.lens import resume

    about, _ = resume.read(out)
    if about is not None:
        return (
            f"{out} holds the fit as of step {about['step']} of {steps}; the same command with "
            "--resume continues it"
        )
    return f"{out} holds the lens, finished" if _lenses(out) else "nothing was written"


def _deliver(view: rp.ModelView, lens: rp.TunedLens, arguments: Namespace, team: rp.Team) -> None:
    from resid_patching.prompts import prepare
    from resid_patching.result import provenance

    made, held = lens.record["fit"], lens.record["validation"]
    names = ", ".join(arguments.text)
    if arguments.text_key is not None or any(map(has_rows, arguments.text)):
        names += f" (rows by {arguments.text_key or 'text'!r})"
    size = sum(path.stat().st_size for path in Path(arguments.out).iterdir()) / 2**20
    cut = f"{names}, windows of {made['window']} tokens, {held['tokens']} tokens"
    facts = [("launch", f"{team.size} processes")] if team.size > 1 else []
    facts += [("lens", describe(lens, arguments.out, view))]
    facts += [("text", f"{cut} held out: {held['held_out']}")]
    facts += [("written", f"{arguments.out} ({size:.1f} MiB)")]
    columns = {"logit lens": "logit_lens", "ridge": "ridge", "tuned": "tuned"}
    deliver_kl(
        arguments,
        view,
        provenance(rp.Run(view, prepare(view, [[0]])), "fit"),
        lens,
        {name: held[key] for name, key in columns.items() if held[key]},
        title="KL(final || lens) on held-out tokens, in nats",
        over=f"mean over {held['tokens']:,} tokens held out of the fit ({held['held_out']})",
        facts=tuple(facts),
        body={
            "folder": arguments.out,
            "text": arguments.text[0] if len(arguments.text) == 1 else arguments.text,
            "text_key": arguments.text_key,
            "site": lens.site,
            "record": lens.record,
        },
    )
