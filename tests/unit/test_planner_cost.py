"""Days and dollars: bands against a simulation of the same causes, five kinds of capacity, three services, storage."""

from __future__ import annotations

import functools
import json
import math
import re

import pytest

from chimera_sm import catalog
from chimera_sm.errors import RecipeError
from chimera_sm.planner import cost
from chimera_sm.planner.coefficients import coefficient
from chimera_sm.planner.plan import plan
from chimera_sm.planner.reliability import job_failure_rate, reclaim_rate_per_h
from chimera_sm.planner.render_text import format_plan
from chimera_sm.planner.simulate import SimulatedJob, SimulatedRuns, Spread, simulate
from chimera_sm.planner.spread import band
from chimera_sm.planner.types import CostEstimate, Plan
from chimera_sm.recipe.compose import compose


@functools.cache
def planned(*overrides: str) -> Plan:
    return plan(compose(list(overrides)))


def chosen(made: Plan) -> CostEstimate:
    return next(found for found in made.costs if found.chosen)


def by_kind(made: Plan) -> dict[str, CostEstimate]:
    return {found.kind: found for found in made.costs}


def shape(made: Plan) -> cost.RunShape:
    recipe, length = made.recipe, made.job_length
    return cost.RunShape(
        step_s=made.step.total_s,
        num_steps=recipe.train.num_steps,
        interval_steps=recipe.checkpoint.interval_steps,
        stall_s=length.save_s,
        hosts=recipe.instances.count,
        instance=catalog.instance(recipe.instances.type),
        num_experts=recipe.model.num_experts,
        max_run_s=length.limit_s,
        spot_bucket=catalog.spot_bucket(recipe.instances.type, recipe.env.region),
        failures=recipe.capacity.failures,
    )


def simulated(run: cost.RunShape, kind: str) -> SimulatedRuns:
    """All causes of error drawn at once: what the closed form combines."""

    def spread(name: str) -> Spread:
        return Spread(p10=coefficient(name, "p10"), p50=coefficient(name), p90=coefficient(name, "p90"), per_run=True)

    reclaims = reclaim_rate_per_h(run.hosts, run.spot_bucket) if kind == "spot" else 0.0
    return simulate(
        SimulatedJob(
            useful_s=run.num_steps * run.step_s,
            interval_s=run.interval_steps * run.step_s,
            stall_s=run.stall_s,
            restart_s=spread("restart_s"),
            failures_per_h=job_failure_rate(run.hosts, run.instance.accelerators, run.failures),
            reclaims_per_h=reclaims or 0.0,
            wait_s=spread("spot_wait_s"),
            startup_s=coefficient("startup_s"),
            max_run_s=run.max_run_s,
            step_spread=run.spread,
        ),
        runs=10_000,
        seed=11,
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("recipe=8b",),
        ("recipe=8x7b",),
        ("recipe=70b",),
        ("recipe=405b",),
        ("recipe=405b", "checkpoint.interval_steps=500"),
    ],
)
@pytest.mark.parametrize(("kind", "tolerance"), [("on_demand", 0.03), ("spot", 0.09)])
def test_the_band_is_that_of_a_simulation_of_all_causes(
    overrides: tuple[str, ...], kind: str, tolerance: float
) -> None:
    """Waits for spot are so skewed that the closed form's median is up to 6% early; else it is within 2%."""
    run = shape(planned(*overrides))
    forecast = cost.forecast(run, kind, "")
    drawn = simulated(run, kind).distribution("elapsed_h")
    assert forecast.days.p10 * 24 == pytest.approx(drawn.p10, rel=tolerance)
    assert forecast.days.p50 * 24 == pytest.approx(drawn.p50, rel=tolerance)
    assert forecast.days.p90 * 24 == pytest.approx(drawn.p90, rel=tolerance)


