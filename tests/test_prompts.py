"""Prompts: one layout whatever was given, the beginning-of-sequence token once, clear refusals."""

import re
import warnings

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

import resid_patching as rp
from resid_patching.errors import (
    BosWarning,
    PaddingWarning,
    PositionError,
    PromptError,
    TokenError,
)
from resid_patching.models import ModelView
from resid_patching.prompts import Prompts
from resid_patching.tokens import single_token, token_ids, token_text

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
kinds = pytest.mark.parametrize("kind", ["byte_level", "byte_level_left", "metaspace"])

pytestmark = pytest.mark.filterwarnings("error::resid_patching.errors.ResidPatchingWarning")


def prompts_of(model, given, **options):
    return rp.capture(model, given, **options).prompts


def rows_of(prompts):
    lengths = prompts.lengths
    return [row[:n] for row, n in zip(prompts.tokens.tolist(), lengths, strict=True)]


# Texts


TEXTS = ["When Mary and John went to the store", "The dog", "3 + 5 ="]


@kinds
@backends
def test_texts_become_the_ids_of_the_models_own_to_tokens(backend, kind):
    model = zoo.text_model(backend, kind)
    prompts = prompts_of(model, TEXTS)
    assert rows_of(prompts) == [model.to_tokens(text)[0].tolist() for text in TEXTS]
    assert prompts.texts == tuple(TEXTS)
    assert prompts.bos_id == model.tokenizer.bos_token_id
    assert len(set(prompts.lengths)) == 3


@kinds
@backends
def test_a_text_alone_is_a_batch_of_one(backend, kind):
    model = zoo.text_model(backend, kind)
    assert rows_of(prompts_of(model, TEXTS[0])) == rows_of(prompts_of(model, TEXTS[:1]))


@kinds
@backends
def test_the_token_texts_add_up_to_the_text(backend, kind):
    prompts = prompts_of(zoo.text_model(backend, kind), TEXTS)
    for text, tokens in zip(TEXTS, prompts.token_texts, strict=True):
        assert "".join(tokens[1:]).lstrip(" ") == text


@pytest.mark.parametrize("setting", [None, True, False])
@kinds
@backends
def test_the_beginning_of_sequence_token_is_put_once_or_not_at_all(backend, kind, setting):
    model = zoo.text_model(backend, kind)
    bos = model.tokenizer.bos_token_id
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BosWarning)
        for text in (TEXTS[0], model.tokenizer.bos_token + TEXTS[0]):
            row = rows_of(prompts_of(model, text, prepend_bos=setting))[0]
            expected = 0 if setting is False and text == TEXTS[0] else 1
            assert row.count(bos) == expected
            assert row[:1] == [bos] * expected or expected == 0


@backends
def test_a_tokenizer_that_puts_no_bos_by_default_gets_none(backend):
    model = rp.load(zoo.text_folder(), backend=backend)
    model.cfg.default_prepend_bos = False
    assert prompts_of(model, TEXTS).bos_id is None
    assert prompts_of(model, TEXTS, prepend_bos=True).bos_id == model.tokenizer.bos_token_id


@backends
def test_leaving_out_a_token_that_only_begins_texts_warns(backend):
    """Where one token both begins and ends texts, as GPT-2's, models are used either way."""
    model = zoo.text_model(backend, "metaspace")
    with pytest.warns(BosWarning, match="has a beginning-of-sequence token, '<s>'"):
        assert prompts_of(model, TEXTS[0], prepend_bos=False).bos_id is None
    model = zoo.text_model(backend, "byte_level")
    assert prompts_of(model, TEXTS[0], prepend_bos=False).bos_id is None  # and no warning


@kinds
@backends
def test_the_models_tokenizer_is_left_as_it_was(backend, kind):
    model = zoo.text_model(backend, kind)
    tokenizer = model.tokenizer
    before = (tokenizer.padding_side, tokenizer.pad_token, tokenizer("The dog")["input_ids"])
    prompts_of(model, TEXTS)
    assert model.tokenizer is tokenizer
    assert before == (
        tokenizer.padding_side,
        tokenizer.pad_token,
        tokenizer("The dog")["input_ids"],
    )


