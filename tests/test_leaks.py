"""Nothing piles up: memory, hooks, flags, threads, file handles, whatever was run and how often."""

import gc
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import zoo

pytestmark = pytest.mark.once

ROUNDS = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 50

# Each round is every analysis once, on fresh runs. What is counted lasts: what a first use loads
# or compiles is there after the first ROUNDS.
CHILD = """
    import gc, json, os, sys, tempfile, threading
    sys.path.insert(0, {tests!r})
    import torch, zoo, zoo_lens
    import resid_patching as rp

    model = zoo.build({backend!r})
    metric = rp.logit_diff(3, 6)
    texts = zoo_lens.random_windows(6, length=8)
    rows, others = [[3, 1, 4, 1], [5, 9]], [[1, 4, 1, 3], [9, 5]]
    folder = tempfile.mkdtemp()
    {planted}

    def analyse(number):
        run, source = rp.capture(model, rows), rp.capture(model, others)
        resample = rp.Resample(source, pairing="rowwise")
        rp.direct_logit_attribution(run, 3, 6, by="head")
        rp.logit_lens(run).measure("kl", "entropy", top=3)
        rp.stream_report(run)
        rp.ablate(run, ["0.1", "mlp.1", "1.2.q", "1.0.pattern"], resample, metric=metric)
        path = rp.Path(to=rp.receivers("1.1.q", "mlp.2.in"), using=resample, mlps="recompute")
        rp.ablate(run, ["0.1", "embed"], path, metric=metric)
        lens = rp.fit_tuned_lens(
            model, texts, length=8, validation_tokens=8, steps=1, step_tokens=8, step_windows=1,
            ridge=number % 10 == 0, optimizer="adam", folder=folder, progress=False,
        )
        lens.save(folder)
        rp.TunedLens.load(folder, model)(run).kl.to_json()
        try:
            rp.ablate(run, ["0.1"], rp.Zero(), metric=lambda logits: 1 / 0)
        except ZeroDivisionError:
            pass
        leak(number)

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def count():
        gc.collect()
        return {{
            "hooks": sum(
                len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
                for m in model.modules()
            ),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "tensors": sum(isinstance(o, torch.Tensor) for o in gc.get_objects()),
            "flags": json.dumps(vars(model.cfg), default=str, sort_keys=True),
            "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), model.training],
            "left": sorted(os.listdir(folder)),
        }}

    for number in range({warm}):
        analyse(number)
    before, first = resident(), count()
    for number in range({rounds}):
        analyse(number)
    print(json.dumps([before, resident(), first, count()]))
"""


def child(backend, rounds, planted="leak = lambda number: None", warm=10):
    code = textwrap.dedent(CHILD).format(
        tests=str(Path(__file__).parent),
        backend=backend,
        rounds=rounds,
        planted=planted,
        warm=warm,
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts by Linux's /proc")
def test_rounds_of_every_analysis_leave_nothing():
    """On a HookedTransformer where there is one, on a TransformerBridge in TransformerLens 4."""
    before, after, first, last = child(zoo.BACKENDS[0], ROUNDS)
    assert last == first
    assert first["left"] == ["config.json", "params.safetensors"]
    assert after - before < 12 * 2**20, f"{(after - before) / 2**20:.1f} MiB in {ROUNDS} rounds"


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts by Linux's /proc")
def test_what_a_round_leaves_is_counted():
    """The twin: a hook, a tensor and an open file are left in each of five rounds."""
    left = (
        "model.blocks[0].register_forward_hook(lambda *x: None), torch.zeros(9), open(os.devnull)"
    )
    code = f"kept = []; leak = lambda number: kept.append(({left}))"
    _, _, first, last = child(zoo.BACKENDS[0], rounds=5, planted=code, warm=2)
    for what in ("hooks", "tensors", "files"):
        assert last[what] == first[what] + 5, what


def test_a_run_that_is_let_go_is_freed():
    import weakref

    import resid_patching as rp

    run = rp.capture(zoo.build(zoo.BACKENDS[0]), zoo.RAGGED)
    readout = rp.logit_lens(run)
    readout.kl  # noqa: B018
    rp.ablate(run, ["0.1"], rp.Zero(), metric=rp.logit_diff(3, 6))
    gone = [weakref.ref(run), weakref.ref(readout)]
    del run, readout
    gc.collect()
    assert [one() for one in gone] == [None, None]
