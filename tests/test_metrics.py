"""Metrics: each is what its formula says of the model's own logits, and reads where it says."""

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.errors import PositionError, PromptError, TokenError

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
ANSWERS, FOILS = [3, 4, 5], [6, 7, 9]
TARGET = "1.2"


def toy(backend):
    return zoo.build("hooked") if backend == "hooked" else zoo.named("gpt2_untied")


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def own_logits(model, changed=False):
    """Logits [pos, d_vocab] of every prompt, run alone; with the target zeroed where asked."""

    def zero(z, hook):
        z = z.clone()
        z[:, :, 2] = 0
        return z

    hooks = [("blocks.1.attn.hook_z", zero)] if changed else []
    with torch.no_grad():
        return [
            model.run_with_hooks(torch.tensor([t]), return_type="logits", fwd_hooks=hooks)[0]
            for t in zoo.RAGGED
        ]


def per_prompt(figures):
    return torch.stack(list(figures))


def ablated(model, metric, **options):
    return rp.ablate(rp.capture(model, zoo.RAGGED), TARGET, rp.Zero(), metric=metric, **options)


def check(model, metric, figure, tolerance=1e-10, **options):
    """`figure(row, logits, clean logits)` is the metric of one prompt."""
    effect = ablated(model, metric, **options)
    clean, changed = own_logits(model), own_logits(model, changed=True)
    before = per_prompt(figure(row, logits, logits) for row, logits in enumerate(clean))
    after = per_prompt(figure(row, logits, clean[row]) for row, logits in enumerate(changed))
    assert_close(effect.baseline, before.double(), tolerance)
    assert_close(effect.patched[0], after.double(), tolerance)
    assert_close(effect.total[0], (after - before).double(), tolerance)
    return effect


WHERE = pytest.mark.parametrize(
    "position", [-1, 1, [0, 2, 3], torch.tensor([-1, 0, 2])], ids=["last", "1", "list", "tensor"]
)


def place(position, row):
    return position if isinstance(position, int) else int(position[row])


ROUTES = pytest.mark.parametrize("routes", [("plain",), ("replay",), ("full",)], ids=str)


@ROUTES
@WHERE
@backends
def test_a_logit_difference_is_one_logit_less_another(backend, position, routes):
    metric = rp.logit_diff(ANSWERS, FOILS, position=position)

    def figure(row, logits, clean):
        logits = logits[place(position, row)]
        return logits[ANSWERS[row]] - logits[FOILS[row]]

    assert check(toy(backend), metric, figure, routes=routes).unit == "logits"


@WHERE
@backends
def test_a_logit_is_the_models_own(backend, position):
    metric = rp.logit(ANSWERS, position=position)
    effect = check(
        toy(backend), metric, lambda row, logits, _: logits[place(position, row), ANSWERS[row]]
    )
    assert effect.unit == "logits"


@WHERE
@backends
def test_a_probability_is_the_softmax_over_the_whole_vocabulary(backend, position):
    metric = rp.prob(torch.tensor(ANSWERS), position=position)

    def figure(row, logits, clean):
        return logits[place(position, row)].softmax(-1)[ANSWERS[row]]

    effect = check(toy(backend), metric, figure)
    assert effect.unit == "probability"
    assert bool(((effect.baseline > 0) & (effect.baseline < 1)).all())


@ROUTES
@WHERE
@backends
def test_a_divergence_is_from_the_clean_run_and_never_negative(backend, position, routes):
    def figure(row, logits, clean):
        p, q = (t[place(position, row)].log_softmax(-1) for t in (clean, logits))
        return (p.exp() * (p - q)).sum()

    effect = check(toy(backend), rp.kl(position=position), figure, routes=routes)
    assert not effect.baseline.any()
    assert bool((effect.patched >= -1e-15).all()) and bool((effect.direct >= -1e-15).all())
    assert effect.unit == "nats"


@backends
def test_a_divergence_without_a_position_is_the_mean_over_the_real_ones(backend):
    def figure(row, logits, clean):
        p, q = clean.log_softmax(-1), logits.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1).mean()

    check(toy(backend), rp.kl(position=None), figure)


