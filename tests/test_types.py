"""What an editor knows of the package: every public name, and a kind that is none."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import resid_patching as rp

pytestmark = pytest.mark.once

INIT = Path(rp.__file__)
MISTAKE = 'rp.ablate(run, "9.9", "zero", metric=m)'
SCRIPT = f"""
import resid_patching as rp

model = rp.load("demo")
run = rp.capture(model, "When Mary and John went to the store, John gave a drink to")
m = rp.logit_diff(" Mary", " John")
rp.ablate(run, rp.heads(model), rp.Zero(), metric=m).top(5)
rp.ablate(run, "9.9", rp.Path(to="logits", using=rp.Zero(), mlps="freeze"), metric=lambda x: x)
{MISTAKE}
names = [{", ".join("rp." + name for name in rp.__all__)}, rp.errors.GapError]
"""


def test_type_checkers_see_exactly_the_public_names():
    """Names are imported when they are used; for a type checker they are imported in one block."""
    tree = ast.parse(INIT.read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    lazy = {
        alias.name
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert lazy == set(rp._HOME) == set(rp.__all__) - {"__version__", "errors"}


def test_the_errors_are_there_after_the_import():
    code = "import resid_patching as rp, sys; rp.errors.GapError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _public_functions():
    for name in rp.__all__:
        value = getattr(rp, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            members = inspect.getmembers(value, inspect.isroutine)
            for member, function in members:
                is_ours = "resid_patching" in str(getattr(function, "__module__", None))
                if is_ours and (member == "__init__" or not member.startswith("_")):
                    yield f"{name}.{member}", function


def test_no_required_argument_of_a_public_function_is_of_any_type():
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    loose = [
        f"{name}({parameter.name})"
        for name, function in _public_functions()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in named and parameter.default is parameter.empty
        if parameter.annotation in ("Any", Any)
    ]
    assert loose == []


@pytest.mark.full
def test_pyright_finds_every_public_name_and_the_one_mistake(tmp_path):
    """As in an editor: from another folder, by the interpreter that the package is installed in."""
    pytest.importorskip("pyright")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = SCRIPT.splitlines()
    wrong = [lines[each["range"]["start"]["line"]] for each in found]
    assert wrong == [MISTAKE], done.stdout
    assert '"how"' in found[0]["message"]
