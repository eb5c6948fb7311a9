"""`resid-patching path-patch` as its users meet it: prompts, direction, tables, files, errors."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.cli import main
from resid_patching.errors import SmallDenominatorWarning
from resid_patching.prompt_sets import indirect_object_prompts
from resid_patching.show import text as shown_text
from resid_patching.show.report import number_cells

REPOSITORY = Path(__file__).resolve().parent.parent
BASE = ["When Mary and John went", "the dog saw the cat and"]
SOURCE = ["When Tom and Anna went", "the cat saw the dog and"]
SCORED = ("--answer", " the", "--foil", " a")
PATH = ("--mlps", "recompute", "--using", "resample")
DRAWN = ("--indirect-object", "6", "--seed", "0", "--corrupt", "names", "--model", "demo")


@pytest.fixture(scope="module")
def model() -> str:
    return str(zoo.text_folder())


@pytest.fixture(scope="module")
def pair(model):
    """Base and source texts that are equally long for the small tokenizer."""
    loaded = rp.load(model)
    kept = [
        (base, source)
        for base, source in zip(BASE, SOURCE, strict=True)
        if rp.capture(loaded, base).prompts.lengths == rp.capture(loaded, source).prompts.lengths
    ]
    assert kept, "no pair of the corpus has one length"
    return [list(texts) for texts in zip(*kept, strict=True)]


def both(flag, values):
    return [word for value in values for word in (flag, value)]


def given(pair, model):
    return [*both("--base", pair[0]), *both("--source", pair[1]), "--model", model, *SCORED]


def run(capsys, *argv):
    code = main(["path-patch", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def found_by(capsys, tmp_path, *argv):
    """What a command that must succeed wrote as JSON, as an effect and as a dict, and printed."""
    target = tmp_path / "effect.json"
    code, out, err = run(capsys, *argv, "--json", target)
    assert code == 0, err
    text = target.read_text(encoding="utf-8")
    return rp.Effect.from_json(text), json.loads(text), out


def assert_same(found, expected):
    for name in ("values", "baseline", "patched", "direct"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), equal_nan=True)
    assert found.axes == expected.axes and found.provenance == expected.provenance


def rows_of(out, title):
    """A table by its first column's title: the cells of each row by their column."""
    lines = re.split(rf"\n(?={title} +\|)", out)[1].splitlines()
    header = [cell.strip() for cell in lines[0].split("|")]
    table = {}
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 3:
            break
        table[cells[0]] = dict(zip(header[1:], cells[1:], strict=False))
    return table


def paths_of(out):
    """The rows of the table of paths: total by sender and receiver."""
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines()]
    return {(row[0], row[1]): row[2] for row in rows if len(row) > 5 and row[0] != "sender"}


# The numbers are the library's


@pytest.mark.parametrize("mlps", ["freeze", "recompute"])
@pytest.mark.parametrize("receivers", [["logits"], ["2.0.q", "mlp.2.in"], ["2.0.k", "resid_mid.2"]])
@pytest.mark.parametrize("together", [False, True])
def test_paths_are_those_of_the_library(capsys, tmp_path, model, pair, mlps, receivers, together):
    found, body, _ = found_by(
        *(capsys, tmp_path, "attn.1", "0.3", "mlp.0", *both("--to", receivers), "--mlps", mlps),
        *("--using", "resample", "--positions", "-1", *["--together"] * together),
        *given(pair, model),
    )
    loaded = rp.load(model)
    to = receivers if together or len(receivers) == 1 else rp.receivers(*receivers)
    expected = rp.ablate(
        rp.capture(loaded, pair[0]),
        ["attn.1", "0.3", "mlp.0"],
        rp.Path(to=to, using=rp.Resample(rp.capture(loaded, pair[1])), mlps=mlps),
        metric=rp.logit_diff(" the", " a"),
        positions=-1,
    )
    assert_same(found, expected)
    assert body["mlps"] == mlps and body["using"] == "resample" and body["sent_from"] == "-1"


