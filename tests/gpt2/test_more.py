"""GPT-2 small's published figures; they run where its weights are.

Sources: TransformerLens (MIT), demos Direct_Logit_Attribution_Demo at 4cd36aae, Exploratory
Analysis and Main_Demo at db0f191f; the "3 + 5 =" figures from a public issue on them. Weights
folded and centred, a beginning-of-sequence token, unless said.
"""

import functools

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.errors import AnswerWarning

pytestmark = pytest.mark.gpt2
backends = pytest.mark.parametrize("backend", zoo.BACKENDS)

SHOPS = "When John and Mary went to the shops, John gave the bag to"
EIGHT_PROMPTS = [
    ("When John and Mary went to the shops, {} gave the bag to", " John", " Mary"),
    ("When Tom and James went to the park, {} gave the ball to", " Tom", " James"),
    ("When Dan and Sid went to the shops, {} gave an apple to", " Dan", " Sid"),
    ("After Martin and Amy went to the park, {} gave a drink to", " Martin", " Amy"),
]


@functools.cache
def load(source, backend, processing="folded"):
    return rp.load(source, backend=backend, processing=processing)


@pytest.fixture
def model(gpt2_source, backend):
    return load(gpt2_source, backend)


def attribute(model, text, answer, foil=None, **options):
    return rp.direct_logit_attribution(rp.capture(model, text), answer, foil, **options)


@backends
def test_D03_components_of_a_sum_are_scaled(model):
    run = rp.capture(model, "3 + 5 =")
    dla = rp.direct_logit_attribution(run, " 8", " 9")
    parts = dla.total - sum(dla.sel(component=constant) for constant in dla.constants)
    assert float(parts) == pytest.approx(0.4658, abs=1e-3)
    assert float(dla.sel(component="mlp.11")) == pytest.approx(0.1368, abs=1e-3)
    assert float(dla.sel(component="mlp.10")) == pytest.approx(-0.1174, abs=1e-3)
    sigma = run.view.final_norm.scale(run.fetch(rp.parse("resid_post.11"))[0, -1])
    assert float(sigma) == pytest.approx(19.20, abs=0.02)


@backends
def test_D04_the_bias_row_completes_the_sum(model):
    dla = attribute(model, "3 + 5 =", " 8", " 9")
    assert float(dla.sel(component="unembed.bias")) == pytest.approx(0.1782, abs=1e-3)
    assert float(dla.total) == pytest.approx(0.6443, abs=1e-3)
    other = attribute(model, "3 + 5 =", " 8", " 6")
    assert float(other.sel(component="unembed.bias")) == pytest.approx(-0.1003, abs=1e-3)
    assert float(other.total) == pytest.approx(-0.2643, abs=1e-3)


@backends
def test_K12_the_digit_without_its_space_is_another_token(model):
    assert attribute(model, "3 + 5 =", " 8", " 9").answers == (807,)
    with pytest.warns(AnswerWarning, match="token 23; .* token 807"):
        assert attribute(model, "3 + 5 =", "8", " 9").answers == (23,)


@backends
def test_the_largest_parts_of_an_indirect_object(model):
    run = rp.capture(model, SHOPS)
    found = {}
    for by in ("head", "neuron"):
        dla = rp.direct_logit_attribution(run, " Mary", " John", by=by)
        parts = zip(dla.components, dla.values[:, 0, 0].tolist(), strict=True)
        found |= {part: value for part, value in parts if "." in part}
    whole = {f"attn.{layer}" for layer in range(12)} | {f"mlp.{layer}" for layer in range(12)}
    ranked = sorted((p for p in found if p not in whole), key=lambda p: -abs(found[p]))
    expected = {
        "9.9": 1.9583,
        "9.6": 1.6281,
        "10.7": -1.4267,
        "11.1": -0.9117,
        "11.10": -0.9042,
        "10.0": 0.6370,
        "10.10": 0.4524,
        "8.10": 0.4264,
    }
    assert ranked[:8] == list(expected)
    assert {part: found[part] for part in expected} == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("answer", "neuron", "value"),
    [
        (" Mary", "mlp.11.611", 0.3188),
        (" John", "mlp.11.621", -0.4359),
        (" the", "mlp.10.2214", 0.4369),
    ],
)
@backends
def test_the_strongest_neuron_of_a_logit(model, answer, neuron, value):
    """One logit of a centred unembedding is its difference to the mean."""
    dla = attribute(model, SHOPS, answer, by="neuron")
    rows = dla.to_frame()
    rows = rows[rows["component"].str.match(r"mlp\.\d+\.\d+$")]
    best = rows.loc[rows["value"].abs().idxmax()]
    assert best["component"] == neuron
    assert best["value"] == pytest.approx(value, abs=1e-3)


