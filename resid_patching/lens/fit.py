"""Fitting a tuned lens: a regression in closed form, then steps down the KL.

    tuned = rp.fit_tuned_lens(model, Path("prose.txt"), tokens=100_000)
    tuned.record["validation"]         # KL by layer: logit lens, ridge, tuned
    tuned.save("lens")

1. Ridge (`lens.ridge`): the last state regressed on each layer's, which needs no unembedding. The
   penalty is chosen on validation text; a layer whose validation KL does not fall below the logit
   lens's keeps the identity.
2. KL steps (`lens.loop`) from there, on KL(final || lens), by a gradient that is formed directly
   (`lens.steps`). A layer keeps the best translator by validation KL.

The model is only read: it gets no gradients, its hooks, flags and weights stay as they are.

Source: Belrose et al. 2023 (arXiv 2303.08112), section 3, for the loss; the regression is ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import torch
from torch import Tensor
from tqdm.auto import tqdm

from resid_patching.address import Address
from resid_patching.errors import (
    DivergedError,
    IdleProcessWarning,
    UnequalProcessesError,
    warn,
)
from resid_patching.lens import resume as resuming
from resid_patching.lens.data import Texts, Windows, read_windows
from resid_patching.lens.harvest import Held, harvest, require_finite_harvest
from resid_patching.lens.loop import (
    RATES,
    Layer,
    Optimizer,
    Plan,
    Products,
    Shard,
    equip,
    look,
    require_number,
    take_step,
    validate,
    windows_of,
)
from resid_patching.lens.resume import FitState
from resid_patching.lens.ridge import Solver, Statistics
from resid_patching.lens.tuned import LensSite, TunedLens, site_rows
from resid_patching.lens.unembed import LowUnembedding, Unembedding
from resid_patching.models import Model, ModelView, as_view, float64_home, require, uncast
from resid_patching.notebook import in_notebook
from resid_patching.processes import Team

_PENALTIES = tuple(10.0**power for power in range(-10, 3))
_FIRST_PENALTY = _PENALTIES.index(1e-6)
_CHOICE_TOKENS = 256


@uncast()
def fit_tuned_lens(
    model: Model,
    texts: Texts,
    *,
    tokens: int | None = None,
    validation: Any = None,
    validation_tokens: int = 1024,
    length: int | None = None,
    text_key: str = "text",
    prepend_bos: bool | None = None,
    site: LensSite = "resid_pre",
    ridge: bool = True,
    steps: int = 100,
    step_tokens: int = 256,
    step_windows: int = 2,
    optimizer: Optimizer = "muon",
    rate: float | None = None,
    clip: float = 1.0,
    look_every: int = 20,
    patience: int = 3,
    products: Products = "float32",
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    save_every: int = 20,
    progress: bool = True,
    team: Team | None = None,
) -> TunedLens:
    """Fits a tuned lens.

    Args:
        model: a HookedTransformer or TransformerBridge, raw or processed; the lens is of the
            weights as they are, and says so.
        texts: a text, a path (`pathlib.Path`) to one or to a .jsonl file with one in each row,
            token ids [window, pos], or an iterable of these or of rows with a text column (a
            Hugging Face dataset, streaming or not). Each text and each row is a document.
        tokens: training tokens; None for all that there are. The KL steps go through them in a
            shuffled order, and through them again where there are more steps than windows.
        validation: texts to validate on; None holds the first documents of `texts` out, or one
            block at the end where there is one document (a text, a file, a tensor of ids) or too
            little would be left. `record["validation"]["held_out"]` says which.
        validation_tokens: tokens to validate on.
        length: tokens of a window; None for 256, or the context where that is shorter.
        text_key: the text column of a dataset's or a .jsonl file's rows.
        prepend_bos: whether windows begin with the beginning-of-sequence token; None does what
            the model's own `to_tokens` does.
        site: what the lens reads at each layer: `resid_pre`, `resid_mid`, `attn_out`, `mlp_out`.
        ridge: whether the regression is made; without it the steps begin at the logit lens.
        steps: KL steps; 0 for none.
        step_tokens: positions of each layer in a step.
        step_windows: windows that a step runs; each layer draws its positions from them.
        optimizer: `muon`, `adam` or `sgd` (Nesterov, 0.9).
        rate: learning rate at the first step, falling to 0 in a line; None for the optimizer's
            own. Muon's and Adam's are in units of each layer's scale.
        clip: largest norm of a layer's gradient.
        look_every: steps between looks at the validation tokens.
        patience: looks without a better KL after which a layer stops.
        products: precision of the two large matrix products of a step; `bfloat16` is faster on
            processors that have it. Everything else, and all validation, stays as it is.
        seed: of every draw; nothing is seeded globally.
        folder: where the state is kept every `save_every` steps. A fit that finds its own state
            there continues from it, and gives what it would have given unbroken (bit for bit on a
            CPU). Ctrl-C ends the fit after the step that is running and keeps that step too; a
            second Ctrl-C ends it at once. The state stays until `save` has written the lens to the
            same folder.
        save_every: steps between writes of the state.
        progress: whether a bar with the KL of each layer is shown, on a terminal or in a notebook.
        team: `rp.team()` where several processes, each with the model and called alike, make one
            fit; None for this process alone. The first reads the texts, once, and gives the ids to
            all (`texts` of the others is not looked at); it alone validates, writes to `folder`
            and shows the bar. The regression's batches and a step's windows are split, their sums
            added: the batch of a step is the same for any number of processes, and so is the
            state in the folder. All return the same lens.

    Returns:
        The lens; `record` holds settings, hash of the data, and validation KL by layer.

    Raises:
        OutOfDataError: the texts hold fewer tokens than were asked for.
        PromptError: what is given is no text or ids.
        DivergedError: a number is not finite; the layer and the step are named.
        LensMismatchError: the state in `folder` is of a fit with other settings, data or model.
        ValueError: a setting that cannot be.
        StreamMismatchError, ReadoutMismatchError: the model cannot be read.
        UnequalProcessesError: the processes were given different models or settings.
        LostProcessError: another process has ended.
    """
    team = Team() if team is None else team
    view = as_view(model)
    require(view, "stream", "readout")
    lens = TunedLens.identity(view, site=site)
    plan = Plan(
        steps=steps,
        step_tokens=step_tokens,
        windows=step_windows,
        optimizer=optimizer,
        rate=RATES.get(optimizer, 0.0) if rate is None else float(rate),
        clip=float(clip),
        every=look_every,
        patience=patience,
        seed=seed,
        products=products,
    )
    _require_plan(plan, save_every)
    if plan.steps and step_windows < team.size and team.is_first:
        warn(
            f"in a step, step_windows={step_windows} keeps {step_windows} of {team.size} processes "
            f"busy; give step_windows={team.size} or a multiple of it",
            IdleProcessWarning,
        )
    windows = team.first(
        lambda: read_windows(
            view,
            texts,
            length=min(256, view.n_ctx) if length is None else length,
            tokens=tokens,
            validation_tokens=validation_tokens,
            validation=validation,
            text_key=text_key,
            prepend_bos=prepend_bos,
        )
    )
    fit = _Fit(view, lens, plan, windows, ridge, progress, team)
    fit.require_equal()
    fit.run(None if folder is None else Path(folder), save_every)
    return fit.lens


def _require_plan(plan: Plan, save_every: int) -> None:
    if plan.optimizer not in get_args(Optimizer):
        raise ValueError(
            f"optimizer is one of {', '.join(get_args(Optimizer))}; got {plan.optimizer!r}"
        )
    if plan.products not in get_args(Products):
        raise ValueError(
            f"products is one of {', '.join(get_args(Products))}; got {plan.products!r}"
        )
    least = {"steps": 0, "step_tokens": 1, "windows": 1, "every": 1, "patience": 1}
    values = {**{name: getattr(plan, name) for name in least}, "save_every": save_every}
    for name, value in values.items():
        lowest = least.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ValueError(f"{name} is a whole number from {lowest}, got {value!r}")
    if not plan.rate > 0 or not plan.clip > 0:
        raise ValueError(f"rate and clip are above 0, got {plan.rate!r} and {plan.clip!r}")


@contextlib.contextmanager
def _interrupts_wait(wait: bool) -> Iterator[list[int]]:
    """Ctrl-C is noted in the list that is yielded, so that a step can end; a second one is raised.

    Nothing is changed where `wait` is false, outside the main thread, or where the caller handles
    Ctrl-C.
    """
    noted: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not wait or not is_main or before is not signal.default_int_handler:
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class _Fit:
    view: ModelView
    lens: TunedLens
    plan: Plan
    windows: Windows
    ridge: bool
    shows: bool
    team: Team = Team()
    penalty: int = _FIRST_PENALTY
    writer: str | None = field(default_factory=lambda: uuid.uuid4().hex)

    def require_equal(self) -> None:
        """Raises where the processes of the team do not make the same fit."""
        for rank, theirs in enumerate(self.team.gather(self.identity)):
            for name, left, right in resuming.differing_fields(theirs, self.identity):
                raise UnequalProcessesError(
                    f"process {rank} has {name} = {left!r}, process {self.team.rank} has "
                    f"{right!r}; give all processes the same model and settings"
                )

    def run(self, folder: Path | None, save_every: int) -> None:
        """Everything, from the folder's state where it has one; the result is put in the lens."""
        self.rows: tuple[Address, ...] = site_rows(self.lens.site, self.view.n_layers)[:-1]
        self.unembedding = Unembedding.of(self.view)
        low = self.plan.products == "bfloat16"
        self.stepping = LowUnembedding.of(self.view) if low else self.unembedding
        self._hold_out()
        state = self._take_up(folder) or self._begin(folder)
        bar = tqdm(total=self.plan.steps, initial=state.step, unit="step", disable=self._hidden)
        # One of several processes cannot stop alone: they are ended together, at once.
        waits = folder is not None and self.team.size == 1
        with bar, _interrupts_wait(waits) as interrupts:
            for step in range(state.step, self.plan.steps):
                if interrupts or all(layer.stopped for layer in state.layers):
                    break
                kls = self._step(state.layers, step)
                state = FitState(step + 1, state.layers, state.table, state.looks)
                self._look(state)
                bar.set_postfix_str("KL " + " ".join(f"{kl:.2f}" for kl in kls))
                bar.update()
                if state.step % save_every == 0:
                    self._save(folder, state)
        self._save(folder, state)
        if interrupts:
            raise KeyboardInterrupt(
                f"{folder} holds the fit as of step {state.step} of {self.plan.steps}; the same "
                "call continues from there"
            )
        self._finish(state)

    def _hold_out(self) -> None:
        """The validation tokens, which the first process alone looks at."""
        diverged = None
        if self.team.is_first:
            try:
                self.held = Held.of(self.view, self.windows.validation, self.rows)
            except DivergedError as error:
                diverged = error
        self.team.agree(diverged)

    def _save(self, folder: Path | None, state: FitState) -> None:
        if folder is not None and self.plan.steps:
            self.team.first(lambda: resuming.save(folder, state, self.identity, self.writer))

    @property
    def _hidden(self) -> bool | None:
        if not self.shows or not self.team.is_first:
            return True
        return False if in_notebook() else None  # None: shown on a terminal alone

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two fits the same one."""
        return {
            **asdict(self.plan),
            "ridge": self.ridge,
            "site": self.lens.site,
            "data": self.windows.hash,
            "model": self.lens.fingerprint.as_dict(),
        }

    # Before the first step

    def _begin(self, folder: Path | None) -> FitState:
        statistics = self._statistics()
        table: dict[str, Any] = {"logit_lens": [], "ridge": [], "penalty": []}
        layers = []
        for number, row in enumerate(self.rows):
            weight, bias, kl = self.team.first(lambda n=number: self._start(n, statistics, table))
            layers.append(self._layer(row, weight, bias, statistics.scales[number], kl))
        table["last_spread"] = statistics.last_spread
        table = self.team.broadcast(table)
        for layer in layers:
            equip(layer, self.plan, statistics.last_spread)
        state = FitState(0, layers, table, [])
        self._save(folder, state)
        return state

    def _layer(self, row: Address, weight: Tensor, bias: Tensor, scale: float, kl: float) -> Layer:
        weight, bias = (t.to(self.lens.weight.device) for t in (weight, bias))
        return Layer(str(row), weight, bias, scale, kl, weight.clone(), bias.clone())

    def _take_up(self, folder: Path | None) -> FitState | None:
        about, tensors = self.team.first(lambda: self._read(folder))
        if about is None:
            return None
        blank = [(w.detach().clone(), b.detach().clone()) for w, b in zip(*self._zero, strict=True)]
        layers = [
            self._layer(row, *pair, float(kept.get("scale", 1.0)), 0.0)
            for row, pair, kept in zip(self.rows, blank, about["layers"], strict=True)
        ]
        for layer in layers:
            equip(layer, self.plan, float(about["table"].get("last_spread", 1.0)))
        self.writer = about.get("writer")
        return resuming.put(about, tensors, layers)

    def _read(self, folder: Path | None) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
        """The state in the folder, if there is one and it is of this fit."""
        about, tensors = (None, {}) if folder is None else resuming.read(folder)
        if folder is not None and about is not None:
            resuming.require_same(folder, about, self.identity)
        return about, tensors

    @property
    def _zero(self) -> tuple[Tensor, Tensor]:
        return self.lens.weight, self.lens.bias

    def _statistics(self) -> _Moments:
        """Of all training windows; of two, for the scales alone, where no regression is made.

        Batches are the same for any number of processes, so that what is rounded in them is too.
        """
        home = float64_home(self.unembedding.device)
        statistics = Statistics.empty(len(self.rows), self.view.d_model, home)
        last_square = torch.zeros((), dtype=torch.float64, device=home)
        training = self.windows.training if self.ridge else self.windows.training[:2]
        batches = training.split(max(1, 1024 // training.shape[1]))
        mine = [batches[number] for number in self.team.share(len(batches))]
        diverged = None
        for batch in tqdm(mine, unit="batch", desc="ridge", disable=self._hidden):
            found = harvest(self.view, batch, self.rows, logits=False)
            try:
                require_finite_harvest(self.view, found, self.rows, "ridge")
            except DivergedError as error:
                diverged = error
                break
            statistics.add(found.states, found.last)
            last_square += found.last.pow(2).mean(-1).sum().to(last_square)
        self.team.agree(diverged)
        statistics.sum_over(self.team)
        self.team.sum(last_square)
        return _Moments.of(statistics, float((last_square / statistics.tokens).sqrt()))

    def _start(
        self, number: int, moments: _Moments, table: dict[str, Any]
    ) -> tuple[Tensor, Tensor, float]:
        """A layer's first translator by validation KL, on the CPU: the regression's, or none."""
        zero = (self._zero[0][number].detach().clone(), self._zero[1][number].detach().clone())
        identity_kl = self.held.kl(number, *zero)
        require_number(identity_kl, str(self.rows[number]), "logit lens")
        table["logit_lens"].append(identity_kl)
        if self.ridge:
            pair, penalty = self._choose(number, Solver(moments.statistics, number))
            kl = require_number(self.held.kl(number, *pair), str(self.rows[number]), "ridge")
            table["ridge"].append(kl)
            if kl < identity_kl:
                table["penalty"].append(penalty)
                return pair[0].cpu(), pair[1].cpu(), kl
            table["penalty"].append(None)
        return zero[0].cpu(), zero[1].cpu(), identity_kl

    def _choose(self, number: int, solver: Solver) -> tuple[tuple[Tensor, Tensor], float]:
        """The penalty with the least validation KL, by walking downhill from the layer before's."""
        every = max(1, len(self.held) // _CHOICE_TOKENS)
        known: dict[int, tuple[float, tuple[Tensor, Tensor]]] = {}

        def value(place: int) -> float:
            if place not in known:
                weight, bias = (t.to(self._zero[0]) for t in solver.solve(_PENALTIES[place]))
                known[place] = (self.held.kl(number, weight, bias, every=every), (weight, bias))
            return known[place][0]

        place = self.penalty
        for direction in (-1, 1):
            while 0 <= place + direction < len(_PENALTIES):
                if not value(place + direction) < value(place):
                    break
                place += direction
        value(place)
        self.penalty = place
        return known[place][1], _PENALTIES[place]

    # Steps

    def _step(self, layers: list[Layer], step: int) -> list[float]:
        training = self.windows.training
        picked = training[windows_of(len(training), self.plan, step)]
        mine, positions = self.team.share(len(picked)), training.shape[1] - 1
        found = [
            harvest(self.view, picked[number : number + 1], self.rows, logits=True)
            for number in mine
        ]
        part = Shard(self.team, mine.start * positions, len(picked) * positions)
        return take_step(layers, self.plan, step, found, self.stepping, part)

    def _look(self, state: FitState) -> None:
        if state.step % self.plan.every and state.step != self.plan.steps:
            return
        kls = self.team.first(lambda: validate(state.layers, self.held, state.step))
        look(state.layers, self.plan, kls)
        state.looks.append({"step": state.step, "kl": kls})

    def _finish(self, state: FitState) -> None:
        best = resuming.best_translators(state.layers)
        weight, bias = self.team.broadcast(tuple(tensor.cpu() for tensor in best))
        with torch.no_grad():
            self.lens.weight.copy_(weight)
            self.lens.bias.copy_(bias)
        n_training, length = self.windows.training.shape
        self.lens.record = {
            "fit": {
                **asdict(self.plan),
                "ridge": self.ridge,
                "penalty": state.table["penalty"],
                "training_tokens": n_training * length,
                "window": length,
                "step_passes": state.step * self.plan.windows / n_training,
                "steps_made": state.step,
            },
            "data_sha256": self.windows.hash,
            "validation": {
                "layers": [str(row) for row in self.rows],
                "tokens": len(self.windows.validation) * (length - 1),
                "held_out": self.windows.held_out,
                "logit_lens": state.table["logit_lens"],
                "ridge": state.table["ridge"],
                "tuned": [layer.kl for layer in state.layers],
                "looks": state.looks,
            },
        }
        self.view.require_unchanged(whole=True)


@dataclass(frozen=True, eq=False)
class _Moments:
    statistics: Statistics
    scales: list[float]
    last_spread: float

    @classmethod
    def of(cls, statistics: Statistics, last_spread: float) -> _Moments:
        """The statistics with each layer's scale: how much longer the last state is."""
        spread = statistics.spread().clamp_min(1e-12)
        return cls(statistics, [last_spread / float(s) for s in spread], last_spread)
