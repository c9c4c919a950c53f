"""Reading the data files: the standard library's csv, each file at most once a process."""

from __future__ import annotations

import csv
import functools
import hashlib
from pathlib import Path

DATA = Path(__file__).parent / "data"
Row = dict[str, str]


@functools.cache
def rows(name: str) -> tuple[Row, ...]:
    """The rows of `data/<name>.csv`; an empty cell is unknown."""
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


@functools.cache
def by_type_and_region(name: str) -> dict[tuple[str, str], Row]:
    return {(row["type"], row["region"]): row for row in rows(name)}


def number(cell: str) -> float | None:
    return float(cell) if cell else None


@functools.cache
def catalog_version() -> str:
    """Twelve hex digits over all data files: two plans with the same version used the same facts."""
    digest = hashlib.sha256()
    for path in sorted(DATA.glob("*.csv")):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]
