"""The check-list's measurements the slow way: a plain transformer, one prompt and change at a time.

`Plain` is GPT-2 or Llama written out in float64 from a folder's weights. Each function below has
the name and the arguments of a measurement; where one replaces an activation, the whole model runs
again with it replaced. Nothing of the package or of TransformerLens is imported.

A place is (name, layer), its value [pos, ...] of one prompt: q, k, v and z [pos, head, d_head],
pattern [head, query, key], attn and mlp [pos, d_model], post [pos, d_mlp], resid_pre, resid_post.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

Place = tuple[str, int]


class Plain:
    """A model and its tokenizer.

    Attributes:
        bos: whether prompts begin with the beginning-of-sequence token.
    """

    def __init__(self, folder: Path, *, folded: bool, bos: bool) -> None:
        """Reads the weights; `folded` as TransformerLens folds GPT-2: see `fold`."""
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.bos = bos
        self.n_heads = self.config.get("n_head") or self.config["num_attention_heads"]
        self.n_layers = self.config.get("n_layer") or self.config["num_hidden_layers"]
        weights = load_file(Path(folder) / "model.safetensors")
        short = {
            name.partition(".")[2]: w for name, w in weights.items() if name != "lm_head.weight"
        }
        self.w = {name: w.double() for name, w in short.items()}
        self.is_llama = self.config["model_type"] == "llama"
        self.read = self.read_llama if self.is_llama else self.read_gpt2
        embedding = self.w["embed_tokens.weight" if self.is_llama else "wte.weight"]
        self.W_U, self.d_model = embedding.T, embedding.shape[1]
        self.b_U = torch.zeros(len(embedding), dtype=torch.float64)
        if folded:
            self.fold()
        self.mean_column = self.W_U.mean(1)

    def fold(self) -> None:
        """Moves value biases into output biases, the last gain into W_U; centres writes and W_U."""
        d = self.d_model
        for layer in range(self.n_layers):
            prefix = f"h.{layer}."
            bias, out = self.w[f"{prefix}attn.c_attn.bias"], self.w[f"{prefix}attn.c_proj.weight"]
            shift = self.w[f"{prefix}ln_1.bias"] @ self.w[f"{prefix}attn.c_attn.weight"][:, 2 * d :]
            self.w[f"{prefix}attn.c_proj.bias"] += (bias[2 * d :] + shift) @ out
            bias[2 * d :] = -shift  # so that values are of the norm without its bias
            for name in ("attn.c_proj.weight", "attn.c_proj.bias"):
                self.centre(prefix + name)
            for name in ("mlp.c_proj.weight", "mlp.c_proj.bias"):
                self.centre(prefix + name)
        gain, shift = self.w["ln_f.weight"], self.w["ln_f.bias"]
        b_U = shift @ self.W_U
        W_U = gain[:, None] * self.W_U
        self.W_U, self.b_U = W_U - W_U.mean(1, keepdim=True), b_U - b_U.mean()
        self.w["ln_f.weight"], self.w["ln_f.bias"] = torch.ones(d).double(), torch.zeros(d).double()
        for name in ("wte.weight", "wpe.weight"):
            self.centre(name)

    def centre(self, name: str) -> None:
        self.w[name] = self.w[name] - self.w[name].mean(-1, keepdim=True)

    # Text

    def ids(self, text: str) -> list[int]:
        found = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [self.tokenizer.bos_token_id, *found] if self.bos else found

    def token(self, text: str) -> int:
        (found,) = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    # Passes

    def run(self, tokens: list[int], changes: dict[Place, Callable] | None = None):
        """Return the logits [pos, d_vocab] and every place, with some of them changed."""
        seen: dict[Place, Tensor] = {}
        changes = changes or {}

        def at(name: str, layer: int, value: Tensor) -> Tensor:
            if (name, layer) in changes:
                value = changes[name, layer](value.clone())
            seen[name, layer] = value
            return value

        final = self.read(tokens, at)
        return self.unembed(final), seen

    def unembed(self, final: Tensor) -> Tensor:
        return self.last_norm(final) @ self.W_U + self.b_U

    def last_norm(self, x: Tensor) -> Tensor:
        return self.rms(x, "norm") if self.is_llama else self.layer_norm(x, "ln_f")

    def scale(self, x: Tensor) -> Tensor:
        """Return what the last norm divides a state by."""
        eps = self.config["rms_norm_eps" if self.is_llama else "layer_norm_epsilon"]
        if not self.is_llama:
            x = x - x.mean(-1, keepdim=True)
        return (x.pow(2).mean(-1) + eps).sqrt()

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.config["layer_norm_epsilon"]).sqrt()
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def rms(self, x: Tensor, name: str) -> Tensor:
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x * self.w[f"{name}.weight"]

    def read_gpt2(self, tokens: list[int], at) -> Tensor:
        embed = at("embed", 0, self.w["wte.weight"][tokens])
        x = embed + at("pos_embed", 0, self.w["wpe.weight"][: len(tokens)])
        for layer in range(self.n_layers):
            x = at("resid_pre", layer, x)
            name = f"h.{layer}"
            qkv = self.linear(self.layer_norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
            q, k, v = (
                at(which, layer, part.unflatten(-1, (self.n_heads, -1)))
                for which, part in zip("qkv", qkv.chunk(3, -1), strict=True)
            )
            z = at("z", layer, self.mix(q, k, v, layer, at)).flatten(1)
            x = x + at("attn", layer, self.linear(z, f"{name}.attn.c_proj"))
            hidden = self.linear(self.layer_norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
            kind = "tanh" if self.config["activation_function"] == "gelu_new" else "none"
            post = at("post", layer, torch.nn.functional.gelu(hidden, approximate=kind))
            x = x + at("mlp", layer, self.linear(post, f"{name}.mlp.c_proj"))
            x = at("resid_post", layer, x)
        return x

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def read_llama(self, tokens: list[int], at) -> Tensor:
        x = at("embed", 0, self.w["embed_tokens.weight"][tokens])
        n_kv = self.config["num_key_value_heads"]
        for layer in range(self.n_layers):
            x = at("resid_pre", layer, x)
            name = f"layers.{layer}"
            normed = self.rms(x, f"{name}.input_layernorm")
            q, k, v = (
                at(which, layer, (normed @ self.w[weight].T).unflatten(-1, (n, -1)))
                for which, n in (("q", self.n_heads), ("k", n_kv), ("v", n_kv))
                for weight in [f"{name}.self_attn.{which}_proj.weight"]
            )
            q, k = self.rotate(q), self.rotate(k)
            k, v = (t.repeat_interleave(self.n_heads // n_kv, 1) for t in (k, v))
            z = at("z", layer, self.mix(q, k, v, layer, at)).flatten(1)
            x = x + at("attn", layer, z @ self.w[f"{name}.self_attn.o_proj.weight"].T)
            normed = self.rms(x, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(normed @ self.w[f"{name}.mlp.gate_proj.weight"].T)
            post = at("post", layer, gate * (normed @ self.w[f"{name}.mlp.up_proj.weight"].T))
            x = x + at("mlp", layer, post @ self.w[f"{name}.mlp.down_proj.weight"].T)
            x = at("resid_post", layer, x)
        return x

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        rates = float(theta) ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * rates
        first, second = x[..., :half], x[..., half:]
        turned = (
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        )
        return torch.cat(turned, -1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, layer: int, at) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        pattern = at("pattern", layer, scores.masked_fill(future, -torch.inf).softmax(-1))
        return torch.einsum("hqk,khd->qhd", pattern, v)

    # Parts

    def out(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's W_O [head, d_head, d_model] and W_out [d_mlp, d_model]."""
        if self.is_llama:
            W_O = self.w[f"layers.{layer}.self_attn.o_proj.weight"].T
            W_out = self.w[f"layers.{layer}.mlp.down_proj.weight"].T
        else:
            W_O, W_out = (
                self.w[f"h.{layer}.attn.c_proj.weight"],
                self.w[f"h.{layer}.mlp.c_proj.weight"],
            )
        return W_O.unflatten(0, (self.n_heads, -1)), W_out

    def score(self, write: Tensor, sigma: Tensor, answer: int, foil: int | None) -> Tensor:
        """Return what writes [..., d_model] add to logit[answer] - logit[foil]."""
        other = self.mean_column if foil is None else self.W_U[:, foil]
        direction = self.W_U[:, answer] - other
        if not self.is_llama:
            write = write - write.mean(-1, keepdim=True)
        gain = self.w["norm.weight" if self.is_llama else "ln_f.weight"]
        return (write / sigma * gain) @ direction


