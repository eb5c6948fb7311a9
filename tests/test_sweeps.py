"""Long sweeps: rows that are kept and gone on with, and work that several processes share."""

import json
import os
import random
import time
from pathlib import Path

import pytest
import sweep_worker
import torch
import zoo
from launching import ACCELERATE, TORCHRUN, launch
from sweep_worker import FIELDS, KEPT, METRIC, SWEEPS, ablate_line, captured, path_line, sweep

import resid_patching as rp
from resid_patching.ablation.ablating import variants_of
from resid_patching.cli import main, text
from resid_patching.errors import (
    AblationError,
    ResultFormatError,
    SweepMismatchError,
)
from resid_patching.rerun import Share, engine
from resid_patching.rerun.plain import PlainBlocks
from resid_patching.rows import RowFile

PROMPTS = sweep_worker.token_rows(60, 7)


def assert_equal(found, expected):
    """To the last bit, and everything that stands beside the numbers."""
    for field in FIELDS:
        ours, theirs = getattr(found, field), getattr(expected, field)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.nan_to_num(7e7), theirs.nan_to_num(7e7)), field
    assert (found.axes, found.routes) == (expected.axes, expected.routes)
    assert (found.provenance, found.how) == (expected.provenance, expected.how)


def heads(**options):
    """A sweep over the heads of a toy model, on prompts in three groups."""
    run = options.pop("run", None) or captured(PROMPTS)
    how = options.pop("how", rp.Zero())
    targets = options.pop("targets", rp.heads(run.view))
    return rp.ablate(run, targets, how, **{"metric": METRIC, **options})


@pytest.fixture(scope="module")
def model() -> str:
    return str(zoo.text_folder())


@pytest.fixture
def counted(monkeypatch):
    """Counts the rows that are computed and not taken from a file."""
    monkeypatch.setattr("resid_patching.ablation.ablating.Shared", sweep_worker.Counted)
    monkeypatch.setattr(sweep_worker.Counted, "n_rows", 0)
    return sweep_worker.Counted


@pytest.fixture
def kept(tmp_path):
    """The file of a whole sweep."""
    file = tmp_path / "rows.jsonl"
    heads(rows=file)
    return file


# Rows in a file


@pytest.mark.parametrize("name", KEPT)
def test_a_sweep_that_keeps_its_rows_gives_the_same_numbers(tmp_path, name):
    assert_equal(sweep(name, rows=tmp_path / "rows.jsonl"), sweep(name))


def test_a_row_for_each_target_and_group_of_prompts(kept):
    effect = heads()
    head, *rows = map(json.loads, kept.read_text().splitlines())
    assert head["format"] == "resid_patching.rows" and head["identity"]["kind"] == "zero"
    groups = {tuple(row["prompts"]) for row in rows}
    assert len(groups) > 1 and len(rows) == len(groups) * len(effect.targets)
    for row in rows:
        prompts = slice(*row["prompts"])
        number = effect.targets.index(row["target"])
        assert row["baseline"] == effect.baseline[prompts].tolist()
        assert row["patched"] == effect.patched[number, prompts].tolist()
        frozen = torch.tensor(row["frozen"]) - torch.tensor(row["baseline"])
        assert frozen.equal(effect.direct[number, prompts])


@pytest.mark.parametrize("name", ["zero", "each position", "paths side by side"])
def test_a_sweep_that_was_broken_off_goes_on_where_it_was(tmp_path, counted, name):
    file = tmp_path / "rows.jsonl"
    whole = sweep(name, rows=file)
    n, lines = counted.n_rows, file.read_bytes().splitlines(keepends=True)
    stop = len(lines) // 3
    file.write_bytes(b"".join(lines[:stop]) + lines[stop][:40])
    counted.n_rows = 0
    assert_equal(sweep(name, rows=file), whole)
    assert counted.n_rows == n - (stop - 1)
    assert sorted(file.read_bytes().splitlines()) == sorted(b"".join(lines).splitlines())


