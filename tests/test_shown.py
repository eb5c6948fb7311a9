"""What results say of themselves, results side by side, and results read back."""

import dataclasses
import json
import subprocess
import warnings

import pytest
import torch
import zoo
import zoo_lens

import resid_patching as rp
from resid_patching.cli import COMMANDS, main
from resid_patching.errors import ResultFormatError
from resid_patching.files import checksum

pytestmark = pytest.mark.once

PROMPTS = ["the dog saw the cat", "Mary and John went to the store"]
DIFF = rp.logit_diff(" the", " a")


@pytest.fixture(scope="module")
def model():
    return zoo.text_model(zoo.BACKENDS[0])


@pytest.fixture(scope="module")
def run(model):
    return rp.capture(model, PROMPTS)


KINDS = {
    "effect": lambda run: rp.ablate(run, rp.heads(run), rp.Zero(), metric=DIFF),
    "joint": lambda run: rp.ablate(run, ["0.1", "mlp.1"], rp.Zero(), metric=DIFF, joint=True),
    "each": lambda run: rp.ablate(run, ["0.1"], rp.Zero(), metric=DIFF, positions="each"),
    "loss": lambda run: rp.ablate(run, ["0.1", "mlp.1"], rp.Zero(), metric=rp.loss()),
    "paths": lambda run: rp.ablate(
        run,
        rp.heads(run),
        rp.Path(to=rp.receivers("1.0.q", "logits"), using=rp.Zero(), mlps="freeze"),
        metric=DIFF,
    ),
    "attribution": lambda run: rp.direct_logit_attribution(run, " the", " a", by="head"),
    "by position": lambda run: rp.direct_logit_attribution(run, " the", " a", positions=None),
    "stream": lambda run: rp.stream_report(run, rp.WriteScale(0.5)),
    "kl": lambda run: rp.logit_lens(run).kl,
    "tokens": lambda run: rp.logit_lens(run).top_tokens(3),
    "lens": rp.logit_lens,
    "tuned lens": lambda run: zoo_lens.random_lens(run.view.model),
    "attention": lambda run: rp.attention_patterns(run, ["0.1", "2.3"]),
    "grid": lambda run: KINDS["effect"](run).grid(),
    "comparison": lambda run: KINDS["effect"](run) - KINDS["effect"](run),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_result_says_what_it_is_in_text_and_in_a_notebook(run, kind):
    result = KINDS[kind](run)
    assert "\n" not in repr(result) and len(repr(result)) < 400
    text, page = result.summary(3), result._repr_html_()
    assert text.startswith(repr(result)) and "<script" not in page and "<table>" in page
    frame, names = result.table(), result.headings()
    assert set(names) <= set(map(str, frame.columns))
    assert all(name in text for name in names.values())
    assert result.caveats() or kind == "grid"
    for line in (*(f"{name}: {fact}" for name, fact in result.facts()), *result.caveats()):
        assert line in text
    assert result.pictures()


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("lens", "tuned lens")])
def test_every_result_is_read_back_by_its_kind(run, kind, tmp_path):
    result = KINDS[kind](run)
    path = tmp_path / "o.json"
    path.write_text(result.to_json(), encoding="utf-8")
    again = rp.load_result(path)
    assert type(again) is type(result) and again.axes == result.axes
    torch.testing.assert_close(again.values, result.values, rtol=0, atol=0, equal_nan=True)
    assert again.summary() == result.summary()


def test_what_a_command_writes_is_read_back(tmp_path, model):
    path = tmp_path / "o.json"
    argv = ["dla", "--model", str(zoo.text_folder()), "--prompt", PROMPTS[0], "--json", str(path)]
    assert main(argv) == 0
    assert isinstance(rp.load_result(path), rp.Attribution)


def test_linearised_paths_are_read_back(run, tmp_path):
    path = rp.Path(to="logits", using=rp.Zero(), mlps="freeze")
    result = rp.linearised_paths(run, ["0.1"], path, metric=DIFF)
    (tmp_path / "o.json").write_text(result.to_json(), encoding="utf-8")
    again = rp.load_result(tmp_path / "o.json")
    assert type(again) is type(result) and again.exact.equal(result.exact)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"kind": "ioi"}', '{"kind": ["effect"]}'])
def test_what_is_no_result_is_refused(tmp_path, text):
    path = tmp_path / "o.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ResultFormatError):
        rp.load_result(path)