def changing(target: str, position: int | None, value) -> dict[Place, Callable]:
    """Return the change that puts a value at a target: 3.1 (its z), 3.1.q, attn.3, resid_pre.3.

    Args:
        target: the target.
        position: where (for a pattern, whose row), or None for everywhere.
        value: zero, or the places of a run to take it from.
    """
    first, second, *rest = target.split(".")
    if first.isdigit():
        name, layer, head = (rest or ["z"])[0], int(first), int(second)
    else:
        name, layer, head = first, int(second), slice(None)
    where = slice(None) if position is None else position
    key = (head, where) if name == "pattern" else (where, head)
    key = where if isinstance(head, slice) else key

    def change(activation: Tensor) -> Tensor:
        activation[key] = 0 if value == 0 else value[name, layer][key]
        return activation

    return {(name, layer): change}


def gap(logits: Tensor, answer: int, foil: int) -> float:
    return float(logits[-1, answer] - logits[-1, foil])


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def like(nested, values: dict):
    """Return nested lists of keys as their values."""
    return [like(part, values) for part in nested] if isinstance(nested, list) else values[nested]


def flat(nested) -> list[str]:
    return [x for part in nested for x in flat(part)] if isinstance(nested, list) else [nested]


def triples(model: Plain, prompts, answers, foils):
    for prompt, answer, foil in zip(prompts, answers, foils, strict=True):
        yield model.ids(prompt), model.token(answer), model.token(foil)


