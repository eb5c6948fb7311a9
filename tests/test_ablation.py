"""Ablation: every kind and every target does what hooks and whole forward passes do."""

import functools
import json
import math
import re

import pandas
import pytest
import torch
import zoo
from reference import ablation as slow
from zoo_ablation import (
    ANSWER,
    BY_LABEL,
    FOIL,
    GPT2,
    KINDS_OF_BACKEND,
    METRICS,
    OTHERS,
    PLAIN,
    RAGGED_OTHERS,
    ROWS,
    TOYS,
    Slow,
    in_another_order,
    joint_targets,
    targets,
)

import resid_patching as rp
from resid_patching.ablation.fills import Fills
from resid_patching.errors import (
    AblationError,
    AddressError,
    HookNotFiredError,
    NeuronMismatchError,
    NotFiniteError,
    PositionError,
    PromptError,
    ResultFormatError,
)

toys = pytest.mark.parametrize("toy", TOYS, ids=str)
backends = pytest.mark.parametrize("toy", KINDS_OF_BACKEND, ids=str)
DIFF = rp.logit_diff(ANSWER, FOIL)
PER_ROW = [0, 3, -1]
POSITIONS = (None, 2, PER_ROW)


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def largest(tensor):
    return float(tensor.abs().max())


@functools.cache
def runs(toy, which="rows"):
    """A run, its slow twin; kept, because their clean activations are."""
    rows = {"rows": ROWS, "others": OTHERS}[which]
    return rp.capture(toy.model, rows), Slow(toy, rows)


# Every kind, every target, every choice of positions: as hooks and whole forward passes do


def averaged(axes, at=None):
    """The mean of each site over the other prompts, laid out [prompt, pos, ...]."""

    def new(toy, site):
        values = runs(toy, "others")[1].value(site)
        if at is not None:
            values = values[torch.arange(len(values)), torch.tensor(at) % values.shape[1]][:, None]
        n, length = len(ROWS), len(ROWS[0])
        mean = torch.stack(list(values)).mean(0)
        if axes == ("batch", "pos"):
            mean = mean.mean(0, keepdim=True)
        return mean.expand(n, length, *mean.shape[1:])

    return new


KINDS = {
    "zero": (
        lambda toy: rp.Zero(),
        lambda toy, site: torch.zeros_like(runs(toy)[1].value(site)),
        "logit_diff",
    ),
    "mean over batch": (
        lambda toy: rp.Mean(runs(toy, "others")[0], over=("batch",)),
        averaged(("batch",)),
        "loss",
    ),
    "mean over batch and pos": (
        lambda toy: rp.Mean(runs(toy, "others")[0], over=("batch", "pos")),
        averaged(("batch", "pos")),
        "kl",
    ),
    "mean at positions": (
        lambda toy: rp.Mean(runs(toy, "others")[0], over=("batch",), at=[1, -1, 4]),
        averaged(("batch",), at=[1, -1, 4]),
        "prob",
    ),
    "resample": (
        lambda toy: rp.Resample(runs(toy, "others")[0], "rowwise"),
        lambda toy, site: runs(toy, "others")[1].value(site),
        "custom",
    ),
}


def fitting(kind, sites):
    """The sites that a kind can replace: a pattern has no mean over its rows."""
    return [s for s in sites if not (kind == "mean over batch and pos" and "pattern" in s)]


def expected_rows(toy, kind, sites, positions):
    """Baseline, total and direct of the slow way for sites replaced together [prompt]."""
    _, new, metric = KINDS[kind]
    twin = runs(toy)[1]
    total, direct = twin.changed(sites, positions, lambda site: new(toy, site))
    base = twin.score(metric, twin.clean)
    return base, twin.score(metric, total) - base, twin.score(metric, direct) - base


@pytest.mark.parametrize("kind", KINDS)
@toys
def test_one_target_at_a_time_agrees_with_the_reference(toy, kind):
    run, how, metric = runs(toy)[0], KINDS[kind][0](toy), METRICS[KINDS[kind][2]]
    sites = fitting(kind, targets(toy))
    for positions in POSITIONS:
        effect = rp.ablate(run, sites, how, metric=metric, positions=positions)
        assert effect.targets == tuple(sites)
        assert effect.routes == (toy.route,)
        for number, site in enumerate(sites):
            base, total, direct = expected_rows(toy, kind, [site], positions)
            assert_close(effect.baseline, base)
            assert_close(effect.total[number], total)
            assert_close(effect.direct[number], direct)
            assert_close(effect.patched[number], base + total)
        assert largest(effect.total) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@toys
def test_targets_together_agree_with_the_reference_in_any_order(toy, kind):
    run, how, metric = runs(toy)[0], KINDS[kind][0](toy), METRICS[KINDS[kind][2]]
    for sites in joint_targets(toy):
        sites = fitting(kind, sites)
        for positions in POSITIONS:
            base, total, direct = expected_rows(toy, kind, sites, positions)
            both = kind == "zero" and positions is None
            orders = [sites, in_another_order(sites)] if both else [sites]
            for order in orders:
                effect = rp.ablate(run, order, how, metric=metric, positions=positions, joint=True)
                assert effect.targets == (" + ".join(order),)
                assert_close(effect.baseline, base)
                assert_close(effect.total[0], total)
                assert_close(effect.direct[0], direct)


@backends
def test_a_shuffle_agrees_with_the_reference_on_prompts_of_different_lengths(toy):
    run = rp.capture(toy.model, zoo.RAGGED)
    source = rp.capture(toy.model, [*zoo.RAGGED, *RAGGED_OTHERS])
    how = rp.Resample(source, pairing="shuffle", seed=3)
    partner = [2, 0, 1]  # the only other row of each row's length
    for positions in (None, 1, [-1, 0, 3]):
        effect = rp.ablate(run, targets(toy), how, metric=METRICS["loss"], positions=positions)
        for row, tokens in enumerate(zoo.RAGGED):
            twin, other = Slow(toy, [tokens]), Slow(toy, [RAGGED_OTHERS[partner[row]]])
            place = [positions[row]] if isinstance(positions, list) else positions
            base = twin.score("loss", twin.clean)
            for number, site in enumerate(targets(toy)):
                total, direct = twin.changed([site], place, other.value)
                assert_close(effect.total[number, [row]], twin.score("loss", total) - base)
                assert_close(effect.direct[number, [row]], twin.score("loss", direct) - base)


