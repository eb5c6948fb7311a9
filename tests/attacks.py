"""Ways to damage files, and what the package reads: for test_damaged_files.py and fuzz.py.

A `Victim` writes files that were made by the package and reads them back. Whatever is done to the
files, reading gives either what was written or an error of ours that is one line; anything else
is a finding.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zoo
import zoo_ablation
import zoo_lens

import resid_patching as rp
from resid_patching.errors import ResidPatchingError
from resid_patching.lens import resume


@dataclass(frozen=True)
class Victim:
    """Files of one kind.

    Attributes:
        name: what they are.
        write: makes them in an empty folder.
        read: reads them; the same value, as text, for the same content.
        checked: whether every change of a number must be noticed. Formats of others have no
            checksum of some of their parts: there, reading must end well or in an error of ours.
    """

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    checked: bool = True

    def __str__(self) -> str:
        return self.name


def model() -> Any:
    """The model whose files are damaged."""
    return zoo_ablation.PLAIN.model


@functools.cache
def _results() -> dict[str, Any]:
    """One result of every kind, NaN among its numbers."""
    run = rp.capture(model(), zoo.RAGGED)
    metric = rp.logit_diff(3, 6)
    readout = rp.logit_lens(run)
    path = rp.Path(to="logits", using=rp.Zero(), mlps="recompute")
    return {
        "attribution": rp.direct_logit_attribution(run, answer=3, foil=6, by="head"),
        "effect": rp.ablate(run, ["0.1", "mlp.1"], rp.Zero(), metric=metric),
        "loss effect": rp.ablate(run, ["0.1"], rp.Zero(), metric=rp.loss()),
        "path effect": rp.ablate(
            run,
            ["0.1", "2.0"],
            rp.Path(to=rp.receivers("1.1.q", "logits"), using=rp.Zero(), mlps="freeze"),
            metric=metric,
        ),
        "linearised": rp.linearised_paths(run, ["0.1"], path, metric=metric),
        "lens": readout.kl,
        "top tokens": readout.top_tokens(3),
        "marginal": readout.marginal_bias(),
        "stream": rp.stream_report(run),
    }


def results() -> dict[str, Any]:
    """One result of every kind, by name."""
    return dict(_results())


def _write_result(folder: Path, name: str) -> None:
    (folder / "result.json").write_text(_results()[name].to_json(), encoding="utf-8")


def _read_result(folder: Path, name: str) -> str:
    return type(_results()[name]).from_json(_text(folder / "result.json")).to_json()


def _text(path: Path) -> str:
    """As a caller reads a file before it gives us the text: what fails here is not ours."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OSError(f"{path}: {error}") from None


def _write_lens(folder: Path, seed: int = 0, format: Any = "resid_patching") -> None:
    lens = zoo_lens.random_lens(model(), seed=seed)
    lens.record = {"fit": {"steps": 3}, "validation": {"tuned": [0.5, 0.25, 0.125]}}
    lens.save(folder, format=format)


