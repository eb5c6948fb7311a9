"""Runs that carry an intervention: what reads them reads a model with hooks that do the same."""

import contextlib
import itertools
from zlib import crc32

import pytest
import torch
import zoo
import zoo_lens
from reference import ablation as slow
from reference import paths as slow_paths
from zoo_ablation import (
    ANSWER,
    FOIL,
    KINDS_OF_BACKEND,
    OTHERS,
    PLAIN,
    ROWS,
    TOYS,
    Slow,
    custom,
    targets,
)

import resid_patching as rp
from resid_patching.cli import main
from resid_patching.errors import (
    AblationError,
    AddressError,
    HeadMismatchError,
    ModelChangedError,
    NeuronMismatchError,
    PositionError,
    PromptError,
    ResidPatchingError,
    StreamMismatchError,
    SweepMismatchError,
)

toys = pytest.mark.parametrize("toy", TOYS, ids=str)
backends = pytest.mark.parametrize("toy", KINDS_OF_BACKEND, ids=str)
DIFF = rp.logit_diff(ANSWER, FOIL)
PER_ROW = [0, 3, -1]
TOKENS = torch.tensor(ROWS)


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance, equal_nan=True)


def largest(tensor):
    return float(tensor.abs().max())


def sites_of(toy):
    """One or two sites of every family that a run can carry."""
    return [site for site in targets(toy) if not site.endswith("bias")]


FAMILIES = sorted({site for toy in TOYS for site in sites_of(toy)})


def skip_without(toy, *sites):
    if missing := [site for site in sites if site not in sites_of(toy)]:
        pytest.skip(f"this model has no {missing[0]}")


# Against hooks and whole passes, for every site, kind and choice of positions


def kinds(toy):
    """Each kind on a run of `ROWS`, with what it puts in the place of a site."""
    source = rp.capture(toy.model, OTHERS)
    ours, theirs = Slow(toy, ROWS), Slow(toy, OTHERS)

    def mean(site):
        values = theirs.value(site)
        return values.mean(0, keepdim=True).expand_as(values)

    def one_mean(site):
        values = theirs.value(site)
        return values.mean((0, 1), keepdim=True).expand_as(values)

    return {
        "zero": (rp.Zero(), lambda site: torch.zeros_like(ours.value(site))),
        "resample": (rp.Resample(source), theirs.value),
        "mean": (rp.Mean(source, over=("batch",)), mean),
        "one mean": (rp.Mean(source, over=("batch", "pos")), one_mean),
    }


@pytest.mark.parametrize("kind", ["zero", "resample", "mean", "one mean"])
@toys
def test_logits_are_those_of_whole_passes_with_hooks(toy, kind):
    how, new = kinds(toy)[kind]
    run, twin = rp.capture(toy.model, ROWS), Slow(toy, ROWS)
    for site, positions in itertools.product(sites_of(toy), (None, -2, PER_ROW)):
        if kind == "one mean" and site.endswith("pattern"):
            continue  # refused
        expected, _ = twin.changed([site], positions, new)
        found = rp.ablated(run, site, how, positions=positions).logits_at(None)
        assert_close(found, expected)
    assert_close(run.logits_at(None), twin.clean)


@toys
def test_targets_are_replaced_together(toy):
    how, new = kinds(toy)["resample"]
    sites = ["embed", "0.1", "1.2.q", "mlp.1.4", "resid_post.1", "2.3", "mlp.2"]
    expected, _ = Slow(toy, ROWS).changed(sites, -2, new)
    found = rp.ablated(rp.capture(toy.model, ROWS), sites, how, positions=-2)
    assert_close(found.logits_at(None), expected)


def direct_logits(toy, held, own):
    """Logits of the ablated last state plus the change, what is behind it frozen, held stays."""
    model, weights = toy.model, zoo.plain_weights(toy.model)
    cache = slow_paths.activations(model, TOKENS, slow.hooks(held, weights))
    total = torch.zeros_like(cache["blocks.0.hook_resid_pre"])
    stages = {slow.describe(change[0])[:2] for change in [*held, *own]}
    for layer, stage in sorted(stages):
        here = [c for c in own if slow.describe(c[0])[:2] == (layer, stage)]
        if layer >= 0 and stage in (1, 3):
            name = f"blocks.{layer}.hook_{'attn' if stage == 1 else 'mlp'}_out"
            seen = []
            reading = (name, lambda write, hook, seen=seen: seen.append(write.clone()) and None)
            with torch.no_grad():
                model.run_with_hooks(
                    TOKENS, fwd_hooks=[*slow.hooks([*held, *here], weights), reading]
                )
            total = total + seen[-1] - cache[name]
            continue
        before = [c for c in held if slow.describe(c[0])[:2] == (layer, stage) and layer >= 0]
        for site, positions, values in [*before, *here]:
            old = slow.value(site, cache, weights)
            row = torch.arange(len(positions))[:, None]
            difference = values - old[row, positions]
            total[row, positions] = difference + (total[row, positions] if layer < 0 else 0)
    last = cache[f"blocks.{zoo.N_LAYERS - 1}.hook_resid_post"]
    return slow.unembed(last + total, weights, toy.norm, toy.eps)


