"""The parts of a prediction: where parameters fall, what memory and time do when a setting moves, failures."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_sm.planner.coefficients import coefficient
from chimera_sm.planner.memory import Occupancy, in_flight, stage_memory_gib
from chimera_sm.planner.parameters import stage_parameters
from chimera_sm.planner.plan import plan
from chimera_sm.planner.reliability import failure_rate_per_h, reclaim_rate_per_h, wall_clock_factor, young_interval_s
from chimera_sm.planner.segments import split
from chimera_sm.planner.step_time import bubble_share
from chimera_sm.recipe.compose import compose
from chimera_train.config import (
    LatentAttention,
    MeshLayout,
    ModelConfig,
    ParallelConfig,
    batch_plan,
    layout,
    num_parameters,
)

MODEL = ModelConfig(
    name="m", vocab_size=1024, hidden_size=256, intermediate_size=512, num_layers=24, num_heads=8, num_kv_heads=8
)
MOE = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2)
DEEPSEEK = dataclasses.replace(
    MOE, expert_intermediate_size=128, num_shared_experts=1, num_dense_layers=3, router_scoring="sigmoid"
)
WIDER = dataclasses.replace(MODEL, attention_bias=True, qk_norm=True)
LATENT = dataclasses.replace(
    DEEPSEEK,
    latent_attention=LatentAttention(
        q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24
    ),
)
TIED = dataclasses.replace(MODEL, tie_embeddings=True)
powers = st.sampled_from([1, 2, 4, 8])


@given(
    model=st.sampled_from([MODEL, MOE, DEEPSEEK, WIDER, LATENT, dataclasses.replace(MODEL, tie_embeddings=True)]),
    sharded=powers,
    expert=powers,
)
def test_shards_of_one_stage_add_up_to_the_model(model: ModelConfig, sharded: int, expert: int) -> None:
    expert = min(expert, sharded) if model.num_experts else 1
    mesh = MeshLayout(sharded, 1, 1, 1, sharded, 1, 1, expert)
    held = stage_parameters(model, mesh, 0)
    assert held.stored * sharded == pytest.approx(num_parameters(model))
    assert held.dense + held.experts * expert == pytest.approx(num_parameters(model))


@given(pipeline=st.sampled_from([1, 2, 3, 4, 8]), sharded=powers, context=powers, tensor=powers)
def test_stages_add_up_to_the_model(pipeline: int, sharded: int, context: int, tensor: int) -> None:
    mesh = MeshLayout(pipeline * sharded * context, tensor, pipeline, 1, sharded, context, tensor, 1)
    stages = [stage_parameters(MODEL, mesh, stage) for stage in range(pipeline)]
    stored = sum(stage.stored for stage in stages) * sharded * context * tensor
    norms = (2 * MODEL.num_layers + 1) * MODEL.hidden_size
    assert stored == pytest.approx(num_parameters(MODEL) + (tensor - 1) * norms)
    assert sum(stage.layers for stage in stages) == MODEL.num_layers


def occupancy(*overrides: str) -> Occupancy:
    recipe = compose(["recipe=70b", *overrides])
    mesh = layout(recipe.parallel, hosts=recipe.instances.count, workers_per_host=8)
    return Occupancy(
        model=recipe.model,
        train=recipe.train,
        parallel=recipe.parallel,
        optim=recipe.optim,
        precision=recipe.precision,
        layout=mesh,
        batch=batch_plan(recipe.train, mesh),
        overhead_gib=coefficient("memory_overhead_gib"),
    )


def test_1f1b_holds_as_many_micro_batches_as_stages_are_left() -> None:
    case = occupancy()
    assert [in_flight(case, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(occupancy("parallel.pipeline_schedule=gpipe"), 0) == 64


def test_activations_shrink_with_checkpointing() -> None:
    kept = [
        stage_memory_gib(occupancy(f"train.activation_checkpointing={mode}"), 0)["activations"]
        for mode in ("none", "selective", "full")
    ]
    assert kept[0] > 2 * kept[1] > 4 * kept[2]
    full = "train.activation_checkpointing=full"
    every_second = stage_memory_gib(occupancy(full, "train.activation_checkpointing_every=2"), 0)["activations"]
    assert every_second == pytest.approx((kept[0] + kept[2]) / 2)
    assert stage_memory_gib(occupancy(full, "train.activation_offload=true"), 0)["activations"] < kept[2]
    compiled = ("train.activation_checkpointing=none", "train.compile=true")
    budgets = [
        stage_memory_gib(occupancy(*compiled, f"train.activation_memory_budget={b}"), 0)["activations"]
        for b in (0.2, 0.6, 1.0)
    ]
    assert budgets == sorted(budgets)
    assert budgets[2] == pytest.approx(stage_memory_gib(occupancy(*compiled), 0)["activations"])


@pytest.mark.parametrize(
    ("overrides", "bytes_a_parameter"),
    [
        (["optim=adamw"], 16),
        (["optim=adamw", "optim.state_dtype=bfloat16"], 12),
        (["optim=adamw", "optim.state_dtype=int8"], 10.0625),
        (["optim=adamw", "optim.offload=true"], 8),
        (["optim=lion"], 12),
        (["optim=muon"], 12),
        (["optim=adamw", "precision=bf16_pure"], 12),
        (["optim=lion", "precision=bf16_pure", "optim.state_dtype=int8"], 5.03125),
    ],
)
def test_what_is_kept_of_a_parameter(overrides: list[str], bytes_a_parameter: float) -> None:
    case = occupancy(*overrides)
    held = stage_parameters(case.model, case.layout, 1)  # neither embedding nor head
    parts = stage_memory_gib(case, 1)
    whole = held.largest_unit * 6 if not case.gradients_stay_whole else held.gathered * 4
    kept = (parts["parameters"] + parts["gradients"] + parts["optimizer"]) * 2**30 - whole
    assert kept / held.stored == pytest.approx(bytes_a_parameter)


def test_logits_are_on_the_last_stage_and_shrink_with_chunks() -> None:
    whole, chunked = occupancy("train.loss_chunk_tokens=0"), occupancy("train.loss_chunk_tokens=1024")
    assert stage_memory_gib(whole, 0)["logits"] == 0
    assert stage_memory_gib(whole, 3)["logits"] > stage_memory_gib(chunked, 3)["logits"] > 0


def test_deferred_gradients_stay_whole() -> None:
    plain = ("parallel.pipeline_parallel=1", "parallel.tensor_parallel=1")
    sharded = stage_memory_gib(occupancy(*plain), 0)["gradients"]
    deferred = stage_memory_gib(occupancy(*plain, "parallel.defer_gradient_sync=true"), 0)["gradients"]
    assert deferred > sharded
    assert deferred > 4 * 70e9 / 2**30


def test_a_pipeline_idles_for_all_stages_but_one() -> None:
    mesh = layout(ParallelConfig(pipeline_parallel=4), hosts=4, workers_per_host=1)
    assert bubble_share(mesh) == 3


def test_more_of_a_slow_network_is_exposed() -> None:
    def sharded_s(kind: str) -> float:
        made = plan(compose(["recipe=8b", f"instances.type={kind}", "train.sequence_length=1024"]))
        return made.step.components_s.get("fully_sharded", 0.0)

    assert sharded_s("ml.p4de.24xlarge") > 2 * sharded_s("ml.p5.48xlarge")


def test_compiled_is_faster_than_eager() -> None:
    compiled, eager = (plan(compose(["recipe=8b", f"train.compile={on}"])).step.total_s for on in ("true", "false"))
    assert compiled < eager


def test_failure_rate_of_a_known_fleet() -> None:
    # Llama 3 405B: 419 unexpected interruptions in 54 days on 2,048 hosts.
    assert failure_rate_per_h(2048, 8) * 24 * 54 == pytest.approx(419, rel=0.05)


def test_reclaims_of_a_month_match_the_bucket() -> None:
    rate = reclaim_rate_per_h(1, "10-15%")
    assert rate is not None
    assert 1 - math.exp(-rate * 730) == pytest.approx(0.125)
    assert reclaim_rate_per_h(32, "10-15%") == pytest.approx(32 * rate)
    assert reclaim_rate_per_h(32, None) is None


@pytest.mark.parametrize(
    ("accelerators", "minutes", "waste"), [(64, 308, 0.007), (512, 109, 0.021), (1024, 77, 0.031), (4096, 38.5, 0.072)]
)
def test_interval_and_waste_match_a_published_table(accelerators: int, minutes: float, waste: float) -> None:
    # At Llama 3's failure rate, 60 s to save and 15 min to restart.
    per_h = 1.58e-4 * accelerators / 8
    best_s = young_interval_s(60, 3600 / per_h)
    assert best_s / 60 == pytest.approx(minutes, rel=0.02)
    assert 1 - 1 / wall_clock_factor(best_s, 60, 900, per_h) == pytest.approx(waste, rel=0.08)


@given(rate=st.floats(0, 1), interval=st.floats(60, 1e5), stall=st.floats(0, 600), restart=st.floats(0, 3600))
def test_interruptions_only_ever_cost_time(rate: float, interval: float, stall: float, restart: float) -> None:
    factor = wall_clock_factor(interval, stall, restart, rate)
    assert factor >= 1 - 1e-9
    assert wall_clock_factor(interval, stall, restart, rate * 2) >= factor * (1 - 1e-9)


def test_young_is_near_the_best_interval() -> None:
    per_h = 0.05
    best_s = young_interval_s(30, 3600 / per_h)
    at_best = wall_clock_factor(best_s, 30, 300, per_h)
    assert at_best < wall_clock_factor(best_s / 3, 30, 300, per_h)
    assert at_best < wall_clock_factor(best_s * 3, 30, 300, per_h)


@given(
    steps=st.integers(1, 100_000),
    step_s=st.none() | st.floats(0.01, 1e5),
    hours=st.floats(0.5, 672),
    wait=st.none() | st.floats(1, 672),
)
def test_segments_cover_every_step_once(steps: int, step_s: float | None, hours: float, wait: float | None) -> None:
    if step_s is not None and steps * step_s > 2000 * hours * 3600:
        return
    segments = split(num_steps=steps, step_s=step_s, startup_s=600, max_run_hours=hours, max_wait_hours=wait)
    assert sum(s.num_steps for s in segments) == steps
    assert [s.start_step for s in segments] == [sum(s.num_steps for s in segments[:i]) for i in range(len(segments))]
