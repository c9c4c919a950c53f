"""A small model of odd sizes, its recipe and its checkpointer, for the checkpoint tests."""

import hashlib
from pathlib import Path
from typing import Any

WIDTH = 7
"""Odd: no world size but 1 and 7 divides a parameter evenly."""


def recipe_file(**model: Any):
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
    )

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1}
    recipe = TrainRecipe(
        name="test",
        model=ModelConfig(**({"name": "test", "num_kv_heads": 1} | sizes | model)),
        parallel=ParallelConfig(),
        train=TrainConfig(num_steps=10, global_batch_size=12, micro_batch_size=1, sequence_length=8),
        data=DataConfig(name="test", channel="train", path="."),
        optim=OptimConfig(learning_rate=1e-2),
        precision=PrecisionConfig(name="fp32", param_dtype="float32"),
        checkpoint=CheckpointConfig(interval_steps=1),
    )
    return RecipeFile(recipe=recipe, layout=LayoutConfig(hosts=1, workers_per_host=1), recipe_hash="a" * 64)


def make_checkpointer(
    root: Path,
    *,
    world_size: int,
    storage: str = "shared",
    hosts: int = 1,
    keep_last: int = 2,
    run_id: str = "run",
    recipe: Any = None,
):
    from chimera_train.checkpoint import Checkpointer
    from chimera_train.config import CheckpointConfig, MlRoot, ParallelConfig, layout

    path = "fsx/{run_id}" if storage == "shared" else "checkpoints"
    return Checkpointer(
        CheckpointConfig(interval_steps=1, keep_last=keep_last, storage=storage, path=path),
        root=MlRoot(root),
        run_id=run_id,
        recipe=recipe or recipe_file(),
        layout=layout(ParallelConfig(), hosts=hosts, workers_per_host=world_size // hosts),
    )


class Odd:
    """Model, AdamW and data of a run whose every step draws from the random generators."""

    def __init__(self, *, sharded: bool, seed: int = 0, wrapped: bool = False):
        import torch
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(2)]
        if wrapped:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            blocks = [torch.compile(checkpoint_wrapper(block), backend="eager") for block in blocks]
        self.model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
        self.model.register_buffer("scale", torch.ones(3))
        if sharded:
            for block in self.model:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        import torch

        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    def state(self):
        from chimera_train.checkpoint import LoopState

        return LoopState(self.step, self.step * 32, self.step * 4, {"samples": self.step * 4})

    def digest(self) -> str:
        """Of all whole tensors of the model and the optimizer, under their plain names."""
        from tensors import whole

        from chimera_train.checkpoint.state import model_tensors, optimizer_tensors

        tensors = model_tensors(self.model)
        for state in optimizer_tensors(self.model, self.optimizer).values():
            tensors |= state
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + whole(tensors[name]).contiguous().numpy().tobytes())
        return digest.hexdigest()