def changes_of(twin, sites, positions, new):
    index = twin.where(positions)
    row = torch.arange(len(index))[:, None]
    return [(site, index, new(site)[row, index]) for site in sites]


@pytest.mark.parametrize("name", FAMILIES)
@toys
def test_ablating_an_ablated_run_is_a_second_change_beside_the_first(toy, name):
    """Total and direct effects of every target, behind, before and beside what the run holds."""
    skip_without(toy, name)
    positions = (None, PER_ROW)[crc32(f"{toy} {name}".encode()) % 2]
    both = kinds(toy)
    twin = Slow(toy, ROWS)
    how, new = both["resample"]
    held = changes_of(twin, [name], positions, new)
    run = rp.ablated(rp.capture(toy.model, ROWS), name, how, positions=positions)
    base = custom(slow.forward(toy.model, TOKENS, held, twin.weights))
    sites = [site for site in targets(toy) if site != f"{name}.bias"]  # a part of what is held
    effect = rp.ablate(run, sites, rp.Zero(), metric=custom, positions=-3)
    assert_close(effect.baseline, base)
    for number, site in enumerate(sites):
        own = changes_of(twin, [site], -3, lambda site: torch.zeros_like(twin.value(site)))
        total = custom(slow.forward(toy.model, TOKENS, [*held, *own], twin.weights))
        assert_close(effect.patched[number], total)
        direct = custom(direct_logits(toy, held, own)) - base
        assert_close(effect.direct[number], direct)


# Against a model with hooks that stay on


def zero(value, hook):
    return torch.zeros_like(value)


def zero_head(slot):
    def change(value, hook):
        value = value.clone()
        value[:, :, slot] = 0
        return value

    return change


def zero_pattern(value, hook):
    value = value.clone()
    value[:, 2] = 0
    return value


HOOKS = {
    "attn.1": ("blocks.1.hook_attn_out", zero),
    "mlp.1": ("blocks.1.hook_mlp_out", zero),
    "pos_embed": ("hook_pos_embed", zero),
    "1.2": ("blocks.1.attn.hook_z", zero_head(2)),
    "2.3": ("blocks.2.attn.hook_z", zero_head(3)),
    "mlp.0.5": ("blocks.0.mlp.hook_post", zero_head(5)),
    "1.2.q": ("blocks.1.attn.hook_q", zero_head(2)),
    "1.0.k": ("blocks.1.attn.hook_k", zero_head(0)),
    "0.1.v": ("blocks.0.attn.hook_v", zero_head(1)),
    "1.2.pattern": ("blocks.1.attn.hook_pattern", zero_pattern),
}
HELD = (*([one] for one in HOOKS), ["0.1.v", "1.2", "mlp.1"], ["attn.1", "2.3", "mlp.0.5"])


@contextlib.contextmanager
def hooked(toy, sites):
    """The model with hooks that zero sites."""
    names = [HOOKS[site][0] for site in sites]
    for site in sites:
        toy.model.hook_dict[HOOKS[site][0]].add_hook(HOOKS[site][1])
    try:
        yield toy.model
    finally:
        for name in names:
            toy.model.hook_dict[name].remove_hooks("fwd")


def outcome(read, runs):
    """What an analysis gives, or the kind of error that refuses it."""
    try:
        return read(*runs)
    except ResidPatchingError as error:
        return type(error)


