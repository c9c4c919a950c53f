"""Rules of the recipe that come from how the trainer computes."""

from dataclasses import replace
from typing import Any

import pytest

from chimera_train.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    LatentAttention,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RopeScaling,
    TrainConfig,
    TrainRecipe,
)
from chimera_train.config.context import context_problems
from chimera_train.config.pipeline_rules import pipeline_problems
from chimera_train.config.schedules import SCHEDULES
from chimera_train.config.tensor import tensor_problems
from chimera_train.parallel.apply import check_flash_attention

EXPERTS = ModelConfig(
    name="m",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
)


def recipe(model: ModelConfig, param_dtype: str) -> TrainRecipe:
    return TrainRecipe(
        name="r",
        model=model,
        parallel=ParallelConfig(),
        train=TrainConfig(num_steps=1, global_batch_size=1, micro_batch_size=1, sequence_length=8, compile=True),
        data=DataConfig(name="d"),
        optim=OptimConfig(learning_rate=1.0),
        precision=PrecisionConfig(name="p", param_dtype=param_dtype),
        checkpoint=CheckpointConfig(interval_steps=0),
    )


def test_experts_compile_in_bfloat16_only():
    assert [p.key for p in recipe(EXPERTS, "float32").validate()] == ["train.compile"]
    assert not recipe(EXPERTS, "bfloat16").validate()
    assert not recipe(replace(EXPERTS, num_experts=0, experts_per_token=0), "float32").validate()


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size"])
def test_experts_want_rows_of_16_bytes(key):
    assert [p.key for p in replace(EXPERTS, **{key: 68}).validate()] == [f"model.{key}"]
    assert not replace(EXPERTS, num_experts=0, experts_per_token=0, **{key: 68}).validate()


SPLIT = ModelConfig(
    name="m", vocab_size=64, hidden_size=48, intermediate_size=96, num_layers=1, num_heads=8, num_kv_heads=4
)
LATENT = LatentAttention(kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=7)


@pytest.mark.parametrize(
    ("model", "degree", "context", "broken"),
    [
        (SPLIT, 4, 1, None),
        (SPLIT, 4, 2, None),
        (SPLIT, 3, 1, "model.num_heads=8, model.vocab_size=64, model.num_kv_heads=4, train.sequence_length=32"),
        (SPLIT, 8, 1, "model.num_kv_heads=4"),
        (SPLIT, 8, 8, "model.num_kv_heads=4, train.sequence_length / parallel.context_parallel=4"),
        (replace(SPLIT, vocab_size=67), 2, 1, "model.vocab_size=67"),
        (replace(SPLIT, intermediate_size=97), 2, 1, "model.intermediate_size=97"),
        (replace(SPLIT, intermediate_size=100, num_experts=3, experts_per_token=1), 8, 1, "model.num_kv_heads=4"),
        (replace(SPLIT, latent_attention=LATENT), 8, 1, None),
    ],
)
def test_tensor_parallel_names_every_size_that_it_does_not_divide(model, degree, context, broken):
    train = TrainConfig(num_steps=1, global_batch_size=1, micro_batch_size=1, sequence_length=32)
    problems = tensor_problems(model, ParallelConfig(tensor_parallel=degree, context_parallel=context), train)
    expected = [] if broken is None else [("parallel.tensor_parallel", f"{degree} does not divide {broken}")]
    assert [(p.key, p.message) for p in problems] == expected


def test_tensor_parallel_is_told_the_degrees_that_divide_every_size():
    train = TrainConfig(num_steps=1, global_batch_size=1, micro_batch_size=1, sequence_length=32)
    (problem,) = tensor_problems(SPLIT, ParallelConfig(tensor_parallel=3), train)
    assert problem.fix == "use one of [1, 2, 4]"


@pytest.mark.parametrize(
    ("degree", "compiled", "says"),
    [
        (2, True, []),
        (1, True, ["tensor_parallel=1"]),
        (2, False, ["train.compile=false"]),
        (1, False, ["=1", "=false"]),
    ],
)
def test_async_tensor_parallel_without_effect_is_an_error(degree, compiled, says):
    train = TrainConfig(num_steps=1, global_batch_size=1, micro_batch_size=1, sequence_length=32, compile=compiled)
    problems = tensor_problems(SPLIT, ParallelConfig(tensor_parallel=degree, async_tensor_parallel=True), train)
    assert [p.key for p in problems] == ["parallel.async_tensor_parallel"] * len(says)
    assert all(text in problem.message for text, problem in zip(says, problems, strict=True))


