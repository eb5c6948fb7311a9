"""What can be replaced together and where: tuples, windows, spans, attention between positions."""

import functools
import itertools
import json

import pytest
import torch
import zoo
from zoo_ablation import (
    ANSWER,
    BY_LABEL,
    FOIL,
    KINDS_OF_BACKEND,
    OTHERS,
    PLAIN,
    ROWS,
    TOYS,
    Slow,
    joint_targets,
)

import resid_patching as rp
from resid_patching import plots
from resid_patching.cli import main
from resid_patching.errors import AblationError, AddressError, PositionError, PromptError

toys = pytest.mark.parametrize("toy", TOYS, ids=str)
backends = pytest.mark.parametrize("toy", KINDS_OF_BACKEND, ids=str)
DIFF = rp.logit_diff(ANSWER, FOIL)
SPANS = [[1, 3, 4], [0], [-1, 2]]
LONGER = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28, 18, 28, 45, 9], [31, 41, 5, 9, 26, 5, 35]]


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def largest(tensor):
    return float(tensor.abs().max())


@functools.cache
def captured(toy, which="rows"):
    rows = {"rows": ROWS, "others": OTHERS, "ragged": zoo.RAGGED, "longer": LONGER}[which]
    return rp.capture(toy.model, rows)


@functools.cache
def slow(toy, which="rows"):
    return Slow(toy, {"rows": ROWS, "others": OTHERS}[which])


def kinds(toy):
    others = captured(toy, "others")
    return {
        "zero": rp.Zero(),
        "mean": rp.Mean(others, over=("batch",)),
        "resample": rp.Resample(others),
    }


# Tuples


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
@toys
def test_a_tuple_is_one_row_of_targets_that_are_replaced_together(toy, kind):
    run, how = captured(toy), kinds(toy)[kind]
    sets = [tuple(sites) for sites in joint_targets(toy)]
    for positions in (None, -1, SPANS):
        options = {"metric": DIFF, "positions": positions}
        effect = rp.ablate(run, [*sets, "0.1"], how, **options)
        assert effect.targets == (*map(" + ".join, sets), "0.1")
        assert not effect.joint
        for number, sites in enumerate(sets):
            together = rp.ablate(run, list(sites), how, joint=True, **options)
            assert effect.targets[number] == together.targets[0]
            assert_close(effect.total[number], together.total[0])
            assert_close(effect.direct[number], together.direct[0])
        assert_close(effect.total[-1], rp.ablate(run, "0.1", how, **options).total[0])


@backends
def test_senders_of_a_tuple_send_together(toy):
    run = captured(toy)
    path = rp.Path(to=rp.receivers("2.1.q", "logits"), using=rp.Zero(), mlps="recompute")
    effect = rp.ablate(run, [("0.1", "mlp.0"), "0.2"], path, metric=DIFF)
    together = rp.ablate(run, ["0.1", "mlp.0"], path, metric=DIFF, joint=True)
    assert effect.targets == ("0.1 + mlp.0", "0.2")
    assert_close(effect.total[0], together.total[0])
    linearised = rp.linearised_paths(run, [("0.1", "mlp.0"), "0.2"], path, metric=DIFF)
    assert_close(linearised.exact, effect.total)


def test_joint_puts_the_members_of_all_tuples_into_one_row():
    run = captured(PLAIN)
    effect = rp.ablate(run, [("0.1", "0.2"), "1.0"], rp.Zero(), metric=DIFF, joint=True)
    assert effect.targets == ("0.1 + 0.2 + 1.0",)
    flat = rp.ablate(run, ["0.1", "0.2", "1.0"], rp.Zero(), metric=DIFF, joint=True)
    assert torch.equal(effect.total, flat.total)