@backends
def test_the_reference_notices_another_value(toy):
    """A twin of the tests above: with a bit more than zeros put in place they would fail."""
    effect = rp.ablate(runs(toy)[0], targets(toy), rp.Zero(), metric=DIFF)
    twin = runs(toy)[1]
    base = twin.score("logit_diff", twin.clean)
    for number, site in enumerate(targets(toy)):
        noise = torch.randn(twin.value(site).shape, generator=torch.Generator().manual_seed(0))
        total, direct = twin.changed([site], None, lambda _, noise=noise: noise.double() / 1e4)
        assert largest(effect.total[number] - (twin.score("logit_diff", total) - base)) > 1e-9
        assert site.endswith(("q", "k")) or (
            largest(effect.direct[number] - (twin.score("logit_diff", direct) - base)) > 1e-9
        )


# Laws


@toys
def test_resampling_a_run_from_itself_changes_nothing_exactly(toy):
    run = rp.capture(toy.model, zoo.RAGGED)
    how = rp.Resample(run, pairing="rowwise")
    for positions, metric in ((None, DIFF), (1, rp.loss()), ([0, 2, -1], custom_over_last)):
        effect = rp.ablate(run, targets(toy), how, metric=metric, positions=positions)
        assert not effect.total.any() and not effect.direct.any()
    for sites in joint_targets(toy):
        effect = rp.ablate(run, sites, how, metric=DIFF, joint=True)
        assert not effect.total.any() and not effect.direct.any()


def custom_over_last(logits):
    return logits[:, 0].logsumexp(-1)


@backends
def test_replacing_nothing_is_the_baseline_exactly(toy):
    effect = rp.ablate(runs(toy)[0], [], rp.Zero(), metric=DIFF, joint=True)
    assert effect.targets == ("nothing",)
    assert torch.equal(effect.patched[0], effect.baseline)
    assert not effect.total.any() and not effect.direct.any()


@backends
def test_no_target_one_at_a_time_gives_no_rows(toy):
    effect = rp.ablate(runs(toy)[0], [], rp.Zero(), metric=DIFF)
    assert effect.values.shape == (0, 3)
    assert effect.to_frame().empty


@pytest.mark.parametrize("toy", [*KINDS_OF_BACKEND, TOYS[-1]], ids=str)
def test_one_target_alone_and_jointly_are_the_same(toy):
    """Alone, a call has what this one target needs, and nothing that others ask for."""
    run = runs(toy)[0]
    effect = rp.ablate(run, targets(toy), rp.Zero(), metric=DIFF, positions=2)
    for number, site in enumerate(targets(toy)):
        joint = rp.ablate(run, [site], rp.Zero(), metric=DIFF, positions=2, joint=True)
        assert joint.targets == (site,)
        assert_close(joint.total[0], effect.total[number], 1e-12)
        assert_close(joint.direct[0], effect.direct[number], 1e-12)


@backends
def test_direct_and_indirect_sum_to_total(toy):
    effect = rp.ablate(runs(toy)[0], targets(toy), rp.Zero(), metric=DIFF)
    assert_close(effect.direct + effect.indirect, effect.total, 1e-14)
    assert largest(effect.indirect) > 0.1 and largest(effect.direct) > 0.1


@backends
def test_a_writer_of_the_last_stage_has_no_indirect_effect(toy):
    effect = rp.ablate(runs(toy)[0], ["mlp.2", "mlp.2.7", "mlp.2.bias"], rp.Zero(), metric=DIFF)
    assert largest(effect.indirect) < 1e-12


@toys
def test_with_the_norm_frozen_zeroing_a_writer_directly_is_minus_its_attribution(toy):
    run, twin = runs(toy)
    dla = rp.direct_logit_attribution(run, ANSWER, FOIL, by="head", positions=-1)
    writers = [c for c in dla.components if c not in dla.constants]
    final = twin.cache["blocks.2.hook_resid_post"][:, -1]
    weights = twin.weights
    centred = final - final.mean(-1, keepdim=True) if toy.norm == "LN" else final
    scale = ((centred**2).mean(-1, keepdim=True) + toy.eps) ** 0.5
    direction = weights["W_U"][:, ANSWER] - weights["W_U"][:, FOIL]
    for site in writers:
        layer, _, _, slot = slow.describe(site)
        write = twin.value(site)[:, -1]
        if slot is not None:
            write = write @ weights["W_O"][layer, slot]
        lost = -write + (write.mean(-1, keepdim=True) if toy.norm == "LN" else 0)
        frozen = (lost / scale * weights["gain"]) @ direction
        assert_close(frozen, -dla.sel(component=site).squeeze(-1))


@toys
def test_with_the_norm_live_zeroing_a_writer_directly_is_the_closed_form(toy):
    run, twin = runs(toy)
    dla = rp.direct_logit_attribution(run, ANSWER, FOIL, by="head", positions=-1)
    writers = [c for c in dla.components if c not in dla.constants]
    effect = rp.ablate(run, writers, rp.Zero(), metric=DIFF)
    final = twin.cache["blocks.2.hook_resid_post"][:, -1]
    base = twin.score("logit_diff", twin.clean)
    for number, site in enumerate(writers):
        layer, _, _, slot = slow.describe(site)
        write = twin.value(site)[:, -1]
        if slot is not None:
            write = write @ twin.weights["W_O"][layer, slot]
        logits = slow.unembed(final - write, twin.weights, toy.norm, toy.eps)
        assert_close(effect.direct[number], logits[:, ANSWER] - logits[:, FOIL] - base)
    attributions = torch.stack([dla.sel(component=site).squeeze(-1) for site in writers])
    assert largest(effect.direct + attributions) > 1e-3  # the norm's scale moved


@toys
def test_a_ragged_batch_equals_its_single_runs(toy):
    batch = rp.capture(toy.model, zoo.RAGGED)
    singles = [rp.capture(toy.model, tokens) for tokens in zoo.RAGGED]
    cases = ((DIFF, None), (rp.loss(), -1), (rp.kl(position=None), 1))
    for metric, positions in cases:
        options = {"metric": metric, "positions": positions}
        together = rp.ablate(batch, targets(toy), rp.Zero(), **options)
        for row, single in enumerate(singles):
            alone = rp.ablate(single, targets(toy), rp.Zero(), **options)
            assert_close(together.baseline[[row]], alone.baseline)
            assert_close(together.total[:, [row]], alone.total)
            assert_close(together.direct[:, [row]], alone.direct)


