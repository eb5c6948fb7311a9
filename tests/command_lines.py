"""Random command lines, good and hostile, and what must hold of each: for fuzz.py.

A line begins as one that works; then options of the command's own parser are added with values of
the right or the wrong kind, values are replaced, words are dropped, doubled or moved. Whatever
comes of it:

    the exit code is 0 or 2, and 2 comes with one line of error, and changes no file;
    0 leaves the files asked for, whole, and no other; there is no traceback and nothing
    that would steer a terminal; input files, settings and threads stay as they were.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import logging
import os
import random
import re
import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import tqdm
import zoo

from resid_patching.cli import COMMANDS, main

PROMPT = "When Mary and John went to the store, John gave a drink to"
SOURCE = "When Mary and John went to the store, Mary gave a drink to"
ANSWERS = ["--answer", " Mary", "--foil", " John"]

TEXTS = (
    PROMPT,
    SOURCE,
    "Mary",
    " ",
    "",
    "\t",
    "[red]bold[/red] [/]",
    "\x1b[31mred\x1b]0;title\x07",
    "a\x00b\r\nc\u2028d",
    "\u202eright to left \u05e9\u05dc\u05d5\u05dd",
    "Caf\u00e9 e\u0301 \U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "<script>alert(1)</script> & \"quoted\" 'text'",
    "\ud83d",
    "\udcff\udcfe",
    "=1+1",
    "word " * 200,
    "-x",
    "--json",
    "%s %d {0}",
)
NUMBERS = ("0", "1", "2", "3", "-1", "-5", "7", "128", "100000", "9" * 30, "x", "", "1.5", "\u0663")
ADDRESSES = (
    "embed pos_embed attn.0 attn.3 mlp.1 mlp.1.5 1.2 3.3 0.0 attn.1.bias mlp.2.bias resid_pre.2 "
    "resid_mid.1 resid_post.3 1.2.z 1.2.q 1.2.k 1.2.v 1.2.pattern logits mlp.2.in L1H2 "
    "blocks.1.hook_attn_out 9.9 4.0 mlp.1.99999 1.2.x attn attn.-1 1.2->2.0.q \u0661.2"
).split()
SWAPS = ("0.1", "1.2", "mlp.1", "attn.2")


def words(ground: Path) -> dict[str, tuple[str, ...]]:
    """Values by the name of the option, the good ones first."""
    inputs, out = ground / "in", ground / "out"
    texts = tuple(str(path) for path in sorted(inputs.iterdir()))
    return {
        "model": ("demo", "demo", "demo", str(zoo.text_folder()), "nowhere", str(inputs), ""),
        "lens": ("demo", "demo", str(inputs), "nowhere"),
        "device": ("cpu", "cpu", "cuda:99", "toaster"),
        "prompt": TEXTS,
        "base": TEXTS,
        "answer": (" Mary", " John", "Mary", " Mary John", "", "\ud83d", "\x1b[1m"),
        "foil": (" John", " Tom", " xyzzy", ""),
        **dict.fromkeys(("prompts", "text", "validation", "reference", "source", "pairs"), texts),
        "out": (str(out / "lens"), str(out / "old.json"), str(out / "none" / "lens")),
        **{
            name: (
                str(out / f"new.{name}"),
                str(out / f"old.{name}"),
                str(out / f"link.{name}"),
                str(out / "folder"),
                str(out / "none" / f"new.{name}"),
                "",
            )
            for name in ("json", "csv", "html")
        },
        "to": ("logits", "2.1.q", "mlp.3.in", "3.0.v", "0.0.q", "raw", "9.9.q", "x"),
        "positions": ("-1", "0", "5", "END", "S1", "99", "x"),
        "rate": ("0.01", "1e30", "0", "nan", "inf"),
        "write_scale": ("0", "0.5", "-1", "1e30", "nan", "x"),
        "targets": ADDRESSES,
        "senders": ADDRESSES,
    }


def bases(ground: Path) -> list[list[str]]:
    """Lines that work."""
    inputs = ground / "in"
    prompt, model = ["--prompt", PROMPT], ["--model", "demo"]
    text, lines = str(inputs / "text.txt"), str(inputs / "prompts.txt")
    pair = ["--base", PROMPT, "--source", SOURCE, *ANSWERS]
    path = ["path-patch", *model, *pair, "--mlps", "freeze", "--using", "source"]
    fit = ["tuned-lens", "fit", *model, "--text", text, "--out", str(ground / "out" / "lens")]
    fit += ["--length", "16", "--tokens", "64", "--validation-tokens", "16", "--steps", "1"]
    return [
        ["dla", *model, *prompt, *ANSWERS],
        ["dla", *model, "--prompts", lines],
        ["ablate", "zero", "attn.1", "0.2", *model, *prompt, *ANSWERS],
        ["ablate", "zero", "--sweep", "heads", *model, *prompt, *ANSWERS],
        ["ablate", "zero", "--sweep", "streams", "--positions", "each", *model, *prompt, *ANSWERS],
        ["ablate", "zero", "mlp.0", *model, "--text", text, "--length", "16", "--limit", "2"],
        ["ablate", "mean", "1.2", *model, *prompt, *ANSWERS, "--reference", lines, "--over",
         "batch,pos"],
        ["ablate", "resample", "1.2", *model, *prompt, *ANSWERS, "--source",
         str(inputs / "source.txt")],
        [*path, "1.2", "0.1", "--to", "logits"],
        [*path, "--sweep", "heads", "--to", "2.1.q", "--positions", "END"],
        ["path-patch", *model, "0.1", "--to", "logits", "--mlps", "recompute", "--using", "zero",
         "--pairs", str(inputs / "pairs.tsv")],
        ["logit-lens", *model, *prompt],
        ["logit-lens", *model, *prompt, "--lens", "demo", "--beside"],
        fit,
        ["tuned-lens", "eval", *model, "--lens", "demo", "--text", text, "--limit", "1"],
        ["tuned-lens", "show", *model, "--lens", "demo", *prompt],
        ["tuned-lens", "convert", *model, "--lens", "demo", "--to", "tuned-lens", "--out",
         str(ground / "out" / "lens")],
        ["attention", "--heads", "0.1", *model, *prompt],
        ["stream", *model, *prompt],
        ["--version"],
    ]  # fmt: skip


def _fill(inputs: Path) -> None:
    """Input files, good and bad."""
    inputs.mkdir(parents=True)
    contents: dict[str, bytes] = {
        "text.txt": zoo.CORPUS[:1500].encode(),
        "prompts.txt": f"{PROMPT}\t Mary\t John\n{SOURCE}\t John\t Mary\n".encode(),
        "source.txt": f"{SOURCE}\n".encode(),
        "pairs.tsv": f"base\tsource\tanswer\tfoil\n{PROMPT}\t{SOURCE}\t Mary\t John\n".encode(),
        "empty.txt": b"",
        "blank.txt": b"\n \n\n",
        "latin.txt": b"caf\xe9\n",
        "noise.jsonl": random.Random(0).randbytes(500),
        "controls.txt": b"\x1b[31mred\x00\x07\t\x1b[0m\nb\t\t\t\n",
        "one.jsonl": json.dumps({"base": PROMPT, "source": SOURCE, "answer": " Mary"}).encode(),
    }
    for name, content in contents.items():
        (inputs / name).write_bytes(content)
    (inputs / "folder.txt").mkdir()


def _reset(out: Path) -> None:
    """The place for output: old files, a folder in the way, links."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "folder").mkdir()
    for name in ("json", "csv", "html"):
        (out / f"old.{name}").write_text("old", encoding="utf-8")
        (out / f"target.{name}").write_text("old", encoding="utf-8")
        (out / f"link.{name}").symlink_to(out / f"target.{name}")


