"""Runs: what is fetched, in chunks or from a cache that the caller already had."""

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.errors import (
    AddressError,
    CacheMismatchError,
    HookNotFiredError,
    ModelChangedError,
    PromptError,
)

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
ADDRESSES = [
    "embed",
    "pos_embed",
    "resid_pre.0",
    "resid_mid.1",
    "resid_post.2",
    "attn.1",
    "mlp.2",
    "1.2",
    "mlp.1.5",
    "1.2.q",
]
HOOKS = {
    "embed": "hook_embed",
    "pos_embed": "hook_pos_embed",
    "attn.1": "blocks.1.hook_attn_out",
    "mlp.2": "blocks.2.hook_mlp_out",
    "1.2": "blocks.1.attn.hook_z",
    "mlp.1.5": "blocks.1.mlp.hook_post",
    "1.2.q": "blocks.1.attn.hook_q",
}


def hook_of(text):
    place, _, layer = text.partition(".")
    return HOOKS.get(text) or f"blocks.{layer}.hook_{place}"


def toy(backend):
    """LayerNorm, sequential, learned positions, without a tokenizer."""
    return zoo.build("hooked") if backend == "hooked" else zoo.named("gpt2_untied")


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


# Fetching


@pytest.mark.parametrize("max_bytes", [1, 2**30], ids=["row by row", "at once"])
@pytest.mark.parametrize("text", ADDRESSES)
@backends
def test_what_is_fetched_is_what_each_prompt_gives_alone(backend, text, max_bytes):
    model = toy(backend)
    found = rp.capture(model, zoo.RAGGED, max_bytes=max_bytes).fetch(rp.parse(text))
    assert found.shape[:2] == (3, 8)
    for row, tokens in enumerate(zoo.RAGGED):
        alone = zoo.plain_cache(model, tokens)[hook_of(text)][0]
        assert_close(found[row, : len(tokens)], alone, 1e-12)
        assert not found[row, len(tokens) :].any()


@pytest.mark.parametrize("max_bytes", [1, 2**30], ids=["row by row", "at once"])
@backends
def test_patterns_are_fetched_as_each_prompt_gives_them_alone(backend, max_bytes):
    model = toy(backend)
    run = rp.capture(model, zoo.RAGGED, max_bytes=max_bytes)
    found = run.fetch(rp.parse("1.2.pattern"))
    for row, tokens in enumerate(zoo.RAGGED):
        alone = zoo.plain_cache(model, tokens)["blocks.1.attn.hook_pattern"][0]
        size = len(tokens)
        assert_close(found[row, :, :size, :size], alone, 1e-12)
        assert not found[row, :, size:].any() and not found[row, :, :, size:].any()


@backends
def test_what_was_fetched_is_not_run_for_again(backend):
    model = toy(backend)
    run = rp.capture(model, zoo.RAGGED)
    first = run.fetch(rp.parse("attn.1"))
    passes = []
    count = zoo.watching(lambda tensor, hook: passes.append(1))
    model.hook_dict["hook_embed"].add_hook(count)
    try:
        assert run.fetch(rp.parse("attn.1")) is first
        assert passes == []
        run.fetch_all([rp.parse("mlp.0"), rp.parse("mlp.1"), rp.parse("attn.1")])
        run.fetch(rp.parse("mlp.1"))
        assert passes == [1]
    finally:
        model.reset_hooks()


@backends
def test_a_chunk_holds_no_more_than_it_may(backend):
    model = toy(backend)
    sizes = []
    run = rp.capture(model, zoo.RAGGED * 4, max_bytes=200_000)
    measure = zoo.watching(lambda tensor, hook: sizes.append(tensor.shape[:2]))
    model.hook_dict["hook_embed"].add_hook(measure)
    try:
        run.fetch(rp.parse("attn.1"))
    finally:
        model.reset_hooks()
    assert sum(rows for rows, _ in sizes) == 12 and 1 < len(sizes) < 12
    per_token = 8 * (zoo.D_VOCAB + 16 * zoo.D_MODEL)
    assert all(rows == 1 or rows * width * per_token <= 200_000 for rows, width in sizes)


