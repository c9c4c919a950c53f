"""Parameters, FLOPs, ranks and batches: the arithmetic that planner and trainer share."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from chimera_sm.paths import recipes_dir
from chimera_train.config import (
    AXES,
    ConfigError,
    MeshLayout,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    batch_plan,
    decode,
    flops_per_token,
    layout,
    num_active_parameters,
    num_parameters,
)
from chimera_train.config.flops import embedding_parameters

PUBLISHED = {
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "llama2_7b": 6_738_415_616,
    "mistral_7b": 7_241_732_096,
    "qwen2_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v3_671b": 671_026_404_352,
}
"""Numbers of parameters of the published checkpoints (Hugging Face model cards; a tied matrix, which some files hold
twice, counts once; DeepSeek-V3 without its layer for predicting a second token and the biases of its routers)."""


def model_named(name: str) -> ModelConfig:
    return decode(ModelConfig, yaml.safe_load((recipes_dir() / "model" / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_checkpoints(name: str) -> None:
    assert num_parameters(model_named(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral_8x22b", 39), ("qwen3_30b_a3b", 3.3), ("qwen3_235b_a22b", 22), ("deepseek_v3_671b", 37)],
)
def test_active_parameters_round_to_those_of_the_model_cards(name: str, billions: float) -> None:
    model = model_named(name)
    # Some cards count the input embedding, which a token passes by look-up, and some do not.
    active = num_active_parameters(model) / 1e9
    assert active - embedding_parameters(model) / 1e9 - 0.05 <= billions <= active + 0.05


def test_flops_of_latent_attention_and_of_a_window_count_what_they_compute() -> None:
    deepseek, windowed = model_named("deepseek_v3_671b"), model_named("mistral_7b")
    matrices = num_active_parameters(deepseek) - embedding_parameters(deepseek)
    assert flops_per_token(deepseek, 4096) == 6 * matrices + 6 * 61 * 128 * (192 + 128) * 4096
    whole = dataclasses.replace(windowed, sliding_window=None)
    assert flops_per_token(windowed, 4096) == flops_per_token(whole, 4096)
    # Of 16384 queries the first 4096 see half a window on average, and the others a window.
    seen = (4096 * 2048 + 12288 * 4096) / 16384
    matrices = num_parameters(windowed) - embedding_parameters(windowed)
    assert flops_per_token(windowed, 16384) == 6 * matrices + 12 * 32 * 4096 * 2 * seen


def test_active_parameters_of_mixtral_leave_six_of_eight_experts_out() -> None:
    model = model_named("mixtral_8x7b")
    assert num_active_parameters(model) == 12_879_925_248
    assert num_active_parameters(model_named("llama3_8b")) == num_parameters(model_named("llama3_8b"))


def test_flops_count_a_tied_matrix_and_not_a_look_up() -> None:
    untied, tied = model_named("llama3_8b"), model_named("llama3_1b")
    attention = 12 * untied.num_layers * 4096 * 8192
    assert flops_per_token(untied, 8192) == 6 * (num_parameters(untied) - embedding_parameters(untied)) + attention
    assert flops_per_token(tied, 1) == 6 * num_parameters(tied) + 12 * tied.num_layers * 2048


degrees = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def meshes(draw: Callable) -> tuple[ParallelConfig, MeshLayout]:
    pipeline, replicas, sharded, context, tensor = (draw(degrees) for _ in range(5))
    world = pipeline * replicas * sharded * context * tensor
    workers = draw(st.sampled_from([w for w in range(tensor, 65, tensor) if world % w == 0] or [tensor]))
    config = ParallelConfig(
        pipeline_parallel=pipeline,
        data_parallel=replicas,
        fully_sharded=draw(st.sampled_from([sharded, None])),
        context_parallel=context,
        tensor_parallel=tensor,
    )
    return config, layout(config, hosts=world // workers, workers_per_host=workers)


@given(meshes())
def test_degrees_multiply_to_the_world(case: tuple[ParallelConfig, MeshLayout]) -> None:
    config, mesh = case
    product = mesh.pipeline * mesh.data_parallel * mesh.fully_sharded * mesh.context * mesh.tensor
    assert product == mesh.world_size
    assert config.fully_sharded in (None, mesh.fully_sharded)


@given(meshes())
def test_every_rank_has_coordinates_of_its_own(case: tuple[ParallelConfig, MeshLayout]) -> None:
    _, mesh = case
    if mesh.world_size > 4096:
        return
    places = {tuple(mesh.coordinates(rank).values()) for rank in mesh.ranks()}
    assert places == set(itertools.product(*(range(size) for size in mesh.shape)))


@given(meshes(), st.data())
def test_tensor_parallel_stays_inside_a_host_and_sees_the_same_data(
    case: tuple[ParallelConfig, MeshLayout], data: st.DataObject
) -> None:
    _, mesh = case
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    group = [rank - rank % mesh.tensor + i for i in range(mesh.tensor)]
    assert len({mesh.host_of(r) for r in group}) == 1
    assert len({mesh.data_rank(r) for r in group}) == 1
    assert 0 <= mesh.data_rank(rank) < mesh.data_parallel_size


@given(meshes(), st.data())
def test_ranks_outside_the_world_are_refused(case: tuple[ParallelConfig, MeshLayout], data: st.DataObject) -> None:
    _, mesh = case
    with pytest.raises(ValueError, match="not in a world"):
        mesh.coordinates(data.draw(st.sampled_from([-1, mesh.world_size])))


@given(
    hosts=st.integers(1, 8),
    workers=st.integers(1, 8),
    pipeline=st.integers(1, 5),
    replicas=st.integers(1, 5),
    sharded=st.none() | st.integers(1, 5),
    tensor=st.integers(1, 5),
)
def test_a_layout_multiplies_or_is_refused(
    hosts: int, workers: int, pipeline: int, replicas: int, sharded: int | None, tensor: int
) -> None:
    config = ParallelConfig(
        pipeline_parallel=pipeline, data_parallel=replicas, fully_sharded=sharded, tensor_parallel=tensor
    )
    fixed = pipeline * replicas * tensor
    world = hosts * workers
    possible = workers % tensor == 0 and world % fixed == 0 and sharded in (None, world // fixed)
    if possible:
        mesh = layout(config, hosts=hosts, workers_per_host=workers)
        assert len(AXES) == len(mesh.shape)
    else:
        with pytest.raises(ConfigError, match=r"^parallel\S*: .*\d"):
            layout(config, hosts=hosts, workers_per_host=workers)


def train(global_batch: int, micro_batch: int) -> TrainConfig:
    return TrainConfig(num_steps=10, global_batch_size=global_batch, micro_batch_size=micro_batch, sequence_length=128)


@given(
    global_batch=st.integers(1, 5000),
    micro_batch=st.integers(1, 16),
    sharded=st.integers(1, 16),
    pipeline=st.integers(1, 4),
)
def test_batches_multiply_or_the_nearest_valid_ones_are_offered(
    global_batch: int, micro_batch: int, sharded: int, pipeline: int
) -> None:
    config = ParallelConfig(pipeline_parallel=pipeline)
    mesh = layout(config, hosts=pipeline * sharded, workers_per_host=1)
    per_pass = micro_batch * sharded
    valid = global_batch % per_pass == 0 and global_batch >= per_pass * pipeline
    if valid:
        batch = batch_plan(train(global_batch, micro_batch), mesh)
        assert batch.micro_batch_size * batch.data_parallel_size * batch.accumulation_steps == global_batch
        assert batch.accumulation_steps >= pipeline
        assert batch.total_tokens == 10 * global_batch * 128
        return
    with pytest.raises(ConfigError) as caught:
        batch_plan(train(global_batch, micro_batch), mesh)
    (problem,) = caught.value.problems
    assert problem.key == "train.global_batch_size"
    offered = [int(n) for n in re.findall(r"\d+", problem.fix)]
    for size in offered:
        batch_plan(train(size, micro_batch), mesh)
    every = range(per_pass * pipeline, global_batch + 2 * per_pass * pipeline, per_pass)
    nearest = min(every, key=lambda size: abs(size - global_batch))
    assert abs(min(offered, key=lambda size: abs(size - global_batch)) - global_batch) == abs(nearest - global_batch)
