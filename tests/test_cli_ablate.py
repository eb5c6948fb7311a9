"""`resid-patching ablate` as its users meet it: output, files, long texts, errors."""

import csv
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.cli import main, text
from resid_patching.cli.progress import Progress
from resid_patching.cli.text import TextWindows

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPTS = ["When Mary and John went", "the dog saw the cat and"]
PROSE = zoo.CORPUS * 3


@pytest.fixture(scope="module")
def model() -> str:
    return str(zoo.text_folder())


@pytest.fixture
def prose(tmp_path) -> Path:
    file = tmp_path / "prose.txt"
    file.write_text(PROSE, encoding="utf-8")
    return file


@pytest.fixture
def small_pieces(monkeypatch):
    """Blocks and groups so small that a short text is cut many times."""
    monkeypatch.setattr(text, "BLOCK", 300)
    monkeypatch.setattr(text, "_AROUND", 60)
    monkeypatch.setattr(text, "GROUP_TOKENS", 100)


def run(capsys, *argv):
    code = main(["ablate", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def effect_of(capsys, tmp_path, *argv):
    """What a command that must succeed wrote as JSON, and printed."""
    target = tmp_path / "effect.json"
    code, out, err = run(capsys, *argv, "--json", str(target))
    assert code == 0, err
    return rp.Effect.from_json(target.read_text(encoding="utf-8")), out


def assert_same(found, expected):
    for name in ("values", "baseline", "patched", "direct"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert found.targets == expected.targets and found.unit == expected.unit


# Prompts


def both(flag, values):
    return [word for value in values for word in (flag, value)]


def lines(tmp_path, *texts):
    file = tmp_path / f"lines{len(list(tmp_path.iterdir()))}.txt"
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("positions", [None, -2])
@pytest.mark.parametrize("joint", [False, True])
def test_zero_is_the_effect_of_the_library(capsys, tmp_path, model, joint, positions):
    flags = [*["--joint"] * joint, *([] if positions is None else ["--positions", f"{positions}"])]
    found, out = effect_of(
        *(capsys, tmp_path, "zero", "attn.1", "2.0", "resid_pre.1", "mlp.0", "--model", model),
        *(*both("--prompt", PROMPTS), "--answer", " the", "--foil", " a", *flags),
    )
    expected = rp.ablate(
        rp.capture(rp.load(model), PROMPTS),
        ["attn.1", "2.0", "resid_pre.1", "mlp.0"],
        rp.Zero(),
        metric=rp.logit_diff(" the", " a"),
        joint=joint,
        positions=positions,
    )
    assert_same(found, expected)
    assert "mean over 2 prompts" in out and "not that it is unnecessary" in out
    assert ("together" in out) == joint


@pytest.mark.parametrize("metric", ["kl", "loss"])
@pytest.mark.parametrize("joint", [False, True])
def test_each_position_in_turn_is_the_sweep_of_the_library(capsys, tmp_path, model, joint, metric):
    """One prompt is shorter: its last places are no numbers, on the screen too."""
    page, prompts = tmp_path / "page.html", [PROMPTS[0], f"{PROMPTS[0]} and {PROMPTS[0]}"]
    flags = ["--positions", "each", "--metric", metric, "--html", str(page), *["--joint"] * joint]
    found, out = effect_of(
        *(capsys, tmp_path, "zero", "attn.1", "2.0", "--model", model),
        *(*both("--prompt", prompts), *flags),
    )
    base = rp.capture(rp.load(model), prompts)
    expected = rp.ablate(
        *(base, ["attn.1", "2.0"], rp.Zero()),
        metric=getattr(rp, metric)(),
        joint=joint,
        positions="each",
    )
    torch.testing.assert_close(found.values, expected.values, equal_nan=True)
    assert found.axes == expected.axes
    assert "more positions, weaker or not in every prompt (--top N shows more)" in out
    means = expected.mean(expected.total)
    target, place = divmod(int(means.nan_to_num().abs().argmax()), means.shape[1])
    table, _, grid = out.partition("by position")
    first = table.split("-\n", 1)[1].splitlines()[0]  # below the line under the heads
    name = "attn.1 + 2.0" if joint else found.targets[target]
    cells = [cell.strip() for cell in first.split("|")]
    assert cells[:2] == [name, f"{place}"] and f"{float(means[target, place]):+.4f}" in cells
    row = next(line for line in grid.splitlines() if line.startswith(name)).removeprefix(name)
    assert f"{float(means[target, place]):+.3f}" in row and " . " not in row
    assert f'<td class="left">{name}</td>' in page.read_text(encoding="utf-8")


def test_the_progress_of_each_position_in_turn_reaches_its_end(model, monkeypatch):
    totals = []

    def ticker(self, run, n_variants):
        tick = plain(self, run, n_variants)
        totals.append([n_variants * len(run), 0])

        def count(n):
            totals[-1][1] += n * len(run)
            tick(n)

        return count

    plain = Progress.ticker
    monkeypatch.setattr(Progress, "ticker", ticker)
    flags = ["--sweep", "streams", "--positions", "each", "--metric", "kl", "--model", model]
    assert main(["ablate", "zero", *flags, "--prompt", PROMPTS[0]]) == 0
    assert [(total, total) for total, _ in totals] == [tuple(found) for found in totals]


@pytest.mark.parametrize("over", ["batch", "batch,pos"])
def test_mean_is_the_effect_of_the_library(capsys, tmp_path, model, over):
    reference = ["the dog saw the cat", "a cat saw the dogs"]
    loaded = rp.load(model)
    base, other = rp.capture(loaded, reference[0]), rp.capture(loaded, reference)
    if over == "batch" and len(set(other.prompts.lengths)) > 1:
        reference = [reference[0]] * 2
        other = rp.capture(loaded, reference)
    found, out = effect_of(
        *(capsys, tmp_path, "mean", "attn.0", "--model", model, "--prompt", reference[0]),
        *("--reference", lines(tmp_path, *reference), "--over", over, "--metric", "kl"),
    )
    kind = rp.Mean(other, over=tuple(over.split(",")))
    assert_same(found, rp.ablate(base, "attn.0", kind, metric=rp.kl()))
    assert f"mean over {' and '.join(over.split(','))} of 2 prompts" in out


def test_resampling_from_the_prompts_themselves_changes_nothing(capsys, tmp_path, model):
    found, _ = effect_of(
        *(capsys, tmp_path, "resample", "attn.0", "1.1", "mlp.2", "--model", model),
        *(*both("--prompt", PROMPTS), "--source", lines(tmp_path, *PROMPTS)),
        *("--metric", "prob", "--answer", " the"),
    )
    assert not found.values.any() and "resample rowwise" in repr(found)


def test_a_shuffle_is_seeded(capsys, tmp_path, model):
    source = lines(tmp_path, *PROMPTS[:1] * 2, PROMPTS[0].replace("Mary", "John"))
    base = ["resample", "attn.0", "--model", model, "--prompt", PROMPTS[0], "--source", source]
    base += ["--metric", "kl", "--pairing", "shuffle"]
    loaded = rp.load(model)
    captured = rp.capture(loaded, PROMPTS[0])
    try:
        how = rp.Resample(
            rp.capture(loaded, Path(source).read_text().splitlines()), pairing="shuffle", seed=3
        )
        expected = rp.ablate(captured, "attn.0", how, metric=rp.kl())
    except rp.ResidPatchingError as error:
        code, _, err = run(capsys, *base, "--seed", "3")
        assert code == 2 and str(error) in err
        return
    assert_same(effect_of(capsys, tmp_path, *base, "--seed", "3")[0], expected)


@pytest.mark.parametrize(
    ("sweep", "n"), [("heads", 12), ("layers", 6), ("streams", 7)], ids=["heads", "layers", "bus"]
)
def test_a_sweep_takes_every_part_beside_the_named_ones(capsys, tmp_path, model, sweep, n):
    found, out = effect_of(
        *(capsys, tmp_path, "zero", "embed", "1.2", "--sweep", sweep, "--model", model),
        *("--prompt", PROMPTS[0], "--metric", "kl", "--top", "3"),
    )
    assert len(found.targets) == n + (1 if sweep == "heads" else 2)
    assert found.targets[:2] == ("embed", "1.2") and len(set(found.targets)) == len(found.targets)
    assert f"and {len(found.targets) - 3} more targets" in out
    assert ("layer by head" in out) == (sweep == "heads")


def test_the_grid_is_the_totals_by_layer_and_head(capsys, tmp_path, model):
    found, out = effect_of(
        *(capsys, tmp_path, "zero", "--sweep", "heads", "--model", model),
        *(*both("--prompt", PROMPTS), "--metric", "top1-change"),
    )
    shown = out.split("layer by head")[1].splitlines()[2:5]
    for layer, line in enumerate(shown):
        cells = [float(cell) for cell in line.split()]
        assert cells[0] == layer
        expected = [float(found.sel(target=f"{layer}.{head}").mean()) for head in range(4)]
        assert cells[1:] == pytest.approx(expected, abs=1e-3)


def test_the_largest_effects_come_first_whatever_their_sign(capsys, tmp_path, model):
    found, out = effect_of(
        *(capsys, tmp_path, "zero", "--sweep", "layers", "--model", model),
        *("--prompt", PROMPTS[0], "--metric", "logit", "--answer", " the"),
    )
    order = sorted(found.targets, key=lambda name: -abs(float(found.sel(target=name))))
    shown = [line.split("|")[0].strip() for line in out.splitlines() if line.count("|") > 3]
    assert shown[1:] == order


def test_csv_is_the_long_form(capsys, tmp_path, model):
    table = tmp_path / "o.csv"
    found, _ = effect_of(
        *(capsys, tmp_path, "zero", "attn.1", "0.3", "--model", model, "--csv", str(table)),
        *(*both("--prompt", PROMPTS), "--metric", "loss"),
    )
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["target"] for row in rows] == ["attn.1", "attn.1", "0.3", "0.3"]
    assert [float(row["value"]) for row in rows] == pytest.approx(found.values.flatten().tolist())


def test_prompts_with_their_answers_come_from_a_file(capsys, tmp_path, model):
    file = lines(tmp_path, *(f"{p}\t the\t a" for p in PROMPTS))
    found, _ = effect_of(capsys, tmp_path, "zero", "attn.1", "--model", model, "--prompts", file)
    expected = rp.ablate(
        rp.capture(rp.load(model), PROMPTS),
        "attn.1",
        rp.Zero(),
        metric=rp.logit_diff(" the", " a"),
    )
    assert_same(found, expected)


# Long texts


@pytest.mark.parametrize("prepend_bos", [None, False])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.filterwarnings("ignore::resid_patching.errors.BosWarning")
def test_pieces_of_a_text_are_the_windows_of_the_whole(prose, small_pieces, kind, prepend_bos):
    view = rp.ModelView(zoo.text_model(zoo.BACKENDS[0], kind))
    for length, limit in ((16, None), (40, None), (16, 5), (64, 1)):
        whole = rp.windows(view, PROSE, length=length, limit=limit, prepend_bos=prepend_bos)
        found = TextWindows(view, str(prose), length, prepend_bos, limit)
        rows = [
            row[:n]
            for group in found.groups()
            for row, n in zip(group.tokens.tolist(), group.lengths, strict=True)
        ]
        expected = zip(whole.tokens.tolist(), whole.lengths, strict=True)
        assert rows == [row[:n] for row, n in expected]
        assert found.hash == whole.hash
        assert (found.n_windows, found.n_tokens) == (len(whole), sum(whole.lengths))


def test_whole_windows_leave_out_a_shorter_last_one(prose, small_pieces, model):
    view = rp.ModelView(rp.load(model))
    found = TextWindows(view, str(prose), 40, whole=True)
    assert {n for group in found.groups() for n in group.lengths} == {40}


def text_flags(model, prose, *more):
    return ["--model", model, "--text", str(prose), "--length", "32", *more]


@pytest.mark.full
@pytest.mark.parametrize("metric", ["loss", "kl"])
def test_a_text_in_groups_is_the_text_at_once(capsys, tmp_path, model, prose, small_pieces, metric):
    found, out = effect_of(
        *(capsys, tmp_path, "zero", "attn.1", "1.2", *text_flags(model, prose)),
        *("--metric", metric),
    )
    loaded = rp.load(model)
    whole = rp.capture(loaded, rp.windows(loaded, PROSE, length=32))
    chosen = rp.loss() if metric == "loss" else rp.kl(position=None)
    expected = rp.ablate(whole, ["attn.1", "1.2"], rp.Zero(), metric=chosen)
    assert_same(found, expected)
    assert found.provenance == expected.provenance
    assert f"in {len(whole)} windows of up to 32" in out
    if metric == "loss":
        assert found.perplexity.equals(expected.perplexity)
        shown = next(line for line in out.splitlines() if line.startswith("attn.1 "))
        assert shown.split("|")[5].strip() == f"{found.perplexity['after'][0]:.4g}"


def test_loss_is_the_default_for_a_text_and_limit_its_windows(capsys, tmp_path, model, prose):
    found, out = effect_of(
        capsys, tmp_path, "zero", "attn.1", *text_flags(model, prose, "--limit", "2")
    )
    assert found.metric == "loss per token" and found.values.shape == (1, 2)
    assert "64 tokens in 2 windows" in out and "perplexity" in out and "ratio" in out


def test_a_text_resampled_from_itself_changes_nothing(capsys, tmp_path, model, prose, small_pieces):
    found, _ = effect_of(
        *(capsys, tmp_path, "resample", "attn.1", "--source", str(prose)),
        *text_flags(model, prose),
    )
    assert found.values.shape[1] > 4 and not found.values.any()


def test_a_shuffled_text_gives_no_window_its_own(capsys, tmp_path, model, prose):
    source = tmp_path / "source.txt"
    source.write_text(PROSE[500:] + " John " + PROSE, encoding="utf-8")
    found, _ = effect_of(
        *(capsys, tmp_path, "resample", "attn.1", "--source", str(source), "--seed", "0"),
        *("--pairing", "shuffle", *text_flags(model, prose, "--limit", "4")),
    )
    assert bool((found.values != 0).all())


def test_a_text_takes_its_mean_over_a_text(capsys, tmp_path, model, prose, small_pieces):
    found, _ = effect_of(
        *(capsys, tmp_path, "mean", "attn.1", "--reference", str(prose), "--over", "batch,pos"),
        *text_flags(model, prose),
    )
    loaded = rp.load(model)
    whole = rp.capture(loaded, rp.windows(loaded, PROSE, length=32))
    how = rp.Mean(whole, over=("batch", "pos"))
    assert_same(found, rp.ablate(whole, "attn.1", how, metric=rp.loss()))


def test_a_source_that_is_too_short_is_refused(capsys, tmp_path, model, prose):
    short = tmp_path / "short.txt"
    short.write_text(PROSE[:400], encoding="utf-8")
    argv = ["resample", "attn.1", "--source", str(short), *text_flags(model, prose)]
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == "" and "fewer windows" in err


def test_the_progress_bar_reaches_its_end_and_is_off_without_a_terminal(model):
    captured = rp.capture(rp.load(model), PROMPTS * 3)
    with Progress() as progress:
        assert progress.bar.disable
        progress.bar = type("Bar", (), {"total": 0, "n": 0, "close": lambda self: None})()
        progress.bar.update = lambda n: setattr(progress.bar, "n", progress.bar.n + n)
        progress.expect(len(captured))
        tick = progress.ticker(captured, 3)
        metric = rp.kl()
        rp.ablate(captured, ["attn.0", "1.1", "mlp.2"], rp.Zero(), metric=metric, progress=tick)
        assert progress.bar.n == progress.bar.total == 3 * len(captured)


# Errors


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "zero|mean|resample"),
        (["attn.6"], "invalid choice: 'attn.6'"),
        (["zero"], "no target was given"),
        (["zero", "attn.0"], "no prompt was given"),
        (["zero", "attn.0", "--prompt", "x"], "no metric was given"),
        (["zero", "attn.0", "--prompt", "x", "--answer", " a"], "no metric was given"),
        (["zero", "attn.0", "--prompt", "x", "--metric", "logit"], "needs --answer"),
        (["zero", "attn.0", "--prompt", "x", "--metric", "kl", "--answer", " a"], "reads no"),
        (["zero", "attn.0", "--prompt", "x", "--metric", "bleu"], "invalid choice"),
        (["zero", "attn.0", "--prompt", "x", "--text", "t"], "does not go with"),
        (["zero", "attn.0", "--text", "no-such-text"], "no-such-text does not exist"),
        (["zero", "attn.0", "--text", "."], "is a folder"),
        (
            ["zero", "attn.0", "--prompt", "x", "--metric", "kl", "--limit", "1"],
            "--limit goes with --text",
        ),
        (["zero", "nose.6", "--prompt", "x", "--metric", "kl", "--model", "MODEL"], "nose.6"),
        (["zero", "attn.9", "--prompt", "x", "--metric", "kl", "--model", "MODEL"], "attn.9"),
        (["zero", "0.9", "--prompt", "x", "--metric", "kl", "--model", "MODEL"], "0.9"),
        (
            ["zero", "0.1", "--prompt", "x", "--metric", "kl", "--positions", "50"]
            + ["--model", "MODEL"],
            "position 50",
        ),
        (["zero", "0.1", "--text", "TEXT", "--length", "99999", "--model", "MODEL"], "99999"),
        (["zero", "0.1", "--text", "TEXT", "--positions", "each"], "each goes with --prompt"),
        (["zero", "0.1", "--prompt", "x", "--positions", "last"], "neither a position nor each"),
        (["mean", "attn.0", "--prompt", "x", "--over", "batch"], "--reference"),
        (["mean", "attn.0", "--prompt", "x", "--reference", "TEXT"], "--over"),
        (["resample", "attn.0", "--prompt", "x"], "--source"),
        (
            ["resample", "attn.0", "--prompt", "x", "--source", "TEXT", "--pairing", "shuffle"],
            "needs a seed",
        ),
        (["resample", "0.0", "--prompt", "x", "--source", "TEXT", "--seed", "1"], "draws nothing"),
        (["zero", "attn.0", "--text", "TEXT", "--json", "no/folder/o.json"], "there is no folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys, tmp_path, monkeypatch, model, prose, argv, said
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    argv = [{"MODEL": model, "TEXT": str(prose)}.get(word, word) for word in argv]
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert said in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert list(here.iterdir()) == []


def test_a_text_that_is_not_utf8_is_refused(capsys, tmp_path, model):
    file = tmp_path / "latin.txt"
    file.write_bytes("Fran\xe7ois".encode("latin-1"))
    code, _, err = run(capsys, "zero", "attn.0", "--text", str(file), "--model", model)
    assert code == 2 and "is not UTF-8" in err


@pytest.mark.full
def test_help_answers_at_once_and_without_torch():
    code = "import sys; from resid_patching.cli import main\n"
    code += "main(['ablate', 'mean', '--help']); main(['ablate', '--help']); "
    code += "main(['stream', '--help'])\nassert 'torch' not in sys.modules\nprint('no torch')"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert "no torch" in done.stdout and "--over" in done.stdout and "--overwrite" in done.stdout
    assert seconds < 5  # a bound that a torch import on a busy machine would break


# SmolLM2


@pytest.mark.real
@pytest.mark.shared
def test_the_two_experiments_on_prose(capsys, tmp_path, smollm2_dir, shared_dir):
    prose = shared_dir / "data" / "text" / "wikitext2_raw_test.txt"
    found, out = effect_of(
        *(capsys, tmp_path, "zero", "attn.6", "resid_pre.6", "mlp.0", "--text", str(prose)),
        *("--model", str(smollm2_dir), "--length", "512", "--limit", "1"),
    )
    frame = found.perplexity.set_index("target")
    assert frame["before"].iloc[0] == pytest.approx(20.2, abs=0.3)
    assert frame["ratio"]["attn.6"] == pytest.approx(1.03, abs=0.01)
    assert frame["ratio"]["resid_pre.6"] > 1000
    assert frame["ratio"]["mlp.0"] > 10_000
    assert "512 tokens in 1 window" in out