def _snapshot(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): (
            f"link to {path.readlink()}"
            if path.is_symlink()
            else path.read_bytes() if path.is_file() else "folder"
        )
        for path in sorted(folder.rglob("*"))
    }  # fmt: skip


def _settings() -> dict[str, Any]:
    return {
        "logging": logging.root.manager.disable,
        "warnings": (list(warnings.filters), warnings.showwarning),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "random": torch.random.get_rng_state().tolist(),
        # tqdm watches its bars from one thread, which stays for the next bar.
        "threads": [t for t in threading.enumerate() if not isinstance(t, tqdm.TMonitor)],
    }


class Ground:
    """A folder where lines are run; use it with `with`."""

    def __enter__(self) -> Ground:
        self.folder = zoo.scratch() / "ground"
        shutil.rmtree(self.folder, ignore_errors=True)
        _fill(self.folder / "in")
        _reset(self.folder / "out")
        self.inputs = _snapshot(self.folder / "in")
        self.bases = bases(self.folder)
        self.words = words(self.folder)
        return self

    def __exit__(self, *about: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # Making a line

    def line(self, rng: random.Random) -> list[str]:
        """A random command line."""
        found = list(rng.choice(self.bases))
        actions = _options(found)
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            if actions:
                found += self._option(rng.choice(actions), rng)
        if rng.random() < 0.3:
            found = self._spoilt(found, rng)
        return found

    def _option(self, action: argparse.Action, rng: random.Random) -> list[str]:
        flag = [rng.choice(action.option_strings)] if action.option_strings else []
        if action.nargs == 0:
            return flag
        return [*flag, self._value(action, rng)]

    def _value(self, action: argparse.Action, rng: random.Random) -> str:
        known = self.words.get(action.dest, ())
        if action.choices and rng.random() < 0.8:
            return str(rng.choice(list(action.choices)))
        if known and rng.random() < 0.9:
            return rng.choice(known)
        return rng.choice(NUMBERS if action.type else (*TEXTS, *NUMBERS))

    def _spoilt(self, line: list[str], rng: random.Random) -> list[str]:
        place = rng.randrange(len(line))
        match rng.randrange(4):
            case 0:
                return line[:place] + line[place + 1 :]
            case 1:
                return line[:place] + [line[place]] + line[place:]
            case 2:
                return line[:place] + [rng.choice((*TEXTS, *NUMBERS))] + line[place + 1 :]
            case _:
                other = rng.randrange(len(line))
                line[place], line[other] = line[other], line[place]
                return line

    # Running one

    def attack(self, seed: int) -> str | None:
        """Runs the line of a seed: what is wrong with it, or None."""
        rng = random.Random(f"line {seed}")
        argv = self.line(rng)
        encoding = rng.choice(("utf-8", "utf-8", "cp1252", "ascii"))
        _reset(self.folder / "out")
        here = self.folder / "here"  # what earlier lines wrote to names without a folder is gone
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        before, settings = _snapshot(self.folder / "out"), _settings()
        back = os.getcwd()
        os.chdir(here)
        try:
            code, stdout, stderr = run(argv, encoding)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"{argv}: {type(error).__name__}: {error}"
        finally:
            os.chdir(back)
        after = _snapshot(self.folder / "out")
        problems = [
            *_of_streams(code, stdout, stderr, "--debug" in argv),
            *_of_files(code, before, after, argv),
        ]
        if (inputs := _snapshot(self.folder / "in")) != self.inputs:
            asked = {name for name in inputs if str(self.folder / "in" / name) in _outputs(argv)}
            kept = {name: inputs.get(name) for name in self.inputs if name not in asked}
            if code != 0 or kept.items() != {n: self.inputs[n] for n in kept}.items():
                problems.append("an input file was changed")
            shutil.rmtree(self.folder / "in")
            _fill(self.folder / "in")
        now = _settings()
        problems += [f"{name} changed" for name in now if now[name] != settings[name]]
        if not problems:
            return None
        return f"{argv} ({encoding}): {'; '.join(problems)}\n    stderr: {stderr[-400:]}"


def _outputs(line: list[str]) -> set[str]:
    """The files that a line asks to be written."""
    flags = ("--json", "--csv", "--html", "--png", "--rows", "--out")
    return {word for flag, word in itertools.pairwise(line) if flag in flags}


def _options(line: list[str]) -> list[argparse.Action]:
    """The options of the command that a line calls."""
    if line[0] not in COMMANDS:
        return []
    command = importlib.import_module(f"resid_patching.cli.{line[0].replace('-', '_')}")
    parser, rest = command.build_parser(line[0]), line[1:]
    while subs := [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]:
        if rest[0] not in subs[0].choices:
            break
        parser, rest = subs[0].choices[rest[0]], rest[1:]
    return [a for a in parser._actions if not isinstance(a, argparse._SubParsersAction)]


def run(argv: list[str], encoding: str = "utf-8") -> tuple[int, str, str]:
    """A command line in this process: exit code, what it wrote to stdout and to stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        code = main(argv)
    for stream in streams:
        stream.flush()
    texts = [s.buffer.getvalue().decode(encoding) for s in streams]  # type: ignore[attr-defined]
    return code, *texts


def _of_streams(code: int, stdout: str, stderr: str, debug: bool) -> list[str]:
    found = []
    if code not in (0, 2):
        found.append(f"exit code {code}")
    if not debug:
        rest = [line for line in stderr.splitlines() if not line.startswith("warning: ")]
        errors = [line for line in rest if ": error: " in line]
        if "Traceback" in stderr:
            found.append("a traceback")
        if len(errors) != (code != 0) or len(rest) != len(errors):
            found.append(f"{len(rest)} lines on stderr, {len(errors)} of them an error")
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        steering = {c for c in text if ord(c) < 32 and c != "\n" or 127 <= ord(c) < 160}
        if steering and not (debug and name == "stderr"):
            found.append(f"{name} holds {sorted(steering)!r}")
    return found


def _of_files(
    code: int, before: dict[str, Any], after: dict[str, Any], argv: list[str]
) -> list[str]:
    found = [f"{name} is gone" for name in before if name not in after]
    found += [f"{name} is no link any more" for name in before if _is_link(before, name)
              and not _is_link(after, name)]  # fmt: skip
    changed = {name for name in after if after[name] != before.get(name)}
    lens = {name for name in changed if name.split("/")[0] == "lens"}
    found += [f"{name} was left" for name in changed if Path(name).name.startswith(".")]
    if code != 0:
        found += [f"{name} was written by a line that failed" for name in changed - lens]
        return found
    for name in changed - lens:
        try:
            _require_whole(name, after[name])
        except (ValueError, AssertionError, UnicodeError) as error:
            found.append(f"{name} is not whole: {error!r}")
    return found


def _is_link(files: dict[str, Any], name: str) -> bool:
    return isinstance(files.get(name), str) and files[name].startswith("link")


def _require_whole(name: str, content: Any) -> None:
    assert isinstance(content, bytes), content
    text = content.decode("utf-8")
    if name.endswith("json"):
        json.loads(text, parse_constant=lambda constant: json.loads(constant.lower()))
    elif name.endswith("csv"):
        import pandas

        assert len(pandas.read_csv(io.StringIO(text))) > 0
    else:
        assert text.endswith(("</html>", "</html>\n"))
        policy = set(re.findall(r"'sha256-([^']*)'", text[: text.index("</head>")]))
        for script in re.findall(r"<script>(.*?)</script>", text, re.S | re.I):
            digest = hashlib.sha256(script.encode()).digest()
            assert base64.b64encode(digest).decode() in policy, script[:80]


if __name__ == "__main__":
    with Ground() as ground:
        print(ground.line(random.Random(f"line {sys.argv[1]}")))
