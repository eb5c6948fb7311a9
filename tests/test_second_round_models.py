"""Models that gave a wrong number or a wrong reason: S13 to S17 and S21, each under its id."""

import contextlib
import types

import pytest
import torch
import transformers
import zoo
from transformer_lens.model_bridge import TransformerBridge

import resid_patching as rp
from resid_patching.errors import (
    HeadMismatchError,
    NeuronMismatchError,
    NotFiniteError,
    ReadoutMismatchError,
    UnsupportedModelError,
)
from resid_patching.models import ModelView, report

backends = pytest.mark.parametrize("backend", zoo.BACKENDS)
TOKENS = [3, 1, 4, 1, 5, 9]
OTHERS = [27, 18, 28, 2, 7, 8]
DIFF = rp.logit_diff(3, 6)


def largest_gap(model, by="component"):
    run = rp.capture(model, TOKENS)
    return float(rp.direct_logit_attribution(run, 3, 6, by=by, positions=None).gap.max())


def total_effect(model, name, edit):
    """By a hook and whole passes alone."""
    before = zoo.plain_logits(model, TOKENS)
    with model.hooks(fwd_hooks=[(name, lambda tensor, hook: edit(tensor.clone()))]):
        after = zoo.plain_logits(model, TOKENS)
    moved = (after - before)[-1]
    return float(moved[3] - moved[6])


def effect_of(model, target, how=None):
    run = rp.capture(model, TOKENS)
    return float(rp.ablate(run, target, how or rp.Zero(), metric=DIFF).values[0, 0])


def zeroed(tensor):
    return torch.zeros_like(tensor)


def zeroed_head(tensor):
    tensor[:, :, 1] = 0
    return tensor


def check_what_needs_no_output_weights(model, tolerance):
    """Components, lens, stream report and whole layers, against hooks and whole passes."""
    assert largest_gap(model) < tolerance
    run = rp.capture(model, TOKENS)
    kl = rp.logit_lens(run).kl.values
    assert float(kl[-1].abs().max()) < tolerance < float(kl[0].max())
    assert rp.stream_report(run).exactness < tolerance
    for target, name in (("attn.1", "blocks.1.hook_attn_out"), ("mlp.1", "blocks.1.hook_mlp_out")):
        expected = total_effect(model, name, zeroed)
        assert abs(expected) > 1e-3
        assert effect_of(model, target) == pytest.approx(expected, abs=tolerance)


# S13: what load builds predicts what Hugging Face's own model predicts


def cohere_folder(tmp_path):
    return zoo.save(tmp_path / "cohere", zoo.CONFIGS["cohere"]())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processing", ["raw", "folded"])
def test_s13_cohere_is_built_right_or_refused_by_name(tmp_path, processing, dtype):
    """TransformerLens 3.9 builds it wrong (position 0 is exact), 4.3 builds it right."""
    folder = cohere_folder(tmp_path)
    if not zoo.HAS_HOOKED:
        assert rp.load(folder, backend="bridge", processing=processing, dtype=dtype) is not None
        return
    message = r"TransformerBridge that TransformerLens 3\S* makes of .*cohere does not predict"
    with pytest.raises(UnsupportedModelError, match=message + r".* \d\.?\d* apart") as caught:
        rp.load(folder, backend="bridge", processing=processing, dtype=dtype)
    assert "\n" not in str(caught.value)


def spoil(monkeypatch, with_tokenizer):
    """Makes TransformerLens bridge every model with one weight 10 % too large."""
    from transformer_lens.model_bridge import sources

    def spoiled(build):
        def wrong(*args, **options):
            model = build(*args, **options)
            with torch.no_grad():
                model.blocks[1].mlp.out.weight.mul_(1.1)
            return model

        return wrong

    if with_tokenizer:
        boot = staticmethod(spoiled(TransformerBridge.boot_transformers))
        monkeypatch.setattr(TransformerBridge, "boot_transformers", boot)
    else:
        build = spoiled(sources.build_bridge_from_module)
        monkeypatch.setattr(sources, "build_bridge_from_module", build)


