"""Every command under attack: hostile texts, files and streams, full disks, interrupts, NaN."""

import contextlib
import csv
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import zoo
from rich.console import Console

import resid_patching as rp
from resid_patching import models
from resid_patching.cli import main
from resid_patching.errors import NotFiniteError, PromptError, TokenError
from resid_patching.files import write_bytes
from resid_patching.lens import resume
from resid_patching.markup import printable
from resid_patching.show import text as shown_text
from resid_patching.show.report import TextGrid, number_cells
from resid_patching.show.text import print_grid

pytestmark = [pytest.mark.once, pytest.mark.full]

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts"))

import ioi  # noqa: E402

really_load = rp.load  # known to the package by this name before any test replaces it

TINY = ("--tokens", "600", "--validation-tokens", "120", "--length", "12")
QUICK = (*TINY, "--steps", "6", "--step-tokens", "8", "--save-every", "2")
FEW = ("--limit", "3")
NASTY_TOKENS = ("<script>alert(1)</script>", "[bold red]", "\x1b[31m", "\x1b]8;;http://x\x1b\\")
HOSTILE = (
    "<script>alert(1)</script> & <img src=x onerror=alert(1)>",
    "[bold red]x[/] [link=http://x]y[/link] :smile: {x}",
    "\x1b[31mred\x1b[0m \x1b]8;;http://x\x1b\\y\x1b]8;;\x1b\\ \x1b]0;title\x07",
    "a\rb\bc\x00d\x07e\x0bf\x7fg\x85h\u2028i\nj\tk",
    "\u202egnp.exe\u2066 \u05d0\u05d1 e\u0301\u0323 \u200b\ufeff",
    '", "a" ,\'=1+1\n"',
)
PROMPT = "the dog saw the cat"


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch):
    """What was loaded is not loaded again."""
    monkeypatch.setattr(models, "load", load_once)


