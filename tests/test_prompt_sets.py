"""Pairs of prompts: indirect objects that line up token by token, users' files, differences."""

import dataclasses
import json
import re
from collections import Counter

import pytest
import torch
import transformers
import zoo

import resid_patching as rp
from resid_patching.errors import AnswerWarning, PromptError
from resid_patching.prompt_sets import (
    Difference,
    PromptPairs,
    differences,
    indirect_object_prompts,
    read_pairs,
)
from resid_patching.prompt_sets import indirect_objects as words
from resid_patching.tokens import single_token, token_ids

ROLES = ("IO", "S1", "S1+1", "S2", "END")


@pytest.fixture(scope="module")
def demo():
    return rp.load("demo")


@pytest.fixture(scope="module")
def like_llama():
    """A tokenizer that puts a space before every text and a BOS of its own, and knows our words."""
    nouns = [*words._FIRST_NAMES, *words._PLACE_NAMES, *words._OBJECTS]
    texts = [text.format_map(_Anything()) for text in words._TEMPLATES]
    texts += [f"to {word} and {word} and the {word}" for word in nouns]
    tokenizer = zoo.metaspace_tokenizer().train_new_from_iterator([texts] * 20, 2000)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return rp.load(str(zoo.save(zoo.scratch() / "words_llama", config, tokenizer)))


class _Anything(dict):
    def __missing__(self, key):
        return "the"


def logit_differences(model, texts, pairs):
    view = rp.ModelView(model)
    logits = rp.capture(model, texts).logits_at(-1)[:, 0]
    rows = torch.arange(len(pairs))
    answers, foils = (
        torch.tensor([single_token(view, token) for token in tokens])
        for tokens in (pairs.answers, pairs.foils)
    )
    return logits[rows, answers] - logits[rows, foils]


def indirect(model, n=40, *, seed=0, corrupt="names", **options):
    return indirect_object_prompts(model, n, seed=seed, corrupt=corrupt, **options)


# Indirect objects


@pytest.mark.full
@pytest.mark.parametrize("corrupt", ["names", "swap"])
def test_the_demo_model_solves_every_template(demo, corrupt):
    pairs = indirect(demo, 160, corrupt=corrupt)
    base, source = (logit_differences(demo, x, pairs) for x in (pairs.base, pairs.source))
    assert bool((base > 0).all()) and float(base.mean()) > 8
    if corrupt == "swap":
        assert bool((source < 0).all())  # the answer is now the other one
    else:
        assert abs(float(source.mean())) < 2


@pytest.mark.full
def test_a_template_with_words_the_tokenizer_lacks_is_left_out(demo):
    firsts = {text.split()[0] for text in indirect(demo, 100).base}
    assert firsts == {"When", "After", "While", "As", "Then", "In", "Last", "At"}
    assert "Everyone agreed" not in " ".join(indirect(demo, 100).base)
    view = rp.ModelView(demo)
    for text in indirect(demo, 100).base:
        later = text.replace(",", "").replace(".", "").split()[1:]
        assert all(len(token_ids(view, f" {word}")) == 1 for word in later)


@pytest.mark.parametrize("prepend_bos", [None, False])
@pytest.mark.parametrize("corrupt", ["names", "swap"])
@pytest.mark.parametrize("which", ["demo", "like_llama"])
@pytest.mark.filterwarnings("ignore::resid_patching.errors.BosWarning")
def test_base_and_source_differ_at_the_named_positions_alone(request, which, corrupt, prepend_bos):
    model = request.getfixturevalue(which)
    pairs = indirect(model, corrupt=corrupt, prepend_bos=prepend_bos)
    base = rp.capture(model, pairs.base, prepend_bos=prepend_bos).prompts
    source = rp.capture(model, pairs.source, prepend_bos=prepend_bos).prompts
    assert base.lengths == source.lengths
    assert (base.bos_id is None) == (prepend_bos is False)
    changed = ("S2",) if corrupt == "swap" else ("IO", "S1", "S2")
    for row, found in enumerate(differences(base, source)):
        places = {name: pairs.positions[name][row] for name in ROLES}
        texts = base.token_texts[row]
        assert {d.position for d in found} == {places[name] for name in changed}
        assert texts[places["IO"]] == pairs.answers[row]
        assert texts[places["S1"]] == texts[places["S2"]] == pairs.foils[row]
        assert places["S1"] < places["S2"] < places["END"] == base.lengths[row] - 1
        assert places["S1+1"] == places["S1"] + 1
        assert (places["IO"] < places["S1"]) == (pairs.orders[row] == "ABBA")
    assert set(pairs.positions) == set(ROLES)


