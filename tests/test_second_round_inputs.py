"""Inputs that once came out wrong: pads, lengths, special tokens, spaces, the stand-in's errors.

The cases S09, S10, S12, S21 and S23 of the second round. The law behind most: what a prompt gives
in a batch is what it gives alone, and nothing about its tokens is guessed without a word.
"""

import functools
import re
import warnings

import pytest
import torch
import transformers
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

import resid_patching as rp
from resid_patching.cli import main
from resid_patching.errors import (
    AnswerWarning,
    HubUnreachableError,
    PaddingWarning,
    PromptError,
    SpecialTokenWarning,
)
from resid_patching.models import ModelView

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
sides = pytest.mark.parametrize("side", ["left", "right"])
pytestmark = pytest.mark.filterwarnings("error::resid_patching.errors.ResidPatchingWarning")

TEXTS = ["When Mary and John went to the store", "The dog", "3 + 5 ="]


def rows_of(prompts):
    lengths = prompts.lengths
    return [row[:n] for row, n in zip(prompts.tokens.tolist(), lengths, strict=True)]


# S09: ids padded at either end, without a mask


def padded(rows, pad, side):
    width = max(map(len, rows))
    fill = [[pad] * (width - len(row)) for row in rows]
    both = zip(fill, rows, strict=True)
    return torch.tensor([f + row if side == "left" else row + f for f, row in both])


@sides
@pytest.mark.parametrize("kind", ["byte_level", "byte_level_left", "metaspace"])
@backends
def test_s09_pads_are_found_at_either_end_whatever_the_tokenizers_own_side(backend, kind, side):
    """`byte_level`: pad, BOS and end of text are one token; `metaspace`: pad is the end of text."""
    model = zoo.text_model(backend, kind)
    tokens = model.to_tokens(TEXTS, padding_side=side)
    with pytest.warns(PaddingWarning, match=f"in 2 of 3 rows are left out, all on the {side}"):
        run = rp.capture(model, tokens)
    assert rows_of(run.prompts) == [model.to_tokens(text)[0].tolist() for text in TEXTS]
    batch = run.logits_at(-1)
    for number, text in enumerate(TEXTS):
        alone = rp.capture(model, text).logits_at(-1)
        torch.testing.assert_close(batch[number], alone[0], rtol=0, atol=1e-4)


@sides
@backends
def test_s09_pads_are_found_where_no_row_has_a_bos(backend, side):
    """As Hugging Face's tokenizer of GPT-2 gives them: a leading run is padding as a whole."""
    model = zoo.text_model(backend)
    rows = [model.to_tokens(text, prepend_bos=False)[0].tolist() for text in TEXTS]
    with pytest.warns(PaddingWarning, match=f"all on the {side}"):
        run = rp.capture(model, padded(rows, model.tokenizer.pad_token_id, side))
    assert rows_of(run.prompts) == rows and run.prompts.bos_id is None


@sides
@backends
def test_s09_a_prompt_of_the_bos_alone_keeps_it(backend, side):
    model = zoo.text_model(backend)
    bos = model.tokenizer.bos_token_id
    rows = [[bos, 40, 41, 42], [bos], [bos, 43]]
    with pytest.warns(PaddingWarning, match=f"5 pad tokens in 2 of 3 rows .* on the {side}"):
        run = rp.capture(model, padded(rows, bos, side))
    assert rows_of(run.prompts) == rows
    assert run.prompts.starts == ((0, 3, 2) if side == "left" else (0, 0, 0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 5, 6, 0], [0, 0, 5, 6]], "begins 1 and ends 1 of 2 rows"),
        ([[0, 0, 5, 6], [0, 0, 0, 7]], "every row begins with several"),
        ([[0, 5, 6, 0], [0, 7, 0, 0]], "is also the end-of-text token, and every row ends with it"),
        ([[0, 0], [0, 0]], "begins 2 and ends 2 of 2 rows"),
    ],
)
@backends
def test_s09_what_the_ids_do_not_tell_is_refused_and_a_mask_tells_it(backend, rows, message):
    """A prompt may itself begin or end with the token that pads, here GPT-2's only special one."""
    model = zoo.text_model(backend)
    assert {model.tokenizer.bos_token_id, model.tokenizer.pad_token_id} == {0}
    tokens = torch.tensor(rows)
    with pytest.raises(PromptError, match=f"{re.escape(message)}.* pass mask="):
        rp.capture(model, tokens)
    assert rows_of(rp.capture(model, tokens, mask=torch.ones_like(tokens)).prompts) == rows
    for row in rows:  # a batch of one keeps all tokens
        assert rows_of(rp.capture(model, torch.tensor([row])).prompts) == [row]