@ROUTES
@backends
def test_the_loss_is_the_mean_of_each_prompts_own_next_tokens(backend, routes):
    def figure(row, logits, clean):
        following = torch.tensor(zoo.RAGGED[row][1:])
        return torch.nn.functional.cross_entropy(logits[:-1], following)

    effect = check(toy(backend), rp.loss(), figure, routes=routes)
    assert effect.unit == "nats"
    assert effect.weights.tolist() == [7, 2, 4]


@backends
def test_the_loss_is_the_models_own(backend):
    model, rows = toy(backend), [zoo.RAGGED[0], [9, 8, 7, 6, 5, 4, 3, 2]]
    effect = rp.ablate(rp.capture(model, rows), TARGET, rp.Zero(), metric=rp.loss())
    with torch.no_grad():
        own = model(torch.tensor(rows), return_type="loss", loss_per_token=True)
    assert_close(effect.baseline, own.mean(-1), 1e-6)  # theirs may be in float32
    with torch.no_grad():
        assert_close(effect.baseline.mean(), model(torch.tensor(rows), return_type="loss"), 1e-6)


@backends
def test_the_loss_of_a_prompt_of_one_token_is_refused(backend):
    run = rp.capture(toy(backend), [[3, 4, 5], [7]])
    with pytest.raises(PromptError, match="prompt 1 has one token"):
        rp.ablate(run, TARGET, rp.Zero(), metric=rp.loss())


@WHERE
@backends
def test_the_top_prediction_changed_or_not(backend, position):
    def figure(row, logits, clean):
        first, second = (t[place(position, row)].argmax() for t in (clean, logits))
        return (first != second).double()

    effect = check(toy(backend), rp.top1_change(position=position), figure)
    assert set(effect.patched.flatten().tolist()) <= {0.0, 1.0}
    assert not effect.baseline.any()


@backends
def test_something_that_is_destroyed_changes_the_top_prediction(backend):
    run = rp.capture(toy(backend), zoo.RAGGED)
    source = rp.capture(toy(backend), [tokens[::-1] for tokens in zoo.RAGGED])
    how = rp.Resample(source, "rowwise")
    effect = rp.ablate(run, "resid_pre.2", how, metric=rp.top1_change())
    expected = [
        float(run.logits_at(-1)[row, 0].argmax() != source.logits_at(-1)[row, 0].argmax())
        for row in range(3)
    ]
    assert effect.patched[0].tolist() == expected and sum(expected) > 0


@ROUTES
@backends
def test_a_function_of_the_logits_is_given_them_as_they_are(backend, routes):
    model = toy(backend)
    shapes = []

    def metric(logits):
        shapes.append(tuple(logits.shape))
        return logits[:, 1].tanh().sum(-1) + logits[:, 0, 3]

    effect = check(
        model, metric, lambda row, logits, _: logits[1].tanh().sum() + logits[0, 3], routes=routes
    )
    lengths = {len(tokens) for tokens in zoo.RAGGED}
    assert set(shapes) == {(3, length, zoo.D_VOCAB) for length in lengths}
    assert "metric" in repr(effect)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logits: logits[:, 0, 0].mean(), r"shape \(3,\); it gave \(\)"),
        (lambda logits: logits[:, 0], r"shape \(3,\); it gave \(3, 50\)"),
        (lambda logits: logits[:1, 0, 0], r"it gave \(1,\)"),
        (lambda logits: 3.0, "it gave float"),
        (lambda logits: None, "it gave NoneType"),
        (lambda logits: [1.0, 2.0, 3.0], "it gave list"),
    ],
)
@backends
def test_a_function_that_gives_no_number_for_each_prompt_is_named(backend, function, message):
    with pytest.raises(ValueError, match=message):
        ablated(toy(backend), function)


