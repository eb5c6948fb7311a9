"""`resid-patching dla` as its users meet it: output, files, errors, encodings."""

import contextlib
import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import resid_patching as rp
from resid_patching.cli import main

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPT = "When Mary and John went to the store, John gave a drink to"
BASE = ["dla", "--model", "demo", "--prompt", PROMPT]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def in_process(*argv: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "dla.py"), *argv],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=300,
        check=False,
    )


def one_error_line(err: str) -> str:
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


@pytest.fixture(scope="module")
def shown() -> str:
    """What the command prints for the demo's own prompt."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*BASE, "--answer", " Mary", "--foil", " John"]) == 0
    return out.getvalue()


def test_the_output_names_the_model_its_state_the_tokens_and_the_sum(shown):
    assert "model    demo (" in shown and "raw, float32" in shown
    assert '" Mary"' in shown and '14 " to"' in shown
    assert "unembed.bias" in shown and "ln_final.bias" in shown
    assert "largest gap" in shown and "the model's own difference" in shown


def test_the_shown_rows_and_the_rest_add_up_to_the_shown_sum(shown):
    rows = [line.split("|") for line in shown.splitlines() if line.count("|") >= 2]
    total = sum(float(row[1]) for row in rows if row[1].strip()[:1] in "+-" and row[1].strip())
    said = next(line for line in shown.splitlines() if line.startswith("sum of all"))
    assert total == pytest.approx(float(said.split()[-2]), abs=2e-3)


def test_redirected_output_is_plain_ascii(shown):
    assert shown.isascii() and "\x1b" not in shown


def test_the_top_prediction_is_the_default_answer(capsys):
    code, out, _ = run(capsys, *BASE)
    assert code == 0 and '" Mary" against the vocabulary mean' in out


@pytest.mark.parametrize("by", ["component", "head", "neuron"])
def test_every_grain_is_printed_and_closes_the_gap(capsys, by):
    code, out, _ = run(capsys, *BASE, "--foil", " John", "--by", by)
    assert code == 0
    gap = float(out.split("largest gap")[1].split()[0])
    assert gap < 1e-4


def test_json_holds_the_result_and_csv_its_long_form(capsys, tmp_path):
    target, table = tmp_path / "o.json", tmp_path / "o.csv"
    code, _, _ = run(capsys, *BASE, "--foil", " John", "--json", str(target), "--csv", str(table))
    assert code == 0
    text = target.read_text(encoding="utf-8")
    found = rp.Attribution.from_json(text)
    assert found.foil_texts == (" John",) and float(found.gap.max()) < 1e-4
    body = json.loads(text)
    assert body["stand_in"] is None and body["prompts"] == [PROMPT]
    assert body["predictions"][0][0]["token"] == " Mary"
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(float(row["value"]) for row in rows) == pytest.approx(float(found.total), abs=1e-4)


def test_several_prompts_are_summarised_by_a_mean_that_says_so(capsys, tmp_path):
    file = tmp_path / "prompts.tsv"
    other = PROMPT.replace("John gave", "Mary gave")
    file.write_text(f"{PROMPT}\t Mary\t John\n{other}\t John\t Mary\n", encoding="utf-8")
    code, out, _ = run(capsys, "dla", "--model", "demo", "--prompts", str(file))
    assert code == 0 and "mean over 2 prompts; se: standard error" in out


@pytest.mark.once
@pytest.mark.full
def test_without_a_model_the_shipped_one_stands_in_and_says_so(tmp_path):
    target = tmp_path / "o.json"
    done = in_process(
        "--prompt", PROMPT, "--json", str(target), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("note     no --model was given and gpt2 is neither")
    assert "demo model" in json.loads(target.read_text(encoding="utf-8"))["stand_in"]


def test_help_answers_at_once_and_without_torch():
    code = "import sys; sys.argv=['dla','--help']; from resid_patching.cli import main\n"
    code += "main(['dla','--help'])\nassert 'torch' not in sys.modules\nprint('no torch')"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    assert done.returncode == 0 and "no torch" in done.stdout and "--prompt" in done.stdout
    assert seconds < 5  # a bound that a torch import on a busy machine would break


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--promt", "x"], "unrecognized arguments"),
        (["--prompt", "x", "--by", "layer"], "invalid choice"),
        (["--prompt", "x", "--top", "0"], "1 or more"),
        ([], "no prompt was given"),
        (["--prompts", "no-such-file.txt"], "no-such-file.txt"),
        (["--prompts", "."], ".: Is a directory"),
        (["--prompt", "x", "--model", "./no-such-model"], "no model folder"),
        (["--prompt", "x", "--model", "no-such/model"], "neither a folder nor in the local cache"),
        (["--prompt", PROMPT, "--model", "demo", "--position", "99"], "position 99"),
        (["--prompt", PROMPT, "--model", "demo", "--answer", " Mary and"], "not one"),
        (["--prompt", PROMPT, "--model", "demo", "--answer", " a", "--answer", " b"], "2 times"),
        (["--prompt", "", "--model", "demo", "--no-bos"], "the prompt is empty"),
        (["--prompt", "x", "--json", "no/such/folder/o.json"], "there is no folder"),
        (["--prompt", "x", "--json", "."], "is a folder"),
        (["--prompt", "x", "--json", "a.json", "--csv", "a.json"], "two outputs"),
        (["--prompt", "x", "--device", "warp"], "device 'warp'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, argv, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "dla", *argv)
    assert code == 2 and out == ""
    assert said in one_error_line(err)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_the_old_file(capsys, tmp_path, monkeypatch):
    target = tmp_path / "o.json"
    target.write_text("old", encoding="utf-8")

    def fail(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    code, _, err = run(capsys, *BASE, "--json", str(target))
    assert code == 2 and "No space left" in one_error_line(err)
    assert target.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


@pytest.mark.once
@pytest.mark.full
def test_C01_output_and_help_survive_a_cp1252_stdout():
    done = in_process(*BASE[1:], "--prompt", "é → 😀", PYTHONIOENCODING="cp1252")
    assert done.returncode == 0, done.stderr.decode("cp1252")
    assert b"Traceback" not in done.stderr
    helped = in_process("--help", PYTHONIOENCODING="cp1252")
    assert helped.returncode == 0


@pytest.mark.once
@pytest.mark.full
def test_C03_prompt_files_are_utf8_whatever_the_locale(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("François went to the store\n".encode())
    done = in_process("--model", "demo", "--prompts", str(file), LC_ALL="C", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr.decode()
    file.write_bytes("François".encode("cp1252"))
    code, _, err = run(capsys, "dla", "--model", "demo", "--prompts", str(file))
    assert code == 2 and "is not UTF-8 text (byte 4)" in one_error_line(err)


@pytest.mark.once
@pytest.mark.full
def test_C05_an_emoji_prompt_degrades_on_a_console_that_cannot_show_it():
    done = in_process("--model", "demo", "--prompt", "Mary 😀 went", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii()


def test_K17_tokens_that_are_no_whole_character_show_their_bytes(capsys):
    code, out, _ = run(capsys, "dla", "--model", "demo", "--prompt", "Mary 😀")
    assert code == 0 and "\\xf0" in out


def test_prompts_print_literally_whatever_they_hold(capsys):
    prompt = "[bold]Mary[/bold] \x1b[31mred\x1b[0m :smile: {x}"
    code, out, _ = run(capsys, "dla", "--model", "demo", "--prompt", prompt)
    assert code == 0 and "\x1b" not in out
    tokens = out.split("next ")[0]
    for piece in ("[", "bold", "smile", "\\x1b", "{"):
        assert piece in tokens or piece[:1] in tokens


def test_a_missing_leading_space_is_warned_about_with_both_ids(capsys):
    code, _, err = run(capsys, *BASE, "--answer", "Mary", "--foil", " John")
    assert code == 0 and "warning: the answer 'Mary' is token" in err and "' Mary' is token" in err


@pytest.mark.once
@pytest.mark.full
def test_a_closed_pipe_is_no_error():
    command = (
        f"{sys.executable} {REPOSITORY / 'scripts' / 'dla.py'} --model demo --prompt x | head -1"
    )
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == ""


def test_the_demo_model_holds_no_more_than_its_own_weights():
    weights = load_file(str(REPOSITORY / "resid_patching" / "demo" / "model.safetensors"))
    assert sum(t.numel() * t.element_size() for t in weights.values()) < 6_000_000