@backends
@pytest.mark.parametrize("tokens", [[[7]], [[7], [9]], [[7], [9, 3, 5]]], ids=str)
def test_prompts_of_one_token_agree_with_the_reference(toy, tokens):
    effect = rp.ablate(rp.capture(toy.model, tokens), targets(toy), rp.Zero(), metric=DIFF)
    for row, ids in enumerate(tokens):
        twin = Slow(toy, [ids])
        base = twin.score("logit_diff", twin.clean)
        for number, site in enumerate(targets(toy)):
            zeros = torch.zeros_like(twin.value(site))
            total, direct = twin.changed([site], None, lambda _, zeros=zeros: zeros)
            assert_close(effect.total[number, [row]], twin.score("logit_diff", total) - base)
            assert_close(effect.direct[number, [row]], twin.score("logit_diff", direct) - base)


@toys
def test_a_change_behind_the_scored_position_has_no_effect_exactly(toy):
    run = runs(toy)[0]
    metric = rp.logit_diff(ANSWER, FOIL, position=2)
    for positions in (3, [3, 4, -1]):
        effect = rp.ablate(run, targets(toy), rp.Zero(), metric=metric, positions=positions)
        assert not effect.total.any() and not effect.direct.any()


@backends
def test_a_head_and_its_z_are_one_place(toy):
    run = runs(toy)[0]
    head, z = (rp.ablate(run, site, rp.Zero(), metric=DIFF) for site in ("1.2", "1.2.z"))
    assert torch.equal(head.total, z.total) and torch.equal(head.direct, z.direct)
    with pytest.raises(AddressError, match="twice"):
        rp.ablate(run, ["1.2", "1.2.z"], rp.Zero(), metric=DIFF, joint=True)


@backends
def test_a_state_is_set_whatever_led_to_it(toy):
    """What is replaced later in the model wins, in whatever order the targets are given."""
    run = runs(toy)[0]
    how = rp.Mean(runs(toy, "others")[0], over=("batch",))
    alone = rp.ablate(run, "resid_pre.0", how, metric=DIFF)
    for order in (["embed", "resid_pre.0"], ["resid_pre.0", "embed"]):
        for routes in (("plain", "full"), ("replay", "full"), ("full",)):
            both = rp.ablate(run, order, how, metric=DIFF, joint=True, routes=routes)
            assert_close(both.total, alone.total)
            assert_close(both.direct, alone.direct)


# Mean


@backends
def test_pads_of_a_reference_never_enter_a_mean(toy):
    """Ids of a pad token behind a row change nothing; nor does how many of them there are."""
    run = runs(toy)[0]
    found = []
    for pad in (0, 11):
        rows = torch.full((3, 9), pad)
        mask = torch.zeros_like(rows)
        for number, tokens in enumerate(zoo.RAGGED):
            rows[number, : len(tokens)] = torch.tensor(tokens)
            mask[number, : len(tokens)] = 1
        reference = rp.capture(toy.model, rows, mask=mask)
        how = rp.Mean(reference, over=("batch", "pos"))
        sites = [s for s in targets(toy) if "pattern" not in s]
        found.append(rp.ablate(run, sites, how, metric=DIFF).total)
    assert torch.equal(*found)
    twins = [Slow(toy, [tokens]) for tokens in zoo.RAGGED]
    twin = runs(toy)[1]
    base = twin.score("logit_diff", twin.clean)
    for number, site in enumerate(sites):
        every = torch.cat([other.value(site)[0] for other in twins])
        mean = every.sum(0) / len(every)
        total, _ = twin.changed([site], None, lambda _, m=mean: m.expand(3, 6, *m.shape))
        assert_close(found[0][number], twin.score("logit_diff", total) - base)


def test_a_mean_of_a_bfloat16_model_is_summed_in_float32():
    rows = torch.arange(24 * 16).reshape(24, 16) % 50
    run = rp.capture(zoo.build(zoo.BACKENDS[0], dtype=torch.bfloat16), rows)
    site = rp.parse("mlp.1")
    how = rp.Mean(run, over=("batch", "pos"))
    found = Fills(run, how, [site], run.locate(None)).fill(site)(
        slice(0, 1), torch.zeros(1, 1).long()
    )
    expected = run.fetch(site).float().mean((0, 1)).bfloat16()
    assert torch.equal(found[0, 0], expected)


@backends
def test_a_mean_over_prompts_keeps_position_and_one_over_both_does_not(toy):
    run, other = runs(toy)[0], runs(toy, "others")[0]
    by_position = rp.ablate(run, "resid_pre.1", rp.Mean(other, over=("batch",)), metric=DIFF)
    for position in range(6):
        aligned = rp.Mean(other, over=("batch",), at=position)
        one = rp.ablate(run, "resid_pre.1", aligned, metric=DIFF, positions=position)
        same = rp.Mean(other, over=("batch",))
        two = rp.ablate(run, "resid_pre.1", same, metric=DIFF, positions=position)
        assert_close(one.total, two.total, 1e-12)
    over_both = rp.ablate(run, "resid_pre.1", rp.Mean(other, over=("batch", "pos")), metric=DIFF)
    assert largest(by_position.total - over_both.total) > 0.1
    assert (
        over_both.how
        == rp.ablate(run, "mlp.1", rp.Mean(other, over=("pos", "batch")), metric=DIFF).how
    )


@backends
def test_a_mean_of_one_prompt_over_prompts_is_a_resample_from_it(toy):
    run = rp.capture(toy.model, ROWS[0])
    other = rp.capture(toy.model, OTHERS[1])
    mean = rp.ablate(run, targets(toy), rp.Mean(other, over=("batch",)), metric=DIFF)
    again = rp.ablate(run, targets(toy), rp.Resample(other, "rowwise"), metric=DIFF)
    assert_close(mean.total, again.total, 1e-12)


# Errors


class Counter:
    """Counts forward passes of a model, without a hook of TransformerLens."""

    __module__ = "transformers.tests"  # as a library's own, it is no change of the model

    def __init__(self, model):
        self.passes = 0
        self.handle = model.blocks[0].register_forward_pre_hook(self)

    def __call__(self, *_):
        self.passes += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()


def unequal(run, longer):
    return [
        lambda: rp.ablate(run, "1.2", rp.Resample(longer, "rowwise"), metric=DIFF),
        lambda: rp.ablate(run, "1.2", rp.Mean(longer, over=("batch",)), metric=DIFF),
    ]


@backends
@pytest.mark.parametrize("number", [0, 1], ids=["resample", "mean"])
def test_A09_unequal_lengths_raise_with_both_lengths_before_the_model_runs(toy, number):
    run, longer = rp.capture(toy.model, ROWS), rp.capture(toy.model, [r + [1] for r in ROWS])
    with Counter(toy.model) as counter, pytest.raises(PromptError, match="6.*7"):
        unequal(run, longer)[number]()
    assert counter.passes == 0


