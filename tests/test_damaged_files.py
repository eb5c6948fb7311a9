"""Files under attack: what is read is what was written, or one line says what is wrong."""

import json
import os
import shutil

import attacks
import pytest
import safetensors.torch
import torch
import zoo
import zoo_lens

import resid_patching as rp
from resid_patching import files
from resid_patching import result as results
from resid_patching.cli import main
from resid_patching.errors import (
    LensFormatError,
    LensMismatchError,
    ResultFormatError,
    UnsupportedModelError,
)
from resid_patching.lens import checkpoint, fit, legacy, resume

pytestmark = [pytest.mark.once, pytest.mark.full]

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
SEEDS = 60


@pytest.mark.parametrize("victim", attacks.VICTIMS, ids=str)
def test_a_damaged_file_gives_what_was_written_or_an_error_of_one_line(victim, tmp_path):
    found = [attacks.attack(victim, tmp_path / "victim", seed) for seed in range(SEEDS)]
    assert [problem for problem in found if problem] == []


def test_a_damaged_model_folder_loads_or_is_refused_by_an_error_of_ours(tmp_path):
    found = [attacks.attack(attacks.MODEL, tmp_path / "victim", seed) for seed in range(8)]
    assert [problem for problem in found if problem] == []


def test_the_attacks_find_a_file_that_is_read_without_its_checksum(monkeypatch, tmp_path):
    """The twin: nothing would notice a changed number."""
    victim = next(v for v in attacks.RESULTS if v.name == "stream result")
    monkeypatch.setattr(results, "checksum", lambda body: body["version"])
    attacks._originals.cache_clear()
    shutil.rmtree(zoo.scratch() / f"original of {victim}", ignore_errors=True)
    found = [attacks.attack(victim, tmp_path / "victim", seed) for seed in range(SEEDS)]
    assert any("other numbers without a word" in problem for problem in found if problem)
    attacks._originals.cache_clear()
    for folder in zoo.scratch().glob("original of *"):
        shutil.rmtree(folder)


def test_the_attacks_find_an_error_that_is_not_ours(monkeypatch, tmp_path):
    def read(folder):
        raise KeyError("no such entry")

    victim = attacks.Victim("made up", attacks.LENS.write, read)
    (tmp_path / "victim").mkdir()
    assert attacks.finding(victim, tmp_path / "victim", None) == "KeyError: 'no such entry'"


# Whole files that are not the right ones


@pytest.fixture
def model():
    return zoo.build(zoo.BACKENDS[0])


@pytest.fixture
def two(model, tmp_path):
    """Two lenses of one model, and their folders."""
    lenses = [zoo_lens.random_lens(model, seed=seed) for seed in (0, 1)]
    folders = [tmp_path / name for name in ("one", "other")]
    for lens, folder in zip(lenses, folders, strict=True):
        lens.record = {"validation": {"tuned": [float(lens.weight.sum())]}}
        lens.save(folder)
    return lenses, folders


@pytest.mark.parametrize("name", [checkpoint.PARAMS, checkpoint.CONFIG])
def test_a_file_of_another_lens_never_mixes_two(two, model, name):
    """The parameters decide: with them comes their own copy of what they are."""
    lenses, (one, other) = two
    shutil.copy(other / name, one / name)
    found = rp.TunedLens.load(one, model)
    expected = lenses[name == checkpoint.PARAMS]
    assert torch.equal(found.weight, expected.weight) and found.record == expected.record


def test_a_number_of_the_record_that_was_changed_is_noticed(two, model):
    _, (folder, _) = two
    path = folder / checkpoint.CONFIG
    config = json.loads(path.read_text())
    config["record"]["validation"]["tuned"] = [0.001]
    path.write_text(json.dumps(config))
    with pytest.raises(LensFormatError, match=r"config.json is not what was written: it differs"):
        rp.TunedLens.load(folder, model)


def test_two_tensors_that_changed_places_are_noticed(two, model):
    _, (folder, _) = two
    tensors = safetensors.torch.load_file(folder / checkpoint.PARAMS)
    one, other = "resid_pre.0.weight", "resid_post.0.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]
    text = (folder / checkpoint.CONFIG).read_text()
    safetensors.torch.save_file(tensors, folder / checkpoint.PARAMS, {"config": text})
    with pytest.raises(LensFormatError, match="its parameters are not those that were written"):
        rp.TunedLens.load(folder, model)