@backends
def test_s09_lists_of_ids_are_taken_as_they_are_and_said_to_look_padded(backend):
    model = zoo.text_model(backend)
    rows = [[0, 5, 6, 7], [0, 5, 0, 0]]
    with pytest.warns(PaddingWarning, match="it counts as a token here"):
        assert rows_of(rp.capture(model, rows).prompts) == rows
    for rows in ([[0, 5, 6, 7], [0, 5]], [[0, 5, 6], [0, 7, 8]], [[0, 5, 0]]):
        assert rows_of(rp.capture(model, rows).prompts) == rows  # and no warning


@pytest.mark.real
@pytest.mark.full
@sides
@backends
def test_s09_smollm2_says_paris_whatever_the_side(smollm2_dir, backend, side):
    model = smollm2(smollm2_dir, backend)
    texts = ["The capital of France is", "Once upon a time there was a little"]
    with pytest.warns(PaddingWarning, match=f"all on the {side}"):
        run = rp.capture(model, model.to_tokens(texts, padding_side=side))
    alone = rp.capture(model, texts[0]).logits_at(-1)
    torch.testing.assert_close(run.logits_at(-1)[:1], alone, rtol=0, atol=1e-3)
    assert model.tokenizer.decode([int(alone.argmax())]) == " Paris"


@functools.cache
def smollm2(folder, backend):
    return rp.load(folder, backend=backend)


# S10: rotary positions that depend on the longest prompt of a batch

ORIGINAL = 8
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [4.0, 8.0, 12.0, 16.0],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
BY_LAYER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": DYNAMIC,
}
_SHAPE = {
    "hidden_size": zoo.D_MODEL,
    "num_hidden_layers": zoo.N_LAYERS,
    "num_attention_heads": zoo.N_HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": zoo.D_MLP,
    "vocab_size": zoo.D_VOCAB,
    "rms_norm_eps": zoo.EPS,
}
ROPES = {
    "phi3_longrope": lambda: transformers.Phi3Config(
        **_SHAPE,
        max_position_embeddings=zoo.N_CTX,
        original_max_position_embeddings=ORIGINAL,
        pad_token_id=0,
        rope_parameters=LONGROPE,
    ),
    "llama_longrope": lambda: transformers.LlamaConfig(
        **_SHAPE, max_position_embeddings=zoo.N_CTX, rope_parameters=LONGROPE
    ),
    "llama_dynamic": lambda: transformers.LlamaConfig(
        **_SHAPE, max_position_embeddings=ORIGINAL, rope_parameters=DYNAMIC
    ),
    "gemma3_dynamic": lambda: transformers.Gemma3TextConfig(
        **_SHAPE,
        max_position_embeddings=ORIGINAL,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=BY_LAYER_TYPE,
    ),
}
ropes = pytest.mark.parametrize("name", [name for name in ROPES if name != "gemma3_dynamic"])
every_rope = pytest.mark.parametrize("name", ROPES)
LENGTHS = (5, 20, 11, 8, 9, 20, 3)
IDS = [[(7 * i + 3 * n + 1) % zoo.D_VOCAB for i in range(n)] for n in LENGTHS]


def fresh_rope(name):
    model = zoo.bridge(zoo.hugging_face(ROPES[name]()))
    model.cfg.n_ctx = zoo.N_CTX  # the dynamic kind is made for prompts beyond its own context
    return model


@functools.cache
def rope(name):
    return fresh_rope(name)


def close(batch, alone):
    # Hugging Face multiplies rotary angles in float32, and not alike for every length.
    torch.testing.assert_close(batch, alone, rtol=0, atol=1e-5)


