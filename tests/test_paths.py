"""Path patching: the closed form is the paper's three passes, whatever sends and whatever reads."""

import functools
import types
import warnings

import pytest
import torch
import zoo
from reference import paths as slow
from zoo_ablation import (
    ANSWER,
    FOIL,
    GPT2,
    KINDS_OF_BACKEND,
    METRICS,
    OTHERS,
    PLAIN,
    RAGGED_OTHERS,
    ROWS,
    TOYS,
)
from zoo_paths import (
    MODES,
    PER_ROW,
    PLACES,
    RAGGED_SOURCES,
    SlowPaths,
    columns,
    dealt,
    few_columns,
    few_senders,
    grid,
    joint_senders,
    receivers,
    runs,
    senders,
    twins,
    upstream,
)

import resid_patching as rp
from resid_patching.errors import (
    AblationError,
    AddressError,
    PathWarning,
    PromptError,
    SmallDenominatorWarning,
    StreamMismatchError,
)

pytestmark = pytest.mark.filterwarnings("ignore:logits is written together with other receivers")
toys = pytest.mark.parametrize("toy", TOYS, ids=str)
backends = pytest.mark.parametrize("toy", KINDS_OF_BACKEND, ids=str)
modes = pytest.mark.parametrize("mlps", MODES)
DIFF = rp.logit_diff(ANSWER, FOIL)
EVERY = ("plain", "replay", "full")
GROUPED = next(toy for toy in TOYS if "grouped" in str(toy) and "sequential" in str(toy))


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance, equal_nan=True)


def largest(tensor):
    return float(tensor.nan_to_num().abs().max())


def patch(run, sending, to, using, mlps, metric=DIFF, **options):
    return rp.ablate(run, sending, rp.Path(to=to, using=using, mlps=mlps), metric=metric, **options)


def resample(run):
    return rp.Resample(run, pairing="rowwise")


def stacked(effect):
    """Total and direct effect as the reference stacks them."""
    return torch.stack([effect.total, effect.direct])


def names(effect):
    return [axis.name for axis in effect.axes]


# The reference itself


def one_layer(backend):
    """A model of one layer, as the slow way wants to know it."""
    if backend == "hooked":
        model = zoo.hooked_variant(n_layers=1)
    else:
        model = zoo.bridge(zoo.hugging_face(zoo.gpt2_config(n_layer=1)))
    return types.SimpleNamespace(model=model, norm="LN", eps=zoo.EPS, parallel=False)


def normed(layer_norm, x):
    """LayerNorm by hand, of a module of either backend."""
    gain, shift = (
        zoo._tensor(layer_norm, *names).detach() for names in (("w", "weight"), ("b", "bias"))
    )
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred**2).mean(-1, keepdim=True) + zoo.EPS) ** 0.5 * gain + shift


def mlp_by_hand(block, state):
    """What an MLP writes when it reads a state."""
    mlp = block.mlp
    hidden = normed(block.ln2, state) @ mlp.W_in + mlp.b_in
    hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
    return (hidden @ mlp.W_out + mlp.b_out).detach()


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_the_reference_on_one_layer_is_the_sum_by_hand(backend):
    toy = one_layer(backend)
    base, source = SlowPaths(toy, ROWS), SlowPaths(toy, OTHERS)
    block, cache = toy.model.blocks[0], base.cache
    z = "blocks.0.attn.hook_z"
    delta = (source.cache[z] - cache[z])[:, :, 1] @ base.weights["W_O"][0, 1]
    middle, final = (cache[f"blocks.0.hook_resid_{where}"] for where in ("mid", "post"))
    logits = {
        "freeze": final + delta,
        "recompute": middle + delta + mlp_by_hand(block, middle + delta),
    }
    for mlps, state in logits.items():
        noted = base.record(["0.1"], ["logits", "mlp.0.in"], source.value, None, mlps)
        expected = normed(toy.model.ln_final, state) @ base.weights["W_U"] + base.weights["b_U"]
        for found in base.write(["logits"], noted, None):
            assert_close(found, expected)
        assert_close(noted["mlp.0.in"], normed(block.ln2, middle + delta))
    assert largest(logits["freeze"] - logits["recompute"]) > 0.1


@backends
def test_the_reference_gives_a_query_what_is_written_before_it_by_hand(toy):
    base, source = twins(toy)
    first, second = toy.model.blocks[0], toy.model.blocks[1]
    z = "blocks.0.attn.hook_z"
    delta = (source.cache[z] - base.cache[z])[:, :, 1] @ base.weights["W_O"][0, 1]
    middle, pre = base.cache["blocks.0.hook_resid_mid"], base.cache["blocks.1.hook_resid_pre"]
    live = mlp_by_hand(first, middle + delta) - mlp_by_hand(first, middle)
    for mlps, change in (("freeze", delta), ("recompute", delta + live)):
        noted = base.record(["0.1"], ["1.2.q"], source.value, None, mlps)["1.2.q"]
        attn = second.attn
        expected = normed(second.ln1, pre + change) @ attn.W_Q[2] + attn.b_Q[2]
        assert_close(noted, expected.detach())


@toys
def test_the_reference_with_all_upstream_writers_gives_a_receiver_its_source_value(toy):
    base, source = twins(toy)
    kv = toy.n_kv_heads - 1
    reading = ["2.1.q", f"2.{kv}.k", f"2.{kv}.v", "resid_pre.2"]
    for by_head in (False, True):
        sending = upstream(toy, 2, by_head=by_head)
        noted = base.record(sending, reading, source.value, None, "freeze")
        for receiver in reading:
            assert_close(noted[receiver], source.value(receiver))
            assert largest(noted[receiver] - base.value(receiver)) > 0.1
        one_less = base.record(sending[1:], reading, source.value, None, "freeze")
        assert all(largest(one_less[r] - source.value(r)) > 1e-3 for r in reading)


@toys
def test_the_reference_changes_nothing_when_the_source_is_the_base(toy):
    base = twins(toy)[0]
    for mlps in MODES:
        for sending in joint_senders(toy):
            noted = base.record(sending, receivers(toy), base.value, None, mlps)
            for reading in (["logits"], ["2.1.q", "mlp.1.in"], ["resid_pre.2"]):
                total, direct = base.write(reading, noted, None)
                assert_close(total, base.clean)
                assert_close(direct, base.clean)


@toys
def test_the_reference_tells_the_conventions_apart_and_keeps_to_its_positions(toy):
    base, source = twins(toy)
    found = {}
    for mlps in MODES:
        noted = base.record(["0.1"], ["resid_pre.2", "2.1.q"], source.value, PER_ROW, mlps)
        change = noted["resid_pre.2"] - base.value("resid_pre.2")
        for row, position in enumerate(PER_ROW):
            assert largest(change[row, position]) > 0.1
            change[row, position] = 0
        assert largest(change) < 1e-12  # other heads are held, so nothing moves along
        found[mlps] = noted["2.1.q"]
    assert largest(found["freeze"] - found["recompute"]) > 1e-2