@pytest.mark.parametrize(
    ("parallel", "data", "model", "broken"),
    [
        ({"context_parallel": 2}, {}, {}, None),
        ({"context_parallel": 3}, {}, {}, ("parallel.context_parallel", "6 does not divide")),
        ({"context_parallel": 8, "tensor_parallel": 4}, {}, {}, ("parallel.context_parallel", "64 does not divide")),
        ({"context_parallel": 4, "context_backend": "ulysses"}, {}, {}, None),
        ({"context_parallel": 8, "context_backend": "ulysses"}, {}, {}, ("parallel.context_backend", "num_kv_heads=4")),
        ({"context_parallel": 8, "context_backend": "ulysses"}, {}, {"latent_attention": LATENT}, None),
        ({"context_parallel": 2, "context_backend": "ring"}, {}, {"sliding_window": 32}, None),
        ({"context_parallel": 2, "context_backend": "ring"}, {}, {"sliding_window": 31},
         ("parallel.context_backend", "model.sliding_window")),
        ({"context_parallel": 2, "context_backend": "ring"}, {"separate_documents": True}, {},
         ("parallel.context_backend", "data.separate_documents")),
        ({"context_parallel": 2}, {"separate_documents": True}, {"sliding_window": 4}, None),
        ({"pipeline_parallel": 2}, {"separate_documents": True}, {}, ("data.separate_documents", "hand on")),
        ({"context_backend": "ring"}, {}, {}, ("parallel.context_backend", "would be ignored")),
    ],
)  # fmt: skip
def test_context_parallel_and_documents_say_what_they_cannot_do(parallel, data, model, broken):
    problems = context_problems(
        replace(SPLIT, **model),
        ParallelConfig(**parallel),
        TrainConfig(num_steps=1, global_batch_size=1, micro_batch_size=1, sequence_length=32),
        DataConfig(name="d", **data),
    )
    if broken is None:
        assert problems == []
    else:
        ((key, text),) = [(p.key, p.message) for p in problems]
        assert key == broken[0]
        assert broken[1] in text


def scaled(**fields) -> ModelConfig:
    return replace(SPLIT, rope_scaling=RopeScaling(**fields))


WITH_LATENT = replace(SPLIT, latent_attention=LATENT, num_kv_heads=8)
ODD = replace(LATENT, qk_rope_head_dim=3)


@pytest.mark.parametrize(
    ("model", "key", "says"),
    [
        (scaled(type="linear", beta_fast=8.0), "rope_scaling.beta_fast", "ignored"),
        (scaled(mscale=1.0), "rope_scaling.mscale", "ignored by"),
        (scaled(factor=0.5), "rope_scaling.factor", "is below 1"),
        (scaled(low_freq_factor=4.0), "rope_scaling.low_freq_factor", "is not between"),
        (scaled(type="yarn", beta_slow=33.0), "rope_scaling.beta_slow", "beta_fast=32.0"),
        (scaled(type="yarn", attention_factor=0.0), "rope_scaling.attention_factor", "0.0"),
        (replace(SPLIT, sliding_window=0), "sliding_window", "is not positive"),
        (replace(SPLIT, head_dim=5), "head_dim", "5 is odd"),
        (replace(WITH_LATENT, head_dim=8), "head_dim", "would be ignored: latent attention"),
        (replace(WITH_LATENT, num_kv_heads=4), "num_kv_heads", "would be ignored: latent attention"),
        (replace(WITH_LATENT, qk_norm=True), "qk_norm", "set it to false"),
        (replace(SPLIT, latent_attention=replace(LATENT, q_lora_rank=0)), "latent_attention.q_lora_rank", "0"),
        (replace(SPLIT, latent_attention=ODD), "latent_attention.qk_rope_head_dim", "3"),
    ],
)  # fmt: skip
def test_what_attention_and_positions_would_ignore_or_cannot_be_is_refused(model, key, says):
    problem = next(p for p in model.validate() if p.key == f"model.{key}")
    assert says in f"{problem.message} ({problem.fix})"


def test_attention_and_positions_that_are_right_are_not_refused():
    assert WITH_LATENT.validate() == []
    assert scaled(type="yarn", beta_fast=1.0).validate() == []


def test_an_export_that_no_architecture_fits_is_refused_before_the_run():
    plain = recipe(replace(EXPERTS, qk_norm=True, num_shared_experts=1), "bfloat16")
    assert not plain.validate()
    (problem,) = replace(plain, checkpoint=CheckpointConfig(interval_steps=1, export_at_end=True)).validate()
    assert problem.key == "checkpoint.export_at_end"
    assert "cannot have model.num_shared_experts=1" in problem.message


