"""Tensor parallel against one process: losses, gradients, norms, initial weights. The table is another's."""

from __future__ import annotations

import functools

import pytest
from spawn import run_distributed
from test_parity_layouts import Curve, Row, compare, run_rows

TENSOR = {"tensor_parallel": 2}
ROWS = [
    Row("tensor 2, 50 steps", 2, model="halves", steps=50, parallel=TENSOR),
    Row("tensor 2, tied", 2, model="halves, tied", micro_batch_size=2, parallel=TENSOR),
    Row("tensor 2, unequal tokens, chunked loss", 2, model="halves", masked=True, micro_batch_size=2, parallel=TENSOR,
        train={"loss_chunk_tokens": 7}),
    Row("tensor 2, full checkpointing", 2, model="halves", parallel=TENSOR, train={"activation_checkpointing": "full"}),
    Row("tensor 2, selective checkpointing", 2, model="halves", parallel=TENSOR,
        train={"activation_checkpointing": "selective"}),
    Row("tensor 2, compiled", 2, model="halves", micro_batch_size=2, parallel=TENSOR, train={"compile": True}),
    Row("tensor 2, compiled, selective checkpointing", 2, model="halves", parallel=TENSOR,
        train={"compile": True, "activation_checkpointing": "selective"}),
    Row("tensor 2, biases and qk-norm", 2, model="halves, biases and qk-norm", parallel=TENSOR),
    Row("tensor 2, latent attention", 2, model="halves, latent attention", parallel=TENSOR),
    Row("tensor 2, bf16", 2, model="halves", param_dtype="bfloat16", tolerance=3e-2, parallel=TENSOR),
    Row("fsdp 2, tensor 2, 50 steps", 4, model="halves", steps=50, parallel=TENSOR),
    Row("fsdp 2, tensor 2, tied, unequal tokens", 4, model="halves, tied", masked=True, parallel=TENSOR),
    Row("fsdp 2, tensor 2, deferred sync", 4, model="halves", parallel={**TENSOR, "defer_gradient_sync": True}),
    Row("replicas 2, tensor 2", 4, model="halves", parallel={**TENSOR, "data_parallel": 2}),
    Row("tensor 2, moe", 2, model="halves, moe of 4", parallel=TENSOR),
    Row("tensor 2, moe, experts 2, selective checkpointing", 2, model="halves, moe of 4", masked=True, steps=1,
        parallel={**TENSOR, "expert_parallel": 2}, train={"activation_checkpointing": "selective"}),
    Row("fsdp 2, tensor 2, deepseek, experts 2", 4, model="halves, deepseek", steps=8,
        parallel={**TENSOR, "expert_parallel": 2}),
    Row("fsdp 2, tensor 2, moe", 4, model="halves, moe of 4", parallel=TENSOR),
]  # fmt: skip


@functools.cache
def launched(ranks: int) -> list[dict[str, Curve]]:
    """Curves by row, of every rank."""
    return run_distributed(run_rows, ranks, [row for row in ROWS if row.ranks == ranks], timeout_s=240)


@pytest.mark.train
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_parity_of_tensor_parallel(row: Row):
    compare(row, [curves[row.name] for curves in launched(row.ranks)])
