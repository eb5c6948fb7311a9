"""Arguments of a wrong type are named by our own errors.

The other tests run with every annotation checked, where a wrong type never reaches our code. So
one child process, in which annotations are only annotations as they are for a user, makes all the
mistakes and reports what it was told.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

# name -> expression that must raise, class of the error, part of its message
MISTAKES = {
    "no model": ("rp.capture('gpt2', [1, 2])", "TypeError", 'Load one with rp.load("gpt2")'),
    "a module": ("rp.capture(torch.nn.Linear(2, 2), [1])", "TypeError", "got Linear"),
    "backend": ("rp.load('demo', backend='bridged')", "ValueError", "auto, hooked, bridge"),
    "processing": ("rp.load('demo', processing=True)", "ValueError", "raw, folded; got True"),
    "prompts": ("rp.capture(model, 3.5)", "PromptError", "prompts are a text"),
    "no prompts": ("rp.capture(model, None)", "PromptError", "got NoneType"),
    "mixed prompts": ("rp.capture(model, ['a', [1]])", "PromptError", "not a mixture"),
    "answer": ("dla(1.5, 6)", "TokenError", "one for each prompt; got 1.5"),
    "answers": ("dla([1.5, 2, 3], 6)", "TokenError", "got 1.5"),
    "answer tensor": ("dla(torch.tensor([1.5, 2.0, 3.0]), 6)", "TokenError", "got 1.5"),
    "no answer": ("dla(None, 6)", "TokenError", "got None"),
    "position": ("dla(3, 6, positions=1.0)", "PositionError", "one whole number"),
    "positions": ("dla(3, 6, positions=[0, 1.5, 1])", "PositionError", "[0, 1.5, 1]"),
    "a text as positions": ("dla(3, 6, positions='last')", "PositionError", "'last'"),
    "grain": ("dla(3, 6, by='heads')", "ValueError", "component, head or neuron; got 'heads'"),
    "no grain": ("dla(3, 6, by=None)", "ValueError", "component, head or neuron; got None"),
    "grain of parts": ("rp.decompose(run, by='heads')", "ValueError", "got 'heads'"),
    "order": ("dla(3, 6).top(3, by='size')", "ValueError", "'abs' or 'signed', got 'size'"),
    "address": ("rp.parse(9)", "AddressError", "an address is a text such as '9.9'"),
    "sender": ("rp.parse_edge('resid_pre.1->logits')", "AddressError", "starts at a writer"),
    "receiver": ("rp.parse_edge('9.9->embed')", "AddressError", "ends at a receiver"),
    "layer": ("address.Attn('1')", "AddressError", "layer must be a whole number"),
    "fraction": ("address.Head(1, 1.5)", "AddressError", "head must be a whole number"),
    "place": ("address.Stream(1, 'late')", "AddressError", "pre, mid or post, got 'late'"),
    "which": ("address.HeadInput(1, 1, 'o')", "AddressError", "q, k or v, got 'o'"),
    "node": ("address.HeadNode(1, 1, 'q')", "AddressError", "z and pattern, got 'q'"),
}

CHILD = """
import json, sys
import torch
import zoo
import resid_patching as rp
from resid_patching import address

model = zoo.build(zoo.BACKENDS[0])
run = rp.capture(model, zoo.RAGGED)

def dla(answer, foil, **options):
    return rp.direct_logit_attribution(run, answer, foil, **options)

found = {}
for name, mistake in json.load(sys.stdin).items():
    try:
        eval(mistake)
        found[name] = [["nothing"], "nothing was raised"]
    except Exception as error:
        classes = [kind.__name__ for kind in type(error).__mro__]
        found[name] = [classes, str(error)]
dla(3, 6)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def told():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD],
        input=json.dumps({name: code for name, (code, _, _) in MISTAKES.items()}),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_type_is_named_by_our_own_error(told, name):
    _, kind, message = MISTAKES[name]
    classes, text = told[name]
    assert kind in classes, (classes, text)
    assert message in text
    assert "\n" not in text
