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

PATH = "rp.Path('logits', rp.Zero(), 'freeze')"
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
    "no answer": ("dla(None, 6)", "TokenError", "one of answer and direction=; got neither"),
    "answer and direction": (
        "dla(3, 6, direction=torch.ones(32))",
        "TokenError",
        "one of answer and direction=; got both",
    ),
    "a list as direction": ("dla(None, None, direction=[1.0])", "ValueError", "a tensor [d_model]"),
    "words as direction": ("dla(None, None, direction='up')", "ValueError", "a tensor [d_model]"),
    "position": ("dla(3, 6, positions=1.0)", "PositionError", "one whole number"),
    "positions": ("dla(3, 6, positions=[0, 1.5, 1])", "PositionError", "[0, 1.5, 1]"),
    "a text as positions": ("dla(3, 6, positions='last')", "PositionError", "'last'"),
    "a span": ("dla(3, 6, positions=[[0], [1], [2, 1]])", "PositionError", "no span; got [[0], "),
    "a span of a metric": (
        "rp.measure(run, rp.logit(3, position=[[0, 1]] * 3))",
        "PositionError",
        "here each prompt has one position, no span; got [[0, 1],",
    ),
    "positions and spans": ("at([[0, 1], 2, [1]])", "PositionError", "are mixed in [[0, 1], 2, ["),
    "a fraction in a span": ("at([[0], [1.5], [1]])", "PositionError", "numbers; got [1.5]"),
    "a list in a span": ("at([[0], [[1]], [1]])", "PositionError", "numbers; got [[1]]"),
    "a list for a tuple": (
        "rp.ablate(run, [['1.2', '1.3']], rp.Zero(), metric=rp.loss())",
        "AddressError",
        "an address is a text such as '9.9' or 'mlp.6', got ['1.2', '1.3']",
    ),
    "renormalised": (
        "rp.attention('1.2', queries=-1, keys=0, renormalise=None)",
        "AblationError",
        "has no default; got None",
    ),
    "grain": ("dla(3, 6, by='heads')", "ValueError", "component, head or neuron; got 'heads'"),
    "no grain": ("dla(3, 6, by=None)", "ValueError", "component, head or neuron; got None"),
    "grain of parts": ("rp.decompose(run, by='heads')", "ValueError", "got 'heads'"),
    "a list as a set": ("rp.any_of([1, 2])", "TypeError", "tokens as texts or ids"),
    "logits of a set": ("rp.any_of(1, logits='max')", "ValueError", "or 'logsumexp'; got 'max'"),
    "a path in a run": (f"rp.ablated(run, '0.1', {PATH})", "AblationError", "cannot carry a path"),
    "a class in a run": ("rp.ablated(run, '0.1', rp.Zero)", "AblationError", "the class Zero"),
    "each in a run": (
        "rp.ablated(run, '0.1', rp.Zero(), positions='each')",
        "PositionError",
        "'each'",
    ),
    "tokens to write": ("run.generate(1.5)", "ValueError", "from 1, got 1.5"),
    "order": ("dla(3, 6).top(3, by='size')", "ValueError", "'abs' or 'signed', got 'size'"),
    "address": ("rp.parse(9)", "AddressError", "an address is a text such as '9.9'"),
    "sender": ("rp.parse_edge('resid_pre.1->logits')", "AddressError", "starts at a sender"),
    "receiver": ("rp.parse_edge('9.9->embed')", "AddressError", "ends at a receiver"),
    "layer": ("address.Attn('1')", "AddressError", "layer must be a whole number"),
    "fraction": ("address.Head(1, 1.5)", "AddressError", "head must be a whole number"),
    "place": ("address.Stream(1, 'late')", "AddressError", "pre, mid or post, got 'late'"),
    "which": ("address.HeadInput(1, 1, 'o')", "AddressError", "q, k or v, got 'o'"),
    "a kind's name": ("ablate('zero')", "AblationError", "'zero', which is no kind of ablation"),
    "no kind": ("ablate(None)", "AblationError", "the kinds are Zero(), Mean(reference, over="),
    "a kind's class": ("ablate(rp.Path)", "AblationError", "given the class Path; make one"),
    "a run as kind": ("ablate(run)", "AblationError", "Resample(source) and Path(to="),
    "axes of a mean": ("rp.Mean(run, over=('batch', 'head'))", "AblationError", "('batch', 'pos')"),
    "no axes": ("rp.Mean(run, over=None)", "AblationError", "has no default; got None"),
    "axes": ("rp.Mean(run, over=0)", "AblationError", "got 0; the kinds are"),
    "positions alone": ("rp.Mean(run, over='pos')", "AblationError", "got 'pos'"),
    "a list as reference": ("rp.Mean([[1]], over='batch')", "AblationError", "got list"),
    "a view as reference": ("rp.Mean(run.view, over='batch')", "AblationError", "got ModelView"),
    "no reference": (
        "rp.Mean(None, over='batch')",
        "AblationError",
        "is a run over the same model",
    ),
    "no source": ("rp.Resample(None)", "AblationError", "source is a run over the same model"),
    "a text as source": ("rp.Resample('text')", "AblationError", "got str"),
    "pairing": ("rp.Resample(run, pairing='columnwise')", "AblationError", "got 'columnwise'"),
    "no pairing": ("rp.Resample(run, pairing=None)", "AblationError", "or 'shuffle', got None"),
    "a text as seed": ("rp.Resample(run, 'shuffle', 'a')", "AblationError", "seed=0; got 'a'"),
    "mlps": (
        "rp.Path('logits', rp.Zero(), 'frozen')",
        "AblationError",
        'or "freeze" (only the one',
    ),
    "no mlps": ("rp.Path('logits', rp.Zero(), None)", "AblationError", "mlps was None"),
    "no using": ("rp.Path('logits', None, 'freeze')", "AblationError", "no default; got None"),
    "class as using": ("rp.Path('logits', rp.Zero, 'freeze')", "AblationError", "the class Zero"),
    "text as using": ("rp.Path('logits', 'zero', 'freeze')", "AblationError", "got 'zero'"),
    "path as using": (
        f"rp.Path('logits', {PATH}, 'freeze')",
        "AblationError",
        "got Path(to='logits'",
    ),
    "no end": ("rp.Path(None, rp.Zero(), 'freeze')", "AblationError", "such as 'logits'"),
    "metric's name": ("ablate(rp.Zero(), 'loss')", "TypeError", "a function of logits; got 'loss'"),
    "no metric": ("ablate(rp.Zero(), None)", "TypeError", "rp.loss()"),
    "a number as metric": ("rp.measure(run, 3)", "TypeError", "a function of logits; got 3"),
    "corruption": ("pairs(corrupt='random')", "PromptError", 'or "swap" (the subject'),
    "no corruption": ("pairs(corrupt=None)", "PromptError", "has no default; got None"),
    "no seed": ("pairs(seed=None)", "PromptError", "seed is a whole number; got None"),
    "seed": ("pairs(seed=1.5)", "PromptError", "seed is a whole number; got 1.5"),
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

def ablate(how, metric=rp.loss()):
    return rp.ablate(run, "1.2", how, metric=metric)

def at(positions):
    return rp.ablate(run, "1.2", rp.Zero(), metric=rp.loss(), positions=positions)

def pairs(*, seed=0, corrupt="names"):
    return rp.indirect_object_prompts(rp.load("demo"), 2, seed=seed, corrupt=corrupt)

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