@backends
def test_the_reference_leaves_out_positions_of_minus_one(toy):
    base, source = twins(toy)
    values = {"0.1": source.value("0.1")}
    args = (toy.model, base.tokens, ["0.1"], values)
    found = [
        slow.record(*args, places, "recompute", ["resid_pre.1"], base.cache, base.weights)
        for places in (torch.tensor([[0, 4], [3, -1], [-1, 5]]), torch.tensor([[4], [3], [5]]))
    ]
    change = (found[0]["resid_pre.1"] - found[1]["resid_pre.1"]).abs().sum(-1)
    assert change[0, 0] > 0.1
    change[0, 0] = 0
    assert largest(change) < 1e-12


@toys
def test_the_reference_knows_what_comes_before_what(toy):
    """What it says cannot be reached does not move; what it says can be reached does."""
    base = twins(toy)[0]
    for sender in senders(toy):
        steps = torch.ones_like(base.value(sender)).cumsum(-1)
        noted = base.record([sender], receivers(toy), lambda _, v=steps: v, None, "recompute")
        for receiver in receivers(toy):
            state = "resid_post.2" if receiver == "logits" else receiver
            if receiver.startswith("mlp"):
                clean = base.record([], [receiver], base.value, None, "recompute")[receiver]
            else:
                clean = base.value(state)
            moved = largest(noted[receiver] - clean)
            assert (moved > 1e-6) is base.reaches([sender], [receiver]), (sender, receiver)


# Every sender to every receiver, under both conventions: as the reference does


def averaged(toy, sender):
    """The mean of a sender over the source's prompts, laid out [prompt, pos, ...]."""
    values = twins(toy)[1].value(sender)
    return values.mean(0).expand(values.shape)


USING = {
    "resample": (
        lambda toy: resample(runs(toy)[1]),
        lambda toy, sender: twins(toy)[1].value(sender),
    ),
    "zero": (
        lambda toy: rp.Zero(),
        lambda toy, sender: torch.zeros_like(twins(toy)[0].value(sender)),
    ),
    "mean": (lambda toy: rp.Mean(runs(toy)[1], over=("batch",)), averaged),
}
CASES = [("all", "resample"), ("last", "zero"), ("third", "mean"), ("one a prompt", "resample")]


MATRIX = [
    (toy, mlps, *case)
    for number, toy in enumerate(TOYS)
    for mlps in MODES
    for part, case in enumerate(CASES)
    if str(toy).startswith("hooked") or (number + part + MODES.index(mlps)) % 2 == 0
]
"""A bridge is slow to hook: each takes every other case, in turn."""
JOINT_MATRIX = [
    (toy, mlps, *CASES[(number + 2 * MODES.index(mlps)) % len(CASES)])
    for number, toy in enumerate(TOYS)
    for mlps in MODES
]


def fall_to(toy, mlps, place, sets, reading):
    """The cells that one case compares: all eight of a model together have every cell once."""
    cases = [(mode, case[0]) for mode in MODES for case in CASES]
    args = (cases.index((mlps, place)), len(cases), TOYS.index(toy))
    return dealt(len(sets), len(reading), *args)


def expected_cells(toy, sets, reading, cells, new, places, mlps, metric):
    """Yield each cell of the grid with what the slow way makes of it [2, prompt]."""
    twin, noted = twins(toy)[0], {}
    every = sorted({receiver for group in reading for receiver in group})
    for row, column in cells:
        if row not in noted:
            noted[row] = twin.record(sets[row], every, new, places, mlps)
        args = (sets[row], reading[column], new, places, mlps, metric, noted[row])
        yield row, column, twin.effect(*args)


@pytest.mark.parametrize(("toy", "mlps", "place", "kind"), MATRIX, ids=str)
def test_one_sender_at_a_time_agrees_with_the_reference(toy, mlps, place, kind):
    places, metric = PLACES[place]
    sending, reading = senders(toy), columns(toy)
    using, new = USING[kind][0](toy), functools.partial(USING[kind][1], toy)
    options = {"metric": METRICS[metric], "positions": places}
    effect = patch(runs(toy)[0], sending, grid(reading), using, mlps, **options)
    assert effect.targets == tuple(sending)
    assert effect.values.shape == (len(sending), len(reading), len(ROWS))
    assert_close(effect.baseline, twins(toy)[0].score(metric, twins(toy)[0].clean))
    assert_close(effect.patched, effect.baseline + effect.total, 1e-14)
    found = stacked(effect)
    sets = [[sender] for sender in sending]
    cells = fall_to(toy, mlps, place, sets, reading)
    args = (toy, sets, reading, cells, new, places, mlps, metric)
    for row, column, slow_effect in expected_cells(*args):
        assert_close(found[:, row, column], slow_effect)
    assert largest(effect.total) > 1e-3 and largest(effect.direct) > 1e-3


@pytest.mark.parametrize(("toy", "mlps", "place", "kind"), JOINT_MATRIX, ids=str)
def test_senders_together_agree_with_the_reference(toy, mlps, place, kind):
    places, metric = PLACES[place]
    reading = columns(toy)
    using, new = USING[kind][0](toy), functools.partial(USING[kind][1], toy)
    options = {"metric": METRICS[metric], "positions": places, "joint": True}
    sets = joint_senders(toy)
    cells = dealt(len(sets), len(reading), 0, 4, TOYS.index(toy))
    args = (toy, sets, reading, cells, new, places, mlps, metric)
    expected = {cell[:2]: cell[2] for cell in expected_cells(*args)}
    for row, sending in enumerate(sets):
        here = [column for column in range(len(reading)) if (row, column) in expected]
        to = grid([reading[column] for column in here])
        effect = patch(runs(toy)[0], sending, to, using, mlps, **options)
        assert effect.targets == (" + ".join(sending),)
        for number, column in enumerate(here):
            assert_close(stacked(effect)[:, 0, number], expected[row, column])


@pytest.mark.parametrize("positions", [None, -1, 1, [-1, 0, 3]], ids=str)
@modes
@pytest.mark.parametrize("toy", [*KINDS_OF_BACKEND, GROUPED], ids=str)
def test_prompts_of_different_lengths_agree_with_the_reference(toy, mlps, positions):
    run, source = (rp.capture(toy.model, rows) for rows in (zoo.RAGGED, RAGGED_SOURCES))
    reading = [["logits"], ["1.1.q", "2.3.q"], ["2.0.k"], ["mlp.2.in"], ["resid_pre.1"]]
    sending = ["0.1", "mlp.1", "mlp.0.5", "embed"]
    effect = patch(
        run, sending, grid(reading), resample(source), mlps, METRICS["loss"], positions=positions
    )
    for row, tokens in enumerate(zoo.RAGGED):
        twin, other = SlowPaths(toy, [tokens]), SlowPaths(toy, [RAGGED_SOURCES[row]])
        place = [positions[row]] if isinstance(positions, list) else positions
        for number, column in dealt(len(sending), len(reading), row, 3, 0):
            args = ([sending[number]], reading[column], other.value, place, mlps, "loss")
            found = stacked(effect)[:, number, column, [row]]
            assert_close(found, twin.effect(*args))


