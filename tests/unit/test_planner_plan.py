"""Whole plans: what they say, what they refuse, and that they are quick and pure."""

from __future__ import annotations

import functools
import json
import re
import socket
import statistics
import subprocess
import sys
import time

import pytest

from chimera_sm.errors import RecipeError
from chimera_sm.planner.plan import plan
from chimera_sm.planner.render_text import format_plan
from chimera_sm.planner.types import Plan
from chimera_sm.recipe.compose import compose
from chimera_sm.recipe.schema import Recipe

SHIPPED = ["tiny", "1b", "8b", "8x7b", "70b", "405b"]


@functools.cache
def composed(*overrides: str) -> Recipe:
    return compose(overrides)


def planned(*overrides: str) -> Plan:
    return plan(composed(*overrides))


def refused(*overrides: str) -> RecipeError:
    recipe = composed(*overrides)
    with pytest.raises(RecipeError) as caught:
        plan(recipe)
    return caught.value


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_has_a_plan_that_fits(name: str) -> None:
    made = planned(f"recipe={name}")
    assert made.memory.fits is not False, made.memory
    assert made.disk.fits is not False, made.disk
    assert sum(made.memory.components_gib.values()) == pytest.approx(made.memory.total_gib)
    if made.step.total_s is not None:
        assert sum(made.step.components_s.values()) == pytest.approx(made.step.total_s)
        assert made.step.mfu is not None
        assert 0.1 < made.step.mfu < 0.6
        assert made.step.tokens_per_s == pytest.approx(made.batch.tokens_per_step / made.step.total_s)


def test_the_reference_case() -> None:
    made = planned("recipe=70b")
    (machines,) = made.instances
    assert (machines.type, machines.count, machines.workers_per_host) == ("ml.p4d.24xlarge", 32, 8)
    assert made.layout.shape == (4, 1, 8, 1, 8)
    assert made.num_parameters == 70_553_706_496
    assert made.batch.accumulation_steps == 64
    assert [c.kind for c in made.costs if c.chosen] == ["spot"]
    assert [c.kind for c in made.costs] == ["on_demand", "spot", "savings_plan", "reserved", "capacity_block"]
    assert made.disk.checkpoint_gb == pytest.approx(846.6, abs=0.1)
    assert made.reliability.spot_interruption_bucket == "10-15%"


def test_mfu_is_flops_over_peak() -> None:
    made = planned("recipe=8b")
    achieved = made.step.flops_per_token * made.step.tokens_per_s_per_accelerator
    assert made.step.mfu == pytest.approx(achieved / 989e12)


def test_segments_cover_the_run_without_gap_or_overlap() -> None:
    made = planned("recipe=70b", "capacity.max_run_hours=30")
    assert len(made.segments) > 10
    step = 0
    for index, segment in enumerate(made.segments):
        assert (segment.index, segment.start_step) == (index, step)
        assert segment.num_steps > 0
        assert segment.max_run_s == 30 * 3600
        assert segment.max_wait_s == 240 * 3600
        step += segment.num_steps
    assert step == made.batch.num_steps
    on_machines = next(c.days.p50 for c in made.costs if c.kind == "on_demand")
    assert len(made.segments) >= on_machines * 24 / 30


def test_a_short_run_is_one_segment() -> None:
    made = planned("recipe=8b", "train.num_steps=2000")
    assert [(s.start_step, s.num_steps, s.max_wait_s) for s in made.segments] == [(0, 2000, None)]


def test_costs_are_ordered_and_follow_from_price_and_days() -> None:
    made = planned("recipe=8b")
    for cost in made.costs:
        assert cost.days.p10 < cost.days.p50 < cost.days.p90
        if cost.usd_per_hour is None:
            assert cost.usd is None
        else:
            assert cost.usd.p10 < cost.usd.p50 < cost.usd.p90
    on_demand = made.costs[0]
    assert on_demand.usd_per_hour == pytest.approx(4 * 63.296)
    assert on_demand.usd.p50 == pytest.approx(on_demand.days.p50 * 24 * on_demand.usd_per_hour)
    compute_days = made.step.total_s * made.batch.num_steps / 86400
    assert compute_days < on_demand.days.p50 < 1.05 * compute_days