@backends
def test_A09_a_mean_over_a_ragged_run_is_refused_unless_it_leaves_position(toy):
    ragged = rp.capture(toy.model, zoo.RAGGED)
    keeping = rp.Mean(ragged, over=("batch",))
    for run in (ragged, runs(toy)[0]):
        with pytest.raises(PromptError, match=r"3, 5, 8.*at=|at="):
            rp.ablate(run, "1.2", keeping, metric=DIFF)
        rp.ablate(run, "1.2", rp.Mean(ragged, over=("batch", "pos")), metric=DIFF)
        rp.ablate(run, "1.2", rp.Mean(ragged, over=("batch",), at=-1), metric=DIFF)


@backends
def test_a_shuffle_never_gives_a_row_its_own_and_follows_its_seed(toy):
    rows = [[a, b, 5, 6] for a in (1, 2, 3) for b in (7, 8)]
    rows.append(rows[0])  # the same prompt twice: neither may stand in for the other
    run = rp.capture(toy.model, rows)
    every = set()
    for seed in range(12):
        how = rp.Resample(run, pairing="shuffle", seed=seed)
        effect = rp.ablate(run, "resid_post.2", how, metric=DIFF)
        again = rp.ablate(run, "resid_post.2", how, metric=DIFF)
        assert torch.equal(effect.patched, again.patched)
        # The last state decides the logits, so each row shows whose values it got.
        near = (effect.patched[0][:, None] - effect.baseline[None]).abs() < 1e-9
        assert bool(near.any(1).all())
        for row, matches in enumerate(near):
            got = {tuple(rows[other]) for other in matches.nonzero().flatten().tolist()}
            assert len(got) == 1 and tuple(rows[row]) not in got
        every.add(tuple(effect.patched[0].tolist()))
    assert len(every) > 3


@backends
def test_a_shuffle_draws_without_touching_the_global_random_state(toy):
    before = torch.random.get_rng_state()
    run = runs(toy)[0]
    rp.ablate(run, "1.2", rp.Resample(run, pairing="shuffle", seed=0), metric=DIFF)
    assert torch.equal(before, torch.random.get_rng_state())


@backends
def test_a_shuffle_without_another_prompt_of_that_length_is_refused(toy):
    run = rp.capture(toy.model, zoo.RAGGED)
    with pytest.raises(PromptError, match="8 tokens.*no other prompt"):
        rp.ablate(run, "1.2", rp.Resample(run, pairing="shuffle", seed=0), metric=DIFF)


SHOWN = ("Zero()", "Mean(reference, over=", "Resample(source)", "Path(to=")


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (lambda run: rp.ablate(run, "1.2", metric=DIFF), "how"),
        (lambda run: rp.Mean(run), "over"),
        (lambda run: rp.Mean(over=("batch",)), "reference"),
        (lambda run: rp.Resample(), "source"),
        (lambda run: rp.Path(to="logits", using=rp.Zero()), "mlps"),
        (lambda run: rp.Path(to="logits", mlps="freeze"), "using"),
        (lambda run: rp.Path(using=rp.Zero(), mlps="freeze"), "to"),
    ],
)
def test_what_changes_the_science_may_not_be_left_out(call, missing):
    with pytest.raises(TypeError, match=f"missing a? ?.*'{missing}'"):
        call(runs(PLAIN)[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda run: rp.Mean(run, over=()),
        lambda run: rp.Mean(run, over=("pos",)),
        lambda run: rp.Mean(run, over=("batch", "batch")),
        lambda run: rp.Resample(run, pairing="shuffle"),
        lambda run: rp.Resample(run, pairing="rowwise", seed=0),
    ],
)
def test_a_kind_without_what_it_needs_is_refused_and_the_kinds_are_shown(make):
    with pytest.raises(AblationError) as error:
        make(runs(PLAIN)[0])
    assert all(kind in str(error.value) for kind in SHOWN)


def test_over_as_one_word_is_read_as_that_axis():
    assert rp.Mean(runs(PLAIN)[0], over="batch").over == ("batch",)


@backends
@pytest.mark.parametrize("kind", ["mean", "resample"])
def test_a_run_of_another_model_is_refused(toy, kind):
    other = rp.capture(zoo.named("neox_sequential"), ROWS)
    how = rp.Mean(other, over=("batch",)) if kind == "mean" else rp.Resample(other, "rowwise")
    with pytest.raises(AblationError, match="another model"):
        rp.ablate(runs(toy)[0], "1.2", how, metric=DIFF)


@backends
def test_pairing_by_row_needs_as_many_rows(toy):
    other = rp.capture(toy.model, OTHERS[:2])
    with pytest.raises(PromptError, match=r"\(2\).*\(3\)"):
        rp.ablate(runs(toy)[0], "1.2", rp.Resample(other, "rowwise"), metric=DIFF)


@backends
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("head nine", "is no address"),
        ("3.0", "layers 0 to 2"),
        ("1.4", "heads 0 to 3"),
        ("1.4.z", "heads 0 to 3"),
        ("mlp.1.64", "neurons 0 to 63"),
        ("mlp.1.999", "neurons 0 to"),
        ("attn.3.bias", "layers 0 to 2"),
        ("logits", "cannot be replaced"),
        ("mlp.1.in", "cannot be replaced"),
        ("ln_final.bias", "cannot be replaced"),
        (["1.2", "L1H2"], "1.2 was given twice"),
        (["attn.1", "blocks.1.hook_attn_out"], "attn.1 was given twice"),
        (["1.2", "1.2.z"], "1.2.z was given twice (once as 1.2)"),
    ],
    ids=str,
)
def test_a_target_that_the_model_lacks_is_named(toy, target, message):
    if "64" in str(target) and toy is GPT2:
        target = "mlp.1.128"
        message = "neurons 0 to 127"
    with Counter(toy.model) as counter, pytest.raises(AddressError, match=re.escape(message)):
        rp.ablate(runs(toy)[0], target, rp.Zero(), metric=DIFF)
    assert counter.passes == 0


def test_pos_embed_and_resid_mid_are_refused_where_there_are_none():
    toy = BY_LABEL["bridge neox_parallel raw"]
    with pytest.raises(AddressError, match="attention and MLP read the same state"):
        rp.ablate(runs(toy)[0], "resid_mid.1", rp.Zero(), metric=DIFF)
    with pytest.raises(AddressError, match="adds no learned position"):
        rp.ablate(runs(toy)[0], "pos_embed", rp.Zero(), metric=DIFF)


