"""The order is a bijection for every size, depends on its key alone, and is well shuffled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera_train.data.order import Permutation, derive_seed, splitmix64


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 255, 256, 257, 1000, 65_536, 100_003])
def test_every_element_comes_once(n):
    image = Permutation(n, seed=7)(np.arange(n))
    assert np.array_equal(np.sort(image), np.arange(n))


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(-(2**63), 2**64))
def test_bijective_for_any_size_and_seed(n, seed):
    image = Permutation(n, seed)(np.arange(n))
    assert np.array_equal(np.sort(image), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(2**31, 2**61), seed=st.integers(0, 2**32), start=st.floats(0, 0.999))
def test_huge_sizes_stay_in_range_without_collisions(n, seed, start):
    first = int(n * start)
    image = Permutation(n, seed)(np.arange(first, first + 1000))
    assert image.min() >= 0
    assert image.max() < n
    assert len(np.unique(image)) == 1000


def test_one_at_a_time_equals_all_at_once():
    permutation = Permutation(1001, seed=3)
    whole = permutation(np.arange(1001))
    assert [int(permutation(np.array([k]))[0]) for k in (0, 1, 500, 1000)] == whole[[0, 1, 500, 1000]].tolist()
    assert np.array_equal(permutation(np.arange(12).reshape(3, 4)), whole[:12].reshape(3, 4))


def test_positions_outside_are_refused():
    with pytest.raises(ValueError, match=r"outside \[0, 10\)"):
        Permutation(10, 0)(np.array([10]))
    with pytest.raises(ValueError, match=r"n must be in"):
        Permutation(0, 0)


def test_splitmix64_reference_values():
    """First outputs for state 1234567 of the public-domain C code by Vigna."""
    state = np.array([1234567], dtype=np.uint64)
    outputs = []
    for _ in range(3):
        outputs.append(int(splitmix64(state)[0]))
        state = state + np.uint64(0x9E3779B97F4A7C15)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_order_is_pinned():
    """A resumed run must find the order of the run that was interrupted, in every later version too."""
    assert Permutation(10, seed=1234)(np.arange(10)).tolist() == PINNED
    assert derive_seed(1234, 1) != derive_seed(1, 1234)


PINNED = [4, 1, 5, 6, 8, 3, 2, 9, 7, 0]


def test_epochs_and_seeds_give_unrelated_orders():
    n = 20_000
    orders = [
        Permutation(n, derive_seed(seed, epoch))(np.arange(n))
        for seed, epoch in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
    ]
    for i, first in enumerate(orders):
        for second in orders[i + 1 :]:
            assert (first == second).sum() < 15  # one expected
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


@pytest.mark.parametrize("n", [5_000, 262_144, 1_000_003])
def test_a_prefix_is_uniform_and_neighbours_are_unrelated(n):
    """Kolmogorov-Smirnov distance of the first samples to uniform, close pairs, serial correlation, and a chi-square of
    position against value."""
    count = min(n // 4, 10_000)
    image = Permutation(n, seed=11)(np.arange(count))
    ordered = np.sort(image) / n
    distance = np.max(np.abs(ordered - np.arange(1, count + 1) / count))
    assert distance < 1.63 / np.sqrt(count)  # 1 % level
    close = np.abs(np.diff(image)) < n // 1000
    assert 0.0005 < close.mean() < 0.004  # 0.002 expected
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05
    table = np.histogram2d(np.arange(count), image, bins=(10, 10), range=((0, count), (0, n)))[0]
    expected = count / 100
    assert ((table - expected) ** 2 / expected).sum() < 149  # chi-square, 99 degrees of freedom, 0.1 % level
