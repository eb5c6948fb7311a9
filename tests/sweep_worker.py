"""One of the processes of tests/test_sweeps.py, and the sweeps that it shares with the others.

torchrun --nproc-per-node 2 sweep_worker.py FOLDER MODEL: it writes what it found to FOLDER, and at
last the second process is killed in the middle of a sweep whose rows are kept. With `commands`
behind these words it runs the commands alone.
"""

import contextlib
import io
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
import zoo

import resid_patching as rp
from resid_patching.ablation import sharing
from resid_patching.cli import main, progress

REPOSITORY = Path(__file__).resolve().parent.parent
FIELDS = ("values", "baseline", "patched", "direct")
METRIC = rp.logit_diff(3, 4)
WORDS = "the a dog cat saw took Mary John and to in of".split()


def token_rows(n: int, seed: int, lengths: tuple[int, int] = (3, 40)) -> list[list[int]]:
    """Return n random prompts of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(*lengths, (n,), generator=generator).tolist()
    return [torch.randint(zoo.D_VOCAB, (size,), generator=generator).tolist() for size in sizes]


def captured(rows: list[list[int]]) -> rp.Run:
    """Return a run of the toy model in float32, where every rounding shows."""
    return rp.capture(zoo.build(zoo.BACKENDS[0], dtype=torch.float32), rows)


def sweep(name: str, **options) -> rp.Effect:
    """Return one of the sweeps, worked alone or with a team."""
    many, even = token_rows(90, 0), token_rows(90, 1, (24, 25))
    run = captured(even if name == "resample" else many)
    heads: list = rp.heads(run.view)
    options = {"metric": METRIC, **options}
    match name:
        case "zero":
            return rp.ablate(run, heads, rp.Zero(), **options)
        case "mean":
            other = captured(token_rows(40, 2))
            return rp.ablate(run, heads, rp.Mean(other, over=("batch", "pos")), **options)
        case "resample":
            source = captured(token_rows(95, 3, (24, 25)))
            how = rp.Resample(source, pairing="shuffle", seed=0)
            return rp.ablate(run, [*heads, "embed", "mlp.1", "resid_mid.1"], how, **options)
        case "joint":
            return rp.ablate(run, ["0.1", "mlp.1"], rp.Zero(), joint=True, **options)
        case "loss":
            options["metric"] = rp.loss()
            return rp.ablate(run, rp.writers(run.view), rp.Zero(), **options)
        case "each position":
            run = captured(many[:45])
            return rp.ablate(run, ["1.1", "mlp.1"], rp.Zero(), positions="each", **options)
        case "one prompt":  # fewer groups of prompts than processes
            run = captured(token_rows(1, 4, (40, 41)))
            return rp.ablate(run, rp.neurons(run.view, 1), rp.Zero(), **options)
        case "paths side by side":
            ends = rp.receivers("1.0.q", "2.1.k", ["mlp.1.in", "2.2.v"], "logits")
            how = rp.Path(to=ends, using=rp.Zero(), mlps="recompute")
            return rp.ablate(run, heads, how, **options)
        case "paths to the logits":
            how = rp.Path(to="logits", using=rp.Zero(), mlps="freeze")
            return rp.ablate(run, [*heads, "mlp.0"], how, **options)
        case "paths by hooks":
            ends = rp.receivers("2.1.k", "mlp.1.in")
            how = rp.Path(to=ends, using=rp.Zero(), mlps="recompute")
            return rp.ablate(captured(many[:30]), heads[:6], how, routes=("full",), **options)
    raise KeyError(name)


SWEEPS = (
    "zero",
    "mean",
    "resample",
    "joint",
    "loss",
    "each position",
    "one prompt",
    "paths side by side",
    "paths to the logits",
    "paths by hooks",
)
KEPT = ("zero", "one prompt", "paths side by side")


def prompt_file(folder: Path) -> Path:
    """Write prompts for the commands, and return their file."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(len(WORDS), (120, 24), generator=generator).tolist()
    file = folder / "prompts.txt"
    lines = (" ".join(WORDS[word] for word in row[: 8 + row[0]]) for row in drawn)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def ablate_line(folder: Path, model: str, name: str) -> list[str]:
    """Return the words of a sweep by command, results and rows named after it."""
    words = f"zero --sweep heads --model {model} --prompts {folder / 'prompts.txt'}"
    ends = f"--metric kl --rows {folder / name}.jsonl --json {folder / name}.json"
    return [*words.split(), *ends.split()]


def path_line(folder: Path, model: str, name: str) -> list[str]:
    """Return the words of a path sweep by command."""
    words = f"--sweep heads --to-sweep v --mlps freeze --using zero --model {model} --metric kl"
    prompts = (folder / "prompts.txt").read_text(encoding="utf-8").splitlines()
    ends = f"--rows {folder / name}.jsonl --json {folder / name}.json".split()
    return [*words.split(), *(word for p in prompts[:60] for word in ("--base", p)), *ends]


class Counted(sharing.Shared):
    """Counts the rows that are worked here."""

    n_rows = 0

    def _new_rows(self, pieces):
        for row in super()._new_rows(pieces):
            Counted.n_rows += 1
            yield row


def commands(folder: Path, model: str) -> dict[str, object]:
    """Sweep by a script and by a command; what each ends with, and how much is printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        sys.argv = ["ablate.py", *ablate_line(folder, model, "script")]
        script = None
        try:
            runpy.run_path(str(REPOSITORY / "scripts" / "ablate.py"), run_name="__main__")
        except SystemExit as stop:
            script = stop.code
        paths = main(["path-patch", *path_line(folder, model, "path-patch")])
    return {"script": script, "paths": paths, "printed": len(out.getvalue())}


def told_of(folder: Path) -> Path:
    """Return the file in which this process tells what it found."""
    return folder / f"told.{os.environ['RANK']}.json"


def work(folder: Path, model: str) -> int:
    """Find all sweeps, write them, and at last lose a process."""
    team = rp.team()
    rp.ablation.ablating.Shared = Counted
    told = {}
    for name in SWEEPS:
        Counted.n_rows = 0
        rows = folder / f"{name}.jsonl" if name in KEPT else None
        effect = sweep(name, team=team, rows=rows)
        told[name] = {"rows": Counted.n_rows, "routes": effect.routes}
        found = {field: getattr(effect, field) for field in FIELDS}
        torch.save(found, folder / f"{name}.{team.rank}.pt")
    try:
        run = captured(token_rows(5 + team.rank, 6))
        rp.ablate(run, ["0.0"], rp.Zero(), metric=METRIC, team=team)
    except rp.ResidPatchingError as error:
        told["unequal"] = f"{type(error).__name__}: {error}"
    told |= commands(folder, model)
    told_of(folder).write_text(json.dumps(told))

    def end_the_second(self, *_):
        return lambda n: os.kill(os.getpid(), signal.SIGKILL) if team.rank == 1 else None

    progress.Progress.ticker = end_the_second
    return main(["ablate", *ablate_line(folder, model, "killed")])


if __name__ == "__main__":
    where, source, *only = sys.argv[1:]
    if only:
        told_of(Path(where)).write_text(json.dumps(commands(Path(where), source)))
    else:
        sys.exit(work(Path(where), source))