def analyses(toy):
    """Every analysis of a run, as tensors by name."""
    lens = zoo_lens.random_lens(toy.model)
    scalars = ("entropy", "kl", "cross_entropy", "prob", "rank")

    def read(readout):
        found = readout.measure(*scalars, top=3)
        return torch.cat([found[name].values.flatten() for name in (*scalars, "top_tokens")])

    def attributed(run, by):
        found = rp.direct_logit_attribution(run, ANSWER, FOIL, by=by, positions=None)
        return torch.cat([found.values, found.model_value[None]])

    def stream(run, how):
        report = rp.stream_report(run, how)
        return torch.stack([report.values, report.cosine, report.write_norm, report.stream_norm])

    return {
        "logits": lambda run, _: run.logits_at(None),
        "logit lens": lambda run, _: read(rp.logit_lens(run)),
        "tuned lens": lambda run, _: read(lens(run)),
        "component": lambda run, _: attributed(run, "component"),
        "head": lambda run, _: attributed(run, "head"),
        "neuron": lambda run, _: attributed(run, "neuron"),
        "parts": lambda run, _: rp.decompose(run, by="component").vectors(None),
        "stream": lambda run, _: stream(run, None),
        "scaled stream": lambda run, _: stream(run, rp.WriteScale(0.5)),
        "overwritten stream": lambda run, _: stream(run, rp.Overwrite()),
        "patterns": lambda run, _: rp.attention_patterns(run, ["0.1", "1.2", "2.3"]).values,
        "measure": lambda run, _: rp.measure(run, rp.loss()),
        "kl": lambda run, _: _effect(run, "0.0", rp.Zero(), rp.kl()),
        "zero": lambda run, _: _effect(run, ["0.0", "mlp.2", "resid_pre.1"], rp.Zero(), DIFF),
        "resample": lambda run, other: _effect(
            run, ["embed", "2.1", "2.1.q", "mlp.2.7"], rp.Resample(other), DIFF, positions=-2
        ),
        "mean": lambda run, other: _effect(
            run, ["0.2", "mlp.0"], rp.Mean(other, over=("batch",)), DIFF, joint=True
        ),
        "each": lambda run, _: _effect(run, ["0.2"], rp.Zero(), DIFF, positions="each"),
        "path": lambda run, other: _effect(run, ["0.0", "mlp.0"], to_logits(other), DIFF),
        "path behind": lambda run, other: _effect(run, ["2.0", "mlp.2"], to_logits(other), DIFF),
        "path to queries": lambda run, other: _effect(
            run,
            ["0.0", "mlp.0", "1.1"],
            rp.Path(
                to=rp.receivers("2.0.q", "mlp.2.in", "mlp.1.in", ["2.1.k", "2.3.q"]),
                using=rp.Resample(other),
                mlps="freeze",
            ),
            DIFF,
        ),
    }


def to_logits(other):
    return rp.Path(to="logits", using=rp.Resample(other), mlps="recompute")


def _effect(run, sites, how, metric, **options):
    effect = rp.ablate(run, sites, how, metric=metric, **options)
    return torch.stack([effect.patched, effect.direct, effect.total])


@pytest.mark.parametrize("name", HELD, ids="+".join)
@toys
def test_every_analysis_is_that_of_a_model_with_hooks(toy, name):
    if "pos_embed" in name and not toy.has_positions:
        pytest.skip("this model has no pos_embed")
    reads = analyses(toy)
    run, other = (rp.capture(toy.model, rows) for rows in (ROWS, OTHERS))
    base, ours = run.logits_at(-1), [rp.ablated(one, name, rp.Zero()) for one in (run, other)]
    found = {analysis: outcome(read, ours) for analysis, read in reads.items()}
    with hooked(toy, name) as model:
        twins = [rp.capture(model, rows) for rows in (ROWS, OTHERS)]
        expected = {analysis: outcome(read, twins) for analysis, read in reads.items()}
    for analysis in reads:
        if expected[analysis] in (HeadMismatchError, NeuronMismatchError):
            # With hooks the parts do not add up. A run knows what it replaces, and they do.
            assert set(name) & {"attn.1", "mlp.1"} and not isinstance(found[analysis], type)
        else:
            assert not isinstance(expected[analysis], type), analysis
            assert_close(found[analysis], expected[analysis])
    assert_close(run.logits_at(-1), base, 0)


# Going on: token by token what hooks on the model give


def slow_continuation(toy, prompt, n, hooks, choose=torch.argmax):
    """The plain loop: a whole pass with hooks for each token, hooks given by number of tokens."""
    tokens = torch.tensor([prompt])
    for _ in range(n):
        with torch.no_grad():
            logits = toy.model.run_with_hooks(
                tokens, return_type="logits", fwd_hooks=hooks(tokens.shape[1])
            )
        tokens = torch.cat([tokens, choose(logits[0, -1]).reshape(1, 1)], 1)
    return tokens[0, len(prompt) :]