def test_spot_takes_longer_and_costs_less() -> None:
    on_demand, spot, *_ = planned("recipe=70b").costs
    assert spot.days.p50 > on_demand.days.p50
    assert spot.usd.p50 < on_demand.usd.p50


def test_unknown_price_stays_unknown_and_days_do_not() -> None:
    made = planned("recipe=8b", "env.region=sa-east-1")
    assert made.costs[0].usd is None
    assert made.costs[0].usd_per_hour is None
    assert made.costs[0].days is not None
    assert "unknown" in made.costs[0].price_basis
    assert "$0" not in format_plan(made)


def test_unknown_peak_leaves_step_and_days_unknown() -> None:
    made = planned("recipe=8b", "instances.type=ml.g7.48xlarge", "instances.count=4")
    assert made.step.total_s is None
    assert made.step.mfu is None
    assert all(cost.days is None and cost.usd is None for cost in made.costs)
    assert "no dense bf16 peak" in made.step.basis
    assert len(made.segments) == 1


def test_this_machine_predicts_no_time_and_no_cost() -> None:
    made = planned("recipe=tiny")
    (machine,) = made.instances
    assert (machine.type, machine.workers_per_host, machine.accelerator) == ("local", 1, None)
    assert (machine.accelerator_memory_gib, machine.peak_tflops, machine.network_gbps) == (None, None, None)
    assert made.step.total_s is None
    assert made.step.basis == "not predicted on this machine"
    assert [(c.chosen, c.usd, c.usd_per_hour) for c in made.costs] == [(True, None, None)]
    assert made.memory.fits is None
    assert made.reliability.failures_per_day is None


def test_fallbacks_are_planned_in_order() -> None:
    made = planned("recipe=8b", "instances.fallbacks=[{type:ml.p5en.48xlarge,count:4},{type:ml.p5e.48xlarge,count:4}]")
    assert [(i.role, i.type) for i in made.instances] == [
        ("group", "ml.p5.48xlarge"),
        ("fallback", "ml.p5en.48xlarge"),
        ("fallback", "ml.p5e.48xlarge"),
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["instances.type=ml.p4d.24xlrge"], "instances.type", "did you mean ml.p4d.24xlarge"),
        (["env.region=us-eats-1"], "env.region", "did you mean us-east-1"),
        (["train.global_batch_size=100"], "train.global_batch_size", "96 or 104"),
        (["instances.count=30"], "parallel", "240"),
        (["parallel.fully_sharded=16"], "parallel.fully_sharded", "parallel.fully_sharded=8"),
        (["instances.type=ml.g5.12xlarge"], "parallel.tensor_parallel", r"\[1, 2, 4\]"),
        (["instances.workers_per_host=16"], "instances.workers_per_host", "8 accelerators"),
        (["profiling.ranks=[0,256]"], "profiling.ranks", "256: no rank of a world of 256\n.*\n.*from 0 to 255"),
        (["instances.type=ml.trn1.32xlarge"], "instances.type", "Trainium"),
        (["instances.type=ml.gr6.4xlarge"], "instances.type", "not offered"),
        (["instances.fallbacks=[{type:ml.p5.48xlarge,count:16}]"], "instances.fallbacks", "as many hosts"),
        (["instances.fallbacks=[{type:ml.p9.48xlarge,count:32}]"], "instances.fallbacks", "no instance type"),
        (
            ["parallel.data_parallel=8", "precision=fp8", "precision.float8_all_gather=true"],
            "precision.float8_all_gather",
            "gathers none",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_its_key_and_origin(overrides: list[str], key: str, words: str) -> None:
    error = refused("recipe=70b", *overrides)
    assert any(problem.key.startswith(key) for problem in error.problems)
    assert re.search(words, str(error))
    assert "set by:" in str(error)


def test_a_gpu_has_no_flash_attention_in_32_bits_and_this_machine_may_have_no_gpu() -> None:
    (problem,) = refused("recipe=8b", "precision=fp32", "data.separate_documents=true").problems
    assert problem.key == "precision.param_dtype"
    planned("recipe=tiny", "precision=fp32", "data.separate_documents=true")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("parallel.tensor_parallel=2", "use one of [1], or instances.workers_per_host=2"),
        ("parallel.context_parallel=4", "choose degrees whose product divides 2, or instances.workers_per_host=2"),
        ("parallel.data_parallel=1000", "choose degrees whose product divides 2"),
    ],
)
def test_on_this_machine_more_workers_are_a_way_out(override: str, fix: str) -> None:
    (problem,) = refused("recipe=tiny", override).problems
    assert problem.fix == fix
    if "or " in fix:
        planned("recipe=tiny", override, fix.rpartition("or ")[2])


