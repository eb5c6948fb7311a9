"""`resid-patching logit-lens` as its users meet it: tables, one position, files, errors."""

import csv
import html
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
import zoo_lens

import resid_patching as rp
from resid_patching.cli import main
from resid_patching.lens.results import LensResult, TopTokens
from resid_patching.show import lens as shown_lens
from resid_patching.show import text as shown_text

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPT = "When Mary and John went to the store"
OTHER = "the dog saw the cat"


@pytest.fixture(scope="module")
def model() -> str:
    return str(zoo.text_folder())


@pytest.fixture(scope="module")
def loaded(model):
    return rp.load(model)


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    """A random tuned lens."""
    target = tmp_path_factory.mktemp("lenses") / "random"
    zoo_lens.random_lens(loaded).save(target)
    return str(target)


def run(capsys, *argv):
    code = main(["logit-lens", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def found_by(capsys, *argv):
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    return out


def written(capsys, tmp_path, *argv):
    target = tmp_path / "o.json"
    out = found_by(capsys, *argv, "--json", target)
    return json.loads(target.read_text(encoding="utf-8")), out


def grid_of(out, title):
    """A printed table of cells: (position, row label) -> token and percent, or a rank."""
    lines = out.split(title)[1].splitlines()[1:]
    starts = [match.start() for match in re.finditer(r"\S+", lines[0])]
    places = list(map(int, lines[0].split()))
    cells = {}
    for line in lines[2:]:
        label = line.split(" ")[0]
        if not label.startswith("resid_"):
            break
        ends = [*starts[1:], len(line) + 1]
        for place, start, end in zip(places, starts, ends, strict=True):
            cells[place, label] = line[start:end].strip()
    return places, cells


# The numbers are the library's


def test_the_table_holds_the_top_tokens_of_the_library(capsys, model, loaded):
    out = found_by(capsys, "--prompt", PROMPT, "--model", model, "--from", "0")
    readout = rp.logit_lens(rp.capture(loaded, PROMPT))
    top = readout.top_tokens(1)
    places, cells = grid_of(out, "logit lens: top token")
    assert places[0] == 0 and len(places) > 3
    for label in readout.labels:
        for place in places:
            token = top.tokens(layer=label, batch=0, pos=place)[0]
            prob = float(top.sel(layer=label, batch=0, pos=place)[0])
            text, percent = cells[place, label].rsplit(" ", 1)
            assert percent == f"{prob:.0%}"
            assert text.strip() == shown_lens.short_token(token)


def test_the_last_positions_are_shown_and_what_is_left_out_is_said(capsys, model, loaded):
    out = found_by(capsys, "--prompt", PROMPT, "--model", model)
    n = rp.capture(loaded, PROMPT).prompts.lengths[0]
    places, _ = grid_of(out, "logit lens: top token")
    assert places == list(range(places[0], n)) and places[0] > 1
    assert f"(positions 0 to {places[0] - 1} not shown; --from P" in out
    assert all(len(line.rstrip()) <= 100 for line in out.splitlines())


def test_files_hold_everything_whatever_is_shown(capsys, tmp_path, model, loaded):
    table = tmp_path / "o.csv"
    flags = ["--prompt", PROMPT, "--prompt", OTHER, "--model", model, "--top", "3"]
    flags += ["--answer", " the", "--foil", " a", "--csv", table, "--position", "-1"]
    body, _ = written(capsys, tmp_path, *flags)
    readout = rp.logit_lens(rp.capture(loaded, [PROMPT, OTHER]))
    expected = readout.measure("entropy", "kl", "prob", "rank", top=3, tokens=" the")
    top = TopTokens.from_json(json.dumps(body))
    assert torch.equal(top.ids, expected["top_tokens"].ids)
    assert top.axes == expected["top_tokens"].axes
    for name in ("entropy", "kl"):
        result = LensResult.from_json(json.dumps(body[name]))
        torch.testing.assert_close(result.values, expected[name].values, equal_nan=True)
    rank = LensResult.from_json(json.dumps(body["answer"]["rank"]))
    torch.testing.assert_close(rank.values, expected["rank"].values, equal_nan=True)
    foil = LensResult.from_json(json.dumps(body["foil"]["prob"]))
    torch.testing.assert_close(foil.values, readout.prob(" a").values, equal_nan=True)
    n = [len(texts) for texts in top.token_texts]
    assert body["positions"] == [n[0] - 1, n[1] - 1] and body["command"] == "logit-lens"
    assert body["prompts"] == [PROMPT, OTHER] and body["folder"] is None
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * sum(n) * 3
    cell = [
        r for r in rows if (r["layer"], r["prompt"], r["position"]) == ("resid_post.1", "1", "2")
    ]
    where = {"layer": "resid_post.1", "batch": 1, "pos": 2}
    assert [r["top_token"] for r in cell] == top.tokens(**where)
    assert float(cell[0]["kl"]) == pytest.approx(float(readout.kl.sel(**where)), rel=1e-5)
    assert float(cell[0]["answer_rank"]) == float(expected["rank"].sel(**where))
    assert float(cell[0]["foil_prob"]) == pytest.approx(float(readout.prob(" a").sel(**where)))


@pytest.mark.parametrize("position", [0, -1, 3])
def test_one_position_in_depth(capsys, model, loaded, position):
    flags = ["--prompt", PROMPT, "--model", model, "--position", position]
    out = found_by(capsys, *flags, "--answer", " the", "--foil", " a", "--top", "4")
    readout = rp.logit_lens(rp.capture(loaded, PROMPT))
    found = readout.measure("entropy", "kl", "prob", "rank", top=4, tokens=" the")
    lines = out.splitlines()
    for label in readout.labels:
        start = next(n for n, line in enumerate(lines) if line.startswith(label + " "))
        stop = start + 1
        while lines[stop].startswith(" "):
            stop += 1
        cells = [cell.strip() for cell in lines[start].split(" | ")]
        where = {"layer": label, "batch": 0, "pos": position}
        assert cells[1] == f"{float(found['entropy'].sel(**where)):.3f}"
        assert cells[2] == f"{float(found['kl'].sel(**where)):.3f}"
        prob = shown_lens.percent(float(found["prob"].sel(**where)))
        assert cells[3].split() == [str(int(found["rank"].sel(**where))), prob]
        tops = " ".join(line.split(" | ")[-1] for line in lines[start:stop])
        for token in found["top_tokens"].tokens(**where):
            assert shown_lens.short_token(token) in tops


def test_without_an_answer_the_final_top_token_is_followed(capsys, model, loaded):
    out = found_by(capsys, "--prompt", PROMPT, "--model", model, "--position", "-1")
    top = rp.logit_lens(rp.capture(loaded, PROMPT)).top_tokens(1)
    token = top.tokens(layer="resid_post.2", batch=0, pos=-1)[0]
    assert f"{shown_lens.short_token(token)} (final)" in out
    last = next(line for line in out.splitlines() if line.startswith("resid_post.2"))
    assert last.split(" | ")[2].strip() == "0.000" and last.split(" | ")[3].split()[0] == "0"


def test_ranks_of_an_answer_are_a_table_of_their_own(capsys, model, loaded):
    out = found_by(capsys, "--prompt", PROMPT, "--model", model, "--answer", " the")
    rank = rp.logit_lens(rp.capture(loaded, PROMPT)).rank(" the")
    places, cells = grid_of(out, 'logit lens: rank of " the"')
    for (place, label), text in cells.items():
        assert int(text) == int(rank.sel(layer=label, batch=0, pos=place))
    assert len(cells) == 4 * len(places)


def test_mid_reads_between_attention_and_mlp(capsys, tmp_path, model, loaded):
    body, out = written(capsys, tmp_path, "--prompt", OTHER, "--model", model, "--mid")
    readout = rp.logit_lens(rp.capture(loaded, OTHER), mid=True)
    assert TopTokens.from_json(json.dumps(body)).axis("layer").labels == readout.labels
    assert "resid_mid.1" in out


def test_a_tuned_lens_is_read_instead_or_beside(capsys, tmp_path, model, loaded, folder):
    flags = ["--prompt", OTHER, "--model", model, "--lens", folder]
    captured = rp.capture(loaded, OTHER)
    lens = rp.TunedLens.load(folder, loaded)
    body, out = written(capsys, tmp_path, *flags)
    found = LensResult.from_json(json.dumps(body["kl"]))
    torch.testing.assert_close(found.values, lens(captured).kl.values)
    assert body["lens"] == "tuned lens" and body["others"] == []
    assert "\nlogit lens: top" not in out and "\ntuned lens: top token" in out
    assert f"tuned lens from {folder}" in out and "read linearly" in out
    body, out = written(capsys, tmp_path, *flags, "--beside", "--layers-every", "2")
    assert out.index("\nlogit lens: top") < out.index("\ntuned lens: top")
    plain = LensResult.from_json(json.dumps(body["kl"]))
    kept = [0, 2, 3]
    expected = rp.logit_lens(captured).kl.values[kept]
    torch.testing.assert_close(plain.values, expected)
    tuned = LensResult.from_json(json.dumps(body["others"][0]["kl"]))
    torch.testing.assert_close(tuned.values, lens(captured).kl.values[kept])
    assert not torch.allclose(plain.values[:-1], tuned.values[:-1])


# What is said


def test_what_a_lens_is_not_is_said_in_one_line(capsys, model):
    for flags in ([], ["--position", "-1"]):
        out = found_by(capsys, "--prompt", OTHER, "--model", model, *flags)
        assert (
            "A logit lens shows neither beliefs nor causes: the unembedding was trained on" in out
        )
        assert (
            "The norm is recomputed at each layer; the last row is the model's own output." in out
        )


def test_many_prompts_are_cut_with_a_note(capsys, tmp_path, model):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join([OTHER] * 6) + "\n", encoding="utf-8")
    out = found_by(capsys, "--prompts", file, "--model", model)
    assert out.count("logit lens: top token") == 4 and "... and 2 more prompts" in out


def test_cells_are_shaded_only_where_many_colours_are_shown(monkeypatch):
    from rich.console import Console

    def spans(color_system, fancy, no_color=False):
        monkeypatch.setattr(shown_text, "fancy", lambda: fancy)
        out = Console(color_system=color_system, force_terminal=True, no_color=no_color)
        return shown_text.shades(out)

    assert spans("truecolor", True) and spans("256", True)
    assert not spans("standard", True) and not spans("truecolor", False)
    assert not spans("256", True, no_color=True)
    assert shown_text.heat(1e-3) == "black on rgb(247,247,247)"
    assert shown_text.heat(1.0) == "white on rgb(33,102,172)"


@pytest.mark.parametrize(
    ("widths", "room", "first", "places"),
    [
        ([5, 5, 5], 17, None, range(0, 3)),
        ([5, 5, 5], 16, None, range(1, 3)),
        ([5, 5, 5], 16, 0, range(0, 2)),
        ([50, 5, 50], 20, None, range(2, 3)),
        ([5, 50, 5], 20, 1, range(1, 2)),
    ],
)
def test_columns_that_fit(widths, room, first, places):
    assert shown_text.that_fit(widths, room, first) == places


# Field cases


def test_L02_L06_the_last_row_is_the_models_output(capsys, tmp_path, model, loaded):
    for flag in ([], ["--no-bos"]):
        body, _ = written(capsys, tmp_path, "--prompt", PROMPT, "--model", model, *flag)
        top = TopTokens.from_json(json.dumps(body))
        captured = rp.capture(loaded, PROMPT, prepend_bos=False if flag else None)
        probs = captured.logits_at(None)[0].softmax(-1).topk(5)
        assert torch.equal(top.ids[-1, 0], probs.indices)
        torch.testing.assert_close(top.values[-1, 0], probs.values)


def test_L07_rows_are_the_embedding_and_every_block(capsys, model):
    out = found_by(capsys, "--prompt", OTHER, "--model", model, "--position", "-1")
    rows = [line.split()[0] for line in out.splitlines() if line.startswith("resid_")]
    assert rows == ["resid_pre.0", "resid_post.0", "resid_post.1", "resid_post.2"]


def test_L08_position_0_is_not_the_last(capsys, tmp_path, model):
    tables = []
    for position in ("0", "-1"):
        flags = ["--prompt", OTHER, "--model", model, "--position", position]
        body, out = written(capsys, tmp_path, *flags)
        tables.append(out.split("layer")[1])
    assert tables[0] != tables[1]


@pytest.mark.parametrize("stride", ["2", "3", "50"])
def test_L10_the_last_layer_is_always_shown(capsys, tmp_path, model, folder, stride):
    flags = ["--prompt", OTHER, "--model", model, "--layers-every", stride]
    for lens in ([], ["--lens", folder]):
        _, cells = grid_of(found_by(capsys, *flags, *lens), "lens: top token")
        labels = {label for _, label in cells}
        assert {"resid_pre.0", "resid_post.2"} <= labels and len(labels) < 4


def test_L13_two_plain_prompts_are_two_tables(capsys, model):
    out = found_by(capsys, "--prompt", PROMPT, "--prompt", OTHER, "--model", model)
    assert out.count("logit lens: top token") == 2
    assert "\ntokens 0 " in out and "\ntokens 1 " in out


TEXT = "François: 🐕 chien; Deutsch: 犬"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
@pytest.mark.parametrize("flags", [[], ["--position", "-1"]])
def test_L15_C01_any_text_on_any_stream(monkeypatch, model, encoding, flags):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["logit-lens", "--prompt", TEXT, "--model", model, *flags]) == 0
    out = stream.buffer.getvalue().decode(encoding)
    assert "resid_post.2" in out
    if not flags:
        places, cells = grid_of(out, "logit lens: top token")
        assert all(cell.endswith("%") for cell in cells.values())  # columns stay in line
        assert (places[-1], "resid_post.2") in cells