def continuation_hooks(toy, held, row, n):
    """Hooks that make changes of one prompt: at its own positions, or n and all behind them."""

    def hooks(width):
        changes = []
        for site, positions, values in held:
            index, new = positions[row : row + 1], values[row : row + 1]
            if n:
                index = torch.arange(width)[None]
                new = new[:, :1].expand(1, width, *new.shape[2:])
            if site.endswith("pattern"):
                new = torch.nn.functional.pad(new, (0, width - new.shape[-1]))
            changes.append((site, index, new))
        return slow.hooks(changes, zoo.plain_weights(toy.model))

    return hooks


GOES_ON = [("zero", None), ("one mean", None)]
STAYS = [("zero", -2), ("one mean", PER_ROW), ("resample", None), ("mean", None), ("resample", -1)]
WRITTEN = ["embed", "pos_embed", "attn.1", "1.2", "mlp.1.5", "resid_pre.1", "resid_mid.1", "1.2.q"]


@pytest.mark.parametrize(("kind", "positions"), [*GOES_ON, *STAYS])
@pytest.mark.parametrize("name", [*WRITTEN, "1.2.pattern"])
@backends
def test_a_continuation_is_token_by_token_that_of_hooks(toy, name, kind, positions):
    if name.endswith("pattern") and kind == "one mean":
        pytest.skip("a pattern has no mean over positions")
    how, new = kinds(toy)[kind]
    held = changes_of(Slow(toy, ROWS), [name], positions, new)
    run = rp.ablated(rp.capture(toy.model, ROWS), name, how, positions=positions)
    found = run.generate(9)
    for row, prompt in enumerate(ROWS):
        hooks = continuation_hooks(toy, held, row, (kind, positions) in GOES_ON)
        assert found.tokens[row].tolist() == slow_continuation(toy, prompt, 9, hooks).tolist()


@backends
def test_a_plain_run_writes_on_and_prompts_of_any_length_write_as_they_do_alone(toy):
    found = rp.capture(toy.model, zoo.RAGGED).generate(5).tokens
    for row, prompt in enumerate(zoo.RAGGED):
        expected = slow_continuation(toy, prompt, 5, lambda width: [])
        assert found[row].tolist() == expected.tolist()
        assert rp.capture(toy.model, [prompt]).generate(5).tokens[0].tolist() == expected.tolist()


@backends
def test_a_continuation_is_drawn_with_a_seed_and_a_temperature(toy):
    generator = torch.Generator().manual_seed(7)

    def draw(logits):
        return torch.multinomial((logits / 0.5).softmax(-1), 1, generator=generator)

    hooks = [("blocks.1.hook_attn_out", zero)]
    run = rp.ablated(rp.capture(toy.model, ROWS), "attn.1", rp.Zero())
    expected = [slow_continuation(toy, row, 6, lambda width: hooks, draw) for row in ROWS]
    found = run.generate(6, seed=7, temperature=0.5)
    assert found.tokens.equal(torch.stack(expected))
    assert found.tokens.equal(run.generate(6, seed=7, temperature=0.5).tokens)
    assert not found.tokens.equal(run.generate(6, seed=8, temperature=0.5).tokens)
    assert not found.tokens.equal(run.generate(6, seed=7).tokens)


def test_what_cannot_be_written_is_refused():
    run = rp.capture(PLAIN.model, ROWS)
    with pytest.raises(ValueError, match="whole number from 1, got 0"):
        run.generate(0)
    with pytest.raises(ValueError, match="needs? a seed"):
        run.generate(1, temperature=0.5)
    with pytest.raises(ValueError, match="above 0, got 0"):
        run.generate(1, seed=0, temperature=0.0)
    with pytest.raises(PromptError, match="up to 65 tokens, but .* at most 64"):
        run.generate(zoo.N_CTX - 5)


def test_a_continuation_shows_its_text_and_its_intervention():
    model = rp.load("demo")
    run = rp.capture(model, "When Mary and John went to the store, John gave a drink to")
    assert run.generate(1).texts == (" Mary",)
    assert str(run.generate(1)) == " Mary"
    assert repr(run.generate(1)) == "Continuation(' Mary')"
    without = rp.ablated(run, "2.3", rp.Zero()).generate(1)
    assert "under zero ablation of 2.3 at all positions" in repr(without)


# What an ablated run is