def test_a_fallback_keeps_its_index_behind_one_that_is_unknown() -> None:
    error = refused("recipe=8b", "instances.fallbacks=[{type:ml.p9,count:4},{type:ml.p5en.48xlarge,count:2}]")
    assert [p.key for p in error.problems] == ["instances.fallbacks[0].type", "instances.fallbacks[1]"]


def test_spot_where_the_advisor_lists_nothing_says_so() -> None:
    made = planned("recipe=70b", "env.region=eu-west-2")
    assert made.reliability.spot_interruption_bucket is None
    assert "reclaims unknown" in made.costs[1].price_basis
    assert "unknown" in made.reliability.basis
    assert "by the advisor: unknown" in format_plan(made)


def test_problems_are_collected() -> None:
    error = refused("recipe=70b", "env.region=us-eats-1", "train.global_batch_size=100")
    assert [p.key for p in error.problems] == ["env.region", "train.global_batch_size"]
    assert "override env.region=us-eats-1" in str(error)


@pytest.mark.parametrize("name", SHIPPED)
def test_json_is_plain_and_stable(name: str) -> None:
    text = json.dumps(planned(f"recipe={name}").to_json(), allow_nan=False)
    assert json.loads(text)["schema_version"] == 2
    assert text == json.dumps(planned(f"recipe={name}").to_json(), allow_nan=False)


def test_text_says_what_money_buys() -> None:
    text = format_plan(planned("recipe=70b"))
    for words in (
        "32 × ml.p4d.24xlarge",
        "256 ranks = 32 hosts × 8 = pipeline 4 × fully sharded 8 × tensor 8",
        "512 sequences of 8,192 tokens",
        "capacity 40.0 GiB: fits",
        "MFU",
        "tokens/s",
        "* spot",
        "in all",
        "days",
        "10-15%",
        "every 100 steps",
        "847 GB each",
    ):
        assert words in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_text_prints_unknown_for_what_is_not_known() -> None:
    text = format_plan(planned("recipe=8b", "env.region=af-south-1"))
    assert "unknown in all" in text
    assert "unknown: the catalogue has no price of this type in this region" in text
    assert "None" not in text
    assert "nan" not in text


def test_text_of_this_machine_has_no_price() -> None:
    text = format_plan(planned("recipe=tiny"))
    assert "capacity unknown: not compared" in text
    assert "$" not in text
    assert "failures" not in text
    assert "None" not in text
    assert "nan" not in text


def test_idle_accelerators_and_absent_offers_are_said() -> None:
    made = planned("recipe=8b", "instances.workers_per_host=4", "env.region=eu-west-3")
    assert any("4 of 8 accelerators" in note for note in made.notes)
    assert any("was not offered in eu-west-3" in note for note in made.notes)


def test_what_of_experts_is_not_compiled_is_said() -> None:
    def said(*overrides: str) -> bool:
        return any("attention alone is compiled" in note for note in planned("recipe=8x7b", *overrides).notes)

    assert said("train.compile=true", "parallel.expert_parallel=8")
    assert said("train.compile=true", "model.router_bias_update_speed=0.001")
    assert not said("train.compile=true", "parallel.expert_parallel=1")
    assert not said("train.compile=false", "parallel.expert_parallel=8")


def test_a_plan_takes_less_than_thirty_milliseconds() -> None:
    recipe = composed("recipe=70b")
    taken = []
    for _ in range(5):
        start = time.process_time()
        plan(recipe)
        taken.append(time.process_time() - start)
    assert statistics.median(taken) < 0.03


def test_planning_opens_no_socket_and_loads_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = composed("recipe=70b")

    def no_socket(*args: object, **kwargs: object) -> None:
        raise AssertionError("a plan opened a socket")

    monkeypatch.setattr(socket, "socket", no_socket)
    plan(recipe)
    script = (
        "import sys; from chimera_sm.planner.plan import plan; from chimera_sm.recipe.compose import compose;"
        "plan(compose(['recipe=70b'])); print([m for m in ('torch', 'boto3', 'sagemaker', 'rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