@pytest.mark.parametrize("using", ["zero", "mean"])
def test_zero_and_mean_are_those_of_the_library(capsys, tmp_path, model, pair, using):
    flags = [*both("--base", pair[0]), "--model", model, *SCORED, "--mlps", "freeze"]
    flags += ["--using", using]
    loaded = rp.load(model)
    kind = rp.Zero()
    if using == "mean":
        reference = [*SOURCE, "a cat", *pair[1]]  # of any number and lengths
        flags += [*both("--source", reference), "--over", "batch,pos"]
        kind = rp.Mean(rp.capture(loaded, reference), over=("batch", "pos"))
    found, body, out = found_by(capsys, tmp_path, "1.1", "embed", "--to", "2.1.v", *flags)
    expected = rp.ablate(
        rp.capture(loaded, pair[0]),
        ["1.1", "embed"],
        rp.Path(to="2.1.v", using=kind, mlps="freeze"),
        metric=rp.logit_diff(" the", " a"),
    )
    assert_same(found, expected)
    assert "differs" not in out and "recovery" not in out and "Direction" not in out
    assert body["differences"] is None and body["recovery"] is None
    assert (body["source"] is None) == (using == "zero")


def test_senders_taken_together_are_one_row(capsys, tmp_path, model, pair):
    flags = ["0.1", "1.2", "--joint", "--to", "logits", *PATH, *given(pair, model)]
    found, _, out = found_by(capsys, tmp_path, *flags)
    assert found.targets == ("0.1 + 1.2",) and found.joint
    assert "(senders together)" in " ".join(out.split()) and list(rows_of(out, "sender")) == [
        "0.1 + 1.2"
    ]


@pytest.mark.parametrize("which", ["q", "k", "v", "mlp"])
def test_receivers_of_one_kind_are_swept(capsys, tmp_path, model, pair, which):
    flags = ["--sweep", "layers", "--to", "logits", "--to-sweep", which, *PATH, "--top", "50"]
    found, _, out = found_by(capsys, tmp_path, *flags, *given(pair, model))
    swept = tuple(map(str, rp.inputs(rp.load(model), which)))
    assert found.receivers == ("logits", *swept)
    n_paths = int((~found.values[..., 0].isnan()).sum())
    assert len(paths_of(out)) == n_paths


@pytest.mark.full
@pytest.mark.parametrize("name", ["IO", "S1", "S1+1", "S2", "END", None])
def test_indirect_object_prompts_name_their_positions(capsys, tmp_path, name):
    demo = rp.load("demo")
    at = [] if name is None else ["--positions", name]
    flags = ["1.1", "0.1", "--to", "logits", *PATH, *DRAWN, *at]
    found, body, out = found_by(capsys, tmp_path, *flags)
    pairs = indirect_object_prompts(demo, 6, seed=0, corrupt="names")
    expected = rp.ablate(
        rp.capture(demo, pairs.base),
        ["1.1", "0.1"],
        rp.Path(to="logits", using=rp.Resample(rp.capture(demo, pairs.source)), mlps="recompute"),
        metric=rp.logit_diff(pairs.answers, pairs.foils),
        positions=None if name is None else list(pairs.positions[name]),
    )
    torch.testing.assert_close(found.values, expected.values)
    assert f"at {name or 'all positions'}" in out
    assert (body["seed"], body["corrupt"], body["answers"]) == (0, "names", list(pairs.answers))
    assert body["named_positions"] == {key: list(v) for key, v in pairs.positions.items()}


def test_linearised_is_a_column_of_its_own(capsys, tmp_path, model, pair):
    table = tmp_path / "o.csv"
    flags = ["1.1", "0.2", "--to", "logits", *PATH, "--linearised", *given(pair, model)]
    found, body, out = found_by(capsys, tmp_path, *flags, "--csv", table)
    loaded = rp.load(model)
    linearised = rp.linearised_paths(
        rp.capture(loaded, pair[0]),
        ["1.1", "0.2"],
        rp.Path(to="logits", using=rp.Resample(rp.capture(loaded, pair[1])), mlps="recompute"),
        metric=rp.logit_diff(" the", " a"),
    ).values
    torch.testing.assert_close(torch.tensor(body["linearised"]), linearised)
    shown = {name: float(cells["linearised"]) for name, cells in rows_of(out, "sender").items()}
    assert shown["1.1"] == pytest.approx(float(linearised[0].mean()), abs=1e-4)
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["target"] for row in rows[:: len(pair[0])]] == ["1.1", "0.2"]
    assert [float(row["value"]) for row in rows] == pytest.approx(found.values.flatten().tolist())
    assert [float(row["linearised"]) for row in rows] == pytest.approx(
        linearised.flatten().tolist()
    )


