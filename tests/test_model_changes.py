"""A run is one model at one moment.

Each test changes a model in one way. A run that was captured before the change refuses everything,
used before or not; a new run gives what hooks and whole forward passes give on the model as it is,
or is refused by name; and once the change is undone, the old run gives what it always gave.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import resid_patching as rp
from resid_patching.errors import (
    CacheMismatchError,
    ModelChangedError,
    ResidPatchingError,
    TrainingModeError,
)

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
SOURCE = torch.tensor([[27, 18, 28, 18, 2], [31, 41, 5, 9, 26]])
ANSWER, FOIL = 3, 6
METRIC = rp.logit_diff(ANSWER, FOIL)
TOLERANCE = 1e-9
backends = pytest.mark.parametrize("backend", zoo.BACKENDS)


def fresh(backend: str):
    return zoo.fresh("hooked") if backend == "hooked" else zoo.fresh_named("gpt2_untied")


# The ways to change a model; each gives the function that undoes it


Undo = Callable[[], object]
CHANGES: dict[str, Callable[..., Undo]] = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


def weight(model, layer: int = 1) -> torch.nn.Parameter:
    """Return the matrix by which a layer's MLP writes to the stream."""
    mlp = model.blocks[layer].mlp
    return next(p for name, p in mlp.named_parameters() if "W_out" in name or "c_proj" in name)


def restoring(tensor: Tensor) -> Undo:
    kept = tensor.detach().clone()

    def undo():
        with torch.no_grad():
            tensor.copy_(kept)

    return undo


def resetting(owner, name: str, value) -> Undo:
    """Set an attribute; an instance's own is deleted again where it had none."""
    had, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old) if had else delattr(owner, name)


def inner(module):
    """Return the Hugging Face module that a bridge wraps; HookedTransformer's own has none."""
    return getattr(module, "original_component", None) or module


@change
def a_weight_scaled_in_place(model):
    undo = restoring(weight(model))
    with torch.no_grad():
        weight(model).mul_(1.5)
    return undo


@change
def one_entry_of_a_weight(model):
    undo = restoring(weight(model))
    with torch.no_grad():
        weight(model)[3, 4] += 1.0
    return undo


@change
def the_data_of_a_weight_scaled(model):
    undo = restoring(weight(model))
    weight(model).data *= 1.5
    return undo


@change
def the_data_of_one_neuron(model):
    undo = restoring(weight(model, 2))
    weight(model, 2).data[5] = 0
    return undo


@change
def the_data_of_a_weight_replaced(model):
    old = weight(model).data
    weight(model).data = old * 1.5
    return lambda: setattr(weight(model), "data", old)


@change
def two_rows_of_a_weight_swapped(model):
    undo = restoring(weight(model))
    weight(model).data[[0, 1]] = weight(model).data[[1, 0]].clone()
    return undo


@change
def a_parameter_replaced(model):
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is weight(model):
                new = torch.nn.Parameter(parameter.detach() * 1.5)
                setattr(module, name, new)
                return lambda: setattr(module, name, parameter)
    raise AssertionError("no such parameter")


@change
def a_state_dict_loaded(model):
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    scaled = {key: v * 1.1 if v.is_floating_point() else v for key, v in kept.items()}
    model.load_state_dict(scaled, strict=False)
    return lambda: model.load_state_dict(kept, strict=False)


@change
def a_buffer_added(model):
    model.blocks[1].register_buffer("spare", torch.ones(3))
    return lambda: delattr(model.blocks[1], "spare")


@change
def a_hook(model):
    model.add_hook("blocks.0.hook_attn_out", lambda value, hook: value * 0.5)
    return model.reset_hooks


@change
def a_permanent_hook(model):
    point = model.hook_dict["blocks.0.hook_attn_out"]
    point.add_hook(lambda value, hook: value * 0.5, is_permanent=True)
    return lambda: model.reset_hooks(including_permanent=True)


