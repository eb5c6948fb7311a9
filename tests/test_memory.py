"""Memory: attribution to every neuron is bounded, because vectors of neurons are never formed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from torch.utils._python_dispatch import TorchDispatchMode

import resid_patching as rp


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.numel())
        return result


@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_D16_no_tensor_is_larger_than_the_result_or_a_weight(backend):
    """[neurons, batch, pos, d_model] would be 32 times the result."""
    model = zoo.build(backend)
    run = rp.capture(model, zoo.RAGGED * 4)
    with LargestTensor() as largest:
        dla = rp.direct_logit_attribution(run, 3, 6, by="neuron", positions=None)
    weights = max(parameter.numel() for parameter in model.parameters())
    assert largest.size <= max(2 * dla.values.numel(), weights)
    with LargestTensor() as largest:
        rp.decompose(run, by="neuron").vectors(None)
    assert largest.size >= zoo.N_LAYERS * zoo.D_MLP * zoo.D_MODEL * 12 * 8


CHILD = """
import json, re, sys
import torch
import transformers
import zoo
import resid_patching as rp


def peak_since_then(action):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew at what is held now
    result = action()
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 1024, result


shape = dict(n_layers=12, d_model=768, n_heads=12, d_head=64, d_mlp=3072, n_ctx=1024)
if sys.argv[1] == "hooked":
    cfg = zoo.HookedTransformerConfig(**shape, d_vocab=50257, act_fn="gelu_new", device="cpu")
    model = zoo.HookedTransformer(cfg).eval()
else:
    source = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    model = zoo.build_bridge_from_module(source, "GPT2LMHeadModel", hf_config=source.config).eval()

tokens = torch.arange(32)[None] * 31


def plain():
    run = rp.capture(model, tokens)
    run.logits_at(None)
    return run


def attribute():
    return rp.direct_logit_attribution(run, 464, 262, by="neuron", positions=None)


plain()
before, run = peak_since_then(plain)
after, dla = peak_since_then(attribute)
assert dla.values.shape == (2 + 12 * (1 + 3072 + 1) + 2, 1, 32), dla.values.shape
assert float(dla.gap.max()) < 1e-2, float(dla.gap.max())
# The twin: one tensor of the size that folding avoids, at a single position, is seen.
seen, _ = peak_since_then(lambda: torch.ones(12 * 3072, 32, 64) + 1)
print(json.dumps([before, after, seen]))
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("backend", zoo.BACKENDS)
def test_D16_all_neurons_of_gpt2_small_at_32_positions_cost_under_200_megabytes(backend):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, backend],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plain, attributed, seen = json.loads(done.stdout.splitlines()[-1])
    print(f"plain capture {plain:.0f} MB, attribution {attributed - plain:+.0f} MB")
    assert attributed - plain < 200
    assert seen - plain > 400