def test_swapping_the_subject_puts_the_recipient_there(demo):
    pairs = indirect(demo, corrupt="swap")
    source = rp.capture(demo, pairs.source).prompts.token_texts
    rows = range(len(pairs))
    assert [source[row][pairs.positions["S2"][row]] for row in rows] == list(pairs.answers)


def test_random_names_are_five_different_ones(demo):
    pairs = indirect(demo)
    source = rp.capture(demo, pairs.source).prompts.token_texts
    for row in range(len(pairs)):
        others = {source[row][pairs.positions[name][row]] for name in ("IO", "S1", "S2")}
        assert len(others | {pairs.answers[row], pairs.foils[row]}) == 5


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_both_orders_and_all_templates_take_turns(demo, n):
    pairs = indirect(demo, n)
    counts = Counter(pairs.orders)
    assert counts["ABBA"] - counts["BABA"] == n % 2
    firsts = Counter(text.split()[0] for text in pairs.base)
    assert max(firsts.values()) - min(firsts.values()) <= (2 if n > 2 else 0)
    assert len(firsts) == min(8, -(-n // 2)) and len(set(pairs.base)) == n


def test_every_name_has_a_space_before_it_and_is_one_token(demo):
    view = rp.ModelView(demo)
    for name in {*indirect(demo).answers, *indirect(demo).foils}:
        assert name[0] == " " and single_token(view, name) >= 0
    for template in words._TEMPLATES:
        assert not template.startswith("{")
        assert len(re.findall(r" \{(first|second|giver)\}", template)) == 3


def test_the_same_seed_gives_the_same_pairs_and_nothing_else_is_seeded(demo):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert indirect(demo) == indirect(demo)
    assert indirect(demo, seed=1).base != indirect(demo).base
    assert torch.equal(before, torch.random.get_rng_state())
    assert indirect(demo).how == (
        "40 indirect-object pairs, seed 0, three other names in the source"
    )


def test_no_prompt_comes_twice_until_all_have_come(demo, monkeypatch):
    monkeypatch.setattr(words, "_FIRST_NAMES", ["Mary", "John"])
    monkeypatch.setattr(words, "_PLACE_NAMES", ["store"])
    monkeypatch.setattr(words, "_OBJECTS", ["drink", "book"])
    monkeypatch.setattr(words, "_TEMPLATES", words._TEMPLATES[:2])
    possible = 2 * 1 * 2 * 2 * 2  # pairs of names, places, objects, templates, orders
    assert len(set(indirect(demo, possible, corrupt="swap").base)) == possible
    assert len(set(indirect(demo, possible + 5, corrupt="swap").base)) == possible


def test_too_few_names_is_an_error_that_counts_them(demo, monkeypatch):
    monkeypatch.setattr(words, "_FIRST_NAMES", ["Mary", "John", "Wilhelmina", "Tom", "Dan"])
    said = r"need 5 names .* 4 of our 5 are: Mary, John, Tom, Dan\. .*rp\.read_pairs"
    with pytest.raises(PromptError, match=said):
        indirect(demo)
    assert len(indirect(demo, corrupt="swap")) == 40
    with pytest.raises(PromptError, match="need 5 names"):
        indirect(rp.load(str(zoo.text_folder())))


def test_no_known_template_is_an_error(demo, monkeypatch):
    monkeypatch.setattr(words, "_TEMPLATES", words._TEMPLATES[-2:])
    with pytest.raises(PromptError, match="need 1 template .* 0 of our 2"):
        indirect(demo)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n": 0}, "whole number from 1; got 0"),
        ({"n": True}, "got True"),
    ],
)
def test_what_is_missing_or_wrong_is_said(demo, changes, said):
    with pytest.raises(PromptError, match=said):
        indirect(demo, **changes)


def test_corrupt_and_seed_must_be_given(demo):
    with pytest.raises(TypeError, match="corrupt"):
        indirect_object_prompts(demo, 4, seed=0)
    with pytest.raises(TypeError, match="seed"):
        indirect_object_prompts(demo, 4, corrupt="swap")