@change
def a_hook_for_a_while(model):
    stack = contextlib.ExitStack()
    hooks = [("blocks.1.hook_mlp_out", lambda value, hook: value * 0.5)]
    stack.enter_context(model.hooks(fwd_hooks=hooks))
    return stack.close


@change
def a_hook_on_the_embedding(model):
    noise = torch.randn(zoo.N_CTX, zoo.D_MODEL, generator=torch.Generator().manual_seed(1))
    model.add_hook("hook_embed", lambda value, hook: value + noise[: value.shape[1]].to(value))
    return model.reset_hooks


@change
def a_hook_that_edits_one_prompt(model):
    def edit(value, hook):
        value = value.clone()
        value[0] *= 0.5
        return value

    model.add_hook("blocks.1.attn.hook_z", edit)
    return model.reset_hooks


@change
def a_hook_that_mixes_prompts(model):
    model.add_hook("blocks.1.hook_mlp_out", lambda value, hook: value - value.mean(0) / 2)
    return model.reset_hooks


@change
def a_hook_that_bounds(model):
    """Our own blocks would be right for the unchanged run, where nothing is so large."""
    model.add_hook("blocks.2.hook_mlp_out", lambda value, hook: value.clamp(-50, 50))
    return model.reset_hooks


@change
def a_pytorch_hook(model):
    return model.blocks[1].mlp.register_forward_hook(lambda m, i, out: out * 1.3).remove


@change
def a_pytorch_hook_before(model):
    stretch = torch.linspace(0.5, 1.5, zoo.D_MODEL, dtype=torch.float64)
    return model.ln_final.register_forward_pre_hook(lambda m, i: (i[0] * stretch.to(i[0]),)).remove


@change
def a_pytorch_hook_on_a_hook_point(model):
    point = model.hook_dict["blocks.1.hook_attn_out"]
    return point.register_forward_hook(lambda m, i, out: out * 1.3).remove


@change
def a_pytorch_hook_on_the_unembedding(model):
    return model.unembed.register_forward_hook(lambda m, i, out: out * 1.3 + 0.1).remove


@change
def a_global_pytorch_hook(model):
    layer = model.blocks[1].mlp

    def scale(module, inputs, output):
        return output * 1.3 if module is layer else None

    return torch.nn.modules.module.register_module_forward_hook(scale).remove


@change
def a_forward_replaced(model):
    mlp = inner(model.blocks[1].mlp)
    old = mlp.forward
    return resetting(mlp, "forward", lambda *args, **kwargs: old(*args, **kwargs) * 1.3)


@change
def a_class_s_forward_replaced(model):
    cls = type(inner(model.blocks[1].mlp))
    old = cls.forward

    def forward(self, *args, **kwargs):
        return old(self, *args, **kwargs) * 1.3

    cls.forward = forward
    return lambda: setattr(cls, "forward", old)


@change
def an_activation_function_replaced(model):
    mlp = inner(model.blocks[1].mlp)
    name = "act_fn" if hasattr(mlp, "act_fn") else "act"
    old = getattr(mlp, name)
    if isinstance(old, torch.nn.Module):
        setattr(mlp, name, torch.nn.ReLU())
        return lambda: setattr(mlp, name, old)
    return resetting(mlp, name, torch.relu)


@change
def a_module_replaced(model):
    norm = inner(model.ln_final)
    if norm is model.ln_final:
        old, new = model.ln_final, zoo.fresh("hooked").ln_final
        with torch.no_grad():
            new.w.mul_(1.5)
        model.ln_final = new
        return lambda: setattr(model, "ln_final", old)
    kept, new = model.blocks[1].mlp, fresh("bridge").blocks[1].mlp
    with torch.no_grad():
        next(new.parameters()).mul_(1.5)
    model.blocks[1]._modules["mlp"] = new
    return lambda: model.blocks[1]._modules.__setitem__("mlp", kept)


