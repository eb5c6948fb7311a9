"""Two experiments on prose and the indirect-object circuit, on GPT-2 small.

Sources: the rise in perplexity, "about 15-20 %" without attention layer 6 and orders of magnitude
without the stream, is told for unnamed prose, so the bounds here are wide; the circuit is Wang et
al. 2022 (arXiv 2211.00593), figure 2.
"""

import sys
from pathlib import Path

import pytest
import torch

import resid_patching as rp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import ioi_study  # noqa: E402

pytestmark = [pytest.mark.gpt2, pytest.mark.slow]

NAME_MOVERS, NEGATIVE = {"9.9", "9.6", "10.0"}, {"10.7", "11.10"}
S_INHIBITION = {"7.3", "7.9", "8.6", "8.10"}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("target", "least", "most"), [("attn.6", 1.05, 1.4), ("resid_pre.6", 100.0, 1e9)]
)
def test_perplexity_without_a_layer_and_without_the_stream(
    gpt2_source, shared_dir, target, least, most
):
    model = rp.load(gpt2_source)
    prose = (shared_dir / "data/text/wikitext2_raw_test.txt").read_text(encoding="utf-8")
    run = rp.capture(model, rp.windows(model, prose[:4000], length=256))
    effect = rp.ablate(run, target, rp.Zero(), metric=rp.loss())
    assert least < float(effect.perplexity["ratio"].iloc[0]) < most


def test_the_study_finds_the_heads_of_the_circuit(gpt2_source):
    model = rp.load(gpt2_source)
    pairs = rp.indirect_object_prompts(model, 64, seed=0, corrupt="names")
    options = {"n_heads": 5, "n_controls": 3, "seed": 0, "prepend_bos": None}
    found = ioi_study.study(rp.ModelView(model), pairs, **options)
    assert set(found.up[:3]) == NAME_MOVERS
    assert set(found.down[:2]) == NEGATIVE
    moved = found.to_queries.total.nanmean(-1)[:, :3].abs().amax(1).nan_to_num()
    strongest = [found.to_queries.targets[n] for n in moved.topk(6).indices.tolist()]
    assert len(S_INHIBITION & set(strongest)) >= 3
    assert torch.tensor(found.is_top).float().mean() > 0.9