@modes
@backends
def test_a_shuffled_source_agrees_with_the_reference(toy, mlps):
    run = rp.capture(toy.model, zoo.RAGGED)
    source = rp.capture(toy.model, [*zoo.RAGGED, *RAGGED_OTHERS])
    using = rp.Resample(source, pairing="shuffle", seed=3)
    partner = [2, 0, 1]  # the only other row of each row's length
    reading = [["logits"], ["2.1.q"]]
    effect = patch(run, ["0.1", "mlp.0"], grid(reading), using, mlps)
    for row, tokens in enumerate(zoo.RAGGED):
        twin, other = SlowPaths(toy, [tokens]), SlowPaths(toy, [RAGGED_OTHERS[partner[row]]])
        for number, sender in enumerate(["0.1", "mlp.0"]):
            for column, group in enumerate(reading):
                slow_effect = twin.effect([sender], group, other.value, None, mlps, "logit_diff")
                assert_close(stacked(effect)[:, number, column, [row]], slow_effect)


@modes
@backends
def test_the_reference_notices_another_value(toy, mlps):
    """A twin of the tests above: with the source a bit off they would fail."""
    base, source = twins(toy)
    generator = torch.Generator().manual_seed(0)
    sending, reading = ["0.1", "mlp.0", "mlp.0.5"], [["logits"], ["2.1.q"], ["mlp.1.in"]]
    effect = patch(runs(toy)[0], sending, grid(reading), resample(runs(toy)[1]), mlps)

    def off(sender):
        values = source.value(sender)
        noise = torch.randn(values.shape, generator=generator, dtype=values.dtype)
        return values + noise / 1e4

    for row, sender in enumerate(sending):
        for column, group in enumerate(reading):
            slow_effect = base.effect([sender], group, off, None, mlps, "logit_diff")
            assert largest(stacked(effect)[:, row, column] - slow_effect) > 1e-9


@pytest.mark.parametrize("error", ["convention", "together", "position", "norm"])
@backends
def test_the_reference_notices_a_planted_error(toy, error):
    """The mistakes that are easily made here, each made in the reference: none agrees."""
    base, source = twins(toy)
    reading = ["2.1.q"] if error != "together" else ["1.1.q", "2.1.q"]
    metric = "logit_diff"
    effect = patch(runs(toy)[0], "0.1", reading, resample(runs(toy)[1]), "recompute")
    args = (["0.1"], reading, source.value, None, "recompute")
    right = base.effect(*args, metric)
    assert_close(stacked(effect)[:, 0], right)
    if error == "convention":
        wrong = base.effect(["0.1"], reading, source.value, None, "freeze", metric)
    elif error == "position":
        wrong = base.effect(["0.1"], reading, source.value, -2, "recompute", metric)
    elif error == "together":  # one receiver after the other, not all with the others frozen
        noted = base.record(*args[:1], reading, *args[2:])
        noted["2.1.q"] = slow.activations(toy.model, base.tokens, [
            ("blocks.1.attn.hook_q", slow.putting(base.where(None), noted["1.1.q"], 1)),
            ("blocks.0.attn.hook_z", slow.putting(base.where(None), source.value("0.1"), 1)),
        ])["blocks.2.attn.hook_q"][:, :, 1]  # fmt: skip
        wrong = base.effect(*args, metric, noted)
    else:  # LayerNorm with the scale of the clean stream
        state = base.record(["0.1"], ["resid_pre.2"], *args[2:])["resid_pre.2"]
        clean = base.value("resid_pre.2")
        scale = [(x.var(-1, unbiased=False) + toy.eps).sqrt()[..., None] for x in (state, clean)]
        block, noted = toy.model.blocks[2], base.record(*args[:1], reading, *args[2:])
        shift = (zoo._tensor(block.ln1, "b", "bias") @ block.attn.W_Q[1]).detach()
        constant = shift + block.attn.b_Q[1].detach()
        noted["2.1.q"] = (noted["2.1.q"] - constant) * scale[0] / scale[1] + constant
        wrong = base.effect(*args, metric, noted)
    assert largest(wrong - right) > 1e-6


# Routes and bounds


LONG = [list(range(1, 15)), [3] * 4 + list(range(20, 29)), [7, 6, 5]]
LONG_SOURCES = [row[::-1] for row in LONG[:2]] + [[9, 9, 1]]


@pytest.mark.parametrize(("mlps", "positions"), [("freeze", [6, -1, 0]), ("recompute", None)],
                         ids=str)  # fmt: skip
@toys
def test_every_route_gives_the_same_numbers(toy, mlps, positions):
    run, source = (rp.capture(toy.model, rows) for rows in (LONG, LONG_SOURCES))
    options = {"metric": rp.kl(position=None), "positions": positions}
    for sets, joint in ((few_senders(), False), (["0.1", "mlp.1.9"], True)):
        args = (run, sets, grid(few_columns(toy)), resample(source), mlps)
        whole = patch(*args, **options, joint=joint, routes=("full",))
        assert whole.routes == ("full",)
        for routes in (EVERY, ("replay", "full")):
            effect = patch(*args, **options, joint=joint, routes=routes)
            assert (toy.route if routes == EVERY else "replay") in effect.routes
            assert_close(effect.total, whole.total)
            assert_close(effect.direct, whole.direct)


@pytest.mark.parametrize("max_bytes", [1, 50_000])
@modes
@backends
def test_bounds_on_memory_change_no_number(toy, mlps, max_bytes):
    sending, to = few_senders(), grid(few_columns(toy))
    run, source = runs(toy)
    expected = patch(run, sending, to, resample(source), mlps, METRICS["loss"])
    run, source = (rp.capture(toy.model, r, max_bytes=max_bytes) for r in (ROWS, OTHERS))
    bounded = patch(run, sending, to, resample(source), mlps, METRICS["loss"])
    assert_close(bounded.total, expected.total)
    assert_close(bounded.direct, expected.direct)
    together = [
        patch(r, ["0.1", "mlp.0.5"], ["2.1.q", "logits"], resample(s), mlps, joint=True)
        for r, s in (runs(toy), (run, source))
    ]
    assert_close(together[0].total, together[1].total)


# Laws


def in_single_precision(toy):
    if toy is GPT2:
        return zoo.named("gpt2_untied", dtype=torch.float32)
    return zoo.build("hooked", zoo.Cell(), torch.float32)


@modes
@toys
def test_P18_patching_a_run_with_itself_changes_nothing_exactly(toy, mlps):
    unchanged(toy, toy.model, mlps)


@modes
@backends
def test_P18_patching_a_run_with_itself_changes_nothing_exactly_in_single_precision(toy, mlps):
    unchanged(toy, in_single_precision(toy), mlps)


