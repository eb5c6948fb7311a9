"""Numbers that are not finite, lenses on other layers, texts in rows, and what is held out."""

import copy
import json
import math
import warnings

import pytest
import torch
import zoo
import zoo_lens

import resid_patching as rp
from resid_patching.cli import main
from resid_patching.cli.text import TextWindows
from resid_patching.errors import (
    DivergedError,
    LensMismatchError,
    NotFiniteError,
    PromptError,
    UnverifiedLensWarning,
)
from resid_patching.lens import checkpoint, data, resume
from resid_patching.lens.fingerprint import body_sketch
from resid_patching.models import DEMO_FOLDER

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
P = "When Mary and John went to the store, John gave a drink to"
SENTENCES = zoo.CORPUS.strip().split(". ")


def quick(model, texts, **options):
    settings = {
        "length": 16,
        "validation_tokens": 64,
        "steps": 3,
        "step_tokens": 20,
        "progress": False,
    }
    return rp.fit_tuned_lens(model, texts, **{**settings, **options})


# S11: overflow in validation text


def overflowing(backend):
    """A float16 model whose stream is infinite behind token 5 and nowhere else."""
    new = {
        "hooked": zoo.fresh,
        "bridge": lambda _, dtype: zoo.fresh_named("gpt2_untied", dtype=dtype),
    }
    model = new[backend](backend, dtype=torch.float16)
    with torch.no_grad():
        model.embed.W_E[5, 0] = 4e4
        model.blocks[0].mlp.b_out[0] = 4e4
    return model


def windows_without_5(count):
    windows = zoo_lens.random_windows(count)
    return windows.masked_fill(windows == 5, 6)