# Ids


@pytest.mark.parametrize(
    "given",
    [
        [3, 1, 4],
        (3, 1, 4),
        [[3, 1, 4]],
        torch.tensor([3, 1, 4]),
        torch.tensor([[3, 1, 4]]),
        torch.tensor([3, 1, 4], dtype=torch.int32),
    ],
    ids=["list", "tuple", "rows", "1-D tensor", "2-D tensor", "int32"],
)
@backends
def test_ids_are_taken_as_they_are(backend, given):
    prompts = prompts_of(zoo.build(backend), given)
    assert rows_of(prompts) == [[3, 1, 4]]
    assert prompts.texts == (None,) and prompts.starts == (0,)


def padded(rows, pad, side):
    width = max(map(len, rows))
    tokens, mask = [], []
    for row in rows:
        fill = width - len(row)
        left = side == "left"
        tokens.append([pad] * fill + row if left else row + [pad] * fill)
        mask.append([0] * fill + [1] * len(row) if left else [1] * len(row) + [0] * fill)
    return torch.tensor(tokens), torch.tensor(mask)


ragged = st.lists(
    st.lists(st.integers(0, zoo.D_VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=5
)


@given(ragged, st.sampled_from(["left", "right"]), st.integers(0, zoo.D_VOCAB - 1))
def test_padding_on_either_side_is_taken_off(rows, side, pad):
    """Whatever id pads, also one that occurs in the rows."""
    model = zoo.build(zoo.BACKENDS[0])
    tokens, mask = padded(rows, pad, side)
    prompts = prompts_of(model, tokens, mask=mask)
    assert rows_of(prompts) == rows
    assert prompts.mask.sum(1).tolist() == list(prompts.lengths) == [len(row) for row in rows]
    assert prompts.hash == prompts_of(model, rows).hash
    width = tokens.shape[1]
    starts = [width - len(row) if side == "left" else 0 for row in rows]
    assert list(prompts.starts) == starts


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_left"])
@backends
def test_without_a_mask_pads_are_found_as_transformer_lens_finds_them_and_said(backend, kind):
    """The pad token is also the BOS: the last of a run of leading ones is no padding."""
    model = zoo.text_model(backend, kind)
    rows = [model.to_tokens(text)[0].tolist() for text in TEXTS]
    tokens, _ = padded(rows, model.tokenizer.pad_token_id, model.tokenizer.padding_side)
    with pytest.warns(PaddingWarning, match="pad tokens in 2 of 3 rows are left out"):
        prompts = prompts_of(model, tokens)
    assert rows_of(prompts) == rows


@backends
def test_the_batch_that_to_tokens_makes_is_read_back(backend):
    for kind in ("byte_level", "byte_level_left", "metaspace"):
        model = zoo.text_model(backend, kind)
        with pytest.warns(PaddingWarning):
            prompts = prompts_of(model, model.to_tokens(TEXTS))
        assert rows_of(prompts) == rows_of(prompts_of(model, TEXTS))


@backends
def test_a_single_row_keeps_its_pad_tokens(backend):
    model = zoo.text_model(backend)
    pad = model.tokenizer.pad_token_id
    assert rows_of(prompts_of(model, torch.tensor([[5, 6, pad]]))) == [[5, 6, pad]]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "no prompts were given"),
        ([[]], {}, "prompt 0 has no tokens"),
        ([[1], []], {}, "prompt 1 has no tokens"),
        (torch.zeros(0, dtype=torch.long), {}, "prompt 0 has no tokens"),
        ([1, 2, 50], {}, "prompt 0, position 2: id 50 is outside the vocabulary of 50 tokens"),
        ([[1], [2, -1]], {}, "prompt 1, position 1: id -1 is outside"),
        ([1] * 65, {}, "prompt 0 has 65 tokens, but the context of {name} is 64 tokens"),
        ([[1], [1] * 70], {}, "prompt 1 has 70 tokens"),
        (torch.zeros(1, 2, 3, dtype=torch.long), {}, "1-D or 2-D tensor of whole numbers"),
        (torch.zeros(2, 3), {}, "1-D or 2-D tensor of whole numbers"),
        (torch.ones(2, 3, dtype=torch.bool), {}, "1-D or 2-D tensor of whole numbers"),
        ("text", {}, "has no tokenizer; give token ids"),
        (torch.ones(2, 3, dtype=torch.long), {"mask": torch.ones(2, 4)}, "the mask is (2, 4)"),
        (
            torch.ones(1, 3, dtype=torch.long),
            {"mask": torch.tensor([[1, 0, 1]])},
            "row 0: the mask has a hole",
        ),
        (
            torch.ones(2, 2, dtype=torch.long),
            {"mask": torch.tensor([[1, 1], [0, 0]])},
            "prompt 1 has no tokens",
        ),
    ],
)
@backends
def test_what_cannot_be_run_is_refused_before_the_model_runs(backend, given, options, message):
    model = zoo.fresh(backend)
    model.hook_dict["hook_embed"].add_hook(lambda tensor, hook: pytest.fail("the model ran"))
    with pytest.raises(PromptError, match=re.escape(message.format(name=model.cfg.model_name))):
        rp.capture(model, given, **options)