def test_what_a_result_calls_its_rows_is_read_back():
    run = captured(PLAIN)
    rows = [("0.1", rp.parse("attn.1")), "1.2", "0.1+0.2"]
    effect = rp.ablate(run, rows, rp.Zero(), metric=DIFF)
    assert effect.targets == ("0.1 + attn.1", "1.2", "0.1 + 0.2")
    again = rp.ablate(run, list(effect.targets), rp.Zero(), metric=DIFF)
    assert again.targets == effect.targets and torch.equal(again.total, effect.total)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([("0.1", "0.1")], "0.1 was given twice"),
        ([("0.1", "0.1.z")], "0.1.z was given twice (once as 0.1)"),
        ([("0.1", "attn.0")], "0.1 is a part of attn.0"),
        ([("mlp.1.3", "mlp.1"), "0.1"], "mlp.1.3 is a part of mlp.1"),
        ([("0.1", "0.2"), ("0.2", "0.1")], "0.2 + 0.1 was given twice (once as 0.1 + 0.2)"),
        ([()], "an empty tuple names no target"),
        (("0.1", "0.2"), 'write [("9.6", "9.9")] for one row'),
        ([("0.1", "9.9")], "9.9 does not exist"),
    ],
)
def test_a_tuple_that_is_no_row_is_refused(targets, message):
    with pytest.raises(AddressError) as caught:
        rp.ablate(captured(PLAIN), targets, rp.Zero(), metric=DIFF)
    assert message in str(caught.value)


def test_a_target_may_stand_in_several_rows():
    run = captured(PLAIN)
    effect = rp.ablate(
        run, [("0.1", "0.2"), ("0.2", "0.3"), "0.2", "attn.0"], rp.Zero(), metric=DIFF
    )
    assert len(effect.targets) == 4


@pytest.fixture(scope="module")
def mixed():
    return rp.ablate(captured(PLAIN), [("0.1", "1.2"), "0.3", "1.1"], rp.Zero(), metric=DIFF)


def test_results_with_rows_of_several_targets_are_written_and_shown(mixed, tmp_path):
    file = tmp_path / "effect.json"
    file.write_text(mixed.to_json(), encoding="utf-8")
    again = rp.load_result(file)
    assert again.targets == mixed.targets and torch.equal(again.total, mixed.total)
    assert list(mixed.table()["target"]) == ["0.1 + 1.2", "0.3", "1.1"]
    assert mixed.table()["head"].isna().tolist() == [True, False, False]
    assert "0.1 + 1.2" in str(mixed.summary()) and mixed.pictures() == ("show",)
    assert mixed.sel(target="0.1 + 1.2").shape == (3,)


def test_a_grid_and_its_picture_are_of_single_heads(mixed):
    grid = mixed.grid()
    assert not grid.values[0, 3].isnan().any() and not grid.values[1, 1].isnan().any()
    assert grid.values[0, 1].isnan().all() and grid.values[1, 2].isnan().all()
    with pytest.raises(ValueError, match="a grid .* heads"):
        rp.ablate(captured(PLAIN), [("0.1", "1.2")], rp.Zero(), metric=DIFF).grid()


def test_pictures_show_rows_of_several_targets(mixed):
    pytest.importorskip("plotly")
    assert "0.1 + 1.2" in plots.show(mixed).to_json()
    assert plots.effect_bars(mixed).data
    each = rp.ablate(
        captured(PLAIN), [("0.1", "1.2"), "0.3"], rp.Zero(), metric=DIFF, positions="each"
    )
    assert "0.1 + 1.2" in plots.show(each).to_json()


def test_a_sweep_over_tuples_keeps_its_rows_and_goes_on(tmp_path):
    run, file = captured(PLAIN), tmp_path / "rows.jsonl"
    targets = [("0.1", "0.2"), "0.3", ("1.0", "1.1", "mlp.0")]
    plain = rp.ablate(run, targets, rp.Zero(), metric=DIFF)
    assert torch.equal(
        rp.ablate(run, targets, rp.Zero(), metric=DIFF, rows=file).total, plain.total
    )
    lines = file.read_bytes().splitlines(keepends=True)
    assert {json.loads(line)["target"] for line in lines[1:]} == set(plain.targets)
    file.write_bytes(b"".join(lines[:2]))
    again = rp.ablate(run, targets, rp.Zero(), metric=DIFF, rows=file)
    assert torch.equal(again.total, plain.total)