@pytest.mark.full
def test_C01_the_script_runs_on_a_legacy_stream(model):
    done = subprocess.run(
        [sys.executable, "scripts/logit_lens.py", "--prompt", TEXT, "--model", model],
        capture_output=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONIOENCODING": "cp1252"},
    )
    assert done.returncode == 0, done.stderr.decode("cp1252")
    assert "resid_post.2" in done.stdout.decode("cp1252")


def test_long_tokens_are_cut_and_wide_ones_counted():
    assert shown_lens.short_token(" the") == '" the"'
    assert shown_lens.short_token("x" * 40) == '"' + "x" * 11 + '..."'
    assert shown_lens.short_token("a\nb") == '"a\\nb"'


# Errors


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "MODEL"], "no prompt was given"),
        (["--prompt", "a", "--foil", " a"], "--foil is shown beside an --answer"),
        (["--prompt", "a", "--beside"], "--beside sets the logit lens beside a --lens"),
        (["--prompt", "a", "--lens", "LENS", "--mid"], "--mid does not go with --lens"),
        (["--prompt", "a", "--lens", "no-such"], "there is no lens at "),
        (["--prompt", "a", "--lens", ".", "--model", "MODEL"], "holds no lens"),
        (["--prompt", "a", "--lens", "LENS", "--model", "demo"], "the lens is of a model"),
        (["--prompt", "a", "--position", "60", "--model", "MODEL"], "position 60"),
        (["--prompt", "a", "--from", "60", "--model", "MODEL"], "position 60"),
        (["--prompt", "a", "--from", "-1"], "-1 is below 0"),
        (["--prompt", "a", "--from", "1", "--position", "1"], "not allowed with"),
        (["--prompt", "a", "--top", "0"], "0 is too few"),
        (["--prompt", "a", "--top", "9999", "--model", "MODEL"], "--top 9999 was asked for"),
        (["--prompt", "a", "--answer", "xyzzy", "--model", "MODEL"], "xyzzy"),
        (["--prompt", "a", "--layers-every", "0"], "0 is too few"),
        (["--prompt", "a", "--csv", "no/folder/o.csv"], "there is no folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys, tmp_path, monkeypatch, model, folder, argv, said
):
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": model, "LENS": folder}
    argv = [names.get(word, word) for word in argv]
    code, out, err = run(capsys, *argv, *([] if "--csv" in argv else ["--json", "o.json"]))
    assert code == 2 and out == ""
    assert said in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_T05_a_missing_lens_names_what_is_there(capsys, tmp_path):
    (tmp_path / "gpt2-lens").mkdir()
    code, _, err = run(capsys, "--prompt", "a", "--lens", tmp_path / "gpt-lens", "--model", "no/x")
    assert code == 2 and str(tmp_path / "gpt-lens") in err and "gpt2-lens" in err


