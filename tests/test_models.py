"""Models: what is loaded, what is read of it, and what is refused by name."""

import gc
import shutil
import warnings
import weakref

import pytest
import torch
import transformers
import zoo

import resid_patching as rp
from resid_patching.address import Stream, hook_name
from resid_patching.errors import (
    AddressError,
    BackendWarning,
    HeadMismatchError,
    HookNotFiredError,
    ModelChangedError,
    ModelNotFoundError,
    NeuronMismatchError,
    ReadoutMismatchError,
    StreamMismatchError,
    TrainingModeError,
    UnsupportedModelError,
)
from resid_patching.models import ModelView, norm, report

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
cells = pytest.mark.parametrize("cell", zoo.MATRIX, ids=str)
needs_hooked = pytest.mark.skipif(
    not zoo.HAS_HOOKED, reason="HookedTransformer left in TransformerLens 4"
)
CLASSES = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}
TOKENS = [3, 1, 4, 1, 5, 9]


def assert_close(left, right, tolerance):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def largest_gap(model, by="component", tokens=TOKENS):
    run = rp.capture(model, tokens)
    dla = rp.direct_logit_attribution(run, 3, 6, by=by, positions=None)
    return float(dla.gap.max())


# Loading from a folder


FOLDERS = {
    "gpt2": lambda: zoo.gpt2_config(),
    "gpt2_tied": lambda: zoo.gpt2_config(tie_word_embeddings=True),
    "llama": lambda: zoo.CONFIGS["llama_grouped"](),
    "llama_tied": lambda: transformers.LlamaConfig(
        **{**zoo.CONFIGS["llama_grouped"]().to_dict(), "tie_word_embeddings": True}
    ),
    "neox": lambda: zoo.CONFIGS["neox_parallel"](),
}


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request, tmp_path_factory):
    return zoo.save(tmp_path_factory.mktemp(request.param), FOLDERS[request.param]())


