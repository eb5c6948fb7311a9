"""Two experiments on prose and the indirect-object circuit, on GPT-2 small.

Sources: the rise in perplexity, "about 15-20 %" without attention layer 6 and orders of magnitude
without the stream, is told for unnamed prose, so the bounds here are wide; the circuit is Wang et
al. 2022 (arXiv 2211.00593), figure 2.
"""

import math

import pytest
import reference.gpt2
import torch
import zoo

import resid_patching as rp
from gpt2.studies import circuit, perplexity_ratio

NAME_MOVERS, NEGATIVE = {"9.9", "9.6", "10.0"}, {"10.7", "11.10"}
S_INHIBITION = {"7.3", "7.9", "8.6", "8.10"}


def prose(shared_dir, n):
    file = shared_dir / "data/text/wikitext2_raw_test.txt"
    return file.read_text(encoding="utf-8")[:n]


@pytest.mark.gpt2
@pytest.mark.shared
@pytest.mark.parametrize(
    ("target", "least", "most"), [("attn.6", 1.05, 1.4), ("resid_pre.6", 100.0, 1e9)]
)
def test_perplexity_without_a_layer_and_without_the_stream(
    gpt2_source, shared_dir, target, least, most
):
    ratio = perplexity_ratio(rp.load(gpt2_source), prose(shared_dir, 4000), target)
    assert least < ratio < most


@pytest.mark.gpt2
def test_the_study_finds_the_heads_of_the_circuit(gpt2_source):
    found = circuit(rp.load(gpt2_source), 64)
    assert set(found.movers[:3]) == NAME_MOVERS
    assert set(found.negative[:2]) == NEGATIVE
    assert len(S_INHIBITION & set(found.behind)) >= 3
    assert found.correct > 0.9


@pytest.mark.shared
@pytest.mark.full
@pytest.mark.parametrize("target", ["attn.2", "resid_pre.2"])
def test_the_ratio_is_that_of_a_slow_route(shared_dir, target):
    folder, text, length = shared_dir / "data/models/slm4096", prose(shared_dir, 300), 64
    model = rp.load(folder, backend=zoo.BACKENDS[0], dtype=torch.float64)
    plain = reference.gpt2.Plain(folder, folded=False, bos=False)
    changes = reference.gpt2.changing(target, None, 0)

    def loss(changes):
        lost = []
        for ids in torch.tensor(plain.ids(text)).split(length):
            logits, _ = plain.run(ids.tolist(), changes)
            lost += torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        return float(sum(lost)) / len(lost)

    with torch.no_grad():
        expected = math.exp(loss(changes) - loss(None))
    assert perplexity_ratio(model, text, target, length) == pytest.approx(expected, rel=1e-9)
    assert abs(expected - 1) > 0.01


@pytest.mark.full
def test_the_circuit_of_the_shipped_model_is_named_by_strength():
    model = rp.load("demo", backend=zoo.BACKENDS[0])
    found = circuit(model, 16)
    heads = set(map(str, rp.heads(rp.ModelView(model))))
    assert found.correct > 0.9
    assert {*found.movers, *found.negative, *found.behind} <= heads
    assert 1 <= len(found.movers) <= 5 and not set(found.movers) & set(found.negative)
    assert len(set(found.behind)) == min(6, len(found.behind))
