"""Architectures, and the checks that say of each analysis whether it is exact on them.

Every check compares with something that shares no code with the package: the Hugging Face model
without hooks (its logits, its states, its logits with output weights at zero), hooks and whole
forward passes (`reference`), or an identity between two analyses. A check yields cases; a case
that raises an error of the package is a refusal, and any other error is a failure.

`docs/models.md` holds the verdicts; `python scripts/model_table.py` writes them anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zoo
import zoo_lens
from reference import ablation as slow
from reference import paths as slow_paths
from torch import Tensor

import resid_patching as rp
from resid_patching.errors import ResidPatchingError

ROWS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 11, 30], [14, 15, 9, 2, 6, 5, 40, 3, 22, 7]])
"""Longer than every window of local attention in the zoo."""
OTHERS = torch.tensor([[27, 18, 28, 2, 7, 1, 8, 31, 41, 9], [9, 9, 8, 7, 6, 40, 33, 2, 4, 17]])
ANSWER, FOIL, LAYER = 3, 6, 1
DIFF = rp.logit_diff(ANSWER, FOIL)
ATTENTION_OUT = re.compile(
    r"(attn|attention|self_attn|self_attention)\.(o_proj|c_proj|out_proj|dense)\.(weight|bias)"
)
MLP_OUT = re.compile(
    r"((down_proj|dense_4h_to_h|fc2|fc_out|mlp\.c_proj)\.(weight|bias)|experts\.down_proj)"
)

Case = Callable[[], Any]
Check = Callable[["Subject"], Iterator[Case]]


@dataclass(frozen=True)
class Architecture:
    """A row of a table.

    Attributes:
        title: as the documentation calls it.
        name: its configuration in `zoo`.
        rounding: how far two ways of running it may be apart in logits. Most are float64 in all
            that two ways may do differently; some compute norms or patterns in float32.
    """

    title: str
    name: str
    rounding: float = 1e-9


BRIDGES = (
    Architecture("GPT-2", "gpt2"),
    Architecture("GPT-Neo (local attention)", "neo", 1e-5),
    Architecture("GPT-J", "gptj"),
    Architecture("GPT-NeoX, parallel blocks", "neox_parallel"),
    Architecture("GPT-NeoX, sequential blocks", "neox_sequential"),
    Architecture("Pythia", "pythia"),
    Architecture("OPT", "opt"),
    Architecture("BLOOM", "bloom", 1e-5),
    Architecture("MPT", "mpt", 1e-5),
    Architecture("Falcon", "falcon"),
    Architecture("Llama with biases", "llama"),
    Architecture("Llama", "llama_grouped"),
    Architecture("Mistral (sliding window)", "mistral"),
    Architecture("Mixtral (experts)", "mixtral"),
    Architecture("Qwen2 (attention bias)", "qwen2"),
    Architecture("Qwen3 (QK-norm)", "qwen3"),
    Architecture("Gemma 1", "gemma"),
    Architecture("Gemma 2", "gemma2"),
    Architecture("Gemma 3", "gemma3"),
    Architecture("Phi", "phi"),
    Architecture("Phi-3", "phi3"),
    Architecture("OLMo", "olmo", 1e-5),
    Architecture("OLMo-2", "olmo2"),
    Architecture("Granite", "granite"),
    Architecture("Granite, logits not scaled", "granite_unscaled"),
    Architecture("Cohere", "cohere"),
)
HOOKED = tuple(
    arch
    for arch in BRIDGES
    if arch.name
    in (
        "gpt2",
        "neox_parallel",
        "neox_sequential",
        "pythia",
        "llama_grouped",
        "mistral",
        "mixtral",
        "gemma",
    )
)


def hooked(name: str, original: Any) -> Any:
    """Return a HookedTransformer with the weights of a Hugging Face model, by its own converter."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    dtype = original.dtype
    if name == "gemma":  # TransformerLens knows its facts by the names on the hub alone
        from transformer_lens.pretrained.weight_conversions import convert_gemma_weights

        facts = original.config
        cfg = HookedTransformerConfig(
            n_layers=zoo.N_LAYERS,
            d_model=zoo.D_MODEL,
            n_heads=zoo.N_HEADS,
            d_head=facts.head_dim,
            d_mlp=zoo.D_MLP,
            d_vocab=zoo.D_VOCAB,
            n_ctx=zoo.N_CTX,
            n_key_value_heads=facts.num_key_value_heads,
            eps=zoo.EPS,
            act_fn="gelu_pytorch_tanh",
            normalization_type="RMS",
            final_rms=True,
            gated_mlp=True,
            positional_embedding_type="rotary",
            rotary_dim=facts.head_dim,
            dtype=dtype,
            device="cpu",
        )
        model = HookedTransformer(cfg)
        model.load_and_process_state_dict(
            convert_gemma_weights(original, cfg),
            fold_ln=False,
            center_unembed=False,
            center_writing_weights=False,
            fold_value_biases=False,
        )
        return model.eval()
    folder = zoo.scratch() / f"architecture_{name}"
    original.save_pretrained(folder)
    return rp.load(folder, backend="hooked", dtype=dtype)


