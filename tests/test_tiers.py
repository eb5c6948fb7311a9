"""What `make test` runs of a parametrised test."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from conftest import _few


@dataclass(frozen=True)
class Case:
    params: tuple

    @property
    def callspec(self):
        return SimpleNamespace(params=dict(self.params))

    @property
    def nodeid(self):
        return str(self.params)


def cases(**values):
    rows = itertools.product(*values.values())
    return [Case(tuple(zip(values, row, strict=True))) for row in rows]


def taken(chosen, name):
    return {dict(case.params)[name] for case in chosen}


def test_every_value_of_every_parameter_is_in_one_of_few_cases():
    chosen = _few(cases(kind=range(5), side=("left", "right"), stack=range(3)), 0)
    assert taken(chosen, "kind") == set(range(5)) and taken(chosen, "side") == {"left", "right"}
    assert taken(chosen, "stack") == set(range(3))
    assert len(chosen) == 5


@pytest.mark.parametrize("name", ["toy", "cell"])
def test_of_models_it_is_every_third_and_all_are_in_some_test(name):
    every = cases(**{name: range(9), "kind": "abc"})
    thirds = [taken(_few(every, seed), name) for seed in range(3)]
    assert [len(third) for third in thirds] == [3, 3, 3] and set().union(*thirds) == set(range(9))
    assert taken(_few(every, 0), "kind") == set("abc")


def test_of_three_models_or_fewer_all_are_taken():
    assert taken(_few(cases(toy="abc", kind=range(2)), 1), "toy") == set("abc")


def test_a_case_that_alone_has_a_value_is_taken():
    """Also where the model that it goes with is not of this test's third."""
    odd = Case((("toy", 1), ("kind", "odd")))
    assert odd in _few([*cases(toy=range(9), kind="ab"), odd], 0)