def test_names_that_are_not_where_they_were_put_are_reported(demo, monkeypatch):
    twice = "When {first} and {second} and {first} went to the {place}, {giver} gave a {object} to"
    monkeypatch.setattr(words, "_TEMPLATES", [twice])
    with pytest.raises(PromptError, match="not found where they were put"):
        indirect(demo)


# Differences


def prompts(model, *texts, **options):
    return rp.capture(model, list(texts), **options).prompts


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_P14_the_differing_position_counts_the_bos_and_is_shown_with_its_token(backend):
    model = zoo.text_model(backend)
    base, source = prompts(model, "3 + 5 ="), prompts(model, "1 + 5 =")
    assert differences(base, source) == [[Difference(1, "3", "1")]]
    base = prompts(model, "3 + 5 =", prepend_bos=False)
    source = prompts(model, "1 + 5 =", prepend_bos=False)
    assert differences(base, source) == [[(0, "3", "1")]]


def test_P09_unequal_token_counts_are_an_error_with_both_lengths_and_the_row(demo):
    base = prompts(demo, "When Mary went to", "When Mary and John went to the store")
    source = prompts(demo, "When John went to", "When Mary and John went to the old store")
    said = r"pair 1: the base has 9 tokens and the source 10.* differ at position 8, ' store' and"
    with pytest.raises(PromptError, match=said):
        differences(base, source)
    with pytest.raises(PromptError, match="agree as far as the shorter goes"):
        differences(prompts(demo, "When Mary"), prompts(demo, "When Mary went"))


def test_K19_a_name_that_begins_one_text_and_not_the_other_is_found_by_id(demo):
    """`Mary` at the very start is other tokens than ` Mary` later, though it reads alike."""
    base, source = prompts(demo, " Mary went"), prompts(demo, " John went")
    assert differences(base, source) == [[(1, " Mary", " John")]]
    bare, spaced = prompts(demo, "Mary went"), prompts(demo, " Mary went")
    assert differences(bare, spaced) == [[(1, "Mary", " Mary")]]


def test_a_row_is_its_own_source_where_nothing_differs(demo):
    base = prompts(demo, "When Mary went", "Then Tom and Mary went to the store")
    assert differences(base, base) == [[], []]


def test_tokens_that_read_alike_are_shown_with_their_ids(demo):
    base, source = prompts(demo, [5, 6]), prompts(demo, [5, 7])
    source = dataclasses.replace(source, token_texts=base.token_texts)
    text = base.token_texts[0][1]
    assert differences(base, source) == [[(1, f"{text} (6)", f"{text} (7)")]]


def test_one_source_is_needed_for_each_base(demo):
    with pytest.raises(PromptError, match="2 base prompts were given for 1 source"):
        differences(prompts(demo, "When", "Then"), prompts(demo, "When"))


# Pairs and files


def test_pairs_say_which_column_is_short():
    with pytest.raises(PromptError, match="2 base prompts were given, but 1 in source"):
        PromptPairs(["a", "b"], ["c"])
    with pytest.raises(PromptError, match=r"1 base prompts were given, but 2 in positions\['S2'\]"):
        PromptPairs(["a"], ["c"], positions={"S2": (1, 2)})
    with pytest.raises(PromptError, match="foils were given without answers"):
        PromptPairs(["a"], ["c"], foils=["d"])
    with pytest.raises(PromptError, match="at least one"):
        PromptPairs([], [])
    with pytest.raises(PromptError, match="base is a list of texts"):
        PromptPairs("a text", "another")


@pytest.fixture
def write(tmp_path):
    def write(text, name="pairs.tsv", encoding="utf-8"):
        file = tmp_path / name
        file.write_bytes(text.encode(encoding))
        return file

    return write


def test_a_tabbed_file_is_read_and_no_space_is_lost(write):
    file = write("\ufeffbase\tsource\tanswer\tfoil\r\nOne \t Two\t Mary\t John\r\n\r\na\tb\tc\td\n")
    pairs = read_pairs(file)
    assert pairs.base == ("One ", "a") and pairs.source == (" Two", "b")
    assert pairs.answers == (" Mary", "c") and pairs.foils == (" John", "d")
    assert pairs.how == "2 pairs of pairs.tsv" and pairs.positions == {}


