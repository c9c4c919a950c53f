"""No number of a recipe is beyond sense."""

from __future__ import annotations

import dataclasses
from typing import Any

from .problem import Problem

LARGEST = 2**53
"""The largest whole number up to which every reader of JSON keeps all; more steps, tokens or bytes than anyone has."""


def oversized(value: Any, key: str = "") -> list[Problem]:
    """Every whole number below the dataclass `value` that is larger, by its key."""
    if isinstance(value, int):
        return [] if abs(value) <= LARGEST else [Problem(key, f"{value} is out of range: at most 2^53 = {LARGEST}")]
    if dataclasses.is_dataclass(value):
        inner = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return [p for name, part in inner for p in oversized(part, f"{key}.{name}" if key else name)]
    if isinstance(value, tuple):
        return [p for index, part in enumerate(value) for p in oversized(part, f"{key}[{index}]")]
    return []