@pytest.mark.parametrize("processing", ["raw", "folded"])
@backends
def test_a_folder_is_loaded_and_predicts_what_hugging_face_predicts(folder, backend, processing):
    model = rp.load(folder, backend=backend, processing=processing)
    assert type(model).__name__ == CLASSES[backend]
    original = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = original(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    assert_close(zoo.plain_logits(model, TOKENS).log_softmax(-1), expected, 1e-4)

    view = ModelView(model)
    state = report(view).processing
    assert (str(state) == "raw") == (processing == "raw")
    assert state.norms_folded == (processing == "folded")
    assert view.name == folder.name and view.tokenizer is None
    assert not model.training
    for by in zoo.GRAINS:
        assert largest_gap(model, by) < 1e-4


@backends
def test_weights_come_unprocessed(folder, backend):
    W_E = rp.load(folder, backend=backend).W_E
    original = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(W_E, original.get_input_embeddings().weight)


def test_both_backends_give_the_same_attribution(folder):
    runs = [
        rp.capture(rp.load(folder, backend=b, dtype=torch.float64), TOKENS) for b in zoo.BACKENDS
    ]
    found = [rp.direct_logit_attribution(run, 3, 6, by="head", positions=None) for run in runs]
    for other in found[1:]:
        assert found[0].components == other.components
        assert_close(found[0].values, other.values, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@backends
def test_the_dtype_is_the_one_that_was_asked_for(backend, dtype):
    model = zoo.text_model(backend, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert ModelView(model).dtype == dtype
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert ModelView(model).compute_dtype == expected


def test_without_a_backend_hooked_transformer_comes_first_where_it_exists():
    model = rp.load(zoo.text_folder())
    assert type(model).__name__ == CLASSES[zoo.BACKENDS[0]]


@backends
def test_the_tokenizer_of_the_folder_comes_along(backend):
    model = zoo.text_model(backend)
    assert model.to_string(model.to_tokens("The dog", prepend_bos=False)[0]) == "The dog"
    assert model.tokenizer.bos_token == "<|endoftext|>"


@backends
def test_a_path_may_be_a_path_a_text_or_relative(backend, monkeypatch):
    folder = zoo.text_folder()
    monkeypatch.chdir(folder.parent)
    expected = zoo.plain_logits(zoo.text_model(backend), TOKENS)
    for spelling in (folder, str(folder), folder.name, f"./{folder.name}", f"{folder}/"):
        assert_close(zoo.plain_logits(rp.load(spelling, backend=backend), TOKENS), expected, 0)


@pytest.mark.parametrize("name", ["my-llama-2", "bert_gemma", "t5"])
@backends
def test_words_in_a_path_do_not_decide_the_architecture(backend, name, tmp_path):
    folder = tmp_path / "llama" / name
    shutil.copytree(zoo.text_folder(), folder)
    model = rp.load(folder, backend=backend)
    assert type(model).__name__ == CLASSES[backend]
    assert ModelView(model).has_pos_embed and ModelView(model).final_norm.kind == "LN"
    assert_close(
        zoo.plain_logits(model, TOKENS), zoo.plain_logits(zoo.text_model(backend), TOKENS), 0
    )


@needs_hooked
def test_what_hooked_transformer_cannot_build_becomes_a_bridge_and_says_so(tmp_path):
    folder = zoo.save(tmp_path / "falcon", zoo.CONFIGS["falcon"]())
    match = "HookedTransformer cannot build .* loaded as a"
    with pytest.warns(BackendWarning, match=match) as caught:
        model = rp.load(folder)
    assert caught[0].filename == __file__
    assert type(model).__name__ == "TransformerBridge"
    assert largest_gap(model) < 1e-4
    with pytest.raises(UnsupportedModelError, match=r"cannot build .*Use backend='bridge'"):
        rp.load(folder, backend="hooked")


@needs_hooked
def test_a_conversion_that_predicts_otherwise_is_not_handed_out(tmp_path, monkeypatch):
    from transformer_lens import loading_from_pretrained

    convert = loading_from_pretrained.get_pretrained_state_dict

    def wrong(*args, **options):
        state = convert(*args, **options)
        state["blocks.1.attn.W_V"] = state["blocks.1.attn.W_V"] * 1.1
        return state

    monkeypatch.setattr(loading_from_pretrained, "get_pretrained_state_dict", wrong)
    with pytest.raises(UnsupportedModelError, match="does not predict what Hugging Face"):
        rp.load(zoo.text_folder(), backend="hooked")


@pytest.mark.skipif(zoo.HAS_HOOKED, reason="this TransformerLens has HookedTransformer")
def test_asking_for_hooked_transformer_where_it_is_gone_says_what_to_do():
    with pytest.raises(UnsupportedModelError, match="left in version 4.*Use backend='bridge'"):
        rp.load(zoo.text_folder(), backend="hooked")


@backends
def test_loading_prints_nothing_and_leaves_settings_alone(backend, capsys):
    import huggingface_hub.constants as constants

    before = (constants.HF_HUB_OFFLINE, list(warnings.filters), torch.get_default_dtype())
    random_state = torch.random.get_rng_state()
    rp.load(zoo.text_folder(), backend=backend)
    assert capsys.readouterr().out == ""
    assert before == (constants.HF_HUB_OFFLINE, list(warnings.filters), torch.get_default_dtype())
    assert torch.equal(random_state, torch.random.get_rng_state())


def test_a_folder_that_is_none_is_named(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    for path, message in (
        (empty, "is a folder without config.json"),
        (file, "is a file; a Hugging Face model folder is needed"),
        (tmp_path / "missing", "there is no model folder"),
        ("./missing", "there is no model folder './missing'"),
        ("~/missing/model", "there is no model folder"),
        ("a/b/c", "there is no model folder"),
        ("Café", "there is no model folder 'Café'"),  # no name that the hub allows
        ("-5", "there is no model folder '-5'"),
        ("", "there is no model folder ''"),
    ):
        with pytest.raises(ModelNotFoundError, match=message) as caught:
            rp.load(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "no_such_architecture"}'),
        ("model.safetensors", "these are no weights"),
        ("tokenizer.json", "{"),
    ],
)
@backends
def test_a_damaged_folder_is_one_line(backend, tmp_path, file, text):
    folder = tmp_path / "damaged"
    shutil.copytree(zoo.text_folder(), folder)
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises((UnsupportedModelError, ModelNotFoundError)) as caught:
        rp.load(folder, backend=backend)
    assert "damaged" in str(caught.value) and "\n" not in str(caught.value)


# What is read of a model


@cells
@backends
def test_the_view_states_the_facts_of_the_model(backend, cell):
    view = ModelView(zoo.build(backend, cell))
    assert view.final_norm.kind == cell.norm
    assert view.final_norm.eps == zoo.EPS
    assert view.parallel == cell.parallel
    assert (view.n_heads, view.n_kv_heads) == (zoo.N_HEADS, 2 if cell.grouped else zoo.N_HEADS)
    assert (view.n_layers, view.d_model) == (zoo.N_LAYERS, zoo.D_MODEL)
    assert (view.d_vocab, view.n_ctx) == (zoo.D_VOCAB, zoo.N_CTX)
    assert [view.n_neurons(layer) for layer in range(zoo.N_LAYERS)] == [zoo.D_MLP] * zoo.N_LAYERS
    assert view.softcap is None and not view.attn_only
    assert view.has_pos_embed == (backend == "hooked")
    assert view.kind == CLASSES[backend]

    state = report(view).processing
    assert state.norms_folded == state.unembed_centred == cell.folded
    assert state.writes_centred == (cell.folded and cell.norm == "LN")
    assert state.values_folded == cell.folded
    assert (str(state) == "raw") != cell.folded
    assert report(view).failures == {}


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("gpt2", {"kind": "LN", "parallel": False, "has_pos_embed": True, "n_kv_heads": 4}),
        ("neox_parallel", {"kind": "LN", "parallel": True, "has_pos_embed": False}),
        ("neox_sequential", {"kind": "LN", "parallel": False}),
        ("llama_grouped", {"kind": "RMS", "n_kv_heads": 2, "has_pos_embed": False}),
        ("gemma", {"kind": "RMS", "n_kv_heads": 1}),
        ("falcon", {"kind": "LN", "parallel": True, "n_kv_heads": 1}),
        ("gemma2", {"kind": "RMS", "softcap": zoo.SOFTCAP}),
    ],
)
def test_the_view_states_the_facts_of_known_architectures(name, facts):
    view = ModelView(zoo.named(name))
    assert {"kind": view.final_norm.kind} == {"kind": facts.pop("kind")}
    assert {fact: getattr(view, fact) for fact in facts} == facts


