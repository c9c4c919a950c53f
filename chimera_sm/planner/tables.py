"""The planner's data files: each read at most once a process."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

DATA = Path(__file__).parent / "data"


@functools.cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    """The rows of `data/<name>.csv`."""
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))