def test_columns_come_in_any_order_and_answers_may_be_absent(write):
    pairs = read_pairs(write("source\tbase\nb\ta\n"))
    assert (pairs.base, pairs.source, pairs.answers, pairs.foils) == (("a",), ("b",), None, None)
    assert read_pairs(write("answer\tsource\tbase\n x\tb\ta")).answers == (" x",)


def test_json_lines_hold_what_tabs_cannot(write):
    rows = [{"base": "a\tb\nc", "source": "d\u2028", "answer": " é"}]
    file = write("\n".join(map(json.dumps, rows)) + "\n\n", "pairs.JSONL")
    pairs = read_pairs(str(file))
    assert (pairs.base, pairs.source, pairs.answers) == (("a\tb\nc",), ("d\u2028",), (" é",))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.tsv", "", "holds no pair"),
        ("p.tsv", "base\tsource\n", "holds no pair"),
        ("p.tsv", "When\tThen\n", "line 1: the columns are .* found 'When', 'Then'"),
        ("p.tsv", "base\tsource\tanwser\n", "'anwser'"),
        ("p.tsv", "base\tanswer\n", "line 1: the columns"),
        ("p.tsv", "base\tsource\tfoil\n", "line 1: the columns"),
        ("p.tsv", "base\tsource\tbase\n", "line 1: the columns"),
        ("p.tsv", "base\tsource\n\na\tb\na\n", "line 4: 2 cells were expected.*found 1"),
        ("p.tsv", "base\tsource\na\t\n", "line 2: source is a text .* found ''"),
        ("p.jsonl", "", "holds no pair"),
        ("p.jsonl", '{"base": "a", "source": "b"}\n{"base"', "line 2: this is no JSON"),
        ("p.jsonl", '["a", "b"]', "line 1: a JSON object was expected"),
        ("p.jsonl", '{"base": "a"}', "line 1: the columns are .* found 'base'"),
        ("p.jsonl", '{"base": "a", "source": 3}', "line 1: source is a text .* found 3"),
        (
            "p.jsonl",
            '{"base": "a", "source": "b"}\n{"base": "a", "source": "b", "answer": "c"}',
            "line 2: base, source were expected, as in the first line; found base, source, answer",
        ),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(write, name, text, said):
    with pytest.raises(PromptError, match=said):
        read_pairs(write(text, name))


def test_a_file_that_is_not_utf8_or_absent_is_refused(write, tmp_path):
    with pytest.raises(PromptError, match="is not UTF-8"):
        read_pairs(write("base\tsource\nFrançois\tb\n", encoding="latin-1"))
    with pytest.raises(FileNotFoundError):
        read_pairs(tmp_path / "none.tsv")


def test_K12_an_answer_without_its_space_is_kept_and_warned_of(write, demo):
    file = write("base\tsource\tanswer\nWhen Mary met\tWhen John met\tJohn\n")
    pairs = read_pairs(file)
    assert pairs.answers == ("John",)
    run = rp.capture(demo, pairs.base)
    view = rp.ModelView(demo)
    if len(token_ids(view, "John")) == 1:
        with pytest.warns(AnswerWarning, match="' John'"):
            rp.logit(pairs.answers).bind(run)
    else:
        with pytest.raises(rp.ResidPatchingError, match="' John'"):
            rp.logit(pairs.answers).bind(run)


# With the vocabularies of real models


@pytest.mark.once
@pytest.mark.full
@pytest.mark.shared
@pytest.mark.parametrize("corrupt", ["names", "swap"])
def test_every_template_is_used_with_the_vocabulary_of_gpt2(shared_dir, corrupt):
    folder = zoo.gpt2_tokenizer_folder(shared_dir / "data" / "gpt2_tokenizer")
    pairs = indirect(rp.load(str(folder)), 44, corrupt=corrupt)
    assert len({text.split()[0] for text in pairs.base}) == len(words._TEMPLATES)


@pytest.mark.real
def test_smollm2_solves_the_task(smollm2_dir):
    model = rp.load(str(smollm2_dir))
    pairs = indirect(model, 22)
    assert len({text.split()[0] for text in pairs.base}) == len(words._TEMPLATES)
    found = logit_differences(model, pairs.base, pairs)
    assert float((found > 0).double().mean()) > 0.85 and float(found.mean()) > 2
