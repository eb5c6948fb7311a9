"""Checks this package on the accelerator that is here, or on the CPU, and times it.

Identities that hold on every device are held to what rounding allows in each dtype (see
`devices/identities.py` for how that is derived), on small random models of a few architectures;
every figure is compared with the same in float64 on the CPU. Then the benchmark's main rows run on
a model of GPT-2 small's shape, on the device and on the CPU. Nothing is downloaded.

    python scripts/check_device.py [--device cuda] [--dtype float32|bfloat16|float64|all]
        [--quick] [--json FILE]

The exit code is 1 where an identity fails; the last line then names the first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import pandas  # noqa: E402
import torch  # noqa: E402
from devices.identities import Finding, check  # noqa: E402
from devices.models import subjects  # noqa: E402

from resid_patching.models import float64_home  # noqa: E402
from resid_patching.show.report import Table  # noqa: E402
from resid_patching.show.text import console, print_table  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Verdict:
    """An identity of one model in one dtype."""

    model: str
    dtype: str
    finding: Finding

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        found = asdict(self.finding) | {"holds": self.finding.holds}
        return {"model": self.model, "dtype": self.dtype, **found}


def main(argv: list[str] | None = None) -> int:
    """Runs the checks, prints the report; the exit code."""
    arguments = _parse(argv)
    device = arguments.device
    warnings.simplefilter("ignore")
    dtypes = _dtypes(arguments.dtype, device)
    found = verdicts(device, dtypes, quick=arguments.quick)
    times = [] if arguments.quick else _timings(device, dtypes, arguments.repeats)
    _print(device, found, times, everything=arguments.verbose)
    if arguments.json:
        report = {
            "machine": machine(device),
            "identities": [verdict.as_dict() for verdict in found],
            "timings": [asdict(timing) for timing in times],
        }
        text = json.dumps(report, indent=1).replace("Infinity", '"infinite"')
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    wrong = [verdict for verdict in found if not verdict.finding.holds]
    if wrong:
        print(f"{len(wrong)} of {len(found)} identities fail, first {_line(wrong[0])}")
        return 1
    print(f"all {len(found)} identities hold on {device}")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device", type=_device, default=None, help="cuda, mps, xpu, cpu (default: what is here)"
    )
    parser.add_argument("--dtype", choices=(*DTYPES, "all"), default="all")
    parser.add_argument("--quick", action="store_true", help="two architectures, no timings")
    parser.add_argument("--verbose", action="store_true", help="show identities that hold, too")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing (default: 3)")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args(argv)
    arguments.device = arguments.device or default_device()
    return arguments


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.zeros(1, device=device) + 1
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text} cannot be used here: {first}") from None
    return device


def default_device() -> torch.device:
    """The accelerator that is here, or the CPU."""
    if torch.accelerator.is_available():
        return torch.device(torch.accelerator.current_accelerator().type, 0)  # type: ignore[union-attr]
    return torch.device("cpu")


def _dtypes(name: str, device: torch.device) -> list[torch.dtype]:
    chosen = list(DTYPES.values()) if name == "all" else [DTYPES[name]]
    if float64_home(device) != device and torch.float64 in chosen:
        print(f"{device} has no float64, so that is left out")
        chosen.remove(torch.float64)
    return chosen


def verdicts(
    device: torch.device, dtypes: list[torch.dtype], *, quick: bool = False
) -> list[Verdict]:
    """Every identity of every model in every dtype."""
    found = []
    for subject in subjects(device, dtypes, quick=quick):
        title, dtype = subject.architecture.title, str(subject.dtype).removeprefix("torch.")
        found += [Verdict(title, dtype, finding) for finding in check(subject)]
    return found


def _timings(device: torch.device, dtypes: list[torch.dtype], repeats: int) -> list[Any]:
    from devices.timings import CPU, timings

    found = list(timings(CPU, torch.float32, repeats))
    if device.type != "cpu":
        for dtype in (d for d in dtypes if d != torch.float64):
            found += timings(device, dtype, repeats)
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """What was checked on what."""
    from importlib.metadata import version

    name = platform.processor() or platform.machine()
    if device.type != "cpu":
        properties = getattr(getattr(torch, device.type, None), "get_device_name", None)
        name = properties(device) if properties else device.type
    return {
        "device": str(device),
        "name": name,
        "torch": torch.__version__,
        "transformer_lens": version("transformer-lens"),
        "resid_patching": version("resid_patching"),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


# The report


def _line(verdict: Verdict) -> str:
    finding = verdict.finding
    return (
        f"({verdict.model}, {verdict.dtype}): {finding.name}: {finding.error:.1e} apart, "
        f"{finding.allowed:.1e} allowed ({finding.why})"
    )


def _print(
    device: torch.device, found: list[Verdict], times: list[Any], *, everything: bool
) -> None:
    out = console()
    about = machine(device)
    out.print(", ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True)
    rows = []
    for (model, dtype), group in _groups(found).items():
        holds = sum(verdict.finding.holds for verdict in group)
        nearest = max(group, key=lambda verdict: _share(verdict.finding))
        share = f"{_share(nearest.finding):.0%}"  # of what rounding is allowed
        name = nearest.finding.name[:44]
        rows.append((f"{model}, {dtype}", f"{holds}/{len(group)}", share, name))
    columns = ["model", "hold", "of bound", "nearest to its bound"]
    print_table(out, Table(pandas.DataFrame(rows, columns=columns)))
    for verdict in found:
        if everything or not verdict.finding.holds:
            word = "holds" if verdict.finding.holds else "FAILS"
            out.print(f"{word}  {_line(verdict)}", soft_wrap=True)
    if times:
        rows = []
        for timing in times:
            peak = "" if timing.peak_mb is None else f"{timing.peak_mb:.0f}"
            rows.append((timing.row, timing.device, timing.dtype, f"{timing.seconds:.3g}", peak))
        columns = ["row, on GPT-2 small's shape", "device", "dtype", "seconds", "peak, MB"]
        print_table(out, Table(pandas.DataFrame(rows, columns=columns)))


def _groups(found: list[Verdict]) -> dict[tuple[str, str], list[Verdict]]:
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in found:
        groups.setdefault((verdict.model, verdict.dtype), []).append(verdict)
    return groups


def _share(finding: Finding) -> float:
    """How much of what is allowed an identity takes."""
    if finding.allowed:
        return finding.error / finding.allowed
    return 0.0 if finding.error == 0 else float("inf")


if __name__ == "__main__":
    sys.exit(main())