def unchanged(toy, model, mlps):
    run, again = rp.capture(model, zoo.RAGGED), rp.capture(model, zoo.RAGGED)
    effects = [patch(run, senders(toy), grid(columns(toy)), resample(run), mlps)]
    options = {"positions": [0, 2, -1], "joint": True}
    for sets in joint_senders(toy):
        effects.append(patch(run, sets, grid(few_columns(toy)), resample(again), mlps, **options))
    for effect in effects:
        for values in (effect.total, effect.direct):
            causal = values[~values.isnan()]
            assert causal.numel() > 0
            assert torch.equal(causal, torch.zeros_like(causal))


@pytest.mark.parametrize("by_head", [False, True], ids=["by layer", "by head"])
@toys
def test_with_all_upstream_writers_and_frozen_mlps_a_receiver_takes_its_source_value(toy, by_head):
    run, source = runs(toy)
    sending = upstream(toy, 2, by_head=by_head)
    kv = toy.n_kv_heads - 1
    reading = ["2.1.q", f"2.{kv}.k", f"2.{kv}.v", "resid_pre.2"]
    for positions in (None, PER_ROW):
        options = {"metric": METRICS["loss"], "positions": positions}
        to = rp.receivers(*reading)
        path = patch(run, sending, to, resample(source), "freeze", joint=True, **options)
        whole = rp.ablate(run, reading, resample(source), **options)
        assert_close(path.total[0], whole.total)
        assert_close(path.direct[0], whole.direct)
    every = patch(run, upstream(toy, 3), "logits", resample(source), "freeze", joint=True)
    assert_close(every.patched[0], rp.measure(source, DIFF))
    assert largest(every.total) > 0.1


@toys
def test_pairs_out_of_order_are_nan_and_others_never(toy):
    twin, reading = twins(toy)[0], columns(toy)
    effect = patch(runs(toy)[0], senders(toy), grid(reading), rp.Zero(), "freeze")
    for row, sender in enumerate(senders(toy)):
        for column, group in enumerate(reading):
            cell = stacked(effect)[:, row, column].isnan()
            assert bool(cell.any()) is bool(cell.all()) is not twin.reaches([sender], group)
            assert bool(effect.patched[row, column].isnan().all()) is bool(cell.all())


@modes
@toys
def test_what_comes_before_what_is_as_in_the_paper(toy, mlps):
    run, source = runs(toy)
    pairs = patch(
        run,
        ["1.2", "attn.1", "mlp.1", "mlp.1.5", "1.0", "mlp.2"],
        rp.receivers("1.0.q", "mlp.1.in", "resid_post.1", "resid_pre.2", "logits"),
        resample(source),
        mlps,
    )
    nan = pairs.total.isnan().all(-1)
    head, mlp, last = [True, toy.parallel, False, False, False], [True, True] + [False] * 3, [
        True, True, True, True, False,
    ]  # fmt: skip
    assert nan.tolist() == [head, head, mlp, mlp, head, last]


@modes
@backends
def test_a_path_to_a_receiver_before_its_sender_alone_is_nan_too(toy, mlps):
    effect = patch(runs(toy)[0], ["2.0", "0.1"], "1.2.q", rp.Zero(), mlps)
    assert names(effect) == ["target", "batch"]
    assert effect.total[0].isnan().all() and not effect.total[1].isnan().any()


@toys
def test_the_conventions_differ_and_the_result_says_which_it_is(toy):
    run, source = runs(toy)
    words = {"freeze": "MLPs frozen", "recompute": "MLPs recomputed"}
    for to in ("logits", "2.1.q"):
        found = {m: patch(run, ["0.1", "1.2"], to, resample(source), m) for m in MODES}
        assert largest(found["freeze"].total - found["recompute"].total) > 1e-3
        for mlps, effect in found.items():
            assert effect.how.startswith(f"path to {to}, {words[mlps]}")
            assert "resample rowwise from 3 prompts" in effect.how
            assert source.prompts.hash[:8] in effect.how
            assert effect.how in effect.provenance.plan
            assert words[mlps] in repr(effect) and "\n" not in repr(effect)


@modes
@toys
def test_what_reaches_the_logits_does_so_directly(toy, mlps):
    run, source = runs(toy)
    for positions in (None, PER_ROW):
        options = {"metric": METRICS["loss"], "positions": positions}
        effect = patch(run, senders(toy), "logits", resample(source), mlps, **options)
        assert_close(effect.direct, effect.total, 1e-12)


@backends
def test_the_last_head_reaches_the_logits_as_if_dropped_with_the_rest_frozen(toy):
    """With frozen MLPs a path to the logits is the direct effect of an ablation."""
    run = runs(toy)[0]
    path = patch(run, rp.heads(toy.model), "logits", rp.Zero(), "freeze")
    ablated = rp.ablate(run, rp.heads(toy.model), rp.Zero(), metric=DIFF)
    assert_close(path.total, ablated.direct)


@modes
@backends
def test_single_precision_is_close_to_double(toy, mlps):
    found = []
    for model in (in_single_precision(toy), toy.model):
        run, source = rp.capture(model, ROWS), rp.capture(model, OTHERS)
        found.append(patch(run, few_senders(), grid(few_columns(toy)), resample(source), mlps))
    assert found[0].total.dtype == torch.float32
    assert_close(found[0].total.double(), found[1].total, 1e-4)
    assert_close(found[0].direct.double(), found[1].direct, 1e-4)
    assert torch.equal(found[0].total.isnan(), found[1].total.isnan())


@modes
@backends
def test_each_alternative_is_what_it_is_alone(toy, mlps):
    run, source = runs(toy)
    reading = columns(toy)
    effect = patch(run, few_senders(), grid(reading), resample(source), mlps)
    assert names(effect) == ["target", "receiver", "batch"]
    for number, group in enumerate(reading):
        alone = patch(
            run, few_senders(), group if len(group) > 1 else group[0], resample(source), mlps
        )
        assert names(alone) == ["target", "batch"]
        assert_close(alone.total, effect.total[:, number])
        assert_close(alone.direct, effect.direct[:, number])
        if len(group) == 1:
            assert_close(effect.receiver(group[0]).total, alone.total)


@backends
def test_a_last_receiver_that_overrides_the_others_is_warned_of(toy):
    match = "logits is written together with other receivers"
    with pytest.warns(PathWarning, match=match) as caught:
        effect = patch(runs(toy)[0], "0.1", ["1.0.q", "logits"], rp.Zero(), "freeze")
    assert caught[0].filename == __file__
    alone = patch(runs(toy)[0], "0.1", "logits", rp.Zero(), "freeze")
    assert_close(effect.total, alone.total)


@modes
@backends
def test_senders_given_once_alone_and_once_as_a_set_of_one_are_the_same(toy, mlps):
    run, source = runs(toy)
    effect = patch(run, senders(toy), ["2.1.q", "mlp.1.in"], resample(source), mlps)
    for number, sender in enumerate(senders(toy)):
        one = patch(run, [sender], ["mlp.1.in", "2.1.q"], resample(source), mlps, joint=True)
        assert_close(one.total[0], effect.total[number])