@pytest.mark.full
@pytest.mark.parametrize("name", [*zoo.EXACT, "bloom", "gemma2"])
def test_the_metric_of_an_ablated_run_is_what_ablation_gives_for_every_architecture(name):
    run, other = (rp.capture(zoo.named(name), rows) for rows in (ROWS, OTHERS))
    sites = ["embed", "attn.1", "mlp.1", "0.1", "resid_pre.1", "resid_post.2"]
    sites += ["pos_embed"] if run.view.has_pos_embed else []
    for how in (rp.Zero(), rp.Resample(other)):
        for site in sites:
            patched = rp.ablate(run, site, how, metric=DIFF).patched[0]
            assert_close(rp.measure(rp.ablated(run, site, how), DIFF), patched)


@toys
def test_ablating_an_ablated_run_gives_the_interaction_of_a_pair(toy):
    run = rp.capture(toy.model, ROWS)
    first, second = "0.1", "mlp.1"
    alone = rp.ablate(run, [first, second], rp.Zero(), metric=DIFF).total
    both = rp.ablate(run, [first, second], rp.Zero(), metric=DIFF, joint=True).total[0]
    behind = rp.ablate(rp.ablated(run, first, rp.Zero()), second, rp.Zero(), metric=DIFF)
    before = rp.ablate(rp.ablated(run, second, rp.Zero()), first, rp.Zero(), metric=DIFF)
    interaction = both - alone.sum(0)
    assert largest(interaction) > 1e-3
    assert_close(behind.total[0] - alone[1], interaction)
    assert_close(before.total[0] - alone[0], interaction)


@toys
def test_an_ablated_run_of_an_ablated_run_carries_both(toy):
    run, other = (rp.capture(toy.model, rows) for rows in (ROWS, OTHERS))
    one_by_one = rp.ablated(rp.ablated(run, "0.1", rp.Zero()), "mlp.1", rp.Zero())
    assert_close(
        one_by_one.logits_at(None), rp.ablated(run, ["0.1", "mlp.1"], rp.Zero()).logits_at(None)
    )
    again = rp.ablated(rp.ablated(run, "mlp.1", rp.Zero()), "mlp.1", rp.Resample(other))
    assert_close(again.logits_at(), rp.ablated(run, "mlp.1", rp.Resample(other)).logits_at(), 0)
    assert str(one_by_one.intervention) == (
        "zero ablation of 0.1 at all positions and zero ablation of mlp.1 at all positions"
    )


@toys
def test_what_a_run_has_replaced_already_has_no_effect_to_the_last_bit(toy):
    run = rp.capture(toy.model, ROWS)
    parts = ["0.1", "0.2.z", "0.3.q", "attn.0.bias", "mlp.0.5", "mlp.0.bias"]
    held = rp.ablated(run, ["attn.0", "mlp.0"], rp.Zero())
    effect = rp.ablate(held, [*parts, "attn.0", "mlp.0"], rp.Zero(), metric=DIFF)
    assert largest(effect.total) == largest(effect.direct) == 0
    start = rp.ablated(run, "resid_pre.0", rp.Resample(run))
    assert largest(rp.ablate(start, "embed", rp.Zero(), metric=DIFF).total) == 0


@toys
def test_an_intervention_that_changes_nothing_gives_the_base_to_the_last_bit(toy):
    run = rp.capture(toy.model, ROWS)
    sites = ["attn.1", "mlp.0", "0.1", "mlp.2.5", "1.2.q", "resid_pre.2", "1.3.pattern"]
    for site in sites:
        same = rp.ablated(run, site, rp.Resample(run))
        assert same.logits_at(None).equal(run.logits_at(None))
        assert rp.measure(same, DIFF).equal(rp.measure(run, DIFF))
        kl, own_kl = (rp.logit_lens(one).kl.values for one in (same, run))
        assert_close(kl, own_kl, 0)
        assert same.generate(4).tokens.equal(run.generate(4).tokens)
        # What comes behind; an earlier change would meet the value that is held.
        both = [rp.ablate(r, "mlp.2", rp.Zero(), metric=DIFF).total for r in (same, run)]
        assert_close(*both, 1e-12)


@pytest.mark.parametrize("mlps", ["freeze", "recompute"])
@toys
def test_a_path_ends_where_the_run_sets_what_it_passes(toy, mlps):
    """A state in between, the MLP that is the receiver, or a query: nothing arrives."""
    run, source = (rp.capture(toy.model, rows) for rows in (ROWS, OTHERS))
    passes = {"resid_pre.2": "2.1.q", "mlp.1": "mlp.1.in", "2.1.q": "2.1.q"}
    for held, receiver in passes.items():
        path = rp.Path(to=receiver, using=rp.Resample(source), mlps=mlps)
        plain = rp.ablate(run, ["embed", "0.1"], path, metric=DIFF)
        assert largest(plain.total) > 1e-4
        one = rp.ablated(run, held, rp.Resample(source))
        effect = rp.ablate(one, ["embed", "0.1"], path, metric=DIFF)
        assert largest(effect.total) < 1e-12 and largest(effect.direct) < 1e-12