# Losses, logits, lists of tokens


def loss(model, prompt, zeroed=None):
    tokens = model.ids(prompt)
    logits, _ = model.run(tokens, changing(zeroed, None, 0) if zeroed else None)
    return mean(-float(row.log_softmax(-1)[t]) for row, t in zip(logits, tokens[1:], strict=False))


def logit_differences(model, prompts, answers, foils):
    found = triples(model, prompts, answers, foils)
    return [gap(model.run(tokens)[0], a, f) for tokens, a, f in found]


def logit_difference(model, prompts, answers, foils):
    return mean(logit_differences(model, prompts, answers, foils))


def paired_logit_differences(model, prompts, others, answers, foils):
    first = logit_differences(model, prompts, answers, foils)
    second = logit_differences(model, others, answers, foils)
    return [list(pair) for pair in zip(first, second, strict=True)]


def probability(model, prompt, token):
    return float(model.run(model.ids(prompt))[0][-1].softmax(-1)[model.token(token)])


def unembedding_bias(model, token):
    return float(model.b_U[model.token(token)])


def largest_unembedding_biases(model, k):
    order = sorted(range(len(model.b_U)), key=lambda t: -float(model.b_U[t]))[:k]
    return {"value": [float(model.b_U[t]) for t in order], "token": [model.text(t) for t in order]}


def ranked(model, logits, k):
    order = sorted(range(len(logits)), key=lambda t: -float(logits[t]))[:k]
    shares = logits.softmax(-1)
    return {
        "id": order,
        "token": [model.text(t) for t in order],
        "logit": [float(logits[t]) for t in order],
        "prob": [float(shares[t]) for t in order],
    }


def top_tokens(model, prompt, k, columns):
    found = ranked(model, model.run(model.ids(prompt))[0][-1], k)
    return {name: found[name] for name in columns}


def lens_top_tokens(model, prompt, k):
    _, seen = model.run(model.ids(prompt))
    rows = [
        ranked(model, model.unembed(seen["resid_post", n][-1]), k) for n in range(model.n_layers)
    ]
    return [{name: row[name] for name in ("token", "prob")} for row in rows]


def token_ids(model, text):
    return model.ids(text)


def answer_ids(model, pairs):
    return [[model.token(text) for text in pair] for pair in pairs]


# Attribution


def zeroed_last(zeroed) -> dict | None:
    return changing(zeroed, -1, 0) if zeroed else None


def parts_of(model, seen, by: str) -> dict[str, Tensor]:
    """Return the vectors written at the last position by components, or by heads."""
    if by == "head":
        return {
            f"{layer}.{head}": seen["z", layer][-1, head] @ model.out(layer)[0][head]
            for layer in range(model.n_layers)
            for head in range(model.n_heads)
        }
    found = {"embed": seen["embed", 0][-1]}
    if ("pos_embed", 0) in seen:
        found["pos_embed"] = seen["pos_embed", 0][-1]
    for layer in range(model.n_layers):
        found[f"{layer}_attn_out"] = seen["attn", layer][-1]
        found[f"{layer}_mlp_out"] = seen["mlp", layer][-1]
    return found


