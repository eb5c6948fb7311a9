"""Path patching the slow way: the passes of Wang et al. 2022 (arXiv 2211.00593), with hooks.

Passes A and B are clean runs on the base and on the source prompts (`activations`). Pass C
(`record`) runs the base prompts with the senders at their new values and everything else between
them and the receivers held, and notes what each receiver would read. Pass D (`write`) runs the base
prompts with nothing but the receivers at what was noted.

Prompts are runs of equal length without padding: everything is [prompt, pos, ...]. `positions`
[prompt, n] are the senders', -1 for none. `new` gives each sender's new value [prompt, pos, ...].
A sender is a writer (1.2, attn.1, attn.1.bias, mlp.1, mlp.1.5, mlp.1.bias, embed, pos_embed), a
receiver one of logits, 2.1.q, 2.0.k, 2.0.v, mlp.1.in, resid_pre.1, resid_mid.1, resid_post.1.
"""

import contextlib

import torch
from torch import Tensor

from reference.ablation import describe, unembed


def activations(model, tokens: Tensor, own_hooks=()) -> dict[str, Tensor]:
    """Return every activation of a clean run, behind the caller's own hooks."""
    with torch.no_grad(), model.hooks(fwd_hooks=list(own_hooks)):
        _, cache = model.run_with_cache(tokens)
    return {name: value.detach().clone() for name, value in cache.items()}


def precedes(sender: str, receiver: str, n_layers: int, parallel: bool) -> bool:
    """Return whether a receiver reads a stream that the sender has written to."""
    layer, stage, _, _ = describe(sender)
    return (layer, stage) < reads_at(receiver, n_layers, parallel)


def reads_at(receiver: str, n_layers: int, parallel: bool) -> tuple[int, int]:
    """Return the layer and stage of the state that a receiver reads."""
    first, *rest = receiver.split(".")
    if receiver == "logits":
        return n_layers, 0
    if first == "mlp":
        return int(rest[0]), 0 if parallel else 2
    if first.startswith("resid"):
        return describe(receiver)[:2]
    return int(first), 0


# Pass C


def record(model, tokens, senders, new, positions, mlps, receivers, cache, weights, own_hooks=()):
    """Return what each receiver would read [prompt, pos, ...], senders new and the rest held."""
    noted: dict[str, Tensor] = {}
    with torch.no_grad(), contextlib.ExitStack() as watch:
        hooks = [*own_hooks, *held(senders, new, positions, mlps, cache, weights)]
        for receiver in receivers:
            hooks += noting(model, receiver, tokens.shape, noted, watch)
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    assert noted.keys() == set(receivers)
    return noted


def held(senders, new, positions, mlps, cache, weights) -> list:
    """Return the hooks that hold every head (with freeze, every MLP) but let the senders change."""
    assert mlps in ("freeze", "recompute")
    hooks = []
    for layer in range(len(weights["b_O"])):
        z, mlp_out = f"blocks.{layer}.attn.hook_z", f"blocks.{layer}.hook_mlp_out"
        hooks.append((z, holding(cache[z])))
        if mlps == "freeze":
            hooks.append((mlp_out, holding(cache[mlp_out])))
    for sender in senders:
        layer, _, hook, slot = describe(sender)
        if sender.endswith(".bias"):
            bias = weights["b_O" if sender.startswith("attn") else "b_out"][layer]
            hooks.append((hook, adding(positions, new[sender] - bias)))
        elif hook.endswith("hook_post") and mlps == "freeze":
            change = (new[sender] - cache[hook][:, :, slot])[..., None]
            write = change * weights["W_out"][layer, slot]
            hooks.append((f"blocks.{layer}.hook_mlp_out", adding(positions, write)))
        else:
            hooks.append((hook, putting(positions, new[sender], slot)))
    return hooks


def noting(model, receiver: str, shape, noted: dict, watch: contextlib.ExitStack) -> list:
    """Return hooks that note what a receiver reads; for an MLP, watch its module's argument."""
    if receiver.startswith("mlp"):
        module = called_mlp(model, int(receiver.split(".")[1]))

        def before(module, args):
            noted[receiver] = args[0].reshape(*shape, -1).clone()

        watch.callback(module.register_forward_pre_hook(before).remove)
        return []
    hook, slot = where_of(model, receiver)

    def function(activation: Tensor, hook) -> None:
        noted[receiver] = (activation if slot is None else activation[:, :, slot]).clone()

    return [(hook, function)]


def called_mlp(model, layer: int):
    """Return the module that an MLP's input goes into; OPT calls its two matrices alone."""
    mlp = model.blocks[layer].mlp
    alone = getattr(model.cfg, "architecture", None) == "OPTForCausalLM"
    return getattr(mlp, "in") if alone else mlp


def where_of(model, receiver: str) -> tuple[str, int | None]:
    """Return a receiver's hook, and which head of its value; the logits read the last state."""
    if receiver == "logits":
        receiver = f"resid_post.{len(model.blocks) - 1}"
    _, _, hook, slot = describe(receiver)
    return hook, slot


# Pass D