@functools.cache
def load_once(name, **options):
    return really_load(name, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A random model whose tokenizer has markup and escape sequences as tokens of their own."""
    tokenizer = zoo.byte_level_tokenizer()
    tokenizer.add_tokens(list(NASTY_TOKENS))
    folder = tmp_path_factory.mktemp("models") / "nasty"
    return str(zoo.save(folder, zoo.gpt2_config(len(tokenizer)), tokenizer))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    target = tmp_path_factory.mktemp("texts") / "text.txt"
    target.write_text(zoo.CORPUS, encoding="utf-8")
    return str(target)


@pytest.fixture(scope="module")
def lens(model, text, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("lenses") / "lens")
    argv = ["fit", "--model", model, "--text", text, "--out", folder, *TINY, "--steps", "0"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["tuned-lens", *argv]) == 0
    return folder


def call(argv) -> int:
    argv = list(map(str, argv))
    return ioi.main(argv[1:]) if argv[0] == "ioi" else main(argv)


def run(capsys, *argv):
    code = call(argv)
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *argv, code=2) -> str:
    """The one line that a command must be refused with."""
    found, out, err = run(capsys, *argv)
    assert found == code and out == "", (found, out, err)
    assert err.count("\n") == 1 and "Traceback" not in err, err
    assert re.match(r"(resid-patching|ioi\.py)( [a-z-]+)*: error: \S", err), err
    return err


def names_in(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def commands(prompts, model, lens, text) -> dict[str, list[str]]:
    """Every command with what it needs, files aside; those without prompts at the end."""

    def each(flag):
        return [word for prompt in prompts for word in (flag, prompt)]

    given = ["--model", model, *each("--prompt")]
    path = ["path-patch", "0.1", "1.0", "--mlps", "recompute", "--using", "zero", "--metric", "kl"]
    return {
        "dla": ["dla", *given],
        "ablate": ["ablate", "zero", "--sweep", "heads", "--metric", "kl", *given],
        "path-patch": [*path, "--to", "logits", "--model", model, *each("--base")],
        "logit-lens": ["logit-lens", *given, "--position", "-1"],
        "grid": ["logit-lens", *given],
        "show": ["tuned-lens", "show", "--lens", lens, *given],
        "stream": ["stream", *given],
        "text": ["ablate", "zero", "0.1", "--text", text, *given[:2], "--length", "40", *FEW],
        "eval": ["tuned-lens", "eval", "--lens", lens, "--text", text, *given[:2], *FEW],
    }


PROMPTED = ("dla", "ablate", "path-patch", "logit-lens", "grid", "show", "stream")
ALL = (*PROMPTED, "text", "eval", "ioi")
SMALL_STUDY = ("ioi", "--model", "demo", "--prompts", "3", "--random-sets", "1", "--heads", "1")


@pytest.fixture
def argv_of(model, lens, text):
    def argv(name, prompts=(PROMPT,)):
        if name == "ioi":
            return list(SMALL_STUDY)
        return commands(prompts, model, lens, text)[name]

    return argv


# Texts


@pytest.mark.parametrize("name", PROMPTED)
def test_hostile_texts_are_shown_and_files_hold_them(capsys, tmp_path, argv_of, name):
    files = {kind: tmp_path / f"o.{kind}" for kind in ("json", "csv")}
    if name == "grid":
        files["html"] = tmp_path / "o.html"
    flags = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    code, out, err = run(capsys, *argv_of(name, HOSTILE), *flags)
    assert code == 0, err
    assert all(c.isprintable() or c == "\n" for c in out + err)
    assert '"[bold red]"' in out or name in ("dla", "path-patch")  # these show the first prompts
    body = json.loads(files["json"].read_text(encoding="utf-8"))
    texts = body["base"] if name == "path-patch" else body["prompts"]
    assert texts == list(HOSTILE)
    with files["csv"].open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert len({len(row) for row in rows}) == 1
    if name in ("grid", "show"):
        column = rows[0].index("token")
        assert {"\r", "\x1b[31m", '"', "<script>alert(1)</script>"} <= {r[column] for r in rows}
    if name == "grid":
        page = files["html"].read_text(encoding="utf-8")
        static = re.sub(r"<script.*?</script>", "", page, flags=re.S)  # the page's own
        assert "<script>alert" not in page and "<script" not in static and "<img" not in static
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "\\x1b[31m" in page
        assert all(c.isprintable() or c == "\n" for c in static)


def test_answers_that_are_escape_sequences_are_shown(capsys, argv_of):
    for name in ("dla", "logit-lens", "grid", "show"):
        for token in NASTY_TOKENS[::2]:
            code, out, err = run(capsys, *argv_of(name), "--answer", token, "--foil", " the")
            assert code == 0 and all(c.isprintable() or c == "\n" for c in out + err)
            assert printable(token)[:11] in out


def test_names_of_files_and_models_are_shown_and_not_run(capsys, tmp_path, model, text, lens):
    odd = tmp_path / "a\x1b[31m\r[bold]\u202e"
    odd.mkdir()
    shutil.copytree(model, odd / "m\x1b[31m")
    shutil.copytree(lens, odd / "lens")
    shutil.copy(text, odd / "t\x1b.txt")
    given = ["--model", odd / "m\x1b[31m"]
    lines = [
        ["ablate", "zero", "0.1", "--text", odd / "t\x1b.txt", "--length", "40", *given],
        ["tuned-lens", "fit", "--text", odd / "t\x1b.txt", "--out", odd / "new", *TINY, *given],
        ["tuned-lens", "show", "--lens", odd / "new", "--prompt", "a", *given],
        ["tuned-lens", "eval", "--lens", odd / "new", "--text", odd / "t\x1b.txt", *given],
        ["tuned-lens", "convert", "--lens", odd / "new", "--to", "tuned-lens"]
        + ["--out", odd / "theirs", *given],
    ]
    lines[1] += ["--steps", "0"]
    for argv in lines:
        code, out, err = run(capsys, *argv)
        assert code == 0, err
        assert all(c.isprintable() or c == "\n" for c in out + err)
        assert "\\x1b" in out and "[bold]" in out + "[bold]" * (argv[0] == "ablate")
    for argv in (
        ["dla", "--prompt", "a", "b\x1b[31m\nc"],
        ["dla", "--prompts", odd / "no\n\x1b"],
        ["stream", "--prompt", "a", "--model", odd / "no\r\x1b"],
        ["ablate", "zero", "0.1\x1b", "--prompt", "a", "--metric", "kl", "--model", model],
    ):
        assert all(c.isprintable() or c == "\n" for c in refused(capsys, *argv))


@pytest.mark.parametrize("name", PROMPTED)
def test_a_very_long_prompt_is_refused_at_once_with_the_context(capsys, argv_of, name):
    start = time.perf_counter()
    said = refused(capsys, *argv_of(name, ["x" * 100_000]))
    assert "100001 tokens, but the context of nasty is 64 tokens" in said and len(said) < 300
    assert time.perf_counter() - start < 20  # 0.1 s; a bound that running the model would break


def test_long_arguments_of_any_kind_are_one_short_line(capsys, argv_of, model):
    long = "x" * 100_000
    for argv in (
        [*argv_of("dla"), "--answer", long],
        ["dla", "--prompt", "a", "--model", long],
        ["dla", "--prompts", long],
        ["dla", "--prompt", "a", "--json", long],
        ["ablate", "zero", long, "--prompt", "a", "--metric", "kl", "--model", model],
        ["ablate", "zero", "0.1", "--text", f"/{long}"],
        ["path-patch", long, "--to", "logits", "--mlps", "freeze", "--using", "zero"],
        ["tuned-lens", "show", "--lens", long, "--prompt", "a"],
        ["tuned-lens", "fit", "--text", "a.txt", "--out", long],
        ["stream", "--prompt", "a", long],
    ):
        assert len(refused(capsys, *argv)) < 1200


@pytest.mark.parametrize("name", PROMPTED)
def test_an_empty_prompt_without_a_first_token_is_refused(capsys, argv_of, name):
    assert "the prompt is empty" in refused(capsys, *argv_of(name, [""]), "--no-bos")


@pytest.mark.parametrize("name", PROMPTED)
def test_arguments_are_utf8_whatever_the_locale(capsys, argv_of, name):
    half = "Fran\udcc3\udca7ois"  # what Python makes of the bytes of a c with cedilla in LC_ALL=C
    if name in ("dla", "grid"):
        spelled = [run(capsys, *argv_of(name, [prompt]))[1] for prompt in (half, "François")]
        assert spelled[0] == spelled[1] != ""
    assert "is not UTF-8 text" in refused(capsys, *argv_of(name, ["a\udcff"]))
    assert "is not UTF-8 text" in refused(capsys, *argv_of(name, ["a\ud800"]))


def test_halves_of_characters_are_refused_by_the_library(model):
    loaded = rp.load(model)
    with pytest.raises(PromptError, match="half a character"):
        rp.capture(loaded, "a\udcff")
    with pytest.raises(PromptError, match="half a character"):
        rp.windows(loaded, "a\ud800 b", length=8)
    with pytest.raises(TokenError, match="half a character"):
        rp.direct_logit_attribution(rp.capture(loaded, "a"), "\udcff")


@pytest.mark.skipif(os.name == "nt", reason="POSIX locales")
def test_C01_an_ascii_locale_takes_arguments_and_file_names(tmp_path):
    folder = tmp_path / "é"
    folder.mkdir()
    (folder / "ü.txt").write_text("François went\n", encoding="utf-8")
    target = folder / "ö.json"
    argv = ["--model", "demo", "--prompts", folder / "ü.txt", "--prompt", "Zoë", "--json", target]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "stream.py"), *map(str, argv)],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()
    body = json.loads(target.read_text(encoding="utf-8"))
    assert body["prompts"] == ["Zoë", "François went"]


@pytest.mark.parametrize("name", ALL)
def test_C01_every_command_prints_on_a_legacy_stream(monkeypatch, argv_of, name):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stream)
    assert call(argv_of(name, ["é → 😀 \u05d0 \x1b"])) == 0
    shown = stream.buffer.getvalue()
    assert b"model" in shown and b"\x1b" not in shown


# Files that are read

READ = {
    "dla --prompts": ["dla", "--prompts", "FILE"],
    "ablate --prompts": ["ablate", "zero", "0.1", "--metric", "kl", "--prompts", "FILE"],
    "ablate --reference": ["ablate", "mean", "0.1", "--metric", "kl", "--over", "batch,pos"]
    + ["--prompt", "a", "--reference", "FILE"],
    "ablate --source": ["ablate", "resample", "0.1", "--metric", "kl"]
    + ["--prompt", "a", "--source", "FILE"],
    "ablate --text": ["ablate", "zero", "0.1", "--text", "FILE"],
    "ablate --text --reference": ["ablate", "mean", "0.1", "--over", "batch,pos"]
    + ["--text", "TEXT", "--length", "40", "--reference", "FILE"],
    "path-patch --pairs": ["path-patch", "0.1", "--to", "logits", "--mlps", "freeze"]
    + ["--using", "resample", "--metric", "kl", "--pairs", "FILE"],
    "logit-lens --prompts": ["logit-lens", "--prompts", "FILE"],
    "logit-lens --lens": ["logit-lens", "--prompt", "a", "--lens", "FILE"],
    "show --prompts": ["tuned-lens", "show", "--lens", "LENS", "--prompts", "FILE"],
    "fit --text": ["tuned-lens", "fit", "--out", "new", "--text", "FILE"],
    "fit --validation": ["tuned-lens", "fit", "--out", "new", "--text", "TEXT"]
    + ["--validation", "FILE"],
    "eval --text": ["tuned-lens", "eval", "--lens", "LENS", "--text", "FILE"],
    "stream --prompts": ["stream", "--prompts", "FILE"],
}


@pytest.fixture
def reads(model, text, lens, tmp_path, monkeypatch):
    """The command of a name that reads this file, in a folder of its own."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def argv(name, path):
        words = {"FILE": str(path), "TEXT": text, "LENS": lens}
        return [words.get(word, word) for word in READ[name]] + ["--model", model]

    yield argv
    assert names_in(here) == []


@pytest.mark.parametrize("name", READ)
def test_what_cannot_be_read_is_named(capsys, tmp_path, monkeypatch, reads, name):
    missing, folder, closed = tmp_path / "missing.txt", tmp_path / "folder", tmp_path / "closed.txt"
    empty, bytes_ = tmp_path / "empty.txt", tmp_path / "bytes.txt"
    folder.mkdir()
    closed.write_text("a b c", encoding="utf-8")
    empty.write_bytes(b"")
    bytes_.write_bytes(b"abc \xff\xfe\x00" * 50)
    for path in (missing, folder, empty, bytes_):
        assert path.name in refused(capsys, *reads(name, path))
    assert "NUL" in refused(capsys, *reads(name, tmp_path / "a\0b.txt"))
    assert "empty name" in refused(capsys, *reads(name, ""))
    assert "file's name" in refused(capsys, *reads(name, tmp_path / "\ud83d.txt"))
    really = io.open

    def open_or_not(file, *arguments, **options):
        if str(file) == str(closed):
            raise PermissionError(13, "Permission denied", str(file))
        return really(file, *arguments, **options)

    monkeypatch.setattr(io, "open", open_or_not)
    monkeypatch.setattr("builtins.open", open_or_not)
    assert "closed.txt" in refused(capsys, *reads(name, closed))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX pipes")
def test_a_text_that_is_a_pipe_is_called_one(capsys, tmp_path, reads):
    os.mkfifo(tmp_path / "pipe")
    for name in ("ablate --text", "fit --text", "eval --text"):
        assert "is a pipe or device" in refused(capsys, *reads(name, tmp_path / "pipe"))


@pytest.mark.parametrize("name", PROMPTED)
def test_a_model_folder_in_pieces_is_named(capsys, tmp_path, argv_of, model, name):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    argv = [str(broken) if word == model else word for word in argv_of(name)]
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "broken" in refused(capsys, *argv)
    (broken / "model.safetensors").unlink()
    assert "broken" in refused(capsys, *argv)
    (broken / "config.json").write_text("{", encoding="utf-8")
    assert "broken" in refused(capsys, *argv)
    (broken / "config.json").unlink()
    (broken / "config.json").mkdir()
    assert "broken" in refused(capsys, *argv)
    argv[argv.index("--model") + 1] = str(broken / "tokenizer.json")
    assert "is a file" in refused(capsys, *argv)


# Files that are written


def outputs(name) -> tuple[str, ...]:
    return {"ioi": ("json", "html"), "grid": ("json", "csv", "html")}.get(name, ("json", "csv"))


def no_space(*_arguments, **_options):
    raise OSError(28, "No space left on device")


class _Full(io.FileIO):
    def write(self, data):
        super().write(bytes(data)[:5])
        no_space()


FULL = {
    "mkstemp": (tempfile, "mkstemp", no_space),
    "write": (os, "fdopen", lambda handle, mode: _Full(handle, mode.replace("b", ""))),
    "fsync": (os, "fsync", no_space),
    "replace": (os, "replace", no_space),
}


@pytest.mark.parametrize("name", [name for name in ALL if name != "ioi"])
def test_a_full_disk_leaves_the_old_file_and_names_it(capsys, tmp_path, monkeypatch, argv_of, name):
    for (owner, attribute, fails), kind in zip(FULL.values(), 2 * outputs(name), strict=False):
        target = tmp_path / f"o.{kind}"
        target.write_text("old", encoding="utf-8")
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, fails)
            said = refused(capsys, *argv_of(name), f"--{kind}", target)
        assert "No space left" in said and f"o.{kind}" in said
        assert target.read_text(encoding="utf-8") == "old"
    assert set(names_in(tmp_path)) <= {"o.json", "o.csv", "o.html"}