@cells
@backends
def test_our_readout_of_the_last_state_is_the_models_logits(backend, cell):
    model = zoo.build(backend, cell)
    stream = zoo.plain_cache(model, TOKENS)[f"blocks.{zoo.N_LAYERS - 1}.hook_resid_post"]
    ours = ModelView(model).readout(stream)[0].detach()
    assert_close(ours, zoo.plain_logits(model, TOKENS), 1e-10)


@backends
def test_a_model_that_is_processed_later_is_read_anew(backend):
    if backend == "hooked":
        model = zoo.fresh(backend)
        process = model.process_weights_
    else:
        model = zoo.fresh_named("gpt2")
        process = model.enable_compatibility_mode
    run = rp.capture(model, TOKENS)
    raw = rp.direct_logit_attribution(run, 3, 6)
    process()
    with pytest.raises(ModelChangedError, match="changed since this run was captured"):
        rp.direct_logit_attribution(run, 3, 6)
    folded = rp.direct_logit_attribution(rp.capture(model, TOKENS), 3, 6)
    assert raw.provenance.processing == "raw"
    assert "norms folded" in folded.provenance.processing
    assert_close(raw.total, folded.total, 1e-5)
    assert float((raw.values - folded.values).abs().max()) > 1e-2


@backends
def test_a_weight_that_is_edited_is_read_anew(backend):
    model = zoo.fresh(backend)
    run = rp.capture(model, TOKENS)
    before = rp.direct_logit_attribution(run, 3, 6, by="head")
    with torch.no_grad():
        if backend == "hooked":
            model.blocks[2].attn.W_O.mul_(2)
        else:
            model.blocks[2].attn.o.original_component.weight.mul_(2)
    with pytest.raises(ModelChangedError, match="has other values"):
        rp.direct_logit_attribution(run, 3, 6, by="head")
    after = rp.direct_logit_attribution(rp.capture(model, TOKENS), 3, 6, by="head")
    assert float(after.gap) < 1e-10
    assert float((after.values - before.values).abs().max()) > 1e-2


# What is refused, and what then still works


def test_an_encoder_is_refused_by_name():
    with pytest.raises(StreamMismatchError) as caught:
        rp.capture(zoo.named("bert"), TOKENS)
    assert isinstance(caught.value, NotImplementedError)
    assert "TransformerBridge" in str(caught.value) or "encoder" in str(caught.value)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
def test_a_norm_after_the_sublayer_allows_components_and_refuses_heads_and_neurons(name):
    model = zoo.named(name)
    assert largest_gap(model) < 1e-10
    for by, error in (("head", HeadMismatchError), ("neuron", NeuronMismatchError)):
        with pytest.raises(error, match=r"norm after the sublayer.*Use by='component'"):
            largest_gap(model, by)


