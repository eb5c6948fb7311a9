"""Inputs that made other tools give a wrong number, a crash or a confusing message.

Each test carries the id of its case: D attribution, K tokens and batches, M models and devices,
C files and pictures. L, T, P and A are beside the other tests of their module, D16 is in
test_memory.py; the published numbers of GPT-2 small are in test_gpt2.py.
"""

import gc
import itertools
import re
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from reference.attribution import written

import resid_patching as rp
from resid_patching.address import Stream, hook_name
from resid_patching.cli import main
from resid_patching.errors import (
    AddressError,
    AnswerWarning,
    BosWarning,
    CacheMismatchError,
    PromptError,
    StreamMismatchError,
    TokenError,
    UnsupportedModelError,
)
from resid_patching.models import DEMO_FOLDER, ModelView, report
from resid_patching.models.guards import find_processing

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
TOKENS = [3, 1, 4, 1, 5, 9]
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def attribute(model, prompts=TOKENS, answer=3, foil=6, **options):
    return rp.direct_logit_attribution(rp.capture(model, prompts), answer, foil, **options)


def difference(model, tokens, answer, foil):
    logits = zoo.plain_logits(model, tokens)
    return logits[..., answer] - logits[..., foil]


# Direct logit attribution


FOLDS = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
CHOICES = [
    dict(zip(FOLDS, choice, strict=True)) for choice in itertools.product((False, True), repeat=4)
]


def folded_by(backend, norm, options):
    options = {
        **options,
        "center_writing_weights": options["center_writing_weights"] and norm == "LN",
    }
    cell = zoo.Cell(norm=norm, grouped=norm == "RMS")
    if backend == "hooked":
        model = zoo.fresh(backend, cell)
        model.load_and_process_state_dict(
            {name: tensor.clone() for name, tensor in model.state_dict().items()}, **options
        )
        return model
    model = zoo.fresh_named("gpt2_untied" if norm == "LN" else "llama_grouped")
    model.enable_compatibility_mode(disable_warnings=True, **options)
    zoo.restore_dtype(model, torch.float64)
    return model


@pytest.mark.parametrize("options", CHOICES, ids=lambda o: "".join("01"[o[name]] for name in FOLDS))
@pytest.mark.parametrize("norm", ["LN", "RMS"])
@backends
def test_D01_last_row_is_the_models_logits_in_every_processing_state(backend, norm, options):
    model = folded_by(backend, norm, options)
    view = ModelView(model)
    state = find_processing(view)
    # Centring the columns of an unembedding or of writing weights is found in the weights.
    assert (state.norms_folded, state.unembed_centred) == (
        options["fold_ln"],
        options["center_unembed"],
    )
    run = rp.capture(model, TOKENS)
    last = run.fetch(Stream(zoo.N_LAYERS - 1, "post"))[0]
    logits = zoo.plain_logits(model, TOKENS)
    assert_close(view.readout(last).detach(), logits)
    for by in zoo.GRAINS:
        dla = rp.direct_logit_attribution(run, 3, 6, by=by, positions=None)
        assert_close(dla.total[0], logits[:, 3] - logits[:, 6])
        assert "ln_final.bias" in dla.components and "unembed.bias" in dla.components


@backends
def test_D03_rows_carry_the_final_norms_scale(backend):
    model = zoo.build(backend)
    dla = attribute(model, by="component")
    parts = rp.decompose(rp.capture(model, TOKENS), by="component").vectors(-1)[:, 0, 0]
    W_U = ModelView(model).W_U.detach()
    norm = ModelView(model).final_norm
    centred = parts - parts.mean(-1, keepdim=True)
    unscaled = centred @ (norm.gain * (W_U[:, 3] - W_U[:, 6]))
    sigma = norm.scale(parts.sum(0))
    assert_close(dla.values[:-2, 0, 0], unscaled / sigma)
    assert float((unscaled - dla.values[:-2, 0, 0]).abs().max()) > 0.1