@toys
def test_inputs_lists_every_receiver_of_a_kind(toy):
    model = toy.model
    kv = toy.n_kv_heads
    every = {"q": 4, "k": kv, "v": kv}
    for kind, n_heads in every.items():
        expected = [f"{layer}.{head}.{kind}" for layer in range(3) for head in range(n_heads)]
        assert list(map(str, rp.inputs(model, kind))) == expected
    assert list(map(str, rp.inputs(model, "mlp"))) == [f"mlp.{layer}.in" for layer in range(3)]
    effect = patch(runs(toy)[0], "0.1", rp.receivers(*rp.inputs(model, "k")), rp.Zero(), "freeze")
    assert effect.values.shape == (1, 3 * kv, 3)
    assert effect.values[0, :kv].isnan().all() and not effect.values[0, kv:].isnan().any()


# Hooks of the caller


HOOKED_BY_THE_CALLER = [
    *("blocks.0.attn.hook_z", "blocks.0.hook_attn_out", "blocks.0.hook_mlp_out"),
    *("blocks.1.hook_mlp_out", "blocks.2.attn.hook_q"),
]


def larger(tensor, hook):
    return tensor * 1.5


@pytest.mark.parametrize("name", HOOKED_BY_THE_CALLER)
@modes
@backends
def test_hooks_of_the_caller_act_in_every_pass(toy, mlps, name):
    model = fresh(toy)
    base, source = (SlowPaths(toy, rows, [(name, larger)]) for rows in (ROWS, OTHERS))
    reading = [["logits"], ["2.1.q"], ["mlp.1.in"], ["1.0.q", "resid_pre.2"]]
    clean = patch(rp.capture(model, ROWS), ["0.1"], grid(reading), rp.Zero(), mlps)
    model.hook_dict[name].add_hook(larger)
    run, other = rp.capture(model, ROWS), rp.capture(model, OTHERS)
    zeros = lambda sender: torch.zeros_like(base.value(sender))  # noqa: E731
    for sender, using, new in (
        ("0.1", rp.Zero(), zeros),
        ("1.2", resample(other), source.value),
        ("mlp.0", resample(other), source.value),
    ):
        effect = patch(run, sender, grid(reading), using, mlps)
        assert effect.routes == ("full",)
        assert name in effect.provenance.user_hooks
        for column, group in enumerate(reading):
            expected = base.effect([sender], group, new, None, mlps, "logit_diff")
            assert_close(effect.total[0, column], expected[0])
        assert sender != "0.1" or largest(effect.total - clean.total) > 1e-3


@pytest.mark.parametrize("name", ["blocks.1.hook_resid_pre", "blocks.0.hook_resid_post"])
@backends
def test_a_stream_that_hooks_of_the_caller_change_in_between_has_no_paths(toy, name):
    """What a sender writes would not arrive as it was written."""
    model = fresh(toy)
    model.hook_dict[name].add_hook(larger)
    with pytest.raises(StreamMismatchError, match="hook"):
        patch(rp.capture(model, ROWS), "0.1", "2.1.q", rp.Zero(), "freeze")


# The model is left as it was


class Failure(Exception):
    """Something of the caller's that goes wrong."""


def fresh(toy):
    """A model of this toy that may be changed; the first call of a bridge sets hooks of its own."""
    model = zoo.fresh_named("gpt2_untied") if toy is GPT2 else zoo.fresh("hooked", zoo.Cell())
    with torch.no_grad():
        model(torch.tensor(ROWS))
    return model


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@modes
@backends
def test_the_model_is_left_as_it_was(toy, mlps, grad):
    model, sending, to = fresh(toy), few_senders(), grid(few_columns(toy))
    with torch.set_grad_enabled(grad):
        before = zoo.snapshot(model)
        for routes in (EVERY, ("replay", "full"), ("full",)):
            run, source = rp.capture(model, ROWS), rp.capture(model, OTHERS)
            effect = patch(run, sending, to, resample(source), mlps, routes=routes)
            assert not effect.total.requires_grad
            assert list(zoo.differences(before, zoo.snapshot(model))) == []


@pytest.mark.parametrize("routes", [("plain",), ("replay",), ("full",)], ids=str)
@backends
def test_the_model_is_left_as_it_was_when_a_metric_raises(toy, routes):
    model, sending, to = fresh(toy), few_senders(), grid(few_columns(toy))
    run = rp.capture(model, ROWS)
    expected = patch(run, sending, to, rp.Zero(), "recompute", routes=routes)
    before = zoo.snapshot(model)
    for after in (0, 1, 3):  # in the clean run, and in a changed one
        calls = []

        def metric(logits, calls=calls, after=after):
            calls.append(1)
            if len(calls) > after:
                raise Failure
            return logits[:, -1, 0]

        with pytest.raises(Failure):
            patch(run, sending, to, rp.Zero(), "recompute", metric, routes=routes)
        assert list(zoo.differences(before, zoo.snapshot(model))) == []
    again = patch(run, sending, to, rp.Zero(), "recompute", routes=routes)
    assert_close(again.total, expected.total, 0)


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


@pytest.mark.parametrize(
    "sender",
    ["1.2.q", "1.2.z", "1.2.pattern", "resid_pre.1", "resid_post.2", "mlp.1.in", "logits",
     "head nine", "3.0", "1.4", "mlp.1.999", "attn.3"],
)  # fmt: skip
@backends
def test_only_writers_of_the_model_send(toy, sender):
    run = runs(toy)[0]
    with Counter(toy.model) as counter, pytest.raises(AddressError, match=sender.split(" ")[0]):
        patch(run, ["0.1", sender], "logits", rp.Zero(), "freeze")
    assert counter.passes == 0


@pytest.mark.parametrize(
    "sending",
    [
        ["attn.1", "1.2"],
        ["1.2", "attn.1"],
        ["mlp.1", "mlp.1.4"],
        ["attn.1", "attn.1.bias"],
        ["mlp.1", "mlp.1.bias"],
        ["1.2", "1.2"],
    ],
    ids=str,
)
@backends
def test_senders_that_overlap_do_not_send_together_but_may_one_by_one(toy, sending):
    run = runs(toy)[0]
    with Counter(toy.model) as counter, pytest.raises(AddressError) as error:
        patch(run, sending, "logits", rp.Zero(), "freeze", joint=True)
    assert counter.passes == 0
    assert all(sender in str(error.value) for sender in sending)
    if len(set(sending)) == 2:
        effect = patch(run, sending, "logits", rp.Zero(), "freeze")
        assert effect.values.shape == (2, 3)


@pytest.mark.parametrize(
    "receiver",
    ["1.9.q", "3.0.q", "3.0.k", "resid_post.3", "mlp.5.in", "1.2", "1.2.z", "embed", "attn.1",
     "mlp.1", "1.2.pattern", "nowhere", "unembed.bias"],
)  # fmt: skip
@backends
def test_only_receivers_of_the_model_read(toy, receiver):
    run = runs(toy)[0]
    named = receiver.removesuffix(".in")
    for to in (receiver, ["logits", receiver], "grid"):
        with Counter(toy.model) as counter, pytest.raises(AddressError, match=named):
            to = rp.receivers("logits", receiver) if to == "grid" else to
            patch(run, "0.1", to, rp.Zero(), "freeze")
        assert counter.passes == 0