@pytest.mark.parametrize("toy", [t for t in TOYS if "grouped" in str(t)], ids=str)
def test_keys_and_values_go_by_key_value_head(toy):
    run = runs(toy)[0]
    effect = rp.ablate(run, ["1.0.k", "1.1.k", "1.0.v", "1.1.v", "1.3.q"], rp.Zero(), metric=DIFF)
    assert (effect.total.abs() > 1e-9).all()
    for target in ("1.2.k", "1.3.v"):
        with pytest.raises(AddressError, match="key-value heads 0 to 1"):
            rp.ablate(run, target, rp.Zero(), metric=DIFF)


@backends
def test_a_position_that_a_prompt_lacks_is_named(toy):
    run = rp.capture(toy.model, zoo.RAGGED)
    for positions in (3, [0, -4, 0], [0, 0]):
        with pytest.raises(PositionError):
            rp.ablate(run, "1.2", rp.Zero(), metric=DIFF, positions=positions)


@toys
@pytest.mark.parametrize("joint", (False, True))
def test_each_position_in_turn_is_that_position_alone(toy, joint):
    run = rp.capture(toy.model, zoo.RAGGED)
    sites = joint_targets(toy)[1] if joint else targets(toy)
    options = {"metric": DIFF, "joint": joint}
    effect = rp.ablate(run, sites, rp.Zero(), positions="each", **options)
    assert [axis.name for axis in effect.axes] == ["target", "position", "batch"]
    assert effect.positions == "each position in turn"
    for place in range(max(map(len, zoo.RAGGED))):
        rows = [row for row, tokens in enumerate(zoo.RAGGED) if place < len(tokens)]
        single = rp.capture(toy.model, [zoo.RAGGED[row] for row in rows])
        alone = rp.ablate(single, sites, rp.Zero(), positions=place, **options)
        column = effect.position(place)
        assert column.positions == alone.positions
        for name in ("total", "direct", "patched"):
            found = getattr(column, name)
            assert_close(found[:, rows], getattr(alone, name))
            others = [row for row in range(len(zoo.RAGGED)) if row not in rows]
            assert found[:, others].isnan().all()


def test_a_sweep_over_positions_survives_json_and_names_its_columns():
    run = rp.capture(PLAIN.model, ROWS)
    how = rp.Resample(rp.capture(PLAIN.model, OTHERS))
    effect = rp.ablate(run, ["resid_pre.1", "mlp.0"], how, metric=DIFF, positions="each")
    again = rp.Effect.from_json(effect.to_json())
    assert torch.equal(again.total, effect.total) and again.columns == effect.columns
    n_positions = len(ROWS[0])
    frame = effect.intervals(seed=0)
    assert frame["position"].tolist() == [*range(n_positions)] * 2
    assert frame["total"].tolist() == pytest.approx(effect.total.mean(-1).flatten().tolist())
    assert len(effect.to_frame()) == effect.total.numel()
    assert effect.recovery(rp.measure(how.source, DIFF)).shape == (2, n_positions)
    with pytest.raises(ValueError, match="choose one position first"):
        effect.grid()


def test_a_path_or_another_word_for_positions_is_refused():
    run = rp.capture(PLAIN.model, ROWS)
    how = rp.Path(to="logits", using=rp.Zero(), mlps="freeze")
    with pytest.raises(AblationError, match="once for each position"):
        rp.ablate(run, "1.2", how, metric=DIFF, positions="each")
    with pytest.raises(PositionError, match="'end'"):
        rp.ablate(run, "1.2", rp.Zero(), metric=DIFF, positions="end")


@backends
def test_a_pattern_has_no_mean_over_positions(toy):
    how = rp.Mean(runs(toy, "others")[0], over=("batch", "pos"))
    with pytest.raises(AblationError, match="pattern"):
        rp.ablate(runs(toy)[0], "1.2.pattern", how, metric=DIFF)


# Results


@pytest.fixture(scope="module")
def effect():
    run = rp.capture(PLAIN.model, zoo.RAGGED)
    return rp.ablate(run, ["0.1", "2.3", "mlp.1"], rp.Zero(), metric=rp.loss(), positions=1)


def test_an_effect_survives_json(effect):
    again = rp.Effect.from_json(effect.to_json())
    for name in ("values", "baseline", "patched", "direct", "weights"):
        assert torch.equal(getattr(again, name), getattr(effect, name))
    for name in ("axes", "unit", "provenance", "how", "metric", "joint", "positions", "routes"):
        assert getattr(again, name) == getattr(effect, name)
    assert repr(again) == repr(effect)
    pandas.testing.assert_frame_equal(again.perplexity, effect.perplexity)


def test_an_effect_with_nothing_to_weigh_survives_json():
    run = rp.capture(PLAIN.model, zoo.RAGGED)
    effect = rp.ablate(run, ["0.1"], rp.Zero(), metric=DIFF, joint=True)
    again = rp.Effect.from_json(effect.to_json())
    assert again.weights is None and again.joint is True
    assert torch.equal(again.total, effect.total)


@pytest.mark.parametrize("key", ["direct", "routes", "how", "provenance"])
def test_json_without_a_part_is_refused(effect, key):
    body = json.loads(effect.to_json())
    del body[key]
    with pytest.raises(ResultFormatError):
        rp.Effect.from_json(json.dumps(body))


def test_the_frame_has_a_line_for_each_target_and_prompt(effect):
    frame = effect.to_frame()
    assert list(frame.columns) == [
        "target", "layer", "head", "prompt",
        "baseline", "patched", "direct", "indirect", "value",
    ]  # fmt: skip
    assert len(frame) == 9
    row = frame[(frame.target == "2.3") & (frame.prompt == 1)].iloc[0]
    assert row.value == float(effect.total[1, 1])
    assert row.baseline == float(effect.baseline[1])
    assert row.patched == float(effect.patched[1, 1])
    assert row.direct == float(effect.direct[1, 1])
    assert row.indirect == float(effect.indirect[1, 1])
    means = effect.mean(effect.total).abs()
    assert effect.top(2).value.abs().tolist() == pytest.approx(means.topk(2)[0].tolist())