@backends
def test_D04_the_unembedding_bias_is_a_row_of_its_own(backend):
    model = zoo.build(backend, zoo.Cell(folded=True))
    b_U = ModelView(model).b_U.detach()
    for foil in (6, 7):
        dla = attribute(model, foil=foil)
        assert_close(dla.sel(component="unembed.bias")[0, 0], b_U[3] - b_U[foil])
        rest = dla.total - dla.sel(component="unembed.bias")
        assert_close(rest[0, 0] + b_U[3] - b_U[foil], difference(model, TOKENS, 3, foil)[-1])
        assert float((b_U[3] - b_U[foil]).abs()) > 0.01


@pytest.mark.parametrize("folded", [False, True], ids=["raw", "folded"])
@backends
def test_D07_an_rmsnorm_model_is_scaled_too(backend, folded):
    model = zoo.build(backend, zoo.Cell(norm="RMS", folded=folded))
    dla = attribute(model, by="head")
    assert_close(dla.total[0, 0], difference(model, TOKENS, 3, 6)[-1])
    vectors = rp.decompose(rp.capture(model, TOKENS), by="head").vectors(-1)[:, 0, 0]
    W_U = ModelView(model).W_U.detach()
    unscaled = vectors @ (ModelView(model).final_norm.gain * (W_U[:, 3] - W_U[:, 6]))
    assert float((unscaled - dla.values[:-2, 0, 0]).abs().max()) > 0.1


@backends
def test_D08_under_an_output_softcap_the_sum_is_the_logit_before_it_and_says_so(backend):
    model = zoo.softcapped(backend)
    dla = attribute(model, foil=None, positions=None)
    assert "before the output softcap of 2, " in repr(dla) or repr(dla).count("softcap of 2;")
    final = zoo.plain_logits(model, TOKENS)
    stream = zoo.plain_cache(model, TOKENS)[f"blocks.{zoo.N_LAYERS - 1}.hook_resid_post"]
    before = ModelView(model).readout(stream)[0].detach()
    assert_close(zoo.SOFTCAP * torch.tanh(before / zoo.SOFTCAP), final, 1e-6)
    assert_close(dla.total[0], before[:, 3] - before.mean(-1))
    assert_close(dla.capped_value[0], final[:, 3] - final.mean(-1))


@pytest.mark.parametrize("folded", [False, True], ids=["raw", "folded"])
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_D10_outputs_that_hold_the_residual_elsewhere_are_the_added_term_here(name, folded):
    model = zoo.named(name, folded=folded)
    run = rp.capture(model, TOKENS)
    for layer in range(zoo.N_LAYERS):
        pre, mid, post = (run.fetch(Stream(layer, place)) for place in ("pre", "mid", "post"))
        assert_close(run.fetch(rp.parse(f"attn.{layer}")), mid - pre)
        assert_close(run.fetch(rp.parse(f"mlp.{layer}")), post - mid)
    assert_close(attribute(model).total[0, 0], difference(model, TOKENS, 3, 6)[-1])


@pytest.mark.parametrize("part", ["attn", "mlp"])
@backends
def test_D10_a_block_whose_outputs_hold_the_residual_is_refused_by_name(backend, part):
    model = zoo.fresh(backend)
    for block in model.blocks:
        _show_the_sum(backend, block, part)
    state = {"attn": "resid_mid", "mlp": "resid_post"}[part]
    with pytest.raises(StreamMismatchError, match=rf"layer 0: .* \+ {part}_out = {state} fails"):
        rp.capture(model, TOKENS)


def _show_the_sum(backend, block, part):
    """Make a hook report the stream after a write in place of the write, as BLOOM does."""
    held = {}
    if backend == "hooked":
        before = block.hook_resid_pre if part == "attn" else block.hook_resid_mid
        before.register_forward_hook(lambda m, i, output: held.update(stream=output))
        setattr(block, f"hook_{part}_out", _Shown(getattr(block, f"hook_{part}_out"), held))
        return
    inner = getattr(block, part).hook_out
    norm = block.ln1 if part == "attn" else block.ln2
    norm.register_forward_pre_hook(lambda m, inputs: held.update(stream=inputs[0]))
    module = getattr(block, part)
    inner.register_forward_hook(lambda m, i, output: output + held["stream"])

    def take_off(module, inputs, output):
        is_tuple = isinstance(output, tuple)
        write = (output[0] if is_tuple else output) - held["stream"]
        return (write, *output[1:]) if is_tuple else write

    module.register_forward_hook(take_off)