def test_a_mixture_of_experts_allows_heads_and_refuses_neurons():
    model = zoo.named("mixtral", dtype=torch.float32)
    assert largest_gap(model) < 1e-4 and largest_gap(model, "head") < 1e-4
    with pytest.raises(NeuronMismatchError, match="Use by='component'"):
        largest_gap(model, "neuron")


@pytest.mark.parametrize("name", ["granite", "cohere"])
def test_a_scale_on_the_logits_is_refused_by_name(name):
    with pytest.raises(ReadoutMismatchError, match="rescales its logits after the unembedding"):
        rp.capture(zoo.named(name), TOKENS)


class Halved(torch.nn.Module):
    """A hook point whose value is halved after the hooks saw it."""

    def __init__(self, point):
        super().__init__()
        self.point = point

    def forward(self, tensor):
        return self.point(tensor) / 2


@pytest.mark.parametrize("part", ["attn", "mlp"])
@backends
def test_an_output_that_is_not_the_added_term_is_refused_by_name(backend, part):
    model = zoo.fresh(backend)
    block = model.blocks[1]
    if backend == "hooked":
        setattr(block, f"hook_{part}_out", Halved(getattr(block, f"hook_{part}_out")))
    else:

        def halve(module, inputs, output):
            is_tuple = isinstance(output, tuple)
            return (output[0] / 2, *output[1:]) if is_tuple else output / 2

        getattr(block, part).register_forward_hook(halve)
    state = "resid_mid" if part == "attn" else "resid_post"
    message = rf"layer 1: .*{part}_out = {state} fails by .*not what is added to the stream"
    with pytest.raises(StreamMismatchError, match=message):
        rp.capture(model, TOKENS)


@backends
def test_a_stream_that_changes_between_blocks_is_refused(backend):
    model = zoo.fresh(backend)

    def shift(module, inputs, output):
        return (output[0] + 1, *output[1:]) if isinstance(output, tuple) else output + 1

    model.blocks[1].register_forward_hook(shift)
    with pytest.raises(StreamMismatchError, match="layer 1: resid_post = resid_pre of the next"):
        rp.capture(model, TOKENS)


@backends
def test_a_final_norm_that_we_read_wrongly_is_refused(backend, monkeypatch):
    model = zoo.fresh(backend)
    monkeypatch.setattr(norm, "_eps", lambda cfg, module: 0.5)
    with pytest.raises(ReadoutMismatchError, match="final norm and unembedding of the last"):
        rp.capture(model, TOKENS)


def test_dropout_is_refused_until_eval():
    model = zoo.fresh_named("gpt2")
    run = rp.capture(model, TOKENS)
    model.train()
    for call in (lambda: rp.capture(model, TOKENS), lambda: rp.decompose(run, by="head")):
        with pytest.raises(TrainingModeError, match="Call model.eval"):
            call()
    assert model.training
    model.eval()
    assert largest_gap(model) < 1e-10


def test_a_model_in_training_mode_without_dropout_is_welcome():
    model = zoo.fresh_named("llama_grouped").train()
    assert largest_gap(model) < 1e-10
    assert model.training


@backends
def test_heads_and_their_bias_are_the_attention_output(backend):
    for cell in zoo.MATRIX:
        model = zoo.build(backend, cell)
        run = rp.capture(model, TOKENS)
        parts = rp.decompose(run, by="head")
        heads = parts.vectors(None)
        for layer in range(zoo.N_LAYERS):
            rows = [
                number
                for number, writer in enumerate(parts.writers)
                if str(writer).startswith((f"{layer}.", f"attn.{layer}."))
            ]
            assert len(rows) == zoo.N_HEADS + 1
            total = heads[rows].sum(0)
            assert_close(total, run.fetch(rp.parse(f"attn.{layer}")), 1e-10)


@backends
def test_the_middle_of_a_layer_exists_only_where_attention_comes_before_the_mlp(backend):
    sequential = rp.capture(zoo.build(backend), TOKENS)
    middle = sequential.fetch(Stream(1, "mid"))
    parts = (Stream(1, "pre"), rp.parse("attn.1"))
    assert_close(middle, sum(sequential.fetch(part) for part in parts), 1e-10)
    parallel = rp.capture(zoo.build(backend, zoo.Cell(parallel=True)), TOKENS)
    with pytest.raises(AddressError, match="has no hook blocks.1.hook_resid_mid"):
        parallel.fetch(Stream(1, "mid"))


# Memory