@change
def the_attention_scale(model):
    attention = inner(model.blocks[1].attn)
    name = "attn_scale" if hasattr(attention, "attn_scale") else "scaling"
    return resetting(attention, name, getattr(attention, name) * 2)


@change
def the_eps_of_a_norm(model):
    norm = inner(model.blocks[1].ln1)
    return resetting(norm, "eps", norm.eps * 100)


@change
def a_setting_of_the_configuration(model):
    return resetting(model.cfg, "output_logits_soft_cap", 3.0)


@change
def the_mode_of_a_submodule(model):
    model.blocks[1].train()
    return model.blocks[1].eval


@change
def the_dtype(model):
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    model.to(torch.float32)

    def undo():
        model.to(torch.float64)
        for parameter, data in kept:
            parameter.data = data
        for register, old in buffers:
            register.update(old)

    return undo


# What is computed on a run, and what it should be


def analyses(run, source) -> dict[str, Callable[[], Tensor]]:
    """Return every analysis that takes a run; those of `made` were begun before."""
    lens, parts = rp.logit_lens(run), rp.decompose(run, by="component")

    def ablated(target, how):
        return rp.ablate(run, target, how, metric=METRIC).total[0]

    def path():
        return rp.Path(to="logits", using=rp.Zero(), mlps="freeze")

    def attribution(**options):
        return rp.direct_logit_attribution(run, ANSWER, FOIL, **options)

    return {
        "measure": lambda: rp.measure(run, METRIC),
        "zero": lambda: ablated("1.1", rp.Zero()),
        "mean": lambda: ablated("attn.1", rp.Mean(source, over=("batch",))),
        "resample": lambda: ablated("resid_pre.2", rp.Resample(source)),
        "path": lambda: ablated("1.1", path()),
        "attribution": lambda: attribution().total[:, 0],
        "by head": lambda: attribution(by="head").total[:, 0],
        "a component": lambda: attribution().sel(component="attn.1", pos=-1),
        "parts": lambda: parts.vectors(None).sum(0),
        "lens": lambda: lens.prob(ANSWER).values[1],
        "stream": lambda: rp.stream_report(run).sel(write="attn.1"),
        "scaled": lambda: rp.stream_report(run, rp.WriteScale(0.5)).start_norm,
        "fetch": lambda: run.fetch(rp.parse("mlp.1")),
        "logits": lambda: run.logits_at(None),
    }


@torch.no_grad()
def expected(model) -> dict[str, Tensor]:
    """Return the same by TransformerLens's own hooks and whole forward passes."""
    logits, cache = model.run_with_cache(TOKENS)
    _, source = model.run_with_cache(SOURCE)
    cache = {name: value.clone() for name, value in cache.items()}
    last = cache[f"blocks.{zoo.N_LAYERS - 1}.hook_resid_post"]
    clean = difference(logits)

    def changed(*hooks):
        return difference(model.run_with_hooks(TOKENS, fwd_hooks=list(hooks))) - clean

    def without(value, hook):
        value = value.clone()
        value[:, :, 1] = 0
        return value

    def to(new):
        return lambda value, hook: new.clone()

    held = [(f"blocks.{at}.hook_mlp_out", "mlp") for at in range(zoo.N_LAYERS)]
    held += [(f"blocks.{at}.hook_attn_out", "attn") for at in range(zoo.N_LAYERS) if at != 1]
    freezing = [(name, to(cache[name])) for name, _ in held]
    norm = model.ln_final
    gain = norm.w if hasattr(norm, "w") else norm.weight
    direction = (model.W_U[:, ANSWER] - model.W_U[:, FOIL]) * gain
    direction = direction - direction.mean()
    sigma = (last[:, -1].var(-1, unbiased=False) + zoo.EPS).sqrt()
    middle = cache["blocks.1.hook_resid_pre"] + cache["blocks.1.hook_attn_out"]
    lens = model.unembed(model.ln_final(cache["blocks.1.hook_resid_pre"]))
    if (cap := getattr(model.cfg, "output_logits_soft_cap", 0)) > 0:
        lens = cap * torch.tanh(lens / cap)
    lens = lens.softmax(-1)
    mean = source["blocks.1.hook_attn_out"].mean(0, keepdim=True).expand(2, -1, -1)
    return {
        "measure": clean,
        "zero": changed(("blocks.1.attn.hook_z", without)),
        "mean": changed(("blocks.1.hook_attn_out", to(mean))),
        "resample": changed(("blocks.2.hook_resid_pre", to(source["blocks.2.hook_resid_pre"]))),
        "path": changed(("blocks.1.attn.hook_z", without), *freezing),
        "attribution": clean,
        "by head": clean,
        "a component": (cache["blocks.1.hook_attn_out"][:, -1] @ direction) / sigma,
        "parts": last,
        "lens": lens[..., ANSWER],
        "stream": cache["blocks.1.hook_attn_out"].norm(dim=-1) / middle.norm(dim=-1),
        "scaled": cache["blocks.0.hook_resid_pre"].norm(dim=-1),
        "fetch": cache["blocks.1.hook_mlp_out"],
        "logits": logits,
    }


