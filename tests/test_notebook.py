"""In a notebook a sweep shows how far it is, unless the caller does; elsewhere nothing is shown."""

import sys
import types

import pytest
import torch
import zoo

import resid_patching as rp
from resid_patching import notebook

pytestmark = pytest.mark.once


@pytest.fixture
def bars(monkeypatch):
    """A Jupyter kernel, as far as we look at one, and the bars that are shown in it."""
    shown = []

    class Bar:
        def __init__(self, **options):
            self.total, self.done = options["total"], 0
            shown.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, n):
            self.done += n

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    return shown


def sweep(how, **options):
    run = rp.capture(zoo.build(zoo.BACKENDS[0]), torch.tensor([[3, 1, 4, 1], [2, 7, 1, 8]]))
    rp.ablate(run, ["0.1", "1.1", "1.2"], how, metric=rp.logit_diff(3, 6), **options)


@pytest.mark.parametrize(
    ("how", "options", "n_changes"),
    [
        (rp.Zero(), {}, 3),
        (rp.Zero(), {"positions": "each"}, 12),
        (rp.Zero(), {"joint": True}, 1),
        (rp.Path(rp.receivers("2.1.q", "logits"), rp.Zero(), "freeze"), {}, 6),
    ],
)
def test_a_sweep_in_a_notebook_shows_a_bar_that_reaches_its_end(bars, how, options, n_changes):
    sweep(how, **options)
    assert [(bar.done, bar.total) for bar in bars] == [(n_changes, n_changes)]


def test_a_caller_who_follows_the_sweep_sees_no_second_bar(bars):
    counts = []
    sweep(rp.Zero(), progress=counts.append)
    assert sum(counts) == 3 and not bars


def test_a_script_shows_nothing(capfd):
    assert not notebook.in_notebook()
    sweep(rp.Zero())
    assert capfd.readouterr() == ("", "")


@pytest.mark.full
def test_a_kernel_is_a_notebook():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cell = nbformat.v4.new_code_cell("from resid_patching.notebook import in_notebook as f; f()")
    book = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(book, timeout=100).execute()
    assert cell.outputs[0]["data"]["text/plain"] == "True"