# What is printed


def test_prompts_direction_and_baselines_come_before_the_numbers(capsys, tmp_path):
    flags = ["--sweep", "heads", "--to", "logits", *PATH, *DRAWN, "--positions", "END"]
    found, body, out = found_by(capsys, tmp_path, *flags)
    order = ["model ", "pairs ", "base ", "differs ", "change ", "mlps ", "baseline ", "sender "]
    places = [out.index(f"\n{word}" if number else word) for number, word in enumerate(order)]
    assert places == sorted(places)
    position, base, source = body["differences"][0][0]
    assert f'differs  pair 0:  {position} "{base}" -> "{source}"' in out
    assert "base runs;" in out and "at its value in source" in out
    assert "Direction: source into base" in out and "Sign: negative:" in out
    assert "recompute: MLPs between sender and receiver answer" in out
    base_mean, source_mean = float(found.baseline.mean()), sum(body["source_metric"]) / 6
    assert f"{base_mean:+.4f} logits" in out
    assert f"source - base {source_mean - base_mean:+.4f}" in out
    total = {name: float(found.sel(target=name).mean()) for name in found.targets}
    shown = rows_of(out, "sender")
    assert list(shown) == sorted(total, key=lambda name: -abs(total[name]))[:15]
    for number, name in enumerate(found.targets):
        share = total[name] / (source_mean - base_mean)
        assert body["recovery"][number] == pytest.approx(share)
        if name in shown:
            assert float(shown[name]["recovery"].rstrip("%")) == pytest.approx(
                100 * share, abs=0.06
            )


def test_a_sweep_of_heads_is_a_map_that_marks_what_cannot_be(capsys, tmp_path):
    flags = ["--sweep", "heads", "--to", "2.0.q", *PATH, *DRAWN, "--positions", "END"]
    found, _, out = found_by(capsys, tmp_path, *flags)
    assert "layer by head (. no path: it writes too late)" in out
    lines = out.split("layer by head")[1].splitlines()[2:6]
    for layer, line in enumerate(lines):
        cells = line.split()
        assert cells[0] == str(layer)
        if layer >= 2:
            assert cells[1:] == ["."] * 4
        else:
            means = [float(found.sel(target=f"{layer}.{head}").mean()) for head in range(4)]
            assert [float(cell) for cell in cells[1:]] == pytest.approx(means, abs=1e-3)
    assert "8 of 16 senders have no path to the receiver" in out


def test_alternatives_are_a_table_of_senders_by_receivers(capsys, tmp_path):
    flags = ["0.1", "1.1", "mlp.0", "--to", "1.0.k", "--to", "3.2.q", *PATH, *DRAWN]
    found, _, out = found_by(capsys, tmp_path, *flags)
    lines = out.split("sender by receiver")[1].splitlines()[1:5]
    assert lines[0].split() == ["1.0.k", "3.2.q"]
    for line, sender in zip(lines[1:], found.targets, strict=True):
        name, *cells = line.split()
        assert name == sender
        for cell, receiver in zip(cells, found.receivers, strict=True):
            value = float(found.sel(target=sender, receiver=receiver).mean())
            if sender == "1.1" and receiver == "1.0.k":
                assert cell == "." and value != value
            else:
                assert float(cell) == pytest.approx(value, abs=1e-3)
    paths = paths_of(out)
    assert ("0.1", "3.2.q") in paths and ("1.1", "1.0.k") not in paths


def test_a_sender_without_a_path_is_no_zero(capsys, tmp_path, model, pair):
    flags = ["2.1", "--to", "1.0.q", *PATH, *given(pair, model)]
    found, body, out = found_by(capsys, tmp_path, *flags)
    assert bool(found.values.isnan().all()) and body["recovery"] == [None]
    assert rows_of(out, "sender")["2.1"]["total"] == "n/a"
    flags = ["2.1", *both("--to", ["1.0.q", "0.0.q"]), *PATH, *given(pair, model)]
    code, out, _ = run(capsys, *flags)
    assert code == 0 and "there is no path" in out