@pytest.mark.parametrize(
    ("receivers", "message"),
    [
        (["1.2.q", "1.2.q"], "1.2.q was given twice"),
        (["logits", "resid_post.2"], "resid_post.2 was given twice (once as logits)"),
    ],
)
@backends
def test_receivers_that_are_written_together_are_different_ones(toy, receivers, message):
    with pytest.raises(AddressError) as error:
        patch(runs(toy)[0], "0.1", receivers, rp.Zero(), "freeze")
    assert str(error.value) == message


def test_no_state_lies_between_parallel_sublayers():
    toy = next(toy for toy in TOYS if toy.parallel)
    with pytest.raises(AddressError, match="resid_mid"):
        patch(runs(toy)[0], "0.1", "resid_mid.1", rp.Zero(), "freeze")


@pytest.mark.parametrize("to", [[], (), "empty"], ids=str)
def test_a_path_leads_somewhere(to):
    with pytest.raises((AblationError, AddressError)):
        to = rp.receivers() if to == "empty" else to
        patch(runs(GPT2)[0], "0.1", to, rp.Zero(), "freeze")


@backends
def test_a_source_of_another_model_is_refused(toy):
    other = rp.capture(zoo.named("neox_sequential"), ROWS)
    with pytest.raises(AblationError, match="another model"):
        patch(runs(toy)[0], "0.1", "logits", resample(other), "freeze")


# Linearised, as a diagnostic


@modes
@backends
def test_linearised_paths_come_with_the_exact_ones_and_differ(toy, mlps):
    run, source = runs(toy)
    path = rp.Path(to="logits", using=resample(source), mlps=mlps)
    for options in ({}, {"positions": -1}, {"joint": True}):
        sending = ["0.1", "1.2", "mlp.0"]
        result = rp.linearised_paths(run, sending, path, metric=DIFF, **options)
        exact = rp.ablate(run, sending, path, metric=DIFF, **options)
        assert_close(result.exact, exact.total, 1e-12)
        assert result.values.shape == result.exact.shape
        assert_close(result.error, result.values - result.exact, 1e-12)
        assert largest(result.error) > 1e-4


@backends
def test_a_linearised_path_to_the_logits_is_what_is_written_along_their_direction(toy):
    """With the norm frozen and MLPs too, it is the sender's direct logit attribution."""
    (run, source), (base, other) = runs(toy), twins(toy)
    path = rp.Path(to="logits", using=resample(source), mlps="freeze")
    result = rp.linearised_paths(run, ["0.1", "mlp.1"], path, metric=DIFF)
    final = base.value("resid_post.2")
    scale = (final.var(-1, unbiased=False) + toy.eps).sqrt()[:, -1, None]
    direction = base.weights["W_U"][:, ANSWER] - base.weights["W_U"][:, FOIL]
    head = (other.value("0.1") - base.value("0.1")) @ base.weights["W_O"][0, 1]
    writes = [head, other.value("mlp.1") - base.value("mlp.1")]
    for row, write in enumerate(write[:, -1] for write in writes):
        centred = write - write.mean(-1, keepdim=True)
        expected = (centred / scale * base.weights["gain"]) @ direction
        assert_close(result.values[row], expected)


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="HookedTransformer left in TransformerLens 4")
@modes
def test_linearised_paths_are_exact_where_there_is_no_norm(mlps):
    model = zoo.hooked_variant(normalization_type=None)
    run, source = rp.capture(model, ROWS), rp.capture(model, OTHERS)
    for to in ("logits", "2.1.q", ["1.0.q", "2.3.q"], "mlp.2.in", rp.receivers("logits", "2.0.k")):
        path = rp.Path(to=to, using=resample(source), mlps=mlps)
        result = rp.linearised_paths(run, ["0.1", "1.2", "mlp.0"], path, metric=DIFF)
        assert largest(result.error) < 1e-10
        assert largest(result.values) > 1e-3


# TransformerLens's own tool


def own_tool():
    try:
        from transformer_lens.patching import get_act_patch_direct_path
    except ImportError:
        pytest.skip("get_act_patch_direct_path came with TransformerLens 4.3")
    return get_act_patch_direct_path


def direct_path(toy, sender, component):
    """What TransformerLens's tool finds for one head to every head's input [layer, head]."""
    tool, model = own_tool(), toy.model
    corrupted, clean = torch.tensor(ROWS), torch.tensor(OTHERS)
    caches = []
    with torch.no_grad():
        for tokens in (clean, corrupted):
            caches.append(model.run_with_cache(tokens)[1])

        def metric(logits):
            return (logits[:, -1, ANSWER] - logits[:, -1, FOIL]).mean()

        return tool(model, corrupted, *caches, metric, *sender, component, verbose=False)


@pytest.mark.parametrize("component", ["q", "k", "v"])
def test_the_reference_agrees_with_transformerlens(component):
    own_tool()
    base, source = twins(GPT2)
    theirs = direct_path(GPT2, (0, 1), component).double()
    for layer in (1, 2):
        for head in range(4):
            noted = base.record(
                ["0.1"], [f"{layer}.{head}.{component}"], source.value, None, "freeze"
            )
            total, _ = base.write(list(noted), noted, None)
            mean = base.score("logit_diff", total).mean()
            assert float((mean - theirs[layer, head]).abs()) < 1e-6 * largest(base.clean)


@pytest.mark.parametrize("component", ["q", "k", "v"])
def test_frozen_paths_agree_with_transformerlens(component):
    """On GPT-2: its tool takes raw sequential blocks, with as many keys as queries."""
    compare_with_own_tool(GPT2, component)


def compare_with_own_tool(toy, component):
    run, source = runs(toy)
    logit_scale = float(twins(toy)[0].clean.abs().max())
    to = rp.receivers(*rp.inputs(toy.model, component))
    for sender in ((0, 1), (1, 2)):
        theirs = direct_path(toy, sender, component).double()
        ours = patch(run, "{}.{}".format(*sender), to, resample(source), "freeze")
        mean = ours.patched[0].mean(-1).unflatten(0, theirs.shape)
        later = slice(sender[0] + 1, None)
        assert mean[: later.start].isnan().all()
        assert largest(mean[later] - theirs[later]) < 1e-5 * logit_scale
        assert largest(mean[later] - ours.baseline.mean()) > 1e-4 * logit_scale


@pytest.mark.parametrize("toy", [t for t in TOYS if "grouped" in str(t)], ids=str)
def test_keys_and_values_of_grouped_queries_which_their_tool_refuses_agree_with_the_reference(toy):
    if not zoo.HAS_HOOKED:
        with pytest.raises(ValueError):
            direct_path(toy, (0, 1), "k")
    base, source = twins(toy)
    for component in "kv":
        every = list(map(str, rp.inputs(toy.model, component)))
        effect = patch(
            runs(toy)[0], ["0.1", "1.2"], rp.receivers(*every), resample(runs(toy)[1]), "freeze"
        )
        for row, sender in enumerate(["0.1", "1.2"]):
            for column, receiver in enumerate(every):
                args = ([sender], [receiver], source.value, None, "freeze", "logit_diff")
                assert_close(stacked(effect)[:, row, column], base.effect(*args))


