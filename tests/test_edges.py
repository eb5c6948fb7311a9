"""Edges as targets: one by one and together, against hooks and whole forward passes."""

import random

import pytest
import torch
import zoo
from zoo_ablation import (
    ANSWER,
    FOIL,
    KINDS_OF_BACKEND,
    METRICS,
    OTHERS,
    PLAIN,
    RAGGED_OTHERS,
    ROWS,
    TOYS,
)
from zoo_paths import receivers, runs, twins

import resid_patching as rp
from resid_patching.address import Input
from resid_patching.errors import AblationError, AddressError, CausalityError
from resid_patching.paths.receivers import read_at_stage

DIFF = rp.logit_diff(ANSWER, FOIL)
EVERY = ("plain", "replay", "full")
toys = pytest.mark.parametrize("toy", TOYS, ids=str)
backends = pytest.mark.parametrize("toy", KINDS_OF_BACKEND, ids=str)


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def joint(run, edges, how, **options):
    return rp.ablate(run, edges, how, metric=DIFF, joint=True, **options)


def family(toy):
    """Edges from every family of senders into every family of receivers."""
    starts = ["input", "0.1", "1.2", "mlp.0", "mlp.1", "attn.0", "embed", "mlp.1.9", "attn.1.bias"]
    slow = twins(toy)[0]
    return [
        f"{start}->{end}"
        for end in receivers(toy)
        for start in starts
        if slow.reaches([start], [end])
    ]


@pytest.mark.parametrize("positions", [None, -1, [0, 3, -1]], ids=str)
@pytest.mark.parametrize("kind", ["zero", "resample"])
@toys
def test_an_edge_is_what_hooks_and_whole_passes_give(toy, kind, positions):
    base, source = runs(toy)
    slow, other = twins(toy)
    edges = family(toy)
    how = rp.Zero() if kind == "zero" else rp.Resample(source)

    def new(sender):
        return torch.zeros_like(slow.value(sender)) if kind == "zero" else other.value(sender)

    effect = rp.ablate(base, edges, how, metric=DIFF, positions=positions)
    assert effect.targets == tuple(edges)
    for number in random.Random(str(toy)).sample(range(len(edges)), 12):
        sender, receiver = edges[number].split("->")
        args = ([sender], [receiver], new, positions, "freeze", "logit_diff")
        expected = slow.effect(*args)
        assert_close(torch.stack([effect.total[number], effect.direct[number]]), expected)


@pytest.mark.parametrize("metric", ["prob", "kl", "loss"])
@backends
def test_edges_of_any_metric_are_paths_with_the_rest_frozen(toy, metric):
    base, source = runs(toy)
    edges = family(toy)[::5]
    effect = rp.ablate(base, edges, rp.Resample(source), metric=METRICS[metric])
    for number, edge in enumerate(edges):
        sender, receiver = edge.split("->")
        path = rp.Path(to=receiver, using=rp.Resample(source), mlps="freeze")
        alone = rp.ablate(base, sender, path, metric=METRICS[metric])
        assert_close(effect.total[number], alone.total[0])
        assert_close(effect.direct[number], alone.direct[0])


@toys
def test_every_route_gives_edges_the_same_numbers(toy):
    base, source = runs(toy)
    edges = family(toy)[::4]
    expected = rp.ablate(base, edges, rp.Resample(source), metric=DIFF, routes=("full",))
    assert expected.routes == ("full",)
    effect = rp.ablate(base, edges, rp.Resample(source), metric=DIFF)
    assert_close(effect.total, expected.total)
    assert_close(effect.direct, expected.direct)


@backends
def test_edges_of_long_and_short_prompts(toy):
    """Each prompt is as if it were alone."""
    base = rp.capture(toy.model, zoo.RAGGED)
    how = rp.Resample(rp.capture(toy.model, RAGGED_OTHERS), pairing="shuffle", seed=1)
    edges = family(toy)[::3]
    parts = ("attn", "embed", "mlp.1.9")  # beside the wholes and parts that they overlap
    some = [edge for edge in edges if "->resid" not in edge and not edge.startswith(parts)]
    together = rp.ablate(base, edges, rp.Zero(), metric=DIFF)
    at_once = joint(base, some, rp.Zero())
    for number, row in enumerate(zoo.RAGGED):
        alone = rp.capture(toy.model, [row])
        one = rp.ablate(alone, edges, rp.Zero(), metric=DIFF)
        assert_close(together.total[:, number], one.total[:, 0])
        assert_close(at_once.total[:, number], joint(alone, some, rp.Zero()).total[:, 0])
    assert bool(rp.ablate(base, edges, how, metric=DIFF).total.isfinite().all())


# Together


PLAIN_TOYS = [toy for toy in TOYS if toy.route == "plain"]
plain_toys = pytest.mark.parametrize("toy", PLAIN_TOYS, ids=str)


