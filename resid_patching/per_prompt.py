"""A user's function of logits, called so that every prompt has a number of its own.

    function(logits)             logits [n, pos, d_vocab] -> values [n]
    function(logits, prompts)    the same, and which prompts of the run these are [n]

The prompts of one call have equal length and no padding, so position -1 is each prompt's last
token. How many stand in one call depends on memory, so the numbers must not:

    two arguments   as many prompts as fit; the function looks its labels up by `prompts`
    one argument    all prompts of the run, row i is prompt i, where their logits fit into a quarter
                    of the run's `max_bytes`. Prompts of several lengths take one call for each
                    length: rows of prompts of other lengths hold copies of one of this length, and
                    what is given for them is not read. Where they do not fit, as many as fit, which
                    is right only for a function that does not count rows

All of this is checked on the clean run, before anything else is measured: a number must stay the
same when other prompts stand beside it, and a function of one argument whose prompts do not fit
must give one prompt the same number in every row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from resid_patching.errors import MetricError
from resid_patching.run import DEFAULT_MAX_BYTES, Run

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ROUNDING = 1e-4  # of the largest number: sums over more rows round otherwise


def takes_prompts(function: Any) -> bool:
    """Whether a function has a second argument, for the numbers of the prompts.

    An argument with a default, as in `lambda logits, labels=labels: ...`, is none.

    Raises:
        TypeError: it cannot be called with logits, or with logits and prompts.
    """
    if not callable(function):
        raise TypeError(f"a metric is a function of logits; got {function!r}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions that are written in C show no signature
        return False
    places = [p for p in parameters if p.kind in _POSITIONAL]
    needed = [p for p in places if p.default is p.empty]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if named or len(needed) > 2 or not (places or takes_any):
        raise TypeError(
            "a metric is a function of logits, or of logits and prompts; "
            f"{named_function(function)} takes {inspect.signature(function)}"
        )
    return len(needed) == 2


def named_function(function: Any) -> str:
    """What a function is called."""
    return getattr(function, "__name__", "a function of the logits")


class PerPrompt:
    """One function on one run.

    Args:
        function: of logits, or of logits and prompts.
        name: the metric, in words.
        run: the run.
        n_positions: how many positions of each prompt are read.
    """

    def __init__(
        self, function: Callable[..., Tensor], name: str, run: Run, n_positions: Sequence[int]
    ) -> None:
        self.function, self.name, self.n_positions = function, name, list(n_positions)
        self.takes_prompts = takes_prompts(function)
        self.n_prompts, self.max_bytes = len(run), run.max_bytes
        self.position_bytes = run.view.W_U.shape[1] * run.view.compute_dtype.itemsize
        fits = self._bytes(max(self.n_positions)) <= self.max_bytes // 4
        self.together = not self.takes_prompts and (fits or self.n_prompts == 1)
        self.checked: set[int] = set()

    def evaluate(self, logits: Tensor, rows: slice, clean: Tensor | None) -> Tensor:
        """Logits [variant, rows, n, d_vocab], padded -> values [variant, rows]."""
        values = logits.new_empty(logits.shape[:2])
        for n, prompts in self._of_one_length(rows):
            local = [prompt - rows.start for prompt in prompts]
            everything = len(local) == logits.shape[1]
            part = (logits if everything else logits[:, local])[:, :, :n]
            if not self.checked.issuperset(prompts):
                self._check(part[0], prompts)
                self.checked.update(prompts)
            for variant, own in enumerate(part):
                values[variant, local] = self._values(own, prompts).to(values)
        return values

    def _of_one_length(self, rows: slice) -> Iterator[tuple[int, list[int]]]:
        """Numbers of positions, and the prompts that have so many."""
        found: dict[int, list[int]] = {}
        for prompt in range(rows.start, rows.stop):
            found.setdefault(self.n_positions[prompt], []).append(prompt)
        return iter(found.items())

    def _values(self, logits: Tensor, prompts: list[int]) -> Tensor:
        """Logits of prompts of one length [n, pos, d_vocab] -> their values [n]."""
        if self.takes_prompts:
            return self._call(logits, prompts)
        if self.together:
            return self._call(self._in_all_rows(logits, prompts))[prompts]
        try:
            return self._call(logits)
        except Exception as error:
            raise self._too_many(
                f"fails on {len(prompts)} of the run's {self.n_prompts} prompts ({error})"
            ) from error

    def _in_all_rows(self, logits: Tensor, prompts: list[int]) -> Tensor:
        """Each prompt in the row of its number, and copies of these prompts in all others."""
        if prompts == list(range(self.n_prompts)):
            return logits
        if len(prompts) == 1:
            return logits.expand(self.n_prompts, -1, -1)
        own = {prompt: place for place, prompt in enumerate(prompts)}
        return logits[[own.get(row, row % len(prompts)) for row in range(self.n_prompts)]]

    def _call(self, logits: Tensor, prompts: list[int] | None = None) -> Tensor:
        if prompts is None:
            value = self.function(logits)
        else:  # on the CPU, from where tensors of any device can be indexed
            value = self.function(logits, torch.tensor(prompts, device="cpu"))
        if not isinstance(value, Tensor) or tuple(value.shape) != (len(logits),):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise MetricError(
                f"the metric {self.name} must give one number for each of {len(logits)} prompts, a "
                f"tensor of shape ({len(logits)},); it gave {found}"
            )
        return value

    # What must be true of it

    def _check(self, logits: Tensor, prompts: list[int]) -> None:
        """Raises MetricError where numbers would depend on what else stands in the call."""
        if self.n_prompts == 1:
            return
        if not (self.takes_prompts or self.together):
            self._require_no_rows(logits[:1], prompts[0])
        alone = self._values(logits, prompts)
        if self.together:
            rows = self._in_all_rows(logits, prompts).clone()
            others = sorted(set(range(self.n_prompts)) - set(prompts[::2]))
            rows[others] = rows[others].flip(-1)
            kept, beside = slice(None, None, 2), self._call(rows)[prompts]
        else:
            doubled = torch.cat([logits, logits.flip(-1)])
            kept, beside = slice(None), self._values(doubled, prompts * 2)[: len(prompts)]
        if (place := _first_other(alone[kept], beside[kept])) is not None:
            raise MetricError(
                f"the metric {self.name} gives prompt {prompts[kept][place]} "
                f"{float(alone[kept][place]):.6g}, and {float(beside[kept][place]):.6g} when other "
                "prompts stand beside it. A metric gives each prompt a number of its own: it may "
                "not average over prompts or draw random numbers"
            )

    def _require_no_rows(self, logits: Tensor, prompt: int) -> None:
        """Raises MetricError where one prompt [1, pos, d_vocab] has another number in another row.

        It stands in as many rows as the run has prompts, in no more memory than in one: with its
        last position alone where that is all that the function reads, else with all of them.
        """
        alone = self._values(logits, [prompt])
        last = logits[:, -1:]
        read = last if self._reads_no_more(last, alone) else logits
        n_bytes = self._bytes(read.shape[1])
        if read is not last and n_bytes > max(self.max_bytes, DEFAULT_MAX_BYTES):
            raise self._too_many("reads more than the last position")
        values = self._call(read.expand(self.n_prompts, -1, -1))
        if (row := _first_other(values[:1].expand_as(values), values)) is not None:
            raise self._too_many(
                f"gives the same logits {float(values[0]):.6g} in row 0 and "
                f"{float(values[row]):.6g} in row {row}, so it seems to hold something for each "
                "prompt"
            )

    def _reads_no_more(self, last: Tensor, alone: Tensor) -> bool:
        try:
            return _first_other(alone, self._call(last)) is None
        except Exception:
            return False

    def _bytes(self, n: int) -> int:
        """Of the logits of `n` positions of every prompt."""
        return self.n_prompts * n * self.position_bytes

    def _too_many(self, what: str) -> MetricError:
        return MetricError(
            f"the metric {self.name} {what}. A function of one argument sees all prompts at once, "
            f"but {self.n_prompts} prompts have {self._bytes(max(self.n_positions)):,} bytes of "
            f"logits and max_bytes={self.max_bytes:,} leaves it a quarter of that. Give it a "
            "second argument, the numbers of the prompts it sees, such as lambda logits, prompts: "
            "logits[range(len(logits)), -1, labels[prompts]]; or read one position, "
            "rp.custom(function, position=-1); or capture with a larger max_bytes"
        )


def _first_other(left: Tensor, right: Tensor) -> int | None:
    """The first place where numbers differ by more than rounding; None where none do."""
    left, right = left.detach().double(), right.detach().double()
    allowed = _ROUNDING * left.nan_to_num().abs().max()
    other = ~torch.isclose(left, right, rtol=0, atol=float(allowed), equal_nan=True)
    return int(other.nonzero()[0]) if bool(other.any()) else None