def test_cells_are_coloured_by_sign_and_size():
    assert shown_text.heat(1.0) == "white on rgb(33,102,172)"
    assert shown_text.heat(-1.0) == "white on rgb(178,24,43)"
    assert shown_text.heat(0.01) == "black on rgb(245,246,246)"
    assert shown_text.heat(float("nan")) == shown_text.heat(0.0) == ""


def test_cells_are_shaded_beside_the_largest_and_not_where_all_read_as_0():
    ((first, second, absent),) = number_cells([[2.0, -1.0, float("nan")]])
    assert (first.shade, second.shade, absent) == (1.0, -0.5, None)
    assert number_cells([[1e-6]])[0][0].shade == 0.0


@pytest.mark.parametrize("metric", ["kl", "loss", "top1-change", "logit", "prob"])
def test_answers_that_come_with_the_prompts_are_read_where_needed(capsys, tmp_path, metric):
    flags = ["0.1", "--to", "logits", *PATH, *DRAWN, "--metric", metric]
    found, body, out = found_by(capsys, tmp_path, *flags)
    assert (body["recovery"] is not None) == (metric in ("logit", "prob")) == ("recovery" in out)
    assert bool((found.values != 0).any()) or metric == "top1-change"


# Field cases


def test_P07_the_prompts_are_the_tokens_of_capture(capsys, tmp_path, model, pair):
    for prepend_bos, flag in ((None, []), (False, ["--no-bos"])):
        flags = ["0.1", "--to", "logits", *PATH, *given(pair, model), *flag]
        found, _, _ = found_by(capsys, tmp_path, *flags)
        captured = rp.capture(rp.load(model), pair[0], prepend_bos=prepend_bos)
        assert found.provenance.tokens == captured.prompts.hash
        assert found.provenance.bos == (prepend_bos is None)


def test_P09_unequal_lengths_are_named_before_the_model_runs(capsys, model):
    flags = ["--base", "the dog saw the cat", "--source", "the dog saw", "--model", model]
    code, out, err = run(capsys, "0.1", "--to", "logits", *PATH, *flags, *SCORED)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert "pair 0: the base has 7 tokens and the source 5" in err


def test_P12_a_small_gap_is_warned_of_and_not_divided_by(capsys, tmp_path, model):
    text = "3 + 5 ="
    flags = ["attn.1", "--to", "logits", *PATH, "--base", text, "--source", text]
    target = tmp_path / "o.json"
    code, out, err = run(capsys, *flags, "--model", model, *SCORED, "--json", target)
    assert code == 0 and err.startswith("warning: source and base differ by +0")
    assert rows_of(out, "sender")["attn.1"]["total"] == "+0.0000"
    assert "%" not in out and "recovery is not shown" in out
    assert json.loads(target.read_text())["recovery"] == [None]


def test_P12_the_warning_is_the_librarys(model):
    loaded = rp.load(model)
    base, source = rp.capture(loaded, "3 + 5 ="), rp.capture(loaded, "3 + 5 =")
    path = rp.Path(to="logits", using=rp.Resample(source), mlps="freeze")
    metric = rp.logit_diff(" the", " a")
    effect = rp.ablate(base, "attn.1", path, metric=metric)
    with pytest.warns(SmallDenominatorWarning):
        effect.recovery(rp.measure(source, metric))


@pytest.mark.parametrize(("flag", "position"), [([], 1), (["--no-bos"], 0)])
def test_P14_the_differing_position_is_shown_with_its_tokens(capsys, model, flag, position):
    flags = ["0.1", "--to", "logits", *PATH, "--base", "3 + 5 =", "--source", "1 + 5 =", *flag]
    code, out, err = run(capsys, *flags, "--model", model, *SCORED)
    assert code == 0, err
    assert f'differs  {position} "3" -> "1"\n' in out