@plain_toys
def test_all_edges_give_the_source_and_none_the_base(toy):
    base, source = runs(toy)
    edges = rp.edges(base)
    effect = joint(base, edges, rp.Resample(source))
    assert_close(effect.patched[0], rp.measure(source, DIFF))
    assert bool(effect.direct.isnan().all())
    assert torch.equal(joint(base, edges, rp.Resample(base)).patched[0], effect.baseline)


@plain_toys
def test_one_edge_together_is_that_edge_alone(toy):
    base, source = runs(toy)
    for edge in [edge for edge in family(toy) if "->resid" not in edge][::7]:
        alone = rp.ablate(base, edge, rp.Resample(source), metric=DIFF)
        assert_close(joint(base, [edge], rp.Resample(source)).total, alone.total)


@plain_toys
def test_all_edges_of_a_sender_are_the_sender(toy):
    base, source = runs(toy)
    for sender in ("input", "0.1", "mlp.0", "1.3", "mlp.2"):
        effect = joint(base, rp.edges(base, senders=[sender]), rp.Resample(source))
        whole = rp.ablate(base, sender, rp.Resample(source), metric=DIFF)
        assert_close(effect.total, whole.total)


@plain_toys
def test_all_edges_into_a_receiver_are_the_receiver(toy):
    base, source = runs(toy)
    for receiver in ("1.0.q", "2.0.k", "2.0.v"):
        effect = joint(base, rp.edges(base, receivers=[receiver]), rp.Resample(source))
        whole = rp.ablate(base, receiver, rp.Resample(source), metric=DIFF)
        assert_close(effect.total, whole.total)
    into = joint(base, rp.edges(base, receivers=["mlp.1.in"]), rp.Resample(source))
    assert_close(into.total, rp.ablate(base, "mlp.1", rp.Resample(source), metric=DIFF).total)


def by_hand(model, base, source, edges):
    """The last logits with edges resampled, head by head, in the plainest way."""
    heard = {}
    for edge in edges:
        heard.setdefault(str(edge.receiver), []).append(str(edge.sender))
    _, theirs = model.run_with_cache(base if source is None else source)
    _, clean = model.run_with_cache(base)
    ours = {"input": clean["blocks.0.hook_resid_pre"]}
    new = {"input": theirs["blocks.0.hook_resid_pre"]}
    stream = clean["blocks.0.hook_resid_pre"]

    def hears(receiver):
        return stream + sum((new[s] - ours[s] for s in heard.get(receiver, [])), 0 * stream)

    for layer, block in enumerate(model.blocks):
        attn, writes = block.attn, []
        for head in range(model.cfg.n_heads):
            parts = []
            for which in "qkv":
                weight, bias = (getattr(attn, f"{x}_{which.upper()}")[head] for x in "Wb")
                parts.append(block.ln1(hears(f"{layer}.{head}.{which}")) @ weight + bias)
            q, k, v = parts
            scores = q @ k.transpose(1, 2) / model.cfg.d_head**0.5
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            z = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
            writes.append(z @ attn.W_O[head])
            new[f"{layer}.{head}"] = (
                theirs[f"blocks.{layer}.attn.hook_z"][:, :, head] @ attn.W_O[head]
            )
        after = stream + sum(writes) + attn.b_O
        ours |= {f"{layer}.{head}": write for head, write in enumerate(writes)}
        stream = after
        ours[f"mlp.{layer}"] = block.mlp(block.ln2(hears(f"mlp.{layer}.in")))
        new[f"mlp.{layer}"] = theirs[f"blocks.{layer}.hook_mlp_out"]
        stream = stream + ours[f"mlp.{layer}"]
    return model.unembed(model.ln_final(hears("logits")))


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="the plain way is written for HookedTransformer")
@pytest.mark.parametrize("seed", range(4))
def test_any_set_of_edges_is_what_the_plain_way_gives(seed):
    base, source = runs(PLAIN)
    edges = random.Random(seed).sample(rp.edges(base), [3, 40, 130, 250][seed])
    with torch.no_grad():
        logits = by_hand(PLAIN.model, torch.tensor(ROWS), torch.tensor(OTHERS), edges)[:, -1]
    effect = joint(base, edges, rp.Resample(source))
    assert_close(effect.patched[0], logits[:, ANSWER] - logits[:, FOIL])


@toys
def test_together_where_our_blocks_are_not_the_models_is_refused(toy):
    base, source = runs(toy)
    edges = rp.edges(base)[:5]
    if toy.route == "plain":
        assert joint(base, edges, rp.Resample(source)).routes == ("plain",)
        return
    with pytest.raises(rp.errors.UnsupportedModelError, match="one at a time"):
        joint(base, edges, rp.Resample(source))


# Lists of edges, and what is refused


