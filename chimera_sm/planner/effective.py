"""The effective parameters of the step-time model: `data/step_time.csv`, fitted together on published runs.

They are an effective set and not properties of the hardware: they trade off against each other, and mean something in
these formulas alone. `benchmarks/planner_fit.py` fits them again.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .arrays import Label, Number, by_label
from .tables import rows


@dataclass(frozen=True)
class Parameter:
    """One row of the table."""

    name: str
    scope: str
    """Family, stack or precision that it is for; empty: any other."""
    value: float
    lower: float
    upper: float
    """The fit stays between these; equal ones are not fitted."""
    unit: str
    note: str


class Effective:
    """Values by name and scope."""

    def __init__(self, parameters: Iterable[Parameter]):
        self._values: dict[str, dict[str, float]] = defaultdict(dict)
        for parameter in parameters:
            self._values[parameter.name][parameter.scope] = parameter.value

    def __call__(self, name: str, label: Label = "") -> Number:
        """The value for the case's family, stack or precision, or the general one. Raises KeyError."""
        return by_label(self._values[name], label)


@functools.cache
def parameters() -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            name=row["name"],
            scope=row["scope"],
            value=float(row["value"]),
            lower=float(row["lower"]),
            upper=float(row["upper"]),
            unit=row["unit"],
            note=row["note"],
        )
        for row in rows("step_time")
    )


@functools.cache
def fitted() -> Effective:
    """The set that plans use."""
    return Effective(parameters())