@pytest.mark.parametrize("fails", FULL)
def test_a_fit_on_a_full_disk_leaves_nothing_half_written(
    capsys, tmp_path, monkeypatch, model, text, fails
):
    owner, attribute, raises = FULL[fails]
    argv = ["tuned-lens", "fit", "--model", model, "--text", text, "--out", tmp_path / "lens"]
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, raises)
        assert "No space left" in refused(capsys, *argv, *QUICK)
    assert list(tmp_path.rglob("*.*")) == []
    assert run(capsys, *argv, *QUICK)[0] == 0
    rp.TunedLens.load(tmp_path / "lens", rp.load(model))


@pytest.mark.parametrize("name", ALL)
def test_outputs_that_cannot_be_written_are_refused_before_anything_runs(
    capsys, tmp_path, monkeypatch, argv_of, name
):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    closed, kept = tmp_path / "closed", tmp_path / "kept.json"
    closed.mkdir()
    kept.write_text("old", encoding="utf-8")
    denied = {str(closed), str(kept)}
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path) not in denied and access(path, mode)
    )
    for kind in outputs(name):
        said = refused(capsys, *argv_of(name), f"--{kind}", closed / "o")
        assert f"no permission in {closed}" in said
        assert "it is read-only" in refused(capsys, *argv_of(name), f"--{kind}", kept)
        assert "is a folder" in refused(capsys, *argv_of(name), f"--{kind}", tmp_path)
        assert "there is no folder" in refused(
            capsys, *argv_of(name), f"--{kind}", kept / "x" / "o"
        )
    first, second = outputs(name)[:2]
    both = [f"--{first}", closed / ".." / "o", f"--{second}", tmp_path / "o"]
    assert "two outputs" in refused(capsys, *argv_of(name), *both)
    assert kept.read_text(encoding="utf-8") == "old" and names_in(closed) == []


