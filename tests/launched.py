"""What test_processes.py starts as several processes: comparisons, or a command that is killed.

torchrun ... tests/launched.py compare FILE      one fit each way; what was found, as JSON
torchrun ... tests/launched.py kill STEP ARGS    the command ARGS; process 1 is killed at STEP
torchrun ... tests/launched.py leave             ends while gloo's threads are busy
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import resid_patching as rp
from resid_patching.cli import main
from resid_patching.lens import fit

SETTINGS = {
    "length": 16,
    "validation_tokens": 80,
    "steps": 6,
    "step_tokens": 20,
    "step_windows": 3,
    "look_every": 3,
    "progress": False,
}
# The batches of the regression are of 64 windows: there are five.
N_WINDOWS = 300


def compare(path: str) -> None:
    """Fits with the team and alone, and all that may go wrong; process 0 writes the file."""
    import zoo
    import zoo_lens

    team = rp.team()
    exact = zoo.build(zoo.BACKENDS[0])
    single = zoo.build(zoo.BACKENDS[0], dtype=torch.float32)
    texts = zoo_lens.random_windows(N_WINDOWS)

    def both(model: Any, **options: Any) -> tuple[Any, Any]:
        settings = {**SETTINGS, **options}
        shared = rp.fit_tuned_lens(model, texts if team.is_first else None, team=team, **settings)
        alone = rp.fit_tuned_lens(model, texts, **settings) if team.is_first else shared
        return shared, alone

    found = {
        "size": team.size,
        "team": _team(team),
        "statistics": _statistics(team),
        "ridge": _gap(*both(exact, steps=0)),
        "adam": _gap(*both(exact, optimizer="adam")),
        "muon": _gap(*both(single)),
        "sgd": _gap(*both(single, optimizer="sgd", rate=1.0)),
        "idle": _gap(*both(single, step_windows=1, ridge=False)),
        "resumed": _resumed(team, single, texts),
        "stream": _streamed(team, single),
        "errors": _errors(team, exact, texts),
    }
    every = team.gather(found)
    if team.is_first:
        Path(path).write_text(json.dumps(every), encoding="utf-8")


def _gap(shared: Any, alone: Any) -> dict[str, Any]:
    tables = (lens.record["validation"]["tuned"] for lens in (shared, alone))
    return {
        "translators": float((shared.weight - alone.weight).detach().abs().max()),
        "kl": max(abs(left - right) for left, right in zip(*tables, strict=True)),
        "moved": float(shared.weight.detach().abs().max()),
        "sum": float(shared.weight.detach().double().sum()),
    }


def _team(team: Any) -> dict[str, Any]:
    total = team.sum(torch.full((2,), team.rank + 1.0, dtype=torch.float64))
    return {
        "gathered": team.gather({"rank": team.rank}),
        "broadcast": team.broadcast(f"from {team.rank}"),
        "sum": total.tolist(),
        "share": [list(team.share(n)) for n in range(6)],
    }


def _statistics(team: Any) -> float:
    """The largest difference of shared statistics from those of one process, relative."""
    from resid_patching.lens.ridge import Statistics

    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(2, 40, 8, generator=generator) * 9 + 50).unbind() for _ in range(7)]
    whole, mine = Statistics.empty(1, 8), Statistics.empty(1, 8)
    for number, (x, y) in enumerate(batches):
        whole.add([x], y)
        if number in team.share(len(batches)):
            mine.add([x], y)
    mine.sum_over(team)
    assert mine.tokens == whole.tokens == 280
    return max(
        float(((getattr(mine, n) - t).abs() / t.abs().max()).max())
        for n in ("total", "mean_x", "mean_y", "xx", "xy")
        if isinstance(t := getattr(whole, n), torch.Tensor)
    )


@contextlib.contextmanager
def _at(step: int, act: Any) -> Iterator[None]:
    """Does something as a step begins."""
    plain = fit.take_step

    def take_step(*args: Any) -> Any:
        if args[2] == step:
            act()
        return plain(*args)

    fit.take_step = take_step  # type: ignore[assignment]
    try:
        yield
    finally:
        fit.take_step = plain


def _stop() -> None:
    raise KeyboardInterrupt


def _resumed(team: Any, model: Any, texts: Any) -> dict[str, Any]:
    """A fit of the team that one process ends, and the other way round, beside an unbroken one."""
    folder = Path(team.broadcast(tempfile.mkdtemp()))
    settings = {**SETTINGS, "save_every": 2}
    unbroken = rp.fit_tuned_lens(model, texts, **settings)

    def run(name: str, who: Any) -> Any:
        return rp.fit_tuned_lens(model, texts, folder=folder / name, team=who, **settings)

    with contextlib.suppress(KeyboardInterrupt), _at(4, _stop):
        run("shared", team)
    if team.is_first:
        with contextlib.suppress(KeyboardInterrupt), _at(4, _stop):
            run("alone", None)
    team.barrier()
    ended = run("alone", team)
    begun = run("shared", None) if team.is_first else ended
    return {"ended": _gap(ended, unbroken), "begun": _gap(begun, unbroken)}


def _streamed(team: Any, model: Any) -> dict[str, Any]:
    """A stream of which every row that is read is counted."""
    import datasets
    import zoo_lens

    rows = zoo_lens.random_windows(400).flatten().view(-1, 10).tolist()
    read: list[int] = []

    def generate() -> Iterator[dict[str, Any]]:
        for number, ids in enumerate(rows):
            read.append(number)
            yield {"ids": ids}

    def stream() -> Any:
        return (row["ids"] for row in datasets.IterableDataset.from_generator(generate))

    settings = {**SETTINGS, "steps": 1, "tokens": 2000}
    shared = rp.fit_tuned_lens(model, stream(), team=team, **settings)
    by_team = list(read)
    alone = rp.fit_tuned_lens(model, stream(), **settings)
    return {
        "read": by_team,
        "read_alone": read[len(by_team) :],
        "hashes": [shared.record["data_sha256"], alone.record["data_sha256"]],
    }


def _errors(team: Any, model: Any, texts: Any) -> dict[str, Any]:
    """What each process raises, and what each prints where a command fails in all."""

    def raised(**options: Any) -> str:
        try:
            rp.fit_tuned_lens(model, texts, team=team, **{**SETTINGS, **options})
        except rp.ResidPatchingError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = {"short": raised(tokens=10**6), "unequal": raised(seed=team.rank)}
    plain = fit.harvest

    def with_nan(*args: Any, **options: Any) -> Any:
        harvested = plain(*args, **options)
        if team.rank == 1:
            harvested.states[1].fill_(torch.nan)
        return harvested

    fit.harvest = with_nan  # type: ignore[assignment]
    found["nan"] = raised()
    found["nan_step"] = raised(ridge=False)
    fit.harvest = plain
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        folder = tempfile.mkdtemp()
        argv = ["fit", "--model", "demo", "--text", "none.txt", "--out", f"{folder}/lens"]
        found["code"] = main(["tuned-lens", *argv])  # type: ignore[assignment]
    found["stderr"] = out.getvalue()
    return found


def kill(step: str, *argv: str) -> int:
    """A command of which process 1 is killed as a step begins."""

    def end() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    with _at(int(step), end):
        return main([*argv])


def leave() -> None:
    """Ends as a thread of gloo waits for Python's lock, to let go of the last collective.

    The threads get no time until the collective has returned, and the lock is not passed on.
    """
    team = rp.team()
    team.gather(None)
    sys.setswitchinterval(60)
    threads = [int(name) for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]
    cores = os.sched_getaffinity(0)
    for thread in [0, *threads]:
        os.sched_setaffinity(thread, {min(cores)})
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    team.gather(None)
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(thread, cores)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass


if __name__ == "__main__":
    sys.exit({"compare": compare, "kill": kill, "leave": leave}[sys.argv[1]](*sys.argv[2:]))
