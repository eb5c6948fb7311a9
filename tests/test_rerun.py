"""The engine: however a changed run is made, its numbers are those of a whole forward pass."""

import pytest
import torch
import zoo
from zoo_ablation import ANSWER, FOIL, GPT2, KINDS_OF_BACKEND, PLAIN, ROWS, TOYS, targets

import resid_patching as rp
from resid_patching.ablation.ablating import variants_of
from resid_patching.errors import HookNotFiredError, UnsupportedModelError
from resid_patching.metrics import as_metric
from resid_patching.rerun import engine, hooks_to_keep
from resid_patching.rerun.plain import PlainBlocks

backends = pytest.mark.parametrize("toy", KINDS_OF_BACKEND, ids=str)
DIFF = rp.logit_diff(ANSWER, FOIL)
LONG = [list(range(1, 15)), [3] * 4 + list(range(20, 29)), [7, 6, 5]]
EVERY = ("plain", "replay", "full")


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def assert_same(left, right, tolerance=1e-10):
    assert_close(left.baseline, right.baseline, tolerance)
    assert_close(left.total, right.total, tolerance)
    assert_close(left.direct, right.direct, tolerance)


def ablate(model, rows, sites, routes=EVERY, how=None, metric=DIFF, **options):
    run = rp.capture(model, rows, max_bytes=options.pop("max_bytes", 2**30))
    how = rp.Zero() if how is None else how
    return rp.ablate(run, sites, how, metric=metric, routes=routes, **options)


def fresh(toy):
    """A model of this toy that may be changed."""
    return zoo.fresh_named("gpt2_untied") if toy is GPT2 else zoo.fresh("hooked", zoo.Cell())


# Routes


@pytest.mark.parametrize("positions", [None, 1, [6, -1, 0]], ids=str)
@pytest.mark.parametrize("toy", TOYS, ids=str)
def test_every_route_gives_the_same_numbers_on_long_and_short_prompts(toy, positions):
    metric = rp.kl(position=None) if positions == 1 else DIFF
    whole = ablate(toy.model, LONG, targets(toy), ("full",), metric=metric, positions=positions)
    assert whole.routes == ("full",)
    for routes in (EVERY, ("replay", "full"), ("plain", "full")):
        effect = ablate(toy.model, LONG, targets(toy), routes, metric=metric, positions=positions)
        fastest = next(r for r in routes if r in (toy.route, "replay", "full"))
        assert effect.routes == (fastest,)
        assert_same(effect, whole)


@backends
def test_targets_of_several_stages_together_go_every_route(toy):
    many = ["embed", "0.1", "mlp.0.5", "resid_mid.1", "1.2.q", "1.1.k", "1.0", "mlp.1", "2.3.v"]
    for sites in (["0.1", "mlp.1"], many, ["attn.0.bias", "0.2", "attn.1", "mlp.1.bias", "2.1.z"]):
        expected = ablate(toy.model, LONG, sites, ("full",), joint=True)
        for routes in (EVERY, ("replay", "full"), ("full",)):
            effect = ablate(toy.model, LONG, sites, routes, joint=True)
            assert effect.routes == (routes[0],)
            assert_same(effect, expected)


@backends
def test_a_pattern_behind_another_target_is_replayed(toy):
    """Our attention shows no pattern in which one could be put on the way."""
    sites = ["0.1", "1.2.pattern"]
    effect = ablate(toy.model, LONG, sites, joint=True)
    assert effect.routes == ("replay",)
    assert_same(effect, ablate(toy.model, LONG, sites, ("full",), joint=True))


@pytest.mark.parametrize("routes", [EVERY, ("replay", "full"), ("full",)], ids=str)
@pytest.mark.parametrize("stack", [1, 40])
@backends
def test_stacks_of_any_size_give_the_same_numbers(toy, routes, stack, monkeypatch):
    sites = targets(toy)[::2]
    expected = ablate(toy.model, LONG, sites, routes)
    monkeypatch.setattr(engine, "STACK_TOKENS", stack)
    assert_same(ablate(toy.model, LONG, sites, routes), expected)
    assert_same(
        ablate(toy.model, LONG, sites, routes, metric=rp.loss(), positions=-1),
        ablate(toy.model, LONG, sites, ("full",), metric=rp.loss(), positions=-1),
    )


