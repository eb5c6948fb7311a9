"""The package's rooms: who may import whom, and which names stay in one file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE_NAME = "resid_patching"
PACKAGE = Path(__file__).resolve().parent.parent / PACKAGE_NAME

# A module (a file or a folder) imports only from those before it.
ORDER = (
    "version",
    "errors",
    "files",
    "rows",
    "processes",
    "markup",
    "notebook",
    "shown",
    "address",
    "models",
    "tokens",
    "prompts",
    "prompt_sets",
    "texts",
    "continuation",
    "run",
    "rerun",
    "per_prompt",
    "metrics",
    "result",
    "decomposition",
    "scored",
    "attribution",
    "paths",
    "ablation",
    "patterns",
    "stream",
    "lens",
    "plots",
    "show",
    "cli",
)
# These stand above the order and may import everything.
ROOTS = ("__init__", "__main__")
# One command each; what they share is in the other modules of cli.
COMMANDS = ("dla", "ablate", "path_patch", "logit_lens", "tuned_lens", "attention", "stream")

ONLY_IN = {"plotly": "plots", "matplotlib": "plots", "transformer_lens": "models"}
HOOK_NAME = re.compile(r"hook_|blocks\.")


def violations(path: str, source: str) -> list[str]:
    """Check one module, given by its path inside the package, against the rules of this file."""
    module = Path(path).with_suffix("").parts
    room = module[0]
    tree = ast.parse(source)
    found = []
    if room not in ROOTS:
        if room not in ORDER:
            return [f"{path}: {room} has no place in ORDER"]
        found += [
            f"{path}:{line}: {problem}"
            for line, target in _imports(tree, module)
            if (problem := _import_problem(module, target))
        ]
    if room != "cli":
        found += [f"{path}:{line}: calls print" for line in _print_calls(tree)]
    if room != "address":
        found += [f"{path}:{line}: spells the hook name {s!r}" for line, s in _hook_names(tree)]
    return found


def _imports(tree: ast.AST, module: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted target of every import; `from a import b` gives a.b."""
    # Both a module a.b and a package's a/__init__ resolve one dot to the parts before the last.
    here = (PACKAGE_NAME, *module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            prefix = ".".join((*base, *filter(None, [node.module])))
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}"


def _import_problem(module: tuple[str, ...], target: str) -> str | None:
    room = module[0]
    top, *inside = target.split(".")
    if top in ONLY_IN and room != ONLY_IN[top]:
        return f"only {ONLY_IN[top]} may import {top}"
    if top != PACKAGE_NAME:
        return None
    if room == "cli":
        command = inside[1] if inside[:1] == ["cli"] and len(inside) > 1 else None
        if module[-1] in COMMANDS and command in COMMANDS:
            return f"a command imports the command {command}; share through a module of cli"
        return None
    if not inside or inside[0] not in ORDER:
        return f"imports {target} from the package itself; import it from where it is defined"
    if ORDER.index(inside[0]) > ORDER.index(room):
        return f"imports {target}, which comes after {room}"
    return None


def _print_calls(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "print":
                yield node.lineno


def _hook_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the literals, parts of f-strings too, that spell a hook name; docstrings may."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            if isinstance(node.value, str) and HOOK_NAME.search(node.value):
                yield node.lineno, node.value


MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def test_the_package_was_found():
    assert "__init__.py" in MODULES


@pytest.mark.parametrize("path", MODULES)
def test_modules_keep_to_their_room(path):
    assert violations(path, (PACKAGE / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("errors.py", "from resid_patching.address import parse"),
        ("run.py", "from .rerun import Engine"),
        ("run.py", "from . import rerun"),
        ("run.py", "import resid_patching.result"),
        ("run.py", "def f():\n    from .lens import logit"),
        ("run.py", "from . import load"),
        ("run.py", "import resid_patching"),
        ("models/guards.py", "from ..prompts import Prompts"),
        ("models/__init__.py", "from ..run import Run"),
        ("lens/logit.py", "from .. import plots"),
        ("lens/logit.py", "import plotly.graph_objects as go"),
        ("cli/dla.py", "import matplotlib"),
        ("cli/dla.py", "from .ablate import main"),
        ("cli/dla.py", "from resid_patching.cli import ablate"),
        ("run.py", "from transformer_lens import HookedTransformer"),
        ("prompts.py", "print('hello')"),
        ("run.py", "name = 'blocks.3.attn.hook_z'"),
        ("run.py", "def name(layer):\n    return f'blocks.{layer}'"),
        ("__init__.py", "name = 'hook_embed'"),
        ("helpers.py", ""),
    ],
)
def test_the_checker_reports_a_planted_violation(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("address.py", "from .errors import AddressError\nname = f'blocks.{3}.hook_z'"),
        ("run.py", '"""Reads `blocks.0.hook_resid_pre`."""\nfrom . import errors, models'),
        ("models/guards.py", "from ..errors import ModelError\nfrom .view import ModelView"),
        ("models/__init__.py", "from .view import ModelView\nimport transformer_lens"),
        ("models.py", "from transformer_lens.model_bridge import TransformerBridge"),
        ("lens/fit.py", "from .tuned import TunedLens\nfrom ..run import Run"),
        ("plots.py", "import plotly.express"),
        ("cli/dla.py", "import resid_patching as rp\nfrom .output import table\nprint(1)"),
        ("cli/dla.py", "from resid_patching.cli.output import ablate"),
        ("cli/__init__.py", "from . import ablate, dla"),
        ("__init__.py", "from resid_patching.attribution import direct_logit_attribution"),
        ("__main__.py", "from resid_patching.cli import main"),
    ],
)
def test_the_checker_accepts_what_the_rules_allow(path, source):
    assert violations(path, source) == []
