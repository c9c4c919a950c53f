"""Plain data to dataclasses: what fits comes back, what does not is named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_train.config import ConfigError, canonical_json, decode, encode


@dataclass(frozen=True, kw_only=True)
class Inner:
    width: int
    label: str = "x"


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    rate: float
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    maybe: int | None = None
    items: tuple[Inner, ...] = ()
    table: dict[str, str] = field(default_factory=dict)


inners = st.builds(Inner, width=st.integers(), label=st.text())
outers = st.builds(
    Outer,
    inner=inners,
    rate=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    kind=st.sampled_from(["a", "b"]),
    maybe=st.none() | st.integers(),
    items=st.lists(inners).map(tuple),
    table=st.dictionaries(st.text(), st.text()),
)


@given(outers)
def test_round_trip(value):
    assert decode(Outer, encode(value)) == value
    assert canonical_json(decode(Outer, encode(value))) == canonical_json(value)


@given(outers, st.text(min_size=1).filter(lambda name: name not in Outer.__dataclass_fields__))
def test_an_unknown_key_is_always_named(value, name):
    with pytest.raises(ConfigError) as caught:
        decode(Outer, {**encode(value), name: 1}, "root")
    assert [p.key for p in caught.value.problems] == [f"root.{name}"]


WRONG = [
    ({"inner": {"width": 1}, "rate": "fast"}, "rate", "a number"),
    ({"inner": {"width": True}, "rate": 1}, "inner.width", "whole number"),
    ({"inner": {"width": 1.5}, "rate": 1}, "inner.width", "whole number"),
    ({"inner": 3, "rate": 1}, "inner", "section"),
    ({"rate": 1}, "inner", "required"),
    ({"inner": {}, "rate": 1}, "inner.width", "required"),
    ({"inner": {"width": 1}, "rate": 1, "flag": 1}, "flag", "true or false"),
    ({"inner": {"width": 1}, "rate": 1, "kind": "c"}, "kind", "one of a, b"),
    ({"inner": {"width": 1}, "rate": None}, "rate", "null"),
    ({"inner": {"width": 1}, "rate": 1, "items": {"width": 1}}, "items", "a list"),
    ({"inner": {"width": 1}, "rate": 1, "items": [{"width": "w"}]}, "items[0].width", "whole number"),
    ({"inner": {"width": 1}, "rate": 1, "table": {"k": 1}}, "table.k", "text"),
    ({"inner": {"width": 1, "widht": 2}, "rate": 1}, "inner.widht", "inner.width"),
]


@pytest.mark.parametrize(("data", "key", "says"), WRONG)
def test_what_does_not_fit_is_named(data, key, says):
    with pytest.raises(ConfigError) as caught:
        decode(Outer, data)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert says in problem.message + problem.fix


def test_a_count_may_be_written_as_a_float():
    assert decode(Inner, {"width": 1e6}).width == 1_000_000