def write(model, tokens, receivers, noted, positions, own_hooks=()) -> Tensor:
    """Return the logits [prompt, pos, d_vocab] with all the receivers at what was noted."""
    with torch.no_grad(), contextlib.ExitStack() as watch:
        hooks = [*own_hooks, *setting(model, receivers, noted, positions, watch)]
        return model.run_with_hooks(tokens, return_type="logits", fwd_hooks=hooks)


def setting(model, receivers, noted, positions, watch: contextlib.ExitStack) -> list:
    """Return the hooks that set the receivers; for an MLP, change its module's argument."""
    hooks = []
    for receiver in sorted(receivers, key=lambda receiver: receiver.startswith("resid_mid")):
        if receiver.startswith("mlp"):
            module = called_mlp(model, int(receiver.split(".")[1]))
            put, shape = putting(positions, noted[receiver]), noted[receiver].shape

            def before(module, args, put=put, shape=shape):
                return (put(args[0].reshape(shape), None).reshape(args[0].shape), *args[1:])

            watch.callback(module.register_forward_pre_hook(before).remove)
        elif receiver.startswith("resid_mid"):
            hooks += setting_middle(int(receiver.split(".")[1]), positions, noted[receiver])
        else:
            hook, slot = where_of(model, receiver)
            hooks.append((hook, putting(positions, noted[receiver], slot)))
    return hooks


def setting_middle(layer: int, positions: Tensor, values: Tensor) -> list:
    """Return hooks that set resid_mid by what attention adds: writing it itself misses a path."""
    before = {}

    def remember(resid_pre: Tensor, hook) -> None:
        before["state"] = resid_pre

    def function(attn_out: Tensor, hook) -> Tensor:
        return putting(positions, values - before["state"])(attn_out, hook)

    return [
        (f"blocks.{layer}.hook_resid_pre", remember),
        (f"blocks.{layer}.hook_attn_out", function),
    ]


# The same change carried to the last state, everything later frozen


def write_directly(model, tokens, receivers, noted, positions, cache, weights, norm, eps, own=()):
    """Return the logits of the base's last state plus what the receivers then add to it."""
    change = carried(model, tokens, receivers, noted, positions, cache, own)
    final = cache[f"blocks.{len(model.blocks) - 1}.hook_resid_post"]
    return unembed(final + change, weights, norm, eps)


def carried(model, tokens, receivers, noted, positions, cache, own_hooks=()) -> Tensor:
    """Return the change of the last state [prompt, pos, d_model].

    A changed state takes back what came before it; changed inputs of an attention layer or of an
    MLP add the difference of its write, the stream before it as it was.
    """
    total = torch.zeros_like(cache["blocks.0.hook_resid_pre"])
    for layer in range(len(model.blocks)):
        heads = [f"{layer}.{head}.{which}" for head in range(64) for which in "qkv"]
        total = put_state(f"resid_pre.{layer}", model, receivers, noted, positions, cache, total)
        for sublayer, group in (("attn", heads), ("mlp", [f"mlp.{layer}.in"])):
            here = [receiver for receiver in receivers if receiver in group]
            if here:
                name = f"blocks.{layer}.hook_{sublayer}_out"
                changed = read_write(model, tokens, name, here, noted, positions, own_hooks)
                total = total + changed - cache[name]
            after = f"resid_mid.{layer}" if sublayer == "attn" else f"resid_post.{layer}"
            total = put_state(after, model, receivers, noted, positions, cache, total)
    return put_state("logits", model, receivers, noted, positions, cache, total)


def put_state(state, model, receivers, noted, positions, cache, total) -> Tensor:
    """Return the change of the stream behind a state, which may be a receiver."""
    if state not in receivers:
        return total
    return putting(positions, noted[state] - cache[where_of(model, state)[0]])(total, None)


def read_write(model, tokens, name, receivers, noted, positions, own_hooks) -> Tensor:
    """Return what a sublayer writes when these of its inputs are changed, and nothing else."""
    seen = []
    with torch.no_grad(), contextlib.ExitStack() as watch:
        hooks = [*own_hooks, *setting(model, receivers, noted, positions, watch)]
        hooks.append((name, lambda write, hook: seen.append(write.clone())))
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    return seen[-1]


# Hook functions


def places(positions: Tensor):
    """Yield prompt and position of each."""
    for prompt in range(len(positions)):
        for position in positions[prompt].tolist():
            if position >= 0:
                yield prompt, position


def holding(value: Tensor):
    """Return a hook function that puts an activation back to this."""
    return lambda activation, hook: value.clone()


def putting(positions: Tensor, values: Tensor, slot: int | None = None):
    """Return a hook function that puts values [prompt, pos, ...] at the positions."""

    def function(activation: Tensor, hook) -> Tensor:
        activation = activation.expand(len(positions), *activation.shape[1:]).clone()
        for prompt, position in places(positions):
            if slot is None:
                activation[prompt, position] = values[prompt, position]
            else:
                activation[prompt, position, slot] = values[prompt, position]
        return activation

    return function


def adding(positions: Tensor, values: Tensor):
    """Return a hook function that adds values [prompt, pos, d_model] at the positions."""

    def function(activation: Tensor, hook) -> Tensor:
        activation = activation.clone()
        for prompt, position in places(positions):
            activation[prompt, position] += values[prompt, position]
        return activation

    return function
