"""Pairs of prompts: a base and a source that differ in what is asked about, token for token.

pairs = indirect_object_prompts(model, 16, seed=0, corrupt="names")
base, source = capture(model, pairs.base), capture(model, pairs.source)
metric = logit_diff(pairs.answers, pairs.foils)
at = pairs.positions["S2"]
"""

from resid_patching.prompt_sets.files import read_pairs
from resid_patching.prompt_sets.indirect_objects import indirect_object_prompts
from resid_patching.prompt_sets.pairs import Difference, PromptPairs, differences

__all__ = ["Difference", "PromptPairs", "differences", "indirect_object_prompts", "read_pairs"]