def test_the_command_replaces_together_what_a_plus_joins(capsys, tmp_path):
    folder, target = str(zoo.text_folder()), tmp_path / "effect.json"
    argv = ["ablate", "zero", "0.1+1.2", "0.3", "--model", folder, "--prompt", "the dog saw"]
    argv += ["--metric", "kl", "--json", str(target)]
    assert main(argv) == 0
    assert "0.1 + 1.2" in capsys.readouterr().out
    found = rp.load_result(target)
    assert found.targets == ("0.1 + 1.2", "0.3")
    run = rp.capture(rp.load(folder), ["the dog saw"])
    expected = rp.ablate(run, [("0.1", "1.2"), "0.3"], rp.Zero(), metric=rp.kl())
    torch.testing.assert_close(found.total, expected.total.cpu())


# Windows


def test_windows_are_neighbours_and_the_ends_have_no_shorter_ones():
    layers = [f"attn.{layer}" for layer in range(5)]
    windows = rp.windows_of(layers, 3)
    assert [list(map(str, window)) for window in windows] == [
        ["attn.0", "attn.1", "attn.2"],
        ["attn.1", "attn.2", "attn.3"],
        ["attn.2", "attn.3", "attn.4"],
    ]
    assert rp.windows_of(layers, 5) == [tuple(map(rp.parse, layers))]
    assert [len(window) for window in rp.windows_of(layers, 1)] == [1] * 5


def test_windows_keep_the_members_of_a_tuple_together_and_are_rows():
    run = captured(PLAIN)
    windows = rp.windows_of([(f"attn.{layer}", f"mlp.{layer}") for layer in range(3)], 2)
    effect = rp.ablate(run, windows, rp.Zero(), metric=DIFF)
    assert effect.targets == (
        "attn.0 + mlp.0 + attn.1 + mlp.1",
        "attn.1 + mlp.1 + attn.2 + mlp.2",
    )


@pytest.mark.parametrize("size", [0, -1, 4])
def test_windows_of_another_size_are_refused(size):
    with pytest.raises(AddressError, match=f"windows of {size} were asked for, of 3 targets"):
        rp.windows_of(["attn.0", "attn.1", "attn.2"], size)


# Spans


@pytest.mark.parametrize("kind", ["zero", "resample"])
@toys
def test_a_span_of_each_prompt_is_replaced_together(toy, kind):
    run, how = captured(toy), kinds(toy)[kind]
    sites = ["embed", "attn.1", "1.2", "mlp.0.5", "resid_post.0", "1.2.q", "1.2.pattern"]
    effect = rp.ablate(run, sites, how, metric=DIFF, positions=SPANS)
    assert effect.positions == "1 to 3 positions a prompt"
    for row, (tokens, other) in enumerate(zip(ROWS, OTHERS, strict=True)):
        twin, source = Slow(toy, [tokens]), Slow(toy, [other])
        base = twin.score("logit_diff", twin.clean)
        for number, site in enumerate(sites):
            new = source.value if kind == "resample" else lambda s, t=twin: 0 * t.value(s)
            total, direct = twin.changed([site], [SPANS[row]], new)
            tolerance = 1e-6 if toy.route == "replay" and "pattern" in site else 1e-10
            assert_close(
                effect.total[number, [row]], twin.score("logit_diff", total) - base, tolerance
            )
            assert_close(
                effect.direct[number, [row]], twin.score("logit_diff", direct) - base, tolerance
            )


