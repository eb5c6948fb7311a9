"""Which measurement each published value is held against, and how they are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.measurements import MEASUREMENTS, Subject

PUBLISHED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "published.json").read_text(encoding="utf-8")
)
REFERENCE = Path("data") / "gpt2_reference"

LAYERS, HEADS = range(12), range(12)
S_INHIBITION = ["8.6.v", "8.10.v", "7.9.v", "7.3.v"]

NOT_COVERED = {
    **{
        f"ioi8_attribution_patch_{what}": "patching by gradients; the package has no gradients"
        for what in (
            *(f"head_{which}_all_pos" for which in ("z", "q", "k", "v", "pattern")),
            "layer_out",
        )
    },
    "arena25_copying_scores": "no analysis of OV circuits; the list of names is not published",
    "arena25_circuit_only_logit_diff": "its means are over 100 random prompts that are not known",
    "ov_copying_score": "no analysis of weights alone",
    "ov_eigenvalues_L11H11": "no analysis of weights alone",
    "full_ov_copying_score": "no analysis of weights alone",
    "intervention_add_rome_embedding_to_all_mlp_out": "adds a vector; the package replaces values",
    "greater_than_prob_diff": "its 1000 prompts are not at hand",
    "paper_perplexity_wikitext2": "of words after an unpublished de-tokenising; has no tolerance",
}


@dataclass(frozen=True)
class Entry:
    """One published value and what it is held against.

    Attributes:
        name: as in `published.json`.
        measurement: its name in `MEASUREMENTS`.
        arguments: what it is called with; where they come from a file, those are not here.
        processing: `folded`, `raw`, or `gelu`: raw with the exact activation.
        bos: whether prompts begin with a beginning-of-sequence token.
    """

    name: str
    measurement: str
    arguments: dict[str, Any]
    processing: str = "folded"
    bos: bool = True

    @property
    def published(self) -> dict[str, Any]:
        """Value, tolerance and source."""
        return PUBLISHED["entries"][self.name]

    @property
    def tolerance(self) -> Any:
        """Absolute; for a dict of columns, one for each that has numbers."""
        return self.published["tolerance"]

    @property
    def file(self) -> str | None:
        """The file of the prompts or of the values, where these are not in `published.json`."""
        return self.published.get("file")

    def value(self, reference: Path) -> Any:
        """The published value, laid out as the measurement's."""
        published = self.published
        if "value" not in published:
            return json.loads((reference / published["file"]).read_text(encoding="utf-8"))
        columns = self.arguments.get("columns") or _COLUMNS.get(self.measurement)
        return published["value"] if columns is None else _by_column(published["value"], columns)

    def measure(self, on: Subject, reference: Path) -> Any:
        """The same with the package."""
        arguments = dict(self.arguments)
        if self.name.startswith("arena25"):
            arguments |= _arena25(self, reference)
        return MEASUREMENTS[self.measurement](on, **arguments)


_COLUMNS = {
    "largest_unembedding_biases": ["value", "token"],
    "lens_top_tokens": ["token", "prob"],
    "largest_parts": ["part", "value"],
}


def _by_column(rows: list, columns: list[str]) -> Any:
    if isinstance(rows[0][0], list):
        return [_by_column(part, columns) for part in rows]
    return {
        name: list(values) for name, values in zip(columns, zip(*rows, strict=True), strict=True)
    }


def _prompt(name: str) -> Any:
    return PUBLISHED["prompts"][PUBLISHED["entries"][name]["prompt"]]