def test_P18_patching_a_run_with_itself_changes_nothing(capsys, tmp_path, model):
    flags = [*both("--base", BASE), *both("--source", BASE), "--model", model, *SCORED]
    senders = ["--sweep", "heads", "mlp.0", "embed"]
    found, _, out = found_by(capsys, tmp_path, *senders, "--to", "logits", *PATH, *flags)
    assert not found.values.any() and not found.direct.any()
    assert out.count("nowhere: its own source") == 2


def test_P19_the_two_directions_are_two_experiments_and_both_say_which(capsys, tmp_path):
    demo = rp.load("demo")
    pairs = indirect_object_prompts(demo, 1, seed=0, corrupt="names")
    results = {}
    for base, source in ((pairs.base[0], pairs.source[0]), (pairs.source[0], pairs.base[0])):
        flags = ["0.1", "--to", "logits", *PATH, "--base", base, "--source", source]
        flags += ["--answer", pairs.answers[0], "--foil", pairs.foils[0], "--model", "demo"]
        found, body, out = found_by(capsys, tmp_path, *flags)
        assert body["base"] == [base] and body["source"] == [source]
        assert f'"{body["differences"][0][0][1]}" -> "{body["differences"][0][0][2]}"' in out
        results[base] = float(found.values)
    there, back = results.values()
    assert there < 0 and abs(there + back) > 0.05