@pytest.mark.parametrize("routes", [EVERY, ("replay", "full"), ("full",)], ids=str)
@pytest.mark.parametrize("max_bytes", [1, 50_000])
@backends
def test_bounds_on_memory_change_no_number(toy, routes, max_bytes):
    sites = targets(toy)[1::2]
    for metric in (DIFF, rp.kl(position=None), rp.loss()):
        bounded = ablate(toy.model, LONG, sites, routes, metric=metric, max_bytes=max_bytes)
        assert_same(bounded, ablate(toy.model, LONG, sites, routes, metric=metric))


@pytest.mark.parametrize("max_bytes", [1, 100_000])
@backends
def test_bounds_on_memory_change_no_mean_and_no_resample(toy, max_bytes):
    sites, rows = targets(toy), ROWS
    for make in (
        lambda source: rp.Mean(source, over=("batch",)),
        lambda source: rp.Resample(source, pairing="shuffle", seed=1),
    ):
        bounded = make(rp.capture(toy.model, rows[::-1], max_bytes=max_bytes))
        free = make(rp.capture(toy.model, rows[::-1]))
        assert_same(
            ablate(toy.model, rows, sites, how=bounded, max_bytes=max_bytes),
            ablate(toy.model, rows, sites, how=free),
        )


@backends
def test_one_changed_row_is_run_on_the_clean_keys_and_values_of_the_others(toy, monkeypatch):
    """Only rows from the first changed one on are projected."""
    seen = []
    project = PlainBlocks.project

    def counting(self, layer, x):
        seen.append((layer, x.shape[0], x.shape[2]))
        return project(self, layer, x)

    rows = [list(range(1, 15))] * 2
    options = {"positions": -2, "metric": rp.loss()}
    expected = ablate(toy.model, rows, "0.1", ("full",), **options)
    monkeypatch.setattr(PlainBlocks, "project", counting)
    assert_same(ablate(toy.model, rows, "0.1", **options), expected)
    assert (1, 2, 2) in seen and (2, 2, 2) in seen  # the variant, and the control beside it
    assert all(layer > 0 for layer, _, _ in seen)  # nothing before what changed


# Models beyond plain blocks


SITES = ["embed", "attn.0", "1.2", "mlp.1", "mlp.0.5", "resid_pre.1", "resid_post.1", "0.1.q"]
GROUPED = ["0.1.k", "1.1.v", "1.3.pattern"]


def compare(model, rows, sites, tolerance=1e-10, **options):
    """All routes against whole forward passes; returns the fastest route that was taken."""
    whole = ablate(model, rows, sites, ("full",), **options)
    for routes in (("plain", "full"), ("replay", "full"), EVERY):
        effect = ablate(model, rows, sites, routes, **options)
        assert_same(effect, whole, tolerance)
    assert float(whole.total.abs().max()) > 1e-2
    return effect.routes


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("mistral", [*SITES, *GROUPED, "resid_mid.1"]),  # sliding window of 4
        ("qwen2", [*SITES, *GROUPED]),
        ("qwen3", [*SITES, *GROUPED]),  # queries and keys are normalised
        ("gemma", SITES),
        ("neo", [*SITES, *GROUPED[:2]]),  # local attention in layer 1
        ("mpt", SITES),  # positions by attention biases
        ("falcon", SITES),
        ("gptj", SITES),
        ("phi", [*SITES, *GROUPED]),
        ("opt", SITES),
    ],
)
def test_models_beyond_plain_blocks_are_replayed_and_agree(name, sites):
    model = zoo.named(name)
    for positions in (None, [12, -1, 1]):
        routes = compare(model, LONG, sites, positions=positions)
        # TransformerLens 4 keeps hooks of its own on OPT, which are respected like a caller's.
        assert name == "opt" or set(routes) <= {"replay", "plain"}
        if name in ("mistral", "qwen3", "neo", "mpt", "gptj"):
            assert routes == ("replay",)