@pytest.mark.parametrize(
    "name", [n for n in READ if n.split()[-1] not in ("--lens",) and "fit" not in n]
)
def test_a_file_that_is_read_is_not_written_over(capsys, tmp_path, reads, name):
    target = tmp_path / "input.txt"
    target.write_text("a b c", encoding="utf-8")
    (tmp_path / "link.txt").symlink_to(target)
    for path in (target, tmp_path / "link.txt", tmp_path / "here" / ".." / "input.txt"):
        for kind in ("json", "png"):
            said = refused(capsys, *reads(name, target), f"--{kind}", path)
            assert f"is the file that {name.split()[-1]} reads" in said
    assert target.read_text(encoding="utf-8") == "a b c"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX pipes")
def test_a_result_goes_into_a_pipe_and_the_pipe_stays(capsys, tmp_path, argv_of):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    receiver = threading.Thread(target=lambda: found.append(pipe.read_text(encoding="utf-8")))
    receiver.start()
    assert run(capsys, *argv_of("dla"), "--json", pipe)[0] == 0
    receiver.join(60)
    assert json.loads(found[0])["prompts"] == [PROMPT] and pipe.is_fifo()
    if os.path.isdir("/dev/fd"):  # what a shell's >(...) gives
        ours, theirs = os.pipe()
        write_bytes(f"/dev/fd/{theirs}", b"text")
        os.close(theirs)
        with open(ours, "rb") as stream:
            assert stream.read() == b"text"