@backends
def test_eight_prompts_have_their_published_differences(model):
    texts, answers, foils = [], [], []
    for template, first, second in EIGHT_PROMPTS:
        for subject, other in ((first, second), (second, first)):
            texts.append(template.format(subject.strip()))
            answers.append(other)
            foils.append(subject)
    dla = attribute(model, texts, answers, foils, by="head")
    expected = [3.337, 3.202, 2.709, 3.797, 1.720, 5.281, 2.601, 5.767]
    assert dla.total[:, 0].tolist() == pytest.approx(expected, abs=2e-3)
    assert float(dla.model_value.mean()) == pytest.approx(3.5519, abs=1e-3)


@pytest.mark.parametrize(("bos", "value"), [(True, 6.754), (False, 2.782)])
@backends
def test_the_beginning_of_sequence_token_moves_a_difference(model, bos, value):
    text = "Claire and Mary went to the shops, then Mary gave a bottle of milk to"
    run = rp.capture(model, text, prepend_bos=bos)
    dla = rp.direct_logit_attribution(run, " Claire", " Mary", by="head")
    assert float(dla.total) == pytest.approx(value, abs=2e-3)


@backends
def test_M01_the_indirect_object_is_predicted(model):
    run = rp.capture(model, "After John and Mary went to the store, John gave a bottle of milk to")
    logits = run.logits_at(-1)[0, 0]
    best = int(logits.argmax())
    assert run.view.tokenizer.decode([best]) == " Mary"
    assert float(logits.softmax(-1)[best]) == pytest.approx(0.7007, abs=1e-3)
    assert float(logits[best]) == pytest.approx(18.09, abs=0.02)


@backends
def test_the_rows_sum_whatever_was_folded(gpt2_source, backend):
    totals = []
    for processing in ("raw", "folded"):
        model = load(gpt2_source, backend, processing)
        for by in zoo.GRAINS:
            dla = attribute(model, SHOPS, " Mary", " John", by=by, positions=None)
            assert float(dla.gap.max()) < 1e-3
            totals.append(dla.total)
    for total in totals[1:]:
        torch.testing.assert_close(total, totals[0], rtol=0, atol=2e-3)


@backends
def test_L02_published_rows_of_the_logit_lens(gpt2_source, backend):
    """Without a beginning-of-sequence token; the last row is the model's own output."""
    model = load(gpt2_source, backend, "raw")
    run = rp.capture(model, "The capital of France is", prepend_bos=False)
    lens = rp.logit_lens(run)
    published = {
        "resid_post.11": {
            " the": 0.08459,
            " now": 0.04795,
            " a": 0.04616,
            " France": 0.03238,
            " Paris": 0.03225,
        },
        "resid_post.10": {" France": 0.24243, " Paris": 0.13915, " now": 0.1028},
        "resid_post.9": {" France": 0.62125, " Paris": 0.18194},
        "resid_post.8": {" now": 0.42266, " located": 0.14541},
        "resid_post.0": {" not": 0.33223},
    }
    for layer, tokens in published.items():
        for token, probability in tokens.items():
            found = float(lens.prob(token).sel(layer=layer, batch=0, pos=-1))
            assert found == pytest.approx(probability, abs=5e-4), (layer, token)


@backends
def test_P15_the_published_strongest_edge(gpt2_source, backend):
    """Head 8.6 to the query of 9.9, the residual edge alone: +0.083 of the way back."""
    model = load(gpt2_source, backend)
    base = rp.capture(model, "When Mary and John went to the store, Mary gave a drink to")
    source = rp.capture(model, "When Mary and John went to the store, John gave a drink to")
    metric = rp.logit_diff(" Mary", " John")
    how = rp.Path(to=rp.receivers(*rp.inputs(model, "q")), using=rp.Resample(source), mlps="freeze")
    effect = rp.ablate(base, rp.heads(model), how, metric=metric)
    share = effect.recovery(rp.measure(source, metric))
    edge = share[effect.targets.index("8.6"), effect.receivers.index("9.9.q")]
    assert float(edge) == pytest.approx(0.083, abs=2e-3)
    assert float(share.nan_to_num().abs().max()) == pytest.approx(float(edge.abs()), abs=1e-6)
