"""Public names of before, which work for one more version."""

import pytest
import torch
import zoo

import resid_patching as rp


def paths(ends):
    run = rp.capture(zoo.fresh_named("gpt2_untied"), torch.tensor([[3, 1, 4, 1, 5]]))
    return rp.ablate(run, ["0.1"], rp.Path(ends, rp.Zero(), "freeze"), metric=rp.logit_diff(3, 6))


def test_readers_are_receivers():
    with pytest.warns(DeprecationWarning, match="readers is now resid_patching.receivers"):
        ends = rp.readers("1.1.q", "logits")
    assert ends == rp.receivers("1.1.q", "logits")
    effect = paths(ends)
    with pytest.warns(DeprecationWarning, match="Effect.readers is now"):
        assert effect.readers == ("1.1.q", "logits")
    with pytest.warns(DeprecationWarning, match="Effect.reader is now"):
        assert effect.reader("1.1.q").values.equal(effect.receiver("1.1.q").values)
    with pytest.warns(DeprecationWarning, match="the axis reader is now receiver"):
        assert effect.sel(reader="1.1.q").equal(effect.sel(receiver="1.1.q"))


def test_a_file_of_before_is_read():
    effect = paths(rp.receivers("1.1.q", "logits"))
    body = effect.to_json().replace('"axis": "receiver"', '"axis": "reader"')
    body = body.replace('"version": 2', '"version": 1')  # without a checksum
    assert rp.Effect.from_json(body).receivers == ("1.1.q", "logits")