def test_an_effect_of_before_positions_had_tokens_is_read(run):
    body = json.loads(KINDS["effect"](run).to_json())
    body["version"] = 1
    del body["token_texts"]
    assert rp.Effect.from_json(json.dumps(body)).token_texts is None


def paths_to(run, to):
    path = rp.Path(to=to, using=rp.Zero(), mlps="freeze")
    return rp.ablate(run, ["0.1", "1.2"], path, metric=DIFF)


def test_an_effect_stores_where_its_path_ends(run):
    assert KINDS["effect"](run).path_to is None
    assert paths_to(run, "logits").path_to == ("logits",)
    beside = paths_to(run, rp.receivers(["2.0.q", "2.1.q"], "logits"))
    assert beside.path_to == ("2.0.q + 2.1.q", "logits")
    assert beside.receiver("logits").path_to == ("logits",)
    renamed = dataclasses.replace(KINDS["effect"](run), how="path to nowhere")
    assert not renamed.is_path and renamed.headings()["target"] == "target"
    renamed = dataclasses.replace(paths_to(run, "logits"), how="another text")
    assert renamed.is_path and "direct" not in renamed.headings()


@pytest.mark.parametrize(
    "to", ["logits", "2.1.q", ["2.0.q", "2.1.q"], rp.receivers("logits", "2.1.q"), None]
)
def test_an_effect_of_before_it_stored_where_its_path_ends_is_read(run, to):
    effect = KINDS["effect"](run) if to is None else paths_to(run, to)
    body = json.loads(effect.to_json())
    for name in ("path_to", "sha256"):
        del body[name]
    body["sha256"] = checksum(body)
    again = rp.Effect.from_json(json.dumps(body))
    assert again.path_to == effect.path_to and again.summary() == effect.summary()


def test_two_results_side_by_side_differ_by_their_values(run):
    one = KINDS["effect"](run)
    other = rp.ablate(run, rp.heads(run), rp.Mean(run, over=("batch", "pos")), metric=DIFF)
    found = rp.compare(one, other)
    torch.testing.assert_close(found.values, one.values - other.values)
    torch.testing.assert_close((other - one).values, -found.values)
    top = found.top(1).iloc[0]
    place = one.targets.index(top.target)
    assert top.a == pytest.approx(float(one.values[place].mean()))
    assert top.b == pytest.approx(float(other.values[place].mean()))
    apart = (one.values - other.values)[place].double()
    assert top.se == pytest.approx(float(apart.std()) / 2**0.5)
    assert "zero" in found.summary() and "mean over" in found.summary()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda run: KINDS["attribution"](run), "kinds effect and attribution"),
        (lambda run: KINDS["loss"](run), "axes 12 target × 2 batch and 2 target × 2 batch"),
        (lambda run: rp.ablate(run, rp.heads(run), rp.Zero(), metric=rp.loss()), "units"),
        (lambda run: rp.ablate(run, rp.heads(run), rp.Zero(), metric=rp.logit(" a")), "metric"),
        (lambda run: KINDS["effect"](rp.capture(run.view, PROMPTS[::-1])), "prompts"),
        (lambda run: rp.ablate(run, rp.heads(run)[::-1], rp.Zero(), metric=DIFF), "labels"),
        (lambda run: 3, "kinds effect and int"),
    ],
)
def test_what_cannot_be_set_side_by_side_is_refused_by_name(run, other, said):
    with pytest.raises(ValueError, match=f"compared cell by cell.*{said}"):
        rp.compare(KINDS["effect"](run), other(run))


def test_means_come_with_their_standard_error(run, model):
    effect, dla = KINDS["effect"](run), KINDS["attribution"](run)
    for result, values in ((effect, effect.values), (dla, dla.values[..., 0])):
        spread = values.double().std(1) / len(PROMPTS) ** 0.5
        assert result.table()["se"].tolist() == pytest.approx(spread.tolist())
        assert "standard error" in result.summary()
    alone = KINDS["effect"](rp.capture(model, PROMPTS[0]))
    assert "se" not in alone.table() and "standard error" not in alone.summary()


def test_the_error_of_a_mean_over_tokens_weighs_prompts_by_their_tokens(run):
    effect = KINDS["loss"](run)
    weights, values = effect.weights.double(), effect.total.double()
    mean = (values * weights).sum(1) / weights.sum()
    apart = ((values - mean[:, None]) * weights).square().sum(1) * 2  # n / (n - 1)
    assert effect.table()["se"].tolist() == pytest.approx((apart.sqrt() / weights.sum()).tolist())