def _entries() -> Iterator[Entry]:
    def entry(name: str, measurement: str, *, given: Any = None, **arguments: Any) -> Entry:
        return Entry(name, measurement, arguments, **(given or {}))

    plain = {"processing": "raw", "bos": False}
    for name in ("loss_hello_world", "loss_main_demo_paragraph", "loss_gpt2_abstract"):
        yield entry(name, "loss", prompt=_prompt(name))
    name = "loss_gpt2_abstract_ablate_L0H8_v"
    yield entry(name, "loss", prompt=_prompt(name), zeroed="0.8.v")

    store = _prompt("main_demo_ioi_clean_logit_diff")
    answers = {"answers": [store["correct"]], "foils": [store["incorrect"]]}
    for side in ("clean", "corrupted"):
        name = f"main_demo_ioi_{side}_logit_diff"
        yield entry(name, "logit_difference", prompts=[store[side]], **answers)
    moved = {"prompts": [store["corrupted"]], "others": [store["clean"]], **answers}
    states = [f"resid_pre.{layer}" for layer in LAYERS]
    name = "main_demo_ioi_resid_pre_patching"
    yield entry(name, "patching", **moved, targets=states, each=True)
    claire = {"answers": [" Claire"], "foils": [" Mary"]}
    for bos in (True, False):
        name = f"bos_effect_logit_diff_with{'' if bos else 'out'}_bos"
        prompts = [_prompt(name)]
        yield entry(name, "logit_difference", given={"bos": bos}, prompts=prompts, **claire)
    name = "prob_the_after_cat_sat"
    yield entry(name, "probability", prompt=_prompt(name), token=" The")
    for token in (" John", " Mary"):
        yield entry(f"b_U_{token.strip().lower()}", "unembedding_bias", token=token)
    yield entry("b_U_top20", "largest_unembedding_biases", k=20)

    listed = ["token", "logit", "prob"]
    for name in ("top10_john_mary_milk", *(f"top10_prompt_{n}" for n in range(1, 24))):
        yield entry(name, "top_tokens", prompt=_prompt(name), k=10, columns=listed)
    shares = {"columns": ["token", "prob"], "given": plain}
    for name in ("top10_capital_spain", "top10_capital_italy"):
        yield entry(name, "top_tokens", prompt=_prompt(name), k=10, **shares)
    name = "top5_john_and_mary_went_to_the"
    yield entry(name, "top_tokens", prompt=_prompt(name), k=5, **shares)
    exact = {"processing": "gelu", "bos": False}
    for number in range(5):
        name, columns = f"transformer_explainer_ex{number}", ["id", *listed]
        yield entry(name, "top_tokens", given=exact, prompt=_prompt(name), k=10, columns=columns)
    name = "logit_lens_translation_of_car"
    yield entry(name, "lens_top_tokens", given=plain, prompt=_prompt(name), k=5)
    name = "tokenisation_hello_world"
    yield entry(name, "token_ids", given=plain, text=_prompt(name))
    name = "tokenisation_answer_ids"
    yield entry(name, "answer_ids", given=plain, pairs=_prompt(name))

    yield from _eight_prompts()
    yield from _twenty_five_prompts()

    shops = _prompt("dla_demo_top8_components")
    pair = {"answer": " Mary", "foil": " John"}
    yield entry("dla_demo_top8_components", "largest_parts", prompt=shops, k=8, **pair)
    wanted = [" Mary", " John", " the"]
    yield entry("dla_demo_top_neuron", "largest_neurons", prompt=shops, answers=wanted)
    name, drawn = "induction_score_random_tokens", _random_halves()
    yield entry(name, "attention_on_stripe", given={"bos": False}, tokens=drawn, offset=49)


def _eight_prompts() -> Iterator[Entry]:
    given = _prompt("ioi8_logit_diff_mean")
    pairs = given["answers_correct_incorrect"]
    answers = {"answers": [a for a, _ in pairs], "foils": [b for _, b in pairs]}
    clean = {"prompts": given["clean"], **answers}
    corrupted = {"prompts": given["corrupted"], **answers}
    for name, measurement, arguments in (
        ("logit_diff_per_prompt", "logit_differences", clean),
        ("logit_diff_mean", "logit_difference", clean),
        ("logit_diff_mean_corrupted", "logit_difference", corrupted),
        ("logit_lens_accumulated_resid", "accumulated_attribution", clean),
        ("dla_per_layer", "attribution_by_component", clean),
        ("dla_per_head", "attribution_by_head", clean),
        ("ablate_L9H9_top_head", "top_head", clean),
        ("ablate_L9H9_logit_diff", "zeroed_logit_difference", clean | {"zeroed": "9.9"}),
        ("ablate_L9H9_naive_prediction", "naive_prediction", clean | {"zeroed": "9.9"}),
        ("ablate_L9H9_dla_per_head", "attribution_by_head", clean | {"zeroed": "9.9"}),
    ):
        yield Entry(f"ioi8_{name}", measurement, arguments)
    texts = {"prompts": given["clean"]}
    zeroed = texts | {"zeroed": "9.9"}
    yield Entry("ioi8_final_ln_scale", "final_norm_scales", texts)
    yield Entry("ioi8_final_ln_scale_ablated", "final_norm_scales", zeroed)
    yield Entry("ioi8_ln_scaling_ratio", "final_norm_scale_ratio", zeroed)

    moved = corrupted | {"others": given["clean"]}
    for name, site in (("resid_pre", "resid_pre"), ("attn_out", "attn"), ("mlp_out", "mlp")):
        targets = [f"{site}.{layer}" for layer in LAYERS]
        arguments = moved | {"targets": targets, "each": True}
        yield Entry(f"ioi8_patch_{name}_by_pos", "patching", arguments)
    for which in ("z", "q", "k", "v", "pattern"):
        grid = [[f"{layer}.{head}.{which}" for head in HEADS] for layer in LAYERS]
        column = [target for row in grid for target in row]
        name = f"ioi8_patch_head_{which}"
        yield Entry(f"{name}_all_pos", "patching", moved | {"targets": grid})
        yield Entry(f"{name}_by_pos", "patching", moved | {"targets": column, "each": True})