@toys
def test_every_edge_once_and_none_back_in_time(toy):
    base, _ = runs(toy)
    edges, view = rp.edges(base), base.view
    assert len(set(edges)) == len(edges)
    ends = {edge.receiver for edge in edges}
    n_inputs = (zoo.N_HEADS + 2 * toy.n_kv_heads + 1) * view.n_layers + 1
    assert len(ends) == n_inputs
    per_layer = zoo.N_HEADS + 1
    before = [1 + per_layer * layer for layer in range(view.n_layers)]
    into_heads = sum(before) * (zoo.N_HEADS + 2 * toy.n_kv_heads)
    into_mlps = sum(n + (0 if toy.parallel else zoo.N_HEADS) for n in before)
    assert len(edges) == into_heads + into_mlps + 1 + per_layer * view.n_layers
    assert edges[0].sender == Input()
    depths = [read_at_stage(view, edge.receiver) for edge in edges]
    assert depths == sorted(depths)
    assert [str(e) for e in rp.edges(base, senders=["0.1"], receivers=["2.0.q"])] == ["0.1->2.0.q"]


def test_all_edges_of_gpt2_small():
    n_layers, n_heads = 12, 12
    before = [1 + (n_heads + 1) * layer for layer in range(n_layers)]
    whole = sum(3 * n_heads * n + n + n_heads for n in before) + 1 + n_layers * (n_heads + 1)
    assert whole == 32_491


@backends
def test_edges_can_be_kept_in_rows_and_taken_up_again(toy, tmp_path):
    base, source = runs(toy)
    edges, file = family(toy)[::3], tmp_path / "rows.jsonl"
    how = rp.Resample(source)
    whole = rp.ablate(base, edges, how, metric=DIFF)
    kept = rp.ablate(base, edges, how, metric=DIFF, rows=file)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) >= len(edges)
    file.write_bytes(b"".join(lines[: len(lines) // 2]))
    again = rp.ablate(base, edges, how, metric=DIFF, rows=file)
    for found in (kept, again):
        assert torch.equal(found.total, whole.total) and torch.equal(found.direct, whole.direct)
    with pytest.raises(rp.errors.SweepMismatchError):
        rp.ablate(base, edges[1:], how, metric=DIFF, rows=file)


@pytest.mark.parametrize(
    ("targets", "options", "error", "says"),
    [
        (["1.0->0.1.q"], {}, CausalityError, "back in time"),
        (["1.0->9.1.q"], {}, AddressError, "layers 0 to 2"),
        (["0.9->1.1.q"], {}, AddressError, "heads 0 to 3"),
        (["0.1->2"], {}, AddressError, "no address"),
        (["0.1->1.1"], {}, AddressError, "receiver"),
        (["1.1.q->2.1.q"], {}, AddressError, "sender"),
        (["0.1->1.1.q", "1.2"], {}, AddressError, "edges in one call"),
        (["0.1->1.1.q", "0.1->1.1.q"], {}, AddressError, "twice"),
        (["0.1->1.1.q"], {"positions": "each"}, AblationError, "set of positions at a time"),
        (["0.1->resid_pre.2", "0.1->2.0.q"], {"joint": True}, AddressError, "all later receivers"),
        (["0.1->1.1.q"], {"joint": True, "rows": "rows.jsonl"}, AblationError, "one row"),
        (["attn.0->2.0.q", "0.1->2.0.q"], {"joint": True}, AddressError, r"0\.1 is a part of attn"),
        (["input->1.0.q", "embed->1.0.q"], {"joint": True}, AddressError, "part of input"),
    ],
    ids=str,
)
def test_what_is_no_edge_is_refused(targets, options, error, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, _ = runs(PLAIN)
    with pytest.raises(error, match=says):
        rp.ablate(base, targets, rp.Zero(), metric=DIFF, **options)
    assert not list(tmp_path.iterdir())


def test_an_edge_takes_no_path():
    base, _ = runs(PLAIN)
    path = rp.Path(to="logits", using=rp.Zero(), mlps="freeze")
    with pytest.raises(AblationError, match="takes no Path"):
        rp.ablate(base, "0.1->1.1.q", path, metric=DIFF)


def test_the_result_speaks_of_edges():
    base, source = runs(PLAIN)
    effect = rp.ablate(base, ["0.1->1.1.q", "mlp.0->logits"], rp.Resample(source), metric=DIFF)
    text = effect.summary()
    assert "edge" in text and "along each edge" in text and "0.1->1.1.q" in text
    again = rp.Effect.from_json(effect.to_json())
    assert again.targets == effect.targets and again.is_path
    together = rp.ablate(
        base, ["0.1->1.1.q", "mlp.0->logits"], rp.Resample(source), metric=DIFF, joint=True
    )
    assert "(edges together)" in together.summary() and "direct" not in together.headings()


def test_a_layer_and_its_head_may_go_to_different_receivers():
    base, source = runs(PLAIN)
    edges = ["attn.0->2.0.q", "0.1->2.1.q"]
    apart = rp.ablate(base, edges, rp.Resample(source), metric=DIFF)
    both = joint(base, edges, rp.Resample(source))
    assert bool(both.total.isfinite().all()) and not torch.equal(both.total, apart.total[:1])
