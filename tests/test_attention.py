"""Attention patterns: what the model itself computed, and where each head looks."""

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching.errors import AddressError, HeadMismatchError, PositionError

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
HEADS = ["2.1", "0.3"]


def require_equal_to_the_cache(model, run, heads=HEADS):
    patterns = rp.attention_patterns(run, heads)
    assert patterns.unit == "probability" and patterns.heads == tuple(heads)
    for row, tokens in enumerate(zoo.RAGGED):
        cache, n = zoo.plain_cache(model, tokens), len(tokens)
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        for number, label in enumerate(heads):
            layer, head = map(int, label.split("."))
            alone = cache[f"blocks.{layer}.attn.hook_pattern"][0, head]
            shown = patterns.values[number, row]
            torch.testing.assert_close(shown[:n, :n][~future], alone[~future], rtol=0, atol=1e-12)
            assert shown[:n, :n][future].isnan().all()
            assert shown[n:].isnan().all() and shown[:, n:].isnan().all()
            assert patterns.row_sums[number, row, :n].sub(1).abs().max() < 1e-6
            assert patterns.row_sums[number, row, n:].isnan().all()
    return patterns


@pytest.mark.parametrize("grouped", [False, True], ids=["full", "grouped"])
@backends
def test_patterns_are_those_of_each_prompt_alone_in_the_models_own_cache(backend, grouped):
    model = zoo.build(backend, zoo.Cell(grouped=grouped))
    require_equal_to_the_cache(model, rp.capture(model, zoo.RAGGED))


def test_each_row_of_looks_is_the_largest_weight_of_its_query():
    patterns = rp.attention_patterns(rp.capture(zoo.build("bridge"), zoo.RAGGED), HEADS)
    frame = patterns.looks(k=2)
    columns = ["head", "prompt", "query", "query_token", "key", "key_token", "weight"]
    assert list(frame.columns) == columns
    assert len(frame) == len(HEADS) * len(zoo.RAGGED) * 2
    assert list(frame["head"].unique()) == HEADS
    for (head, prompt), rows in frame.groupby(["head", "prompt"]):
        last = len(zoo.RAGGED[prompt]) - 1
        weights = patterns.sel(head=head, batch=prompt)[last, : last + 1]
        expected = weights.sort(descending=True)
        assert rows["weight"].tolist() == expected.values[:2].tolist()
        assert rows["key"].tolist() == expected.indices[:2].tolist()
        assert set(rows["query"]) == {last}
        texts = patterns.token_texts[prompt]
        assert rows["key_token"].tolist() == [texts[key] for key in rows["key"]]
        assert set(rows["query_token"]) == {texts[last]}
    assert len(patterns.looks(k=1, query=None)) == len(HEADS) * sum(map(len, zoo.RAGGED))
    with pytest.raises(PositionError, match="query 3 does not exist.*0 to 2"):
        patterns.looks(query=3)


def test_patterns_are_read_back_as_written():
    patterns = rp.attention_patterns(rp.capture(zoo.build("bridge"), zoo.RAGGED), "1.0")
    again = rp.AttentionPatterns.from_json(patterns.to_json())
    assert again.axes == patterns.axes and again.token_texts == patterns.token_texts
    assert torch.equal(again.values.nan_to_num(-1), patterns.values.nan_to_num(-1))
    assert "0.0" not in repr(again) and "attention patterns of 1.0" in repr(again)
    assert "token there" in again._repr_html_()


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ("1.9", "1.9.pattern does not exist: layer 1 has heads 0 to 3"),
        ("7.0", "has layers 0 to 2"),
        ("mlp.1", "mlp.1 is not a head"),
        (["1.0", "1.0.pattern"], "given twice"),
        ([], "no head was given"),
    ],
)
def test_what_is_no_head_of_the_model_is_refused_by_name(heads, message):
    with pytest.raises(AddressError, match=message):
        rp.attention_patterns(rp.capture(zoo.build("bridge"), zoo.RAGGED), heads)


def test_a_model_without_the_hook_is_refused_by_name(monkeypatch):
    run = rp.capture(zoo.build("bridge"), zoo.RAGGED)
    points = dict(run.view.hook_points)
    del points["blocks.1.attn.hook_pattern"]
    monkeypatch.setattr(type(run.view), "hook_points", property(lambda view: points))
    with pytest.raises(AddressError, match="has no hook blocks.1.attn.hook_pattern"):
        rp.attention_patterns(run, "1.0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p * 1.5, "sum to more than 1"),
        (lambda p: -p, "negative weights"),
        (lambda p: p * torch.nan, "NaN"),
        (lambda p: p.flip(-1), "later tokens"),
    ],
)
def test_what_is_no_causal_pattern_is_refused(change, message, monkeypatch):
    run = rp.capture(zoo.build("bridge"), [[3, 1, 4, 1]])
    node = rp.parse("1.0.pattern")
    changed = change(run.fetch(node).clone())
    monkeypatch.setattr(type(run), "fetched", lambda run, address: changed)
    with pytest.raises(HeadMismatchError, match=f"1.0.pattern .*{message}"):
        rp.attention_patterns(run, "1.0")


def test_rows_that_sum_to_less_are_kept_and_the_plan_says_so(monkeypatch):
    run = rp.capture(zoo.build("bridge"), [[3, 1, 4, 1]])
    node = rp.parse("1.0.pattern")
    sunk = run.fetch(node).clone() * 0.75
    monkeypatch.setattr(type(run), "fetched", lambda run, address: sunk)
    patterns = rp.attention_patterns(run, "1.0")
    assert "rows sum to 0.75 or more: the rest goes to no token" in patterns.provenance.plan
    torch.testing.assert_close(patterns.row_sums, torch.full_like(patterns.row_sums, 0.75))