def test_the_summary_is_the_mean_its_error_and_a_seeded_interval(effect):
    one, two = effect.intervals(seed=1), effect.intervals(seed=1)
    pandas.testing.assert_frame_equal(one, two)
    few = [effect.intervals(seed=seed, draws=9) for seed in (1, 2)]
    assert not few[0].equals(few[1])
    mean = effect.total.mean(1)
    assert one.total.tolist() == pytest.approx(mean.tolist())
    spread = ((effect.total - mean[:, None]) ** 2).sum(1) / 2
    assert one.se.tolist() == pytest.approx(((spread / 3) ** 0.5).tolist())
    assert (one.low <= one.total).all() and (one.total <= one.high).all()
    assert one.direct.tolist() == pytest.approx(effect.direct.mean(1).tolist())
    assert one.n.tolist() == [3, 3, 3]
    wide = effect.intervals(seed=1, confidence=0.99)
    assert (wide.low <= one.low).all() and (wide.high >= one.high).all()


def test_the_summary_of_one_prompt_has_no_spread():
    run = rp.capture(PLAIN.model, ROWS[0])
    summary = rp.ablate(run, ["0.1"], rp.Zero(), metric=DIFF).intervals(seed=0)
    assert summary[["se", "low", "high"]].isna().all().all()
    assert not summary.total.isna().any()


def test_the_grid_is_of_heads_and_undefined_where_a_head_was_no_target(effect):
    for of in ("total", "direct", "indirect"):
        grid, values = effect.grid(of), getattr(effect, of)
        assert [axis.name for axis in grid.axes] == ["layer", "head", "batch"]
        assert torch.equal(grid.sel(layer=0, head=1), values[0])
        assert torch.equal(grid.sel(layer=2, head=3), values[1])
        assert int(grid.values.isnan().all(-1).sum()) == grid.values[..., 0].numel() - 2
    with pytest.raises(ValueError, match="a grid shows heads"):
        rp.ablate(runs(PLAIN)[0], "mlp.1", rp.Zero(), metric=DIFF).grid()


def test_perplexity_weighs_every_token_the_same(effect):
    lengths = [len(tokens) - 1 for tokens in zoo.RAGGED]
    before = sum(n * x for n, x in zip(lengths, effect.baseline.tolist(), strict=True))
    after = sum(n * x for n, x in zip(lengths, effect.patched[1].tolist(), strict=True))
    row = effect.perplexity.iloc[1]
    assert row.target == "2.3"
    assert row.before == pytest.approx(math.exp(before / sum(lengths)), rel=1e-12)
    assert row.after == pytest.approx(math.exp(after / sum(lengths)), rel=1e-12)
    assert row.ratio == pytest.approx(row.after / row.before, rel=1e-12)


def test_only_a_loss_has_a_perplexity():
    with pytest.raises(ValueError, match="perplexity"):
        _ = rp.ablate(runs(PLAIN)[0], "1.2", rp.Zero(), metric=DIFF).perplexity


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda run: rp.Zero(), ("zero ablation",)),
        (lambda run: rp.Mean(run, over=("batch",)), ("mean over batch", "3 prompts")),
        (lambda run: rp.Mean(run, over=("batch", "pos")), ("mean over batch and pos",)),
        (lambda run: rp.Mean(run, over=("batch",), at=1), ("mean over batch at named positions",)),
        (lambda run: rp.Resample(run, "rowwise"), ("resample rowwise", "3 prompts")),
        (lambda run: rp.Resample(run, "shuffle", seed=5), ("resample shuffle", "seed 5")),
    ],
)
def test_the_repr_is_one_line_that_names_the_kind_and_where_it_came_from(make, words):
    how = make(runs(PLAIN, "others")[0])
    effect = rp.ablate(runs(PLAIN)[0], ["1.2"], how, metric=DIFF, positions=2, joint=True)
    assert "\n" not in repr(effect)
    for word in (*words, "position 2", "joint", "logit difference 3 - 6", "Effect("):
        assert word in repr(effect)
    assert effect.how in effect.provenance.plan
    source = getattr(how, "reference", getattr(how, "source", None))
    assert source is None or source.prompts.hash[:8] in effect.provenance.plan


@backends
def test_the_helpers_name_every_head_writer_state_and_neuron(toy):
    model = toy.model
    assert list(map(str, rp.heads(model))) == [f"{a}.{b}" for a in range(3) for b in range(4)]
    assert list(map(str, rp.writers(model)))[:4] == ["embed", "pos_embed", "attn.0", "mlp.0"]
    assert list(map(str, rp.streams(model)))[:3] == ["resid_pre.0", "resid_mid.0", "resid_pre.1"]
    assert str(rp.streams(model)[-1]) == "resid_post.2"
    assert len(rp.neurons(model, 1)) == model.blocks[1].mlp.W_out.shape[0]
    assert rp.heads(runs(toy)[0]) == rp.heads(model)
    with pytest.raises(AddressError, match="layers 0 to 2"):
        rp.neurons(model, 3)
    parallel = BY_LABEL["bridge neox_parallel raw"].model
    assert not any("mid" in str(state) for state in rp.streams(parallel))


@backends
def test_progress_counts_every_target_once_for_a_group_of_prompts(toy):
    counts = []
    sites = targets(toy)
    rp.ablate(runs(toy)[0], sites, rp.Zero(), metric=DIFF, progress=counts.append)
    assert sum(counts) == len(sites)


# The model is left as it was


class Failure(Exception):
    """Something of the caller's that goes wrong."""


def failing(*_, **__):
    raise Failure


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@backends
def test_A10_the_model_and_what_was_fetched_are_left_as_they_were(toy, grad):
    model = fresh(toy)
    point = model.hook_dict["blocks.1.hook_resid_pre"]
    model.blocks[1].register_forward_hook(lambda *_: None)
    source = rp.capture(model, OTHERS)
    source.fetch_all([rp.parse("1.2"), rp.parse("1.2.pattern"), rp.parse("resid_pre.1")])
    kept = {name: value.clone() for name, value in source._kept.items()}
    with torch.set_grad_enabled(grad):
        before = zoo.snapshot(model)
        for routes in (("plain", "replay", "full"), ("replay", "full"), ("full",)):
            for how in (rp.Zero(), rp.Resample(source, "rowwise"), rp.Mean(source, over="batch")):
                run = rp.capture(model, ROWS)
                effect = rp.ablate(run, targets(toy), how, metric=DIFF, routes=routes)
                assert not effect.total.requires_grad
                assert list(zoo.differences(before, zoo.snapshot(model))) == []
    assert point.fwd_hooks == []
    for name, value in kept.items():
        assert torch.equal(source._kept[name], value)


def fresh(toy):
    """A model of this toy that may be changed."""
    return zoo.fresh_named("gpt2_untied") if toy is GPT2 else zoo.fresh("hooked", zoo.Cell())