@backends
def test_prompts_of_unequal_length_are_ablated_as_they_are_alone(toy):
    run = rp.capture(toy.model, zoo.RAGGED)
    held = rp.ablated(run, ["1.2", "mlp.0", "resid_pre.2"], rp.Zero(), positions=-2)
    logits, effect = held.logits_at(), rp.ablate(held, ["0.0", "2.1"], rp.Zero(), metric=DIFF)
    for row, prompt in enumerate(zoo.RAGGED):
        alone = rp.capture(toy.model, [prompt])
        alone = rp.ablated(alone, ["1.2", "mlp.0", "resid_pre.2"], rp.Zero(), positions=-2)
        assert_close(logits[row], alone.logits_at()[0])
        expected = rp.ablate(alone, ["0.0", "2.1"], rp.Zero(), metric=DIFF)
        assert_close(effect.total[:, row], expected.total[:, 0])
        assert_close(effect.direct[:, row], expected.direct[:, 0])


@pytest.mark.parametrize("routes", [("plain", "replay", "full"), ("replay", "full"), ("full",)])
@toys
def test_every_route_runs_an_ablated_run(toy, routes):
    """Behind what the run holds also by our own blocks."""
    run = rp.ablated(rp.capture(toy.model, ROWS), ["0.2", "resid_pre.1"], rp.Zero(), positions=-3)
    sites = ["embed", "0.0", "resid_pre.1", "1.0", "1.1.q", "mlp.1.4", "attn.2", "resid_post.2"]
    expected = rp.ablate(run, sites, rp.Zero(), metric=DIFF, routes=("full",))
    effect = rp.ablate(run, sites, rp.Zero(), metric=DIFF, routes=routes)
    assert_close(effect.total, expected.total)
    assert_close(effect.direct, expected.direct)
    assert set(effect.routes) <= set(routes)
    # Behind the last of what is held it is the fastest one, elsewhere the model's own blocks.
    assert effect.routes[0] == (toy.route if routes[0] == "plain" else routes[0])


@backends
def test_the_model_comes_back_as_it_was(toy):
    before = zoo.snapshot(toy.model)
    run = rp.ablated(rp.capture(toy.model, ROWS), ["1.2", "mlp.0", "embed"], rp.Zero())
    run.generate(2)
    rp.direct_logit_attribution(run, ANSWER, FOIL)
    rp.ablate(run, ["0.0", "attn.2"], rp.Zero(), metric=DIFF)
    assert list(zoo.differences(before, zoo.snapshot(toy.model))) == []


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_a_changed_model_is_refused(backend):
    model = zoo.fresh(backend)
    run = rp.capture(model, ROWS)
    held = rp.ablated(run, "attn.1", rp.Zero())
    held.logits_at()
    model.hook_dict["blocks.0.hook_mlp_out"].add_hook(zero)
    calls = (
        held.logits_at,
        lambda: held.generate(1),
        lambda: rp.measure(held, DIFF),
        lambda: rp.direct_logit_attribution(held, ANSWER, FOIL),
        lambda: rp.logit_lens(held).kl,
        lambda: rp.ablated(run, "attn.1", rp.Zero()),
    )
    for call in calls:
        with pytest.raises(ModelChangedError, match="capture again|Capture again"):
            call()


@backends
def test_a_cache_of_the_base_is_not_read(toy):
    _, cache = toy.model.run_with_cache(TOKENS)
    held = rp.ablated(rp.capture(toy.model, TOKENS, cache=cache), "attn.1", rp.Zero())
    plain = rp.ablated(rp.capture(toy.model, TOKENS), "attn.1", rp.Zero())
    for run in (held, plain):
        run.fetch_all([rp.parse("mlp.2")])
    assert held.cache is None
    assert held.fetched(rp.parse("mlp.2")).equal(plain.fetched(rp.parse("mlp.2")))


