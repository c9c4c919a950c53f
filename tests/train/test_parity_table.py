"""Any two techniques that a recipe may combine, against one process: loss, gradient norm and every gradient."""

from __future__ import annotations

import functools
import itertools

import pytest
from parity_run import Curve, difference, run_table
from parity_table import COLUMNS, Row, full, pairwise

ROWS = pairwise()


ROWS_A_LAUNCH = 14


@functools.cache
def launched(start: int) -> dict[Row, tuple[list[Curve], float]] | AssertionError:
    """Rows from `start` on. A launch that fails is not tried again for each of its rows."""
    try:
        return run_table(ROWS[start : start + ROWS_A_LAUNCH])
    except AssertionError as error:
        return error


@pytest.mark.train
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_equals_one_process(row: Row):
    found = launched(ROWS.index(row) // ROWS_A_LAUNCH * ROWS_A_LAUNCH)
    if isinstance(found, AssertionError):
        raise found
    different = difference(row, found[row][0])
    assert different.largest <= 1e-5, different


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