@pytest.mark.parametrize("positions", [-1, 1, [0, 2, 4], None])
@backends
def test_logits_are_those_of_the_prompts_alone(backend, positions):
    model = toy(backend)
    run = rp.capture(model, zoo.RAGGED)
    found, index = run.logits_at(positions), run.locate(positions).index
    for row, tokens in enumerate(zoo.RAGGED):
        expected = zoo.plain_logits(model, tokens)
        for column, place in enumerate(index[row].tolist()):
            if place >= 0:
                assert_close(found[row, column], expected[place], 1e-12)
            else:
                assert found[row, column].isnan().all()


@backends
def test_a_hook_that_the_model_lacks_or_never_calls_is_an_error(backend):
    run = rp.capture(toy(backend), zoo.RAGGED)
    with pytest.raises(AddressError, match=r"has no hook blocks\.3\.hook_attn_out"):
        run.fetch(rp.parse("attn.3"))
    silent = "blocks.0.attn.hook_result"
    with pytest.raises(HookNotFiredError, match=r"never fired: blocks\.0\.attn\.hook_result"):
        run.sweep({silent: lambda tensor, rows: None})


def test_what_has_no_hook_is_named():
    run = rp.capture(toy(zoo.BACKENDS[0]), zoo.RAGGED)
    for text in ("attn.1.bias", "mlp.1.bias", "logits", "unembed.bias"):
        with pytest.raises(AddressError, match=f"{text} has no hook of its own"):
            run.fetch(rp.parse(text))


@backends
def test_the_repr_says_model_class_and_prompts(backend):
    text = repr(rp.capture(toy(backend), zoo.RAGGED))
    assert "HookedTransformer" in text or "TransformerBridge" in text
    assert "3 rows of 3 to 8 tokens" in text and "\n" not in text


# A cache that the caller already had


def whole_cache(model, tokens, **options):
    with torch.no_grad():
        return model.run_with_cache(tokens, **options)[1]


def same_as_without(run, model, prompts, **options):
    plain = rp.capture(model, prompts, **options)
    for by in zoo.GRAINS:
        settings = {"by": by, "positions": None}
        with_cache = rp.direct_logit_attribution(run, 3, 6, **settings)
        without = rp.direct_logit_attribution(plain, 3, 6, **settings)
        torch.testing.assert_close(
            with_cache.values, without.values, rtol=0, atol=1e-10, equal_nan=True
        )


TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.mark.parametrize("folded", [False, True], ids=["raw", "folded"])
@backends
def test_a_cache_of_the_caller_is_read_after_one_pass_of_the_model(backend, folded):
    if backend == "hooked":
        model = zoo.build(backend, zoo.Cell(folded=folded))
    else:
        model = zoo.named("gpt2_untied", folded=folded)
    cache = whole_cache(model, TOKENS)
    before = {name: tensor.clone() for name, tensor in cache.items()}
    run = rp.capture(model, TOKENS, cache=cache)
    passes = []
    count = zoo.watching(lambda t, hook: passes.append(1))
    model.hook_dict["blocks.1.hook_attn_out"].add_hook(count)
    try:
        run.fetch(rp.parse("attn.1"))
        run.fetch(rp.parse("mlp.1"))
        assert passes == [1]
    finally:
        model.reset_hooks()
    same_as_without(run, model, TOKENS)
    assert set(before) == set(cache.keys())
    assert all(torch.equal(before[name], cache[name]) for name in before)