@backends
def test_spans_of_one_position_of_all_and_negative_ones_are_what_they_say(toy):
    run, options = captured(toy, "ragged"), {"metric": DIFF}
    sites = ["0.1", "mlp.1", "1.2.k"]

    def effect(positions):
        return rp.ablate(run, sites, rp.Zero(), positions=positions, **options).total

    assert torch.equal(effect([[2], [0], [-1]]), effect([2, 0, -1]))
    assert_close(effect([list(range(n)) for n in run.prompts.lengths]), effect(None))
    assert torch.equal(effect([[-1, -2]] * 3), effect([[7, 6], [2, 1], [4, 3]]))
    assert_close(effect([[-1, -2]] * 3), effect([[-2, -1]] * 3))
    assert torch.equal(effect(torch.tensor([[1, 2]] * 3)), effect([range(1, 3)] * 3))


@backends
def test_a_path_is_sent_from_a_span(toy):
    run, others = captured(toy), captured(toy, "others")
    path = rp.Path(to="2.1.q", using=rp.Resample(others), mlps="recompute")
    spans = rp.ablate(run, ["0.1", "mlp.0"], path, metric=DIFF, positions=[[0, 2], [-1], [1, 3, 5]])
    for row, span in enumerate([[0, 2], [-1], [1, 3, 5]]):
        one = rp.capture(toy.model, [ROWS[row]])
        using = rp.Resample(rp.capture(toy.model, [OTHERS[row]]))
        alone = rp.Path(to="2.1.q", using=using, mlps="recompute")
        found = rp.ablate(one, ["0.1", "mlp.0"], alone, metric=DIFF, positions=[span])
        assert_close(spans.total[:, [row]], found.total)
    assert largest(spans.total) > 1e-3


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1]], "1 spans were given for 3 prompts"),
        ([0, 1], "2 positions were given for 3 prompts"),
        ([[0], [], [1]], "the span of prompt 1 is empty"),
        ([[0], [2, -4], [1]], "position 2 is twice in the span of prompt 1"),
        ([[0], [1], [6]], "position 6 was asked for, but prompt 2 has 6 tokens"),
    ],
)
def test_what_is_no_span_is_refused(positions, message):
    with pytest.raises(PositionError) as caught:
        rp.ablate(captured(PLAIN), "0.1", rp.Zero(), metric=DIFF, positions=positions)
    assert message in str(caught.value)


# Spans of another prompt

BASE_AT, SOURCE_AT = [[1, 3, 4], [5, 0], [2]], [[5, 2, 7], [-1, 1], [3]]


@pytest.mark.parametrize("site", ["embed", "0.1", "mlp.1", "resid_mid.1", "1.2.q", "attn.1.bias"])
@backends
def test_spans_of_a_source_of_another_length_stand_for_those_of_the_base(toy, site):
    run, source = captured(toy), captured(toy, "longer")
    how = rp.Resample(source, at=SOURCE_AT)
    effect = rp.ablate(run, site, how, metric=DIFF, positions=BASE_AT)
    assert effect.how.startswith("resample rowwise at named positions from 3 prompts")
    for row, (tokens, other) in enumerate(zip(ROWS, LONGER, strict=True)):
        twin, theirs = Slow(toy, [tokens]), Slow(toy, [other])
        base = twin.score("logit_diff", twin.clean)
        new = twin.value(site).clone()
        new[0, BASE_AT[row]] = theirs.value(site)[0, SOURCE_AT[row]]
        total, direct = twin.changed([site], [BASE_AT[row]], lambda _, new=new: new)
        assert_close(effect.total[0, [row]], twin.score("logit_diff", total) - base)
        assert_close(effect.direct[0, [row]], twin.score("logit_diff", direct) - base)