@pytest.mark.parametrize("processing", ["raw", "folded"])
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_s13_a_bridge_that_predicts_otherwise_is_not_handed_out(
    tmp_path, monkeypatch, with_tokenizer, processing
):
    folder = zoo.text_folder()
    if not with_tokenizer:
        folder = zoo.save(tmp_path / "plain", zoo.gpt2_config())
    rp.load(folder, backend="bridge", processing=processing)
    spoil(monkeypatch, with_tokenizer)
    with pytest.raises(UnsupportedModelError, match="does not predict what Hugging Face's own"):
        rp.load(folder, backend="bridge", processing=processing)


def test_s13_the_original_is_loaded_once_and_its_bridge_is_transformer_lenss_own(monkeypatch):
    """The same settings, tokenizer and modules as `boot_transformers` gives."""
    folder, loaded = zoo.text_folder("metaspace"), []
    model_type = transformers.LlamaForCausalLM
    plain = model_type.__init__

    def counted(self, *args, **options):
        loaded.append(self)
        plain(self, *args, **options)

    monkeypatch.setattr(model_type, "__init__", counted)
    ours = rp.load(folder, backend="bridge")
    assert len(loaded) == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = TransformerBridge.boot_transformers(str(folder), device="cpu", tokenizer=tokenizer)
    theirs.cfg.model_name = ours.cfg.model_name
    assert {k: str(v) for k, v in vars(ours.cfg).items()} == {
        k: str(v) for k, v in vars(theirs.cfg).items()
    }
    assert ours.tokenizer.padding_side == theirs.tokenizer.padding_side
    assert torch.equal(ours.to_tokens("Mary and"), theirs.to_tokens("Mary and"))
    names = [[(name, type(module)) for name, module in m.named_modules()] for m in (ours, theirs)]
    assert names[0] == names[1]


def test_s13_the_tolerance_of_half_precision_lets_rounding_pass(tmp_path):
    folder = zoo.save(tmp_path / "llama", zoo.CONFIGS["llama_grouped"]())
    for dtype in (torch.bfloat16, torch.float16):
        for processing in ("raw", "folded"):
            rp.load(folder, backend="bridge", processing=processing, dtype=dtype)


@backends
def test_s13_logits_that_overflow_are_called_that(tmp_path, backend):
    config = zoo.gpt2_config()
    model = transformers.AutoModelForCausalLM.from_config(config)
    zoo.randomise(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(6e4)
    model.save_pretrained(tmp_path / "large")
    rp.load(tmp_path / "large", backend=backend, dtype=torch.bfloat16)
    with pytest.raises(NotFiniteError, match="logits of .*large are NaN or infinite in float16"):
        rp.load(tmp_path / "large", backend=backend, dtype=torch.float16)


def test_s13_a_model_that_reads_more_than_ids_is_refused_by_name(tmp_path):
    settings = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**settings, vocab_size=500, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "both")
    zoo.byte_level_tokenizer().save_pretrained(tmp_path / "both")
    with pytest.raises(
        UnsupportedModelError, match="no language model that reads ids alone"
    ) as caught:
        rp.load(tmp_path / "both", backend="bridge")
    assert "\n" not in str(caught.value)


# S14: quantised weights