@pytest.mark.parametrize("softcap", [False, True], ids=["plain", "softcap"])
def test_a_cache_is_held_against_one_pass_of_the_model_for_all_its_analyses(softcap):
    model = zoo.fresh_named("gemma2" if softcap else "gpt2_untied")
    run = rp.capture(model, TOKENS, cache=whole_cache(model, TOKENS))
    without = rp.capture(model, TOKENS)
    rp.direct_logit_attribution(without, 3)  # the checks of the model run it too
    passes = []
    point = model.hook_dict["blocks.0.hook_resid_pre"]
    point.add_hook(zoo.watching(lambda t, hook: passes.append(1)))
    try:
        rp.direct_logit_attribution(without, 3)
        passes.clear()
        for foil in (None, 6):
            for positions in (-1, None):
                options = {"foil": foil, "positions": positions}
                found = rp.direct_logit_attribution(run, 3, **options)
                n_passes = len(passes)
                expected = rp.direct_logit_attribution(without, 3, **options)
                del passes[n_passes:]
                torch.testing.assert_close(found.model_value, expected.model_value)
                if softcap:
                    torch.testing.assert_close(found.capped_value, expected.capped_value)
        assert passes == [1]
    finally:
        model.reset_hooks()


def test_a_cache_is_held_against_the_model_as_it_is_now():
    model = zoo.fresh_named("gpt2_untied")
    run = rp.capture(model, TOKENS, cache=whole_cache(model, TOKENS))
    rp.direct_logit_attribution(run, 3, 6)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp" in name:
                weight.mul_(1.5)
    with pytest.raises(ModelChangedError):
        rp.direct_logit_attribution(run, 3, 6)


def test_a_hook_of_the_caller_sees_every_row_go_into_the_unembedding():
    model = zoo.fresh_named("gpt2_untied")
    run = rp.capture(model, TOKENS)
    expected = rp.direct_logit_attribution(run, 3, 6)
    seen = []
    look = zoo.watching(lambda module, inputs, out: seen.append(out.shape))
    handle = model.unembed.register_forward_hook(look)
    try:
        rp.direct_logit_attribution(run, 3, 6)
        assert seen[-1][1] == 1  # one row a prompt, where nobody else looks
        last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
        model.hook_dict[last].add_hook(lambda t, hook: None)
        found = rp.direct_logit_attribution(rp.capture(model, TOKENS), 3, 6)
        assert seen[-1][1] == TOKENS.shape[1]
    finally:
        handle.remove()
        model.reset_hooks()
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=1e-12)


@backends
def test_a_plain_dict_of_tensors_with_gradients_does_too(backend):
    model = toy(backend)
    cache = {name: tensor.clone() for name, tensor in whole_cache(model, TOKENS).items()}
    for tensor in cache.values():
        tensor.requires_grad_(tensor.is_floating_point())
    run = rp.capture(model, TOKENS, cache=cache)
    same_as_without(run, model, TOKENS)
    dla = rp.direct_logit_attribution(run, 3, 6, by="head")
    assert not dla.values.requires_grad and not run.fetch(rp.parse("attn.1")).requires_grad


@backends
def test_a_cache_without_its_batch_axis_does_too(backend):
    model = toy(backend)
    cache = whole_cache(model, TOKENS[:1]).remove_batch_dim()
    assert cache["blocks.0.hook_attn_out"].ndim == 2
    for prompts in (TOKENS[:1], TOKENS[0], [TOKENS[0].tolist()]):
        same_as_without(rp.capture(model, prompts, cache=cache), model, prompts)


@backends
def test_a_cache_of_right_padded_prompts_does_too(backend):
    model = toy(backend)
    width = max(map(len, zoo.RAGGED))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in zoo.RAGGED])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in zoo.RAGGED])
    cache = whole_cache(model, padded)
    same_as_without(rp.capture(model, padded, mask=mask, cache=cache), model, zoo.RAGGED)


@pytest.mark.parametrize("kind", ["byte_level_left", "metaspace"])
@backends
def test_a_cache_of_left_padded_prompts_is_moved_into_place(backend, kind):
    """In float32, because a bridge's rows of nothing but padding are NaN in float64."""
    model = zoo.text_model(backend, kind)
    width = max(map(len, zoo.RAGGED))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in zoo.RAGGED])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in zoo.RAGGED])
    cache = whole_cache(model, padded, attention_mask=mask)
    run = rp.capture(model, padded, mask=mask, cache=cache)
    plain = rp.capture(model, zoo.RAGGED)
    for by in zoo.GRAINS:
        moved = rp.direct_logit_attribution(run, 3, 6, by=by, positions=None)
        expected = rp.direct_logit_attribution(plain, 3, 6, by=by, positions=None)
        torch.testing.assert_close(moved.values, expected.values, rtol=0, atol=1e-4, equal_nan=True)