@pytest.mark.parametrize("routes", [("plain",), ("replay",), ("full",)], ids=str)
@backends
def test_A06_the_model_is_left_as_it_was_when_a_metric_raises(toy, routes):
    model = fresh(toy)
    run = rp.capture(model, ROWS)
    expected = rp.ablate(run, targets(toy), rp.Zero(), metric=DIFF, routes=routes)
    before = zoo.snapshot(model)
    for after in (0, 1, 3):  # in the clean run, and in a changed one
        calls = []

        def metric(logits, calls=calls, after=after):
            calls.append(1)
            return logits[:, -1, 0] if len(calls) <= after else failing()

        with pytest.raises(Failure):
            rp.ablate(run, targets(toy), rp.Zero(), metric=metric, routes=routes)
        assert list(zoo.differences(before, zoo.snapshot(model))) == []
    again = rp.ablate(run, targets(toy), rp.Zero(), metric=DIFF, routes=routes)
    assert torch.equal(again.total, expected.total)


@pytest.mark.parametrize("passes", [0, 1, 2])
@backends
def test_A06_the_model_is_left_as_it_was_when_a_hook_raises(toy, passes):
    model = fresh(toy)
    run = rp.capture(model, ROWS)
    calls = []

    def hook(tensor, hook):
        calls.append(1)
        return None if len(calls) <= passes else failing()

    rp.ablate(run, "1.2", rp.Zero(), metric=DIFF)
    model.hook_dict["blocks.1.hook_attn_out"].add_hook(zoo.watching(hook))
    before = zoo.snapshot(model)
    with pytest.raises(Failure):
        rp.ablate(run, targets(toy), rp.Zero(), metric=DIFF)
    assert list(zoo.differences(before, zoo.snapshot(model))) == []


@backends
def test_A07_backward_hooks_and_gradients_of_the_caller_survive_and_none_are_left(toy):
    model = fresh(toy)
    seen = []
    tokens = torch.tensor(ROWS)
    model.hook_dict["blocks.1.hook_resid_pre"].add_hook(
        lambda grad, hook: seen.append(1) and None, dir="bwd"
    )
    model(tokens, return_type="logits").sum().backward()
    sites = targets(toy)  # builds the toy when it is the first to ask, and draws its weights
    before = zoo.snapshot(model)
    rp.ablate(rp.capture(model, ROWS), sites, rp.Zero(), metric=DIFF)
    assert list(zoo.differences(before, zoo.snapshot(model))) == []
    model(tokens, return_type="logits").sum().backward()
    assert len(seen) == 2


# Hooks of the caller


@pytest.mark.parametrize("name", ["blocks.1.attn.hook_z", "blocks.0.hook_mlp_out"])
@backends
def test_A12_hooks_of_the_caller_act_in_the_clean_and_the_changed_run_and_are_listed(toy, name):
    """Ours run after the caller's and see what these left."""
    model = fresh(toy)

    def double(tensor, hook):
        return tensor * 1.5

    twin = Slow(toy, ROWS, own_hooks=[(name, double)])
    base = twin.score("logit_diff", twin.clean)
    scaled = "mlp_out" in name  # then the biases of MLPs are not what the stream is given
    sites = [site for site in targets(toy) if not (scaled and re.fullmatch(r"mlp.*bias", site))]
    without = rp.ablate(rp.capture(model, ROWS), sites, rp.Zero(), metric=DIFF)
    model.hook_dict[name].add_hook(double)
    effect = rp.ablate(rp.capture(model, ROWS), sites, rp.Zero(), metric=DIFF)
    assert effect.routes == ("full",)
    assert name in effect.provenance.user_hooks
    assert_close(effect.baseline, base)
    assert largest(effect.baseline - without.baseline) > 1e-3
    for number, site in enumerate(sites):
        zeros = torch.zeros_like(twin.value(site))
        total, _ = twin.changed([site], None, lambda _, zeros=zeros: zeros)
        assert_close(effect.total[number], twin.score("logit_diff", total) - base)
    if scaled:
        with pytest.raises(NeuronMismatchError, match=r"mlp\.1\.bias cannot be replaced"):
            rp.ablate(rp.capture(model, ROWS), "mlp.1.bias", rp.Zero(), metric=DIFF)


# Cases of the field


@toys
def test_A01_a_run_ablated_with_its_own_values_is_unchanged_and_the_means_differ(toy):
    run = runs(toy)[0]
    kinds = {
        "own": rp.Resample(run, "rowwise"),
        "by position": rp.Mean(run, over=("batch",)),
        "one mean": rp.Mean(run, over=("batch", "pos")),
        "zero": rp.Zero(),
    }
    found = {
        name: rp.ablate(run, "mlp.1", how, metric=DIFF, positions=-1).total
        for name, how in kinds.items()
    }
    assert not found["own"].any()
    names = list(found)
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            assert largest(found[name] - found[other]) > 1e-3


@backends
def test_A02_kinds_disagree_and_each_result_says_which_it_was(toy):
    run, other = runs(toy)[0], runs(toy, "others")[0]
    kinds = [rp.Zero(), rp.Mean(other, over=("batch",)), rp.Resample(other, "rowwise")]
    effects = [rp.ablate(run, "1.2", how, metric=DIFF) for how in kinds]
    assert [e.how.split()[0] for e in effects] == ["zero", "mean", "resample"]
    assert all(e.how in repr(e) and e.how in e.provenance.plan for e in effects)
    assert all("raw" in e.provenance.processing for e in effects)
    assert largest(effects[0].total - effects[1].total) > 1e-3
    assert largest(effects[1].total - effects[2].total) > 1e-3


@backends
def test_A05_what_follows_an_ablation_is_as_in_a_fresh_session(toy):
    model = fresh(toy)
    expected = rp.direct_logit_attribution(rp.capture(model, ROWS), ANSWER, FOIL, by="head")
    first = rp.ablate(rp.capture(model, ROWS), targets(toy), rp.Zero(), metric=DIFF)
    after = rp.direct_logit_attribution(rp.capture(model, ROWS), ANSWER, FOIL, by="head")
    second = rp.ablate(rp.capture(model, ROWS), targets(toy), rp.Zero(), metric=DIFF)
    assert torch.equal(after.values, expected.values)
    assert torch.equal(first.total, second.total) and torch.equal(first.direct, second.direct)


@backends
def test_A13_total_and_direct_effects_stand_side_by_side_and_differ(toy):
    effect = rp.ablate(runs(toy)[0], rp.heads(toy.model)[:8], rp.Zero(), metric=DIFF)
    assert largest(effect.total - effect.direct) > 1e-2
    assert {"value", "direct", "indirect"} <= set(effect.to_frame().columns)


