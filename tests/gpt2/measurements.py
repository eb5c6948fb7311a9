"""What the check-list computes: one function a measurement, for any model, prompts and parts.

Each takes a `Subject` and plain arguments and returns numbers and texts in nested lists and dicts,
laid out as the value was published. Means are over prompts; answers are read at the last position.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import resid_patching as rp
from resid_patching.address import Head, HeadNode, Neuron, hook_name
from resid_patching.models import ModelView
from resid_patching.tokens import single_token


class Subject:
    """A model to measure, and whether its prompts begin with a beginning-of-sequence token."""

    def __init__(self, model: Any, bos: bool) -> None:
        self.model, self.bos = model, bos
        self.view = ModelView(model)
        self._runs: dict[str, rp.Run] = {}

    def run(self, prompts: Any) -> rp.Run:
        """The prompts on the model, captured once."""
        key = repr(prompts)
        if key not in self._runs:
            self._runs[key] = self.capture(prompts)
        return self._runs[key]

    def capture(self, prompts: Any) -> rp.Run:
        """The prompts on the model as it is now."""
        is_text = not isinstance(prompts, torch.Tensor)
        return rp.capture(self.model, prompts, **({"prepend_bos": self.bos} if is_text else {}))

    def text(self, token: int) -> str:
        """A token as text."""
        return self.view.tokenizer.decode([token])


MEASUREMENTS: dict[str, Callable[..., Any]] = {}


def measurement(function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a function into the registry under its name."""
    MEASUREMENTS[function.__name__] = function
    return function


def short(address: Any) -> str:
    """A head or neuron as L9H9, L11N611."""
    letter, number = ("H", address.head) if isinstance(address, Head) else ("N", address.index)
    return f"L{address.layer}{letter}{number}"


def flat(nested: Any) -> list[str]:
    """The texts of nested lists, in order."""
    return [x for part in nested for x in flat(part)] if isinstance(nested, list) else [nested]


def like(nested: Any, values: dict[str, Any]) -> Any:
    """Nested lists of texts as their values."""
    return [like(part, values) for part in nested] if isinstance(nested, list) else values[nested]


# Losses, logits, lists of tokens


@measurement
def loss(on: Subject, prompt: str, zeroed: str | None = None) -> float:
    """Loss per token; with a part replaced by zero everywhere, where one is given."""
    run = on.run(prompt)
    if zeroed is None:
        return float(rp.measure(run, rp.loss())[0])
    return float(rp.ablate(run, zeroed, rp.Zero(), metric=rp.loss()).patched[0, 0])


@measurement
def logit_differences(
    on: Subject, prompts: list[str], answers: list[str], foils: list[str]
) -> list[float]:
    """Logit of the answer less that of the foil, of each prompt."""
    return rp.measure(on.run(prompts), rp.logit_diff(answers, foils)).tolist()


@measurement
def logit_difference(on: Subject, **pairs: Any) -> float:
    """The mean of `logit_differences`."""
    return _mean(logit_differences(on, **pairs))


@measurement
def paired_logit_differences(
    on: Subject, prompts: list[str], others: list[str], answers: list[str], foils: list[str]
) -> list[list[float]]:
    """Of each prompt, and of its other prompt with the same answer and foil."""
    first = logit_differences(on, prompts, answers, foils)
    second = logit_differences(on, others, answers, foils)
    return [list(pair) for pair in zip(first, second, strict=True)]


@measurement
def probability(on: Subject, prompt: str, token: str) -> float:
    """The probability of a next token."""
    return float(rp.measure(on.run(prompt), rp.prob(token))[0])


@measurement
def unembedding_bias(on: Subject, token: str) -> float:
    """A token's bias."""
    return float(on.view.b_U[single_token(on.view, token)].detach())


@measurement
def largest_unembedding_biases(on: Subject, k: int) -> dict[str, list]:
    """The k largest, and their tokens."""
    top = on.view.b_U.topk(k)
    return {"value": top.values.tolist(), "token": [on.text(t) for t in top.indices.tolist()]}


@measurement
def top_tokens(on: Subject, prompt: str, k: int, columns: list[str]) -> dict[str, list]:
    """The k most probable next tokens: columns of id, token, logit and prob."""
    logits = on.run(prompt).logits_at(-1)[0, 0]
    top = logits.topk(k)
    ids = top.indices.tolist()
    found = {
        "id": ids,
        "token": [on.text(token) for token in ids],
        "logit": top.values.tolist(),
        "prob": logits.softmax(-1)[top.indices].tolist(),
    }
    return {name: found[name] for name in columns}


