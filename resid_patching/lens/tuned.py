"""The tuned lens: before the unembedding, each state is moved by an affine map of its own layer.

    logits_l = softcap(N(h + A_l h + b_l) W_U + b_U)        h = resid_pre.l, l = 0 the embedding

A and b are zero at the start, where the tuned lens *is* the logit lens, bit for bit, and the last
state has no translator. They are fitted so that the reading comes near the model's own output
(`rp.fit_tuned_lens`), which makes up for the turns and shifts of the stream that make the logit
lens mislead in early layers. What it says is how much of the output can be read linearly from a
state, not what the model does with it.

    tuned = rp.fit_tuned_lens(model, texts)
    tuned(run).kl                                # the same LensReadout as rp.logit_lens(run)
    tuned.save("lens"); rp.TunedLens.load("lens", model)

A lens knows its model by a fingerprint (`lens.fingerprint`) and refuses one with another readout.
On a model with the same readout and other layers before it, such as a fine-tune, it warns, and its
readouts say "body unverified".

Source: Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the Tuned Lens"
(arXiv 2303.08112), section 3.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from resid_patching.address import MLP, Address, Attn, Stream, parse
from resid_patching.errors import (
    AddressError,
    LensBasisError,
    LensFormatError,
    LensMismatchError,
    UnverifiedLensWarning,
    warn,
)
from resid_patching.lens import basis, checkpoint
from resid_patching.lens.fingerprint import (
    Fingerprint,
    body_sketch,
    fingerprint,
    first_difference,
    readout_sketch,
    require_match,
    require_same_name,
    require_same_shape,
    same_readout,
)
from resid_patching.lens.logit import require_middle, require_run
from resid_patching.lens.readout import LensReadout
from resid_patching.lens.results import limits_of
from resid_patching.lens.states import last_state
from resid_patching.lens.unembed import Unembedding
from resid_patching.models import Model, ModelView, as_view, exact, name_of, uncast
from resid_patching.prompts import Positions
from resid_patching.result import Axis, Result, provenance
from resid_patching.run import Run
from resid_patching.shown import Shown

if TYPE_CHECKING:
    import pandas

LensSite = Literal["resid_pre", "resid_mid", "attn_out", "mlp_out"]


class TunedLens(Shown, nn.Module):
    """A translator for each layer of one model. It contains no part of the model itself.

    Attributes:
        weight: A [layer, d_model, d_model].
        bias: b [layer, d_model].
        fingerprint: the model that it belongs to.
        site: what it reads at each layer.
        sketch: what of the model's readout exact weight processing leaves as it is, or None.
        body: what the model's layers make of fixed tokens, or None where that is not known.
        record: how it was fitted and its validation KL at each layer, as written to files.
    """

    def __init__(
        self,
        fingerprint: Fingerprint,
        *,
        site: LensSite = "resid_pre",
        dtype: torch.dtype = torch.float32,
        sketch: Tensor | None = None,
        body: Tensor | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        n_layers, d_model = fingerprint.n_layers, fingerprint.d_model
        self.weight = nn.Parameter(torch.zeros(n_layers, d_model, d_model, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(n_layers, d_model, dtype=dtype))
        self.fingerprint = fingerprint
        self.site: LensSite = site
        self.sketch = sketch
        self.body = body
        self.record = dict(record or {})

    @classmethod
    def identity(cls, model: Model, *, site: LensSite = "resid_pre") -> TunedLens:
        """The lens of a model before any fit: the logit lens.

        Args:
            model: a HookedTransformer or TransformerBridge.
            site: `resid_pre` (the stream before each layer), `resid_mid`, `attn_out`, `mlp_out`.

        Raises:
            ValueError: an unknown site.
            UnsupportedModelError: the model has no such states.
        """
        view = as_view(model)
        require_lens_site(view, site)
        lens = cls(
            fingerprint(view),
            site=site,
            dtype=view.compute_dtype,
            sketch=readout_sketch(view),
            body=body_sketch(view),
        )
        return lens.to(view.device)

    ordered: ClassVar[bool] = True

    def table(self) -> pandas.DataFrame:
        """KL(final || lens) by layer on tokens that were held out of the fit, in nats.

        Returns:
            A data frame: layer, and logit lens, ridge and tuned, as far as the fit measured them.
        """
        import pandas

        held_out = self.record.get("validation", {})
        names = {"logit lens": "logit_lens", "ridge": "ridge", "tuned": "tuned"}
        columns = {name: held_out[key] for name, key in names.items() if held_out.get(key)}
        return pandas.DataFrame({"layer": self.labels, **columns})

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Whose lens this is, what it reads, and how it was fitted."""
        mark, fit = self.fingerprint, self.record.get("fit", {})
        facts = [("model", f"{mark.model}, {mark.n_layers} layers of {mark.d_model}")]
        facts += [("reads", f"{self.site}, {mark.basis} weights")]
        if "training_tokens" in fit:
            steps = f"{fit.get('steps_made', 0)} KL steps"
            facts.append(("fitted on", f"{fit['training_tokens']:,} tokens, {steps}"))
        if held_out := self.record.get("validation", {}).get("tokens"):
            facts.append(("held out", f"{held_out:,} tokens; KL(final || lens) in nats"))
        return tuple(facts)

    def caveats(self) -> tuple[str, ...]:
        """What a tuned lens is not."""
        return limits_of("tuned lens")

    def extra_repr(self) -> str:
        """What `repr` shows."""
        mark = self.fingerprint
        return f"{mark.model}, {mark.n_layers} layers of {mark.d_model}, {self.site}, {mark.basis}"

    @property
    def labels(self) -> tuple[str, ...]:
        """What each translator reads, as addresses."""
        return tuple(str(a) for a in site_rows(self.site, self.fingerprint.n_layers)[:-1])

    def layer(self, label: Address | str) -> int | None:
        """The translator of a state by its label, None for the last state, which has none.

        `resid_pre.l` and `resid_post.l-1` are one state; `embed` is `resid_pre.0`.

        Raises:
            AddressError: the lens has no translator for it.
        """
        address = Stream(0, "pre") if label == "embed" else parse(label)
        rows = site_rows(self.site, self.fingerprint.n_layers)
        if isinstance(address, Stream) and address.place == "pre" and address not in rows:
            if address.layer:
                address = Stream(address.layer - 1, "post")
        if address not in rows:
            raise AddressError(
                f"this lens reads {self.site} and has no translator for {str(label)!r}; it has "
                f"{', '.join(map(str, rows))}"
            )
        number = rows.index(address)
        return None if number == len(rows) - 1 else number

    @uncast()
    def translate(
        self, states: Float[Tensor, "*batch d_model"], layer: Address | str
    ) -> Float[Tensor, "*batch d_model"]:
        """The moved states, h + A h + b; differentiable with respect to the states and to A and b.

        Args:
            states: states of one layer.
            layer: which, by label.

        Raises:
            AddressError: the lens has no translator for it.
        """
        number = self.layer(layer)
        return states if number is None else self._move(number, states)

    def _move(self, number: int, states: Tensor) -> Tensor:
        if number == len(self.weight):
            return states
        weight, bias = self.weight[number].to(states), self.bias[number].to(states)
        return states + nn.functional.linear(states, weight, bias)

    @uncast()
    def logits(
        self, model: Model, states: Float[Tensor, "*batch d_model"], layer: Address | str
    ) -> Float[Tensor, "*batch d_vocab"]:
        """The lens's logits of given states; differentiable like `translate`.

        Args:
            model: the model the lens belongs to; its weights get no gradient.
            states: states of one layer.
            layer: which, by label.

        Raises:
            LensMismatchError: the lens is not of this model.
            AddressError: the lens has no translator for the layer.
        """
        view = as_view(model)
        self._require(view)
        unembedding = Unembedding.of(view)
        moved = self.translate(unembedding.cast(states), layer)
        return unembedding.logits(moved.reshape(-1, moved.shape[-1])).reshape(
            *states.shape[:-1], -1
        )

    def forward(self, run: Run) -> LensReadout:
        """The lens on a run, read when asked; nothing in a readout carries a gradient.

        Raises:
            LensMismatchError: the lens is not of the run's model; both sides are named.

        Warns:
            UnverifiedLensWarning: the run's model has the same readout and other layers.
        """
        require_run(run)
        self._require(run.view)
        return self._readout(run, self._move, "tuned lens")

    def _readout(self, run: Run, translate: Callable[[int, Tensor], Tensor], plan: str) -> Any:
        if self.site != "resid_pre":
            plan += f" on {self.site}"
        plan += self.mark(run.view)
        rows = site_rows(self.site, self.fingerprint.n_layers)
        return LensReadout(run, rows, plan, translate)

    def as_lens(self, model: Model, *, incl_mid: bool = False) -> Callable[[Tensor, int], Tensor]:
        """What TransformerLens 4's `tools.analysis.logit_lens` takes as `lens=`.

        Its `index` counts rows of a stack (`0_pre`, with `incl_mid` also `0_mid`, ...,
        `final_post`); here it is turned into the label, and the label into the translator.

        Args:
            model: the model that `logit_lens` is called on.
            incl_mid: what `logit_lens` is called with.

        Raises:
            LensMismatchError: the lens is not of this model.
            AddressError: when called for a row that the lens has no translator for.
        """
        view = as_view(model)
        self._require(view)
        places = ("pre", "mid") if incl_mid else ("pre",)
        stack: list[Stream] = [
            Stream(layer, place) for layer in range(view.n_layers) for place in places
        ]
        stack.append(last_state(view))

        def lens(entry: Tensor, index: int) -> Tensor:
            moved = self.translate(entry.to(view.compute_dtype), stack[index])
            return moved.to(entry.dtype)

        return lens

    @exact()
    def transfer(self, run: Run, *, positions: Positions = None) -> Result:
        """Every translator at every layer: the mean KL(final || lens), in nats [translator, layer].

        The mean is over the positions of all prompts. The diagonal is the lens itself.

        Args:
            run: a run.
            positions: which; None for all.

        Raises:
            LensMismatchError: the lens is not of the run's model.

        Source: Belrose et al. 2023, section 4.1.
        """
        require_run(run)
        self._require(run.view)
        where = run.locate(positions)
        own = self._readout(run, self._move, "tuned lens")
        own.measure("kl")  # the states and logits that it keeps serve every translator
        rows = []
        for number in range(len(self.weight)):
            kl = self._with_one_translator(own, number).measure("kl")["kl"].values
            picked = [where.take(layer, slice(None))[where.valid] for layer in kl[:-1]]
            rows.append(torch.stack(picked).mean(1))
        plan = f"layer transfer of the tuned lens{self.mark(run.view)}"
        plan += f", mean over {int(where.valid.sum())} tokens"
        axes = (Axis("translator", self.labels), Axis("layer", self.labels))
        return Result(torch.stack(rows), axes, "nats", provenance(run, plan))

    def _with_one_translator(self, readout: LensReadout, number: int) -> LensReadout:
        n_layers = len(self.weight)

        def translate(row: int, states: Tensor) -> Tensor:
            return states if row == n_layers else self._move(number, states)

        kept = {key: readout._memo[key] for key in ("chunks",) if key in readout._memo}
        return dataclasses.replace(readout, translate=translate, _memo=kept)

    # Which model it is of

    def mark(self, model: Model) -> str:
        """What readouts on a model say of what is not known: nothing where all of it is.

        Args:
            model: a model that the lens is not refused on.
        """
        view = as_view(model)
        if not self.fingerprint.verified:
            return ", unverified"
        known = self.body is not None and body_sketch(view) is not None
        return "" if known and self._other_state(view) is None else ", body unverified"

    def _require(self, view: ModelView) -> None:
        """Refuses a model with another readout, and warns of one with other layers before it."""
        require_match(self.fingerprint, view)
        self._warn_of_other_layers(view)

    def _warn_of_other_layers(self, view: ModelView) -> None:
        if (state := self._other_state(view)) is not None:
            warn(
                f"the lens is of a model ({self.fingerprint.model}) with this unembedding and "
                f"final norm, but other layers: on the same tokens, {state} differs. Its "
                "readings here are unverified. Compare its KL with the logit lens's on a text "
                "before trusting it, or fit a lens on this model.",
                UnverifiedLensWarning,
            )

    def _other_state(self, view: ModelView) -> str | None:
        """The first state that the model's layers make otherwise, where that can be compared."""
        found = body_sketch(view)
        if self.body is None or found is None:
            return None
        return first_difference(self.body, found, self.fingerprint.dtype, name_of(view.dtype))

    # Other weights of the same model

    def rebase(self, model: Model, *, renamed: bool = False) -> TunedLens:
        """This lens for the same model with its weights processed otherwise, where that is exact.

        Args:
            model: the same model, folded, centred or raw.
            renamed: the model may carry another name or revision.

        Returns:
            A new lens with the model's fingerprint.

        Raises:
            LensMismatchError: the model reads states otherwise: it is another one.
            LensBasisError: the conversion is not exact.

        Warns:
            UnverifiedLensWarning: it reads states alike, and its layers are others.
        """
        view = as_view(model)
        found = fingerprint(view)
        require_same_shape(self.fingerprint, found)
        if not renamed:
            require_same_name(self.fingerprint, found)
        if self.sketch is None:
            raise LensMismatchError(
                f"the lens of {self.fingerprint.model} comes from a file that knows too little of "
                f"its model to be moved to {found.model}; load it with that model"
            )
        if not same_readout(self.sketch, readout_sketch(view)):
            raise LensMismatchError(
                f"final norm and unembedding of {found.model} are not those of "
                f"{self.fingerprint.model}, which the lens is of, processed otherwise: they read "
                "states differently. Fit a lens on this model."
            )
        moved = self
        if self.fingerprint.basis != found.basis:
            moved = self.to_raw() if found.basis == "raw" else self.to_centred()
        self._warn_of_other_layers(view)
        moved = moved._with(found, moved.weight, readout_sketch(view))
        if self.body is not None and self._other_state(view) is None:
            moved.body = body_sketch(view)
        return moved

    def to_raw(self) -> TunedLens:
        """This lens for uncentred writing weights: A = A' P. Exact.

        The result is of the raw weights of the same model: `rebase(model)` gives it the
        fingerprint of one.

        Raises:
            LensBasisError: it is raw already, or the final norm is no LayerNorm.
        """
        self._require_basis("centred")
        return self._in_basis("raw", basis.centred_to_raw(self.weight))

    def to_centred(self) -> TunedLens:
        """This lens for centred writing weights: A' = A, exact only where P A 1 = 0.

        Raises:
            LensBasisError: it is centred already, reads the mean of the stream, or the final norm
                is no LayerNorm.
        """
        self._require_basis("raw")
        basis.require_blind_to_mean(self.weight.detach())
        return self._in_basis("centred", self.weight)

    def _require_basis(self, wanted: str) -> None:
        if self.fingerprint.basis != wanted:
            raise LensBasisError(f"the lens is {self.fingerprint.basis} already")
        basis.require_layer_norm(self.fingerprint.norm)

    def _in_basis(self, name: Literal["raw", "centred"], weight: Tensor) -> TunedLens:
        mark = dataclasses.replace(
            self.fingerprint, basis=name, W_U=None, b_U=None, final_norm=None, corners=None
        )
        return self._with(mark, weight, self.sketch)

    def _with(self, mark: Fingerprint, weight: Tensor, sketch: Tensor | None) -> TunedLens:
        lens = TunedLens(
            mark,
            site=self.site,
            dtype=self.weight.dtype,
            sketch=sketch,
            body=self.body,
            record=self.record,
        )
        lens = lens.to(self.weight.device)
        with torch.no_grad():
            lens.weight.copy_(weight)
            lens.bias.copy_(self.bias)
        return lens

    # Files

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        format: Literal["resid_patching", "tuned-lens"] = "resid_patching",
    ) -> None:
        """Writes the lens to a folder; see `lens.checkpoint`.

        Args:
            folder: made where it does not exist. A lens in it is replaced; a process that is
                killed on the way leaves one that loads.
            format: ours, or the tuned-lens package's.

        Raises:
            LensFormatError: the other format cannot hold this lens.
            OSError: the folder cannot be written.
        """
        checkpoint.save(self, folder, format)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: Model) -> TunedLens:
        """Reads a lens from a folder in either format, and checks that it is of this model.

        Args:
            folder: what `save` wrote, a lens of the tuned-lens package, or `demo`, the lens
                shipped with the demo model.
            model: the model that it is for.

        Raises:
            LensNotFoundError: there is no lens.
            LensFormatError: the files are damaged, of another kind, or would run code.
            LensMismatchError, LensBasisError: the lens is not of this model.

        Warns:
            UnverifiedLensWarning: the file cannot prove which model it belongs to, or the model
                has the lens's readout and other layers.
        """
        view = as_view(model)
        found = checkpoint.read(folder, view)
        if found.site not in get_args(LensSite):
            raise LensFormatError(
                f"{folder} holds a lens on {found.site!r}, which is none of "
                f"{', '.join(get_args(LensSite))}"
            )
        lens = cls(
            found.fingerprint,
            site=found.site,  # type: ignore[arg-type]
            dtype=found.weight.dtype,
            sketch=found.sketch,
            body=found.body,
            record=found.record,
        )
        with torch.no_grad():
            lens.weight.copy_(found.weight)
            lens.bias.copy_(found.bias)
        lens._require(view)
        if lens.fingerprint.verified and lens.body is None:
            warn(
                f"the lens at {folder} (for {lens.fingerprint.model}) is unverified for the layers "
                "before the readout: its file knows the final norm and the unembedding alone.",
                UnverifiedLensWarning,
            )
        return lens.to(view.device)


def site_rows(site: LensSite, n_layers: int) -> tuple[Address, ...]:
    """What a lens on a site reads: one state for each translator, and the last of the stream."""
    last = Stream(n_layers - 1, "post")
    layers = range(n_layers)
    match site:
        case "resid_pre":
            return (Stream(0, "pre"), *(Stream(layer, "post") for layer in layers))
        case "resid_mid":
            return (*(Stream(layer, "mid") for layer in layers), last)
        case "attn_out":
            return (*map(Attn, layers), last)
        case "mlp_out":
            return (*map(MLP, layers), last)


def require_lens_site(view: ModelView, site: Any) -> None:
    """Raises where a lens cannot read this site of this model.

    Raises:
        ValueError: an unknown site.
        UnsupportedModelError: the model has no such states.
    """
    if site not in get_args(LensSite):
        raise ValueError(f"site is one of {', '.join(get_args(LensSite))}; got {site!r}")
    if site == "resid_mid":
        require_middle(view)
    if site == "mlp_out" and view.attn_only:
        raise AddressError(f"{view.name} has no MLP, so there is no mlp_out to read")
