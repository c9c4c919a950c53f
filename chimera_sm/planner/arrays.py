"""Arithmetic that is the same for one case, in floats, and for thousands at once, in numpy arrays.

A plan is one case and must start fast, so numpy is imported only where an array is at hand; a search and a fit are
thousands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Number = Any
"""A float, or a float array; all arrays of a case have one shape."""
Flag = Any
"""A bool, or a bool array."""


@dataclass(frozen=True)
class Labels:
    """Names of many cases: `names[codes[i]]` is that of case i."""

    names: tuple[str, ...]
    codes: Any
    """Int array."""

    @classmethod
    def of(cls, values: Sequence[str]) -> Labels:
        import numpy as np

        names, codes = np.unique(np.asarray(values), return_inverse=True)
        return cls(tuple(str(name) for name in names), codes)

    def __getitem__(self, chosen: Any) -> Labels:
        return Labels(self.names, self.codes[chosen])


Label = str | Labels


def by_label(values: Mapping[str, float], label: Label) -> Number:
    """The value under the case's name, or under the empty one where it has none."""
    if isinstance(label, str):
        return values[label] if label in values else values[""]
    import numpy as np

    return np.array([by_label(values, name) for name in label.names])[label.codes]


def is_label(label: Label, *names: str) -> Flag:
    """Whether the case's name is one of these."""
    if isinstance(label, str):
        return label in names
    import numpy as np

    return np.array([name in names for name in label.names])[label.codes]


def where(condition: Flag, then: Number, otherwise: Number) -> Number:
    if isinstance(condition, bool):
        return then if condition else otherwise
    import numpy as np

    return np.where(condition, then, otherwise)


def maximum(first: Number, second: Number) -> Number:
    if _plain(first) and _plain(second):
        return max(first, second)
    import numpy as np

    return np.maximum(first, second)


def minimum(first: Number, second: Number) -> Number:
    if _plain(first) and _plain(second):
        return min(first, second)
    import numpy as np

    return np.minimum(first, second)


def exp(value: Number) -> Number:
    if _plain(value):
        return math.exp(value)
    import numpy as np

    return np.exp(value)


def log2(value: Number) -> Number:
    if _plain(value):
        return math.log2(value)
    import numpy as np

    return np.log2(value)


def both(first: Flag, second: Flag) -> Flag:
    return first and second if isinstance(first, bool) and isinstance(second, bool) else first & second


def either(first: Flag, second: Flag) -> Flag:
    return first or second if isinstance(first, bool) and isinstance(second, bool) else first | second


def _plain(value: Number) -> bool:
    return isinstance(value, int | float) and type(value).__module__ == "builtins"