@backends
def test_one_named_position_pairs_prompts_of_unequal_length(toy):
    run, source = captured(toy, "ragged"), captured(toy, "longer")
    last = rp.ablate(run, "1.2", rp.Resample(source, at=-1), metric=DIFF, positions=-1)
    spans = [[length - 1] for length in source.prompts.lengths]
    same = rp.ablate(run, "1.2", rp.Resample(source, at=spans), metric=DIFF, positions=[[-1]] * 3)
    assert torch.equal(last.total, same.total) and largest(last.total) > 1e-3
    path = rp.Path(to="logits", using=rp.Resample(source, at=-1), mlps="freeze")
    assert_close(
        rp.ablate(run, "2.2", path, metric=DIFF, positions=-1).total,
        rp.ablate(run, "2.2", rp.Resample(source, at=-1), metric=DIFF, positions=-1).direct,
    )


@backends
def test_a_span_of_the_run_itself_changes_nothing_exactly(toy):
    run = captured(toy)
    how = rp.Resample(run, at=SPANS)
    assert not rp.ablate(run, ["0.1", "mlp.1"], how, metric=DIFF, positions=SPANS).total.any()


@backends
def test_a_mean_over_spans_is_one_for_all_or_one_for_each_element(toy):
    run, others = captured(toy), captured(toy, "longer")
    base_at, at = [[1, 2], [3, 0], [4, 5]], [[5, 2], [-1, 1], [3, 6]]
    values = [Slow(toy, [row]).value("0.1")[0, span] for row, span in zip(LONGER, at, strict=True)]
    stacked = torch.stack(values)  # [prompt, element, d_head]
    twin = slow(toy)
    base = twin.score("logit_diff", twin.clean)
    for over, mean in (
        (("batch",), stacked.mean(0)),
        (("batch", "pos"), stacked.mean((0, 1)).expand(2, -1)),
    ):
        effect = rp.ablate(
            run, "0.1", rp.Mean(others, over=over, at=at), metric=DIFF, positions=base_at
        )
        new = twin.value("0.1").clone()
        for prompt, span in enumerate(base_at):
            new[prompt, span] = mean
        total, _ = twin.changed(["0.1"], base_at, lambda _, new=new: new)
        assert_close(effect.total[0], twin.score("logit_diff", total) - base)


def test_the_order_of_a_span_says_what_stands_for_what():
    run, source = captured(PLAIN), captured(PLAIN, "longer")

    def total(positions, at):
        how = rp.Resample(source, at=at)
        return rp.ablate(run, "1.2", how, metric=DIFF, positions=positions).total

    turned = [span[::-1] for span in SOURCE_AT]
    found = total(BASE_AT, SOURCE_AT)
    assert_close(found, total([span[::-1] for span in BASE_AT], turned))
    assert (found - total(BASE_AT, turned))[0, :2].abs().min() > 1e-4


def test_spans_that_do_not_fit_are_refused():
    run, source = captured(PLAIN), captured(PLAIN, "longer")

    def ablate(how, positions=BASE_AT, target="0.1"):
        rp.ablate(run, target, how, metric=DIFF, positions=positions)

    with pytest.raises(PositionError, match="prompt 0: 3 positions are replaced, but at= names 1"):
        ablate(rp.Resample(source, at=-1))
    with pytest.raises(PositionError, match="prompt 1: 6 positions are replaced, but at= names 2"):
        ablate(rp.Resample(source, at=[[0, 1, 2, 3, 4, 5], [0, 1], [0]]), None)
    with pytest.raises(PromptError, match="name the source's positions with at="):
        ablate(rp.Resample(source))
    with pytest.raises(AblationError, match="at= pairs positions row by row"):
        rp.Resample(source, pairing="shuffle", seed=0, at=-1)
    with pytest.raises(AblationError, match="1.2.pattern: a query weighs .* leave out at="):
        ablate(rp.Resample(source, at=SOURCE_AT), target="1.2.pattern")
    with pytest.raises(PositionError, match="needs spans of one length"):
        ablate(rp.Mean(source, over=("batch",), at=SOURCE_AT))
    with pytest.raises(PositionError, match="prompt 1: 2 positions are replaced, but at= names 3"):
        ablate(rp.Mean(source, over=("batch",), at=[[0, 1, 2]] * 3))
    with pytest.raises(PromptError, match="as many prompts in the source"):
        ablate(rp.Resample(rp.capture(PLAIN.model, LONGER[:2]), at=SOURCE_AT[:2]))