def contributions(model, prompts, answers, foils, by, zeroed=None) -> dict[str, float]:
    rows = []
    for tokens, answer, foil in triples(model, prompts, answers, foils):
        _, seen = model.run(tokens, zeroed_last(zeroed))
        sigma = model.scale(seen["resid_post", model.n_layers - 1][-1])
        parts = parts_of(model, seen, by)
        rows.append({p: float(model.score(x, sigma, answer, foil)) for p, x in parts.items()})
    return {part: mean(row[part] for row in rows) for part in rows[0]}


def attribution_by_component(model, prompts, answers, foils):
    found = contributions(model, prompts, answers, foils, "component")
    return {"labels": list(found), "values": list(found.values())}


def accumulated_attribution(model, prompts, answers, foils):
    rows = {}
    for tokens, answer, foil in triples(model, prompts, answers, foils):
        _, seen = model.run(tokens)
        sigma = model.scale(seen["resid_post", model.n_layers - 1][-1])
        states = {}
        for layer in range(model.n_layers):
            states[f"{layer}_pre"] = seen["resid_pre", layer][-1]
            states[f"{layer}_mid"] = seen["resid_pre", layer][-1] + seen["attn", layer][-1]
        states["final_post"] = seen["resid_post", model.n_layers - 1][-1]
        for label, state in states.items():
            rows.setdefault(label, []).append(float(model.score(state, sigma, answer, foil)))
    return {"labels": list(rows), "values": [mean(values) for values in rows.values()]}


def attribution_by_head(model, prompts, answers, foils, zeroed=None):
    found = contributions(model, prompts, answers, foils, "head", zeroed)
    layers, heads = range(model.n_layers), range(model.n_heads)
    return [[found[f"{layer}.{head}"] for head in heads] for layer in layers]


def top_head(model, prompts, answers, foils):
    found = contributions(model, prompts, answers, foils, "head")
    layer, head = max(found, key=found.__getitem__).split(".")
    return f"L{layer}H{head}"


def final_norm_scales(model, prompts, zeroed=None):
    found = []
    for prompt in prompts:
        _, seen = model.run(model.ids(prompt), zeroed_last(zeroed))
        found.append(float(model.scale(seen["resid_post", model.n_layers - 1][-1])))
    return found


def final_norm_scale_ratio(model, prompts, zeroed):
    clean, changed = final_norm_scales(model, prompts), final_norm_scales(model, prompts, zeroed)
    return mean(a / b for a, b in zip(clean, changed, strict=True))


def neurons_and_heads(model, prompt, answer, foil):
    _, seen = model.run(model.ids(prompt))
    sigma = model.scale(seen["resid_post", model.n_layers - 1][-1])
    heads = {
        "L{}H{}".format(*part.split(".")): float(model.score(x, sigma, answer, foil))
        for part, x in parts_of(model, seen, "head").items()
    }
    neurons = {}
    for layer in range(model.n_layers):
        writes = seen["post", layer][-1][:, None] * model.out(layer)[1]
        for number, value in enumerate(model.score(writes, sigma, answer, foil).tolist()):
            neurons[f"L{layer}N{number}"] = value
    return heads, neurons


def largest_parts(model, prompt, answer, foil, k):
    heads, neurons = neurons_and_heads(model, prompt, model.token(answer), model.token(foil))
    found = heads | neurons
    order = sorted(found, key=lambda part: -abs(found[part]))[:k]
    return {"part": order, "value": [found[part] for part in order]}


def largest_neurons(model, prompt, answers):
    found = {}
    for answer in answers:
        _, neurons = neurons_and_heads(model, prompt, model.token(answer), None)
        best = max(neurons, key=lambda part: abs(neurons[part]))
        found[answer] = [best, neurons[best]]
    return found


# Attention