def difference(logits: Tensor) -> Tensor:
    return logits[:, -1, ANSWER] - logits[:, -1, FOIL]


def close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> bool:
    scale = max(1.0, float(wanted.abs().max()))
    return found.shape == wanted.shape and float((found - wanted).abs().max()) <= tolerance * scale


def used(run, source) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Tensor]]:
    """Return the analyses of a run, and what each gives now."""
    found = analyses(run, source)
    return found, {name: call() for name, call in found.items()}


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except (ModelChangedError, TrainingModeError):
        return True
    return False


def as_it_is(model) -> dict[str, str | None]:
    """Hold each analysis of a new run to the model as it is; return why it was refused, if so."""
    try:
        run, source = rp.capture(model, TOKENS), rp.capture(model, SOURCE)
    except ResidPatchingError as refusal:
        return dict.fromkeys(analyses_names(), type(refusal).__name__)
    found: dict[str, str | None] = {}
    tolerance = TOLERANCE if model.W_U.dtype == torch.float64 else 1e-3
    capped = getattr(model.cfg, "output_logits_soft_cap", 0) > 0
    for name, wanted in expected(model).items():
        if capped and name in ("attribution", "by head"):  # these are of logits before the cap
            continue
        try:
            value = analyses(run, source)[name]()
        except ResidPatchingError as refusal:
            found[name] = type(refusal).__name__
            continue
        assert close(value, wanted, tolerance), name
        found[name] = None
    return found


@functools.cache
def analyses_names() -> tuple[str, ...]:
    model = fresh(zoo.BACKENDS[0])
    return tuple(analyses(rp.capture(model, TOKENS), rp.capture(model, SOURCE)))


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def apply(name: str, model) -> Undo:
    try:
        return CHANGES[name](model)
    except AttributeError as missing:
        pytest.fail(f"{name} does not fit this model: {missing}")


@pytest.mark.parametrize("name", CHANGES)
@backends
def test_a_run_of_before_a_change_refuses_until_it_is_undone(backend, name):
    model = fresh(backend)
    unused = analyses(rp.capture(model, TOKENS), rp.capture(model, SOURCE))
    calls, first = used(rp.capture(model, TOKENS), rp.capture(model, SOURCE))
    undo = apply(name, model)
    for some in (unused, calls):
        assert [which for which, call in some.items() if not refuses(call)] == []
    undo()
    for some in (unused, calls):
        assert all(torch.equal(call(), first[which]) for which, call in some.items())


