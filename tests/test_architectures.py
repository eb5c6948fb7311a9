"""On every architecture every analysis is exact or refused by name, as docs/models.md says."""

import dataclasses
import os

import jaxtyping
import pytest
import torch
import zoo
import zoo_architectures
from zoo_architectures import (
    BRIDGES,
    COLUMNS,
    DOCUMENT,
    HOOKED,
    LANES,
    REASONS,
    Subject,
    documented,
    verdicts,
)

import resid_patching as rp
from resid_patching.errors import UnsupportedModelError
from resid_patching.lens.readout import LensReadout

pytestmark = pytest.mark.full
GPT2 = BRIDGES[0]

EVERY = not zoo.HAS_HOOKED or os.environ.get("RESID_PATCHING_EVERY_BRIDGE") == "1"
FEW = ("gptj", "opt", "bloom", "mixtral", "gemma2", "granite_unscaled", "cohere")
"""Bridges that are measured again where HookedTransformer is: one for each way to be odd."""


@pytest.fixture(autouse=True)
def without_shape_checks():
    """Checks of every annotated shape cost more than all that is tested here; others have them."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


REWRITE = "if this is as it should be, write the table anew: python scripts/model_table.py"


def compare(arch, backend):
    found, said = verdicts(Subject(arch, backend)), documented(backend)[arch.title]
    changed = {name: (said.get(name), found[name]) for name in found if said[name] != found[name]}
    assert not changed, f"docs/models.md and what was measured differ: {changed}; {REWRITE}"
    assert said.keys() == found.keys()


@pytest.mark.parametrize(
    "arch", [a for a in BRIDGES if EVERY or a.name in FEW], ids=lambda a: a.name
)
def test_a_bridge_is_exact_or_refused_as_documented(arch):
    compare(arch, "bridge")


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="HookedTransformer left in TransformerLens 4")
@pytest.mark.parametrize("arch", HOOKED, ids=lambda arch: arch.name)
def test_a_hooked_transformer_is_exact_or_refused_as_documented(arch):
    compare(arch, "hooked")


def test_the_document_has_a_row_for_each_architecture_and_explains_each_reason():
    for lane, archs in LANES.items():
        assert list(documented(lane)) == [arch.title for arch in archs]
    text = DOCUMENT.read_text(encoding="utf-8")
    for reason in REASONS:
        assert f"\n- **({reason})** " in text and f"refused ({reason})" in text


# Every check sees a planted error


def spoiled(function, *fields):
    """A function of the package whose results are a thousandth too large."""

    def spoil(*args, **options):
        found = function(*args, **options)
        return dataclasses.replace(found, **{name: getattr(found, name) * 1.001 for name in fields})

    return spoil


def cases_that_fail(column):
    failed = []
    for case in COLUMNS[column](Subject(GPT2, "bridge")):
        try:
            case()
        except AssertionError:
            failed.append(case)
    return failed


@pytest.mark.parametrize(
    ("name", "fields", "columns"),
    [
        ("direct_logit_attribution", ["values"], ["attribution: head", "linearised paths"]),
        ("stream_report", ["write_norm"], ["stream norms"]),
        ("linearised_paths", ["values"], ["linearised paths"]),
        (
            "ablate",
            ["values", "patched"],
            ["ablate: heads", "ablate: biases", "ablate: pattern", "paths from heads"],
        ),
        ("ablate", ["direct"], ["ablate: neurons", "ablate: q, k, v", "paths to q, k, v"]),
    ],
)
def test_a_result_that_is_slightly_wrong_is_noticed(monkeypatch, name, fields, columns):
    monkeypatch.setattr(rp, name, spoiled(getattr(rp, name), *fields))
    for column in columns:
        assert cases_that_fail(column)


def test_a_lens_that_is_slightly_wrong_is_noticed(monkeypatch):
    logits = LensReadout.logits
    monkeypatch.setattr(
        LensReadout, "logits", lambda *args, **options: logits(*args, **options) * 1.001
    )
    assert cases_that_fail("logit lens") and cases_that_fail("tuned lens")


@pytest.mark.parametrize("column", ["capture", "attribution: component", "ablate: heads"])
def test_a_model_that_is_not_the_one_it_was_made_of_is_noticed(column):
    subject = Subject(GPT2, "bridge")
    with torch.no_grad():
        subject.model.blocks[1].attn.o.original_component.weight.mul_(1.001)
    with pytest.raises(AssertionError):
        for case in COLUMNS[column](subject):
            case()


def refuse(text):
    def case():
        raise UnsupportedModelError(text)

    return case


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ([lambda: None, refuse("not covered by the closed form")], r"is exact and refused \(d\)"),
        ([refuse("for a reason of its own")], "a reason that is not in the document"),
    ],
)
def test_half_a_refusal_and_one_without_a_documented_reason_are_noticed(
    monkeypatch, cases, message
):
    monkeypatch.setattr(zoo_architectures, "COLUMNS", {"capture": lambda subject: iter(cases)})
    with pytest.raises(AssertionError, match=message):
        verdicts(Subject(GPT2, "bridge"))