def test_a_whole_file_is_only_read(kept, counted):
    before = kept.read_bytes()
    assert_equal(heads(rows=kept), heads())
    assert counted.n_rows == 0 and kept.read_bytes() == before


def test_the_file_grows_while_the_sweep_runs(tmp_path):
    file, sizes = tmp_path / "rows.jsonl", []
    heads(rows=file, progress=lambda n: sizes.append(len(file.read_bytes().splitlines())))
    assert sizes == sorted(sizes) and len(set(sizes)) > 2 and sizes[0] < sizes[-1]


def test_numbers_that_are_not_finite_are_kept(tmp_path):
    def metric(logits):
        return torch.tensor([torch.inf, torch.nan, -torch.inf])[: len(logits)]

    options = {"run": captured(PROMPTS[:3]), "metric": metric, "rows": tmp_path / "rows.jsonl"}
    first = heads(**options)
    assert first.patched.isinf().any() and first.patched.isnan().any()
    for line in options["rows"].read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    assert_equal(heads(**options), first)


def test_a_symbolic_link_stays_and_its_file_is_used(tmp_path):
    link, file = tmp_path / "link.jsonl", tmp_path / "file.jsonl"
    link.symlink_to(file)
    heads(rows=link)
    assert link.is_symlink() and len(file.read_bytes().splitlines()) > 10


def test_nothing_to_sweep_keeps_nothing(tmp_path):
    assert heads(targets=[], rows=tmp_path / "rows.jsonl").values.shape[0] == 0


# Rows that are not this sweep's


def changed_model():
    model = zoo.fresh(zoo.BACKENDS[0], dtype=torch.float32)
    with torch.no_grad():
        next(model.parameters()).view(-1)[5] += 1e-3
    return rp.capture(model, PROMPTS)