@pytest.mark.parametrize("name", CHANGES)
@backends
def test_a_run_of_after_a_change_gives_what_hooks_give(backend, name):
    model = fresh(backend)
    used(rp.capture(model, TOKENS), rp.capture(model, SOURCE))  # what is remembered of before
    undo = apply(name, model)
    try:
        as_it_is(model)
    finally:
        undo()
    assert set(as_it_is(model).values()) == {None}


@backends
def test_most_changes_are_followed_and_not_refused(backend):
    """Refusing everything would be right too, and of no use."""
    for name in ("a_weight_scaled_in_place", "a_hook_on_the_embedding", "the_data_of_one_neuron"):
        model = fresh(backend)
        CHANGES[name](model)
        assert set(as_it_is(model).values()) == {None}, name


@pytest.mark.full
@settings(max_examples=15)
@given(
    names=st.lists(st.sampled_from(sorted(set(CHANGES) - {"the_dtype"})), min_size=1, max_size=3),
    backend=st.sampled_from(zoo.BACKENDS),
)
def test_changes_drawn_at_random_give_no_number_of_before(names, backend):
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        model = fresh(backend)
        old = analyses(rp.capture(model, TOKENS), rp.capture(model, SOURCE))
        for name in dict.fromkeys(names):
            stack.callback(CHANGES[name](model))
        as_it_is(model)
        assert all(map(refuses, old.values()))


# The cases that were found


@backends
def test_s01_a_pytorch_hook_is_seen_by_a_new_run(backend):
    model = rp.load("demo", backend=backend)
    prompt = "When Mary and John went to the store, John gave a drink to"
    metric = rp.logit_diff(" Mary", " John")
    rp.ablate(rp.capture(model, prompt), ["1.1", "attn.1"], rp.Zero(), metric=metric)
    model.blocks[1].mlp.register_forward_hook(lambda module, inputs, output: output * 1.3)
    try:
        run = rp.capture(model, prompt)
        effect = rp.ablate(run, ["1.1", "attn.1"], rp.Zero(), metric=metric)
    except ResidPatchingError as refusal:
        assert backend == "bridge" and "blocks.1.mlp (a PyTorch hook)" in str(refusal)
        return
    torch.testing.assert_close(effect.total[:, 0], torch.tensor([0.548, 1.277]), atol=1e-3, rtol=0)
    assert effect.provenance.user_hooks == ("blocks.1.mlp (a PyTorch hook)",)


@backends
def test_s02_a_run_does_not_mix_two_states_of_a_model(backend):
    model = fresh(backend)
    run = rp.capture(model, TOKENS)

    def itself():
        return rp.ablate(run, rp.heads(model), rp.Resample(run), metric=METRIC).total

    assert not itself().any()
    model.add_hook("blocks.0.hook_attn_out", lambda value, hook: value / 2)
    with pytest.raises(ModelChangedError, match=r"blocks\.0\.hook_attn_out"):
        itself()
    model.reset_hooks()
    assert not itself().any()


@pytest.mark.parametrize("read_before", [False, True])
@backends
def test_s03_a_run_of_before_a_hook_is_no_source_of_a_run_under_it(backend, read_before):
    model = fresh(backend)
    clean = rp.capture(model, TOKENS)
    if read_before:
        clean.fetch(rp.parse("resid_pre.1"))
    with model.hooks(fwd_hooks=[("hook_embed", lambda value, hook: value + 0.5)]):
        base = rp.capture(model, TOKENS)
        with pytest.raises(ModelChangedError, match="hook_embed"):
            rp.ablate(base, "resid_pre.1", rp.Resample(clean), metric=METRIC, positions=2)


@backends
def test_s04_a_source_that_was_fetched_before_weights_changed_is_refused(backend):
    model = fresh(backend)
    run, source = rp.capture(model, TOKENS), rp.capture(model, SOURCE)
    rp.ablate(run, rp.heads(model), rp.Resample(source), metric=METRIC)
    with torch.no_grad():
        weight(model).mul_(0.7)
    with pytest.raises(ModelChangedError, match="has other values"):
        rp.ablate(run, rp.heads(model), rp.Resample(source), metric=METRIC)