def test_spans_and_positions_of_a_source_tell_sweeps_apart(tmp_path):
    run, source, file = captured(PLAIN), captured(PLAIN, "longer"), tmp_path / "rows.jsonl"

    def sweep(at, positions=BASE_AT):
        how = rp.Resample(source, at=at)
        return rp.ablate(run, "0.1", how, metric=DIFF, positions=positions, rows=file)

    sweep(SOURCE_AT)
    with pytest.raises(rp.errors.SweepMismatchError, match="other positions"):
        sweep([[5, 2, 6], [-1, 1], [3]])
    with pytest.raises(rp.errors.SweepMismatchError, match="positions"):
        sweep(SOURCE_AT, [[1, 3, 5], [5, 0], [2]])


# Attention from some positions to others

BETWEEN = {
    "last to one": (-1, 2),
    "last to several": (-1, [[0, 2, 3], [1, 4, 5], [2, 3, 4]]),
    "own positions": ([4, 5, 3], [2, 0, 1]),
    "all to first": (None, 0),
    "several to several": ([[3, 5], [4, 2], [1, 5]], [[1, 4], [0, 3], [0, 2]]),
}


def replaced_pattern(own, other, queries, keys, renormalise):
    """The pattern [prompt, query, key] with weights between these positions replaced, by loops."""
    new, n = own.clone(), own.shape[-1]

    def listed(positions, prompt):
        if positions is None:
            return list(range(n))
        one = positions if isinstance(positions, int) else positions[prompt]
        return [position % n for position in ([one] if isinstance(one, int) else one)]

    for prompt in range(len(own)):
        for query in listed(queries, prompt):
            ks = [key for key in listed(keys, prompt) if key <= query]
            rest = [key for key in range(query + 1) if key not in ks]
            for key in ks:
                new[prompt, query, key] = other[prompt, query, key]
            if renormalise:
                left = own[prompt, query].sum() - new[prompt, query, ks].sum()
                new[prompt, query, rest] *= left / own[prompt, query, rest].sum()
    return new


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
@toys
def test_attention_between_positions_agrees_with_the_reference(toy, kind, renormalise):
    run, twin, others = captured(toy), slow(toy), slow(toy, "others")
    base = twin.score("logit_diff", twin.clean)
    for name, (queries, keys) in BETWEEN.items():
        if renormalise and name == "all to first":
            continue  # query 0 has nothing else to look at
        target = rp.attention("1.2", queries=queries, keys=keys, renormalise=renormalise)
        effect = rp.ablate(run, [target, "0.1"], kinds(toy)[kind], metric=DIFF)
        own, theirs = twin.value("1.2.pattern"), others.value("1.2.pattern")
        other = {"zero": 0 * own, "resample": theirs, "mean": theirs.mean(0).expand_as(own)}[kind]
        new = replaced_pattern(own, other, queries, keys, renormalise)
        total, direct = twin.changed(["1.2.pattern"], queries, lambda _, new=new: new)
        assert_close(effect.total[0], twin.score("logit_diff", total) - base)
        assert_close(effect.direct[0], twin.score("logit_diff", direct) - base)
        assert largest(effect.total[0]) > 1e-4
        single = rp.ablate(run, "0.1", kinds(toy)[kind], metric=DIFF)
        assert torch.equal(effect.total[1], single.total[0])