OTHERS = {
    "kind: zero; this sweep's: mean": lambda: {
        "how": rp.Mean(captured(PROMPTS), over=("batch", "pos"))
    },
    "metric: logit difference 3 - 4; this sweep's: logit difference 3 - 5": lambda: {
        "metric": rp.logit_diff(3, 5)
    },
    "metric: logit difference 3 - 4; this sweep's: KL": lambda: {"metric": rp.kl()},
    "prompts: 60 prompts": lambda: {"run": captured(PROMPTS[::-1])},
    "weights: xxh3": lambda: {"run": changed_model()},
    "dtype: float32; this sweep's: float64": lambda: {
        "run": rp.capture(zoo.build(zoo.BACKENDS[0]), PROMPTS)
    },
    "targets: 0.0; this sweep's: 2.3": lambda: {"targets": rp.heads(captured(PROMPTS).view)[::-1]},
    "plan: .* at all positions": lambda: {"positions": -1},
    "max_bytes": lambda: {
        "run": rp.capture(captured(PROMPTS).view, PROMPTS, max_bytes=rp.run.DEFAULT_MAX_BYTES // 2)
    },
}


@pytest.mark.parametrize("said", OTHERS)
def test_rows_of_another_sweep_are_refused_with_both_named(kept, said):
    before, change = kept.read_bytes(), OTHERS[said]()
    if "weights" in said or "dtype" in said:
        change["targets"] = rp.heads(change["run"].view)
    with pytest.raises(SweepMismatchError, match=said):
        heads(rows=kept, **change)
    assert kept.read_bytes() == before


def test_positions_and_answers_one_a_prompt_tell_sweeps_apart(tmp_path):
    for name, first, second in (
        ("positions", [0] * 60, [0] * 59 + [1]),
        ("tokens scored", [3] * 60, [3] * 59 + [5]),
        ("other positions", [0] * 60, [0] * 59 + [1]),
    ):

        def options(values, name=name):
            if name == "positions":
                return {"positions": values}
            if name == "other positions":
                return {"how": rp.Mean(captured(PROMPTS), over=("batch",), at=values)}
            return {"metric": rp.logit_diff(values, 4)}

        file = tmp_path / f"{name}.jsonl"
        heads(rows=file, **options(first))
        with pytest.raises(SweepMismatchError, match=f"{name}: sha256"):
            heads(rows=file, **options(second))


def test_another_function_of_the_same_name_is_noticed_by_the_clean_run(tmp_path):
    def options(column):
        return {"metric": lambda logits: logits[:, 0, column], "rows": tmp_path / "rows.jsonl"}

    heads(**options(3))
    with pytest.raises(SweepMismatchError, match="the metric or the model has changed"):
        heads(**options(4))


def test_a_cache_of_the_callers_is_no_ground_for_rows(tmp_path):
    model = zoo.build(zoo.BACKENDS[0], dtype=torch.float32)
    tokens = torch.tensor(PROMPTS[0])[None]
    run = rp.capture(model, tokens, cache=model.run_with_cache(tokens)[1])
    with pytest.raises(AblationError, match="without one"):
        heads(run=run, rows=tmp_path / "rows.jsonl")


# Damage


def test_a_changed_digit_is_refused_by_file_and_line(kept):
    lines = kept.read_text().splitlines()
    place = lines[7].index("patched") + 15
    while not lines[7][place].isdigit():
        place += 1
    digit = str((int(lines[7][place]) + 1) % 10)
    lines[7] = lines[7][:place] + digit + lines[7][place + 1 :]
    kept.write_text("\n".join(lines) + "\n")
    before = kept.read_bytes()
    with pytest.raises(ResultFormatError, match=r"rows\.jsonl, line 8, is damaged: its numbers"):
        heads(rows=kept)
    assert kept.read_bytes() == before


def test_no_changed_byte_changes_a_number(kept):
    content, generator = bytearray(kept.read_bytes()), random.Random(0)
    identity = RowFile(kept)._identities[0]
    expected = {(row.target, row.prompts): row.values for row in RowFile(kept).rows_of(0, identity)}
    for place in [*generator.sample(range(len(content)), 150), len(content) - 1]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << generator.randrange(7)
        kept.write_bytes(damaged)
        try:
            found = RowFile(kept).rows_of(0, identity)
        except (ResultFormatError, SweepMismatchError):
            continue
        for row in found:
            assert torch.equal(row.values, expected[row.target, row.prompts]), place


@pytest.mark.parametrize(
    "content", [b"mine\n", b"mine", b"[]\n", b'{"format": "resid_patching"}\n', b"\xff\x00\n"]
)
def test_a_file_of_another_kind_is_refused_and_stays(tmp_path, content):
    file = tmp_path / "mine.txt"
    file.write_bytes(content)
    with pytest.raises(ResultFormatError, match=r"mine\.txt"):
        heads(rows=file)
    assert file.read_bytes() == content


@pytest.mark.parametrize("length", [0, 1, 20, 200])
def test_a_first_line_that_was_cut_short_is_begun_anew(kept, length):
    whole = kept.read_bytes()
    kept.write_bytes(whole[:length])
    heads(rows=kept)
    assert kept.read_bytes() == whole


def test_rows_of_another_file_that_are_pasted_in_are_refused(kept, tmp_path):
    other = tmp_path / "other.jsonl"
    heads(rows=other, positions=-1)
    with kept.open("ab") as file:
        file.write(other.read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(ResultFormatError, match="is damaged"):
        heads(rows=kept)


def test_two_sweeps_do_not_write_into_one_file(tmp_path):
    file, told = tmp_path / "rows.jsonl", []

    def also(n):
        if not told:
            told.append(n)
            heads(rows=file)

    with pytest.raises(SweepMismatchError, match="something else has written"):
        heads(rows=file, progress=also)
    assert_equal(heads(rows=file), heads())


# By command


def command(capsys, *argv):
    code = main(["ablate", *argv])
    _, err = capsys.readouterr()
    return code, err


@pytest.fixture
def folder(tmp_path):
    sweep_worker.prompt_file(tmp_path)
    return tmp_path


@pytest.mark.full
def test_a_text_keeps_its_groups_of_windows_apart(capsys, tmp_path, monkeypatch, counted, model):
    monkeypatch.setattr(text, "GROUP_TOKENS", 100)
    prose = tmp_path / "prose.txt"
    prose.write_text(zoo.CORPUS * 3, encoding="utf-8")
    words = f"zero 0.0 mlp.1 --model {model} --text {prose} --length 16".split()
    ends = [*words, "--rows", str(tmp_path / "rows.jsonl"), "--json"]
    assert command(capsys, *words, "--json", str(tmp_path / "plain.json"))[0] == 0
    assert command(capsys, *ends, str(tmp_path / "kept.json")) == (0, "")
    file = tmp_path / "rows.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    heads_of_parts = [n for n, line in enumerate(lines) if b'"format"' in line]
    assert len(heads_of_parts) > 2
    n = counted.n_rows
    stop = heads_of_parts[2] + 1
    file.write_bytes(b"".join(lines[:stop]))
    counted.n_rows = 0
    assert command(capsys, *ends, str(tmp_path / "again.json")) == (0, "")
    assert counted.n_rows == n - (stop - 3)
    results = [
        rp.Effect.from_json((tmp_path / f"{name}.json").read_text())
        for name in ("plain", "kept", "again")
    ]
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])
    prose.write_text(zoo.CORPUS[5:] * 3, encoding="utf-8")
    code, err = command(capsys, *ends, str(tmp_path / "again.json"))
    assert code == 2 and "rows of another sweep" in err and err.count("\n") == 1