def test_what_a_sample_of_a_weight_misses_is_found_before_kept_values_are_used_again():
    """One entry of a matrix of a million, edited where PyTorch does not count it."""
    config = zoo.transformers.GPT2Config(
        n_embd=1024, n_layer=1, n_head=4, vocab_size=50, n_positions=8, tie_word_embeddings=False
    )
    model = zoo.bridge(zoo.hugging_face(config, torch.float32))
    run, source = rp.capture(model, TOKENS), rp.capture(model, SOURCE)
    rp.ablate(run, "0.1", rp.Resample(source), metric=METRIC)
    flat = weight(model, 0).data.view(-1)
    for entry in range(100, 120):
        flat[entry] += 0.5
    with pytest.raises(ModelChangedError, match="has other values"):
        rp.ablate(run, "0.1", rp.Resample(source), metric=METRIC)


@pytest.mark.parametrize("use", ["resample", "mean", "path", "decompose", "stream", "lens"])
@backends
def test_s05_a_cache_of_other_prompts_is_refused_for_every_purpose(backend, use):
    model = fresh(backend)
    with torch.no_grad():
        cache = model.run_with_cache(TOKENS)[1]
    run, wrong = rp.capture(model, TOKENS), rp.capture(model, SOURCE, cache=cache)
    calls = {
        "resample": lambda: rp.ablate(run, "1.1", rp.Resample(wrong), metric=METRIC),
        "mean": lambda: rp.ablate(run, "1.1", rp.Mean(wrong, over="batch"), metric=METRIC),
        "path": lambda: rp.ablate(
            run, "1.1", rp.Path("logits", rp.Resample(wrong), "freeze"), metric=METRIC
        ),
        "decompose": lambda: rp.decompose(wrong, by="component").vectors(),
        "stream": lambda: rp.stream_report(wrong),
        "lens": lambda: rp.logit_lens(wrong).kl,
    }
    with pytest.raises(CacheMismatchError, match="made from other prompts"):
        calls[use]()


# Routes are held to the model in every group of prompts


@backends
def test_a_hook_that_is_random_is_refused(backend):
    model = fresh(backend)
    model.add_hook("hook_embed", lambda value, hook: value + torch.randn_like(value))
    with pytest.raises(ResidPatchingError, match="a later token changes earlier positions"):
        rp.capture(model, TOKENS)


@backends
def test_a_hook_that_remembers_earlier_calls_is_refused(backend):
    model = fresh(backend)
    calls = []
    run = None

    def drift(value, hook):
        calls.append(1)
        return value * (1 + 0.01 * len(calls) * (run is not None))

    model.add_hook("blocks.1.hook_mlp_out", drift)
    run = rp.capture(model, TOKENS)
    with pytest.raises(ResidPatchingError, match="two equal runs of .* differ"):
        rp.ablate(run, "1.1", rp.Zero(), metric=METRIC)


@backends
def test_a_hook_that_knows_the_size_of_the_batch_is_run_with_that_size(backend):
    model = fresh(backend)

    def only_two(value, hook):
        assert len(value) == 2
        return value * 1.5

    model.add_hook("hook_embed", only_two)
    run = rp.capture(model, TOKENS)
    effect = rp.ablate(run, rp.heads(model), rp.Zero(), metric=METRIC)
    found = effect.total[effect.targets.index("1.1")]
    assert close(found, expected(model)["zero"])


@backends
def test_a_hook_that_takes_some_prompts_alone_is_named(backend):
    model = fresh(backend)
    noise = torch.zeros(2, 5, zoo.D_MODEL, dtype=torch.float64)
    model.add_hook("hook_embed", lambda value, hook: value + noise)
    with pytest.raises(ResidPatchingError, match="hooks must take .* any length.*hook_embed"):
        rp.capture(model, TOKENS)