class Subject:
    """One model under test, with the Hugging Face model that it is a copy of."""

    def __init__(self, arch: Architecture, backend: str, dtype: torch.dtype | None = None) -> None:
        self.arch, self.backend = arch, backend
        self.dtype = dtype or (torch.float32 if arch.name == "mixtral" else torch.float64)
        self.original = zoo.hugging_face(zoo.CONFIGS[arch.name](), self.dtype)
        if backend == "hooked":
            self.model = hooked(arch.name, self.original)
        else:
            self.model = zoo.bridge(self.original)
        self.rounding = 1e-3 if self.dtype == torch.float32 else arch.rounding

    @functools.cached_property
    def usual(self) -> Subject:
        """The same in float32: what is refused for speed or rounding is said of what is usual."""
        return Subject(self.arch, self.backend, torch.float32)

    def close(self, left: Tensor, right: Tensor, tolerance: float | None = None) -> None:
        """Asserts that two ways of computing the same agree."""
        tolerance = self.rounding if tolerance is None else tolerance
        torch.testing.assert_close(
            left, right, rtol=0, atol=tolerance, equal_nan=True, check_dtype=False
        )

    def close_to_original(self, left: Tensor, right: Tensor) -> None:
        """Asserts agreement with Hugging Face, some of whose attention is float32 throughout."""
        self.close(left, right, max(self.rounding, 2e-5))

    def strong(self, effects: Tensor) -> None:
        """Asserts that no row is without effect: an edit that is thrown away has none."""
        smallest = float(effects.nan_to_num(1).abs().amax(-1).min())
        assert smallest > max(1e-6, 3 * self.rounding), effects

    # The package's side

    @functools.cached_property
    def run(self) -> Any:
        return rp.capture(self.model, ROWS)

    @functools.cached_property
    def source(self) -> Any:
        return rp.capture(self.model, OTHERS)

    @functools.cached_property
    def view(self) -> Any:
        return rp.ModelView(self.model)

    @property
    def n_layers(self) -> int:
        return len(self.model.blocks)

    # The other side: hooks and whole passes

    @functools.cached_property
    def base(self) -> Naive:
        return Naive(self, ROWS)

    @functools.cached_property
    def other(self) -> Naive:
        return Naive(self, OTHERS)

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        """The biases of the sublayers, and the neurons' weights where there are such."""
        blocks, zeros = self.model.blocks, torch.zeros(zoo.D_MODEL, dtype=self.dtype)
        found = {
            "b_O": [zoo._or(getattr(block.attn, "b_O", None), zeros) for block in blocks],
            "b_out": [zoo._or(getattr(block.mlp, "b_out", None), zeros) for block in blocks],
        }
        return {name: torch.stack(tensors).detach() for name, tensors in found.items()}

    @property
    def softcap(self) -> float | None:
        return getattr(self.original.config, "final_logit_softcapping", None)

    def read_out(self, state: Tensor) -> Tensor:
        """The logits of a state, by the model's own modules."""
        with torch.no_grad():
            logits = self.model.unembed(self.model.ln_final(state))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    # Hugging Face

    def original_logits(self, tokens: Tensor = ROWS) -> Tensor:
        with torch.no_grad():
            return self.original(tokens).logits

    @contextlib.contextmanager
    def without(self, pattern: re.Pattern[str], layer: int, part: Any = None) -> Iterator[None]:
        """The Hugging Face model with a sublayer's output weights, or a part of them, at zero."""
        numbered = re.compile(rf"\.{layer}\..*{pattern.pattern}$")
        found = [p for name, p in self.original.named_parameters() if numbered.search(name)]
        assert 1 <= len(found) <= 2
        kept = [parameter.detach().clone() for parameter in found]
        with torch.no_grad():
            for parameter in found:
                if part is None or (part == "bias" and parameter.ndim == 1):
                    parameter.zero_()
                elif part == "bias":
                    continue
                elif parameter.ndim == 2:
                    inputs_first = self.arch.name.startswith("gpt2")  # Conv1D
                    (parameter if inputs_first else parameter.T)[part] = 0
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in zip(found, kept, strict=True):
                    parameter.copy_(before)


