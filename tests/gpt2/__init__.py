"""The check-list of GPT-2 small: published values, computed here with the package.

measurements.py   what is computed, for any model and prompts
checklist.py      which measurement, with which arguments, each published value is held against
published.json    the values, each with prompt, tolerance and source
studies.py        two experiments on prose, and the heads of a circuit
source.py         where the weights are taken from
stand_ins.py      the same measurements with arguments for models that are at hand
"""
