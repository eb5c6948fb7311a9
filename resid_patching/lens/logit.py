"""The logit lens: every state of the stream through the model's own final norm and unembedding.

    logits_l = softcap(N(resid_l) W_U + b_U)

    lens = rp.logit_lens(run)
    lens.top_tokens(5).tokens(layer="resid_post.3", pos=-1)
    lens.rank(" Mary").sel(batch=0, pos=-1)
    lens.kl

Rows: `resid_pre.0` (the embeddings), `resid_mid.l` where asked, `resid_post.l`. The norm's
statistics are recomputed at each layer; the last row is the model's output, exactly.

Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
"""

from __future__ import annotations

from typing import Any

from resid_patching.address import Address, Stream
from resid_patching.errors import UnsupportedModelError
from resid_patching.lens.readout import LensReadout
from resid_patching.models import ModelView, require
from resid_patching.run import Run


def logit_lens(run: Run, *, mid: bool = False, stride: int = 1) -> LensReadout:
    """The logit lens on a run.

    Args:
        run: a run, from `capture`.
        mid: also read between attention and MLP of each layer.
        stride: read every so many layers; the last is always read.

    Returns:
        A `LensReadout`, which computes what it is asked for.

    Raises:
        TypeError: not a run.
        UnsupportedModelError: `mid` on parallel or attention-only blocks, which have no middle.
        StreamMismatchError, ReadoutMismatchError: the model cannot be read.
        ValueError: a stride below 1.
    """
    require_run(run)
    require(run.view, "stream", "readout")
    if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
        raise ValueError(f"stride is a whole number from 1, got {stride!r}")
    return LensReadout(run, stream_rows(run.view, mid=mid, stride=stride), "logit lens")


def stream_rows(view: ModelView, *, mid: bool = False, stride: int = 1) -> tuple[Address, ...]:
    """The states that a lens on the stream reads: the start, and each block's end.

    Raises:
        UnsupportedModelError: the blocks have no middle.
    """
    if mid:
        require_middle(view)
    rows: list[Address] = [Stream(0, "pre")]
    for layer in range(view.n_layers):
        is_last = layer == view.n_layers - 1
        if mid and (is_last or (layer + 1) % stride == 0):
            rows.append(Stream(layer, "mid"))
        if is_last or (layer + 1) % stride == 0:
            rows.append(Stream(layer, "post"))
    return tuple(rows)


def require_middle(view: ModelView) -> None:
    """Raises where no state lies between attention and MLP."""
    if view.parallel or view.attn_only:
        kind = "parallel attention and MLP" if view.parallel else "no MLP"
        raise UnsupportedModelError(
            f"{view.name} has {kind}, so its blocks have no resid_mid; leave mid out"
        )


def require_run(run: Any) -> None:
    """Raises where a lens is given something else than a run."""
    if not isinstance(run, Run):
        raise TypeError(
            f"a lens reads a run, got {type(run).__name__}; make one with "
            'rp.capture(model, "a prompt")'
        )