def pipeline_keys(train: dict | None = None, **parallel: Any) -> list[str]:
    config = ParallelConfig(pipeline_parallel=2, **parallel)
    times = {"num_steps": 1, "global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 8}
    deep = replace(SPLIT, num_layers=6)
    return [p.key for p in config.validate() + pipeline_problems(deep, config, TrainConfig(**times, **(train or {})))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_that_splits_backward_wants_parameters_kept_and_graphs_that_last(schedule):
    refused = SCHEDULES[schedule].splits_backward
    for key, setting in (
        ("parallel.reshard_after_forward", {"reshard_after_forward": True}),
        ("train.activation_checkpointing", {"train": {"activation_checkpointing": "selective"}}),
        ("train.compile", {"train": {"compile": True}}),
    ):
        assert pipeline_keys(pipeline_schedule=schedule, **setting) == ([key] if refused else [])
    for setting in ({}, {"reshard_after_forward": False}, {"train": {"activation_checkpointing": "full"}}):
        assert not pipeline_keys(pipeline_schedule=schedule, **setting)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "key"),
    [
        ("1f1b", 1, None),
        ("1f1b", 2, "parallel.stages_per_rank"),
        ("zbv", 3, "parallel.stages_per_rank"),
        ("interleaved_1f1b", 0, "parallel.stages_per_rank"),
        ("interleaved_1f1b", 2, None),
        ("interleaved_1f1b", 4, "parallel.pipeline_parallel"),  # eight stages for six layers
    ],
)
def test_stages_fit_the_schedule_and_the_model(schedule, stages_per_rank, key):
    assert pipeline_keys(pipeline_schedule=schedule, stages_per_rank=stages_per_rank) == ([key] if key else [])


@pytest.mark.parametrize(("name", "value"), [("stages_per_rank", 2), ("pipeline_schedule", "zbv")])
def test_a_pipeline_s_keys_without_a_pipeline_would_be_ignored(name, value):
    (problem,) = ParallelConfig(**{name: value}).validate()
    assert (problem.key, problem.message) == (
        f"parallel.{name}",
        f"{value} would be ignored: parallel.pipeline_parallel is 1",
    )
    assert not ParallelConfig(pipeline_parallel=2, **{name: value}, **SCHEDULE_OF.get(name, {})).validate()


SCHEDULE_OF = {"stages_per_rank": {"pipeline_schedule": "interleaved_1f1b"}}


@pytest.mark.parametrize(
    ("layers", "parallel", "fix"),
    [
        (
            3,
            {"pipeline_parallel": 2, "pipeline_schedule": "zbv"},
            "use parallel.pipeline_parallel=1 with S=1f1b, or S=1f1b",
        ),
        (3, {"pipeline_parallel": 8, "pipeline_schedule": "zbv"}, "use parallel.pipeline_parallel=1 with S=1f1b"),
        (6, {"pipeline_parallel": 8}, "use at most 6"),
        (6, {"pipeline_parallel": 4, "pipeline_schedule": "dualpipev"}, "use at most 3, or S=1f1b"),
        (
            6,
            {"pipeline_parallel": 2, "pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 4},
            "use parallel.pipeline_parallel=1 with S=1f1b N=null, or N=3, or S=1f1b with N=null",
        ),
    ],
)
def test_what_is_said_to_make_stages_fit_does(layers, parallel, fix):
    train = TrainConfig(num_steps=1, global_batch_size=1, micro_batch_size=1, sequence_length=32)
    (problem,) = (
        p
        for p in pipeline_problems(replace(SPLIT, num_layers=layers), ParallelConfig(**parallel), train)
        if p.key == "parallel.pipeline_parallel"
    )
    said = problem.fix.replace("parallel.pipeline_schedule", "S").replace("parallel.stages_per_rank", "N")
    assert said == fix


def test_flash_attention_of_a_gpu_wants_16_bits():
    full = recipe(SPLIT, "float32")
    check_flash_attention(full, "cuda")
    full = replace(full, data=DataConfig(name="d", separate_documents=True))
    check_flash_attention(full, "cpu")
    with pytest.raises(ConfigError, match=r"^precision.param_dtype: float32, but data.separate_documents run"):
        check_flash_attention(full, "cuda")
    check_flash_attention(replace(full, precision=replace(full.precision, param_dtype="bfloat16")), "cuda")