def test_positions_of_one_prompt_are_one_observation(run, model):
    kl, stream = KINDS["kl"](run), KINDS["stream"](run)
    columns = [(kl, kl.values, "value", "se")]
    columns += [(stream, stream.share, "mean_share", "se_share")]
    columns += [(stream, stream.write_norm, "mean_write_norm", "se_write_norm")]
    for result, values, mean, error in columns:
        frame, values = result.table(), values.double()
        n = (~values.isnan()).sum(-1).double()
        means, shares = values.nanmean(-1), n / n.sum(-1, keepdim=True)
        whole = (shares * means).sum(-1, keepdim=True)
        apart = (2 * (shares * (means - whole)).square().sum(-1)).sqrt()  # n / (n - 1)
        assert frame[mean].tolist() == pytest.approx(whole[:, 0].tolist())
        assert frame[error].tolist() == pytest.approx(apart.tolist())
        assert "standard error" in result.summary()
    alone = rp.capture(model, PROMPTS[0])
    for kind in ("kl", "stream"):
        table = KINDS[kind](alone).table()
        assert not [name for name in table if name.startswith("se")]
        assert "standard error" not in KINDS[kind](alone).summary()
    twice = rp.capture(model, [PROMPTS[0]] * 2)  # nothing differs, however many positions
    assert KINDS["kl"](twice).table()["se"].tolist() == pytest.approx([0] * len(kl.table()))


def test_a_position_stands_beside_its_token(model):
    effect = KINDS["each"](rp.capture(model, PROMPTS[0]))
    texts = rp.capture(model, PROMPTS[0]).prompts.token_texts[0]
    frame = effect.table()
    assert frame["token"].tolist() == [texts[place] for place in frame["position"]]
    assert f'"{texts[1]}"' in effect.summary(99)


def test_layers_and_heads_are_columns_of_their_own(run):
    frame = rp.ablate(run, ["1.2", "attn.0", "embed"], rp.Zero(), metric=DIFF).to_frame()
    found = frame.set_index("target")[["layer", "head"]].astype(object).drop_duplicates()
    assert found.loc["1.2"].tolist() == [1, 2] and found.loc["attn.0", "layer"] == 0
    assert found.isna().loc["embed"].all() and found.isna().loc["attn.0", "head"]


def test_the_summary_of_before_still_answers_and_says_its_new_name(run):
    effect = KINDS["effect"](run)
    with pytest.warns(DeprecationWarning, match="intervals"):
        old = effect.summary(seed=0)
    assert old.equals(effect.intervals(seed=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(effect.summary(), str)


# The command line


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["dlaa"], "dla"),
        (["dla", "--promt", "x"], "--prompt"),
        (["dla", "--promt=x"], "--prompt"),
        (["ablate", "zerro"], "zero"),
        (["ablate", "zero", "--swep", "heads"], "--sweep"),
        (["dla", "--prompt", "x", "--by", "heads"], "head"),
        (["tuned-lens", "fit", "--out", "a", "--text", "b", "--seeed", "1"], "--seed"),
    ],
)
def test_a_typo_is_told_what_may_have_been_meant(capsys, argv, near):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert f"; did you mean {near}?" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("argv", [["qqq"], ["dla", "--zzzz"], ["dla", "--prompt"]])
def test_what_is_near_to_nothing_is_guessed_at_by_nobody(capsys, argv):
    assert main(argv) == 2
    assert "did you mean" not in capsys.readouterr().err


def completions(script, *words):
    line = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _resid_patching\n"
    code += 'echo "${COMPREPLY[@]}"'
    return subprocess.check_output(["bash", "-c", code], text=True).split()


def test_the_shell_completes_commands_flags_and_choices(capsys):
    assert main(["--completion"]) == 0
    script = capsys.readouterr().out
    assert set(COMMANDS) <= set(completions(script, "resid-patching", ""))
    assert completions(script, "resid-patching", "ablate", "me") == ["mean"]
    assert completions(script, "resid-patching", "ablate", "zero", "--sw") == ["--sweep"]
    sweeps = completions(script, "resid-patching", "ablate", "zero", "--sweep", "")
    assert sweeps == ["heads", "layers", "streams"]