def _twenty_five_prompts() -> Iterator[Entry]:
    """Their prompts are added by `measure`, from the file."""
    senders = [[f"{layer}.{head}" for head in HEADS] for layer in LAYERS]
    for name, measurement, arguments in (
        ("logit_diff_ioi", "logit_difference", {}),
        ("logit_diff_abc", "logit_difference", {}),
        ("logit_diff_first5", "paired_logit_differences", {}),
        ("path_patch_head_to_logits", "path_patching", {"receivers": "logits"}),
        ("path_patch_head_to_s_inhibition_values", "path_patching", {"receivers": S_INHIBITION}),
        ("head_9.9_attention_vs_projection", "attention_and_projection", {"head": "9.9"}),
        ("head_11.10_attention_vs_projection", "attention_and_projection", {"head": "11.10"}),
        ("ablate_L9H9", "ablation_summary", {"zeroed": "9.9"}),
    ):
        if measurement == "path_patching":
            arguments = arguments | {"senders": senders}
        yield Entry(f"arena25_{name}", measurement, arguments, bos=False)


def _arena25(entry: Entry, reference: Path) -> dict[str, Any]:
    """Prompts without their last word, which is the answer."""
    given = json.loads((reference / "ioi_25_prompts.json").read_text(encoding="utf-8"))
    ioi, abc = (
        [text.rsplit(" ", 1)[0] for text in given[f"{which}_sentences"]] for which in ("ioi", "abc")
    )
    names = {"IO": [f" {name}" for name in given["io"]], "S": [f" {name}" for name in given["s"]]}
    if entry.measurement == "attention_and_projection":
        places = {"IO": given["word_idx"]["IO"], "S": given["word_idx"]["S1"]}
        return {"prompts": ioi, "names": names, "positions": places}
    answers = {"answers": names["IO"], "foils": names["S"]}
    if entry.measurement == "paired_logit_differences":
        return {
            name: texts[:5] for name, texts in {"prompts": ioi, "others": abc, **answers}.items()
        }
    if entry.measurement == "path_patching":
        answers |= {"others": abc}
    return {"prompts": abc if entry.name.endswith("_abc") else ioi, **answers}


def _random_halves() -> list[list[int]]:
    """Ten times fifty random tokens, repeated; the published draw had no seed."""
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1000, 10000, (10, 50), generator=generator)
    return torch.cat([drawn, drawn], 1).tolist()


ENTRIES = {entry.name: entry for entry in _entries()}


def disagreements(found: Any, expected: Any, tolerance: Any, where: str = "value") -> list[str]:
    """What differs, in words: numbers by more than the tolerance, texts and lengths at all.

    Args:
        found: numbers and texts in nested lists and dicts.
        expected: the same.
        tolerance: absolute; or one for each key of a dict, where its columns have their own.
        where: how the value is called.
    """
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{where}: {found!r} is not laid out as {list(expected)}"]
        per_key = tolerance if isinstance(tolerance, dict) else dict.fromkeys(expected, tolerance)
        parts = [(f"{where}[{k!r}]", found[k], v, per_key.get(k)) for k, v in expected.items()]
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return [f"{where}: {found!r} does not have {len(expected)} items"]
        pairs = zip(found, expected, strict=True)
        parts = [(f"{where}[{n}]", a, b, tolerance) for n, (a, b) in enumerate(pairs)]
    elif isinstance(expected, str) or tolerance is None:
        return [] if found == expected else [f"{where}: {found!r}, expected {expected!r}"]
    elif isinstance(found, int | float) and abs(found - expected) <= tolerance:
        return []
    else:
        return [f"{where}: {found!r}, expected {expected!r} within {tolerance}"]
    return [line for label, a, b, allowed in parts for line in disagreements(a, b, allowed, label)]