def test_a_sweep_of_a_plain_run_is_not_continued_on_an_ablated_one(tmp_path):
    run = rp.capture(PLAIN.model, ROWS)
    source = rp.capture(PLAIN.model, OTHERS)

    def sweep(run, source):
        how = rp.Resample(source)
        rp.ablate(run, ["0.0", "0.1"], how, metric=DIFF, rows=tmp_path / "rows.jsonl")

    sweep(run, source)
    sweep(run, source)
    others = [
        (rp.ablated(run, "attn.1", rp.Zero()), source),
        (run, rp.ablated(source, "attn.1", rp.Zero())),
    ]
    for one in others:
        with pytest.raises(SweepMismatchError):
            sweep(*one)
    # The same words, other positions.
    held = [rp.ablated(run, "mlp.1", rp.Zero(), positions=[0, 1, n]) for n in (2, 3)]
    assert str(held[0].intervention) == str(held[1].intervention)
    rows = tmp_path / "ablated.jsonl"
    for one in (held[0], held[0]):
        rp.ablate(one, "0.0", rp.Zero(), metric=DIFF, rows=rows)
    with pytest.raises(SweepMismatchError, match="interventions"):
        rp.ablate(held[1], "0.0", rp.Zero(), metric=DIFF, rows=rows)


# What it says


def heading(figure):
    return " ".join(figure.layout.meta["heading"])


def test_results_texts_and_pictures_name_the_intervention():
    plots = pytest.importorskip("resid_patching.plots")
    pytest.importorskip("plotly")
    model = rp.load("demo")
    run = rp.capture(model, "When Mary and John went to the store, John gave a drink to")
    held = rp.ablated(run, ["attn.1", "mlp.2"], rp.Zero(), positions=-1)
    text = "zero ablation of attn.1, mlp.2 at position -1"
    assert text in repr(held)
    attribution = rp.direct_logit_attribution(held, " Mary", " John", by="head")
    everywhere = rp.direct_logit_attribution(held, " Mary", " John", positions=None)
    lens, effect = (
        rp.logit_lens(held),
        rp.ablate(held, rp.heads(model), rp.Zero(), metric=rp.logit_diff(" Mary", " John")),
    )
    each = rp.ablate(held, "0.0", rp.Zero(), metric=rp.loss(), positions="each")
    path = rp.Path(to=rp.receivers("3.0.q", "3.1.q"), using=rp.Zero(), mlps="freeze")
    paths = rp.ablate(held, ["0.0", "0.1"], path, metric=rp.logit_diff(" Mary", " John"))
    results = [attribution, everywhere, lens.kl, lens.top_tokens(2), effect, each, paths]
    results += [rp.stream_report(held), rp.attention_patterns(held, ["0.1"])]
    for result in results:
        assert result.provenance.intervention == text
        assert result.provenance.plan.endswith(f", under {text}")
        assert text in result.summary()
        assert text in heading(plots.show(result))
        assert type(result).from_json(result.to_json()).provenance == result.provenance
    assert text in lens.summary()
    figures = [
        plots.show(lens),
        plots.lens_by_layer(lens),
        plots.effect_bars(effect),
        plots.path_diagram(paths),
        plots.attribution_bars(attribution),
        plots.accumulated(attribution),
        plots.heatmap(effect),
    ]
    for figure in figures:
        assert text in heading(figure)
    assert rp.direct_logit_attribution(run, " Mary", " John").provenance.intervention == ""
    mean = rp.Mean(held, over=("batch", "pos"))
    assert f"under {text}" in str(mean)


def test_attributions_of_an_ablated_and_a_plain_run_are_compared():
    run = rp.capture(PLAIN.model, ROWS)
    held = rp.ablated(run, "attn.0", rp.Zero())
    one, two = (rp.direct_logit_attribution(r, ANSWER, FOIL) for r in (held, run))
    compared = rp.compare(one, two)
    total = rp.ablate(run, "attn.0", rp.Zero(), metric=DIFF).total[0]
    assert_close(compared.values.sum((0, 2)), total)
    assert "under zero ablation of attn.0" in compared.plans[0]


def test_what_a_run_cannot_carry_is_refused_in_one_line():
    run = rp.capture(PLAIN.model, ROWS)
    refusals = [
        (AblationError, "replace attn.1, the write", "attn.1.bias", rp.Zero(), {}),
        (AblationError, "needs a target", [], rp.Zero(), {}),
        (AddressError, "9.9", "9.9", rp.Zero(), {}),
        (AddressError, "attn.1", ["attn.1", "1.2"], rp.Zero(), {}),
        (PositionError, "position 9", "0.1", rp.Zero(), {"positions": 9}),
    ]
    for error, match, site, how, options in refusals:
        with pytest.raises(error, match=match) as raised:
            rp.ablated(run, site, how, **options)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("positions", [None, -2])