def test_the_reference_of_attention_notices_other_keys_and_other_scales():
    run, twin = captured(PLAIN), slow(PLAIN)
    own = twin.value("1.2.pattern")
    target = rp.attention("1.2", queries=-1, keys=[[0, 2]] * 3, renormalise=True)
    found = rp.ablate(run, target, rp.Zero(), metric=DIFF).patched[0]

    def expected(queries, keys, renormalise):
        new = replaced_pattern(own, 0 * own, queries, keys, renormalise)
        return twin.score("logit_diff", twin.changed(["1.2.pattern"], queries, lambda _: new)[0])

    assert_close(found, expected(-1, [[0, 2]] * 3, True))
    for planted in ((-1, [[0, 2]] * 3, False), (-1, [[0, 3]] * 3, True), (4, [[0, 2]] * 3, True)):
        assert largest(found - expected(*planted)) > 1e-4


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="HookedTransformer left in TransformerLens 4")
def test_without_keys_and_renormalised_is_the_softmax_without_them():
    toy = BY_LABEL["hooked LN-sequential-full-untied-raw"]
    target = rp.attention("1.2", queries=-1, keys=[[0, 2], [1, 3], [5, 4]], renormalise=True)
    effect = rp.ablate(captured(toy), target, rp.Zero(), metric=DIFF)

    def mask(scores, hook):
        for prompt, keys in enumerate([[0, 2], [1, 3], [5, 4]]):
            scores[prompt, 2, -1, keys] = -torch.inf
        return scores

    with torch.no_grad():
        hooks = [("blocks.1.attn.hook_attn_scores", mask)]
        logits = toy.model.run_with_hooks(torch.tensor(ROWS), fwd_hooks=hooks)[:, -1]
    assert_close(effect.patched[0], logits[:, ANSWER] - logits[:, FOIL])


@pytest.mark.parametrize("renormalise", [False, True])
@backends
def test_attention_of_ragged_prompts_is_that_of_each_alone(toy, renormalise):
    queries, keys = [[-1, 4], [-1], [2, 3]], [[0, 3], [1], [1]]
    target = rp.attention("1.2", queries=queries, keys=keys, renormalise=renormalise)
    effect = rp.ablate(captured(toy, "ragged"), target, rp.Zero(), metric=DIFF)
    for row, tokens in enumerate(zoo.RAGGED):
        alone = rp.attention(
            "1.2", queries=[queries[row]], keys=[keys[row]], renormalise=renormalise
        )
        found = rp.ablate(rp.capture(toy.model, [tokens]), alone, rp.Zero(), metric=DIFF)
        assert_close(effect.total[:, [row]], found.total)
        assert_close(effect.direct[:, [row]], found.direct)


@pytest.mark.parametrize("renormalise", [False, True])
@backends
def test_attention_of_the_run_itself_changes_nothing_exactly(toy, renormalise):
    run = captured(toy)
    target = rp.attention("1.2", queries=-1, keys=2, renormalise=renormalise)
    assert not rp.ablate(run, target, rp.Resample(run), metric=DIFF).total.any()


@backends
def test_all_keys_of_all_queries_are_the_whole_pattern(toy):
    run = captured(toy)
    target = rp.attention("1.2", queries=None, keys=None, renormalise=False)
    for how in kinds(toy).values():
        effect = rp.ablate(run, [target, "1.2.pattern"], how, metric=DIFF)
        assert_close(effect.total[0], effect.total[1])


@backends
def test_attention_targets_of_a_row_act_together(toy):
    run = captured(toy)
    first = rp.attention("1.2", queries=-1, keys=2, renormalise=False)
    second = rp.attention("1.2", queries=-1, keys=[[0, 3]] * 3, renormalise=False)
    both = rp.attention("1.2", queries=-1, keys=[[0, 2, 3]] * 3, renormalise=False)
    elsewhere = rp.attention("1.2", queries=4, keys=1, renormalise=False)
    other_head = rp.attention("1.3", queries=-1, keys=2, renormalise=False)
    effect = rp.ablate(
        run, [first, second, both, (both, elsewhere), (first, other_head)], rp.Zero(), metric=DIFF
    )
    assert_close(
        effect.direct[3], rp.ablate(run, [(elsewhere, both)], rp.Zero(), metric=DIFF).direct[0]
    )
    with pytest.raises(PositionError, match="both replace weights of query 5 in prompt 0"):
        rp.ablate(run, [(first, second)], rp.Zero(), metric=DIFF)


