"""`resid-patching stream` as its users meet it: output, files, errors."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zoo

import resid_patching as rp
from resid_patching.cli import main

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPT = "When Mary and John went"


@pytest.fixture(scope="module")
def model() -> str:
    return str(zoo.text_folder())


def run(capsys, *argv):
    code = main(["stream", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def rows_of(out, title):
    """The cells of the table under a title, by the text of its first column."""
    lines = out.split(title)[1].splitlines()
    table = {}
    for line in lines[1:]:
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 2:
            table[cells[0]] = cells[1:]
        elif table and "+-" not in line:
            break
    return table


def test_the_table_holds_the_reports_means(capsys, model):
    code, out, err = run(capsys, "--model", model, "--prompt", PROMPT)
    assert (code, err) == (0, "")
    frame = rp.stream_report(rp.capture(rp.load(model), PROMPT)).table()
    table = rows_of(out, "running total, clean")
    for row in frame.to_dict("records"):
        norm, after, share, cosine, *_ = table[row["write"]]
        assert float(norm) == pytest.approx(row["mean_write_norm"], abs=1e-3)
        assert float(after) == pytest.approx(row["mean_stream_norm"], abs=1e-3)
        assert float(share.rstrip("%")) == pytest.approx(100 * row["mean_share"], abs=0.1)
        assert float(cosine) == pytest.approx(row["mean_cosine"], abs=1e-4)
    assert f"mean over {frame['n'][0]} positions" in out
    gap = float(out.split("largest |start + all writes - last state|")[1].split(",")[0])
    assert gap < 1e-4


@pytest.mark.parametrize(
    ("flags", "how", "text"),
    [
        (["--write-scale", "0.5"], rp.WriteScale(0.5), "intervention write scale 0.5"),
        (["--write-scale", "-1"], rp.WriteScale(-1), "intervention write scale -1"),
        (["--overwrite"], rp.Overwrite(), "intervention overwrite"),
    ],
)
def test_an_intervention_stands_beside_the_clean_run(capsys, model, flags, how, text):
    code, out, _ = run(capsys, "--model", model, "--prompt", PROMPT, *flags)
    assert code == 0 and text in out and "running total, clean" in out
    captured = rp.capture(rp.load(model), PROMPT)
    clean, changed = rp.stream_report(captured), rp.stream_report(captured, how)
    lines = [line for line in out.splitlines() if line.startswith("mean survival")]
    means = [float(line.split()[-1]) for line in lines]
    expected = [float(changed.survival.mean()), float(clean.survival.mean())]
    assert means == pytest.approx(expected, abs=1e-4)
    shown = next(line for line in out.splitlines() if '| "When"' in line)
    cells = [float(cell) for cell in shown.split("|")[3:5]]
    expected = [float(clean.survival[0, 1]), float(changed.survival[0, 1])]
    assert cells == pytest.approx(expected, abs=1e-4)


def test_json_and_csv_hold_the_clean_and_the_changed_report(capsys, model, tmp_path):
    target, table = tmp_path / "o.json", tmp_path / "o.csv"
    files = ["--json", str(target), "--csv", str(table)]
    code, *_ = run(capsys, "--model", model, "--prompt", PROMPT, "--overwrite", *files)
    assert code == 0
    text = target.read_text(encoding="utf-8")
    changed = rp.StreamReport.from_json(text)
    body = json.loads(text)
    clean = rp.StreamReport.from_json(json.dumps(body["clean"]))
    assert clean.how is None and "overwrite" in changed.how
    assert body["prompts"] == [PROMPT] and body["command"] == "stream"
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == clean.values.numel() + changed.values.numel()
    assert {row["intervention"] for row in rows} == {"none", changed.how}


def test_several_prompts_and_one_position(capsys, model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPT}\nthe dog\n", encoding="utf-8")
    code, out, _ = run(capsys, "--model", model, "--prompts", str(file), "--positions", "-1")
    assert code == 0 and "mean over 2 positions" in out and re.search(r"^1 +\| +-1 \|", out, re.M)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no prompt was given"),
        (["--prompt", "x", "--write-scale", "2", "--overwrite"], "not allowed with"),
        (["--prompt", "x", "--write-scale", "nan"], "not a finite number"),
        (["--prompt", "x", "--write-scale", "two"], "two is not a finite number"),
        (["--prompt", "x", "--positions", "99", "--model", "MODEL"], "position 99"),
        (["--prompts", "no-such-file"], "no-such-file"),
        (["--prompts", "ANSWERS"], "stream reads no answers"),
        (["--prompt", "x", "--json", "no/folder/o.json"], "there is no folder"),
        (["--prompt", "x", "--model", "./no-model"], "no model folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, model, argv, said):
    answers = tmp_path / "answers.tsv"
    answers.write_text("a\t b\n", encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    argv = [{"MODEL": model, "ANSWERS": str(answers)}.get(word, word) for word in argv]
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert said in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert list(here.iterdir()) == []


@pytest.mark.once
@pytest.mark.full
def test_the_script_is_the_command(model):
    script = str(REPOSITORY / "scripts" / "stream.py")
    command = [sys.executable, script, "--model", model, "--prompt", PROMPT]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"mean survival" in done.stdout and done.stdout.isascii() and done.stderr == b""
