"""Any two techniques that a recipe may combine, against one process: loss, gradient norm and every gradient."""

from __future__ import annotations

import functools
import itertools

import pytest
from parity_run import Curve, difference, run_table
from parity_table import COLUMNS, Row, full, pairwise

ROWS = pairwise()


@functools.cache
def table(ranks: int) -> dict[Row, tuple[list[Curve], float]]:
    return run_table([row for row in ROWS if row.ranks == ranks])


@pytest.mark.train
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_equals_one_process(row: Row):
    found = difference(row, table(row.ranks)[row][0])
    assert found.largest <= 1e-5, found


def test_every_legal_pair_has_a_row():
    """A pair that is refused when all else is plain may be legal with a third value, and then has its row as well; here
    it is not looked for."""
    covered = {pair for row in ROWS for pair in itertools.combinations(row.values(), 2)}
    for one, other in itertools.combinations(COLUMNS, 2):
        for first, second in itertools.product(COLUMNS[one], COLUMNS[other]):
            alone = Row(**{one: first, other: second})
            assert ((one, first), (other, second)) in covered or alone.refusal or alone.ranks > 4, alone


def test_the_full_table_has_every_legal_layout_once():
    rows = full()
    assert len(rows) > 3 * len(ROWS)
    assert not [row.name for row in rows if row.refusal]