def test_attention_is_named_by_its_positions_in_results(tmp_path):
    run = captured(PLAIN)
    target = rp.attention("1.2", queries=-1, keys=[2, 3, 1], renormalise=False)
    effect = rp.ablate(run, target, rp.Zero(), metric=DIFF, rows=tmp_path / "rows.jsonl")
    assert effect.targets == ("1.2 attention from -1 to [2, 3, 1], not renormalised",)
    assert effect.positions == "the queries of each attention target"
    assert rp.Effect.from_json(effect.to_json()).targets == effect.targets
    assert (
        str(target) in str(effect.summary()) and effect.table()["head"].isna().all()
        if "head" in effect.table()
        else True
    )
    spans = [list(range(n, n + 30)) for n in range(4)]
    names = {
        str(rp.attention("1.2", queries=None, keys=keys, renormalise=True))
        for keys in (spans, spans[::-1], spans[:2] * 2)
    }
    assert len(names) == 3 and max(map(len, names)) < 120


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rp.attention("attn.1", queries=-1, keys=0, renormalise=False), AddressError,
         "attn.1 is no head; attention is of a head"),
        (lambda: rp.attention("1.2.q", queries=-1, keys=0, renormalise=False), AddressError,
         "1.2.q is no head"),
        (lambda: rp.attention("1.2", queries=-1, keys=0), TypeError, "renormalise"),
        (lambda: rp.attention("1.2", queries=1, keys=3, renormalise=False), PositionError,
         "every key is behind every query (the first key is 3, the last query 1)"),
        (lambda: rp.attention("1.2", queries=0, keys=0, renormalise=True), PositionError,
         "query 0 of prompt 0 has no weight on any other key"),
        (lambda: rp.attention("1.2", queries=-1, keys=6, renormalise=False), PositionError,
         "position 6 was asked for"),
        (lambda: rp.attention("1.9", queries=-1, keys=0, renormalise=False), AddressError,
         "does not exist"),
        (lambda: (rp.attention("1.2", queries=-1, keys=0, renormalise=False), "1.2.pattern"),
         AddressError, "is a part of 1.2.pattern"),
        (lambda: (rp.attention("1.2", queries=-1, keys=0, renormalise=False), "attn.1"),
         AddressError, "is a part of attn.1"),
    ],
)  # fmt: skip
def test_attention_that_cannot_be_replaced_is_refused(make, error, message):
    with pytest.raises(error) as caught:
        rp.ablate(captured(PLAIN), [make()], rp.Zero(), metric=DIFF)
    assert message in str(caught.value)


def test_what_does_not_go_with_attention_is_refused():
    run = captured(PLAIN)
    target = rp.attention("1.2", queries=-1, keys=0, renormalise=False)
    for positions in (-1, "each", SPANS):
        with pytest.raises(AblationError, match="names its queries itself"):
            rp.ablate(run, target, rp.Zero(), metric=DIFF, positions=positions)
    with pytest.raises(AddressError, match="writes nothing to the stream"):
        rp.ablate(run, target, rp.Path(to="logits", using=rp.Zero(), mlps="freeze"), metric=DIFF)
    with pytest.raises(AblationError, match="a query weighs .* leave out at="):
        rp.ablate(run, target, rp.Mean(run, over=("batch",), at=-1), metric=DIFF)
    with pytest.raises(AblationError, match="their mean over positions means nothing"):
        rp.ablate(run, target, rp.Mean(run, over=("batch", "pos")), metric=DIFF)


def test_no_public_name_is_hidden_by_a_module_of_the_same_name():
    from pathlib import Path

    names = {path.stem for path in Path(rp.__file__).parent.iterdir()}
    assert names & set(rp.__all__) == {"errors"}
    assert callable(rp.attention) and list(itertools.islice(rp.__all__, 1))