def test_attention_by_biases_falls_back_to_whole_passes_where_blocks_cannot_be_called_alone():
    model = zoo.named("bloom")
    for positions in (None, -1):
        assert compare(model, LONG, ["attn.0", "mlp.1", "1.2"], positions=positions) == ("full",)


def test_a_window_shorter_than_the_prompt_is_noticed_although_a_shorter_prompt_was_plain():
    """Within the window our blocks are the model's own; behind it they must be refused."""
    config = zoo.CONFIGS["mistral"]()
    model = zoo.bridge(zoo.hugging_face(config, torch.float32))
    short = [[3, 1, 4], [9, 2, 6]]
    assert compare(model, short, SITES, 1e-4) == ("plain",)
    assert compare(model, LONG, SITES, 1e-4) == ("replay",)
    assert compare(model, short, SITES, 1e-4) != ("full",)


def test_norms_behind_the_sublayers_are_replayed_and_agree():
    model = zoo.bridge(zoo.hugging_face(zoo.CONFIGS["gemma2"](), torch.float32))
    sites = ["embed", "attn.0", "mlp.1", "resid_pre.1", "resid_mid.1", "1.2", "mlp.0.5", "0.1.q"]
    for positions in (None, -1):
        assert compare(model, LONG, sites, 5e-4, positions=positions) == ("replay",)


@pytest.mark.full
@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="HookedTransformer left in TransformerLens 4")
@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ({"attn_only": True}, "plain"),
        ({"normalization_type": None}, "plain"),
        ({"positional_embedding_type": "rotary", "rotary_dim": 8}, "plain"),
        ({"positional_embedding_type": "rotary", "rotary_dim": 4}, "plain"),
        (
            {
                "positional_embedding_type": "rotary",
                "rotary_dim": 8,
                "rotary_adjacent_pairs": True,
            },
            "plain",
        ),
        ({"gated_mlp": True}, "plain"),
        ({"act_fn": "silu"}, "plain"),
        ({"use_attn_scale": False}, "plain"),
        ({"positional_embedding_type": "alibi"}, "replay"),
        ({"attn_scores_soft_cap": 1.0}, "replay"),
        (
            {"use_local_attn": True, "window_size": 4, "attn_types": ("global", "local", "local")},
            "replay",
        ),
        ({"positional_embedding_type": "shortformer"}, None),
        ({"use_attn_result": True, "use_split_qkv_input": True}, None),
        ({"use_hook_mlp_in": True, "use_attn_in": True}, None),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else str(x),
)
def test_variants_of_hooked_transformer_agree(changes, route):
    model = zoo.hooked_variant(**changes)
    sites = ["embed", "attn.0", "1.2", "resid_pre.1", "1.2.q", "0.1.k", "0.1.v", "1.3.pattern"]
    sites += [] if "attn_only" in changes else ["mlp.1", "mlp.0.5", "resid_mid.1"]
    for positions in (None, [12, -1, 1]):
        routes = compare(model, LONG, sites, positions=positions)
        assert route is None or routes == (route,)


@pytest.mark.parametrize(("name", "acts"), [("neo", False), ("mpt", True), ("phi", True)])
def test_a_pattern_that_is_shown_only_after_its_use_cannot_be_replaced(name, acts):
    """Its hook fires and what is put there is thrown away: no effect would be a wrong number."""
    run = rp.capture(zoo.named(name), ROWS)
    z = rp.ablate(run, "1.2.z", rp.Zero(), metric=DIFF)
    assert float(z.total.abs().max()) > 1e-2
    if acts:
        assert_same(rp.ablate(run, "1.2.pattern", rp.Zero(), metric=DIFF), z)
    else:
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="throws an edit away"):
                rp.ablate(run, "1.2.pattern", rp.Zero(), metric=DIFF)


