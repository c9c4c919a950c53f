"""How a planted fault is written: `CHIMERA_FAULT=kill:<point>:<step>[:<rank>]`; `chimera_train.faults` obeys it."""

from __future__ import annotations

from dataclasses import dataclass

from .contract import FAULT_VARIABLE

POINTS = ("step", "checkpoint_write")


@dataclass(frozen=True)
class Fault:
    point: str
    step: int
    rank: int | None
    """None: every rank."""


def parse_fault(text: str) -> Fault:
    """Raises ValueError on another form.

    >>> parse_fault("kill:step:3:1")
    Fault(point='step', step=3, rank=1)
    """
    action, _, rest = text.partition(":")
    point, *numbers = rest.split(":")
    if action != "kill" or point not in POINTS or len(numbers) not in (1, 2) or not all(map(str.isdecimal, numbers)):
        raise ValueError(f"{FAULT_VARIABLE}={text!r} is not kill:<point>:<step>[:<rank>], point {' or '.join(POINTS)}")
    return Fault(point, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)