def write_and_erase(attention):
    """Makes head 1 a copy of head 0 with its output's sign turned."""
    d_head = zoo.D_MODEL // zoo.N_HEADS
    first, second = slice(0, d_head), slice(d_head, 2 * d_head)
    with torch.no_grad():
        if hasattr(attention, "original_component"):  # GPT-2's own joined projections
            joined = attention.original_component.c_attn
            joined = getattr(joined, "original_component", joined)
            for tensor in (joined.weight, joined.bias):
                parts = tensor.unflatten(-1, (3, -1))
                parts[..., second] = parts[..., first].clone()
            out = attention.original_component.c_proj
            out = getattr(out, "original_component", out)
            out.weight[second] = -out.weight[first]
        else:
            for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V"):
                getattr(attention, name)[1] = getattr(attention, name)[0]
            attention.W_O[1] = -attention.W_O[0]


@backends
def test_D17_removing_a_writer_and_its_eraser_together_does_almost_nothing(toy):
    """Head 1.0 writes, a copy of it with the sign turned erases: both matter, the pair does not."""
    model = fresh(toy)
    write_and_erase(model.blocks[1].attn)
    run = rp.capture(model, ROWS)
    dla = rp.direct_logit_attribution(run, ANSWER, FOIL, by="head")
    assert_close(dla.sel(component="1.0"), -dla.sel(component="1.1"))
    assert largest(dla.sel(component="1.0")) > 1e-2
    alone = rp.ablate(run, ["1.0", "1.1"], rp.Zero(), metric=DIFF)
    pair = rp.ablate(run, ["1.0", "1.1"], rp.Zero(), metric=DIFF, joint=True)
    assert (alone.total.abs().amax(1) > 1e-2).all()
    assert largest(pair.total) < 1e-10


@pytest.mark.parametrize("side", ["left", "right"])
@backends
def test_K01_K02_a_padded_batch_equals_its_single_runs(toy, side):
    width = max(map(len, zoo.RAGGED))
    tokens, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width)
    for row, ids in enumerate(zoo.RAGGED):
        where = slice(0, len(ids)) if side == "right" else slice(width - len(ids), width)
        tokens[row, where], mask[row, where] = torch.tensor(ids), 1
    padded = rp.capture(toy.model, tokens, mask=mask)
    sites = targets(toy)
    together = rp.ablate(padded, sites, rp.Zero(), metric=rp.loss())
    for row, ids in enumerate(zoo.RAGGED):
        alone = rp.ablate(rp.capture(toy.model, ids), sites, rp.Zero(), metric=rp.loss())
        assert_close(together.total[:, [row]], alone.total)


@backends
def test_K13_one_row_of_ids_is_a_batch_of_one(toy):
    flat = rp.ablate(rp.capture(toy.model, torch.tensor(ROWS[0])), "1.2", rp.Zero(), metric=DIFF)
    rows = rp.ablate(rp.capture(toy.model, [ROWS[0]]), "1.2", rp.Zero(), metric=DIFF)
    assert flat.total.shape == (1, 1) and torch.equal(flat.total, rows.total)


@pytest.mark.parametrize("toy", [t for t in TOYS if "grouped" in str(t)], ids=str)
def test_M05_heads_of_a_grouped_model_sum_to_their_layer(toy):
    run = runs(toy)[0]
    every = [f"1.{head}" for head in range(4)]
    parts = rp.ablate(run, [*every, "attn.1.bias"], rp.Zero(), metric=DIFF, joint=True)
    whole = rp.ablate(run, "attn.1", rp.Zero(), metric=DIFF)
    assert_close(parts.total, whole.total)
    assert_close(parts.direct, whole.direct)


@backends
def test_P04_replacing_queries_leaves_keys_and_values_alone(toy):
    """All rows of a head attend alike with no queries; its keys and values stay the run's own."""
    run = runs(toy)[0]
    expected = runs(toy)[1].value("1.2.v").cumsum(1)
    expected = expected / torch.arange(1, 7)[None, :, None]
    twin = runs(toy)[1]
    base = twin.score("logit_diff", twin.clean)
    total, _ = twin.changed(["1.2.z"], None, lambda _: expected)
    effect = rp.ablate(run, "1.2.q", rp.Zero(), metric=DIFF)
    if not toy.model.blocks[1].attn.b_Q.any():
        pytest.fail("the toy needs a query bias to be a test of anything")
    assert_close(effect.total[0], twin.score("logit_diff", total) - base)


@backends
def test_P08_a_hook_that_never_fires_is_an_error(toy, monkeypatch):
    """A hook that the model does not come by, as where attention skips its patterns."""
    model = fresh(toy)
    points = dict(model.hook_dict)
    points["blocks.1.attn.hook_z"] = type(points["hook_embed"])()
    monkeypatch.setattr(rp.ModelView, "hook_points", property(lambda view: points))
    with pytest.raises(HookNotFiredError, match="blocks.1.attn.hook_z"):
        rp.ablate(rp.capture(model, ROWS), "1.2", rp.Zero(), metric=DIFF)


@backends
def test_dropout_that_is_on_is_refused(toy):
    model = zoo.fresh_named("gpt2_untied")
    run = rp.capture(model, ROWS)
    model.train()
    with pytest.raises(rp.ResidPatchingError, match="training mode"):
        rp.ablate(run, "1.2", rp.Zero(), metric=DIFF)


@pytest.mark.parametrize("how", [rp.Zero(), rp.Path(to="logits", using=rp.Zero(), mlps="freeze")])
@pytest.mark.skipif("hooked" not in zoo.BACKENDS, reason="a bridge's norm overflows before")
def test_states_that_overflow_on_a_prompt_are_refused_by_its_number(how):
    """In float16 the sum of two finite weights is infinite, here for one token."""
    model = zoo.fresh("hooked", dtype=torch.float16)
    with torch.no_grad():
        model.embed.W_E[5, 0] = 4e4
        model.blocks[0].mlp.b_out[0] = 4e4
    fine, wrong = list(range(10, 20)), [*range(10, 19), 5]
    metric = rp.logit_diff(3, 4)
    effect = rp.ablate(rp.capture(model, [fine, wrong[:9]]), "attn.1", how, metric=metric)
    assert effect.values.isfinite().all()
    with pytest.raises(NotFiniteError, match="prompt 1: .* NaN or infinite in float16"):
        rp.ablate(rp.capture(model, [fine, wrong]), "attn.1", how, metric=metric)