CHANGES = {
    "a shorter bias": ("resid_pre.0.bias", lambda t: t[:1], "incomplete or damaged"),
    "one number for all biases": ("bias", lambda t: t[:1], r"biases \(3, 1\) for translators"),
    "whole numbers": ("", lambda t: t.to(torch.int64), "translators of torch.int64"),
    "biases of another dtype": ("bias", lambda t: t.float(), "with biases of torch.float32"),
    "not a number": ("resid_post.0.weight", lambda t: t * torch.nan, "translators hold numbers"),
    "an infinite bias": ("resid_post.1.bias", lambda t: t / 0, "biases hold numbers that are not"),
    "a flat weight": ("weight", lambda t: t.flatten(), "incomplete or damaged|not square"),
    "a narrow lens": ("", lambda t: t[..., :16, :16] if t.ndim == 2 else t[:16], "32|16"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_of_the_wrong_kind_are_refused_whatever_their_checksum(model, tmp_path, change):
    names, how, message = CHANGES[change]
    zoo_lens.random_lens(model).save(tmp_path)

    def tensors(found):
        for name in found:
            if name != "sketch" and name.endswith(names):
                found[name] = how(found[name]).contiguous()

    zoo_lens.rewrite(tmp_path, lambda config: None, tensors)
    with pytest.raises(LensFormatError, match=message) as caught:
        rp.TunedLens.load(tmp_path, model)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
def test_the_other_packages_parameters_of_the_wrong_kind_are_refused(model, tmp_path, change):
    names, how, message = CHANGES[change]
    names = names.replace("resid_pre.0", "0").replace("resid_post.0", "1")
    names = names.replace("resid_post.1", "2")
    zoo_lens.random_lens(model).save(tmp_path, format="tuned-lens")
    state = torch.load(tmp_path / legacy.PARAMS, weights_only=True)
    changed = {k: how(v).contiguous() if k.endswith(names) else v for k, v in state.items()}
    torch.save(changed, tmp_path / legacy.PARAMS)
    with pytest.raises(LensFormatError) as caught:
        rp.TunedLens.load(tmp_path, model)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_bit_in_the_other_packages_archive_is_noticed(model, tmp_path):
    """torch writes checksums of its archives' entries, and does not compare them."""
    zoo_lens.random_lens(model).save(tmp_path, format="tuned-lens")
    path = tmp_path / legacy.PARAMS
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)
    with pytest.raises(LensFormatError, match=r"data/\d is not what was written"):
        rp.TunedLens.load(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"site": "resid_front"}, "a lens on 'resid_front', which is none of resid_pre"),
        ({"record": None}, "incomplete or damaged"),
        ({"fingerprint": {}}, "incomplete or damaged"),
        ({"format": "a cake"}, "'a cake', which is no tuned lens"),
    ],
)
def test_a_configuration_that_says_something_else_is_refused(model, tmp_path, change, message):
    zoo_lens.random_lens(model).save(tmp_path)
    zoo_lens.rewrite(tmp_path, lambda config: config.update(change))
    with pytest.raises(LensFormatError, match=message):
        rp.TunedLens.load(tmp_path, model)


@pytest.mark.parametrize("value", ["abc", None, 4, 3.5])
def test_a_width_that_is_none_is_refused_in_the_other_packages_configuration(
    model, tmp_path, value
):
    zoo_lens.random_lens(model).save(tmp_path, format="tuned-lens")
    path = tmp_path / legacy.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), "d_model": value}))
    with pytest.raises(LensFormatError, match=f"layers of width {value}, but the parameters"):
        rp.TunedLens.load(tmp_path, model)


# Files from before there were checksums


def test_results_without_a_checksum_are_read():
    for name, found in attacks.results().items():
        body = json.loads(found.to_json())
        del body["sha256"]
        with pytest.raises(ResultFormatError, match="not those that were written"):
            type(found).from_json(json.dumps(body))
        again = type(found).from_json(json.dumps({**body, "version": 1}))
        assert again.to_json() == found.to_json(), name


def test_entries_beside_a_result_are_not_in_its_checksum():
    found = attacks.results()["effect"]
    body = {"prompts": ["x"], **json.loads(found.to_json()), "command": "ablate"}
    assert rp.Effect.from_json(json.dumps(body, indent=1)).to_json() == found.to_json()


def quick(model, seed=0, **options):
    return rp.fit_tuned_lens(
        model,
        zoo_lens.random_windows(24),
        length=16,
        validation_tokens=32,
        optimizer="adam",
        progress=False,
        seed=seed,
        **{"steps": 3, **options},
    )


