"""Direct logit attribution the slow way: one part, one row and one position at a time.

Every part is written out as the vector it adds to the stream; it is put through the final norm
with the statistics of the whole stream, and its scores for the whole vocabulary are formed.
"""

from torch import Tensor


def attribute(
    cache: dict[str, Tensor],
    weights: dict[str, Tensor],
    position: int,
    answer: int,
    foil: int | None,
    *,
    by: str,
    norm: str,
    eps: float,
) -> dict[str, float]:
    """Return the contribution of each part to logit[answer] - logit[foil] of one prompt.

    Args:
        cache: activations of one prompt, by TransformerLens's names.
        weights: W_O [layer head d_head d_model], b_O [layer d_model], W_out [layer d_mlp d_model],
            b_out [layer d_model], gain and shift of the final norm, W_U [d_model d_vocab], b_U.
        position: the scored position.
        answer: a token.
        foil: a token, or None for the mean over the vocabulary.
        by: component, head or neuron.
        norm: LN or RMS.
        eps: of the norm.
    """
    n_layers = len(weights["b_O"])
    stream = cache[f"blocks.{n_layers - 1}.hook_resid_post"][0, position]
    sigma = scale(stream, norm, eps)

    contributions = {}
    for label, vector in written(cache, weights, position, by).items():
        if norm == "LN":
            vector = vector - vector.mean()
        scores = (vector / sigma * weights["gain"]) @ weights["W_U"]
        contributions[label] = difference(scores, answer, foil)
    contributions["ln_final.bias"] = difference(weights["shift"] @ weights["W_U"], answer, foil)
    contributions["unembed.bias"] = difference(weights["b_U"], answer, foil)
    return contributions


def scale(vector: Tensor, norm: str, eps: float) -> Tensor:
    """Return what the final norm divides this vector by."""
    if norm == "LN":
        vector = vector - vector.mean()
    return ((vector**2).mean() + eps) ** 0.5


def difference(scores: Tensor, answer: int, foil: int | None) -> float:
    """Return the score of the answer less that of the foil, or of the vocabulary on average."""
    other = scores.mean() if foil is None else scores[foil]
    return float(scores[answer] - other)


def written(
    cache: dict[str, Tensor], weights: dict[str, Tensor], position: int, by: str
) -> dict[str, Tensor]:
    """Return the vector that each part adds to the stream at a position."""
    parts = {}
    start = cache["blocks.0.hook_resid_pre"][0, position]
    if "hook_pos_embed" in cache:
        parts["embed"] = start - cache["hook_pos_embed"][0, position]
        parts["pos_embed"] = cache["hook_pos_embed"][0, position]
    else:
        parts["embed"] = start

    for layer in range(len(weights["b_O"])):
        if by == "head":
            z = cache[f"blocks.{layer}.attn.hook_z"][0, position]
            for head in range(len(z)):
                parts[f"{layer}.{head}"] = z[head] @ weights["W_O"][layer, head]
            parts[f"attn.{layer}.bias"] = weights["b_O"][layer]
        else:
            parts[f"attn.{layer}"] = cache[f"blocks.{layer}.hook_attn_out"][0, position]

        if by == "neuron":
            activations = cache[f"blocks.{layer}.mlp.hook_post"][0, position]
            for neuron in range(len(activations)):
                vector = activations[neuron] * weights["W_out"][layer, neuron]
                parts[f"mlp.{layer}.{neuron}"] = vector
            parts[f"mlp.{layer}.bias"] = weights["b_out"][layer]
        else:
            parts[f"mlp.{layer}"] = cache[f"blocks.{layer}.hook_mlp_out"][0, position]
    return parts