def test_the_band_is_narrower_than_all_causes_at_their_ends_together() -> None:
    run = shape(planned("recipe=405b"))
    found = cost.forecast(run, "on_demand", "")
    together = cost.duration(run, "on_demand", {"step": "p90", "failures": "p90", "restart": "p90"})
    step_alone = cost.duration(run, "on_demand", {"step": "p90"})
    assert step_alone.elapsed_h < found.days.p90 * 24 < together.elapsed_h


def test_bands_by_hand() -> None:
    """Lognormal factors: squares of logarithms add."""
    one = band(10.0, [(5.0, 20.0)])
    assert (one.p10, one.p50, one.p90) == (pytest.approx(5.0), 10.0, pytest.approx(20.0))
    two = band(10.0, [(5.0, 20.0), (10 / 3, 30.0)])
    assert two.p90 == pytest.approx(10 * math.exp(math.hypot(math.log(2), math.log(3))))
    assert two.p10 == pytest.approx(100 / two.p90)
    reversed_ends = band(10.0, [(20.0, 5.0), (30.0, 10 / 3)])
    assert reversed_ends.p90 == pytest.approx(two.p90)
    assert reversed_ends.p10 == pytest.approx(two.p10)
    nothing = band(10.0, [(10.0, 10.0)])
    assert nothing.p10 == nothing.p90 == 10.0


def test_chance_alone_spreads_a_run_as_in_a_simulation() -> None:
    """Rates, restart and step time are certain; when interruptions come is not."""
    run = shape(planned("recipe=405b", "checkpoint.interval_steps=300"))
    middle = cost.duration(run, "on_demand")
    made = simulate(
        SimulatedJob(
            useful_s=run.num_steps * run.step_s,
            interval_s=run.interval_steps * run.step_s,
            stall_s=run.stall_s,
            restart_s=coefficient("restart_s"),
            failures_per_h=cost.interruptions(run, "on_demand").failures_per_h,
        ),
        seed=4,
    )
    assert middle.billed_chance_h == pytest.approx(made.billed_h.std(), rel=0.05)
    spot = cost.duration(run, "spot")
    assert spot.elapsed_chance_h > spot.billed_chance_h > middle.billed_chance_h == middle.elapsed_chance_h


def test_chance_is_in_the_band_of_days_and_of_dollars(monkeypatch: pytest.MonkeyPatch) -> None:
    run = shape(planned("recipe=405b", "checkpoint.interval_steps=500"))
    made = cost.forecast(run, "spot", "")
    monkeypatch.setattr(cost, "_chance", lambda middle, deviation: (middle, middle))
    certain = cost.forecast(run, "spot", "")
    assert made.days.p10 < certain.days.p10
    assert made.days.p90 > certain.days.p90
    assert band(made.billed_h, made.billed_ends).p90 > band(certain.billed_h, certain.billed_ends).p90


def test_causes_that_are_bearable_alone_may_not_be_together() -> None:
    """The band's upper end is far beyond what anyone waits for, and no single cause's is."""
    made = planned("recipe=405b", "capacity=spot", "checkpoint.interval_steps=3000")
    run, found = shape(made), chosen(made)
    assert cost.duration(run, "spot", {"failures": "p90"}) is not None
    assert (found.days, found.usd, found.would_finish) == (None, None, True)
    assert "might not finish" in found.price_basis


def test_a_run_of_few_steps_is_mostly_its_start() -> None:
    made = planned("recipe=8b", "train.num_steps=3", "optim.warmup_steps=0")
    assert chosen(made).days.p50 * 86_400 > 20 * 3 * made.step.total_s > 0


# Kinds of capacity and services.


def test_five_kinds_of_capacity_have_a_price_or_say_why_not() -> None:
    made = planned("recipe=8b", "instances=p5en", "env.region=us-east-1")
    found = by_kind(made)
    assert {kind: each.usd_per_hour for kind, each in found.items()} == {
        "on_demand": pytest.approx(4 * 72.7904),
        "spot": pytest.approx(4 * 18.2351),
        "savings_plan": None,
        "reserved": pytest.approx(4 * 60.5263),
        "capacity_block": pytest.approx(4 * 41.61),
    }
    assert found["savings_plan"].price_basis.startswith("unknown")
    assert found["savings_plan"].usd is None
    assert found["savings_plan"].days == found["on_demand"].days
    assert [each.service for each in made.costs] == ["training_job"] * 4 + ["ec2"]
    assert all("(20" in each.price_basis for each in made.costs), "a date in every basis"


