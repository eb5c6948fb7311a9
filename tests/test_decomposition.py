"""Parts: each is what a part of the model wrote, and together they are the stream."""

import re

import pytest
import torch
import zoo
from reference.attribution import written

import resid_patching as rp
from resid_patching.address import Stream
from resid_patching.errors import GapError
from resid_patching.models.view import ModelView

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
cells = pytest.mark.parametrize("cell", zoo.MATRIX, ids=str)
grains = pytest.mark.parametrize("by", zoo.GRAINS)


def assert_close(left, right, tolerance=1e-10):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance, equal_nan=True)


@cells
@backends
def test_parts_sum_to_the_last_stream_state(backend, cell):
    run = rp.capture(zoo.build(backend, cell), zoo.RAGGED)
    vectors = rp.decompose(run, by="component").vectors(None)
    stream = run.fetch(Stream(zoo.N_LAYERS - 1, "post"))
    for row, tokens in enumerate(zoo.RAGGED):
        size = len(tokens)
        assert_close(vectors[:, row, :size].sum(0), stream[row, :size])
        assert vectors[:, row, size:].isnan().all()


@grains
@backends
def test_each_part_is_the_vector_that_its_label_names(backend, by):
    model = zoo.build(backend) if backend == "hooked" else zoo.named("gpt2_untied")
    parts = rp.decompose(rp.capture(model, zoo.RAGGED), by=by)
    vectors = parts.vectors([2, 0, -1])
    weights = zoo.plain_weights(model)
    for row, (tokens, position) in enumerate(zip(zoo.RAGGED, [2, 0, 4], strict=True)):
        expected = written(zoo.plain_cache(model, tokens), weights, position, by)
        assert list(expected) == [str(writer) for writer in parts.writers]
        for number, vector in enumerate(expected.values()):
            assert_close(vectors[number, row, 0], vector)


def test_embeddings_are_the_rows_of_the_embedding_matrices():
    for model in (zoo.named("gpt2_untied"), *(zoo.build(b) for b in zoo.BACKENDS)):
        vectors = rp.decompose(rp.capture(model, zoo.RAGGED[0]), by="component").vectors(None)
        W_E = model.W_E.detach()
        assert_close(vectors[0, 0], W_E[zoo.RAGGED[0]])
        if ModelView(model).has_pos_embed:
            is_bridge = hasattr(model, "original_model")
            W_pos = model.original_model.transformer.wpe.weight if is_bridge else model.W_pos
            assert_close(vectors[1, 0], W_pos.detach()[: len(zoo.RAGGED[0])])


@pytest.mark.parametrize("by", ["head", "neuron"])
@cells
@backends
def test_finer_parts_sum_to_coarser_ones(backend, cell, by):
    run = rp.capture(zoo.build(backend, cell), zoo.RAGGED[0])
    coarse = rp.decompose(run, by="component")
    fine = rp.decompose(run, by=by)
    totals = {str(writer): 0.0 for writer in coarse.writers}
    for writer, vector in zip(fine.writers, fine.vectors(None), strict=True):
        totals[_whole(str(writer))] = totals[_whole(str(writer))] + vector
    for writer, vector in zip(coarse.writers, coarse.vectors(None), strict=True):
        assert_close(totals[str(writer)], vector)


def _whole(label):
    if found := re.fullmatch(r"(\d+)\.\d+|attn\.(\d+)(?:\.bias)?", label):
        return f"attn.{found[1] or found[2]}"
    if found := re.fullmatch(r"mlp\.(\d+)(?:\.(?:\d+|bias))?", label):
        return f"mlp.{found[1]}"
    return label


@pytest.mark.parametrize("by", ["head", "neuron"])
@backends
def test_vectors_and_their_projections_agree(backend, by):
    """The projected route never forms the vectors; both are the same numbers."""
    model = zoo.build(backend, zoo.Cell(grouped=True, parallel=True))
    run = rp.capture(model, zoo.RAGGED)
    parts = rp.decompose(run, by=by)
    directions = torch.randn(2, zoo.D_MODEL, dtype=torch.float64)
    which = torch.tensor([1, 0, 1])
    projected, states = parts.sweep(directions, which, None)
    vectors = parts.vectors(None)
    assert_close(projected, torch.einsum("cbnm,bm->cbn", vectors, directions[which]))
    assert_close(states, vectors.sum(0))


@backends
def test_parts_that_miss_the_stream_are_refused(backend, monkeypatch):
    run = rp.capture(zoo.build(backend), zoo.RAGGED)
    parts = rp.decompose(run, by="head")
    monkeypatch.setattr(ModelView, "b_O", lambda self, layer: torch.zeros(zoo.D_MODEL))
    if backend == "hooked":  # StableLM has no output bias to lose
        with pytest.raises(GapError, match="differ from its last stream state"):
            parts.vectors(-1)
    monkeypatch.setattr(
        ModelView, "W_O", lambda self, layer: 1.01 * self.model.blocks[layer].attn.W_O
    )
    with pytest.raises(GapError, match="differ from its last stream state"):
        parts.vectors(-1)


@backends
def test_decomposing_a_run_says_what_it_holds(backend):
    run = rp.capture(zoo.build(backend), zoo.RAGGED)
    assert "Parts(" in repr(rp.decompose(run, by="head"))
    assert (
        len(rp.decompose(run, by="neuron").writers)
        == len(rp.decompose(run, by="component").writers) + zoo.N_LAYERS * zoo.D_MLP
    )
