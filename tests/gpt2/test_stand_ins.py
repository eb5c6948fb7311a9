"""The check-list works: on models that are at hand it agrees with a slow route, and can disagree.

The slow route is plain torch in float64 and imports nothing of the package.
"""

import functools
import json

import pytest
import reference.gpt2
import torch
import zoo

import resid_patching as rp
from gpt2.checklist import ENTRIES, disagreements
from gpt2.measurements import MEASUREMENTS, Subject, flat
from gpt2.stand_ins import SLM4096, SMOLLM2, changed, leaves, third_digit, tolerance_of

entries = pytest.mark.parametrize("name", list(ENTRIES))


@functools.cache
def subject(folder, backend, dtype, processing, bos):
    return Subject(rp.load(folder, backend=backend, processing=processing, dtype=dtype), bos)


@functools.cache
def plain(folder, processing, bos):
    return reference.gpt2.Plain(folder, folded=processing == "folded", bos=bos)


_slow: dict[str, object] = {}


def slowly(folder, entry):
    """The slow route's value; entries that ask for the same share it."""
    key = json.dumps([str(folder), entry.measurement, entry.processing, entry.bos, entry.arguments])
    if key not in _slow:
        with torch.no_grad():
            model = plain(folder, entry.processing, entry.bos)
            _slow[key] = getattr(reference.gpt2, entry.measurement)(model, **entry.arguments)
    return _slow[key]


def kind(entry):
    """The activation that an entry replaces, or that its paths end in."""
    first = flat(entry.arguments.get("receivers") or entry.arguments.get("targets") or ["nothing"])[
        0
    ]
    return "".join(letter for letter in first if not letter.isdigit())


def check(stand_in, folder, backend, dtype, name):
    """Agrees with the slow route, and with no value of it that is changed in its third digit."""
    entry = stand_in.adapt(ENTRIES[name])
    on = subject(folder, backend, dtype, entry.processing, entry.bos)
    found = MEASUREMENTS[entry.measurement](on, **entry.arguments)
    expected = slowly(folder, entry)
    tolerance = tolerance_of(expected, stand_in.relative)
    assert disagreements(found, expected, tolerance) == []

    seen = [
        put(changed(leaf))
        for put, leaf, allowed in leaves(expected, tolerance)
        if third_digit(leaf) > 2 * allowed
    ]
    assert seen
    for altered in seen:
        assert len(disagreements(found, altered, tolerance)) == 1, altered


@pytest.mark.shared
@pytest.mark.full
@entries
def test_slm4096(name, shared_dir):
    check(SLM4096, shared_dir / "data/models/slm4096", zoo.BACKENDS[0], torch.float64, name)


# The first entry of each measurement, and of each part of a head that one replaces or reads. On
# SmolLM2 they patch each position of the stream alone; it has no biases of the unembedding to rank.
ONE_EACH: dict[str, str] = {}
for _name, _entry in ENTRIES.items():
    _alone = _entry.arguments.get("each") and kind(_entry) != "resid_pre."
    if _name != "b_U_top20" and not _alone:
        ONE_EACH.setdefault(f"{_entry.measurement} of {kind(_entry)}", _name)


@pytest.mark.real
@pytest.mark.parametrize("name", list(ONE_EACH.values()))
def test_smollm2(name, smollm2_dir):
    """In float64: what one head of a large model does drowns in the rounding of float32."""
    check(SMOLLM2, smollm2_dir, zoo.BACKENDS[0], torch.float64, name)