def bad_files(folder: Path):
    (folder / "dir").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "mine.txt").write_text("mine\n")
    yield folder / "dir", "is a folder"
    yield folder / "pipe", "pipe or device"
    yield folder / "mine.txt", "no file of rows"
    yield folder / "prompts.txt", "the file that --prompts reads"
    yield folder / "none" / "rows.jsonl", "there is no folder"
    yield folder / "both.json", "two outputs"


def test_a_file_that_cannot_keep_rows_is_one_line(capsys, folder):
    for path, said in bad_files(folder):
        words = f"zero 0.0 --model none --prompts {folder / 'prompts.txt'} --metric kl".split()
        code, err = command(
            capsys, *words, "--rows", str(path), "--json", str(folder / "both.json")
        )
        assert code == 2 and said in err and err.count("\n") == 1, err
    assert (folder / "mine.txt").read_text() == "mine\n"


def test_linearised_paths_are_not_kept(capsys, folder):
    words = path_line(folder, "none", "out")
    assert main(["path-patch", *words, "--linearised"]) == 2
    assert "--linearised" in capsys.readouterr().err


# Groups of prompts and routes


@pytest.mark.parametrize("worked", ["widest", "shortest"])
def test_each_group_of_prompts_has_a_control_of_its_own_whoever_works_it(monkeypatch, worked):
    """What only long prompts show, such as local attention, sends these alone another way."""
    right = PlainBlocks.attend

    def only_short(self, q, *rest):
        return right(self, q, *rest) * (1 + 1e-3 * (q.shape[2] > 10))

    class Part(Share):
        def deal(self, chunks):
            widths = [run.prompts.lengths[rows.start] for rows in chunks]
            assert set(widths) == {3, 30}
            return [chunks[widths.index(30 if worked == "widest" else 3)]]

    monkeypatch.setattr(PlainBlocks, "attend", only_short)
    model = zoo.fresh_named("gpt2_untied")
    run = rp.capture(model, [[1, 2, 3]] * 400 + [list(range(1, 31))] * 40)
    groups = [(head,) for head in rp.heads(run.view)[:2]]
    variants = variants_of(run, groups, rp.Zero(), [run.locate(None)])
    found = engine.rerun(run, variants, METRIC.bind(run), share=Part())
    assert found.routes == (("replay",) if worked == "widest" else ("plain",))


# Several processes


