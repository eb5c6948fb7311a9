"""Checks that lenses go both ways between this package and the tuned-lens package.

A small GPT-2 with random weights is saved as a folder; a lens with random translators is written
by one package, read by the other, and the logits of every layer are compared. tuned-lens 0.2.0
needs an environment of its own, with the older libraries that it works with:

    python -m venv other
    other/bin/pip install torch "transformers==4.46.3" numpy
    other/bin/pip install --no-deps tuned-lens==0.2.0
    python scripts/check_tuned_lens.py --theirs other/bin/python
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
TOLERANCE = 1e-5
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28, 1, 8, 2, 8, 4]]


def randomise(tensors: list[Any], seed: int) -> None:
    """Fills tensors with small noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 20)


def write_model(folder: Path) -> None:
    """A GPT-2 of three layers, every parameter random."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50, "n_positions": 64}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) / 4
            parameter.copy_(noise + (1.0 if ".ln_" in name and name.endswith("weight") else 0.0))
    model.save_pretrained(folder)


def ours(folder: Path, lens: Any) -> dict[str, torch.Tensor]:
    """Our logits at every layer."""
    import resid_patching as rp

    model = rp.load(str(folder))
    run = rp.capture(model, torch.tensor(TOKENS))
    readout = lens(model)(run)
    return {
        str(number): readout.logits(layer=label, positions=None).contiguous()
        for number, label in enumerate(readout.labels[:-1])
    }


def their_half(folder: Path) -> None:
    """Runs where tuned-lens is installed: reads our lens, writes one of its own."""
    here = str(Path(__file__).resolve().parent)
    sys.path = [path for path in sys.path if path != here]  # scripts/tuned_lens.py has their name
    from transformers import GPT2LMHeadModel
    from tuned_lens.nn.lenses import TunedLens

    model = GPT2LMHeadModel.from_pretrained(folder / "model").eval()

    def logits(lens: Any) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            states = model(torch.tensor(TOKENS), output_hidden_states=True).hidden_states
            found = {str(n): lens(states[n], n) for n in range(model.config.n_layer)}
        return {name: tensor.contiguous() for name, tensor in found.items()}

    lens = TunedLens.from_model_and_pretrained(model, str(folder / "from_ours"))
    save_file(logits(lens), folder / "theirs_of_ours.safetensors")
    own = TunedLens.from_model(model)
    randomise(list(own.layer_translators.parameters()), 2)
    own.save(folder / "from_theirs")
    save_file(logits(own), folder / "theirs_of_theirs.safetensors")


def compare(name: str, left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Prints the largest difference of the logits."""
    differences = [float((left[key] - right[key]).abs().max()) for key in left]
    size = max(float(tensor.abs().max()) for tensor in left.values())
    print(f"{name}: largest difference {max(differences):.1e}, logits up to {size:.1f}")
    return left.keys() == right.keys() and max(differences) < TOLERANCE


def main() -> int:
    """Runs both halves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--theirs", metavar="PYTHON", help="a Python that has tuned-lens 0.2.0")
    parser.add_argument("--their-half", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.their_half:
        their_half(Path(arguments.their_half))
        return 0
    if not arguments.theirs:
        parser.error("--theirs names a Python that has tuned-lens 0.2.0; see --help")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import resid_patching as rp

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        model = rp.load(str(folder / "model"))
        lens = rp.TunedLens.identity(model)
        randomise([lens.weight, lens.bias], 1)
        lens.save(folder / "from_ours", format="tuned-lens")
        command = [arguments.theirs, __file__, "--their-half", name]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
        mine = ours(folder / "model", lambda _: lens)
        theirs = ours(folder / "model", lambda m: rp.TunedLens.load(folder / "from_theirs", m))
        fine = compare(
            "a lens written here, read there",
            mine,
            load_file(folder / "theirs_of_ours.safetensors"),
        )
        fine &= compare(
            "a lens written there, read here",
            theirs,
            load_file(folder / "theirs_of_theirs.safetensors"),
        )
    print("the same" if fine else "NOT the same")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