@every_rope
def test_s10_the_logits_of_a_prompt_in_a_batch_are_those_of_a_new_model_on_it_alone(name):
    """Short after long too: Hugging Face keeps the frequencies of the longest prompt so far."""
    original = zoo.hugging_face(ROPES[name]())
    run = rp.capture(rope(name), IDS)
    last = run.logits_at(-1)[:, 0]
    for number, row in enumerate(IDS):
        new = zoo.bridge(original)
        with torch.no_grad():
            close(last[number], new(torch.tensor([row]), return_type="logits")[0, -1])


def readings(run):
    """What several analyses say of each prompt's last position, prompt first."""
    dla = rp.direct_logit_attribution(run, 3, 6, by="head")
    stream = rp.stream_report(run, positions=-1)
    lens = rp.logit_lens(run).kl
    last = [lens.values[:, n, length - 1] for n, length in enumerate(run.prompts.lengths)]
    return {
        "attribution": dla.values.movedim(1, 0),
        "lens": torch.stack(last),
        "stream": stream.stream_norm.movedim(1, 0),
    }


@ropes
def test_s10_attribution_lens_and_stream_of_a_prompt_are_as_alone(name):
    batch = readings(rp.capture(rope(name), IDS))
    for number, row in enumerate(IDS):
        for part, alone in readings(rp.capture(rope(name), [row])).items():
            close(batch[part][number], alone[0])


@pytest.mark.parametrize("route", ["plain", "replay", "full"])
@ropes
def test_s10_effects_on_a_prompt_are_as_alone_by_every_route(name, route):
    model = rope(name)
    source = [row[::-1] for row in IDS]

    def effects(base, other):
        run, how = rp.capture(model, base), rp.Resample(rp.capture(model, other))
        path = rp.Path(to="2.1.q", using=how, mlps="freeze")
        score = {"metric": rp.logit_diff(3, 6), "routes": [route]}
        return [rp.ablate(run, ["attn.1", "0.2"], h, **score).values for h in (how, path)]

    batch = effects(IDS, source)
    for number in range(len(IDS)):
        alone = effects(IDS[number : number + 1], source[number : number + 1])
        for together, one in zip(batch, alone, strict=True):
            close(together[:, number], one[:, 0])


def test_s10_the_last_short_window_of_a_text_is_as_alone():
    """Windows share a length but for the last, which here lies within the original context."""
    tokenizer = zoo.metaspace_tokenizer()
    shape = {**_SHAPE, "vocab_size": len(tokenizer), "max_position_embeddings": zoo.N_CTX}
    config = transformers.LlamaConfig(**shape, rope_parameters=LONGROPE)
    model = rp.load(zoo.save(zoo.scratch() / "longrope", config, tokenizer), backend="bridge")
    prompts = rp.windows(model, zoo.CORPUS[:76], length=12)
    assert prompts.lengths[0] == 12 and 1 < prompts.lengths[-1] <= ORIGINAL
    loss = rp.measure(rp.capture(model, prompts), rp.loss())
    for number, row in enumerate(rows_of(prompts)):
        close(loss[number], rp.measure(rp.capture(model, [row]), rp.loss())[0])


@every_rope
def test_s10_the_model_comes_back_as_it_was(name):
    """Frequencies that a long prompt leaves behind are neither left by a run nor seen by one."""
    model = fresh_rope(name)
    with torch.no_grad():
        model(torch.tensor([IDS[1]]))  # the caller's own long prompt
    before = zoo.snapshot(model)
    buffers = {key: (id(b), b._version) for key, b in model.named_buffers()}
    after_long = rp.capture(model, IDS[2]).logits_at(-1)
    rp.ablate(rp.capture(model, IDS), "attn.1", rp.Zero(), metric=rp.logit_diff(3, 6))
    assert list(zoo.differences(before, zoo.snapshot(model))) == []
    assert buffers == {key: (id(b), b._version) for key, b in model.named_buffers()}
    close(after_long, rp.capture(fresh_rope(name), IDS[2]).logits_at(-1))