@pytest.fixture(scope="module")
def launched(tmp_path_factory, model):
    """Two processes work all sweeps, and at last one is killed; the other's exit code and words."""
    folder = tmp_path_factory.mktemp("launched")
    sweep_worker.prompt_file(folder)
    code, _, err, _ = launch(*TORCHRUN, sweep_worker.__file__, folder, model)
    told = [json.loads((folder / f"told.{rank}.json").read_text()) for rank in range(2)]
    waited = time.time() - (folder / "told.1.json").stat().st_mtime
    return folder, told, code, err, waited


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("name", SWEEPS)
def test_two_processes_find_what_one_finds(launched, name):
    folder, told, *_ = launched
    alone = sweep(name)
    for rank in range(2):
        found = torch.load(folder / f"{name}.{rank}.pt")
        for field in FIELDS:
            ours, theirs = found[field], getattr(alone, field)
            assert torch.equal(ours.nan_to_num(7e7), theirs.nan_to_num(7e7)), (rank, field)
        assert told[rank][name]["routes"] == list(alone.routes)
        assert told[rank][name]["rows"] > 0
    if name in KEPT:
        assert_equal(sweep(name, rows=folder / f"{name}.jsonl"), alone)


@pytest.mark.full
@pytest.mark.once
def test_processes_that_were_given_different_prompts_are_refused_in_all(launched):
    for told in launched[1]:
        assert told["unequal"].startswith("UnequalProcessesError: ")
        assert "5 prompts" in told["unequal"] and "6 prompts" in told["unequal"]


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory, model):
    """Two processes that `accelerate launch` starts work the commands."""
    folder = tmp_path_factory.mktemp("accelerated")
    sweep_worker.prompt_file(folder)
    code, _, err, _ = launch(*ACCELERATE, sweep_worker.__file__, folder, model, "commands")
    assert code == 0, err[-3000:]
    return folder, [json.loads((folder / f"told.{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def by_one(tmp_path_factory, model):
    """The commands in one process."""
    folder = tmp_path_factory.mktemp("by_one")
    sweep_worker.prompt_file(folder)
    for verb, line, name in COMMANDS:
        assert main([verb, *line(folder, model, name)]) == 0
    return folder


COMMANDS = (("ablate", ablate_line, "script"), ("path-patch", path_line, "path-patch"))


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("launcher", ["launched", "accelerated"])
def test_commands_share_their_sweeps_and_one_process_speaks(launcher, by_one, request):
    folder, told, *_ = request.getfixturevalue(launcher)
    assert [(t["script"], t["paths"], t["printed"] > 0) for t in told] == [
        (0, 0, True),
        (0, 0, False),
    ]
    for _, _, name in COMMANDS:
        together, alone = ((where / f"{name}.json").read_text() for where in (folder, by_one))
        assert_equal(rp.Effect.from_json(together), rp.Effect.from_json(alone))
        together, alone = (
            sorted((where / f"{name}.jsonl").read_bytes().splitlines())
            for where in (folder, by_one)
        )
        assert together == alone


@pytest.mark.full
@pytest.mark.once
def test_a_killed_process_ends_the_sweep_and_one_process_finishes_it(launched, counted, model):
    folder, _, code, err, waited = launched
    assert code != 0 and waited < 60
    ours = [line for line in err.splitlines() if "resid-patching ablate: error:" in line]
    assert len(ours) == 1 and "Traceback (most" not in err.split(ours[0])[0]
    n_kept = len((folder / "killed.jsonl").read_bytes().splitlines()) - 1
    assert not (folder / "killed.json").exists()
    whole = rp.Effect.from_json((folder / "script.json").read_text())
    n_rows = len((folder / "script.jsonl").read_bytes().splitlines()) - 1
    assert 0 < n_kept < n_rows
    assert main(["ablate", *ablate_line(folder, model, "killed")]) == 0
    assert counted.n_rows == n_rows - n_kept
    assert_equal(rp.Effect.from_json((folder / "killed.json").read_text()), whole)
