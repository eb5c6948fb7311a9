"""Ablation the slow way: a hook for each replaced activation, a whole forward pass for each figure.

Prompts are runs of equal length without padding, so everything is [prompt, pos, ...]. A change is
(site, positions, values): what an activation is replaced with at some positions, values
[prompt, n, ...] for positions [prompt, n].
"""

import torch
from torch import Tensor

STAGES = {"resid_pre": 0, "attn": 1, "resid_mid": 2, "mlp": 3, "resid_post": 4}


def describe(site: str) -> tuple[int, int, str, int | None]:
    """Return the layer, the stage in it, the hook, and which head or neuron of the hook's value."""
    first, *rest = site.split(".")
    if first == "input":
        return -1, 0, "blocks.0.hook_resid_pre", None
    if first in ("embed", "pos_embed"):
        return -1, 0, f"hook_{first}", None
    if first.startswith("resid"):
        return int(rest[0]), STAGES[first], f"blocks.{rest[0]}.hook_{first}", None
    if first == "mlp" and len(rest) == 2 and rest[1] != "bias":
        return int(rest[0]), STAGES["mlp"], f"blocks.{rest[0]}.mlp.hook_post", int(rest[1])
    if first in ("attn", "mlp"):
        return int(rest[0]), STAGES[first], f"blocks.{rest[0]}.hook_{first}_out", None
    which = rest[1] if len(rest) == 2 else "z"
    return int(first), STAGES["attn"], f"blocks.{first}.attn.hook_{which}", int(rest[0])


def activations(model, tokens: Tensor) -> dict[str, Tensor]:
    """Return every activation of a clean run."""
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    return {name: value.detach().clone() for name, value in cache.items()}