def unfinished(monkeypatch, model, folder, **options):
    """Leaves the state of a fit that was interrupted after two steps."""

    def interrupt(*args):
        if args[2] == 2:
            raise KeyboardInterrupt
        return take_step(*args)

    take_step = fit.take_step
    with monkeypatch.context() as patch:
        patch.setattr(fit, "take_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quick(model, folder=folder, save_every=1, **options)


def test_a_state_without_a_checksum_is_taken_up(monkeypatch, model, tmp_path):
    unfinished(monkeypatch, model, tmp_path)
    about, tensors = resume.read(tmp_path)
    assert about["step"] == 2
    old = {k: v for k, v in about.items() if k not in ("sha256", "writer")} | {"version": 1}
    content = safetensors.torch.save(tensors, {"about": json.dumps(old)})
    (tmp_path / resume.STATE).write_bytes(content)
    found = quick(model, folder=tmp_path, save_every=1)
    assert torch.equal(found.weight, quick(model).weight)


# Two who write in one place


def test_the_state_of_a_deeper_model_is_refused_by_name(monkeypatch, model, tmp_path):
    unfinished(monkeypatch, model, tmp_path)
    deeper = zoo.bridge(zoo.hugging_face(zoo.gpt2_config(n_layer=4)))
    with pytest.raises(LensMismatchError, match="is of a fit with model"):
        quick(deeper, folder=tmp_path)


@pytest.mark.parametrize("step", [0, 1])
def test_of_two_fits_that_write_to_one_folder_the_one_that_comes_second_stops(
    monkeypatch, model, tmp_path, step
):
    unfinished(monkeypatch, model, tmp_path / "other", seed=1)
    others = (tmp_path / "other" / resume.STATE).read_bytes()
    path = tmp_path / "one" / resume.STATE
    take_step = fit.take_step

    def meanwhile(*args):
        if args[2] == step:
            path.write_bytes(others)
        return take_step(*args)

    monkeypatch.setattr(fit, "take_step", meanwhile)
    with pytest.raises(LensMismatchError, match=r"another fit has written .*one/fit_state.* since"):
        quick(model, folder=tmp_path / "one", save_every=1)
    assert path.read_bytes() == others


def test_a_fit_that_goes_on_with_a_state_may_write_over_it(monkeypatch, model, tmp_path):
    unfinished(monkeypatch, model, tmp_path)
    found = quick(model, folder=tmp_path, save_every=1)
    found.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [checkpoint.CONFIG, checkpoint.PARAMS]
    assert torch.equal(found.weight, quick(model).weight)


@pytest.mark.parametrize("steps", ["0", "1"])
def test_a_lens_that_another_process_wrote_meanwhile_is_not_replaced(
    monkeypatch, capsys, tmp_path, steps
):
    text = tmp_path / "text.txt"
    text.write_text(zoo.CORPUS, encoding="utf-8")
    out, folder = tmp_path / "lens", str(zoo.text_folder())
    real = rp.fit_tuned_lens

    def meanwhile(view, texts, **options):
        zoo_lens.random_lens(view, seed=7).save(out)
        return real(view, texts, **options)

    monkeypatch.setattr(rp, "fit_tuned_lens", meanwhile)
    argv = ["tuned-lens", "fit", "--model", folder, "--text", str(text), "--out", str(out)]
    argv += ["--steps", steps, "--length", "16", "--tokens", "64", "--validation-tokens", "32"]
    assert main([*argv, "--optimizer", "adam"]) == 2
    assert "another process has written a lens to" in capsys.readouterr().err
    model = rp.load(folder)
    expected = zoo_lens.random_lens(model, seed=7).weight
    assert torch.equal(rp.TunedLens.load(out, model).weight, expected)


def test_saving_a_lens_leaves_a_damaged_state_where_it_is(model, tmp_path):
    (tmp_path / resume.STATE).write_bytes(b"damaged")
    zoo_lens.random_lens(model).save(tmp_path)
    assert (tmp_path / resume.STATE).read_bytes() == b"damaged"


# Links


@pytest.mark.parametrize("what", ["folder", "files", "dangling folder"])
def test_a_lens_is_written_through_links_which_stay(model, tmp_path, what):
    target, link = tmp_path / "target", tmp_path / "link"
    lens = zoo_lens.random_lens(model)
    if what != "dangling folder":
        zoo_lens.random_lens(model, seed=1).save(target)
    if what == "files":
        link.mkdir()
        for name in (checkpoint.PARAMS, checkpoint.CONFIG):
            (link / name).symlink_to(target / name)
    else:
        link.symlink_to(target)
    if what == "dangling folder":
        with pytest.raises(OSError, match="link"):
            lens.save(link)
        assert link.is_symlink() and not target.exists()
        return
    lens.save(link)
    assert torch.equal(rp.TunedLens.load(target, model).weight, lens.weight)
    assert link.is_symlink() or all(path.is_symlink() for path in link.iterdir())


def test_a_link_that_leads_to_itself_is_an_os_error_and_stays(tmp_path):
    link = tmp_path / "result.json"
    link.symlink_to(link)
    with pytest.raises(OSError, match="result.json"):
        files.write_text(link / "below", "text")
    assert os.readlink(link) == str(link)


# Models


@backends
def test_a_model_whose_files_lack_weights_is_refused_not_filled_with_random_ones(backend, tmp_path):
    folder = shutil.copytree(zoo.text_folder(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["n_layer"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"lack 12 of the weights .*h\.3\.attn"):
        rp.load(folder, backend=backend)
    from transformers import PreTrainedModel

    assert PreTrainedModel.from_pretrained.__module__ == PreTrainedModel.__module__


@backends
def test_a_model_without_layers_is_refused(backend, tmp_path):
    folder = shutil.copytree(zoo.text_folder(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_layer": 0}))
    with pytest.raises(UnsupportedModelError, match="has no layers"):
        rp.capture(rp.load(folder, backend=backend), "the dog")