@backends
def test_a_model_is_freed_with_its_last_reference(backend):
    model = zoo.fresh(backend)
    alive = weakref.ref(model)
    run = rp.capture(model, TOKENS)
    dla = rp.direct_logit_attribution(run, 3, 6, by="head")
    del model, run
    gc.collect()
    assert alive() is None
    assert float(dla.gap) < 1e-10


def test_a_model_that_was_refused_is_freed_too():
    """Whoever kept the error that was raised would keep the model with it."""
    model = zoo.fresh_named("olmo2")
    alive = weakref.ref(model)
    for _ in range(2):
        with pytest.raises(HeadMismatchError):
            rp.decompose(rp.capture(model, TOKENS), by="head")
    del model
    gc.collect()
    assert alive() is None


# Passes that end before the unembedding


@backends
def test_a_pass_of_the_blocks_reads_the_same_and_leaves_the_unembedding_out(backend):
    view = ModelView(zoo.build(backend))
    tokens = torch.tensor([TOKENS])
    whole, short, unembedded = {}, {}, []
    names = [hook_name(Stream(layer, "post")) for layer in range(view.n_layers)]
    view.forward(tokens, {name: keep(whole, name) for name in names})
    handle = view.model.unembed.register_forward_hook(lambda *_: unembedded.append(True))
    try:
        before = zoo.snapshot(view.model)
        view.forward_blocks(tokens, {name: keep(short, name) for name in names})
        assert not list(zoo.differences(before, zoo.snapshot(view.model)))
    finally:
        handle.remove()
    assert not unembedded
    for name in names:
        assert torch.equal(whole[name], short[name])
    assert torch.equal(view.forward(tokens, {}), view.model(tokens))  # and the next one is whole


@backends
def test_a_receiver_that_fails_in_a_pass_of_the_blocks_leaves_the_model_as_it_was(backend):
    view = ModelView(zoo.build(backend))

    def fail(activation):
        raise ZeroDivisionError

    before = zoo.snapshot(view.model)
    with pytest.raises(ZeroDivisionError):
        view.forward_blocks(torch.tensor([TOKENS]), {hook_name(Stream(1, "pre")): fail})
    assert not list(zoo.differences(before, zoo.snapshot(view.model)))


@backends
def test_hooks_of_the_caller_see_the_whole_pass(backend):
    model = zoo.build(backend)
    seen = []
    with model.hooks(fwd_hooks=[("ln_final.hook_normalized", lambda x, hook: seen.append(x))]):
        rp.capture(model, [TOKENS]).fetch(Stream(0, "post"))
    assert seen


@backends
def test_a_hook_that_does_not_fire_before_the_unembedding_is_an_error(backend):
    view = ModelView(zoo.build(backend))
    with pytest.raises(HookNotFiredError, match="never fired"):
        view.forward_blocks(torch.tensor([TOKENS]), {"unembed.hook_out": lambda x: None})


def keep(found, name):
    def receiver(activation):
        found[name] = activation.clone()

    return receiver


def edit_in_place(model):
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)


def replace_a_parameter(model):
    owner = next(module for module in model.modules() if module._parameters)
    name = next(iter(owner._parameters))
    owner._parameters[name] = torch.nn.Parameter(owner._parameters[name].detach() + 1)


def replace_a_module(model):
    model.blocks[1] = torch.nn.Identity()


def give_a_leaf_a_child(model):
    leaf = next(module for module in model.modules() if not module._modules)
    leaf.add_module("extra", torch.nn.Linear(2, 2))


def give_a_weightless_module_a_weight(model):
    bare = next(module for module in model.modules() if not module._parameters)
    bare.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))


def add_a_hook(model):
    model.blocks[0].hook_resid_pre.add_hook(lambda tensor, hook: None)


@backends
@pytest.mark.parametrize(
    "change",
    [
        edit_in_place,
        replace_a_parameter,
        replace_a_module,
        give_a_leaf_a_child,
        give_a_weightless_module_a_weight,
        add_a_hook,
    ],
)
def test_a_view_sees_every_change_to_a_model_that_it_has_listed(backend, change):
    model = zoo.fresh(backend)
    view = ModelView(model)
    view.require_unchanged()
    change(model)
    with pytest.raises(ModelChangedError):
        view.require_unchanged()


@backends
def test_every_hook_point_is_among_the_modules_that_are_listed(backend):
    view = ModelView(zoo.fresh(backend))
    modules = {id(module) for module in view.model.modules()}
    assert {id(point) for point in view.hook_points.values()} <= modules
    assert view.user_hooks() == []
    add_a_hook(view.model)
    assert ModelView(view.model).user_hooks() == ["blocks.0.hook_resid_pre"]
