"""Failure rates: the prior of published fleets, what a team's counts make of it, and a record that tests it."""

from __future__ import annotations

import csv
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_sm.errors import RecipeError
from chimera_sm.planner.fleets import failure_prior, failure_quantile, failure_rate, fleets
from chimera_sm.planner.gamma import Gamma, GammaMixture
from chimera_sm.planner.plan import plan
from chimera_sm.planner.reliability import daly_interval_s, wall_clock_factor, young_interval_s
from chimera_sm.planner.render_text import format_plan
from chimera_sm.planner.tables import DATA
from chimera_sm.recipe.compose import compose

LLAMA_NODE_HOURS = 2048 * 54 * 24
LLAMA_FAILURES = 419

shapes = st.floats(0.3, 5_000)
exposures = st.floats(1e-3, 1e6)


def test_every_fleet_has_a_source_and_a_date_and_the_rate_of_its_counts() -> None:
    with (DATA / "fleets.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(row["source"] and row["date"] for row in rows)
    rates = {fleet.name: fleet.failures / fleet.node_hours for fleet in fleets()}
    assert rates["llama3_405b"] == pytest.approx(1.58e-4, rel=0.005)
    assert rates["opt_175b"] == pytest.approx(5.9e-4, rel=0.005)
    assert rates["meta_rsc1"] == pytest.approx(2.71e-4, rel=0.005)
    assert rates["meta_rsc2"] == pytest.approx(0.98e-4, rel=0.01)


def test_an_exponential_distribution_is_a_gamma_of_shape_one() -> None:
    gamma = Gamma(1.0, 4.0)
    for x in (0.01, 0.1, 0.5, 2.0):
        assert gamma.cdf(x) == pytest.approx(-math.expm1(-4 * x), rel=1e-12)
        assert gamma.pdf(x) == pytest.approx(4 * math.exp(-4 * x), rel=1e-12)


@pytest.mark.parametrize(
    ("shape", "chi_squared_95"),
    [(0.5, 3.841459), (1.0, 5.991465), (2.5, 11.070498), (5.0, 18.307038), (15.0, 43.772972), (50.0, 124.342113)],
)
def test_quantiles_are_those_of_the_tables_of_chi_squared(shape: float, chi_squared_95: float) -> None:
    assert GammaMixture((1.0,), (Gamma(shape, 0.5),)).quantile(0.95) == pytest.approx(chi_squared_95, rel=1e-6)


@given(
    shape=shapes, exposure=exposures, other=shapes, weight=st.floats(0.01, 0.99), probability=st.floats(0.001, 0.999)
)
def test_a_quantile_is_where_the_distribution_reaches_it(
    shape: float, exposure: float, other: float, weight: float, probability: float
) -> None:
    mixture = GammaMixture((weight, 1 - weight), (Gamma(shape, exposure), Gamma(other, 3 * exposure)))
    assert mixture.cdf(mixture.quantile(probability)) == pytest.approx(probability, abs=1e-6)


@given(shape=shapes, exposure=exposures, count=st.integers(0, 500), more=exposures)
def test_one_gamma_takes_counts_as_conjugates_do(shape: float, exposure: float, count: int, more: float) -> None:
    updated = GammaMixture((1.0,), (Gamma(shape, exposure),)).updated(count, more)
    assert updated == GammaMixture((1.0,), (Gamma(shape + count, exposure + more),))


def test_the_update_of_a_mixture_is_bayes_rule_by_numerical_integration() -> None:
    prior, count, hours = failure_prior(), 7, 30_000.0
    updated = prior.updated(count, hours)
    grid = [math.exp(math.log(1e-6) + i * math.log(1e4) / 20_000) for i in range(20_001)]
    weights = [
        sum(w * part.pdf(x) for w, part in prior) * math.exp(count * math.log(x * hours) - x * hours) * x for x in grid
    ]
    total = sum(weights)
    assert updated.mean == pytest.approx(sum(w * x for w, x in zip(weights, grid, strict=True)) / total, rel=1e-4)
    median = updated.quantile(0.5)
    assert sum(w for w, x in zip(weights, grid, strict=True) if x <= median) / total == pytest.approx(0.5, abs=1e-3)


def test_counts_in_two_parts_say_what_they_say_together() -> None:
    once, twice = failure_prior().updated(12, 5e4), failure_prior().updated(4, 2e4).updated(8, 3e4)
    for probability in (0.1, 0.5, 0.9):
        assert twice.quantile(probability) == pytest.approx(once.quantile(probability), rel=1e-9)


def test_counts_far_from_every_fleet_are_believed() -> None:
    assert failure_rate(100_000, 1e6).quantile(0.5) == pytest.approx(0.1, rel=0.01)
    assert failure_rate(0, 1e9).quantile(0.9) < 1e-7
    updated = failure_rate(100_000, 1e6).updated(100_000, 1e6)
    assert updated.mean == pytest.approx(0.1, rel=0.01)


def test_the_prior_has_the_median_of_the_fleets_and_their_tail() -> None:
    prior = failure_prior()
    assert prior.quantile(0.5) == pytest.approx(1.6e-4, rel=0.1)
    assert 0.5e-4 < prior.quantile(0.1) < 1e-4
    assert 4e-4 < prior.quantile(0.9) < 6e-4
    above, below = prior.quantile(0.9) / prior.quantile(0.5), prior.quantile(0.5) / prior.quantile(0.1)
    assert above > 1.3 * below, "new fleets fail far more often than the median, and none fails far less often"
    assert failure_quantile("p90") == prior.quantile(0.9)


def test_a_fleet_of_few_failures_says_less_than_one_of_thousands() -> None:
    shapes = {fleet.name: part.shape for fleet, part in zip(fleets(), failure_prior().parts, strict=True)}
    assert shapes["skt_b200"] < shapes["bloom_176b"] < shapes["opt_175b"] < shapes["meta_rsc1"]
    # The relative variance of a Poisson count is one over it, on top of how much fleets differ.
    assert 1 / shapes["skt_b200"] - 1 / shapes["meta_rsc1"] == pytest.approx(1 / 10 - 1 / 4355)


def test_a_fleet_that_is_left_out_leaves_no_trace() -> None:
    """The upper end without the one new fleet is far lower; without a fleet in the middle it is not."""
    assert failure_prior("opt_175b").quantile(0.9) < 0.6 * failure_prior().quantile(0.9)
    assert len(failure_prior("llama3_405b").parts) == len(fleets()) - 1
    rates = {fleet.name: fleet.failures / fleet.node_hours for fleet in fleets()}
    means = [part.mean for part in failure_prior("llama3_405b").parts]
    assert not any(mean == pytest.approx(rates["llama3_405b"], rel=1e-6) for mean in means)
    with pytest.raises(ValueError, match="'llama' is none of the fleets llama3_405b, opt_175b"):
        failure_prior("llama")


def test_the_published_record_of_llama_3_is_inside_the_band_of_the_other_fleets() -> None:
    """54 days on 2,048 nodes. The band is wide: fleets differ fivefold. Of the whole prior it must not be narrower."""
    prior = failure_prior("llama3_405b")
    low, middle, high = (prior.count_quantile(p, LLAMA_NODE_HOURS) for p in (0.1, 0.5, 0.9))
    assert low < LLAMA_FAILURES < high
    assert 0.5 < middle / LLAMA_FAILURES < 2
    assert high / low > 4, "five fleets do not say more than this about a sixth"


@pytest.mark.parametrize("name", [fleet.name for fleet in fleets()])
def test_every_fleet_but_the_extreme_ones_is_inside_the_band_of_the_others(name: str) -> None:
    (fleet,) = [fleet for fleet in fleets() if fleet.name == name]
    prior = failure_prior(name)
    low, high = (prior.count_quantile(p, fleet.node_hours) for p in (0.05, 0.95))
    assert (low <= fleet.failures <= high) == (name != "opt_175b")


def test_the_effective_time_of_llama_3_follows_from_its_stall_and_restart() -> None:
    """More than 90% of 54 days was effective; with C = 10 s and R = 4 min the median says so, and so does the 90th
    percentile of failures, which is three times the real rate, nearly."""
    prior = failure_prior("llama3_405b").scaled(2048)
    share = {}
    for probability in (0.1, 0.5, 0.9):
        rate = prior.quantile(probability)
        interval = daly_interval_s(10, 3600 / rate)
        share[probability] = 1 / wall_clock_factor(interval, 10, 240, rate)
    assert share[0.1] > share[0.5] > 0.9
    assert 0.8 < share[0.9] < 0.9
    own = LLAMA_FAILURES / (54 * 24)
    assert 0.93 < 1 / wall_clock_factor(daly_interval_s(10, 3600 / own), 10, 240, own) < 0.945


def test_a_count_has_the_error_of_the_rate_and_chance() -> None:
    certain = GammaMixture((1.0,), (Gamma(1e8, 1e8),))
    # A Poisson count of mean 4: P(≤1) = 0.0916, P(≤2) = 0.238, P(≤6) = 0.889, P(≤7) = 0.949.
    assert [certain.count_quantile(p, 4.0) for p in (0.1, 0.5, 0.9)] == [2, 4, 7]
    assert [certain.count_quantile(p, 1e-9) for p in (0.1, 0.5, 0.9)] == [0, 0, 0]
    vague = GammaMixture((1.0,), (Gamma(2.0, 2.0),))
    assert vague.count_quantile(0.9, 4.0) > 7
    # A geometric distribution: shape 1, so P(≤n) = 1 - (1/2)^(n+1).
    assert GammaMixture((1.0,), (Gamma(1.0, 1.0),)).count_quantile(0.9, 1.0) == 3
    assert certain.count_quantile(0.5, 5_000.0) == 5_000


# Intervals between saves.


@pytest.mark.parametrize(("stall_s", "between_s"), [(60, 178_200), (10, 11_124), (120, 3_600), (600, 3_600)])
def test_dalys_interval_is_next_to_the_best_one(stall_s: float, between_s: float) -> None:
    rate = 3600 / between_s
    best = min(
        wall_clock_factor(tau, stall_s, 300, rate) for tau in (between_s * 10 ** (-3 + i / 500) for i in range(2_000))
    )
    daly = wall_clock_factor(daly_interval_s(stall_s, between_s), stall_s, 300, rate)
    young = wall_clock_factor(young_interval_s(stall_s, between_s), stall_s, 300, rate)
    assert daly <= best * 1.0002
    assert daly <= young


def test_intervals_by_hand() -> None:
    assert young_interval_s(60, 178_200) == pytest.approx(math.sqrt(2 * 60 * 178_200))
    # C / 2M = 1/8: sqrt(2 · 900 · 3600) (1 + sqrt(1/8) / 3 + 1/72) - 900.
    expected = math.sqrt(6_480_000) * (1 + math.sqrt(0.125) / 3 + 1 / 72) - 900
    assert daly_interval_s(900, 3600) == pytest.approx(expected)
    assert daly_interval_s(7_200, 3_600) == 3_600
    assert daly_interval_s(100_000, 3_600) == 3_600


def test_the_interval_table_of_the_field() -> None:
    """C = 60 s at Llama 3's rate: 1,024 GPUs save every 77 minutes, 16,384 every 19."""
    for gpus, minutes in ((512, 109), (1_024, 77), (4_096, 38.5), (16_384, 19)):
        between_s = 3600 / (1.58e-4 * gpus / 8)
        assert young_interval_s(60, between_s) / 60 == pytest.approx(minutes, rel=0.02)


# In a plan.


def test_a_team_that_counted_failures_gets_its_own_rate() -> None:
    made = plan(compose(["recipe=8b", "capacity.failures.count=300", "capacity.failures.node_hours=100000"]))
    assert made.reliability.failures_per_day == pytest.approx(4 * 24 * 3e-3, rel=0.08)
    assert "updated by capacity.failures: 300 in 100,000 node-hours" in made.reliability.basis
    quiet = plan(compose(["recipe=8b", "capacity.failures.node_hours=1e6"]))
    assert quiet.reliability.failures_per_day < 0.1 * plan(compose(["recipe=8b"])).reliability.failures_per_day
    days = [next(cost.days for cost in p.costs if cost.chosen).p50 for p in (quiet, made)]
    assert days[0] < days[1]


def test_a_host_with_one_accelerator_fails_an_eighth_as_often() -> None:
    one = plan(compose(["recipe=1b", "instances=g6e", "instances.type=ml.g6e.4xlarge"]))
    eight = plan(compose(["recipe=1b", "instances=g6e", "instances.type=ml.g6e.48xlarge"]))
    assert one.reliability.failures_per_day == pytest.approx(eight.reliability.failures_per_day / 8)


def test_a_plan_says_how_many_failures_there_may_be() -> None:
    made = plan(compose(["recipe=405b"])).reliability
    assert made.failures.p10 < made.failures_expected < made.failures.p90
    assert made.failures.p90 > 3 * made.failures.p50 > 0, "fleets differ, and so the band is wide"
    assert made.young_interval_steps is not None
    assert abs(made.recommended_interval_steps - made.young_interval_steps) <= 2
    assert 0.8 < made.effective_share < 1
    assert made.reclaims_per_day == 0
    spot = plan(compose(["recipe=70b"]))
    assert spot.reliability.reclaims_per_day > 0
    assert spot.reliability.recommended_interval_steps == 53
    words = f"({spot.reliability.failures.p10:.0f} to {spot.reliability.failures.p90:.0f}) over the run"
    assert words in format_plan(spot)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["capacity.failures.count=3"], "capacity.failures.node_hours", "required by capacity.failures.count=3"),
        (["capacity.failures.count=-1"], "capacity.failures.count", "-1 is negative"),
        (["capacity.failures.node_hours=-5"], "capacity.failures.node_hours", "-5 is negative"),
        (["capacity.failures.counts=1"], "capacity.failures.counts", "did you mean capacity.failures.count"),
        (["capacity.failures.count=1.5"], "capacity.failures.count", "a whole number"),
    ],
)
def test_a_record_that_makes_no_sense_is_one_error(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        compose(["recipe=8b", *overrides])
    (problem,) = caught.value.problems
    assert problem.key == key
    assert words in f"{problem.message} {problem.fix}"
    assert problem.fix or "whole number" in problem.message
