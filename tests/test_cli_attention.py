"""`resid-patching attention` as its users meet it: output, files, errors."""

import csv
import json

import pytest
import zoo

import resid_patching as rp
from resid_patching.cli import main

PROMPTS = ["When Mary and John went", "The dog"]


@pytest.fixture(scope="module")
def model() -> str:
    return str(zoo.text_folder())


def run(capsys, *argv):
    code = main(["attention", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table_and_the_files_hold_the_patterns(model, capsys, tmp_path):
    given = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    files = {kind: str(tmp_path / f"a.{kind}") for kind in ("json", "csv", "html")}
    flags = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    code, out, err = run(capsys, "--heads", "0.1", "2.3", *given, "--model", model, *flags)
    assert (code, err) == (0, "")
    patterns = rp.attention_patterns(rp.capture(rp.load(model), PROMPTS), ["0.1", "2.3"])
    looks = patterns.looks(3)
    assert len(looks) == 12
    for row in looks.to_dict("records"):
        assert f"{row['weight']:.3f}" in out
    with open(files["json"], encoding="utf-8") as file:
        text = file.read()
    assert rp.AttentionPatterns.from_json(text).to_json() == patterns.to_json()
    assert json.loads(text)["prompts"] == PROMPTS
    with open(files["csv"], encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(patterns.to_frame())
    assert [float(row["value"]) for row in rows] == pytest.approx(patterns.to_frame()["value"])
    with open(files["html"], encoding="utf-8") as file:
        page = file.read()
    assert page.count('<div class="picture"') == len(PROMPTS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--heads", "9.0"], "9.0.pattern does not exist"),
        (["--heads", "mlp.1"], "mlp.1 is not a head"),
        (["--heads", "0.1", "--query", "99"], "query 99 does not exist"),
    ],
)
def test_bad_input_gets_one_line_and_writes_nothing(argv, message, model, capsys, tmp_path):
    path = tmp_path / "a.json"
    rest = ["--prompt", PROMPTS[0], "--model", model, "--json", str(path)]
    code, out, err = run(capsys, *argv, *rest)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert not path.exists()