def test_help_answers_without_torch():
    code = "import sys; from resid_patching.cli import main\n"
    code += "main(['logit-lens', '--help'])\n"
    code += "for name in ('fit', 'eval', 'show', 'convert'): main(['tuned-lens', name, '--help'])\n"
    code += "main(['tuned-lens', '--help']); main(['--help'])\n"
    code += "assert 'torch' not in sys.modules\nprint('no torch')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no torch" in done.stdout and "--layers-every" in done.stdout
    assert "--validation-tokens" in done.stdout and "logit-lens" in done.stdout


# The page


def test_the_page_shows_the_numbers_of_the_readout_and_loads_nothing(tmp_path):
    path = tmp_path / "lens.html"
    prompt = "When Mary and John went to the store, John gave a drink to"
    flags = ["--model", "demo", "--prompt", prompt, "--answer", " Mary", "--html", str(path)]
    assert main(["logit-lens", *flags]) == 0
    text = path.read_text(encoding="utf-8")
    run = rp.capture(rp.load("demo"), prompt)
    lens = rp.logit_lens(run)
    n_cells = len(lens.labels) * run.prompts.lengths[0]
    assert text.count("<td title=") == text.count("<tr><td") == n_cells
    last = lens.prob(" Mary").sel(layer=lens.labels[-1], batch=0, pos=-1)
    assert f"&quot; Mary&quot; {float(last):.2%}" in text
    assert f"rank 0, {float(last):.2%}" in text


@pytest.mark.parametrize("prompt", ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>"])
def test_a_prompt_that_is_markup_is_shown_and_not_run(tmp_path, prompt):
    path = tmp_path / "lens.html"
    assert main(["logit-lens", "--model", "demo", "--prompt", prompt, "--html", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert prompt not in text
    assert html.escape(prompt) in text


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, capsys):
    flags = ["--model", "demo", "--prompt", "a", "--html", str(tmp_path / "no" / "lens.html")]
    assert main(["logit-lens", *flags]) == 2
    assert "there is no folder" in capsys.readouterr().err