@pytest.mark.once
@pytest.mark.full
@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_C01_redirected_output_is_plain_in_any_encoding(tmp_path, encoding):
    argv = [sys.executable, str(REPOSITORY / "scripts" / "path_patch.py"), "--sweep", "heads"]
    argv += ["--to", "2.0.q", *PATH, *DRAWN]
    for more in ([], ["--help"]):
        done = subprocess.run(
            argv + more,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii() and b"\x1b" not in done.stdout and done.stdout


# Files of pairs


def test_pairs_come_from_a_file_with_or_without_answers(capsys, tmp_path, model, pair):
    flags = ["0.1", "--to", "logits", *PATH, "--model", model]
    expected, _, _ = found_by(capsys, tmp_path, *flags, *given(pair, model))
    rows = list(zip(*pair, strict=True))
    with_answers = tmp_path / "with.tsv"
    lines = [f"{base}\t{source}\t the\t a" for base, source in rows]
    with_answers.write_text("\n".join(["base\tsource\tanswer\tfoil", *lines]), encoding="utf-8")
    without = tmp_path / "without.jsonl"
    lines = [json.dumps({"base": base, "source": source}) for base, source in rows]
    without.write_text("\n".join(lines), encoding="utf-8")
    for more in (["--pairs", with_answers], ["--pairs", without, *SCORED]):
        found, body, out = found_by(capsys, tmp_path, *flags, *more)
        assert_same(found, expected)
        assert f"pairs    {len(rows)} pairs of {more[1].name}" in out


# Errors


ASKED = ["0.1", "--to", "logits", *PATH]
ENOUGH = ["--base", "x", "--source", "x"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: --mlps, --using"),
        (["0.1", "--to", "logits", "--using", "zero"], "required: --mlps"),
        (["0.1", "--to", "logits", "--mlps", "freeze"], "required: --using"),
        (["0.1", "--to", "logits", "--mlps", "thaw", "--using", "zero"], "invalid choice: 'thaw'"),
        (["--to", "logits", *PATH], "no sender was given"),
        (["0.1", *PATH], "no receiver was given"),
        (ASKED, "none was given"),
        ([*ASKED, *ENOUGH, "--pairs", "p"], "got --base and --pairs"),
        ([*ASKED, "--base", "x", *SCORED], "--base was given 1 times and --source 0 times"),
        ([*ASKED, *ENOUGH], "no metric was given"),
        ([*ASKED, *ENOUGH, "--metric", "kl", "--answer", " a"], "reads no"),
        ([*ASKED, *ENOUGH, "--metric", "logit"], "needs --answer"),
        ([*ASKED, *ENOUGH, "--foil", " a"], "foils were given without answers"),
        ([*ASKED, *ENOUGH, *SCORED, "--seed", "1"], "--seed goes with --indirect-object"),
        ([*ASKED, *ENOUGH, *SCORED, "--corrupt", "swap"], "--corrupt goes with"),
        ([*ASKED, "--indirect-object", "4", "--corrupt", "swap"], "needs --seed"),
        ([*ASKED, "--indirect-object", "4", "--seed", "1"], "needs --corrupt names or swap"),
        ([*ASKED, "--indirect-object", "0"], "0 is too few"),
        ([*ASKED, *DRAWN, "--answer", " a"], "has its own answers"),
        ([*ASKED, *DRAWN, "--source", "x"], "--source goes with --base"),
        ([*ASKED, *ENOUGH, *SCORED, "--positions", "S2"], "'S2' goes with --indirect-object"),
        ([*ASKED, *ENOUGH, *SCORED, "--positions", "last"], "'last' is neither a position nor END"),
        ([*ASKED, *ENOUGH, *SCORED, "--over", "batch"], "--over goes with --using mean"),
        (
            ["0.1", "--to", "logits", "--mlps", "freeze", "--using", "mean", *ENOUGH],
            "--using mean needs its axes",
        ),
        (
            ["0.1", "--to", "logits", "--mlps", "freeze", "--using", "mean", "--base", "x"]
            + ["--over", "batch", *SCORED],
            "--using mean needs the prompts",
        ),
        (
            ["0.1", "--to", "logits", "--mlps", "freeze", "--using", "zero", *ENOUGH],
            "--source is not read by --using zero",
        ),
        (["nose.1", "--to", "logits", *PATH, *ENOUGH, *SCORED], "'nose.1' is no address"),
        (["resid_pre.1", "--to", "logits", *PATH, *ENOUGH, *SCORED], "no path starts there"),
        (["0.1", "--to", "attn.1", *PATH, *ENOUGH, *SCORED], "no path ends there"),
        ([*ASKED, "--pairs", "no-such-file", *SCORED], "no-such-file: No such file"),
        ([*ASKED, "--pairs", "BAD"], "line 2: 2 cells were expected"),
        ([*ASKED, "--pairs", "GOOD", *SCORED], "holds the answers"),
        ([*ASKED, *ENOUGH, *SCORED, "--csv", "no/folder/o.csv"], "there is no folder"),
        ([*ASKED, *ENOUGH, *SCORED, "--model", "MODEL", "--positions", "50"], "position 50"),
        (["9.1", "--to", "logits", *PATH, *ENOUGH, *SCORED, "--model", "MODEL"], "9.1"),
        (["0.1", "--to", "9.1.q", *PATH, *ENOUGH, *SCORED, "--model", "MODEL"], "9.1.q"),
        (
            ["attn.0", "0.1", "--joint", "--to", "logits", *PATH, *ENOUGH, *SCORED]
            + ["--model", "MODEL"],
            "0.1 is a part of attn.0",
        ),
        (
            [*ASKED, "--indirect-object", "4", "--seed", "1", "--corrupt", "names"]
            + ["--model", "MODEL"],
            "need 5 names",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, model, argv, said):
    files = tmp_path / "files"
    files.mkdir()
    (files / "bad.tsv").write_text("base\tsource\nx\n")
    (files / "good.tsv").write_text("base\tsource\tanswer\nx\tx\t the\n")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    names = {"MODEL": model, "BAD": str(files / "bad.tsv"), "GOOD": str(files / "good.tsv")}
    argv = [names.get(word, word) for word in argv]
    code, out, err = run(capsys, *argv, *([] if "--csv" in argv else ["--json", "o.json"]))
    assert code == 2 and out == ""
    assert said in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert list(here.iterdir()) == []


def test_flags_are_checked_before_a_model_is_loaded(capsys):
    code, _, err = run(capsys, *ASKED, *ENOUGH, *SCORED, "--positions", "S2", "--model", "no/such")
    assert code == 2 and "--positions" in err
    code, _, err = run(capsys, *ASKED, "--pairs", "no-such-file", *SCORED, "--model", "no/such")
    assert code == 2 and "no-such-file" in err


@pytest.mark.full
def test_help_answers_at_once_and_without_torch():
    code = "import sys; from resid_patching.cli import main\n"
    code += "main(['path-patch', '--help']); main(['--help'])\n"
    code += "assert 'torch' not in sys.modules\nprint('no torch')"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert "no torch" in done.stdout and "--to-sweep" in done.stdout
    assert seconds < 5  # a bound that a torch import on a busy machine would break