def value(site: str, cache: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    """Return a site's own value in a clean run [prompt, pos, ...]."""
    layer, _, hook, slot = describe(site)
    n_prompts, n_positions = cache["blocks.0.hook_resid_pre"].shape[:2]
    if site.endswith("bias"):
        bias = weights["b_O" if site.startswith("attn") else "b_out"][layer]
        return bias.expand(n_prompts, n_positions, -1)
    activation = cache[hook]
    if hook.endswith("pattern"):
        return activation[:, slot]
    activation = activation.expand(n_prompts, *activation.shape[1:])
    return activation if slot is None else activation[:, :, slot]


def hooks(changes, weights: dict[str, Tensor]) -> list:
    """Return the hooks that make the changes, whole writes before biases before the state."""
    found = []
    for site, positions, values in changes:
        layer, _, hook, slot = describe(site)
        bias = None
        if site.endswith("bias"):
            bias = weights["b_O" if site.startswith("attn") else "b_out"][layer]
        if site.startswith("resid_mid"):
            found += middle(layer, positions, values)
        else:
            rank = 1 if bias is not None else 0
            found.append((rank, hook, replacing(hook, slot, bias, positions, values)))
    return [(hook, function) for _, hook, function in sorted(found, key=lambda item: item[0])]


def replacing(name: str, slot: int | None, bias: Tensor | None, positions: Tensor, values: Tensor):
    """Return a hook function that puts values in place, or moves a write by another bias."""

    def function(activation: Tensor, hook) -> Tensor:
        activation = activation.expand(len(positions), *activation.shape[1:]).clone()
        for prompt in range(len(positions)):
            for number, position in enumerate(positions[prompt].tolist()):
                new = values[prompt, number]
                if bias is not None:
                    activation[prompt, position] += new - bias
                elif name.endswith("pattern"):
                    activation[prompt, slot, position] = new
                elif slot is not None:
                    activation[prompt, position, slot] = new
                else:
                    activation[prompt, position] = new
        return activation

    return function


def middle(layer: int, positions: Tensor, values: Tensor) -> list:
    """Return hooks that set resid_mid by what attention adds: writing it itself misses a path."""
    before = {}

    def remember(resid_pre: Tensor, hook) -> None:
        before["state"] = resid_pre

    def function(attn_out: Tensor, hook) -> Tensor:
        attn_out = attn_out.clone()
        for prompt in range(len(positions)):
            for number, position in enumerate(positions[prompt].tolist()):
                target = values[prompt, number]
                attn_out[prompt, position] = target - before["state"][prompt, position]
        return attn_out

    return [
        (2, f"blocks.{layer}.hook_resid_pre", remember),
        (2, f"blocks.{layer}.hook_attn_out", function),
    ]


def forward(model, tokens: Tensor, changes, weights, own_hooks=()) -> Tensor:
    """Return the logits [prompt, pos, d_vocab] with the changes made."""
    with torch.no_grad():
        return model.run_with_hooks(
            tokens, return_type="logits", fwd_hooks=[*own_hooks, *hooks(changes, weights)]
        )


def frozen_difference(model, tokens: Tensor, changes, weights, cache) -> Tensor:
    """Return what the changes add to the last state when every later write stays as it was.

    A replaced write adds new - old. A replaced state takes back whatever came before it. A node
    inside attention or MLP adds the difference of its sublayer's write, the stream before it clean.
    """
    total = torch.zeros_like(cache["blocks.0.hook_resid_pre"])
    where = {describe(site)[:2] for site, _, _ in changes}
    for layer, stage in sorted(where):
        here = [change for change in changes if describe(change[0])[:2] == (layer, stage)]
        if layer < 0 or stage in (0, 2, 4):
            for site, positions, values in here:
                old = value(site, cache, weights)
                for prompt in range(len(positions)):
                    for number, position in enumerate(positions[prompt].tolist()):
                        difference = values[prompt, number] - old[prompt, position]
                        if layer < 0:
                            total[prompt, position] += difference
                        else:
                            total[prompt, position] = difference
        else:
            name = f"blocks.{layer}.hook_{'attn' if stage == 1 else 'mlp'}_out"
            seen = []
            reading = (name, lambda write, hook, seen=seen: seen.append(write.clone()) and None)
            with torch.no_grad():
                model.run_with_hooks(tokens, fwd_hooks=[*hooks(here, weights), reading])
            total = total + seen[-1] - cache[name]
    return total


def unembed(state: Tensor, weights: dict[str, Tensor], norm: str, eps: float) -> Tensor:
    """Return the logits of a last state, its norm's statistics taken from itself."""
    if norm == "LN":
        state = state - state.mean(-1, keepdim=True)
    scale = ((state**2).mean(-1, keepdim=True) + eps) ** 0.5
    return (state / scale * weights["gain"] + weights["shift"]) @ weights["W_U"] + weights["b_U"]


def direct_logits(model, tokens, changes, weights, cache, norm: str, eps: float) -> Tensor:
    """Return the logits of the clean last state plus the changes, every later write frozen."""
    final = cache[f"blocks.{len(weights['b_O']) - 1}.hook_resid_post"]
    moved = final + frozen_difference(model, tokens, changes, weights, cache)
    return unembed(moved, weights, norm, eps)


# Metrics: logits [prompt, pos, d_vocab] -> one number a prompt


def logit_diff(logits: Tensor, answer: int, foil: int, position: int = -1) -> Tensor:
    """Return logit[answer] - logit[foil]."""
    return logits[:, position, answer] - logits[:, position, foil]


def probability(logits: Tensor, token: int, position: int = -1) -> Tensor:
    """Return the softmax's value at a token."""
    powers = logits[:, position].exp()
    return powers[:, token] / powers.sum(-1)


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return -log p(next token), averaged over each prompt."""
    figures = []
    for prompt in range(len(tokens)):
        nats = []
        for position in range(tokens.shape[1] - 1):
            powers = logits[prompt, position].exp()
            nats.append(-(powers[tokens[prompt, position + 1]] / powers.sum()).log())
        figures.append(torch.stack(nats).mean())
    return torch.stack(figures)


def divergence(clean: Tensor, changed: Tensor, position: int = -1) -> Tensor:
    """Return KL(clean || changed)."""
    p = clean[:, position].exp() / clean[:, position].exp().sum(-1, keepdim=True)
    q = changed[:, position].exp() / changed[:, position].exp().sum(-1, keepdim=True)
    return (p * (p / q).log()).sum(-1)
