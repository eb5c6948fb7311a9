"""`resid-patching tuned-lens` as its users meet it: fit, resume, eval, show, convert, errors."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import zoo
import zoo_lens

import resid_patching as rp
from resid_patching.cli import main
from resid_patching.lens import resume
from resid_patching.lens.results import LensResult, TopTokens
from resid_patching.show.lens import short_token

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPT = "the dog saw the cat"
TINY = ("--tokens", "600", "--validation-tokens", "120", "--length", "12")
QUICK = (*TINY, "--steps", "6", "--step-tokens", "8", "--save-every", "2")


@pytest.fixture(scope="module")
def model() -> str:
    return str(zoo.text_folder())


@pytest.fixture(scope="module")
def loaded(model):
    return rp.load(model)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    target = tmp_path_factory.mktemp("texts") / "text.txt"
    target.write_text(zoo.CORPUS, encoding="utf-8")
    return str(target)


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    """A fitted lens."""
    lens = rp.fit_tuned_lens(
        loaded,
        zoo.CORPUS,
        tokens=600,
        validation_tokens=120,
        length=12,
        steps=2,
        step_tokens=8,
        progress=False,
    )
    target = tmp_path_factory.mktemp("lenses") / "lens"
    lens.save(target)
    return str(target)


def run(capsys, *argv):
    code = main(["tuned-lens", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def found_by(capsys, *argv):
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    return out


def same(left, right):
    return torch.equal(left.weight, right.weight) and torch.equal(left.bias, right.bias)


def rows_of(out):
    """The printed table of KL: a dict of columns for each layer."""
    lines = out.split("\nlayer ")[1].splitlines()
    names = [name.strip() for name in f"layer {lines[0]}".split("|")]
    rows = {}
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 3:
            break
        rows[cells[0]] = dict(zip(names[1:], cells[1:], strict=True))
    return rows


# fit


def test_a_fit_is_the_librarys_and_ends_with_its_validation_table(
    capsys, tmp_path, model, loaded, text
):
    out_folder, body, table = tmp_path / "lens", tmp_path / "o.json", tmp_path / "o.csv"
    flags = ["--model", model, "--text", text, "--out", out_folder, *QUICK, "--seed", "3"]
    flags += [
        "--optimizer",
        "adam",
        "--rate",
        "0.01",
        "--products",
        "bfloat16",
        "--json",
        body,
        "--csv",
        table,
    ]
    out = found_by(capsys, "fit", *flags)
    expected = rp.fit_tuned_lens(
        loaded,
        zoo.CORPUS,
        tokens=600,
        validation_tokens=120,
        length=12,
        steps=6,
        step_tokens=8,
        optimizer="adam",
        rate=0.01,
        products="bfloat16",
        seed=3,
        progress=False,
    )
    found = rp.TunedLens.load(out_folder, loaded)
    assert same(found, expected) and found.record == expected.record
    assert sorted(p.name for p in out_folder.iterdir()) == ["config.json", "params.safetensors"]
    validation = expected.record["validation"]
    rows = rows_of(out)
    assert list(rows) == [*expected.labels, "mean"]
    for number, label in enumerate(expected.labels):
        for name, key in (("logit lens", "logit_lens"), ("ridge", "ridge"), ("tuned", "tuned")):
            assert float(rows[label][name]) == pytest.approx(validation[key][number], abs=1e-4)
        share = 100 * validation["tuned"][number] / validation["logit_lens"][number]
        assert float(rows[label]["tuned / logit"].rstrip("%")) == pytest.approx(share, abs=0.06)
    mean = sum(validation["tuned"]) / 3
    assert float(rows["mean"]["tuned"]) == pytest.approx(mean, abs=1e-4)
    assert "below the logit lens at 3 of 3 layers" in out and str(out_folder) in out
    assert json.loads(body.read_text())["record"] == expected.record
    with table.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["layer"] for line in lines] == list(expected.labels)
    assert [float(line["ridge"]) for line in lines] == pytest.approx(validation["ridge"])


def test_ridge_alone_steps_alone_other_sites_and_validation(capsys, tmp_path, model, loaded, text):
    base = ["--model", model, "--text", text, *TINY]
    out = found_by(capsys, "fit", *base, "--steps", "0", "--out", tmp_path / "a")
    rows = rows_of(out)
    assert all(float(row["ridge"]) >= float(row["tuned"]) for row in rows.values())
    flags = ["--no-ridge", "--steps", "2", "--step-tokens", "8", "--optimizer", "sgd"]
    flags += ["--site", "mlp_out", "--validation", text, "--out", tmp_path / "b"]
    out = found_by(capsys, "fit", *base, *flags)
    assert "ridge" not in rows_of(out)["mean"]
    assert "on mlp_out" in " ".join(out.split())  # the line is broken where a long path ends
    found = rp.TunedLens.load(tmp_path / "b", loaded)
    assert found.site == "mlp_out" and found.record["fit"]["optimizer"] == "sgd"


def test_a_dataset_is_read_where_the_package_can(capsys, tmp_path, monkeypatch, model, loaded):
    asked = []

    def load_dataset(*names, **options):
        asked.append((names, options))
        if names[0] == "no/such":
            raise ValueError("Couldn't find it\nand more")
        return ({"body": piece, "id": 1} for piece in zoo.CORPUS.split(". "))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    flags = ["--model", model, *QUICK, "--text-key", "body", "--dataset-config", "small"]
    found_by(capsys, "fit", "--text", "some/data", *flags, "--out", tmp_path / "lens")
    assert asked == [(("some/data", "small"), {"split": "train", "streaming": True})]
    assert rp.TunedLens.load(tmp_path / "lens", loaded).record["fit"]["steps_made"] == 6
    code, _, err = run(capsys, "fit", "--text", "no/such", *flags, "--out", tmp_path / "other")
    assert code == 2 and "no/such is no file here, and no dataset that can be loaded" in err
    assert "Couldn't find it" in err and len(err.splitlines()) == 1
    code, _, err = run(capsys, "fit", "--text", "some/data", *flags, "--out", tmp_path / "x")
    assert code == 0
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, _, err = run(capsys, "fit", "--text", "some/data", *flags, "--out", tmp_path / "other")
    assert code == 2 and "install the package datasets" in err
    code, _, err = run(capsys, "fit", "--text", "some/data", "--out", tmp_path / "other")
    assert code == 2 and "--tokens N" in err
    assert not (tmp_path / "other").exists()


# Interrupt and resume


def test_an_interrupted_fit_goes_on_to_the_unbroken_fit(
    capsys, tmp_path, monkeypatch, model, loaded, text
):
    base = ["fit", "--model", model, "--text", text, *QUICK]
    found_by(capsys, *base, "--out", tmp_path / "whole")
    save, saves = resume.save, []

    def save_then_stop(*arguments):
        save(*arguments)
        saves.append(arguments)
        if len(saves) == 3:  # at the start, at step 2, at step 4
            raise KeyboardInterrupt

    monkeypatch.setattr(resume, "save", save_then_stop)
    broken = [*base, "--out", tmp_path / "broken"]
    code, out, err = run(capsys, *broken)
    assert code == 130 and out == ""
    assert "holds the fit as of step 4 of 6" in err and "--resume" in err
    assert [p.name for p in (tmp_path / "broken").iterdir()] == [resume.STATE]
    monkeypatch.setattr(resume, "save", save)

    code, _, err = run(capsys, *broken)
    assert code == 2 and "holds an unfinished fit; continue it with --resume" in err
    code, _, err = run(capsys, *broken, "--resume", "--seed", "1")
    assert code == 2 and "seed = 0, but this one has 1" in err
    found_by(capsys, *broken, "--resume")
    left, right = (rp.TunedLens.load(tmp_path / name, loaded) for name in ("whole", "broken"))
    assert same(left, right)
    code, _, err = run(capsys, *broken, "--resume")
    assert code == 2 and "holds no unfinished fit; leave out --resume" in err
    code, _, err = run(capsys, *broken)
    assert code == 2 and "holds a lens already" in err


@pytest.mark.once
@pytest.mark.full
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_control_c_leaves_a_state(tmp_path, model, text):
    folder = tmp_path / "lens"
    argv = ["fit", "--model", model, "--text", text, "--out", str(folder), *QUICK]
    argv[argv.index("--steps") + 1] = "1000000"
    process = subprocess.Popen(
        [sys.executable, "scripts/tuned_lens.py", *argv],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (folder / resume.STATE).is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == ""
    assert "holds the fit as of step" in err and "interrupted" in err and "Traceback" not in err
    about, _ = resume.read(folder)
    assert about is not None and about["step"] < 1000000


# eval


def test_eval_is_the_mean_kl_after_each_windows_first_token(
    capsys, tmp_path, model, loaded, text, folder
):
    body, table = tmp_path / "o.json", tmp_path / "o.csv"
    flags = ["--model", model, "--lens", folder, "--text", text, "--limit", "11"]
    out = found_by(capsys, "eval", *flags, "--json", body, "--csv", table)
    captured = rp.capture(loaded, rp.windows(loaded, zoo.CORPUS, length=12, limit=11))
    lens = rp.TunedLens.load(folder, loaded)
    rows, found = rows_of(out), json.loads(body.read_text())
    for name, readout in (("logit lens", rp.logit_lens(captured)), ("tuned", lens(captured))):
        expected = readout.kl.values[:-1, :, 1:].mean((1, 2)).tolist()
        shown = [float(rows[label][name]) for label in lens.labels]
        assert shown == pytest.approx(expected, abs=2e-4)
        assert found[name.replace(" ", "_")] == pytest.approx(expected, rel=1e-4)
    stored = lens.record["validation"]
    shown = [float(rows[label]["stored ridge"]) for label in lens.labels]
    assert shown == pytest.approx(stored["ridge"], abs=1e-4)
    assert found["stored_tuned"] == stored["tuned"] and found["tokens"] == 11 * 11
    said = "11 windows of 12 tokens, the first position of each left out"
    assert said in " ".join(out.split())
    with table.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["tuned"]) for line in lines] == pytest.approx(found["tuned"])


def test_eval_of_another_site_compares_the_same_states(capsys, tmp_path, model, loaded, text):
    lens = zoo_lens.random_lens(loaded, site="attn_out")
    lens.save(tmp_path / "lens")
    flags = ["--model", model, "--lens", tmp_path / "lens", "--text", text, "--limit", "2"]
    out = found_by(capsys, "eval", *flags, "--length", "8")
    captured = rp.capture(loaded, rp.windows(loaded, zoo.CORPUS, length=8, limit=2))
    identity = rp.TunedLens.identity(loaded, site="attn_out")
    expected = identity(captured).kl.values[:-1, :, 1:].mean((1, 2)).tolist()
    rows = rows_of(out)
    assert [float(rows[x]["logit lens"]) for x in lens.labels] == pytest.approx(expected, abs=2e-4)
    assert "stored tuned" not in rows["mean"]


# show


def test_show_sets_both_lenses_side_by_side(capsys, tmp_path, model, loaded, folder):
    body = tmp_path / "o.json"
    flags = ["--model", model, "--lens", folder, "--prompt", PROMPT, "--json", body]
    out = found_by(capsys, "show", *flags, "--position", "-1", "--answer", " cat")
    captured = rp.capture(loaded, PROMPT)
    readouts = (rp.logit_lens(captured), rp.TunedLens.load(folder, loaded)(captured))
    for label in readouts[0].labels:
        line = next(line for line in out.splitlines() if line.startswith(label + " "))
        cells = [cell.strip() for cell in line.split(" | ")]
        for readout, (kl, rank, top) in zip(readouts, (cells[1:4], cells[4:]), strict=True):
            where = {"layer": label, "batch": 0, "pos": -1}
            assert kl == f"{float(readout.kl.sel(**where)):.3f}"
            assert int(rank) == int(readout.rank(" cat").sel(**where))
            first = readout.top_tokens(1).tokens(**where)[0]
            assert top.startswith(short_token(first))
    found = json.loads(body.read_text())
    assert TopTokens.from_json(json.dumps(found)).provenance.plan.count("logit lens")
    tuned = LensResult.from_json(json.dumps(found["others"][0]["kl"]))
    torch.testing.assert_close(tuned.values, readouts[1].kl.values)


def test_show_without_a_position_is_two_tables_and_the_mean_kl(capsys, model, loaded, folder):
    out = found_by(capsys, "show", "--model", model, "--lens", folder, "--prompt", PROMPT)
    assert out.index("\nlogit lens: top token") < out.index("\ntuned lens: top token")
    captured = rp.capture(loaded, PROMPT)
    rows = rows_of(out)
    expected = rp.logit_lens(captured).kl.values[:-1].mean((1, 2)).tolist()
    shown = [float(row["logit lens"]) for label, row in rows.items() if label != "mean"]
    assert shown == pytest.approx(expected, abs=2e-4)
    assert "neither beliefs nor causes" in out and "not what causes what" in out
    assert "standard error" not in out


def test_show_of_several_prompts_gives_standard_errors_over_them(capsys, model, loaded, folder):
    prompts = [PROMPT, "the dog"]
    given = [part for prompt in prompts for part in ("--prompt", prompt)]
    rows = rows_of(found_by(capsys, "show", "--model", model, "--lens", folder, *given))
    table = rp.logit_lens(rp.capture(loaded, prompts)).kl.table()[:-1]
    errors = [float(row["se logit"]) for label, row in rows.items() if label != "mean"]
    assert errors == pytest.approx(table["se"].tolist(), abs=2e-4)
    assert float(rows["mean"]["se tuned"]) > 0


# convert


def test_convert_between_formats_keeps_the_lens(capsys, tmp_path, model, loaded, folder):
    flags = ["--model", model, "--lens", folder]
    out = found_by(capsys, "convert", *flags, "--to", "tuned-lens", "--out", tmp_path / "theirs")
    assert "the tuned-lens package's format" in out
    code, _, err = run(
        *(capsys, "convert", "--model", model, "--lens", tmp_path / "theirs"),
        *("--to", "ours", "--out", tmp_path / "ours"),
    )
    assert code == 0 and "unverified" in err
    lens = rp.TunedLens.load(folder, loaded)
    for name in ("theirs", "ours"):
        with pytest.warns() if name == "theirs" else contextlib.nullcontext():
            assert same(rp.TunedLens.load(tmp_path / name, loaded), lens)


def test_convert_between_bases_is_exact_or_refused(capsys, tmp_path, model, loaded):
    folded = rp.load(model, processing="folded")
    lens = zoo_lens.random_lens(folded)
    lens.save(tmp_path / "centred")
    flags = ["--model", model, "--lens", tmp_path / "centred"]
    out = found_by(capsys, "convert", *flags, "--to", "raw", "--out", tmp_path / "raw")
    assert "moved to raw weights, exactly" in out
    found_by(capsys, "convert", *flags, "--to", "tuned-lens", "--out", tmp_path / "theirs")
    raw = rp.TunedLens.load(tmp_path / "raw", loaded)
    assert raw.fingerprint.basis == "raw" and raw.fingerprint.verified
    kl = raw(rp.capture(loaded, PROMPT)).kl.values
    expected = lens(rp.capture(folded, PROMPT)).kl.values
    torch.testing.assert_close(kl, expected, rtol=1e-3, atol=1e-3)
    with pytest.warns():
        assert same(rp.TunedLens.load(tmp_path / "theirs", loaded), raw)
    back = ["--model", model, "--lens", tmp_path / "raw", "--to", "centred"]
    found_by(capsys, "convert", *back, "--out", tmp_path / "back")
    assert rp.TunedLens.load(tmp_path / "back", folded).fingerprint.basis == "centred"

    zoo_lens.random_lens(loaded).save(tmp_path / "sees")
    flags = ["--model", model, "--lens", tmp_path / "sees", "--to", "centred"]
    code, _, err = run(capsys, "convert", *flags, "--out", tmp_path / "no")
    assert code == 2 and "reads the mean of the stream" in err and not (tmp_path / "no").exists()


# Errors

FIT = ["fit", "--out", "new"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: fit|eval|show|convert"),
        (["fit", "--text", "TEXT"], "required: --out"),
        ([*FIT], "required: --text"),
        ([*FIT, "--text", "no-such.txt"], "no-such.txt does not exist"),
        ([*FIT, "--text", "/no/such/file"], "/no/such/file does not exist"),
        ([*FIT, "--text", "."], ". is a folder"),
        ([*FIT, "--text", "BAD"], "is not UTF-8 text (byte 1)"),
        ([*FIT, "--text", "EMPTY"], "holds no text"),
        ([*FIT, "--text", "TEXT", "--split", "train"], "--split is for a dataset"),
        ([*FIT, "--text", "TEXT", "--validation", "no.txt"], "no.txt does not exist"),
        ([*FIT, "--text", "TEXT", "--steps", "-1"], "-1 is below 0"),
        ([*FIT, "--text", "TEXT", "--rate", "0"], "0 is not a number above 0"),
        ([*FIT, "--text", "TEXT", "--optimizer", "lion"], "invalid choice: 'lion'"),
        ([*FIT, "--text", "TEXT", "--resume"], "holds no unfinished fit"),
        (["fit", "--text", "TEXT", "--out", "TEXT"], "is a file; --out is a folder"),
        (["fit", "--text", "TEXT", "--out", "no/folder"], "there is no folder no"),
        (["fit", "--text", "TEXT", "--out", "LENS"], "holds a lens already"),
        ([*FIT, "--text", "TEXT", "--json", "no/folder/o"], "there is no folder"),
        ([*FIT, "--text", "TEXT", "--model", "no/such/model"], "no/such/model"),
        ([*FIT, "--text", "TEXT", "--model", "MODEL", "--length", "500"], "windows are of 2 to"),
        ([*FIT, "--text", "TEXT", "--model", "MODEL", "--tokens", "10000000"], "Give more text"),
        (["eval", "--lens", "no-such", "--text", "TEXT"], "there is no lens at"),
        (["eval", "--lens", "LENS", "--text", "no.txt"], "no.txt does not exist"),
        (["eval", "--lens", "LENS", "--text", "TEXT", "--model", "demo"], "the lens is of a model"),
        (["show", "--lens", "LENS"], "no prompt was given"),
        (["show", "--lens", "LENS", "--prompt", "a", "--foil", "b"], "beside an --answer"),
        (
            ["show", "--lens", "LENS", "--prompt", "a", "--model", "MODEL", "--position", "9"],
            "position 9",
        ),
        (
            ["show", "--lens", "LENS", "--prompt", "a", "--model", "MODEL"]
            + ["--processing", "folded"],
            "the lens is of raw weights",
        ),
        (["convert", "--lens", "LENS", "--out", "new"], "required: --to"),
        (["convert", "--lens", "LENS", "--to", "ours", "--out", "LENS"], "is not empty"),
        (["convert", "--lens", "LENS", "--to", "ours", "--out", "no/new"], "there is no folder"),
        (
            ["convert", "--lens", "LENS", "--to", "raw", "--out", "new", "--model", "MODEL"],
            "is of raw weights already",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys, tmp_path, monkeypatch, model, text, folder, argv, said
):
    files, here = tmp_path / "files", tmp_path / "here"
    files.mkdir()
    here.mkdir()
    (files / "bad").write_bytes(b"a\xff\xfe")
    (files / "empty").write_bytes(b"")
    monkeypatch.chdir(here)
    names = {"MODEL": model, "TEXT": text, "LENS": folder}
    names |= {"BAD": str(files / "bad"), "EMPTY": str(files / "empty")}
    code, out, err = run(capsys, *(names.get(word, word) for word in argv))
    assert code == 2 and out == ""
    assert said in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert list(here.iterdir()) == []


def test_T01_a_fit_that_diverges_stops_with_the_layer_named(capsys, tmp_path, model, text):
    flags = ["--model", model, "--text", text, *QUICK, "--optimizer", "sgd", "--rate", "1e38"]
    code, out, err = run(capsys, "fit", *flags, "--out", tmp_path / "lens")
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert "layer resid_" in err and "step" in err and "learning rate" in err
    assert not (tmp_path / "lens" / "config.json").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_T01_half_precision_gives_finite_numbers(capsys, tmp_path, model, text, dtype):
    flags = ["--model", model, "--text", text, *QUICK, "--dtype", dtype]
    out = found_by(capsys, "fit", *flags, "--out", tmp_path / "lens")
    assert "nan" not in out and len(rows_of(out)) == 4