@measurement
def lens_top_tokens(on: Subject, prompt: str, k: int) -> list[dict[str, list]]:
    """The logit lens's k most probable next tokens behind each block."""
    top = rp.logit_lens(on.run(prompt)).top_tokens(k)
    rows = [{"layer": f"resid_post.{n}", "batch": 0, "pos": -1} for n in range(on.view.n_layers)]
    return [{"token": top.tokens(**row), "prob": top.sel(**row).tolist()} for row in rows]


@measurement
def token_ids(on: Subject, text: str) -> list[int]:
    """The ids that a prompt becomes."""
    return on.run(text).prompts.tokens[0].tolist()


@measurement
def answer_ids(on: Subject, pairs: list[list[str]]) -> list[list[int]]:
    """The ids that answers and foils become."""
    return [[single_token(on.view, text) for text in pair] for pair in pairs]


# Direct logit attribution


def _attribution(
    on: Subject, prompts: list[str], answers: list[str], foils: list[str], by: str
) -> dict[str, float]:
    dla = rp.direct_logit_attribution(on.capture(prompts), answers, foils, by=by)
    return dict(zip(dla.components, dla.values[:, :, 0].mean(1).tolist(), strict=True))


@contextlib.contextmanager
def _zeroed(on: Subject, head: str | None) -> Iterator[None]:
    """The model with a head's values zeroed at the last position, by a hook of the caller's."""
    if head is None:
        yield
        return
    address = rp.parse(head)

    def zero(z: torch.Tensor, hook: Any) -> torch.Tensor:
        z = z.clone()
        z[:, -1, address.head] = 0
        return z

    with on.model.hooks(fwd_hooks=[(hook_name(address), zero)]):
        yield


@measurement
def attribution_by_component(on: Subject, **pairs: Any) -> dict[str, list]:
    """Embeddings, attention layers and MLPs."""
    rows = _attribution(on, **pairs, by="component")
    names = {f"{part}.{n}": f"{n}_{part}_out" for n in range(on.view.n_layers) for part in _PARTS}
    found = {names.get(row, row): value for row, value in rows.items() if "bias" not in row}
    return {"labels": list(found), "values": list(found.values())}


_PARTS = ("attn", "mlp")


@measurement
def accumulated_attribution(on: Subject, **pairs: Any) -> dict[str, list]:
    """The stream up to each point by the scale of the last norm: the rows, added up."""
    rows = _attribution(on, **pairs, by="component")
    total, found = rows["embed"] + rows.get("pos_embed", 0.0), {}
    for layer in range(on.view.n_layers):
        for part, place in zip(_PARTS, ("pre", "mid"), strict=True):
            found[f"{layer}_{place}"] = total
            total += rows[f"{part}.{layer}"]
    found["final_post"] = total
    return {"labels": list(found), "values": list(found.values())}


@measurement
def attribution_by_head(on: Subject, zeroed: str | None = None, **pairs: Any) -> list[list[float]]:
    """Each head [layer][head]; in a run with one head zeroed at the last position, if given."""
    with _zeroed(on, zeroed):
        rows = _attribution(on, **pairs, by="head")
    heads = range(on.view.n_heads)
    return [[rows[f"{layer}.{head}"] for head in heads] for layer in range(on.view.n_layers)]


@measurement
def top_head(on: Subject, **pairs: Any) -> str:
    """The head that pushes the answer up most."""
    rows = _attribution(on, **pairs, by="head")
    return short(max(rp.heads(on.model), key=lambda head: rows[str(head)]))


@measurement
def final_norm_scales(on: Subject, prompts: list[str], zeroed: str | None = None) -> list[float]:
    """What the last norm divides by at the last position of each prompt."""
    with _zeroed(on, zeroed):
        final = on.capture(prompts).fetch(rp.parse(f"resid_post.{on.view.n_layers - 1}"))
    return on.view.final_norm.scale(final[:, -1]).tolist()


@measurement
def final_norm_scale_ratio(on: Subject, prompts: list[str], zeroed: str) -> float:
    """The mean of the scale, clean by zeroed."""
    clean, changed = final_norm_scales(on, prompts), final_norm_scales(on, prompts, zeroed)
    return _mean([a / b for a, b in zip(clean, changed, strict=True)])


@measurement
def largest_parts(on: Subject, prompt: str, answer: str, foil: str, k: int) -> dict[str, list]:
    """The k largest among all heads and neurons, by absolute value."""
    found = {}
    for by, kind in (("head", Head), ("neuron", Neuron)):
        dla = rp.direct_logit_attribution(on.run(prompt), answer, foil, by=by)
        parts = zip(map(rp.parse, dla.components), dla.values[:, 0, 0].tolist(), strict=True)
        found |= {short(part): value for part, value in parts if isinstance(part, kind)}
    ranked = sorted(found, key=lambda part: -abs(found[part]))[:k]
    return {"part": ranked, "value": [found[part] for part in ranked]}