@settings(max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 40))
def test_s10_chunks_are_all_rows_in_order_and_of_one_class_each(lengths, limit):
    view = ModelView(rope("llama_longrope"))
    prompts = rp.capture(view, [[1] * n for n in lengths]).prompts
    slices = list(prompts.chunks(limit, view.length_class))
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(len(lengths)))
    for part in (lengths[s] for s in slices):
        assert len({length > ORIGINAL for length in part}) == 1
        assert len(part) == 1 or max(part) * len(part) <= limit


@backends
def test_s10_lengths_do_not_keep_other_models_prompts_apart(backend):
    view = ModelView(zoo.build(backend))
    assert {view.length_class(n) for n in range(1, zoo.N_CTX)} == {()}


# S12: special tokens that a tokenizer puts around every text


def framed_tokenizer(template, **special):
    """A tokenizer of whole words whose template is put around every text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = [*special.values(), *"when mary and john went to the store".split()]
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=special["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(w, ids[w]) for w in template.split() if w != "$A"]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


BERT = (
    ("unk_token", "[UNK]"),
    ("pad_token", "[PAD]"),
    ("cls_token", "[CLS]"),
    ("sep_token", "[SEP]"),
)
LLAMA = (
    ("unk_token", "<unk>"),
    ("pad_token", "<pad>"),
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
)


@functools.cache
def framed_folder(template, special):
    tokenizer = framed_tokenizer(template, **dict(special))
    folder = zoo.scratch() / f"framed_{abs(hash(template))}"
    return zoo.save(folder, zoo.gpt2_config(len(tokenizer)), tokenizer)


@functools.cache
def framed_model(backend, template, special=BERT):
    """A GPT-2 with such a tokenizer; loading may replace the template, which is put back."""
    model = rp.load(framed_folder(template, special), backend=backend)
    given = framed_tokenizer(template, **dict(special))
    model.tokenizer.backend_tokenizer.post_processor = given.backend_tokenizer.post_processor
    own = model.tokenizer.encode("mary")
    model.cfg.tokenizer_appends_eos = own[-1] == model.tokenizer.eos_token_id
    model.cfg.tokenizer_prepends_bos = len(model.tokenizer.encode("")) > 0
    return model


@backends
def test_s12_cls_and_sep_stay_as_the_tokenizer_puts_them_and_the_scored_token_is_named(backend):
    model = framed_model(backend, "[CLS] $A [SEP]")
    with pytest.warns(
        SpecialTokenWarning, match=r"position -1 is '\[SEP\]'.* position -2;"
    ) as found:
        run = rp.capture(model, ["when mary and", "mary"])
    assert found[0].filename == __file__
    assert run.prompts.token_texts == (
        ("[CLS]", "when", "mary", "and", "[SEP]"),
        ("[CLS]", "mary", "[SEP]"),
    )
    assert rows_of(run.prompts)[0] == model.to_tokens("when mary and")[0].tolist()
    dla = rp.direct_logit_attribution(run, "john", "mary")
    logits = model(model.tokenizer("when mary and", return_tensors="pt")["input_ids"])[0, -1]
    ids = [model.tokenizer.get_vocab()[word] for word in ("john", "mary")]
    torch.testing.assert_close(dla.total[0, 0], logits[ids[0]] - logits[ids[1]], rtol=0, atol=1e-4)


@backends
def test_s12_what_stands_before_a_text_can_be_left_out_and_a_word_never_is(backend):
    model = framed_model(backend, "[CLS] $A [SEP]")
    with pytest.warns(SpecialTokenWarning):
        prompts = rp.capture(model, "when mary", prepend_bos=False).prompts
    assert prompts.token_texts == (("when", "mary", "[SEP]"),)
    model = framed_model(backend, "$A [SEP]")
    for setting in (None, False):
        with pytest.warns(SpecialTokenWarning):
            prompts = rp.capture(model, "when mary", prepend_bos=setting).prompts
        assert prompts.token_texts == (("when", "mary", "[SEP]"),)


@backends
def test_s12_a_tokenizer_that_only_begins_texts_says_nothing(backend):
    prompts = rp.capture(framed_model(backend, "[CLS] $A"), "when mary").prompts
    assert prompts.token_texts == (("[CLS]", "when", "mary"),)


@pytest.mark.parametrize("template", ["<s> $A </s>", "$A </s>"])
@backends
def test_s12_an_end_of_text_behind_every_text_is_left_off_and_said(backend, template):
    """One that the prompt itself ends with stays."""
    model = framed_model(backend, template, LLAMA)
    with pytest.warns(SpecialTokenWarning, match="puts '</s>' behind every text; it is left off"):
        prompts = rp.capture(model, ["when mary", "when</s>"]).prompts
    assert prompts.token_texts == (("<s>", "when", "mary"), ("<s>", "when", "</s>"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prompts = rp.capture(model, "when mary", prepend_bos=False).prompts
    assert prompts.token_texts == (("when", "mary"),)


@backends
def test_s12_every_window_is_framed_as_a_text_is(backend):
    model = framed_model(backend, "[CLS] $A [SEP]")
    with pytest.warns(SpecialTokenWarning):
        prompts = rp.windows(model, "when mary and john went to the store", length=5)
    assert prompts.token_texts == (
        ("[CLS]", "when", "mary", "and", "[SEP]"),
        ("[CLS]", "john", "went", "to", "[SEP]"),
        ("[CLS]", "the", "store", "[SEP]"),
    )


# S21: the stand-in is named by errors too


@pytest.mark.parametrize(
    "argv",
    [
        ["ablate", "zero", "9.9", "--prompt", "When", "--answer", " Mary", "--foil", " John"],
        ["dla", "--prompt", "When", "--answer", "basketball"],
        ["logit-lens", "--prompt", " When" * 2000],
        [
            "path-patch",
            "0.1",
            "--to",
            "9.9.q",
            "--mlps",
            "freeze",
            "--using",
            "zero",
            "--base",
            "When Mary",
            "--answer",
            " Mary",
            "--foil",
            " John",
        ],
    ],
    ids=["ablate", "dla", "logit-lens", "path-patch"],
)
@pytest.mark.once
def test_s21_errors_name_the_model_that_stood_in(argv, monkeypatch, capsys, tmp_path):
    load = rp.load

    def without_gpt2(name, **options):
        if name == "gpt2":
            raise HubUnreachableError("gpt2 is neither a folder nor in the local cache")
        return load(name, **options)

    monkeypatch.setattr("resid_patching.models.load", without_gpt2)
    target = tmp_path / "o.json"
    assert main([*argv, "--json", str(target)]) == 2
    out, err = capsys.readouterr()
    assert len(err.strip().splitlines()) == 1 and not out and not target.exists()
    note = "no --model was given and gpt2 is neither cached nor reachable: this is the shipped demo"
    assert note in err
    assert main([*argv, "--json", str(target), "--model", "demo"]) == 2
    assert note not in capsys.readouterr().err


# S23: a space at the end of a prompt

PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@backends
def test_s23_a_prompt_that_ends_in_a_space_warns_once_and_says_what_to_do(backend, kind):
    model = zoo.text_model(backend, kind)
    with pytest.warns(AnswerWarning, match=r"in a space \(2 of 3, .*Leave it out of the") as found:
        run = rp.capture(model, [PROMPT + " ", "The dog", PROMPT + "  "])
    assert len(found) == 1 and found[0].filename == __file__
    assert run.prompts.token_texts[0][-2:] == (" to", " ")  # and it stays as it was given


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@backends
def test_s23_no_other_end_of_a_prompt_warns(backend, kind):
    for end in ("", "\n", " \n", "\t", ":", " the"):
        rp.capture(zoo.text_model(backend, kind), PROMPT + end)


@backends
def test_s23_a_tokenizer_that_gives_every_space_a_token_or_none_does_not_warn(backend):
    from tokenizers import pre_tokenizers

    model = rp.load(zoo.text_folder(), backend=backend)
    model.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    prompts = rp.capture(model, "The dog ").prompts
    assert prompts.token_texts[0][-2:] == ("dog", " ") or prompts.token_texts[0][-1] == " "
    rp.capture(framed_model(backend, "[CLS] $A"), "when mary ")