@backends
def test_a_prompt_as_long_as_the_context_runs(backend):
    run = rp.capture(zoo.build(backend), [[1] * zoo.N_CTX])
    assert float(rp.direct_logit_attribution(run, 3, 6).gap) < 1e-10


@backends
def test_prompts_made_once_may_be_used_again(backend):
    model = zoo.text_model(backend)
    prompts = prompts_of(model, TEXTS)
    assert prompts_of(model, prompts) is prompts


@backends
def test_prompts_of_another_model_are_checked_again(backend):
    short = zoo.build(backend)
    long = prompts_of(zoo.text_model(backend), [7, 300])
    with pytest.raises(PromptError, match="prompt 0, position 1: id 300 is outside the vocabulary"):
        rp.capture(short, long)


# Windows


def words(model):
    return model.to_tokens(zoo.CORPUS, prepend_bos=False, truncate=False)[0].tolist()


@pytest.mark.parametrize("length", [5, 16, 64])
@kinds
@backends
def test_windows_follow_each_other_and_each_begins_with_bos(backend, kind, length):
    model = zoo.text_model(backend, kind)
    found = rows_of(rp.windows(model, zoo.CORPUS, length=length))
    bos = model.tokenizer.bos_token_id
    assert all(row[0] == bos and len(row) == length for row in found[:-1])
    body = [token for row in found for token in row[1:]]
    expected = words(model)
    assert body == expected[: len(body)] and len(expected) - len(body) <= 1


@backends
def test_windows_without_bos_cover_the_text(backend):
    model = zoo.text_model(backend)
    found = rows_of(rp.windows(model, zoo.CORPUS, length=10, prepend_bos=False))
    assert [t for row in found for t in row] == words(model)[: sum(map(len, found))]
    assert all(len(row) == 10 for row in found[:-1])


@backends
def test_windows_may_be_limited_and_are_prompts(backend):
    model = zoo.text_model(backend)
    found = rp.windows(model, zoo.CORPUS, length=10, limit=3)
    assert isinstance(found, Prompts) and len(found) == 3
    dla = rp.direct_logit_attribution(rp.capture(model, found), " Mary", " John")
    assert dla.values.shape[1] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": zoo.CORPUS, "length": 65}, "windows of 65 tokens .* the context of .* is 64"),
        ({"text": zoo.CORPUS, "length": 1}, "room for it"),
        ({"text": "", "length": 10}, "at least one token"),
    ],
)
@backends
def test_windows_that_cannot_be_are_refused(backend, options, message):
    with pytest.raises(PromptError, match=message):
        rp.windows(zoo.text_model(backend), **options)


# Positions


