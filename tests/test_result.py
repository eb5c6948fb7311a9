"""Results: labelled axes, JSON that reads back or refuses, and files that are whole."""

import json
import math
import os
from pathlib import Path

import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resid_patching.errors import ResidPatchingError, ResultFormatError
from resid_patching.files import write_text
from resid_patching.result import Axis, Provenance, Result

PROVENANCE = Provenance(
    model="toy",
    revision=None,
    backend="HookedTransformer",
    transformer_lens="3.9.0",
    processing="raw",
    dtype="float64",
    tokens="0" * 64,
    n_prompts=2,
    bos=True,
    plan="a plan",
    user_hooks=("blocks.0.hook_attn_out",),
    resid_patching="0.1.0",
)


def make(values, names=("layer", "pos")):
    axes = tuple(
        Axis(name, tuple(f"{name}{i}" for i in range(size)))
        for name, size in zip(names, values.shape, strict=True)
    )
    return Result(values=values, axes=axes, unit="logits", provenance=PROVENANCE)


@pytest.fixture
def result():
    return make(torch.tensor([[1.0, -5.0, 2.0], [math.nan, 0.5, -0.25]], dtype=torch.float64))


@given(
    st.lists(st.floats(allow_infinity=False, width=64) | st.just(math.nan), min_size=1, max_size=20)
)
def test_every_number_survives_json_to_the_last_bit(numbers):
    result = make(torch.tensor(numbers, dtype=torch.float64), names=("layer",))
    again = Result.from_json(result.to_json())
    torch.testing.assert_close(again.values, result.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_the_dtype_survives_json(dtype):
    result = make(torch.tensor([[1, 2], [3, 4]], dtype=dtype))
    again = Result.from_json(result.to_json())
    assert again.values.dtype == dtype and torch.equal(again.values, result.values)


def test_axes_unit_and_provenance_survive_json(result):
    again = Result.from_json(result.to_json())
    assert (again.axes, again.unit, again.provenance) == (result.axes, "logits", PROVENANCE)
    assert repr(again) == repr(result) == "Result(a plan; 2 layer × 3 pos; logits)"


def test_json_is_strict_and_keeps_unicode():
    values = torch.tensor([math.nan])
    result = Result(values, (Axis("token", (" café \n",)),), "nats", PROVENANCE)
    text = result.to_json()
    assert "NaN" not in text and "café" in text
    assert Result.from_json(text).axes[0].labels == (" café \n",)


def test_infinity_is_refused_and_not_written_as_something_else():
    with pytest.raises(ResultFormatError, match="inf cannot be written"):
        make(torch.tensor([[math.inf]])).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: "{", "this is no JSON"),
        (lambda body: "", "this is no JSON"),
        (lambda body: "[1, 2]", "a JSON object was expected"),
        (lambda body: json.dumps({}), "a result of resid_patching was expected"),
        (lambda body: json.dumps({**body, "format": "other"}), "was expected"),
        (lambda body: json.dumps({**body, "kind": "attribution"}), "found 'attribution'"),
        (lambda body: json.dumps({**body, "version": 99}), "format version 99 was found"),
        (lambda body: json.dumps({**body, "axes": []}), "incomplete or damaged"),
        (lambda body: json.dumps({**body, "values": {"tensor": "x"}}), "incomplete or damaged"),
        (
            lambda body: json.dumps({**body, "values": {"tensor": [1.0], "dtype": "floaty"}}),
            "incomplete or damaged",
        ),
        (
            lambda body: json.dumps({**body, "values": {"tensor": [1.0], "dtype": "nn"}}),
            "incomplete or damaged",
        ),
        (
            lambda body: json.dumps({**body, "provenance": {"provenance": {"model": "x"}}}),
            "incomplete or damaged",
        ),
        (lambda body: json.dumps({k: v for k, v in body.items() if k != "unit"}), "'unit'"),
    ],
)
def test_json_of_anything_else_is_refused_with_a_reason(result, change, message):
    text = change(json.loads(result.to_json()))
    with pytest.raises(ResultFormatError, match=message) as caught:
        Result.from_json(text)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ResidPatchingError)


def test_the_frame_has_one_line_for_a_cell(result):
    frame = result.to_frame()
    assert list(frame.columns) == ["layer", "position", "value"]
    assert len(frame) == 6
    cell = frame[(frame["layer"] == "layer1") & (frame["position"] == "pos2")]
    assert cell["value"].tolist() == [-0.25]
    assert isinstance(frame, pandas.DataFrame)


def test_the_top_is_by_size_unless_it_is_signed_and_leaves_out_what_is_undefined(result):
    assert result.top(3)["value"].tolist() == [-5.0, 2.0, 1.0]
    assert result.top(2, by="signed")["value"].tolist() == [2.0, 1.0]
    assert len(result.top(10)) == 5


def test_values_are_selected_by_label(result):
    assert result.sel(layer="layer0", pos="pos1").item() == -5.0
    assert result.sel(pos="pos2").tolist() == [2.0, -0.25]
    torch.testing.assert_close(result.sel(), result.values, equal_nan=True)
    with pytest.raises(KeyError, match="layer has no 'layer9'; it has layer0, layer1"):
        result.sel(layer="layer9")
    with pytest.raises(KeyError, match="there is no axis 'head'; the axes are layer, pos"):
        result.sel(head="layer0")


# Files


def test_a_file_is_written_as_it_is_given(tmp_path):
    target = tmp_path / "result.json"
    write_text(target, "café\n")
    assert target.read_bytes() == "café\n".encode()
    write_text(str(target), "again")
    assert target.read_text(encoding="utf-8") == "again"
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    target = tmp_path / "result.json"
    target.write_text("old", encoding="utf-8")

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space left"):
        write_text(target, "new")
    monkeypatch.undo()
    assert target.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "result.json"
    target.write_text("old", encoding="utf-8")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(target, "new")
    monkeypatch.undo()
    assert target.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_halves_of_characters_are_written_as_the_escapes_that_json_reads(tmp_path):
    target = tmp_path / "result.json"
    write_text(target, '"lone \ud800 surrogate, whole é"')
    text = target.read_text(encoding="utf-8")
    assert text == '"lone \\ud800 surrogate, whole é"'
    assert json.loads(text) == "lone \ud800 surrogate, whole é"


def test_a_folder_that_is_not_there_or_a_folder_as_target_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "missing" / "result.json", "text")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_text(tmp_path, "text")
    assert list(tmp_path.iterdir()) == []


def test_a_written_file_may_be_read_as_any_new_file_may(tmp_path):
    target, other = tmp_path / "result.json", tmp_path / "other.json"
    write_text(target, "text")
    Path(other).write_text("text", encoding="utf-8")
    assert target.stat().st_mode == other.stat().st_mode
