"""The project's own `train.py` on the workload: a recipe file, a folder of shards, and its metric lines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from chimera_train.config import (
    CheckpointConfig,
    DataConfig,
    LayoutConfig,
    MlRoot,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecipeFile,
    TrainConfig,
    TrainRecipe,
)
from chimera_train.data.dataset import DatasetInfo, TokenizerInfo, file_sha256, write_json
from chimera_train.data.indexed import ShardWriter, bin_path

from .workload import Workload

TRAIN = Path(__file__).parents[2] / "entrypoints" / "train.py"
TOKEN_DTYPE = "int32"


def write_corpus(folder: Path, *, vocab_size: int, num_tokens: int) -> Path:
    """One shard of random ids, few of them frequent, as words are; returns the file of raw ids in it."""
    folder.mkdir(parents=True)
    ids = np.random.default_rng(0).zipf(1.2, num_tokens) % vocab_size
    with ShardWriter(folder / "shard-00000", TOKEN_DTYPE) as writer:
        for document in np.array_split(ids, max(1, num_tokens // 1000)):
            writer.add(document)
        shard = writer.finish()
    assert shard is not None
    (folder / "tokenizer.json").write_text("{}")
    info = DatasetInfo(
        schema_version=1,
        shards=(shard,),
        num_documents=shard.num_documents,
        num_tokens=shard.num_tokens,
        vocab_size=vocab_size,
        dtype=TOKEN_DTYPE,
        eod_id=0,
        tokenizer=TokenizerInfo(file="tokenizer.json", sha256=file_sha256(folder / "tokenizer.json")),
        source={"description": "random"},
    )
    write_json(folder / "dataset.json", info)
    return bin_path(folder / "shard-00000")


def write_recipe(workload: Workload, file: Path, *, world_size: int) -> None:
    model = ModelConfig(**asdict(workload.model), max_position_embeddings=workload.sequence_length)
    recipe = TrainRecipe(
        name="train_speed",
        model=model,
        parallel=ParallelConfig(),
        train=TrainConfig(
            # One more than is measured: the run is ended in it, before it saves its last state.
            num_steps=workload.num_steps + 1,
            global_batch_size=workload.micro_batch_size * world_size,
            micro_batch_size=workload.micro_batch_size,
            sequence_length=workload.sequence_length,
            activation_checkpointing="selective" if workload.save_memory else "none",
            compile=workload.compile,
            loss_chunk_tokens=512 if workload.save_memory else 0,
        ),
        data=DataConfig(name="random", shuffle=False),
        optim=OptimConfig(
            learning_rate=workload.learning_rate, max_grad_norm=workload.max_grad_norm, schedule="constant"
        ),
        precision=PrecisionConfig(name="benchmark", param_dtype=workload.param_dtype),
        checkpoint=CheckpointConfig(interval_steps=0),
    )
    layout = LayoutConfig(hosts=1, workers_per_host=world_size)
    file.write_text(json.dumps(asdict(RecipeFile(recipe=recipe, layout=layout, recipe_hash="0" * 64))))


def read_metrics(root: Path) -> list[dict]:
    """Rows of the metric file so far; a row that is still being written is left out."""
    file = MlRoot(root).metrics / "host-0.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