class _Shown(torch.nn.Module):
    def __init__(self, point, held):
        super().__init__()
        self.point, self.held = point, held

    def forward(self, write):
        return self.point(write + self.held["stream"]) - self.held["stream"]


@pytest.mark.parametrize("name", ["neox_parallel", "neox_sequential"])
@backends
def test_D12_sequential_and_parallel_neox_checkpoints_are_told_apart(backend, name, tmp_path):
    """A conversion that takes one for the other is not handed out."""
    folder = zoo.save(tmp_path / name, zoo.CONFIGS[name]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first backend may hand over to the second
        model = rp.load(folder, backend="auto" if backend == "hooked" else backend)
    original = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = original(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    assert_close(zoo.plain_logits(model, TOKENS).log_softmax(-1), expected, 1e-4)

    run = rp.capture(model, TOKENS)
    for by in zoo.GRAINS:
        assert float(rp.direct_logit_attribution(run, 3, 6, by=by).gap) < 1e-4
    if name == "neox_sequential":
        assert run.fetch(Stream(1, "mid")).shape == (1, len(TOKENS), zoo.D_MODEL)
    else:
        with pytest.raises(AddressError, match="has no hook"):
            run.fetch(Stream(1, "mid"))


@pytest.mark.parametrize("by", zoo.GRAINS)
@backends
def test_D13_each_label_is_the_part_it_names(backend, by):
    model = zoo.build(backend) if backend == "hooked" else zoo.named("gpt2_untied")
    dla = attribute(model, by=by)
    weights = zoo.plain_weights(model)
    cache = zoo.plain_cache(model, TOKENS)
    stream = cache[f"blocks.{zoo.N_LAYERS - 1}.hook_resid_post"][0, -1]
    sigma = (stream.var(unbiased=False) + zoo.EPS).sqrt()
    direction = weights["gain"] * (weights["W_U"][:, 3] - weights["W_U"][:, 6])
    for label, vector in written(cache, weights, len(TOKENS) - 1, by).items():
        value = (vector - vector.mean()) / sigma @ direction
        assert_close(dla.sel(component=label)[0, 0], value)
    frame = dla.to_frame()
    assert frame["component"].tolist() == list(dla.components)
    assert_close(torch.tensor(frame["value"].to_numpy()), dla.values[:, 0, 0], 0)


@backends
def test_D14_one_row_of_a_batch_is_that_row_alone_whatever_was_dropped(backend):
    model = zoo.build(backend)
    batch = torch.randint(zoo.D_VOCAB, (8, 6), generator=torch.Generator().manual_seed(1))
    together = attribute(model, batch, by="head")
    with torch.no_grad():
        cache = model.run_with_cache(batch[2:3])[1].remove_batch_dim()
    run = rp.capture(model, batch[2], cache=cache)
    alone = rp.direct_logit_attribution(run, 3, 6, by="head")
    assert_close(alone.values[:, 0], together.values[:, 2])
    with pytest.raises(CacheMismatchError, match="the prompts are 8 rows of 6 tokens"):
        rp.capture(model, batch, cache=cache)
    with torch.no_grad():
        whole = model.run_with_cache(batch)[1]
    with pytest.raises(CacheMismatchError, match="the prompts are 1 rows of 6 tokens"):
        rp.capture(model, batch[2], cache=whole)


@backends
def test_D17_a_writer_and_its_eraser_score_high_and_removing_both_changes_nothing(backend):
    """So the documentation warns of it: a row is what was written, not what depends on it."""
    model = zoo.fresh(backend) if backend == "hooked" else zoo.fresh_named("gpt2_untied")
    _make_the_second_head_erase_the_first(backend, model)
    dla = attribute(model, by="head")
    write, erase = (float(dla.sel(component=f"2.{head}")) for head in (0, 1))
    assert abs(write) > 0.2 and write == pytest.approx(-erase, abs=1e-10)

    def remove(heads):
        def edit(z, hook):
            z = z.clone()
            z[:, :, heads] = 0
            return z

        with model.hooks(fwd_hooks=[("blocks.2.attn.hook_z", edit)]):
            return float(difference(model, TOKENS, 3, 6)[-1])

    before = float(difference(model, TOKENS, 3, 6)[-1])
    assert remove([0, 1]) == pytest.approx(before, abs=1e-10)
    assert abs(remove([0]) - before) > 0.01
    assert re.search(r"write\s+and erase the same vector both score high", _documentation())


def _documentation():
    from resid_patching import attribution

    return attribution.__doc__


def _make_the_second_head_erase_the_first(backend, model):
    with torch.no_grad():
        if backend == "hooked":
            attn = model.blocks[2].attn
            for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V"):
                weight = getattr(attn, name)
                weight[1] = weight[0]
            attn.W_O[1] = -attn.W_O[0]
            return
        attn = model.blocks[2].attn
        d_head = zoo.D_MODEL // zoo.N_HEADS
        first, second = slice(0, d_head), slice(d_head, 2 * d_head)
        for part in (attn.q, attn.k, attn.v):
            weight, bias = part.original_component.weight, part.original_component.bias
            is_by_column = type(part.original_component).__name__ == "Conv1D"
            (weight.T if is_by_column else weight)[second] = (weight.T if is_by_column else weight)[
                first
            ].clone()
            bias[second] = bias[first].clone()
        out = attn.o.original_component
        by_input = out.weight if type(out).__name__ == "Conv1D" else out.weight.T
        by_input[second] = -by_input[first].clone()


def test_D18_differences_and_probabilities_do_not_depend_on_a_centred_unembedding():
    raw, folded = (zoo.named("gpt2_untied", folded=folded) for folded in (False, True))
    logits = [zoo.plain_logits(model, TOKENS) for model in (raw, folded)]
    assert float((logits[0] - logits[1]).abs().max()) > 0.1
    assert_close(logits[0].softmax(-1), logits[1].softmax(-1), 1e-6)
    for foil in (6, None):
        totals = [attribute(model, foil=foil, positions=None).total for model in (raw, folded)]
        assert_close(*totals, 1e-6)
    alone = [attribute(model, foil=None) for model in (raw, folded)]
    assert all("against the vocabulary mean" in repr(dla) for dla in alone)
    assert ["unembedding centred" in dla.provenance.processing for dla in alone] == [False, True]


@pytest.mark.parametrize("folded", [False, True], ids=["raw", "folded"])
@backends
def test_D21_the_identity_is_shown_on_grouped_queries_rmsnorm_and_a_tied_head(backend, folded):
    cell = zoo.Cell(norm="RMS", grouped=True, tied=True, folded=folded)
    model = zoo.build(backend, cell, torch.float32)
    for by in zoo.GRAINS:
        dla = attribute(model, by=by)
        expected = float(difference(model, TOKENS, 3, 6)[-1])
        assert float(dla.gap) < 1e-3
        assert float(dla.total) == pytest.approx(expected, abs=1e-3)
        assert float(dla.model_value) == pytest.approx(expected, abs=1e-6)


# Tokens, beginning of sequence, padding


@pytest.mark.parametrize("n_pads", [1, 2, 5])
@pytest.mark.parametrize("kind", ["byte_level", "byte_level_left", "metaspace"])
@backends
def test_K01_left_pads_do_not_move_a_distribution(backend, kind, n_pads):
    model = zoo.text_model(backend, kind)
    row = model.to_tokens("When Mary and John went")[0].tolist()
    longer = [*row, *row[1 : 1 + n_pads]]
    pad = model.tokenizer.pad_token_id
    tokens = torch.tensor([[pad] * n_pads + row, longer])
    mask = torch.tensor([[0] * n_pads + [1] * len(row), [1] * len(longer)])
    run = rp.capture(model, tokens, mask=mask)
    for number, ids in enumerate((row, longer)):
        alone = zoo.plain_logits(model, ids)
        assert_close(run.logits_at(None)[number, : len(ids)], alone, 1e-4)
    with torch.no_grad():
        naive = model(tokens, return_type="logits")[0, -1]
    if model.cfg.positional_embedding_type == "standard" and kind == "byte_level":
        assert float((naive - zoo.plain_logits(model, row)[-1]).abs().max()) > 1e-2  # the twin


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_left", "metaspace"])
@backends
def test_K02_pads_are_masked_in_a_batch_of_texts(backend, kind):
    model = zoo.text_model(backend, kind)
    texts = ["The dog saw the cat", "After Tom and Anna sat in the park, Anna handed a book to"]
    batch = attribute(model, texts, " Mary", " John", by="head", positions=None)
    for number, text in enumerate(texts):
        alone = attribute(model, text, " Mary", " John", by="head", positions=None)
        length = alone.values.shape[-1]
        assert_close(batch.values[:, number, :length], alone.values[:, 0], 1e-4)


@backends
def test_K05_without_bos_a_word_is_one_position(backend):
    model = zoo.text_model(backend)
    run = rp.capture(model, " Mary", prepend_bos=False)
    assert run.prompts.lengths == (1,) and run.prompts.bos_id is None
    dla = rp.direct_logit_attribution(run, " the", " John", positions=None)
    assert dla.values.shape[1:] == (1, 1) and not dla.provenance.bos
    assert rp.capture(model, " Mary").prompts.lengths == (2,)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@backends
def test_K06_one_bos_in_the_prompt_and_none_in_the_answer(backend, kind):
    model = zoo.text_model(backend, kind)
    bos = model.tokenizer.bos_token_id
    for text in ("When Mary", model.tokenizer.bos_token + "When Mary"):
        for setting in (None, True):
            run = rp.capture(model, text, prepend_bos=setting)
            assert run.prompts.tokens[0].tolist().count(bos) == 1
            dla = rp.direct_logit_attribution(run, " Mary", " John")
            assert dla.answers != (bos,) and dla.answer_texts == (" Mary",)


def test_K08_a_leading_space_means_the_right_token_of_a_sentencepiece_vocabulary():
    tokenizer = zoo.text_model(zoo.BACKENDS[0], "metaspace").tokenizer
    model = zoo.text_model(zoo.BACKENDS[0], "metaspace")
    dla = attribute(model, "When John gave a drink to", " Mary", " John")
    expected = tuple(
        tokenizer.get_vocab()[f"\N{LOWER ONE EIGHTH BLOCK}{n}"] for n in ("Mary", "John")
    )
    assert dla.answers + dla.foils == expected
    with pytest.raises(TokenError, match=r"' basketball' is \d+ tokens of .*: ' ' \(\d+\), 'b'"):
        attribute(model, "When John gave a drink to", " basketball", " John")


@backends
def test_K10_leaving_out_a_models_own_bos_warns(backend):
    model = zoo.text_model(backend, "metaspace")
    with pytest.warns(BosWarning, match="some models are far worse without it") as caught:
        rp.capture(model, "When Mary", prepend_bos=False)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", BosWarning)
        rp.capture(model, "When Mary")
        rp.capture(model, "When Mary", prepend_bos=True)


@backends
def test_K12_an_answer_without_its_space_warns_with_both_ids(backend):
    model = zoo.text_model(backend)
    vocabulary = model.tokenizer.get_vocab()
    bare, spaced = vocabulary["8"], vocabulary["\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}8"]
    with pytest.warns(AnswerWarning) as caught:
        dla = attribute(model, "3 + 5 =", "8", " the")
    text = str(caught[0].message)
    assert caught[0].filename == __file__  # the caller's line, through decorators and all
    assert str(bare) in text and str(spaced) in text and dla.answers == (bare,)


@backends
def test_K13_ids_in_one_dimension_are_a_batch_of_one(backend):
    model = zoo.build(backend)
    one, two = (attribute(model, torch.tensor(ids)) for ids in (TOKENS, [TOKENS]))
    assert torch.equal(one.values, two.values) and one.values.shape[1] == 1


@backends
def test_K14_a_prompt_longer_than_the_context_is_refused_with_both_numbers(backend):
    model = zoo.fresh(backend)
    model.hook_dict["hook_embed"].add_hook(lambda tensor, hook: pytest.fail("the model ran"))
    with pytest.raises(PromptError, match="65 tokens, but the context of .* is 64 tokens"):
        rp.capture(model, [1] * (zoo.N_CTX + 1))
    text_model = zoo.text_model(backend)
    with pytest.raises(
        PromptError, match=r"but the context of .* is 64 tokens; shorten it, or cut"
    ):
        rp.capture(text_model, zoo.CORPUS)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@backends
def test_K16_an_empty_prompt_is_the_bos_alone_or_a_clear_error(backend, kind):
    model = zoo.text_model(backend, kind)
    dla = attribute(model, "", " Mary", " John", positions=None)
    assert dla.token_texts == ((model.tokenizer.bos_token,),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BosWarning)
        with pytest.raises(PromptError, match="the prompt is empty, and without a beginning"):
            rp.capture(model, "", prepend_bos=False)
        with pytest.raises(PromptError, match="the prompt is empty"):
            rp.capture(model, ["When Mary", ""], prepend_bos=False)


@backends
def test_K17_parts_of_a_character_are_shown_as_bytes(backend):
    model = zoo.text_model(backend)
    dla = attribute(model, "a 😀", " Mary", " John", positions=None)
    shown = dla.to_frame()["token"].unique().tolist()
    assert {"\\xf0", "\\x9f", "\\x98", "\\x80"} <= set(shown)
    again = rp.Attribution.from_json(dla.to_json())
    assert again.token_texts == dla.token_texts
    byte = attribute(model, "a", model.to_tokens("😀", prepend_bos=False)[0, 0], " John")
    assert byte.answer_texts == ("\\xf0",)


@backends
def test_K19_the_first_word_of_a_text_has_other_ids_than_the_same_word_later(backend):
    model = zoo.text_model(backend)
    first = rp.capture(model, "Mary gave a drink").prompts
    later = rp.capture(model, "When Mary gave a drink").prompts
    assert " Mary" in later.token_texts[0] and " Mary" not in first.token_texts[0]
    assert first.lengths != later.lengths or first.tokens[0, 1] != later.tokens[0, 2]
    mary = attribute(model, "When John gave a drink to", " Mary", " John").answers[0]
    assert mary in later.tokens[0].tolist() and mary not in first.tokens[0].tolist()


@pytest.fixture(scope="module")
def gpt2_vocabulary(shared_dir):
    """A small random model with GPT-2's own tokenizer, on each backend."""
    folder = zoo.gpt2_tokenizer_folder(shared_dir / "data" / "gpt2_tokenizer")
    return {backend: rp.load(folder, backend=backend) for backend in zoo.BACKENDS}


@pytest.mark.shared
@backends
def test_K05_K12_K13_K19_with_the_vocabulary_of_gpt2(gpt2_vocabulary, backend):
    model = gpt2_vocabulary[backend]
    hello = rp.capture(model, "Hello", prepend_bos=False).prompts
    assert hello.tokens.tolist() == [[15496]]
    assert rp.capture(model, "Hello").prompts.tokens.tolist() == [[50256, 15496]]
    assert rp.capture(model, torch.tensor([15496])).prompts.tokens.tolist() == [[15496]]

    assert attribute(model, "3 + 5 =", " 8", " 6").answers == (807,)
    with pytest.warns(AnswerWarning, match="is token 23; .* is token 807"):
        assert attribute(model, "3 + 5 =", "8", " 6").answers == (23,)

    first, later = (rp.capture(model, t).prompts for t in ("Mary gave", "When Mary gave"))
    assert first.token_texts[0][1:] == ("Mary", " gave")
    assert later.token_texts[0][1:] == ("When", " Mary", " gave")
    assert first.tokens[0, 1] != later.tokens[0, 2]


@pytest.mark.shared
@backends
def test_K17_an_emoji_in_the_vocabulary_of_gpt2(gpt2_vocabulary, backend):
    shown = rp.capture(gpt2_vocabulary[backend], "so 😀!", prepend_bos=False).prompts.token_texts[0]
    assert shown == ("so", " \\xf0\\x9f\\x98", "\\x80", "!")


# Models, dtypes, devices


@pytest.mark.parametrize("device", DEVICES)
@backends
def test_M01_the_indirect_object_is_predicted_on_every_device(backend, device):
    """The law on the shipped model, held to transformers on the CPU; for GPT-2: test_gpt2.py."""
    text = "When Mary and John went to the store, John gave a drink to"
    run = rp.capture(rp.load("demo", backend=backend, device=device), text)
    original = transformers.AutoModelForCausalLM.from_pretrained(DEMO_FOLDER)
    with torch.no_grad():
        expected = original(run.prompts.tokens.cpu()).logits[0, -1]
    assert_close(run.logits_at(-1)[0, 0].cpu(), expected, 1e-3)
    mary, john = (run.view.model.to_single_token(name) for name in (" Mary", " John"))
    assert int(expected.argmax()) == mary
    dla = rp.direct_logit_attribution(run, " Mary", " John", by="head")
    assert_close(float(dla.total), float(expected[mary] - expected[john]), 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@backends
def test_M02_a_model_in_half_precision_is_summed_in_float32(backend, dtype):
    model = zoo.text_model(backend, dtype=dtype)
    text = "When Mary and John went to the store"
    for by in zoo.GRAINS:
        dla = attribute(model, text, " Mary", " John", by=by)
        assert dla.values.dtype == dla.model_value.dtype == torch.float32
        assert dla.provenance.dtype == str(dtype).removeprefix("torch.")
        size = max(float(dla.values.abs().max()), float(dla.model_value.abs().max()))
        assert float(dla.gap) < (6e-2 if dtype == torch.bfloat16 else 1e-2) * size
    exact = attribute(zoo.text_model(backend), text, " Mary", " John", by="head")
    assert_close(dla.total, exact.total, 0.2)


@pytest.mark.parametrize("device", DEVICES)
@backends
def test_M03_sums_live_on_the_models_device(backend, device):
    model = rp.load(zoo.text_folder(), backend=backend, device=device)
    expected = attribute(zoo.text_model(backend), "When Mary and John", " Mary", " John")
    with torch.no_grad():
        tokens = model.to_tokens("When Mary and John")
        cache = {name: tensor.cpu() for name, tensor in model.run_with_cache(tokens)[1].items()}
    for run in (rp.capture(model, "When Mary and John"), rp.capture(model, tokens, cache=cache)):
        dla = rp.direct_logit_attribution(run, " Mary", " John")
        for tensor in (dla.values, dla.model_value, dla.position_index, run.prompts.tokens):
            assert tensor.device.type == device
        assert run.fetch(rp.parse("attn.1")).device.type == device
        assert_close(dla.values.cpu(), expected.values, 1e-4)
        assert rp.Attribution.from_json(dla.to_json()).values.device.type == "cpu"


@pytest.mark.parametrize("folded", [False, True], ids=["raw", "folded"])
@backends
def test_M05_heads_and_bias_are_the_attention_output_under_grouped_queries(backend, folded):
    model = zoo.build(backend, zoo.Cell(grouped=True, folded=folded))
    assert ModelView(model).n_kv_heads == 2
    run = rp.capture(model, TOKENS)
    parts = rp.decompose(run, by="head")
    vectors = dict(zip(map(str, parts.writers), parts.vectors(None), strict=True))
    for layer in range(zoo.N_LAYERS):
        total = vectors[f"attn.{layer}.bias"] + sum(
            vectors[f"{layer}.{head}"] for head in range(zoo.N_HEADS)
        )
        assert_close(total, run.fetch(rp.parse(f"attn.{layer}")))


def test_M07_a_post_norm_encoder_is_refused_by_name():
    for folded in (False, True):
        model = zoo.fresh_named("bert", folded=folded)
        with pytest.raises(UnsupportedModelError) as caught:
            rp.capture(model, TOKENS)
        assert isinstance(caught.value, StreamMismatchError)


@backends
def test_M09_a_tied_embedding_stays_and_the_folded_unembedding_is_read(backend, tmp_path):
    settings = {**zoo.CONFIGS["llama_grouped"]().to_dict(), "tie_word_embeddings": True}
    folder = zoo.save(tmp_path / "tied", transformers.LlamaConfig(**settings))
    raw, folded = (rp.load(folder, backend=backend, processing=p) for p in ("raw", "folded"))
    assert torch.equal(ModelView(raw).W_U, raw.W_E.T)
    assert torch.equal(folded.W_E, raw.W_E)
    W_U = ModelView(folded).W_U
    assert not torch.allclose(W_U, folded.W_E.T, atol=1e-3)
    before = folded.W_E.clone()
    dla = attribute(folded, by="head")
    assert float(dla.gap) < 1e-4
    assert_close(dla.total[0, 0], difference(raw, TOKENS, 3, 6)[-1], 1e-4)
    assert torch.equal(folded.W_E, before)


@pytest.mark.full
@backends
def test_M10_a_model_that_is_loaded_again_and_again_is_freed_each_time(backend):
    alive = []
    for _ in range(10):
        model = rp.load(zoo.text_folder(), backend=backend)
        alive.append(weakref.ref(model))
        run = rp.capture(model, "When Mary and John")
        rp.direct_logit_attribution(run, " Mary", " John", by="head")
        report(ModelView(model))
        del model, run
    gc.collect()
    assert [reference() for reference in alive] == [None] * 10


# Files and pictures


def test_C06_a_picture_without_scripts_is_the_same_each_time(tmp_path, capsys):
    """The token grids of a page stand there without its scripts, so no viewer can lose them."""
    pages = []
    for name in ("one.html", "other.html"):
        argv = ["logit-lens", "--model", "demo", "--prompt", "When Mary and John went to"]
        assert main([*argv, "--html", str(tmp_path / name)]) == 0
        pages.append((tmp_path / name).read_text(encoding="utf-8"))
    capsys.readouterr()
    assert pages[0] == pages[1]
    static = re.sub(r"<script.*?</script>", "", pages[0], flags=re.S)
    assert not re.search(r"<iframe|<link|\bsrc=|https?://", static)
    assert "default-src 'none'" in static
    for text in ("resid_pre.0", "resid_post.3", " John", " went"):
        assert text in static


def test_C07_what_the_documents_name_is_found_at_the_root_of_the_package():
    """A move of a module breaks nobody's import: everything public has one stable name."""
    package = Path(rp.__file__).parent
    texts = [(package.parent / "README.md").read_text(encoding="utf-8")]
    texts += [path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))]
    named = {name for text in texts for name in re.findall(r"\brp\.([A-Za-z]\w*)", text)}
    assert len(named) > 20
    assert sorted(name for name in named if not hasattr(rp, name)) == []
    assert sorted(name for name in rp.__all__ if not hasattr(rp, name)) == []
    for fence in re.findall(r"```python\n(.*?)```", texts[0], flags=re.DOTALL):
        imports = re.findall(
            r"^\s*(?:from|import) (resid_patching[\w.]*)", fence, flags=re.MULTILINE
        )
        assert set(imports) <= {"resid_patching", "resid_patching.plots"}


@backends
def test_C08_a_path_run_keeps_what_it_reads_and_nothing_else(backend):
    model = zoo.fresh(backend)
    run, source = rp.capture(model, [TOKENS]), rp.capture(model, [TOKENS[::-1]])
    path = rp.Path(to="logits", using=rp.Resample(source), mlps="freeze")
    rp.ablate(run, ["0.1", "1.2"], path, metric=rp.logit_diff(3, 6))
    assert set(source._kept) == {hook_name(rp.parse(f"{layer}.0")) for layer in (0, 1)}
    assert len(run._kept) <= 4
    hidden = ("pattern", "scores", "hook_post", "result", "mlp")
    assert not [name for name in run._kept if any(word in name for word in hidden)]