@backends
def test_s11_validation_text_that_overflows_is_refused_before_the_fit_begins(backend, tmp_path):
    model = overflowing(backend)
    held = windows_without_5(4)
    held[2, 7] = 5
    with pytest.raises(DivergedError, match="validation text: .* NaN or infinite in float16"):
        quick(model, windows_without_5(40), validation=held, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    fitted = quick(model, windows_without_5(40), folder=tmp_path)
    assert all(map(math.isfinite, fitted.record["validation"]["tuned"]))


@backends
def test_s11_training_text_that_overflows_names_the_dtype(backend):
    training = windows_without_5(40)
    training[20, 3] = 5
    with pytest.raises(DivergedError, match="ridge: .* NaN or infinite in float16"):
        quick(overflowing(backend), training, validation=windows_without_5(4))


READINGS = {
    "stream": lambda run: rp.stream_report(run),
    "logit lens": lambda run: rp.logit_lens(run).kl,
    "marginal bias": lambda run: rp.logit_lens(run).marginal_bias(),
    "tuned lens": lambda run: rp.TunedLens.identity(run.view)(run).entropy,
    "parts": lambda run: rp.decompose(run, by="component").vectors(positions=None),
    "attribution": lambda run: rp.direct_logit_attribution(run, 3, 4, by="component"),
}


@backends
@pytest.mark.parametrize("name", READINGS)
def test_s11_nan_passes_for_0_nowhere(backend, name):
    """A report over prompts of which one is not finite refuses it by its number and the dtype."""
    model, read = overflowing(backend), READINGS[name]
    fine, wrong = list(range(10, 20)), [*range(10, 14), 5]
    read(rp.capture(model, [fine, fine[:4]]))  # where a prompt has no position, NaN is right
    with pytest.raises(NotFiniteError, match="prompt 1: .* NaN or infinite in float16"):
        read(rp.capture(model, [fine, wrong]))


@pytest.mark.once
def test_s11_an_intervention_that_overflows_is_named():
    run = rp.capture(zoo.build(zoo.BACKENDS[0], dtype=torch.float32), [[3, 1, 4]])
    with pytest.raises(NotFiniteError, match="the stream under write scale 1e"):
        rp.stream_report(run, rp.WriteScale(1e30))


@pytest.mark.once
def test_s11_a_report_whose_numbers_are_lost_has_no_exactness():
    found = rp.stream_report(rp.capture(zoo.build(zoo.BACKENDS[0]), zoo.RAGGED))
    assert found.gap.isnan().any() and found.exactness < 1e-11
    found.gap[1, 0] = torch.nan
    assert math.isnan(found.exactness) and math.isnan(found.relative_exactness)


@pytest.mark.once
def test_s11_a_validation_kl_that_is_no_number_ends_the_fit(monkeypatch):
    """Where the states are finite and the translator is not."""
    from resid_patching.lens import harvest

    real, calls = harvest.kl_only, []

    def lost(*args):
        calls.append(1)
        return real(*args) * (torch.nan if len(calls) > 12 else 1)

    monkeypatch.setattr(harvest, "kl_only", lost)
    with pytest.raises(DivergedError, match="the validation KL is nan"):
        quick(zoo.build(zoo.BACKENDS[0]), zoo_lens.random_windows(40), look_every=1)


# S18: the same head, another body


def tuned_elsewhere(backend="auto"):
    """The demo model with layers 1 and 2 changed, as by a fine-tune."""
    model = rp.load("demo", backend=backend)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in (1, 2):
            for module in (model.blocks[layer].attn, model.blocks[layer].mlp):
                for parameter in module.parameters():
                    parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    return model


@backends
def test_s18_a_lens_on_other_layers_under_the_same_head_warns_and_is_marked(backend):
    own = rp.load("demo", backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lens = rp.TunedLens.load("demo", own)
        plan = lens(rp.capture(own, P)).kl.provenance.plan
    assert "unverified" not in plan
    other = tuned_elsewhere(backend)
    with pytest.warns(UnverifiedLensWarning, match="other layers: .* resid_post.1 differs"):
        found = rp.TunedLens.load("demo", other)
    run = rp.capture(other, P)
    with pytest.warns(UnverifiedLensWarning, match="other layers"):
        readout = found(run)
    assert "tuned lens, body unverified" in readout.kl.provenance.plan
    for use in (
        lambda: lens(run),
        lambda: lens.transfer(run),
        lambda: lens.logits(other, torch.zeros(1, 128), "resid_pre.0"),
        lambda: lens.as_lens(other),
        lambda: lens.rebase(other),
    ):
        with pytest.warns(UnverifiedLensWarning, match="other layers"):
            used = use()
    assert used.mark(other) == ", body unverified"  # moving a lens does not make it the model's
    assert used.mark(own) == ""
    with pytest.warns(UnverifiedLensWarning):
        assert "body unverified" in lens.transfer(run).provenance.plan


@backends
def test_s18_another_head_is_refused_as_before(backend):
    other = tuned_elsewhere(backend)
    with torch.no_grad():
        other.unembed.W_U[3, 100] += 1e-3
    with pytest.raises(LensMismatchError, match="whose W_U is"):
        rp.TunedLens.load("demo", other)


def changes(model):
    """One weight of each kind in turn, changed by a hundredth of its spread."""
    block = model.blocks[1]
    yield "embedding", model.embed.W_E
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        yield name, getattr(block.attn, name)
    for name in ("W_in", "W_out", "b_in", "b_out"):
        yield name, getattr(block.mlp, name)
    yield "norm", block.ln1.w


@pytest.mark.skipif("hooked" not in zoo.BACKENDS, reason="its weights are changed in place")
def test_s18_a_change_of_any_weight_is_seen():
    base = zoo.build("hooked", dtype=torch.float32)
    lens = zoo_lens.random_lens(base)
    for number, (name, _) in enumerate(changes(zoo.build("hooked"))):
        model = zoo.fresh("hooked", dtype=torch.float32)
        with torch.no_grad():
            weight = list(changes(model))[number][1]
            weight.add_(0.01 * weight.std() * torch.randn_like(weight))
        assert lens.mark(model) == ", body unverified", name


@pytest.mark.skipif("hooked" not in zoo.BACKENDS, reason="there is one backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "neox_parallel", "llama_grouped", "neo", "mistral"])
def test_s18_the_sketch_does_not_depend_on_the_backend(name, dtype, tmp_path):
    zoo.save(tmp_path, zoo.CONFIGS[name](), zoo.byte_level_tokenizer())
    lens = rp.TunedLens.identity(rp.load(tmp_path, backend="hooked", dtype=dtype))
    assert lens.mark(rp.load(tmp_path, backend="bridge", dtype=dtype)) == ""


@backends
@pytest.mark.parametrize("how", ["fold", "centre unembed", "centre writes", "fold centre writes"])
def test_s18_the_sketch_does_not_depend_on_the_processing(backend, how):
    model, processed = zoo_lens.twins(how)
    lens = rp.TunedLens.identity(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnverifiedLensWarning)
        moved = lens.rebase(processed)
    assert moved.mark(processed) == moved.mark(model) == ""


@pytest.mark.skipif("hooked" not in zoo.BACKENDS, reason="a bridge of it is cast elsewhere")
def test_s18_a_lens_moved_to_another_dtype_is_compared_in_that_one():
    """bfloat16 rounds the states by a hundredth; what it rounded is not held against float32."""
    rounded = zoo.build("hooked", dtype=torch.bfloat16)
    wide = copy.deepcopy(rounded).to(torch.float32)
    moved = rp.TunedLens.identity(rounded).rebase(wide)
    assert moved.fingerprint.dtype == "float32" and moved.mark(wide) == ""


@backends
def test_s18_the_shipped_lens_is_the_models_in_every_state(backend):
    lens = rp.TunedLens.load("demo", rp.load("demo", backend=backend))
    for options in ({"processing": "folded"}, {"dtype": torch.float64}):
        assert lens.mark(rp.load("demo", backend=backend, **options)) == ""
    assert lens.mark(rp.load("demo", backend=backend, dtype=torch.bfloat16)) == ""
    assert lens.body is not None
    assert json.loads((DEMO_FOLDER / "lens" / checkpoint.CONFIG).read_text())["version"] == 2


@pytest.mark.once
def test_s18_files_of_version_1_load_and_are_unverified_for_the_body(tmp_path):
    model = zoo.build(zoo.BACKENDS[0])
    zoo_lens.random_lens(model).save(tmp_path)
    assert rp.TunedLens.load(tmp_path, model).mark(model) == ""
    zoo_lens.rewrite(tmp_path, lambda c: c.update(version=1), lambda tensors: tensors.pop("body"))
    with pytest.warns(UnverifiedLensWarning, match="unverified for the layers before the readout"):
        old = rp.TunedLens.load(tmp_path, model)
    plan = old(rp.capture(model, [[3, 1, 4]])).kl.provenance.plan
    assert "body unverified" in plan and old.body is None
    old.save(tmp_path / "again")
    with pytest.warns(UnverifiedLensWarning):
        assert rp.TunedLens.load(tmp_path / "again", model).body is None


@backends
def test_s18_under_hooks_of_the_caller_nothing_is_compared_and_nothing_is_claimed(backend):
    model = zoo.fresh(backend)
    lens = zoo_lens.random_lens(model)
    seen = []
    name = "blocks.0.hook_resid_pre"
    with model.hooks([(name, lambda t, hook: seen.append(1))]), warnings.catch_warnings():
        warnings.simplefilter("error", UnverifiedLensWarning)
        assert body_sketch(rp.ModelView(model)) is None
        assert lens.mark(model) == ", body unverified"
        fitted = rp.TunedLens.identity(model)
    assert fitted.body is None
    assert lens.mark(model) == ""


@backends
def test_s18_the_sketch_leaves_the_model_as_it_was(backend):
    model = zoo.fresh(backend)
    model(torch.tensor([[3, 1, 4]]))  # a bridge puts hooks of its own on at the first call
    before = zoo.snapshot(model)
    body_sketch(rp.ModelView(model))
    assert not list(zoo.differences(before, zoo.snapshot(model)))


# S19: texts in rows


@pytest.fixture(scope="module")
def model():
    return str(zoo.text_folder())


@pytest.fixture
def rows(tmp_path):
    """The corpus as JSON lines, a sentence a row."""
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(SENTENCES)]
    path.write_text("\n".join([*lines[:3], "", *lines[3:]]) + "\n", encoding="utf-8")
    return path


TINY = ("--tokens", "240", "--validation-tokens", "48", "--length", "12", "--steps", "0")


def run(capsys, *argv):
    code = main(list(map(str, argv)))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.once
def test_s19_a_fit_reads_the_column_of_a_jsonl_file(capsys, tmp_path, model, rows):
    fit = ("tuned-lens", "fit", "--model", model, *TINY)
    code, out, err = run(capsys, *fit, "--text", rows, "--out", tmp_path / "lens")
    assert code == 0, err
    assert "data.jsonl (rows by 'text')" in " ".join(out.split())
    of_rows = rp.TunedLens.load(tmp_path / "lens", rp.load(model))
    settings = {"tokens": 240, "validation_tokens": 48, "length": 12, "steps": 0}
    for texts in (SENTENCES, rows, [{"text": text} for text in SENTENCES]):
        own = rp.fit_tuned_lens(rp.load(model), texts, progress=False, **settings)
        assert own.record["data_sha256"] == of_rows.record["data_sha256"]
        assert torch.equal(own.weight, of_rows.weight)
    renamed = tmp_path / "other.JSONL"
    renamed.write_text(rows.read_text().replace('"text"', '"body"'))
    more = ("--text", renamed, "--text-key", "body", "--out", tmp_path / "other")
    code, out, err = run(capsys, *fit, *more)
    assert code == 0 and "(rows by 'body')" in " ".join(out.split()), err
    again = rp.TunedLens.load(tmp_path / "other", rp.load(model))
    assert again.record["data_sha256"] == of_rows.record["data_sha256"]


@pytest.mark.once
def test_s19_every_text_flag_reads_rows_each_in_windows_of_its_own(capsys, tmp_path, model, rows):
    view = rp.ModelView(rp.load(model))
    found = TextWindows(view, str(rows), 12)
    ids = [
        row[:n]
        for group in found.groups()
        for row, n in zip(group.tokens.tolist(), group.lengths, strict=True)
    ]
    expected = []
    for text in SENTENCES:
        cut = rp.windows(view, text, length=12)
        expected += [
            row[:n] for row, n in zip(cut.tokens.tolist(), cut.lengths, strict=True) if n > 1
        ]
    assert ids == expected and found.n_documents == len(SENTENCES)
    assert found.estimate == found.n_windows

    said = f"data.jsonl, 'text' of {len(SENTENCES)} rows"
    rp.TunedLens.identity(view).save(tmp_path / "lens")
    evaluated = ("tuned-lens", "eval", "--lens", tmp_path / "lens", "--text", rows)
    ablated = ("ablate", "mean", "attn.1", "--over", "batch,pos", "--text", rows)
    ablated += ("--reference", rows)
    for argv in (evaluated, ablated):
        code, out, err = run(capsys, *argv, "--model", model, "--length", "12")
        assert code == 0, err
        assert said in " ".join(out.split())


WRONG = {
    "no JSON": ("plain words", "this is no JSON"),
    "no object": ('["text"]', "a JSON object was expected"),
    "another key": ('{"body": "x"}', "the row has 'body', but no 'text'"),
    "no text": ('{"text": 3}', "'text' is a text; found '3'"),
}


@pytest.mark.once
@pytest.mark.parametrize("command", ["fit", "eval", "ablate"])
@pytest.mark.parametrize("wrong", WRONG)
def test_s19_a_row_without_text_is_one_line_with_its_number(
    capsys, tmp_path, model, rows, command, wrong
):
    line, said = WRONG[wrong]
    lines = rows.read_text().split("\n")
    bad = tmp_path / "bad.jsonl"
    rp.TunedLens.identity(rp.load(model)).save(tmp_path / "lens")
    argv = {
        "fit": ("tuned-lens", "fit", "--out", tmp_path / "new", *TINY),
        "eval": ("tuned-lens", "eval", "--lens", tmp_path / "lens", "--length", "12"),
        "ablate": ("ablate", "zero", "attn.1", "--length", "12"),
    }[command]
    capsys.readouterr()
    for number in (1, 5):
        bad.write_text("\n".join([*lines[: number - 1], line, *lines[number - 1 :]]))
        code, out, err = run(capsys, *argv, "--text", bad, "--model", model)
        assert code == 2 and out == ""
        assert f"bad.jsonl, line {number}: {said}" in err and len(err.splitlines()) == 1


@pytest.mark.once
def test_s19_tables_and_keys_without_rows_are_refused(capsys, tmp_path, model, rows):
    fit = ("tuned-lens", "fit", "--model", model, *TINY, "--out", tmp_path / "new")
    for name in ("data.json", "data.csv", "data.tsv"):
        (tmp_path / name).write_text('{"text": "the dog"}')
        code, _, err = run(capsys, *fit, "--text", tmp_path / name)
        assert code == 2 and "whose syntax would be read as text" in err
        with pytest.raises(PromptError, match="whose syntax would be read"):
            quick(rp.load(model), tmp_path / name)
    (tmp_path / "prose.txt").write_text(zoo.CORPUS)
    code, _, err = run(capsys, *fit, "--text", tmp_path / "prose.txt", "--text-key", "text")
    assert code == 2 and "--text-key is for a .jsonl file" in err
    (tmp_path / "empty.jsonl").write_text('\n{"text": ""}\n')
    code, _, err = run(capsys, *fit, "--text", tmp_path / "empty.jsonl")
    assert code == 2 and "empty.jsonl holds no text" in err
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(rows.read_bytes() + b'{"text": "caf\xe9"}\n')
    code, _, err = run(capsys, *fit[:4], "--out", tmp_path / "new", "--text", latin)
    number = len(SENTENCES) + 2
    assert code == 2 and f"latin.jsonl, line {number}: this is not UTF-8 text" in err


# S20: what is held out


def view_of_text():
    return rp.ModelView(zoo.text_model(zoo.BACKENDS[0]))


def read(texts, **options):
    settings = {"length": 12, "tokens": None, "validation_tokens": 36}
    return data.read_windows(view_of_text(), texts, **{**settings, **options})


def articles(count, tokens=40):
    """Documents that share no token with one another."""
    return [[10 + n] * tokens for n in range(count)]


def documents_of(windows):
    """Which documents' tokens are in some windows."""
    return {token - 10 for token in windows[:, 1:].flatten().tolist()}


@pytest.mark.once
@pytest.mark.parametrize("tokens", [None, 120])
def test_s20_no_document_is_in_both_training_and_validation(tokens):
    texts = articles(8)
    found = read(texts, tokens=tokens)
    held, trained = (documents_of(w) for w in (found.validation, found.training))
    assert held == {0} and trained and not held & trained
    assert found.held_out.startswith("the first 1 of ")
    more = read(texts, tokens=tokens, validation_tokens=60)
    assert documents_of(more.validation) == {0, 1} and len(more.validation) == 5
    assert not {0, 1} & documents_of(more.training)


@pytest.mark.once
def test_s20_validation_is_on_the_same_text_however_much_is_trained_on():
    texts = articles(20)
    found = [read(iter(texts), tokens=tokens) for tokens in (60, 120, 240)]
    assert all(torch.equal(found[0].validation, other.validation) for other in found)
    assert [len(other.training) for other in found] == [5, 10, 20]


@pytest.mark.once
@pytest.mark.parametrize("tokens", [None, 240])
def test_s20_of_one_document_a_block_at_the_end_is_held_out(tokens):
    whole = zoo.CORPUS * 3
    found = read(whole, tokens=tokens)
    assert found.held_out == "one block at the end" and len(found.validation) == 3
    # Training, then validation, is the text itself, window after window.
    count = len(found.training)
    everything = torch.cat([found.training, found.validation])
    plain = rp.windows(view_of_text(), whole, length=12, limit=len(everything)).tokens
    assert torch.equal(everything[:count], plain[:count])
    assert torch.equal(everything[count:, :-1], plain[count:, :-1])
    ids = zoo_lens.random_windows(30, 12, 300)
    of_ids = read(ids)
    assert torch.equal(torch.cat([of_ids.training, of_ids.validation]), ids)


@pytest.mark.once
def test_s20_a_block_is_held_out_where_too_little_would_be_left():
    long, short = articles(2, 200)[0], articles(2, 10)[1]
    assert read([long, short]).held_out == "one block at the end"
    assert read([short, long], validation_tokens=24).held_out == "one block at the end"
    assert read([long * 2, *articles(9, 20)[1:]]).held_out == "one block at the end"
    assert read([long, *articles(9, 90)[1:]]).held_out == "the first 1 of 9 documents"


@pytest.mark.once
def test_s20_the_record_and_the_printed_text_say_which(capsys, tmp_path, model, rows):
    fit = ("tuned-lens", "fit", "--model", model, *TINY)
    prose = tmp_path / "prose.txt"
    prose.write_text(zoo.CORPUS)
    for number, (given, said) in enumerate(
        [
            (("--text", rows), "documents"),
            (("--text", prose), "one block at the end"),
            (("--text", prose, "--text", prose), "the first 1 of 2 documents"),
            (("--text", prose, "--validation", rows), "a text of its own"),
        ]
    ):
        out = tmp_path / str(number)
        code, printed, err = run(capsys, *fit, *given, "--out", out)
        assert code == 0, err
        held_out = json.loads((out / "config.json").read_text())["record"]["validation"]["held_out"]
        assert said in held_out and f"held out: {held_out}" in " ".join(printed.split())
    demo = json.loads((DEMO_FOLDER / "lens" / "config.json").read_text())
    assert demo["record"]["validation"]["held_out"] == "a text of its own"


def as_of_version_2(folder, **identity):
    about, tensors = resume.read(folder)
    old = {**about, "version": 2, "identity": {**about["identity"], **identity}}
    del old["sha256"]
    old["sha256"] = resume._checksum(old, tensors)
    content = resume.safetensors.torch.save(tensors, {"about": json.dumps(old)})
    (folder / resume.STATE).write_bytes(content)


@pytest.mark.once
def test_s20_an_earlier_versions_state_goes_on_where_its_windows_are_these_and_else_says_why(
    tmp_path,
):
    model, windows = zoo.build(zoo.BACKENDS[0]), zoo_lens.random_windows(40)
    options = {"folder": tmp_path, "save_every": 1}
    whole = quick(model, windows, **options)
    as_of_version_2(tmp_path)
    again = quick(model, windows, **options)
    assert torch.equal(again.weight, whole.weight) and again.record == whole.record
    as_of_version_2(tmp_path, data="0" * 64)
    with pytest.raises(LensMismatchError, match="validation windows lay between the training"):
        quick(model, windows, **options)


def test_s18_deep_copies_of_a_lens_keep_what_it_knows():
    lens = rp.TunedLens.identity(zoo.build(zoo.BACKENDS[0]))
    assert torch.equal(copy.deepcopy(lens).body, lens.body)
