"""What a broken rule of a recipe looks like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One broken rule: the dotted recipe key, what is wrong with which value, and what to type instead."""

    key: str
    message: str
    fix: str = ""
    no_effect: bool = False
    """The value does no harm: with the others as they are it would be ignored, and its default says the same."""


MOST_OFFERED = 1 << 16
"""The largest divisor that is looked for: more ranks, heads or experts than there are."""


def divisors(number: int) -> list[int]:
    """All positive divisors that anyone would use, ascending: the valid values that an error offers."""
    return [d for d in range(1, min(number, MOST_OFFERED) + 1) if number % d == 0]