@measurement
def largest_neurons(on: Subject, prompt: str, answers: list[str]) -> dict[str, list]:
    """The neuron that writes most to each answer's logit, above the mean over the vocabulary."""
    found = {}
    for answer in answers:
        dla = rp.direct_logit_attribution(on.run(prompt), answer, by="neuron")
        parts = zip(map(rp.parse, dla.components), dla.values[:, 0, 0].tolist(), strict=True)
        neurons = {short(part): value for part, value in parts if isinstance(part, Neuron)}
        best = max(neurons, key=lambda neuron: abs(neurons[neuron]))
        found[answer] = [best, neurons[best]]
    return found


# Attention


@measurement
def attention_and_projection(
    on: Subject,
    prompts: list[str],
    head: str,
    names: dict[str, list[str]],
    positions: dict[str, list[int]],
) -> dict[str, dict[str, list[float]]]:
    """A head's attention from the last position to a name; its write on the name's unembedding."""
    address, run = rp.parse(head), on.run(prompts)
    parts = rp.decompose(run, by="head")
    writes = parts.vectors(-1)[parts.writers.index(address), :, 0]
    pattern = run.fetch(HeadNode(address.layer, address.head, "pattern"))[:, address.head]
    rows, last = range(len(run)), [length - 1 for length in run.prompts.lengths]
    found = {}
    for name, tokens in names.items():
        ids = torch.tensor([single_token(on.view, token) for token in tokens])
        columns = on.view.unembed_columns(ids).to(writes.dtype)
        found[name] = {
            "attention_prob": pattern[rows, last, positions[name]].tolist(),
            "projection": (writes * columns).sum(-1).tolist(),
        }
    return found


@measurement
def attention_on_stripe(on: Subject, tokens: list[list[int]], offset: int) -> list[list[float]]:
    """Each head's mean attention to the token `offset` places back [layer][head]."""
    run = on.run(torch.tensor(tokens))
    patterns = [HeadNode(layer, 0, "pattern") for layer in range(on.view.n_layers)]
    run.fetch_all(patterns)
    found = []
    for pattern in map(run.fetch, patterns):
        stripe = pattern.diagonal(-offset, dim1=-2, dim2=-1)
        found.append(stripe.mean((0, 2)).tolist())
    return found


# Interventions


@measurement
def patching(
    on: Subject,
    prompts: list[str],
    others: list[str],
    answers: list[str],
    foils: list[str],
    targets: list,
    each: bool = False,
) -> list:
    """The share of the way from prompts to others that one activation of the others restores.

    For each of `targets`, which may be nested lists; at each position in turn if `each`.
    """
    metric = rp.logit_diff(answers, foils)
    base, source = on.run(prompts), on.run(others)
    options = {"positions": "each"} if each else {}
    effect = rp.ablate(base, flat(targets), rp.Resample(source), metric=metric, **options)
    shares = effect.recovery(rp.measure(source, metric)).tolist()
    return like(targets, dict(zip(flat(targets), shares, strict=True)))


@measurement
def zeroed_logit_difference(
    on: Subject, prompts: list[str], answers: list[str], foils: list[str], zeroed: str
) -> float:
    """With a head replaced by zero at the last position."""
    metric = rp.logit_diff(answers, foils)
    effect = rp.ablate(on.run(prompts), zeroed, rp.Zero(), metric=metric, positions=-1)
    return float(effect.patched.mean())


@measurement
def naive_prediction(on: Subject, zeroed: str, **pairs: Any) -> float:
    """The logit difference less the head's own attribution."""
    return logit_difference(on, **pairs) - _attribution(on, **pairs, by="head")[zeroed]


@measurement
def ablation_summary(on: Subject, zeroed: str, **pairs: Any) -> list[float]:
    """The logit difference, a head's attribution, the naive prediction, and what comes out."""
    own = _attribution(on, **pairs, by="head")[zeroed]
    before = logit_difference(on, **pairs)
    return [before, own, before - own, zeroed_logit_difference(on, zeroed=zeroed, **pairs)]


@measurement
def path_patching(
    on: Subject,
    prompts: list[str],
    others: list[str],
    answers: list[str],
    foils: list[str],
    senders: list,
    receivers: str | list[str],
) -> list:
    """A head's message to the receivers replaced by the others': in percent of the difference.

    MLPs recomputed; 0 where a sender writes nothing that a receiver reads.
    """
    metric = rp.logit_diff(answers, foils)
    base, source = on.run(prompts), on.run(others)
    how = rp.Path(to=receivers, using=rp.Resample(source), mlps="recompute")
    effect = rp.ablate(base, flat(senders), how, metric=metric)
    shares = -100 * effect.recovery(rp.measure(source, metric)).nan_to_num()
    return like(senders, dict(zip(flat(senders), shares.tolist(), strict=True)))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
