"""The rows of the parity table: which combinations of techniques are compared with one process.

Every feature is a column with a few values; a row picks one of each. Whether a row is legal is the recipe's own
validation, so what a user may run is what is compared. Continuous integration runs the pairwise table, in which any two
values that can stand together on four ranks do so in some row; the full one has every legal combination of the parallel
columns, on up to eight.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from chimera_train.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    TrainRecipe,
    batch_plan,
    layout,
)

GLOBAL_BATCH, SEQUENCE, STEPS = 8, 16, 2
MAX_RANKS = {"pairwise": 4, "full": 8}
DENSE = ModelConfig(
    name="dense", vocab_size=70, hidden_size=64, intermediate_size=72, num_layers=4, num_heads=8, num_kv_heads=4,
    initializer_range=0.1,
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tie_embeddings=True),
    # Sizes that neither ranks nor stages divide.
    "odd": replace(DENSE, vocab_size=74, num_layers=5, intermediate_size=54),
    "moe": replace(DENSE, intermediate_size=40, num_experts=4, experts_per_token=2, router_aux_loss_coefficient=0.05),
}
COLUMNS: dict[str, tuple[Any, ...]] = {
    # The parallel columns come first.
    "schedule": ("none", "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"),
    "sharding": ("none", "fsdp 2", "replicas 2", "hsdp 2x2"),
    "tensor": (1, 2),
    "context": ("none", "all_gather", "ulysses", "ring"),
    "expert": (1, 2),
    "model": tuple(MODELS),
    "micro_batch_size": (1, 2),
    "tokens": ("all", "uneven"),
    "checkpointing": ("none", "full", "selective"),
    "resume": ("none", "same layout", "one process"),
}
NUM_PARALLEL = 5
SHARDING = {"none": (1, 1), "fsdp 2": (1, 2), "replicas 2": (2, 1), "hsdp 2x2": (2, 2)}


@dataclass(frozen=True)
class Row:
    """One line of the table; a field a column."""

    schedule: str = "none"
    sharding: str = "none"
    tensor: int = 1
    context: str = "none"
    expert: int = 1
    model: str = "dense"
    micro_batch_size: int = 1
    tokens: str = "all"
    checkpointing: str = "none"
    resume: str = "none"

    @property
    def name(self) -> str:
        """What differs from the plain row."""
        parts = []
        for column, value in self.values():
            if value != COLUMNS[column][0]:
                parts.append(f"{column} {value}" if isinstance(value, int) else value)
        return ", ".join(parts) or "plain"

    def values(self) -> list[tuple[str, Any]]:
        return [(column, getattr(self, column)) for column in COLUMNS]

    @property
    def ranks(self) -> int:
        replicas, shards = SHARDING[self.sharding]
        pipeline, context = (1 if value == "none" else 2 for value in (self.schedule, self.context))
        return replicas * shards * self.tensor * pipeline * context

    def recipe(self) -> TrainRecipe:
        replicas, shards = SHARDING[self.sharding]
        parallel: dict[str, Any] = {}
        if self.schedule != "none":
            parallel |= {"pipeline_parallel": 2, "pipeline_schedule": self.schedule}
        if self.context != "none":
            parallel |= {"context_parallel": 2, "context_backend": self.context}
        return TrainRecipe(
            name="parity",
            model=MODELS[self.model],
            parallel=ParallelConfig(
                data_parallel=replicas,
                fully_sharded=shards,
                tensor_parallel=self.tensor,
                expert_parallel=self.expert,
                **parallel,
            ),
            train=TrainConfig(
                num_steps=STEPS,
                global_batch_size=GLOBAL_BATCH,
                micro_batch_size=self.micro_batch_size,
                sequence_length=SEQUENCE,
                activation_checkpointing=self.checkpointing,  # type: ignore[arg-type]
            ),
            data=DataConfig(name="none"),
            # With a small eps, Adam's first step has the size of the learning rate in the direction of the gradient's
            # sign, so that a gradient of nothing but rounding would move a weight by as much as any other.
            optim=OptimConfig(learning_rate=3e-3, warmup_steps=2, max_grad_norm=0.5, eps=1e-3),
            precision=PrecisionConfig(name="fp32", param_dtype="float32"),
            checkpoint=CheckpointConfig(interval_steps=0),
        )

    @functools.cached_property
    def refusal(self) -> str:
        """Why the recipe refuses the row; empty where it may run on as many ranks as it needs."""
        recipe = self.recipe()
        problems = recipe.validate()
        try:
            mesh = layout(recipe.parallel, hosts=1, workers_per_host=self.ranks)
            batch_plan(recipe.train, mesh)
        except ConfigError as error:
            problems = [*problems, *error.problems]
        return "; ".join(f"{problem.key}: {problem.message}" for problem in problems)


def pairwise(seed: int = 0) -> list[Row]:
    """Legal rows in which every pair of values that is legal together occurs; the same list every time."""
    rng = random.Random(seed)
    uncovered = {frozenset(pair) for pair in _pairs()}
    rows = []
    while uncovered:
        start = min(uncovered, key=lambda pair: sorted(map(str, pair)))
        candidates = _completions(dict(start), rng, MAX_RANKS["pairwise"])
        best = max(candidates, key=lambda row: (len(_new(row, uncovered)), str(row)), default=None)
        if best is None:  # no legal row has this pair
            uncovered.remove(start)
            continue
        rows.append(best)
        uncovered -= _new(best, uncovered)
    return rows


def full(seed: int = 0) -> list[Row]:
    """The pairwise rows, and every legal combination of the parallel columns with the others drawn at random."""
    rng = random.Random(seed)
    names, rows = list(COLUMNS), pairwise(seed)
    there = {_parallel_part(row) for row in rows}
    for choice in itertools.product(*list(COLUMNS.values())[:NUM_PARALLEL]):
        if choice not in there:
            rows += list(_completions(dict(zip(names, choice, strict=False)), rng, MAX_RANKS["full"]))[:1]
    return rows


def _parallel_part(row: Row) -> tuple[Any, ...]:
    return tuple(value for _, value in row.values()[:NUM_PARALLEL])


def _pairs() -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    for one, other in itertools.combinations(COLUMNS, 2):
        for first, second in itertools.product(COLUMNS[one], COLUMNS[other]):
            yield (one, first), (other, second)


def _new(row: Row, uncovered: set[frozenset[Any]]) -> set[frozenset[Any]]:
    return {frozenset(pair) for pair in itertools.combinations(row.values(), 2)} & uncovered


def _completions(fixed: dict[str, Any], rng: random.Random, max_ranks: int, tries: int = 100) -> Iterator[Row]:
    """Legal rows with these values; every second try leaves the other columns plain but for two, so that a pair which
    few others can stand with is found too."""
    for attempt in range(tries):
        chosen = {column: rng.choice(values) for column, values in COLUMNS.items()}
        if attempt % 2 == 0:
            kept = rng.sample(list(COLUMNS), 2)
            chosen = {c: v if c in kept else COLUMNS[c][0] for c, v in chosen.items()}
        row = Row(**(chosen | fixed))
        if row.ranks <= max_ranks and not row.refusal:
            yield row