# Cases of the field


@pytest.mark.parametrize("toy", [t for t in TOYS if "grouped" in str(t)], ids=str)
@modes
def test_P01_paths_to_keys_and_values_go_by_key_value_head(toy, mlps):
    run, source = runs(toy)
    receivers_of_one_layer = [
        receiver for receiver in rp.inputs(toy.model, "k") if receiver.layer == 2
    ]
    assert list(map(str, receivers_of_one_layer)) == ["2.0.k", "2.1.k"]
    effect = patch(run, "0.1", rp.receivers(*receivers_of_one_layer), resample(source), mlps)
    assert effect.values.shape == (1, 2, 3)
    assert all(largest(effect.receiver(label).total) > 1e-3 for label in ("2.0.k", "2.1.k"))
    with pytest.raises(AddressError, match=r"2\.2\.k.*heads 0 to 1|heads 0 to 1"):
        patch(run, "0.1", "2.2.k", resample(source), mlps)
    patch(run, "0.1", "2.3.q", resample(source), mlps)


FLAGS = ("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in")


def flags(model):
    return {flag: getattr(model.cfg, flag, None) for flag in FLAGS}


def set_flag(model, flag, value=True):
    setter = getattr(model, f"set_{flag}", None)
    if setter is None:
        setattr(model.cfg, flag, value)
    else:
        setter(value)


@modes
@pytest.mark.parametrize("grouped", [False, True], ids=["full", "grouped"])
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_P02_split_inputs_on_or_off_are_the_same_numbers_and_stay_as_they_were(
    backend, grouped, mlps
):
    if backend == "hooked":
        model = zoo.fresh("hooked", zoo.Cell(grouped=grouped))
    else:
        model = zoo.fresh_named("llama_grouped" if grouped else "gpt2_untied")
    kv = 1 if grouped else 3
    to = rp.receivers("logits", "2.1.q", f"2.{kv}.k", f"1.{kv}.v", ["1.1.q", "mlp.2.in"])
    found = []
    for value in (False, True):
        set_flag(model, "use_split_qkv_input", value)
        before = flags(model)
        with torch.no_grad():
            logits = model(torch.tensor(ROWS), return_type="logits")
        run, source = rp.capture(model, ROWS), rp.capture(model, OTHERS)
        effect = patch(run, ["0.1", "1.2", "mlp.0"], to, resample(source), mlps)
        found.append((logits, effect))
        assert flags(model) == before
    assert_close(found[0][0], found[1][0])
    assert_close(found[0][1].total, found[1][1].total)


@modes
@backends
def test_P04_changing_queries_leaves_keys_and_values_alone(toy, mlps):
    """In the pass with a new query, scores and mixed values are those of the clean keys and values.

    Our hooks see what comes behind: scores [head, query, key] and z [pos, head, d_head].
    """
    model, (base, source) = fresh(toy), twins(toy)
    run, other = rp.capture(model, ROWS), rp.capture(model, OTHERS)
    kept = {which: run.fetch(rp.parse(f"2.1.{which}")).clone() for which in "qkv"}
    seen = []
    for which in ("attn_scores", "pattern", "z"):
        model.hook_dict[f"blocks.2.attn.hook_{which}"].add_hook(
            zoo.watching(lambda value, hook: seen.append(value.clone()) and None)
        )
    effect = patch(run, "0.1", "2.1.q", resample(other), mlps, routes=("full",))
    model.reset_hooks()
    assert largest(effect.total) > 1e-3
    attention = {
        which: base.cache[f"blocks.2.attn.hook_{which}"] for which in ("k", "v", "attn_scores")
    }
    q = base.record(["0.1"], ["2.1.q"], source.value, None, mlps)["2.1.q"]
    n_changed = 0
    for scores, pattern, z in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
        for row in range(len(scores)):
            for number in range(len(ROWS)):
                k, v, clean = (value[number] for value in attention.values())
                clean, found = clean.tril(), scores[row].tril()
                alike = found.shape == clean.shape and torch.equal(
                    found[[0, 2, 3]], clean[[0, 2, 3]]
                )
                if alike and largest(found[1] - clean[1]) > 1e-3:
                    n_changed += 1
                    assert_close(found[1], (q[number] @ k[:, 1].T / k.shape[-1] ** 0.5).tril())
                    mixed = torch.einsum("hqk,khd->qhd", pattern[row], v)
                    assert_close(z[row], mixed)
    assert n_changed >= len(ROWS)
    for which, value in kept.items():
        assert torch.equal(run.fetch(rp.parse(f"2.1.{which}")), value)


@modes
@backends
def test_P05_inside_enabled_gradients_nothing_is_edited_in_place(toy, mlps):
    run, source = rp.capture(toy.model, ROWS), rp.capture(toy.model, OTHERS)
    places = [rp.parse(text) for text in ("0.1", "2.1.q", "mlp.0", "resid_pre.2")]
    before = [(run.fetch(place).clone(), source.fetch(place).clone()) for place in places]
    expected = patch(*[runs(toy)[0], few_senders(), grid(few_columns(toy))], rp.Zero(), mlps)
    with torch.enable_grad():
        for routes in (EVERY, ("replay", "full"), ("full",)):
            args = (run, few_senders(), grid(few_columns(toy)))
            effect = patch(*args, rp.Zero(), mlps, routes=routes)
            assert_close(effect.total, expected.total)
            patch(*args, resample(source), mlps, routes=routes)
    for place, values in zip(places, before, strict=True):
        assert torch.equal(run.fetch(place), values[0])
        assert torch.equal(source.fetch(place), values[1])


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_P07_a_text_and_its_ids_are_the_same_prompt(backend):
    model = zoo.text_model(backend)
    texts = ["When Mary and John went", "When John and Mary went"]
    by_text = [rp.capture(model, text) for text in texts]
    by_ids = [rp.capture(model, run.prompts.tokens) for run in by_text]
    found = [
        patch(run, "0.1", "2.1.q", rp.Zero(), "freeze", positions=-1)
        for run in (by_text[0], by_ids[0])
    ]
    assert torch.equal(found[0].total, found[1].total)
    if by_text[0].prompts.tokens.shape == by_text[1].prompts.tokens.shape:
        pairs = [
            patch(run, "0.1", "2.1.q", resample(source), "freeze")
            for run, source in (by_text, by_ids)
        ]
        assert torch.equal(pairs[0].total, pairs[1].total)