def _read_lens(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rp.TunedLens.load(folder, model())
    sketch = None if found.sketch is None else found.sketch.tolist()
    rest = (found.record, found.fingerprint, found.site, sketch)
    return str((found.weight.tolist(), found.bias.tolist(), *rest))


def _read_foreign_lens(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rp.TunedLens.load(folder, model())
    return str((found.weight.tolist(), found.bias.tolist()))


@functools.cache
def _state() -> bytes:
    folder = zoo.scratch() / "state"
    rp.fit_tuned_lens(
        model(),
        zoo_lens.random_windows(24),
        length=16,
        validation_tokens=32,
        steps=2,
        optimizer="adam",
        folder=folder,
        progress=False,
    )
    return (folder / resume.STATE).read_bytes()


def _write_state(folder: Path) -> None:
    (folder / resume.STATE).write_bytes(_state())


def _read_state(folder: Path) -> str:
    about, tensors = resume.read(folder)
    if about is None:
        raise FileNotFoundError(f"{folder} holds no state")
    return str((about, {name: t.tolist() for name, t in sorted(tensors.items())}))


_PAIRS = [
    ("When Mary and John went, John gave it to", "When Mary and John went, Mary gave it to"),
    ("Caf\u00e9 \U0001f600 one", "Caf\u00e9 \U0001f600 two"),
]


def _write_pairs(folder: Path, name: str) -> None:
    rows = [{"base": b, "source": s, "answer": " Mary", "foil": " John"} for b, s in _PAIRS]
    if name.endswith(".jsonl"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        text = "".join("\t".join(row) + "\n" for row in [rows[0].keys(), *map(dict.values, rows)])
    (folder / name).write_text(text, encoding="utf-8")


def _read_pairs(folder: Path, name: str) -> str:
    return str(rp.read_pairs(folder / name))


def _write_model(folder: Path) -> None:
    shutil.copytree(zoo.text_folder(), folder, dirs_exist_ok=True)


def _read_model(folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rp.capture(rp.load(folder), "the dog saw the cat")
        return str(found.logits_at(-1).tolist())


def _result_victim(name: str) -> Victim:
    return Victim(
        f"{name} result",
        lambda folder: _write_result(folder, name),
        lambda folder: _read_result(folder, name),
    )


def _pairs_victim(name: str) -> Victim:
    return Victim(
        name,
        lambda folder: _write_pairs(folder, name),
        lambda folder: _read_pairs(folder, name),
        checked=False,
    )


LENS = Victim("lens", _write_lens, _read_lens)
FOREIGN_LENS = Victim(
    "tuned-lens package's lens",
    lambda folder: _write_lens(folder, format="tuned-lens"),
    _read_foreign_lens,
)
STATE = Victim("state of a fit", _write_state, _read_state)
PAIRS = tuple(map(_pairs_victim, ("pairs.tsv", "pairs.jsonl")))
MODEL = Victim("model", _write_model, _read_model, checked=False)
RESULTS = tuple(
    map(
        _result_victim,
        (
            "attribution",
            "effect",
            "loss effect",
            "path effect",
            "linearised",
            "lens",
            "top tokens",
            "marginal",
            "stream",
        ),
    )
)
VICTIMS = (LENS, FOREIGN_LENS, STATE, *RESULTS, *PAIRS)
"""All but the model, whose reading takes a hundred times as long."""


class Bomb:
    """What a pickle runs when it is read."""

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(zoo.scratch() / "exploded"),))


def exploded() -> bool:
    """Whether a pickled object was ever run."""
    return (zoo.scratch() / "exploded").exists()


# Damage


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def flip_a_bit(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_bits(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(2, 40)):
        content = flip_a_bit(content, rng)
    return content


def blank(content: bytes, rng: random.Random) -> bytes:
    """A block of zeros, as a lost sector leaves."""
    start, size = rng.randrange(len(content)), rng.randint(1, 512)
    return content[:start] + bytes(len(content[start : start + size])) + content[start + size :]


def cut_out(content: bytes, rng: random.Random) -> bytes:
    start, size = rng.randrange(len(content)), rng.randint(1, 64)
    return content[:start] + content[start + size :]


def insert(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    return content[:start] + rng.randbytes(rng.randint(1, 64)) + content[start:]


def swap_blocks(content: bytes, rng: random.Random) -> bytes:
    size = rng.randint(1, max(1, len(content) // 4))
    first = rng.randrange(max(1, len(content) - 2 * size))
    middle = content[first + size : first + 2 * size] + content[first : first + size]
    return content[:first] + middle + content[first + 2 * size :]


def change_a_digit(content: bytes, rng: random.Random) -> bytes:
    """Another number of the same length: well-formed, and wrong."""
    places = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
    if not places:
        return flip_a_bit(content, rng)
    changed = bytearray(content)
    place = rng.choice(places)
    changed[place] = rng.choice([d for d in range(48, 58) if d != changed[place]])
    return bytes(changed)


def long_header(content: bytes, rng: random.Random) -> bytes:
    """Eight bytes that say how long a header is, larger than any file."""
    return rng.choice((2**63 - 1, 2**64 - 1, 10**9, 0)).to_bytes(8, "little") + content[8:]


def pickled(content: bytes, rng: random.Random) -> bytes:
    return pickle.dumps({"0.weight": Bomb(), "format": Bomb()}, protocol=rng.randint(0, 4))


def nested(content: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"[", b'{"a":')) * 200_000


def noise(content: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 7, 8, 9, 1000)))


def change_json(content: bytes, rng: random.Random) -> bytes:
    """A value of a JSON text replaced by one of another kind, or left out."""
    try:
        body = json.loads(content)
    except ValueError:
        return flip_a_bit(content, rng)
    if not isinstance(body, dict) or not body:
        return b"{}"
    where: Any = body
    for _ in range(rng.randint(0, 4)):
        inner = where.values() if isinstance(where, dict) else where
        inner = [value for value in inner if isinstance(value, dict | list) and value]
        if not inner:
            break
        where = rng.choice(inner)
    key = rng.choice(list(where) if isinstance(where, dict) else range(len(where)))
    if rng.random() < 0.25:
        del where[key]
    else:
        where[key] = rng.choice(
            (None, True, -1, 0, 10**40, 1.5, "", "x", [], {}, [None], {"tensor": []}, "\ud800")
        )
    return json.dumps(body).encode()


DAMAGE: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    truncate,
    flip_a_bit,
    flip_a_bit,  # the commonest, and the hardest to notice
    flip_bits,
    blank,
    cut_out,
    insert,
    swap_blocks,
    change_a_digit,
    long_header,
    pickled,
    nested,
    noise,
    change_json,
)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _replace_by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


WHOLE = (Path.unlink, _replace_by_folder, _replace_by_loop, _replace_by_dangling_link)


@functools.cache
def _originals(victim: Victim) -> tuple[dict[str, bytes], Any]:
    """What the files hold, and what reading them gives."""
    folder = zoo.scratch() / f"original of {victim}"
    folder.mkdir()
    victim.write(folder)
    content = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return content, victim.read(folder)


def damage(victim: Victim, folder: Path, rng: random.Random) -> tuple[str, Any]:
    """Writes a victim's files with one of them damaged; what was done, and the right value."""
    content, value = _originals(victim)
    folder.mkdir(parents=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    name = rng.choice(sorted(content))
    if rng.random() < 0.05:
        act = rng.choice(WHOLE)
        act(folder / name)
        return f"{act.__name__.strip('_')} of {name}", value
    how = rng.choice(DAMAGE)
    if victim is MODEL and name.endswith(".safetensors"):
        how = rng.choice((truncate, long_header, pickled, noise))  # its numbers have no checksum
    (folder / name).write_bytes(how(content[name], rng))
    return f"{how.__name__} of {name}", value


def finding(victim: Victim, folder: Path, value: Any) -> str | None:
    """What is wrong with how damaged files were read; None where nothing is."""
    try:
        found = victim.read(folder)
    except (ResidPatchingError, OSError) as error:
        if isinstance(error, ResidPatchingError) and "\n" in str(error):
            return f"its error is more than one line: {error!r}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if victim.checked and found != value:
        return "it was read as other numbers without a word"
    return None


def attack(victim: Victim, folder: Path, seed: int) -> str | None:
    """Damages a victim's files as a seed says and reads them: a finding, or None."""
    rng = random.Random(f"{victim} {seed}")
    how, value = damage(victim, folder, rng)
    problem = finding(victim, folder, value)
    shutil.rmtree(folder)
    if exploded():
        problem = "a pickled object was run"
    return None if problem is None else f"{victim}, {how} (seed {seed}): {problem}"