def test_other_services_are_in_the_json_and_on_one_line() -> None:
    made = planned("recipe=8b")
    data = json.loads(json.dumps(made.to_json(), allow_nan=False))
    offers = {(each["service"], each["kind"]): each for each in data["costs"] + data["other_services"]}
    assert set(offers) == {(service, kind) for service, kinds in catalog.SOLD.items() for kind in kinds}
    ec2, ours, hyperpod = (offers[service, "on_demand"] for service in ("ec2", "training_job", "hyperpod"))
    assert (ec2["usd_per_hour"], hyperpod["usd_per_hour"]) == (pytest.approx(4 * 55.04), pytest.approx(4 * 66.048))
    assert ours["usd"]["p50"] / ec2["usd"]["p50"] == pytest.approx(1.15)
    assert hyperpod["usd"]["p50"] / ec2["usd"]["p50"] == pytest.approx(1.2)
    assert ec2["days"] == ours["days"]
    assert [each["chosen"] for each in data["other_services"]] == [False] * len(data["other_services"])
    assert "on demand elsewhere: EC2 $220.16/h, HyperPod $264.19/h" in format_plan(made)


def test_one_offer_is_the_chosen_one() -> None:
    for made in (planned("recipe=8b"), planned("recipe=70b")):
        every = [*made.costs, *made.other_services]
        marked = [(each.service, each.kind) for each in every if each.chosen]
        assert marked == [("training_job", made.recipe.capacity.kind)]


def test_an_unknown_premium_is_unknown_in_the_text() -> None:
    made = planned("recipe=8b", "instances=p6_b200", "instances.count=4")
    text = format_plan(made)
    assert "HyperPod unknown" in text
    assert not re.search(r"\$0(?![.\d])|\$0\.0+(?!\d)", text), "an unknown price is never zero"


def test_the_price_of_spot_widens_its_dollars_and_not_its_days() -> None:
    found = by_kind(planned("recipe=70b"))["spot"]
    days, usd = found.days, found.usd
    assert usd.p50 / usd.p10 > 1.2 * days.p50 / days.p10
    assert usd.p90 / usd.p50 > 1.1 * days.p90 / days.p50
    assert found.usd.p50 < days.p50 * 24 * found.usd_per_hour, "waits are not billed"


# Storage and transfer.


FSX = ("env.fsx_tier=PERSISTENT_2-250", "env.fsx_capacity_gib=19200")


def test_a_total_with_an_unknown_part_says_so() -> None:
    made = planned("recipe=70b")
    assert made.total.usd is None
    assert made.total.unknown == ("fsx",)
    assert made.total.known_usd == chosen(made).usd
    text = format_plan(made)
    assert "in all        unknown: $" in text
    assert "without fsx" in text
    assert "fsx unknown: the recipe does not say env.fsx_tier and env.fsx_capacity_gib" in text


def test_a_file_system_costs_its_capacity_for_the_days_of_the_run() -> None:
    made = planned("recipe=70b", *FSX)
    machines, fsx = made.total.parts
    days = chosen(made).days
    assert (machines.name, machines.usd) == ("machines", chosen(made).usd)
    assert fsx.usd.p50 == pytest.approx(19_200 * 0.21 * days.p50 / (365 / 12))
    assert fsx.usd.p90 / fsx.usd.p10 == pytest.approx(days.p90 / days.p10)
    assert made.total.unknown == ()
    assert made.total.usd.p50 == pytest.approx(machines.usd.p50 + fsx.usd.p50)
    assert "without" not in format_plan(made).split("in all        ")[1].splitlines()[0]


