"""Context parallel against one process: its three ways of attention, alone and with the other axes."""

import functools

import pytest
from spawn import run_distributed
from test_parity_layouts import Row, compare, run_rows

AXES = {
    2: {"context_parallel": 2},
    4: {"context_parallel": 4},
}
ROWS = [
    Row("all-gather 2", 2, parallel=AXES[2]),
    Row("all-gather 2, tied, unequal tokens, no accumulation", 2, model="tied", masked=True, micro_batch_size=8,
        parallel=AXES[2]),
    Row("all-gather 2, window, selective checkpointing", 2, model="window", parallel=AXES[2],
        train={"activation_checkpointing": "selective"}),
    Row("all-gather 2, full checkpointing, compiled", 2, parallel=AXES[2],
        train={"activation_checkpointing": "full", "compile": True}),
    Row("all-gather 2, bf16", 2, parallel=AXES[2], param_dtype="bfloat16", tolerance=3e-2),
    Row("ulysses 2, unequal tokens", 2, masked=True, parallel={**AXES[2], "context_backend": "ulysses"}),
    Row("ulysses 2, window, compiled, selective checkpointing", 2, model="window",
        parallel={**AXES[2], "context_backend": "ulysses"},
        train={"activation_checkpointing": "selective", "compile": True}),
    Row("all-gather 2, documents", 2, documents=True, masked=True, micro_batch_size=4, parallel=AXES[2]),
    Row("all-gather 2, documents, compiled, selective checkpointing", 2, documents=True, micro_batch_size=8,
        parallel=AXES[2], train={"compile": True, "activation_checkpointing": "selective"}),
    Row("ulysses 2, documents", 2, documents=True, micro_batch_size=2,
        parallel={**AXES[2], "context_backend": "ulysses"}),
    Row("ring 2, unequal tokens", 2, masked=True, parallel={**AXES[2], "context_backend": "ring"}),
    Row("ring 2, compiled, selective checkpointing", 2, parallel={**AXES[2], "context_backend": "ring"},
        train={"activation_checkpointing": "selective", "compile": True}),
    Row("ring 2, bf16", 2, parallel={**AXES[2], "context_backend": "ring"}, param_dtype="bfloat16", tolerance=3e-2),
    Row("all-gather 4, unequal tokens", 4, masked=True, parallel=AXES[4]),
    Row("all-gather 4, documents", 4, documents=True, micro_batch_size=8, parallel=AXES[4]),
    Row("all-gather 2, latent attention", 2, model="halves, latent attention", parallel=AXES[2]),
    Row("ulysses 2, latent attention", 2, model="halves, latent attention",
        parallel={**AXES[2], "context_backend": "ulysses"}),
    Row("ring 2, latent attention", 2, model="halves, latent attention",
        parallel={**AXES[2], "context_backend": "ring"}),
    Row("all-gather 2, moe, unequal tokens", 2, model="moe", masked=True, parallel=AXES[2]),
    Row("ring 2 × experts 2 × fsdp 2, unequal tokens", 4, model="moe of 4", masked=True,
        parallel={**AXES[2], "context_backend": "ring", "expert_parallel": 2}),
    Row("ring 4, full checkpointing", 4, parallel={**AXES[4], "context_backend": "ring"},
        train={"activation_checkpointing": "full"}),
    Row("fsdp 2 × all-gather 2, unequal tokens", 4, masked=True, parallel=AXES[2]),
    Row("replicas 2 × ulysses 2, tied", 4, model="tied",
        parallel={**AXES[2], "context_backend": "ulysses", "data_parallel": 2}),
    Row("fsdp 2 × ring 2, deferred sync", 4,
        parallel={**AXES[2], "context_backend": "ring", "defer_gradient_sync": True}),
    Row("pipeline 2 × all-gather 2, unequal tokens", 4, masked=True, parallel={**AXES[2], "pipeline_parallel": 2}),
    Row("all-gather 2 × tensor 2, unequal tokens", 4, model="halves", masked=True,
        parallel={**AXES[2], "tensor_parallel": 2}),
    Row("ring 2 × tensor 2", 4, model="halves", parallel={**AXES[2], "tensor_parallel": 2, "context_backend": "ring"}),
]  # fmt: skip


@functools.cache
def launched(ranks: int):
    return run_distributed(run_rows, ranks, [row for row in ROWS if row.ranks == ranks], timeout_s=300)


@pytest.mark.train
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_parity(row: Row):
    compare(row, [curves[row.name] for curves in launched(row.ranks)])