@backends
def test_a_left_padded_cache_whose_positions_are_off_is_refused(backend):
    model = toy(backend)
    padded, mask = torch.tensor([[0, 0, 3, 1, 4]]), torch.tensor([[0, 0, 1, 1, 1]])
    cache = whole_cache(model, padded)
    run = rp.capture(model, padded, mask=mask, cache=cache)
    with pytest.raises(CacheMismatchError, match="made from other prompts"):
        rp.direct_logit_attribution(run, 3, 6)


@pytest.mark.parametrize("by", zoo.GRAINS)
@backends
def test_a_cache_of_other_prompts_is_refused(backend, by):
    model = toy(backend)
    other = TOKENS.clone()
    other[1, 0] += 1
    run = rp.capture(model, other, cache=whole_cache(model, TOKENS))
    with pytest.raises(CacheMismatchError, match="prompts 0 to 1: .* other prompts"):
        rp.direct_logit_attribution(run, 3, 6, by=by)


@backends
def test_a_cache_of_another_model_is_refused(backend):
    model = toy(backend)
    other = zoo.fresh(backend) if backend == "hooked" else zoo.fresh_named("gpt2_untied")
    with torch.no_grad():
        other.blocks[1].attn.W_V.mul_(1.5)
    run = rp.capture(model, TOKENS, cache=whole_cache(other, TOKENS))
    with pytest.raises(CacheMismatchError):
        rp.direct_logit_attribution(run, 3, 6)


@pytest.mark.parametrize(
    "prompts", [TOKENS[:, :4], TOKENS[0], torch.cat([TOKENS, TOKENS]), [[3, 1, 4, 1, 5, 9]]]
)
@backends
def test_a_cache_of_another_shape_is_refused_with_both_shapes(backend, prompts):
    model = toy(backend)
    with pytest.raises(
        CacheMismatchError, match=r"the cache holds .* as \(2, 5, .* but the prompt"
    ):
        rp.capture(model, prompts, cache=whole_cache(model, TOKENS))


@backends
def test_a_cache_of_padded_texts_must_come_with_its_ids(backend):
    """`run_with_cache(texts)` pads as the tokenizer does, so texts alone do not say where rows are.

    On the side the texts are padded at, either the cache is right, or it is refused.
    """
    model = zoo.text_model(backend, "byte_level_left")
    texts = ["When Mary and John went to the store", "The dog"]
    cache = whole_cache(model, model.to_tokens(texts))
    run = rp.capture(model, texts, cache=cache)
    with pytest.raises(CacheMismatchError):
        rp.direct_logit_attribution(run, " Mary", " John")


@backends
def test_a_cache_that_lacks_what_is_read_says_what(backend):
    model = toy(backend)
    cache = whole_cache(model, TOKENS, names_filter=lambda name: "attn_out" in name)
    run = rp.capture(model, TOKENS, cache=cache)
    with pytest.raises(CacheMismatchError, match=r"the cache lacks .*hook"):
        rp.direct_logit_attribution(run, 3, 6)


@backends
def test_a_cache_filtered_to_what_is_read_is_enough(backend):
    model = toy(backend)
    wanted = ("hook_resid_pre", "hook_resid_post", "attn_out", "mlp_out", "pos_embed")
    if backend == "bridge":
        wanted += ("hook_in", "hook_out")  # a bridge caches under names of its own
    cache = whole_cache(model, TOKENS, names_filter=lambda name: name.endswith(wanted))
    run = rp.capture(model, TOKENS, cache=cache)
    dla = rp.direct_logit_attribution(run, 3, 6, positions=None)
    assert float(dla.gap.max()) < 1e-10


def test_a_mask_goes_with_a_matrix_of_ids():
    with pytest.raises(PromptError, match="a mask goes with a 2-D tensor"):
        rp.capture(toy(zoo.BACKENDS[0]), zoo.RAGGED, mask=torch.ones(3, 8))