def attention_and_projection(model, prompts, head, names, positions):
    layer, number = map(int, head.split("."))
    found = {name: {"attention_prob": [], "projection": []} for name in names}
    for row, prompt in enumerate(prompts):
        _, seen = model.run(model.ids(prompt))
        write = seen["z", layer][-1, number] @ model.out(layer)[0][number]
        for name, tokens in names.items():
            share = seen["pattern", layer][number, -1, positions[name][row]]
            found[name]["attention_prob"].append(float(share))
            projection = write @ model.W_U[:, model.token(tokens[row])]
            found[name]["projection"].append(float(projection))
    return found


def attention_on_stripe(model, tokens, offset):
    found = torch.zeros(model.n_layers, model.n_heads, dtype=torch.float64)
    for row in tokens:
        _, seen = model.run(row)
        for layer in range(model.n_layers):
            for head in range(model.n_heads):
                places = range(offset, len(row))
                shares = [float(seen["pattern", layer][head, p, p - offset]) for p in places]
                found[layer, head] += mean(shares) / len(tokens)
    return found.tolist()


# Interventions


def patching(model, prompts, others, answers, foils, targets, each=False):
    """The share of the way from prompts to others that one activation of theirs restores."""
    before, after, patched = [], [], {target: [] for target in flat(targets)}
    pairs = triples(model, prompts, answers, foils)
    for (tokens, answer, foil), other in zip(pairs, others, strict=True):
        theirs, source = model.run(model.ids(other))
        before.append(gap(model.run(tokens)[0], answer, foil))
        after.append(gap(theirs, answer, foil))
        for target in patched:
            places = range(len(tokens)) if each else [None]
            logits = [model.run(tokens, changing(target, p, source))[0] for p in places]
            patched[target].append([gap(row, answer, foil) for row in logits])
    whole = mean(after) - mean(before)
    shares = {
        target: [(mean(column) - mean(before)) / whole for column in zip(*rows, strict=True)]
        for target, rows in patched.items()
    }
    return like(targets, shares if each else {t: share for t, (share,) in shares.items()})


def zeroed_logit_difference(model, prompts, answers, foils, zeroed):
    found = triples(model, prompts, answers, foils)
    return mean(gap(model.run(tokens, changing(zeroed, -1, 0))[0], a, f) for tokens, a, f in found)


def naive_prediction(model, prompts, answers, foils, zeroed):
    own = contributions(model, prompts, answers, foils, "head")[zeroed]
    return logit_difference(model, prompts, answers, foils) - own


def ablation_summary(model, prompts, answers, foils, zeroed):
    before = logit_difference(model, prompts, answers, foils)
    naive = naive_prediction(model, prompts, answers, foils, zeroed)
    after = zeroed_logit_difference(model, prompts, answers, foils, zeroed)
    return [before, before - naive, naive, after]


def path_patching(model, prompts, others, answers, foils, senders, receivers):
    """Change by one head's message to receivers, in percent of the gap; MLPs recomputed."""
    before, after, patched = [], [], {sender: [] for sender in flat(senders)}
    pairs = triples(model, prompts, answers, foils)
    for (tokens, answer, foil), other in zip(pairs, others, strict=True):
        logits, base = model.run(tokens)
        theirs, source = model.run(model.ids(other))
        before.append(gap(logits, answer, foil))
        after.append(gap(theirs, answer, foil))
        for sender in patched:
            hold = {
                ("z", n): lambda _, n=n, base=base: base["z", n].clone()
                for n in range(model.n_layers)
            }
            layer, head = map(int, sender.split("."))

            def send(_, layer=layer, head=head, base=base, source=source):
                z = base["z", layer].clone()
                z[:, head] = source["z", layer][:, head]
                return z

            logits, noted = model.run(tokens, hold | {("z", layer): send})
            if receivers != "logits":
                logits, _ = model.run(tokens, writing(receivers, noted))
            patched[sender].append(gap(logits, answer, foil))
    whole = mean(before) - mean(after)
    shares = {s: 100 * (mean(row) - mean(before)) / whole for s, row in patched.items()}
    return like(senders, shares)


def writing(receivers, noted) -> dict[Place, Callable]:
    """Return the changes that put receivers, such as 7.3.v, at what was noted."""
    changes: dict[Place, Callable] = {}
    for receiver in receivers:
        ((place, put),) = changing(receiver, None, noted).items()
        earlier = changes.get(place)
        changes[place] = (lambda x, f=earlier, g=put: g(f(x))) if earlier else put
    return changes