@modes
@toys
def test_P08_a_batch_of_two_is_two_runs(toy, mlps):
    rows, others = ROWS[:2], OTHERS[:2]
    run, source = rp.capture(toy.model, rows), rp.capture(toy.model, others)
    args = (few_senders(), grid(few_columns(toy)))
    both = patch(run, *args, resample(source), mlps)
    assert largest(both.total) > 1e-3
    for row in range(2):
        one, other = rp.capture(toy.model, rows[row]), rp.capture(toy.model, others[row])
        single = patch(one, *args, resample(other), mlps)
        assert_close(both.total[..., [row]], single.total)
        assert_close(both.direct[..., [row]], single.direct)


@backends
def test_P09_a_pair_of_unequal_lengths_raises_with_both_before_the_model_runs(toy):
    run, longer = rp.capture(toy.model, ROWS), rp.capture(toy.model, [r + [1] for r in ROWS])
    for using in (resample(longer), rp.Mean(longer, over=("batch",))):
        with Counter(toy.model) as counter, pytest.raises(PromptError, match="6.*7"):
            patch(run, "0.1", "logits", using, "recompute")
        assert counter.passes == 0


@backends
def test_P12_recovery_over_a_small_denominator_warns_and_the_difference_stays(toy):
    run, source = runs(toy)
    effect = patch(run, ["0.1", "1.2"], "logits", resample(source), "recompute")
    scores = rp.measure(source, DIFF)
    assert_close(scores, twins(toy)[1].score("logit_diff", twins(toy)[1].clean))
    expected = effect.total.mean(-1) / (scores - effect.baseline).mean()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(effect.recovery(effect.baseline + 3.0), effect.total.mean(-1) / 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(effect.recovery(scores), expected)
    with pytest.warns(SmallDenominatorWarning) as caught:
        recovery = effect.recovery(effect.baseline + 0.0001)
    assert caught[0].filename == __file__
    assert largest(recovery) > 10
    several = patch(
        run, ["0.1", "1.2"], rp.receivers("logits", "2.1.q"), resample(source), "freeze"
    )
    assert_close(several.recovery(several.baseline + 3.0), several.total.mean(-1) / 3)


@backends
def test_P15_both_definitions_of_a_path_are_named_and_differ(toy):
    run, source = runs(toy)
    found = {mlps: patch(run, "0.1", "2.1.q", resample(source), mlps) for mlps in MODES}
    assert largest(found["freeze"].total - found["recompute"].total) > 1e-3
    assert "frozen" in found["freeze"].how and "recomputed" in found["recompute"].how


def names_hooked(model, call, monkeypatch):
    """The names of the hook points to which a call adds hooks."""
    names = {id(point): name for name, point in model.hook_dict.items()}
    found = set()
    for kind in {type(point) for point in model.hook_dict.values()}:
        add = kind.add_hook

        def counting(point, *args, add=add, **options):
            found.add(names.get(id(point), "unknown"))
            return add(point, *args, **options)

        monkeypatch.setattr(kind, "add_hook", counting)
    call()
    monkeypatch.undo()
    return found


@pytest.mark.parametrize(
    ("mlps", "to", "needless"),
    [
        ("freeze", "logits", ("pattern", "scores", "hook_q", "hook_k", "hook_v", "hook_post")),
        ("recompute", "logits", ("pattern", "scores", "hook_q", "hook_k", "hook_v", "hook_post")),
        ("freeze", "2.1.q", ("pattern", "scores", "hook_post", "hook_pre", "result")),
    ],
)
@backends
def test_P16_only_the_hooks_that_are_needed_are_held(toy, mlps, to, needless, monkeypatch):
    """Nothing of a head but its output, no patterns, no hidden activations of an MLP."""
    model = fresh(toy)
    run, source = rp.capture(model, ROWS), rp.capture(model, OTHERS)
    patch(run, "0.1", to, resample(source), mlps)  # the blocks are held to the model's own
    run, source = rp.capture(model, ROWS), rp.capture(model, OTHERS)
    patterns = {name for name in model.hook_dict if any(word in name for word in needless)}
    found = names_hooked(model, lambda: patch(run, "0.1", to, resample(source), mlps), monkeypatch)
    assert found and len(found) < len(model.hook_dict) / 2
    assert found & patterns == set()
    kept = set(source._kept)
    assert not any("mlp" in name or "pattern" in name for name in kept)
    assert {name for name in kept if "hook_z" in name} <= {"blocks.0.attn.hook_z"}


@modes
@backends
def test_P19_the_direction_is_in_the_result_and_the_reverse_is_another_number(toy, mlps):
    run, source = runs(toy)
    there = patch(run, "0.1", "2.1.q", resample(source), mlps)
    back = patch(source, "0.1", "2.1.q", resample(run), mlps)
    assert largest(there.total + back.total) > 1e-3 and largest(there.total - back.total) > 1e-3
    for effect, base, other in ((there, run, source), (back, source, run)):
        assert other.prompts.hash[:8] in effect.how
        assert base.prompts.hash[:8] not in effect.how
        assert base.prompts.hash == effect.provenance.tokens
        assert_close(effect.baseline, rp.measure(base, DIFF))


def test_P21_a_keyword_that_is_not_known_raises():
    run = runs(GPT2)[0]
    settings = {"to": "logits", "using": rp.Zero(), "mlps": "freeze"}
    for wrong in ({"mlp": "freeze"}, {"positions": 3}, {"pos_slice": -1}, {"incl_bwd": False}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            rp.Path(**settings, **wrong)
    for wrong in ({"pos": 3}, {"mlps": "freeze"}, {"incl_bwd": False}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            rp.ablate(run, "0.1", rp.Path(**settings), metric=DIFF, **wrong)
        with pytest.raises(TypeError, match=next(iter(wrong))):
            rp.linearised_paths(run, "0.1", rp.Path(**settings), metric=DIFF, **wrong)
    with pytest.raises(TypeError):
        rp.Path("logits", rp.Zero(), "freeze", "again")
    with pytest.raises(TypeError):
        rp.receivers("logits", together=True)


@pytest.mark.parametrize("on", [(), ("use_attn_in",), ("use_hook_mlp_in", "use_attn_result")],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_P22_flags_are_as_the_caller_set_them_also_after_an_exception(backend, on):
    toy = PLAIN if backend == "hooked" else GPT2
    expected = patch(runs(toy)[0], few_senders(), grid(few_columns(toy)), rp.Zero(), "recompute")
    model = fresh(toy)
    for flag in on:
        set_flag(model, flag)
    before, state = flags(model), zoo.snapshot(model)
    assert [flag for flag, value in before.items() if value] == [f for f in FLAGS if f in on]
    run = rp.capture(model, ROWS)
    effect = patch(run, few_senders(), grid(few_columns(toy)), rp.Zero(), "recompute")
    assert flags(model) == before
    assert_close(effect.total, expected.total)
    calls = []

    def failing(logits):
        calls.append(1)
        if len(calls) > 1:
            raise Failure
        return logits[:, -1, 0]

    with pytest.raises(Failure):
        patch(run, few_senders(), "2.1.q", rp.Zero(), "recompute", failing)
    assert flags(model) == before
    assert list(zoo.differences(state, zoo.snapshot(model))) == []