def test_an_unpriced_region_is_unknown_and_not_free() -> None:
    made = planned("recipe=70b", *FSX, "env.region=eu-west-1")
    fsx = made.total.parts[1]
    assert fsx.usd is None
    assert "no price of fsx PERSISTENT_2-250 in eu-west-1" in fsx.basis
    assert made.total.usd is None


def test_one_missing_key_is_named_alone() -> None:
    made = planned("recipe=70b", "env.fsx_tier=SCRATCH_2")
    assert made.total.parts[1].basis == "unknown: the recipe does not say env.fsx_capacity_gib"


def test_checkpoints_and_shards_in_s3_cost_their_months() -> None:
    made = planned("recipe=8b", "data.size_gb=1000")
    parts = {part.name: part for part in made.total.parts}
    assert list(parts) == ["machines", "s3_checkpoints", "s3_data"]
    a_month = chosen(made).days.p50 / (365 / 12) * 0.023 / 1.073741824
    assert parts["s3_data"].usd.p50 == pytest.approx(1000 * a_month)
    kept = made.recipe.checkpoint.keep_last * made.disk.checkpoint_gb
    assert parts["s3_checkpoints"].usd.p50 == pytest.approx(kept * a_month)
    nothing_said = planned("recipe=8b")
    assert nothing_said.total.unknown == ("s3_data",)


def test_shards_of_another_region_are_moved_once() -> None:
    made = planned("recipe=8b", "data.size_gb=1000", "data.region=us-west-2")
    (transfer,) = [part for part in made.total.parts if part.name == "transfer"]
    assert transfer.usd.p10 == transfer.usd.p90 == pytest.approx(1000 / 1.073741824 * 0.02)
    assert "from us-west-2 to us-east-1" in transfer.basis
    same = planned("recipe=8b", "data.size_gb=1000", "data.region=us-east-1")
    assert "transfer" not in {part.name for part in same.total.parts}
    unsaid = planned("recipe=8b", "data.region=us-west-2")
    assert unsaid.total.unknown == ("s3_data", "transfer")


def test_a_run_of_unknown_length_has_no_cost_of_storage() -> None:
    made = planned("recipe=8b", "checkpoint.interval_steps=0", "train.num_steps=9e5", "data.size_gb=10")
    assert chosen(made).days is None
    assert made.total.usd is None
    assert made.total.known_usd is None
    assert set(made.total.unknown) == {"machines", "s3_checkpoints", "s3_data"}
    assert "in all        unknown: machines, s3 checkpoints, s3 data" in format_plan(made)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("env.fsx_tier=PERSISTENT_2_250",), "env.fsx_tier", "did you mean PERSISTENT_2-"),
        (("env.fsx_tier=fast",), "env.fsx_tier", "one of SCRATCH_1"),
        (("env.fsx_capacity_gib=100",), "env.fsx_capacity_gib", "below 1200"),
        (("data.region=us-eats-1",), "data.region", "did you mean us-east-1"),
    ],
)
def test_what_has_no_price_because_it_does_not_exist_is_one_error(
    overrides: tuple[str, ...], key: str, words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(compose(["recipe=70b", *overrides]))
    (problem,) = caught.value.problems
    assert problem.key == key
    assert words in f"{problem.message} {problem.fix}"


def test_the_region_of_shards_that_are_made_here_would_be_ignored() -> None:
    with pytest.raises(RecipeError) as caught:
        compose(["recipe=tiny", "data.region=us-east-1"])
    assert [problem.key for problem in caught.value.problems] == ["data.region"]


def test_this_machine_has_no_total() -> None:
    made = planned("recipe=tiny")
    assert (made.total, made.other_services) == (None, ())


def test_two_plans_have_the_same_bytes() -> None:
    recipe = compose(["recipe=405b"])
    first, second = plan(recipe), plan(recipe)
    assert json.dumps(first.to_json()) == json.dumps(second.to_json())
    assert format_plan(first) == format_plan(second)