@pytest.mark.parametrize("name", ["gptj", "opt"])
def test_a_pattern_whose_hook_never_fires_cannot_be_replaced(name):
    run = rp.capture(zoo.named(name), ROWS)
    with pytest.raises(HookNotFiredError, match="hook_pattern"):
        rp.ablate(run, "1.2.pattern", rp.Zero(), metric=DIFF)


@pytest.mark.parametrize("toy", TOYS, ids=str)
def test_a_head_without_pattern_or_values_is_a_head_that_writes_nothing(toy):
    kv = 2 * toy.n_kv_heads // zoo.N_HEADS
    effect = ablate(toy.model, LONG, ["1.2.pattern", "1.2"])
    assert_close(effect.total[0], effect.total[1])
    group = [f"1.{head}" for head in range(4) if head * toy.n_kv_heads // zoo.N_HEADS == kv]
    values = ablate(toy.model, LONG, f"1.{kv}.v")
    assert_close(values.total, ablate(toy.model, LONG, group, joint=True).total)


# What is known of a model is only known of it as it was


@backends
def test_blocks_that_cannot_be_called_alone_fall_back_to_whole_passes(toy):
    model = fresh(toy)
    expected = ablate(model, LONG, targets(toy), ("full",))
    inside = [False]
    forward = type(model).forward

    def whole(*args, **kwargs):
        inside[0] = True
        try:
            return forward(model, *args, **kwargs)
        finally:
            inside[0] = False

    def only_inside(module, args, kwargs):
        if not inside[0]:
            raise RuntimeError("this block needs its model")

    model.forward = whole
    handles = [b.register_forward_pre_hook(only_inside, with_kwargs=True) for b in model.blocks]
    effect = ablate(model, LONG, targets(toy), ("replay", "full"))
    assert effect.routes == ("full",)
    assert_same(effect, expected)
    for handle in handles:
        handle.remove()


@backends
def test_blocks_that_depend_on_more_than_their_arguments_are_not_replayed(toy):
    """A block that adds something of its own at every second call cannot be repeated."""
    model = fresh(toy)
    expected = ablate(model, LONG, ["0.1", "mlp.0"], ("full",))
    inside = [False]
    forward = type(model).forward

    def whole(*args, **kwargs):
        inside[0] = True
        try:
            return forward(model, *args, **kwargs)
        finally:
            inside[0] = False

    def shifted(module, args, output):
        if inside[0]:
            return None
        return (output[0] + 1e-3, *output[1:]) if isinstance(output, tuple) else output + 1e-3

    model.forward = whole
    model.blocks[1].register_forward_hook(shifted)
    effect = ablate(model, LONG, ["0.1", "mlp.0"], ("replay", "full"))
    assert effect.routes == ("full",)
    assert_same(effect, expected)


@backends
def test_numbers_follow_weights_that_are_edited_in_place(toy):
    model = fresh(toy)
    before = ablate(model, LONG, targets(toy))
    edited = [
        model.blocks[1].attn.W_O if toy is PLAIN else _weight(model, "c_proj"),
        next(p for n, p in model.named_parameters() if "ln2" in n or "ln_2" in n)
        if toy is GPT2
        else model.blocks[2].mlp.W_in,
    ]
    for parameter in edited:
        with torch.no_grad():
            parameter.mul_(1.5)
        after = ablate(model, LONG, targets(toy))
        assert float((after.total - before.total).abs().max()) > 1e-3
        assert_same(after, ablate(model, LONG, targets(toy), ("full",)))
        assert after.routes == (toy.route,)
        before = after


def _weight(model, name):
    found = [p for n, p in model.named_parameters() if name in n and n.endswith("weight")]
    return found[0]


@pytest.mark.parametrize("part", ["mlp_out", "attention_write", "rotate", "attend"])
@backends
def test_wrong_blocks_of_ours_are_refused_and_the_numbers_stay_right(toy, part, monkeypatch):
    model = fresh(toy)
    expected = ablate(model, LONG, targets(toy), ("full",))
    right = getattr(PlainBlocks, part)

    def wrong(self, *args):
        found = right(self, *args)
        return found * (1 + 1e-6)

    monkeypatch.setattr(PlainBlocks, part, wrong)
    effect = ablate(model, LONG, targets(toy))
    assert effect.routes == ("replay",)
    assert_same(effect, expected)


@backends
def test_the_comparison_of_routes_notices_what_our_check_would_not(toy, monkeypatch):
    """Blocks that are right for the unchanged run alone give other numbers, which `full` shows."""
    model = fresh(toy)
    expected = ablate(model, LONG, targets(toy), ("full",))
    right = PlainBlocks.mlp_out

    def wrong(self, layer, x, *rest):
        found = right(self, layer, x, *rest)
        found[1:] *= 1 + 1e-6  # the control is the first of a stack
        return found

    monkeypatch.setattr(PlainBlocks, "mlp_out", wrong)
    effect = ablate(model, LONG, targets(toy))
    assert effect.routes == ("plain",)
    with pytest.raises(AssertionError):
        assert_same(effect, expected)


@backends
def test_a_control_of_later_layers_does_not_stand_for_earlier_ones(toy, monkeypatch):
    model = fresh(toy)
    run = rp.capture(model, LONG)
    reading = as_metric(DIFF).bind(run)
    late, early = (
        variants_of(run, [(rp.parse(site),)], rp.Zero(), [run.locate(None)])
        for site in ("resid_post.1", "resid_pre.1")
    )
    right = PlainBlocks.mlp_out
    monkeypatch.setattr(
        PlainBlocks,
        "mlp_out",
        lambda s, layer, *rest: right(s, layer, *rest) * (1 + 1e-6 * (layer == 1)),
    )
    names = hooks_to_keep(run, [*late, *early])
    (chunk,) = engine.chunks(run, names, reading, ("plain", "replay", "full"))
    assert [route for *_, route in chunk.evaluate(late)] == ["plain"]
    assert [route for *_, route in chunk.evaluate(early)] == ["replay"]


def without_biases(toy):
    """A hook that scales what MLPs write leaves their biases no part of it that can be replaced."""
    return [site for site in targets(toy) if not site.endswith(".bias")]


@backends
def test_hooks_of_the_caller_make_every_run_whole(toy):
    model = fresh(toy)
    model.hook_dict["blocks.0.hook_mlp_out"].add_hook(lambda m, hook: m * 1.5)
    effect = ablate(model, LONG, without_biases(toy))
    assert effect.routes == ("full",)
    model.reset_hooks()
    assert ablate(model, LONG, targets(toy)).routes == ("plain",)


@backends
def test_a_permanent_hook_of_the_caller_makes_every_run_whole_too(toy):
    model = fresh(toy)
    model.hook_dict["blocks.1.hook_mlp_out"].add_hook(lambda m, hook: m * 1.5, is_permanent=True)
    effect = ablate(model, LONG, without_biases(toy))
    assert effect.routes == ("full",)
    assert effect.provenance.user_hooks == ("blocks.1.hook_mlp_out",)


@backends
def test_in_half_precision_the_models_own_blocks_are_run(toy):
    if toy is GPT2:
        model = zoo.bridge(zoo.hugging_face(zoo.CONFIGS["gpt2_untied"](), torch.bfloat16))
    else:
        model = zoo.fresh("hooked", zoo.Cell(), torch.bfloat16)
    effect = ablate(model, ROWS, ["1.2", "mlp.1", "resid_pre.1"])
    assert "plain" not in effect.routes
    whole = ablate(model, ROWS, ["1.2", "mlp.1", "resid_pre.1"], ("full",))
    assert_same(effect, whole, 0.1)
    assert effect.total.dtype == torch.float32


@backends
def test_in_single_precision_every_route_agrees(toy):
    if toy is GPT2:
        model = zoo.bridge(zoo.hugging_face(zoo.CONFIGS["gpt2_untied"](), torch.float32))
    else:
        model = zoo.fresh("hooked", zoo.Cell(), torch.float32)
    assert compare(model, LONG, targets(toy), 1e-4) == ("plain",)