# Streams that cannot be written


@pytest.mark.parametrize("name", ALL)
def test_a_closed_pipe_is_no_error(capsys, monkeypatch, argv_of, name):
    receiver, writer = os.pipe()
    os.close(receiver)
    with open(writer, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert call(argv_of(name)) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ALL)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full")
def test_a_full_stdout_is_one_line(capsys, monkeypatch, argv_of, name):
    for flags in ([], ["--help"]):
        # Closing it, as Python does at exit, must not fail a second time.
        with open("/dev/full", "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert call([*argv_of(name), *flags]) == 2
        err = capsys.readouterr().err
        assert "No space left" in err and err.count("\n") == 1


def test_streams_closed_before_the_start_are_no_crash(capsys, monkeypatch, tmp_path, argv_of):
    target = tmp_path / "o.json"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stderr", None)
        assert call([*argv_of("dla"), "--json", target]) == 0
        sys.stdout.close()
        patch.setattr(sys, "stdout", None)
        assert call(["dla", "--nonsense"]) == 2
        sys.stdout.close()
        sys.stderr.close()
    assert json.loads(target.read_text(encoding="utf-8"))["prompts"] == [PROMPT]


def test_heat_is_left_out_where_a_terminal_has_few_colours(monkeypatch):
    def printed(color_system):
        out = Console(
            file=io.StringIO(), color_system=color_system, force_terminal=True, highlight=False
        )
        print_grid(out, TextGrid("t", ["0"], [("0",), ("1",)], number_cells([[1.0, -1.0]])))
        return out.file.getvalue()

    monkeypatch.setattr(shown_text, "fancy", lambda: True)
    assert "\x1b[" in printed("256") and "\x1b[" in printed("truecolor")
    assert "\x1b[" not in printed("standard")


# Interrupts


# Where Ctrl-C comes: before the call, or after it where a file is in place.
POINTS = {
    "loading": (sys.modules[really_load.__module__], "_build", "before"),
    "running": (torch.nn.Module, "__call__", "before"),
    "writing": (os, "fsync", "before"),
    "renaming": (os, "replace", "after"),
    "printing": (Console, "print", "after"),
}


class Interrupter:
    """Counts the calls of each point, and sends SIGINT at one of them."""

    def __init__(self, monkeypatch):
        self.counts = dict.fromkeys(POINTS, 0)
        self.at = ("", 0)
        self.monkeypatch = monkeypatch
        for point, (owner, name, when) in POINTS.items():
            monkeypatch.setattr(owner, name, self._wrapped(point, getattr(owner, name), when))

    def _wrapped(self, point, function, when):
        def call_or_stop(*arguments, **options):
            self.counts[point] += 1
            stop = self.at == (point, self.counts[point])
            if stop and when == "before":
                signal.raise_signal(signal.SIGINT)
            found = function(*arguments, **options)
            if stop:
                signal.raise_signal(signal.SIGINT)
            return found

        return call_or_stop

    def count(self, capsys, argv):
        """How often each point is passed by a command that succeeds, with a model known before."""
        self.counts, self.at = dict.fromkeys(POINTS, 0), ("", 0)
        code, _, err = run(capsys, *argv)
        assert code == 0, err
        return {**self.counts, "loading": 1}

    def stop(self, capsys, argv, point, n) -> str:
        """What a command says that is interrupted at the n-th pass of a point."""
        self.counts, self.at = dict.fromkeys(POINTS, 0), (point, n)
        once = really_load if point == "loading" else load_once
        self.monkeypatch.setattr(models, "load", once)
        code, out, err = run(capsys, *argv)
        assert code == 130, (point, n, code, out, err)
        assert re.fullmatch(r"[a-z. -]+: error: interrupted(: [^\n]+)?\n", err), err
        return err


@pytest.mark.parametrize("name", ALL)
def test_ctrl_c_is_one_line_and_leaves_whole_files_or_none(
    capsys, tmp_path, monkeypatch, argv_of, name
):
    files = [tmp_path / f"o.{kind}" for kind in outputs(name)]
    argv = argv_of(name)
    for path in files:
        argv += [f"--{path.suffix[1:]}", str(path)]
    interrupter = Interrupter(monkeypatch)
    assert run(capsys, *argv)[0] == 0
    counts = interrupter.count(capsys, argv)
    assert all(counts.values())
    whole = {path.name: path.read_bytes() for path in files}
    for point, count in counts.items():
        for n in {count // 2, count} if point in ("running", "renaming") else {count}:
            for path in files:
                path.unlink(missing_ok=True)
            interrupter.stop(capsys, argv, point, n)
            left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
            assert left.items() <= whole.items()
    interrupter.at = ("", 0)
    assert run(capsys, *argv)[0] == 0  # on the same model: nothing is left in it
    assert {path.name: path.read_bytes() for path in files} == whole


def test_ctrl_c_in_a_fit_can_be_gone_on_from(capsys, tmp_path, monkeypatch, model, text):
    base = ["tuned-lens", "fit", "--model", model, "--text", text, *QUICK]
    loaded = rp.load(model)
    interrupter = Interrupter(monkeypatch)
    assert run(capsys, *base, "--out", tmp_path / "first")[0] == 0
    counts = interrupter.count(capsys, [*base, "--out", tmp_path / "whole"])
    expected = rp.TunedLens.load(tmp_path / "whole", loaded)
    for point, count in counts.items():
        for n in {count // 2, count} if point in ("running", "renaming") else {count}:
            out = tmp_path / f"{point}{n}"
            said = interrupter.stop(capsys, [*base, "--out", out], point, n)
            interrupter.at = ("", 0)
            left = names_in(out) if out.exists() else []
            assert not any(name.startswith(".") for name in left)
            if resume.STATE in left:
                assert "holds the fit as of step" in said
                assert run(capsys, *base, "--out", out, "--resume")[0] == 0
            elif not left:
                assert "nothing was written" in said or point == "loading"
                assert run(capsys, *base, "--out", out)[0] == 0
            else:
                assert "holds the lens, finished" in said
            found = rp.TunedLens.load(out, loaded)
            assert torch.equal(found.weight, expected.weight)
            assert torch.equal(found.bias, expected.bias)


# Weights that are no numbers


def with_weight(model, folder, name, value):
    """A copy of a model with one entry of one parameter replaced, the last."""
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights[name].view(-1)[-1] = value
    path.unlink()
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("name", "shown", "value", "backend"),
    [
        ("transformer.wpe.weight", "wpe", float("nan"), "auto"),  # of a position not reached here
        ("transformer.h.1.attn.c_attn.weight", "h.1.attn", float("nan"), "bridge"),
        ("transformer.ln_f.weight", "ln_f", float("inf"), "auto"),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name(
    capsys, tmp_path, argv_of, model, text, lens, name, shown, value, backend
):
    broken = with_weight(model, tmp_path / "nasty", name, value)
    out = tmp_path / "out"
    out.mkdir()
    lines = [argv_of(command) for command in ALL]
    lines.append(
        ["tuned-lens", "fit", "--model", model, "--text", text, "--out", out / "new", *TINY]
    )
    for argv in lines:
        argv = [broken if word in (model, "demo") else word for word in argv]
        said = refused(capsys, *argv, "--json", out / "o.json", "--backend", backend)
        assert "weights that are NaN or infinite" in said and shown in said
    assert names_in(out) == []


def test_weights_that_became_nan_are_refused_by_the_library(model):
    loaded = really_load(model)
    captured = rp.capture(loaded, PROMPT)
    assert rp.ablate(captured, "0.1", rp.Zero(), metric=rp.kl()).values.isfinite().all()
    with torch.no_grad():
        next(p for n, p in loaded.named_parameters() if n.endswith("W_E"))[-1, -1] = float("nan")
    for analysis in (
        lambda: rp.ablate(rp.capture(loaded, PROMPT), "0.1", rp.Zero(), metric=rp.kl()),
        lambda: rp.direct_logit_attribution(rp.capture(loaded, PROMPT), " the"),
        lambda: rp.logit_lens(rp.capture(loaded, PROMPT)),
        lambda: rp.stream_report(rp.capture(loaded, PROMPT)),
    ):
        with pytest.raises(NotFiniteError, match="NaN or infinite, in .*W_E"):
            analysis()