class Naive:
    """Some prompts by hooks and whole passes."""

    def __init__(self, subject: Subject, tokens: Tensor) -> None:
        self.subject, self.model, self.tokens = subject, subject.model, tokens
        self.cache = slow.activations(self.model, tokens)
        self.clean = slow.forward(self.model, tokens, [], subject.weights)
        self.final = self.cache[f"blocks.{subject.n_layers - 1}.hook_resid_post"]

    def site(self, site: str) -> str:
        """What the reference calls it: without positions, the embedding is the stream's start."""
        alone = site == "embed" and not self.subject.view.has_pos_embed
        return "resid_pre.0" if alone else site

    def value(self, site: str) -> Tensor:
        return slow.value(self.site(site), self.cache, self.subject.weights)

    def where(self, positions: int | None) -> Tensor:
        n, length = self.tokens.shape
        places = range(length) if positions is None else [positions % length]
        return torch.tensor(list(places)).expand(n, -1)

    def changed(
        self, sites: Sequence[str], positions: int | None, new: Callable[[str], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Logits with the sites replaced: the model run again, and everything later frozen."""
        index = self.where(positions)
        row = torch.arange(len(index))[:, None]
        changes = [(self.site(site), index, new(site)[row, index]) for site in sites]
        args = (self.model, self.tokens, changes, self.subject.weights)
        moved = self.final + slow.frozen_difference(*args, self.cache)
        return slow.forward(*args), self.subject.read_out(moved)

    def sent(
        self,
        sender: str,
        reading: Sequence[str],
        new: Callable[[str], Tensor],
        positions: int | None,
        mlps: str,
    ) -> tuple[Tensor, Tensor]:
        """Logits with what the sender changes in the receivers: run again, and later frozen."""
        index = self.where(positions)
        sending, value = sender, new(sender)
        if mlps == "freeze" and re.fullmatch(r"mlp\.\d+\.\d+", sender):
            # The MLP is held: what the neuron changes is what it changes in the clean write.
            sending = sender.rpartition(".")[0]
            value = self._write_with(sender, sending, index, value)
        sending = self.site(sending)
        held = (self.model, self.tokens, [sending], {sending: value}, index, mlps)
        noted = slow_paths.record(*held, reading, self.cache, self.subject.weights)
        written = (self.model, self.tokens, reading, noted, index)
        moved = self.final + slow_paths.carried(*written, self.cache)
        return slow_paths.write(*written), self.subject.read_out(moved)

    def _write_with(self, site: str, write: str, index: Tensor, value: Tensor) -> Tensor:
        row = torch.arange(len(index))[:, None]
        seen: list[Tensor] = []
        hooks = slow.hooks([(site, index, value[row, index])], self.subject.weights)
        name = slow.describe(write)[2]
        keep = (name, lambda activation, hook: seen.append(activation.clone()) and None)
        with torch.no_grad():
            self.model.run_with_hooks(self.tokens, fwd_hooks=[*hooks, keep])
        return seen[-1]


def difference(logits: Tensor) -> Tensor:
    """The logit difference at the last position [prompt]."""
    return logits[:, -1, ANSWER] - logits[:, -1, FOIL]


def everywhere(logits: Tensor) -> Tensor:
    """A metric of every position and token [prompt]."""
    return logits.sin().sum((1, 2)) / logits.shape[1]


# Capture and attribution


def capture(subject: Subject) -> Iterator[Case]:
    """The model is Hugging Face's, its states are Hugging Face's, and its parts sum to them."""

    def states() -> None:
        run = subject.run
        logits = subject.original_logits()
        subject.close_to_original(run.logits_at(None), logits)
        with torch.no_grad():
            hidden = subject.original(ROWS, output_hidden_states=True).hidden_states
        for layer in range(subject.n_layers):
            subject.close_to_original(run.fetch(rp.parse(f"resid_pre.{layer}")), hidden[layer])
        vectors = rp.decompose(run, by="component").vectors(None)
        subject.close(vectors.sum(0), subject.base.final)
        subject.close_to_original(subject.read_out(vectors.sum(0)), logits)

    yield states


def attribution(by: str) -> Check:
    """The rows sum to Hugging Face's logit difference, and are what each part wrote."""

    def check(subject: Subject) -> Iterator[Case]:
        def rows() -> None:
            dla = rp.direct_logit_attribution(subject.run, ANSWER, FOIL, by=by, positions=None)
            logits = subject.original_logits()
            if subject.softcap is not None:
                logits = subject.softcap * torch.atanh(logits / subject.softcap)
            subject.close_to_original(dla.total, logits[..., ANSWER] - logits[..., FOIL])
            frozen = {"component": "mlp.1", "head": "1.2", "neuron": "mlp.1.9"}[by]
            subject.close(dla.sel(component=frozen), _by_gradient(subject, frozen))

        yield rows

    return check


def _by_gradient(subject: Subject, writer: str) -> Tensor:
    """What a writer adds to the score with the norm's scale held, by the model's own modules.

    The readout without its scale is linear: halving the write halves its share. It is measured
    as the readout of the final state less the readout without the write, both put on one scale.
    """
    write = -slow.frozen_difference(
        subject.model,
        ROWS,
        [(writer, subject.base.where(None), torch.zeros_like(subject.base.value(writer)))],
        subject.weights,
        subject.base.cache,
    )
    state = subject.base.final

    def score(x: Tensor) -> Tensor:
        logits = subject.model.unembed(subject.model.ln_final(x))
        return logits[..., ANSWER] - logits[..., FOIL]

    # d score(state + t * (write - c * state)) / dt loses the scale's own change where the write
    # has its share of the stream taken out; what c * state adds is then known exactly.
    with torch.no_grad():
        centred = _centred(subject, state)
        share = (_centred(subject, write) * centred).sum(-1, keepdim=True)
        share = share / (centred**2).sum(-1, keepdim=True)
        constant = score(torch.zeros_like(state))
    step = write - share * state
    _, slope = torch.func.jvp(score, (state,), (step,))
    return (slope + share[..., 0] * (score(state) - constant)).detach()


def _centred(subject: Subject, x: Tensor) -> Tensor:
    """A state as the final norm's scale sees it."""
    is_layer_norm = subject.view.final_norm.kind == "LN"
    return x - x.mean(-1, keepdim=True) if is_layer_norm else x


# Lenses and norms


def logit_lens(subject: Subject) -> Iterator[Case]:
    """Every row is the model's own readout of that state, the last row the model's logits."""

    def rows() -> None:
        lens = rp.logit_lens(subject.run)
        subject.close_to_original(
            lens.logits(layer=lens.labels[-1], positions=None), subject.original_logits()
        )
        for label in lens.labels[:-1]:
            state = subject.base.value(label)
            subject.close(lens.logits(layer=label, positions=None), subject.read_out(state))

    yield rows


def tuned_lens(subject: Subject) -> Iterator[Case]:
    """Without a fit it is the logit lens; a fit comes nearer; a file gives back what was saved."""

    def fit() -> None:
        plain = rp.logit_lens(subject.run)
        identity = rp.TunedLens.identity(subject.model)(subject.run)
        for label in plain.labels:
            left, right = (x.logits(layer=label, positions=None) for x in (plain, identity))
            assert torch.equal(left, right)
        texts = zoo_lens.random_windows(60)
        tuned = rp.fit_tuned_lens(
            subject.model, texts, length=16, validation_tokens=160, steps=0, progress=False
        )
        kl = tuned(rp.capture(subject.model, texts)).kl.values.mean((1, 2))
        before = rp.logit_lens(rp.capture(subject.model, texts)).kl.values.mean((1, 2))
        assert bool((kl[:-1] < before[:-1]).any() and (kl[:-1] <= before[:-1] + 1e-9).all())
        with tempfile.TemporaryDirectory() as folder:
            tuned.save(Path(folder) / "lens")
            loaded = rp.TunedLens.load(Path(folder) / "lens", subject.model)
        assert torch.equal(loaded.weight, tuned.weight) and torch.equal(loaded.bias, tuned.bias)
        where = {"layer": plain.labels[1], "positions": None}
        moved = (
            subject.base.value(plain.labels[1])
            @ (torch.eye(zoo.D_MODEL) + tuned.weight[1].detach()).T.to(subject.dtype)
            + tuned.bias[1].detach()
        )
        subject.close(loaded(subject.run).logits(**where), subject.read_out(moved))

    yield fit


def stream_norms(subject: Subject) -> Iterator[Case]:
    """Start and writes sum to the last state; scaled to nothing the writes leave the start."""

    def report() -> None:
        found = rp.stream_report(subject.run)
        assert found.relative_exactness < (1e-5 if subject.dtype == torch.float32 else 1e-12)
        cache = subject.base.cache
        for layer in range(subject.n_layers):
            for part in ("attn", "mlp"):
                row = found.writes.index(f"{part}.{layer}")
                norm = cache[f"blocks.{layer}.hook_{part}_out"].norm(dim=-1)
                subject.close(found.write_norm[row], norm)
        subject.close(found.stream_norm[-1], subject.base.final.norm(dim=-1))

    def silent() -> None:
        found = rp.stream_report(subject.run, rp.WriteScale(0))
        subject.close(found.survival, torch.ones_like(found.survival))

    yield report
    yield silent


# Ablation


def ablation(sites: Callable[[Subject], list[str]]) -> Check:
    """Every kind does what hooks and whole passes do; each site by itself, and all together."""

    def check(subject: Subject) -> Iterator[Case]:
        for kind in ("zero", "mean", "resample"):
            yield functools.partial(_ablate, subject, sites(subject), kind)

    return check


def _ablate(subject: Subject, sites: list[str], kind: str) -> None:
    how = {
        "zero": lambda: rp.Zero(),
        "mean": lambda: rp.Mean(subject.source, over=("batch",)),
        "resample": lambda: rp.Resample(subject.source, pairing="rowwise"),
    }[kind]()

    def new(site: str) -> Tensor:
        value = (subject.base if kind == "zero" else subject.other).value(site)
        if kind == "mean":
            return value.mean(0, keepdim=True).expand_as(value)
        return torch.zeros_like(value) if kind == "zero" else value

    positions, metric, score = (4, everywhere, everywhere)
    if kind == "mean":
        positions, metric, score = (None, DIFF, difference)
    together = kind != "zero"
    effect = rp.ablate(subject.run, sites, how, metric=metric, positions=positions, joint=together)
    clean = score(subject.base.clean)
    subject.close(effect.baseline, clean)
    for row, targets in enumerate([sites] if together else [[site] for site in sites]):
        total, direct = subject.base.changed(targets, positions, new)
        subject.close(effect.total[row], score(total) - clean)
        subject.close(effect.direct[row], score(direct) - clean)
    if kind == "zero" or not sites[0].endswith("bias"):  # a bias is the same in every run
        subject.strong(effect.total)


def knocked_out(part: str) -> Check:
    """Zero is Hugging Face's model with these output weights at zero: no hook is involved."""

    def check(subject: Subject) -> Iterator[Case]:
        def zero() -> None:
            d_head = zoo.D_MODEL // zoo.N_HEADS
            target, pattern, columns = {
                "attn": (f"attn.{LAYER}", ATTENTION_OUT, None),
                "mlp": (f"mlp.{LAYER}", MLP_OUT, None),
                "head": (f"{LAYER}.2", ATTENTION_OUT, slice(2 * d_head, 3 * d_head)),
                "neuron": (f"mlp.{LAYER}.9", MLP_OUT, slice(9, 10)),
                "attn bias": (f"attn.{LAYER}.bias", ATTENTION_OUT, "bias"),
                "mlp bias": (f"mlp.{LAYER}.bias", MLP_OUT, "bias"),
            }[part]
            effect = rp.ablate(subject.run, target, rp.Zero(), metric=everywhere)
            with subject.without(pattern, LAYER, columns):
                subject.close_to_original(effect.patched[0], everywhere(subject.original_logits()))
            subject.close_to_original(effect.baseline, everywhere(subject.original_logits()))
            subject.strong(effect.total)

        yield zero

    return check


def both(*checks: Check) -> Check:
    """All the cases of several checks."""

    def check(subject: Subject) -> Iterator[Case]:
        for one in checks:
            yield from one(subject)

    return check


def layers_and_states(subject: Subject) -> list[str]:
    found = ["embed", f"attn.{LAYER}", f"mlp.{LAYER}", f"resid_post.{LAYER}"]
    found += ["pos_embed"] * subject.view.has_pos_embed
    return found + [f"resid_mid.{LAYER}"] * (not subject.view.parallel)


def heads(subject: Subject) -> list[str]:
    return [f"{LAYER}.2", "0.1"]


def neurons(subject: Subject) -> list[str]:
    return [f"mlp.{LAYER}.9", "mlp.0.5"]


def queries_keys_values(subject: Subject) -> list[str]:
    kv = subject.view.n_kv_heads - 1
    return [f"{LAYER}.2.q", f"{LAYER}.{kv}.k", f"{LAYER}.{kv}.v"]


def patterns(subject: Subject) -> list[str]:
    return [f"{LAYER}.2.pattern"]


def biases(subject: Subject) -> Iterator[Case]:
    """The biases of the sublayers, where the model has any."""
    for part in ("attn", "mlp"):
        if bool(subject.weights["b_O" if part == "attn" else "b_out"][LAYER].any()):
            yield from knocked_out(f"{part} bias")(subject)
            yield from ablation(lambda _, part=part: [f"{part}.{LAYER}.bias"])(subject)


# Paths


def paths(
    senders: Callable[[Subject], list[str]], receivers: Callable[[Subject], list[str]]
) -> Any:
    """Every path is the paper's three passes; from a run to itself it is nothing, exactly."""

    def check(subject: Subject) -> Iterator[Case]:
        for mlps in ("freeze", "recompute"):
            yield functools.partial(_patch, subject, senders(subject), receivers(subject), mlps)

    return check


def _patch(subject: Subject, sending: list[str], reading: list[str], mlps: str) -> None:
    using = rp.Resample(subject.source, pairing="rowwise")
    positions, metric, score = (4, everywhere, everywhere)
    if mlps == "freeze":
        positions, metric, score = (None, DIFF, difference)
    how = rp.Path(to=rp.receivers(*reading), using=using, mlps=mlps)
    effect = rp.ablate(subject.run, sending, how, metric=metric, positions=positions)
    clean = score(subject.base.clean)
    for row, sender in enumerate(sending):
        for column, receiver in enumerate(reading):
            args = (sender, [receiver], subject.other.value, positions, mlps)
            total, direct = subject.base.sent(*args)
            subject.close(effect.total[row, column], score(total) - clean)
            subject.close(effect.direct[row, column], score(direct) - clean)
    subject.strong(effect.total.flatten(0, -2))
    if mlps == "recompute":
        own = dataclasses.replace(how, using=rp.Resample(subject.run, pairing="rowwise"))
        assert not rp.ablate(subject.run, sending, own, metric=DIFF).total.any()


def whole_stream(*receivers: str) -> Check:
    """All writers before receivers, sent together, give them their values in the source run."""

    def check(subject: Subject) -> Iterator[Case]:
        def send() -> None:
            layer, stage = slow_paths.reads_at(
                receivers[0], subject.n_layers, subject.view.parallel
            )
            senders = ["embed"] + ["pos_embed"] * subject.view.has_pos_embed
            for before in range(min(layer + 1, subject.n_layers)):
                senders += [f"attn.{before}"] * ((before, 1) < (layer, stage))
                senders += [f"mlp.{before}"] * ((before, 3) < (layer, stage))
            using = rp.Resample(subject.source, pairing="rowwise")
            how = rp.Path(to=rp.receivers(*receivers), using=using, mlps="freeze")
            sent = rp.ablate(subject.run, senders, how, metric=DIFF, joint=True)
            if receivers == ("logits",):
                subject.close(sent.patched[0, 0], difference(subject.other.clean))
                return
            put = rp.ablate(
                subject.run, [r.removesuffix(".in") for r in receivers], using, metric=DIFF
            )
            subject.close(sent.total[0], put.total)
            subject.close(sent.direct[0], put.direct)
            subject.strong(sent.total[0])

        yield send

    return check


def to_stream(subject: Subject) -> list[str]:
    return ["logits", "mlp.2.in", "resid_pre.2"]


def to_heads(subject: Subject) -> list[str]:
    kv = subject.view.n_kv_heads - 1
    return ["2.1.q", f"2.{kv}.k", f"2.{kv}.v"]


def few_layers(subject: Subject) -> list[str]:
    return [f"attn.{LAYER}", "mlp.0"]


def one_head(subject: Subject) -> list[str]:
    return [f"{LAYER}.2"]


def one_neuron(subject: Subject) -> list[str]:
    return [f"mlp.{LAYER}.9"]


def linearised(subject: Subject) -> Iterator[Case]:
    """With the final norm frozen and the rest, too, taking a part away is minus its attribution."""

    usual = subject.usual

    def to_logits() -> None:
        how = rp.Path(to="logits", using=rp.Zero(), mlps="freeze")
        names = ["embed", "attn.1", "mlp.1"]
        dla = rp.direct_logit_attribution(usual.run, ANSWER, FOIL)
        found = rp.linearised_paths(usual.run, names, how, metric=DIFF)
        for row, name in enumerate(names):
            usual.close(found.values[row], -dla.sel(component=name, pos=-1), 2e-5)
        exact = rp.ablate(usual.run, names, how, metric=DIFF)
        assert torch.equal(found.exact, exact.total)

    yield to_logits


def route(subject: Subject) -> str:
    """How ablations are run in float32, on prompts longer than any window."""
    run = subject.usual.run
    (found,) = rp.ablate(run, f"mlp.{LAYER}", rp.Zero(), metric=DIFF).routes
    return found


COLUMNS: dict[str, Check] = {
    "capture": capture,
    "attribution: component": attribution("component"),
    "attribution: head": attribution("head"),
    "attribution: neuron": attribution("neuron"),
    "logit lens": logit_lens,
    "tuned lens": tuned_lens,
    "stream norms": stream_norms,
    "ablate: layers, states": both(
        knocked_out("attn"), knocked_out("mlp"), ablation(layers_and_states)
    ),
    "ablate: heads": both(knocked_out("head"), ablation(heads)),
    "ablate: neurons": both(knocked_out("neuron"), ablation(neurons)),
    "ablate: biases": biases,
    "ablate: q, k, v": ablation(queries_keys_values),
    "ablate: pattern": ablation(patterns),
    "paths from layers": both(
        paths(few_layers, to_stream), whole_stream("logits"), whole_stream("mlp.2.in")
    ),
    "paths from heads": paths(one_head, to_stream),
    "paths from neurons": paths(one_neuron, to_stream),
    "paths to q, k, v": both(
        paths(few_layers, to_heads), whole_stream("2.1.q", "2.0.k", "2.0.v", "resid_pre.2")
    ),
    "linearised paths": linearised,
}
ROUTE = "route"


# Verdicts and the table of them


REASONS: dict[str, str] = {
    "a": r"as with a norm after the sublayer|do not sum to what the layer adds to the stream",
    "b": r"no single W_out|has no hook blocks\.\d+\.mlp\.hook_post",
    "c": r"throws an edit away|never fired: blocks\.\d+\.attn\.hook_pattern\.",
    "d": r"not covered by the closed form",
    "e": r"rescales its logits after the unembedding",
}
"""The footnotes of the document, by what the errors say."""


def verdicts(subject: Subject) -> dict[str, str]:
    """What each column says of a model: `exact`, `refused (x)`, or `none` without such a part.

    Raises:
        AssertionError: a number that is wrong, a refusal whose reason the document lacks, or a
            column of which one part is exact and another refused.
    """
    found = {}
    for column, check in COLUMNS.items():
        said = sorted({_verdict(case) for case in check(subject)}) or ["none"]
        assert len(said) == 1, f"{column} of {subject.arch.title} is {' and '.join(said)}"
        found[column] = said[0]
    found[ROUTE] = "none" if found["capture"] != "exact" else route(subject)
    return found


def _verdict(case: Case) -> str:
    try:
        case()
    except ResidPatchingError as error:
        reasons = [key for key, text in REASONS.items() if re.search(text, str(error))]
        assert len(reasons) == 1, f"a reason that is not in the document: {error}"
        return f"refused ({reasons[0]})"
    return "exact"


DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "models.md"
LANES = {"bridge": BRIDGES, "hooked": HOOKED}


def table(rows: dict[str, dict[str, str]]) -> str:
    """The verdicts by title of the architecture, as a table in Markdown."""
    names = [*COLUMNS, ROUTE]
    lines = [["architecture", *names], ["---"] * (len(names) + 1)]
    lines += [[title, *(found[name] for name in names)] for title, found in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def documented(lane: str) -> dict[str, dict[str, str]]:
    """The verdicts that the document gives, by title of the architecture."""
    header, _, *lines = _section(lane, DOCUMENT.read_text(encoding="utf-8"))[1].splitlines()
    _, *names = _cells(header)
    rows = [_cells(line) for line in lines]
    return {title: dict(zip(names, cells, strict=True)) for title, *cells in rows}


def rewrite(lane: str, rows: dict[str, dict[str, str]]) -> None:
    """Puts a table in the place of the document's."""
    before, _, after = _section(lane, DOCUMENT.read_text(encoding="utf-8"))
    DOCUMENT.write_text(f"{before}{table(rows)}{after}", encoding="utf-8")


def _section(lane: str, text: str) -> tuple[str, str, str]:
    before, start, rest = text.partition(f"<!-- {lane} -->\n\n")
    inside, end, after = rest.partition(f"\n\n<!-- end {lane} -->")
    assert start and end, f"{DOCUMENT} has no table between <!-- {lane} --> and its end"
    return before + start, inside, end + after


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