class Packed(torch.nn.Module):
    """A linear layer in four bits, two in a byte, as bitsandbytes keeps them."""

    def __init__(self, linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.bias = linear.bias
        self.step = float(linear.weight.detach().abs().max()) / 7
        codes = (linear.weight.detach() / self.step).round().long().flatten() + 8
        packed = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None]
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    def unpacked(self):
        both = torch.stack([self.weight.long() // 16, self.weight.long() % 16], 1)
        matrix = (both.flatten() - 8).reshape(self.out_features, self.in_features)
        return matrix.double() * self.step

    def forward(self, x):
        return torch.nn.functional.linear(x, self.unpacked().to(x), self.bias)


@pytest.fixture(scope="module")
def quantised():
    """A Llama whose blocks are in four bits, and the same numbers in float64."""
    packed = zoo.hugging_face(zoo.CONFIGS["llama"]())
    plain = zoo.hugging_face(zoo.CONFIGS["llama"]())
    for number, layer in enumerate(packed.model.layers):
        for name, module in list(layer.named_modules()):
            if isinstance(module, torch.nn.Linear):
                parent, _, last = name.rpartition(".")
                small = Packed(module)
                setattr(layer.get_submodule(parent), last, small)
                other = plain.model.layers[number].get_submodule(name)
                other.weight.data = small.unpacked()
    return zoo.bridge(packed), zoo.bridge(plain)


def test_s14_quantised_weights_allow_what_does_not_read_them(quantised):
    check_what_needs_no_output_weights(quantised[0], 1e-9)
    assert str(report(ModelView(quantised[0])).processing) == "raw"


@pytest.mark.parametrize("zero", [True, False])
def test_s14_heads_of_quantised_layers_are_ablated_by_hooks_and_as_unquantised(quantised, zero):
    found = []
    for model in quantised:
        how = rp.Zero() if zero else rp.Resample(rp.capture(model, OTHERS))
        run, targets = rp.capture(model, TOKENS), ["1.1", "1.0.q", "1.2.pattern"]
        found.append(rp.ablate(run, targets, how, metric=DIFF))
    for what in ("values", "direct"):
        torch.testing.assert_close(*(getattr(f, what) for f in found), rtol=0, atol=1e-9)
    expected = total_effect(quantised[0], "blocks.1.attn.hook_z", zeroed_head)
    assert effect_of(quantised[0], "1.1") == pytest.approx(expected, abs=1e-9)


def test_s14_what_reads_quantised_weights_names_them(quantised):
    model = quantised[0]
    run = rp.capture(model, TOKENS)
    for call, error in (
        (lambda: largest_gap(model, "head"), HeadMismatchError),
        (lambda: rp.decompose(run, by="head"), HeadMismatchError),
        (lambda: largest_gap(model, "neuron"), NeuronMismatchError),
        (lambda: effect_of(model, "mlp.1.5"), NeuronMismatchError),
        (lambda: rp.neurons(model, 1), NeuronMismatchError),
    ):
        with pytest.raises(error, match=r"W_\w+ is quantised.*Use by='component'") as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_s14_weights_of_the_right_shape_but_without_their_scales_are_quantised_too(dtype):
    """As bitsandbytes keeps eight bits, and others float8; and as HookedTransformer shows them."""
    model = zoo.fresh(zoo.BACKENDS[0])
    if zoo.BACKENDS[0] == "hooked":
        attention = model.blocks[1].attn
        kept = attention.W_O.detach().clone()
        attention.W_O = torch.nn.Parameter(kept.to(dtype), requires_grad=False)
        attention.forward = types.MethodType(_with_weight(kept), attention)
    else:
        linear = model.blocks[1].attn.o.original_component
        kept = linear.weight.detach().clone()
        linear.weight = torch.nn.Parameter(kept.to(dtype), requires_grad=False)
        linear.forward = lambda x: torch.nn.functional.linear(x.to(kept), kept, linear.bias)
    assert largest_gap(model) < 1e-9
    with pytest.raises(HeadMismatchError, match="layer 1 .*W_O is quantised"):
        largest_gap(model, "head")


def _with_weight(kept):
    def forward(self, *args, **options):
        packed, self._parameters["W_O"] = self._parameters["W_O"], torch.nn.Parameter(kept)
        try:
            return type(self).forward(self, *args, **options)
        finally:
            self._parameters["W_O"] = packed

    return forward


# S15: multi-head latent attention


def latent(version="v3", **changes):
    settings = {
        **zoo._RMS_LIKE,
        "num_key_value_heads": zoo.N_HEADS,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        **changes,
    }
    kind = transformers.DeepseekV2Config if version == "v2" else transformers.DeepseekV3Config
    return kind(**settings)


in_4 = pytest.mark.skipif(zoo.HAS_HOOKED, reason="TransformerLens 3.9 builds DeepSeek wrong")


@pytest.fixture(scope="module", params=["v2", "v3"])
def deepseek(request):
    return zoo.bridge(zoo.hugging_face(latent(request.param), torch.float32))


@in_4
def test_s15_latent_attention_allows_components_lens_stream_and_layers(deepseek):
    check_what_needs_no_output_weights(deepseek, 1e-4)


@in_4
def test_s15_the_pattern_of_latent_attention_is_replaced(deepseek):
    def edit(pattern):
        pattern[:, 1] = 0
        return pattern

    expected = total_effect(deepseek, "blocks.1.attn.hook_pattern", edit)
    assert effect_of(deepseek, "1.1.pattern") == pytest.approx(expected, abs=1e-4)


@in_4
def test_s15_what_is_not_laid_out_by_heads_is_refused_by_name(deepseek):
    """TransformerLens cuts z at the width of the rotated part: half a head would be replaced."""
    source = rp.capture(deepseek, OTHERS)
    for target in ("1.1", "1.1.z", "1.1.q", "1.1.k", "1.1.v"):
        for how in (rp.Zero(), rp.Resample(source)):
            with pytest.raises(HeadMismatchError, match=r"is laid out as \[.* heads"):
                effect_of(deepseek, target, how)
    for receiver in ("2.0.q", "2.0.v"):
        path = rp.Path(to=receiver, using=rp.Resample(source), mlps="freeze")
        with pytest.raises(HeadMismatchError, match="is laid out as"):
            effect_of(deepseek, "attn.1", path)
    with pytest.raises(HeadMismatchError, match="is laid out as"):
        effect_of(deepseek, "1.1", rp.Path(to="logits", using=rp.Zero(), mlps="freeze"))
    with pytest.raises(HeadMismatchError, match=r"multi-head latent attention.*by='component'"):
        largest_gap(deepseek, "head")


@in_4
def test_s15_heads_of_latent_attention_are_exact_where_they_are_laid_out_by_heads():
    model = zoo.bridge(zoo.hugging_face(latent(v_head_dim=4), torch.float32))
    assert largest_gap(model, "head") < 1e-4
    expected = total_effect(model, "blocks.1.attn.hook_z", zeroed_head)
    assert abs(expected) > 1e-3
    assert effect_of(model, "1.1") == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif(not zoo.HAS_HOOKED, reason="TransformerLens 4.3 builds DeepSeek right")
def test_s15_deepseek_of_transformer_lens_3_is_refused_by_name(tmp_path):
    folder = zoo.save(tmp_path / "deepseek", latent())
    with pytest.raises(UnsupportedModelError, match="does not predict what Hugging Face's own"):
        rp.load(folder, backend="bridge")


def test_s15_a_weight_that_raises_is_one_that_is_absent():
    """Properties of TransformerBridge raise NotImplementedError for what a model does not have."""

    class Latent(torch.nn.Module):
        def __getattr__(self, name):
            if name in ("b_Q", "b_V", "b_O", "W_O"):
                raise NotImplementedError(f"{name} is not available here. Look elsewhere.")
            return super().__getattr__(name)

    from resid_patching.models.weights import optional_weight, why_unread

    for name in ("b_Q", "W_O", "W_V"):
        assert optional_weight(Latent(), name) is None
    assert why_unread(Latent(), "W_O") == "W_O is not available here"
    assert why_unread(Latent(), "W_V") is None and why_unread(None, "W_V") is None


# S16: RMSNorm behind a bare wrapper


def gemma4(**changes):
    settings = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    no_layer_inputs = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 50}
    config = transformers.Gemma4TextConfig(
        **zoo._RMS_LIKE, **settings, **no_layer_inputs, **changes
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    zoo.randomise(model)
    return model


@pytest.mark.parametrize("softcap", [None, zoo.SOFTCAP])
def test_s16_gemma_4_is_exact(softcap):
    model = zoo.bridge(gemma4(final_logit_softcapping=softcap))
    assert ModelView(model).final_norm.kind == "RMS"
    assert largest_gap(model) < 1e-5
    run = rp.capture(model, TOKENS)
    assert rp.stream_report(run).exactness < 1e-4
    expected = total_effect(model, "blocks.1.hook_attn_out", zeroed)
    assert effect_of(model, "attn.1") == pytest.approx(expected, abs=1e-4)


def test_s16_a_norm_whose_own_name_says_nothing_is_what_the_configuration_says():
    original = gemma4()
    original.model.norm.__class__ = type("LastNorm", (type(original.model.norm),), {})
    model = zoo.bridge(original)
    assert largest_gap(model) < 1e-5
    model.cfg.uses_rms_norm = False
    assert ModelView(model).final_norm.kind == "LN"


# S17: inference mode and offloaded weights


@backends
def test_s17_a_model_made_under_inference_mode_is_as_any_other(backend):
    with torch.inference_mode():
        model = zoo.fresh(backend)
    same = zoo.build(backend)
    for inside in (contextlib.nullcontext, torch.inference_mode):
        with inside():
            found = [rp.capture(m, TOKENS) for m in (model, same)]
            for by in zoo.GRAINS:
                values = [rp.direct_logit_attribution(r, 3, 6, by=by).values for r in found]
                assert torch.equal(*values)
            for target in ("1.1", "mlp.1.5", "1.0.q", "resid_pre.1"):
                effects = [rp.ablate(r, target, rp.Zero(), metric=DIFF).values for r in found]
                assert torch.equal(*effects)
            assert torch.equal(*(rp.logit_lens(r).kl.values for r in found))


def offloaded(tmp_path, on_disk):
    """A bridge of TransformerLens 4.3 whose named parts lie on disk outside the forward pass."""
    parts = ("transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f", "lm_head")
    return TransformerBridge.boot_transformers(
        str(zoo.text_folder()),
        device_map={part: "disk" if part in on_disk else "cpu" for part in parts},
        offload_folder=str(tmp_path),
    )


@in_4
def test_s17_blocks_on_disk_allow_what_does_not_read_them(tmp_path):
    model = offloaded(tmp_path, ["transformer.h"])
    assert any(parameter.is_meta for parameter in model.parameters())
    check_what_needs_no_output_weights(model, 1e-4)
    same = zoo.text_model("bridge")
    assert effect_of(model, "1.1") == pytest.approx(effect_of(same, "1.1"), abs=1e-4)
    for by, error in (("head", HeadMismatchError), ("neuron", NeuronMismatchError)):
        with pytest.raises(error, match=r"W_\w+ is offloaded to disk .*load the whole model"):
            largest_gap(model, by)


@in_4
@pytest.mark.parametrize("part", ["lm_head", "transformer.ln_f"])
def test_s17_a_readout_on_disk_is_named(tmp_path, part):
    model = offloaded(tmp_path, [part, "transformer.wte"] if part == "lm_head" else [part])
    with pytest.raises(ReadoutMismatchError, match="is offloaded to disk .*load the whole") as e:
        rp.capture(model, TOKENS)
    assert "\n" not in str(e.value)


# S21: overflow is called overflow


def overflowing(backend):
    """In float16 the sum of two finite weights is infinite, here for token 5 alone."""
    if backend == "hooked":
        model = zoo.fresh("hooked", dtype=torch.float16)
        start, bias = model.embed.W_E, model.blocks[0].mlp.b_out
    else:
        model = zoo.fresh_named("gpt2_untied", dtype=torch.float16)
        start = model.embed.original_component.weight
        bias = model.blocks[0].mlp.out.original_component.bias
    with torch.no_grad():
        start[5, 0] = 4e4
        bias[0] = 4e4
    return model


@backends
@pytest.mark.parametrize("late", [False, True])
def test_s21_float16_overflow_is_named_and_no_hook_is(backend, late):
    """Whether the model's first check meets it (`late`: only the prompt does)."""
    model = overflowing(backend)
    source = rp.capture(model, OTHERS)
    run = rp.capture(model, [3, 1, 4, 1, 9, 5] if late else [5, 5, 5, 5, 9, 5])
    for call in (
        lambda: rp.direct_logit_attribution(run, 3, 6),
        lambda: rp.direct_logit_attribution(run, 3, 6, by="neuron"),
        lambda: rp.decompose(run, by="head").vectors(-1),
        lambda: rp.logit_lens(run).kl,
        lambda: rp.stream_report(run),
        lambda: rp.ablate(run, "attn.1", rp.Zero(), metric=DIFF),
        lambda: rp.ablate(run, "1.1", rp.Resample(source), metric=DIFF),
        lambda: rp.ablate(source, "1.1", rp.Resample(run), metric=DIFF),
        lambda: rp.ablate(source, "mlp.1", rp.Mean(run, over=("batch", "pos")), metric=DIFF),
        lambda: rp.measure(run, DIFF),
        lambda: rp.ablate(
            run, "1.1", rp.Path(to="logits", using=rp.Zero(), mlps="freeze"), metric=DIFF
        ),
    ):
        with pytest.raises(NotFiniteError, match=r"NaN or infinite in float16") as caught:
            call()
        assert "float32 or bfloat16" in str(caught.value)
        assert "hook" not in str(caught.value)
