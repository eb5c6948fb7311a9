"""GPT-2 small's published values, each computed with the package; they run where its weights are.

RESID_PATCHING_GPT2=FOLDER|gpt2 pytest -m gpt2 tests/gpt2
"""

import functools
import json
import os
from pathlib import Path

import pytest

import resid_patching as rp
from gpt2.checklist import ENTRIES, NOT_COVERED, PUBLISHED, REFERENCE, disagreements
from gpt2.measurements import MEASUREMENTS, Subject
from gpt2.source import HUB_NAMES, find


@functools.cache
def subject(source, processing, bos):
    return Subject(rp.load(source, processing=processing), bos)


@pytest.fixture(scope="session")
def exact_gelu(gpt2_source, tmp_path_factory):
    """GPT-2's folder with the exact activation in its config."""
    folder = Path(gpt2_source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.txt", "model.safetensors"]
        folder = Path(snapshot_download(gpt2_source, allow_patterns=wanted))
    copy = tmp_path_factory.mktemp("gpt2_exact_gelu")
    for file in folder.iterdir():
        if file.name != "config.json":
            os.symlink(file.resolve(), copy / file.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["activation_function"] = "gelu"
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(copy)


@pytest.mark.gpt2
@pytest.mark.parametrize("name", list(ENTRIES))
def test_published(name, gpt2_source, request, shared_dir):
    entry, reference = ENTRIES[name], shared_dir / REFERENCE
    if entry.file and not (reference / entry.file).is_file():
        pytest.skip(f"no {reference / entry.file} (set RESID_PATCHING_SHARED)")
    source, processing = gpt2_source, entry.processing
    if processing == "gelu":
        source, processing = request.getfixturevalue("exact_gelu"), "raw"
    found = entry.measure(subject(source, processing, entry.bos), reference)
    wrong = disagreements(found, entry.value(reference), entry.tolerance)
    assert not wrong, "\n".join([entry.published["source"], *wrong[:10]])


def test_every_published_value_is_covered_or_has_a_reason():
    assert len(ENTRIES) >= 60 and len(ENTRIES) + len(NOT_COVERED) == 99
    assert not ENTRIES.keys() & NOT_COVERED.keys()
    assert PUBLISHED["entries"].keys() == ENTRIES.keys()
    assert {entry.measurement for entry in ENTRIES.values()} == MEASUREMENTS.keys()


@pytest.mark.shared
def test_the_values_are_those_of_the_reference(shared_dir):
    file = shared_dir / REFERENCE / "reference_values.json"
    given = {e["name"]: e for e in json.loads(file.read_text(encoding="utf-8"))["values"]}
    assert given.keys() == ENTRIES.keys() | NOT_COVERED.keys()
    for name, kept in PUBLISHED["entries"].items():
        assert kept.get("value") == given[name].get("value"), name
        assert kept["tolerance"] == given[name]["tolerance"], name
        if "prompt" in kept:
            assert PUBLISHED["prompts"][kept["prompt"]] == given[name]["prompt"], name


CACHED, NOWHERE = {"gpt2": False, "openai-community/gpt2": True}, dict.fromkeys(HUB_NAMES, False)


def test_the_weights_are_a_folder_the_hubs_or_its_caches_or_missing_with_the_reason(tmp_path):
    assert find("gpt2", NOWHERE) == ("gpt2", None)  # asked for by name: the hub may be reached
    assert find(None, CACHED) == find("", CACHED) == ("openai-community/gpt2", None)
    found, reason = find(None, NOWHERE)
    assert found is None and "RESID_PATCHING_GPT2" in reason
    found, reason = find(str(tmp_path), CACHED)  # a folder that was asked for is not replaced
    assert found is None and f"{tmp_path}, which has no config.json" in reason
    (tmp_path / "config.json").write_text("{}")
    assert find(str(tmp_path), CACHED) == (str(tmp_path), None)
