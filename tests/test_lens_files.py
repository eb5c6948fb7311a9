"""Lenses in files: exact both ways, bound to their model, whole or not at all, never unpickled."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import warnings

import numpy
import pytest
import safetensors.torch
import torch
import zoo
import zoo_lens

import resid_patching as rp
from resid_patching.errors import (
    LensBasisError,
    LensFormatError,
    LensMismatchError,
    LensNotFoundError,
    UnverifiedLensWarning,
)
from resid_patching.lens import checkpoint
from resid_patching.lens.fingerprint import corner_hash, fingerprint

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)


@pytest.fixture
def model():
    return zoo.build(zoo.BACKENDS[0])


def same(left, right):
    return torch.equal(left.weight, right.weight) and torch.equal(left.bias, right.bias)


def quietly_load(folder, model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnverifiedLensWarning)
        return rp.TunedLens.load(folder, model)


# Ours


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "attn_out", "mlp_out"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@backends
def test_a_lens_comes_back_as_it_was(backend, dtype, site, tmp_path):
    model = zoo.build(backend, dtype=dtype)
    tuned = zoo_lens.random_lens(model, site=site)
    tuned.record = {"fit": {"steps": 3}, "validation": {"tuned": [1.0, 2.5]}}
    tuned.save(tmp_path / "a" / "lens")
    found = rp.TunedLens.load(tmp_path / "a" / "lens", model)
    assert same(found, tuned) and found.weight.dtype == tuned.weight.dtype
    assert (found.site, found.record, found.fingerprint) == (site, tuned.record, tuned.fingerprint)
    assert torch.equal(found.sketch, tuned.sketch)


def test_twelve_layers_keep_their_order(tmp_path):
    model = zoo.bridge(zoo.hugging_face(zoo.gpt2_config(n_layer=12)))
    tuned = zoo_lens.random_lens(model)
    tuned.save(tmp_path)
    assert same(rp.TunedLens.load(tmp_path, model), tuned)


def test_T12_a_file_holds_no_model(model, tmp_path):
    tuned = zoo_lens.random_lens(model)
    tuned.save(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    parameters = 3 * (zoo.D_MODEL**2 + zoo.D_MODEL) * 8
    assert parameters < size < parameters + 8000
    tensors = safetensors.torch.load_file(tmp_path / checkpoint.PARAMS)
    assert set(tensors) == {f"{a}.{p}" for a in tuned.labels for p in ("weight", "bias")} | {
        "sketch",
        "body",
    }
    config = json.loads((tmp_path / checkpoint.CONFIG).read_text())
    assert {"format", "version", "site", "dtype", "fingerprint", "record"} <= set(config)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_T05_a_lens_that_is_not_there_is_named(model, tmp_path):
    (tmp_path / "gpt2-lens").mkdir()
    with pytest.raises(LensNotFoundError, match=r"no lens at .*nowhere.*has the folders gpt2-lens"):
        rp.TunedLens.load(tmp_path / "nowhere", model)
    (tmp_path / "gpt2-lens" / "notes.txt").write_text("")
    with pytest.raises(LensNotFoundError, match="holds no lens: .* it holds notes.txt"):
        rp.TunedLens.load(tmp_path / "gpt2-lens", model)


@pytest.mark.once
@pytest.mark.full
def test_T06_a_lens_loads_in_another_process(tmp_path):
    folder = zoo.text_folder()
    model = zoo.text_model(zoo.BACKENDS[0])
    tuned = zoo_lens.random_lens(model)
    tuned.save(tmp_path)
    child = textwrap.dedent(f"""
        import resid_patching as rp
        model = rp.load({str(folder)!r}, backend={zoo.BACKENDS[0]!r})
        print(float(rp.TunedLens.load({str(tmp_path)!r}, model).weight.sum()))
    """)
    found = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) == pytest.approx(float(tuned.weight.sum()), abs=1e-6)


def test_T07_a_lens_is_loaded_where_the_model_is(model, tmp_path):
    zoo_lens.random_lens(model).save(tmp_path)
    found = rp.TunedLens.load(tmp_path, model)
    assert found.weight.device == model.unembed.W_U.device
    # What was saved from another device holds no device: it is plain numbers.
    assert "cuda" not in (tmp_path / checkpoint.CONFIG).read_text()


@backends
def test_T09_a_file_of_raw_weights_is_refused_on_centred_ones(backend, tmp_path):
    raw, folded = (zoo.build(backend, zoo.Cell(folded=f)) for f in (False, True))
    zoo_lens.random_lens(raw).save(tmp_path)
    with pytest.raises(LensBasisError, match="of raw weights .* are centred"):
        rp.TunedLens.load(tmp_path, folded)


def test_a_file_of_another_model_is_refused(model, tmp_path):
    zoo_lens.random_lens(model).save(tmp_path)
    other = zoo.fresh(zoo.BACKENDS[0])
    with torch.no_grad():
        other.unembed.W_U[7, 20] += 1e-6
    with pytest.raises(LensMismatchError, match="whose W_U is sha256"):
        rp.TunedLens.load(tmp_path, other)
    zoo_lens.rewrite(tmp_path, lambda config: config["fingerprint"].update(model="another"))
    with pytest.raises(LensMismatchError, match="'another', but this is"):
        rp.TunedLens.load(tmp_path, model)


def test_T11_files_of_other_kinds_are_one_clear_value_error(model, tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is a file; a lens is a folder"):
        rp.TunedLens.load(tmp_path / "other.pt", model)
    cases = {
        "other": ({"a": torch.zeros(2)}, "holds 'a', which is no part of a linear tuned lens"),
        "list": ([torch.zeros(2)], "holds a list"),
        "tensor": (torch.zeros(2), "holds a Tensor"),
        "empty": ({}, r"holds the translators \[\]"),
        "hole": ({"0.weight": torch.zeros(32, 32), "2.weight": torch.zeros(32, 32)}, r"\[0, 2\]"),
        "shape": ({"0.weight": torch.zeros(32, 16)}, "not square"),
    }
    for name, (content, message) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        torch.save(content, folder / "params.pt")
        with pytest.raises(LensFormatError, match=message):
            rp.TunedLens.load(folder, model)
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / checkpoint.PARAMS).write_text("no parameters")
    with pytest.raises(LensFormatError, match="no safetensors file"):
        rp.TunedLens.load(folder, model)


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch exploded",))


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickled_object_is_refused_and_never_run(model, tmp_path, how, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    content = {"0.weight": Bomb()}
    if how == "torch":
        torch.save(content, tmp_path / "params.pt")
    else:
        (tmp_path / "params.pt").write_bytes(pickle.dumps(content))
    with pytest.raises(LensFormatError):
        rp.TunedLens.load(tmp_path, model)
    (tmp_path / "params.pt").rename(tmp_path / checkpoint.PARAMS)
    with pytest.raises(LensFormatError):
        rp.TunedLens.load(tmp_path, model)
    assert not (tmp_path / "exploded").exists()


def test_damaged_parameters_are_refused(model, tmp_path):
    zoo_lens.random_lens(model).save(tmp_path)
    path = tmp_path / checkpoint.PARAMS
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(LensFormatError, match="is damaged"):
        rp.TunedLens.load(tmp_path, model)
    path.write_bytes(content[:-10])
    with pytest.raises(LensFormatError):
        rp.TunedLens.load(tmp_path, model)


def test_a_later_format_is_refused(model, tmp_path):
    zoo_lens.random_lens(model).save(tmp_path)
    zoo_lens.rewrite(tmp_path, lambda config: config.update(version=99))
    with pytest.raises(LensFormatError, match="format version 99"):
        rp.TunedLens.load(tmp_path, model)


@pytest.mark.once
@pytest.mark.full
@pytest.mark.parametrize("when", ["before the parameters", "between the two files"])
def test_a_process_killed_while_writing_leaves_a_lens_that_loads(tmp_path, when):
    """The child kills itself at a file's rename: the worst moments there are."""
    folder = zoo.text_folder()
    model = zoo.text_model(zoo.BACKENDS[0])
    old, new = (zoo_lens.random_lens(model, seed=seed) for seed in (0, 1))
    old.save(tmp_path)
    survives = 0 if when == "before the parameters" else 1
    child = textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {str(os.path.dirname(__file__))!r})
        import zoo_lens, resid_patching as rp
        model = rp.load({str(folder)!r}, backend={zoo.BACKENDS[0]!r})
        new = zoo_lens.random_lens(model, seed=1)
        replace, left = os.replace, [{survives}]
        def replace_or_die(*paths):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            replace(*paths)
        os.replace = replace_or_die
        new.save({str(tmp_path)!r})
    """)
    found = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert found.returncode == -signal.SIGKILL, found.stderr
    expected = new if survives else old
    assert same(rp.TunedLens.load(tmp_path, model), expected)
    new.save(tmp_path)
    assert same(rp.TunedLens.load(tmp_path, model), new)


def test_a_failing_write_leaves_the_old_lens(model, tmp_path, monkeypatch):
    old, new = (zoo_lens.random_lens(model, seed=seed) for seed in (0, 1))
    old.save(tmp_path)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        new.save(tmp_path)
    monkeypatch.undo()
    assert same(rp.TunedLens.load(tmp_path, model), old)
    assert sorted(p.name for p in tmp_path.iterdir()) == [checkpoint.CONFIG, checkpoint.PARAMS]


# The tuned-lens package's


@backends
def test_its_format_goes_both_ways(backend, tmp_path):
    model = zoo.build(backend)
    tuned = zoo_lens.random_lens(model)
    tuned.save(tmp_path, format="tuned-lens")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "base_model_name_or_path": rp.ModelView(model).name,
        "d_model": 32,
        "num_hidden_layers": 3,
        "bias": True,
        "base_model_revision": None,
        "unembed_hash": corner_hash(model.unembed.W_U),
        "lens_type": "linear_tuned_lens",
    }
    state = torch.load(tmp_path / "params.pt", weights_only=True)
    assert list(state) == [f"{n}.{k}" for n in range(3) for k in ("weight", "bias")]
    linear = torch.nn.Linear(32, 32, dtype=torch.float64)  # as the package applies it
    linear.load_state_dict({"weight": state["1.weight"], "bias": state["1.bias"]})
    x = torch.randn(4, 32, dtype=torch.float64)
    torch.testing.assert_close(x + linear(x), tuned.translate(x, "resid_pre.1"))
    with pytest.warns(UnverifiedLensWarning, match="is unverified") as caught:
        found = rp.TunedLens.load(tmp_path, model)
    assert caught[0].filename == __file__
    assert same(found, tuned) and not found.fingerprint.verified
    run = rp.capture(model, zoo.RAGGED)
    assert torch.equal(found(run).kl.values.nan_to_num(), tuned(run).kl.values.nan_to_num())
    assert "unverified" in found(run).kl.provenance.plan


def test_the_hash_of_corners_is_the_packages():
    import hashlib

    for shape in ((40, 300), (5, 20), (64, 1000)):
        weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        text = numpy.array_str(weight.T.numpy(), precision=1)
        assert corner_hash(weight) == hashlib.sha256(text.encode()).hexdigest()


def test_other_corners_another_name_width_or_depth_are_refused(model, tmp_path):
    zoo_lens.random_lens(model).save(tmp_path, format="tuned-lens")
    other = zoo.fresh(zoo.BACKENDS[0])
    with torch.no_grad():
        other.unembed.W_U[0, 0] += 5
    with pytest.raises(LensMismatchError, match="unembedding with the hash .* has "):
        quietly_load(tmp_path, other)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base_model_name_or_path": "gpt2-xl"}))
    with pytest.raises(LensMismatchError, match="'gpt2-xl', but this is"):
        quietly_load(tmp_path, model)
    name = f"some-org/{config['base_model_name_or_path']}"
    path.write_text(json.dumps({**config, "base_model_name_or_path": name}))
    quietly_load(tmp_path, model)
    path.write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(LensFormatError, match="says 4 layers of width 32"):
        quietly_load(tmp_path, model)
    path.write_text(json.dumps({**config, "lens_type": "logit"}))
    with pytest.raises(LensFormatError, match="describes 'logit'"):
        quietly_load(tmp_path, model)


def test_older_spellings_and_half_precision_are_read(model, tmp_path):
    tuned = zoo_lens.random_lens(model)
    tuned.save(tmp_path, format="tuned-lens")
    config = json.loads((tmp_path / "config.json").read_text())
    config["unemebd_hash"] = config.pop("unembed_hash")
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = torch.load(tmp_path / "params.pt", weights_only=True)
    halves = {key: value.half() for key, value in state.items() if "bias" not in key}
    torch.save(halves, tmp_path / "params.pt")
    found = quietly_load(tmp_path, model)
    assert found.weight.dtype == torch.float32 and not found.bias.any()
    assert float((found.weight - tuned.weight).abs().max()) < 1e-3
    config["unemebd_hash"] = "0" * 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LensMismatchError, match="hash 000000000000"):
        quietly_load(tmp_path, model)


def test_files_before_0_0_6_are_read_and_their_own_unembedding_is_compared(model, tmp_path):
    tuned = zoo_lens.random_lens(model)
    norm = rp.ModelView(model).final_norm
    state = {
        "input_translator.weight": tuned.weight[0].detach().clone(),
        "input_translator.bias": tuned.bias[0].detach().clone(),
        "unembedding.weight": model.unembed.W_U.detach().T.clone(),
        "layer_norm.weight": norm.gain,
        "layer_norm.bias": norm.bias,
    }
    for number in (1, 2):
        state[f"layer_translators.{number - 1}.weight"] = tuned.weight[number].detach().clone()
        state[f"layer_translators.{number - 1}.bias"] = tuned.bias[number].detach().clone()
    (tmp_path / "config.json").write_text(json.dumps({"d_model": 32, "num_layers": 3}))
    torch.save(state, tmp_path / "params.pt")
    with pytest.warns(UnverifiedLensWarning, match="unverified for the layers before the readout"):
        found = rp.TunedLens.load(tmp_path, model)
    assert same(found, tuned)
    assert found.fingerprint.W_U == fingerprint(rp.ModelView(model)).W_U
    assert found.mark(model) == ", body unverified"

    other = zoo.fresh(zoo.BACKENDS[0])
    with torch.no_grad():
        other.unembed.W_U[3, 25] += 1e-6
    with pytest.raises(LensMismatchError, match="those of .* are others"):
        rp.TunedLens.load(tmp_path, other)
    state["extra_layers.0.weight"] = torch.zeros(2)
    torch.save(state, tmp_path / "params.pt")
    with pytest.raises(LensFormatError, match="extra layers are not covered"):
        rp.TunedLens.load(tmp_path, model)


def test_what_its_format_cannot_hold_is_refused(tmp_path):
    centred = zoo_lens.twins("centre writes")[1]
    with pytest.raises(LensFormatError, match=r"tuned.to_raw\(\), which is exact"):
        zoo_lens.random_lens(centred).save(tmp_path, format="tuned-lens")
    zoo_lens.random_lens(centred).to_raw().save(tmp_path, format="tuned-lens")
    with pytest.raises(LensFormatError, match="a lens on mlp_out"):
        zoo_lens.random_lens(centred, site="mlp_out").save(tmp_path, format="tuned-lens")
    with pytest.raises(ValueError, match="format is resid_patching or tuned-lens"):
        checkpoint.save(zoo_lens.random_lens(centred), tmp_path, "pickle")