@backends
def test_whole_numbers_and_truth_values_of_a_function_are_numbers(backend):
    effect = ablated(toy(backend), lambda logits: logits[:, 0].argmax(-1))
    expected = [float(logits[0].argmax()) for logits in own_logits(toy(backend))]
    assert effect.baseline.tolist() == expected
    effect = ablated(toy(backend), lambda logits: logits[:, 0, 3] > 0)
    assert set(effect.baseline.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    "metric",
    [rp.loss, rp.logit_diff, rp.kl, dict],
    ids=lambda m: m.__name__,
)
@backends
def test_what_is_no_metric_is_refused_with_the_metrics_shown(backend, metric):
    with pytest.raises(TypeError, match=r"rp\.loss\(\).*function of logits"):
        ablated(toy(backend), metric)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: rp.logit_diff(3, 4, position=p),
        lambda p: rp.logit(3, position=p),
        lambda p: rp.prob(3, position=p),
        lambda p: rp.top1_change(position=p),
    ],
)
@backends
def test_metrics_of_one_position_need_one(backend, make):
    with pytest.raises(TypeError, match="one position a prompt"):
        ablated(toy(backend), make(None))
    with pytest.raises(PositionError):
        ablated(toy(backend), make(5))  # one prompt has 3 tokens
    with pytest.raises(PositionError):
        ablated(toy(backend), make([0, 0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rp.logit_diff(50, 3), "answer id 50 is outside the vocabulary of 50"),
        (lambda: rp.logit_diff(3, -1), "foil id -1 is outside"),
        (lambda: rp.logit_diff([3, 4], 3), "2 answers were given for 3 prompts"),
        (lambda: rp.logit([3, 4]), "2 tokens were given for 3 prompts"),
        (lambda: rp.prob(99), "outside the vocabulary"),
    ],
)
@backends
def test_a_wrong_token_is_named(backend, make, message):
    with pytest.raises(TokenError, match=message):
        ablated(toy(backend), make())


@backends
def test_tokens_as_texts_are_the_same_as_their_ids(backend):
    model = zoo.text_model(backend)
    run = rp.capture(model, ["When Mary and John went to the store, John gave a drink to"])
    ids = [model.tokenizer.encode(t, add_special_tokens=False) for t in (" Mary", " John")]
    assert [len(i) for i in ids] == [1, 1]
    by_text = rp.ablate(run, "mlp.1", rp.Zero(), metric=rp.logit_diff(" Mary", " John"))
    by_id = rp.ablate(run, "mlp.1", rp.Zero(), metric=rp.logit_diff(ids[0][0], ids[1][0]))
    assert torch.equal(by_text.total, by_id.total)
    assert "' Mary' - ' John'" in repr(by_text)


@ROUTES
@backends
def test_under_a_softcap_metrics_read_the_models_own_logits(backend, routes):
    model = zoo.softcapped(backend)
    run = rp.capture(model, zoo.RAGGED)
    target = "mlp.1"
    for metric, figure in (
        (rp.logit_diff(3, 6), lambda logits: logits[-1, 3] - logits[-1, 6]),
        (rp.prob(3), lambda logits: logits[-1].softmax(-1)[3]),
    ):
        effect = rp.ablate(run, target, rp.Zero(), metric=metric, routes=routes)
        for row, tokens in enumerate(zoo.RAGGED):
            with torch.no_grad():
                clean = model(torch.tensor([tokens]), return_type="logits")[0]
                changed = model.run_with_hooks(
                    torch.tensor([tokens]),
                    return_type="logits",
                    fwd_hooks=[("blocks.1.hook_mlp_out", lambda m, hook: torch.zeros_like(m))],
                )[0]
            assert clean.abs().max() < zoo.SOFTCAP
            assert_close(effect.baseline[row], figure(clean), 1e-6)
            assert_close(effect.patched[0, row], figure(changed), 1e-6)


@backends
def test_only_the_columns_that_a_metric_reads_are_unembedded(backend, monkeypatch):
    """Two columns of a vocabulary need no whole readout."""
    model = toy(backend)
    run = rp.capture(model, zoo.RAGGED)
    expected = rp.ablate(run, rp.heads(model), rp.Zero(), metric=rp.logit_diff(3, 6))

    def refuse(self, resid, *rest):
        raise AssertionError("the whole vocabulary was unembedded")

    monkeypatch.setattr(rp.ModelView, "readout", refuse)
    again = rp.ablate(run, rp.heads(model), rp.Zero(), metric=rp.logit_diff(3, 6))
    assert torch.equal(again.total, expected.total)
    with pytest.raises(AssertionError, match="the whole vocabulary"):
        rp.ablate(run, rp.heads(model), rp.Zero(), metric=rp.prob(3))
