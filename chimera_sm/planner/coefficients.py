"""The numbers behind the predictions: `data/coefficients.csv`, each with its unit, source and date."""

from __future__ import annotations

import functools

from .tables import rows


@functools.cache
def _table() -> dict[tuple[str, str], float]:
    return {(row["name"], row["scope"]): float(row["value"]) for row in rows("coefficients")}


def coefficient(name: str, scope: str = "") -> float:
    """The value for `scope` (an accelerator family, a spot bucket), or the general one where the scope has none."""
    table = _table()
    return table[name, scope] if (name, scope) in table else table[name, ""]


def has_scope(name: str, scope: str) -> bool:
    """Whether a value was fitted for just this scope."""
    return (name, scope) in _table()