@given(ragged, st.data())
def test_positions_count_real_tokens_from_either_end(rows, data):
    prompts = prompts_of(zoo.build(zoo.BACKENDS[0]), rows)
    wanted = [data.draw(st.integers(-len(row), len(row) - 1)) for row in rows]
    for form in (wanted, tuple(wanted), torch.tensor(wanted)):
        found = prompts.locate(form).index[:, 0].tolist()
        assert [row[i] for row, i in zip(rows, found, strict=True)] == [
            row[i] for row, i in zip(rows, wanted, strict=True)
        ]
    everywhere = prompts.locate(None)
    assert everywhere.valid.sum(1).tolist() == [len(row) for row in rows]


@given(ragged, st.integers(-12, 12))
def test_a_position_that_a_row_lacks_is_an_error_that_names_the_row(rows, position):
    prompts = prompts_of(zoo.build(zoo.BACKENDS[0]), rows)
    lacking = [i for i, row in enumerate(rows) if not -len(row) <= position < len(row)]
    if lacking:
        with pytest.raises(PositionError, match=f"prompt {lacking[0]} has") as caught:
            prompts.locate(position)
        assert isinstance(caught.value, IndexError)
    else:
        assert len(prompts.locate(position).index) == len(rows)


# Tokens as text, texts as tokens


@backends
def test_parts_of_a_character_are_shown_as_bytes(backend):
    prompts = prompts_of(zoo.text_model(backend), "a 😀 é b")
    pieces = prompts.token_texts[0][1:]
    assert "\\xf0" in "".join(pieces) and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces).encode().decode("unicode_escape").encode("latin-1").decode() == (
        "a 😀 é b"
    )


@kinds
@backends
def test_every_id_of_the_vocabulary_has_a_text(backend, kind):
    model = zoo.text_model(backend, kind)
    texts = [token_text(model.tokenizer, token) for token in range(model.cfg.d_vocab)]
    assert all(isinstance(text, str) and text for text in texts)
    assert all("\N{REPLACEMENT CHARACTER}" not in text for text in texts)


def test_without_a_tokenizer_ids_are_shown():
    prompts = prompts_of(zoo.build(zoo.BACKENDS[0]), zoo.RAGGED)
    assert prompts.token_texts[1] == ("27", "18", "28")


@kinds
@backends
def test_a_token_text_is_the_answer_it_came_from(backend, kind):
    view = ModelView(zoo.text_model(backend, kind))
    for text in (" Mary", " John", " the"):
        token = single_token(view, text)
        assert token_text(view.tokenizer, token) == text
        assert token_ids(view, text) == [token]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" basketball", r"the answer ' basketball' is \d+ tokens of .*, not one: ' "),
        ("", "the answer '' is 0 tokens of .*, not one: nothing"),
        (" Mary John", "is 2 tokens of .*, not one: ' Mary' .*' John' "),
    ],
)
@kinds
@backends
def test_an_answer_that_is_not_one_token_is_refused_with_its_pieces(backend, kind, text, message):
    view = ModelView(zoo.text_model(backend, kind))
    with pytest.raises(TokenError, match=message):
        single_token(view, text)


@backends
def test_an_answer_that_is_one_token_with_its_space_gets_the_hint(backend):
    view = ModelView(zoo.text_model(backend))
    with pytest.raises(TokenError, match="Did you mean ' Mary'"):
        single_token(view, "Mary")
    for text in (" basketball", "basketball"):
        with pytest.raises(TokenError) as caught:
            single_token(view, text)
        assert "Did you mean" not in str(caught.value)


@backends
def test_the_inside_of_a_word_is_named_where_texts_get_a_space_put_before_them(backend):
    """In a vocabulary like SentencePiece's, as in one of bytes."""
    for kind, text in (("metaspace", "M"), ("byte_level", "M")):
        view = ModelView(zoo.text_model(backend, kind))
        token = single_token(view, text)
        assert token_text(view.tokenizer, token) == text
        assert token == view.tokenizer.get_vocab()[text]


def test_answers_need_a_tokenizer_only_as_text():
    view = ModelView(zoo.build(zoo.BACKENDS[0]))
    assert single_token(view, 7) == 7
    with pytest.raises(PromptError, match="no tokenizer"):
        single_token(view, " Mary")
