"""Expert parallel against one process: losses, gradients, norms, the routers' biases. The table is another's."""

from __future__ import annotations

import functools

import pytest
from spawn import run_distributed
from test_parity_layouts import Curve, Row, compare, run_rows

ROWS = [
    Row("experts 2", 2, model="moe of 4", parallel={"expert_parallel": 2}),
    Row("experts 2, full checkpointing", 2, model="moe of 4", parallel={"expert_parallel": 2},
        train={"activation_checkpointing": "full"}),
    Row("experts 2, selective checkpointing", 2, model="moe of 4", parallel={"expert_parallel": 2},
        train={"activation_checkpointing": "selective"}),
    Row("experts 2, tied, unequal tokens", 2, model="moe of 4, tied", masked=True, parallel={"expert_parallel": 2}),
    Row("experts 2, parameters kept, deferred sync", 2, model="moe of 4",
        parallel={"expert_parallel": 2, "reshard_after_forward": False, "defer_gradient_sync": True}),
    Row("experts 2, deepseek", 2, model="deepseek", steps=8, parallel={"expert_parallel": 2}),
    Row("experts 2, deepseek, full checkpointing", 2, model="deepseek", steps=8, parallel={"expert_parallel": 2},
        train={"activation_checkpointing": "full"}),
    Row("experts 2, compiled, selective checkpointing, bf16", 2, model="moe of 4", parallel={"expert_parallel": 2},
        train={"compile": True, "activation_checkpointing": "selective"}, param_dtype="bfloat16", tolerance=5e-2),
    Row("fsdp 2, deepseek", 2, model="deepseek", steps=8),
    Row("experts 2 x fsdp 2", 4, model="moe of 4", parallel={"expert_parallel": 2}),
    Row("experts 2 x fsdp 2, deepseek, selective checkpointing", 4, model="deepseek", steps=8,
        parallel={"expert_parallel": 2}, train={"activation_checkpointing": "selective"}),
    Row("experts 4, unequal tokens", 4, model="moe of 4", masked=True, parallel={"expert_parallel": 4}),
    Row("experts 4, deepseek", 4, model="deepseek", steps=8, parallel={"expert_parallel": 4}),
    Row("experts 2, replicas 2", 4, model="moe of 4", parallel={"expert_parallel": 2, "data_parallel": 2}),
    Row("experts 2, replicas 2, deepseek, deferred sync", 4, model="deepseek", steps=8,
        parallel={"expert_parallel": 2, "data_parallel": 2, "defer_gradient_sync": True}),
    Row("tensor 2 x fsdp 2, experts 4, deepseek, unequal tokens", 4, model="halves, deepseek", masked=True,
        parallel={"tensor_parallel": 2, "expert_parallel": 4}),
]  # fmt: skip


@functools.cache
def launched(ranks: int) -> list[dict[str, Curve]]:
    """Curves by row, of every rank."""
    return run_distributed(run_rows, ranks, [row for row in ROWS if row.ranks == ranks], timeout_s=240)


@pytest.mark.train
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_parity_of_expert_parallel(row: Row):
    compare(row, [curves[row.name] for curves in launched(row.ranks)])


@pytest.mark.train
def test_a_run_of_experts_is_the_same_bit_for_bit():
    row = next(row for row in ROWS if row.name == "experts 2, deepseek")
    again = run_distributed(run_rows, 2, [row])[0][row.name]
    before = launched(2)[0][row.name]
    assert (again.losses, again.norms) == (before.losses, before.norms)
