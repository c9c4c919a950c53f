"""A rank that is traced without its machines holds what a rank of a real run would."""

import json
from dataclasses import replace

import pytest

from chimera_train.config import (
    CheckpointConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecipeFile,
    TrainConfig,
    TrainRecipe,
    encode,
    num_parameters,
)
from chimera_train.trace import GIB, GRADIENTS, OPTIMIZER, PARAMETERS, main, table, trace_ranks

MODEL = ModelConfig(
    name="small", vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=8, num_kv_heads=4
)


def recipe(ranks: int, model: ModelConfig = MODEL, checkpointing: str = "full", **parallel) -> RecipeFile:
    return RecipeFile(
        recipe=TrainRecipe(
            name="traced",
            model=model,
            parallel=ParallelConfig(**parallel),
            train=TrainConfig(
                num_steps=2,
                global_batch_size=32,
                micro_batch_size=1,
                sequence_length=128,
                activation_checkpointing=checkpointing,  # type: ignore[arg-type]
            ),
            data=DataConfig(name="none"),
            optim=OptimConfig(learning_rate=1e-3),
            precision=PrecisionConfig(name="bf16"),
            checkpoint=CheckpointConfig(interval_steps=0),
        ),
        layout=LayoutConfig(hosts=ranks // 4 or 1, workers_per_host=min(ranks, 4)),
        recipe_hash="0",
    )


def trace(recipe_file: RecipeFile):
    (found,) = trace_ranks(recipe_file, [0])
    return found


def test_states_are_those_of_the_shards():
    found = trace(recipe(4))
    shard = num_parameters(MODEL) / 4
    assert found.num_parameters == pytest.approx(shard, rel=0.01)
    assert found.by_kind_gib[PARAMETERS] * GIB == pytest.approx(4 * shard, rel=0.01)
    assert found.by_kind_gib[OPTIMIZER] * GIB == pytest.approx(8 * shard, rel=0.01)
    assert found.peak_gib == pytest.approx(sum(found.by_kind_gib.values()))


def test_the_stages_hold_the_model_between_them():
    parallel = {"pipeline_parallel": 2, "tensor_parallel": 2, "pipeline_schedule": "interleaved_1f1b"}
    first, second = trace_ranks(recipe(8, **parallel), [0, 4])
    assert (first.stages, second.stages) == ((0, 2), (1, 3))
    assert first.num_layers + second.num_layers == MODEL.num_layers
    norms = 9 * MODEL.hidden_size  # which both ranks of the tensor axis hold
    assert 4 * (first.num_parameters + second.num_parameters) == num_parameters(MODEL) + norms
    assert first.by_kind_gib[GRADIENTS] > 0, "a pipeline keeps gradients whole between micro-batches"


def test_less_memory_with_checkpointing_and_with_more_ranks():
    none, full = trace(recipe(4, checkpointing="none")), trace(recipe(4))
    assert full.peak_gib < none.peak_gib
    assert trace(recipe(8)).peak_gib < full.peak_gib


def test_micro_batches_in_flight_count():
    """GPipe holds the activations of all micro-batches, 1F1B of as many as there are stages."""
    by_schedule = {
        schedule: trace(recipe(4, checkpointing="none", pipeline_parallel=4, pipeline_schedule=schedule)).peak_gib
        for schedule in ("gpipe", "1f1b")
    }
    assert by_schedule["gpipe"] > 2 * by_schedule["1f1b"]


def test_experts_are_traced_too():
    experts = replace(MODEL, num_experts=4, experts_per_token=2)
    found = trace(recipe(4, experts, expert_parallel=2))
    assert found.num_parameters == pytest.approx(num_parameters(experts) / 4, rel=0.01)


def test_the_command_line(tmp_path, capsys):
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(encode(recipe(8, pipeline_parallel=2))))
    assert main(["--recipe", str(file), "--stages", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)
    assert [found["rank"] for found in ranks] == [0, 4]
    assert main(["--recipe", str(file), "--rank", "8"]) == 2
    assert "ranks 0 to 7" in capsys.readouterr().err
    assert table([trace(recipe(4))]).count("\n") == 1