@toys
def test_parts_of_a_layer_that_is_replaced_whole_write_nothing(toy, positions):
    """What is in the layer's place is in the row of its bias, so that rows add up."""
    run, other = (rp.capture(toy.model, rows) for rows in (ROWS, OTHERS))
    held = rp.ablated(run, ["attn.1", "mlp.1"], rp.Resample(other), positions=positions)
    whole = rp.direct_logit_attribution(held, ANSWER, FOIL, positions=None)
    where = slice(None) if positions is None else positions
    for by, layer, part, bias in (
        ("head", "attn.1", "1.2", "attn.1.bias"),
        ("neuron", "mlp.1", "mlp.1.5", "mlp.1.bias"),
    ):
        found = rp.direct_logit_attribution(held, ANSWER, FOIL, by=by, positions=None)
        assert largest(found.sel(component=part)[:, where]) == 0
        one, two = found.sel(component=bias)[:, where], whole.sel(component=layer)[:, where]
        assert_close(one, two)
        assert largest(found.gap) < 1e-10
        vectors, parts = rp.decompose(held, by=by).vectors(None), rp.decompose(held, by=by).writers
        place = parts.index(rp.parse(bias))
        mine = rp.decompose(held, by="component")
        expected = mine.vectors(None)[mine.writers.index(rp.parse(layer))]
        assert_close(vectors[place][:, where], expected[:, where])


@backends
def test_a_run_that_sets_the_stream_has_no_sum_of_writes(toy):
    held = rp.ablated(rp.capture(toy.model, ROWS), "resid_mid.1", rp.Zero(), positions=-1)
    calls = (
        lambda: rp.direct_logit_attribution(held, ANSWER, FOIL),
        lambda: rp.decompose(held, by="head"),
        lambda: rp.stream_report(held),
    )
    for call in calls:
        with pytest.raises(StreamMismatchError, match=r"this run sets resid_mid\.1"):
            call()
    assert rp.logit_lens(held).kl.values.isfinite().any()


# The command, and a real model


def command(capsys, *argv):
    code = main(["ablate", *argv, "--model", "demo", "--metric", "loss"])
    return code, *capsys.readouterr()


def test_the_command_writes_on_as_it_is_and_with_each_target_replaced(capsys):
    prompts = ["When Mary and John went to the store, John gave a drink to", "When Mary and John"]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    run = rp.capture(rp.load("demo"), prompts)
    without = {site: rp.ablated(run, site, rp.Zero()) for site in ("2.3", "resid_pre.2")}
    code, out, _ = command(capsys, "zero", *without, *given, "--continue", "5")
    assert code == 0
    for one in (run, *without.values()):
        for text in one.generate(5).texts:
            assert f'"{text}"' in out
    assert "zero 2.3" in out and "zero resid_pre.2" in out
    code, out, _ = command(capsys, "zero", *without, *given, "--continue", "5", "--joint")
    together = rp.ablated(run, list(without), rp.Zero()).generate(5)
    assert code == 0 and "zero 2.3 + resid_pre.2" in out
    assert all(f'"{text}"' in out for text in together.texts)
    assert "it says" not in command(capsys, "zero", *without, *given)[1]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--sweep", "heads"], "--sweep"),
        (["--positions", "each"], "--positions each"),
    ],
)
def test_the_command_writes_on_for_named_targets_alone(capsys, flags, named):
    code, _, err = command(
        capsys, "zero", "2.3", "--prompt", "When Mary", "--continue", "5", *flags
    )
    assert code == 2 and f"{named} does not go with --continue" in err


@pytest.mark.real
def test_without_a_layer_a_model_writes_on_and_with_its_stream_cut_it_repeats(smollm2_dir):
    model = rp.load(smollm2_dir, backend=zoo.BACKENDS[0])
    run = rp.capture(
        model, "The Amazon is the largest rainforest in the world. It covers more than"
    )
    texts, losses = {}, {}
    for site in ("attn.6", "resid_pre.6"):
        one = rp.ablated(run, site, rp.Zero())
        texts[site], losses[site] = one.generate(12).tokens[0], rp.measure(one, rp.loss())
    assert len(texts["attn.6"].unique()) > 8 and len(texts["resid_pre.6"].unique()) == 1
    base = rp.measure(run, rp.loss())
    assert (losses["attn.6"] - base).abs() < 0.5 and losses["resid_pre.6"] - base > 5
