"""The engine: run the model again from the first changed layer, many variants at a time."""

from resid_patching.rerun.changes import Changes, Put
from resid_patching.rerun.clean import hooks_to_keep, take_rows
from resid_patching.rerun.edits import (
    Edit,
    Fill,
    HeldEdit,
    Variant,
    clean_hook,
    require_acting,
    require_site,
    site_value,
    stage,
)
from resid_patching.rerun.engine import Chunk, Rerun, chunks, may_be_plain, rerun
from resid_patching.rerun.held import Held, acts_from, held_in
from resid_patching.rerun.plain import NotPlain
from resid_patching.rerun.scores import Reading
from resid_patching.rerun.share import EVERYTHING, Piece, Route, Share, put_together

__all__ = [
    "EVERYTHING",
    "Changes",
    "Chunk",
    "Edit",
    "Fill",
    "Held",
    "HeldEdit",
    "NotPlain",
    "Piece",
    "Put",
    "Reading",
    "Rerun",
    "Route",
    "Share",
    "Variant",
    "acts_from",
    "chunks",
    "clean_hook",
    "held_in",
    "hooks_to_keep",
    "may_be_plain",
    "put_together",
    "require_acting",
    "require_site",
    "rerun",
    "site_value",
    "stage",
    "take_rows",
]
