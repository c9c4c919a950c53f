"""Pipelines against one process: every schedule, on its own and with FSDP, replicas, experts, tied embeddings."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from spawn import run_distributed
from test_parity_layouts import Curve, Row, compare, run_rows

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")


SPLIT_BACKWARD = SCHEDULES[3:]


def row(name: str, ranks: int, schedule: str, **changes: Any) -> Row:
    degree = changes.pop("degree", 2)
    parallel = {"pipeline_parallel": degree, "pipeline_schedule": schedule} | changes.pop("parallel", {})
    name = ", ".join(part for part in (f"pipeline {degree}", schedule, name) if part)
    return Row(name, ranks, **{"model": "deep", "steps": 3, "parallel": parallel} | changes)


FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
HYBRID = {"data_parallel": 2}
ROWS = [
    *(row("unequal tokens", 2, schedule, masked=True) for schedule in SCHEDULES),
    *(row("tied", 2, schedule, model="deep tied") for schedule in ("1f1b", "interleaved_1f1b", "zbv")),
    *(row("moe", 2, schedule, model="deep moe") for schedule in ("1f1b", "interleaved_zero_bubble", "dualpipev")),
    *(row("deepseek", 2, schedule, model="deep deepseek") for schedule in ("interleaved_1f1b", "zbv")),
    row("deepseek, full checkpointing", 2, "interleaved_zero_bubble", model="deep deepseek", train=FULL),
    *(row("full checkpointing", 2, schedule, train=FULL) for schedule in ("1f1b", *SPLIT_BACKWARD)),
    row("selective checkpointing", 2, "interleaved_1f1b", train=SELECTIVE),
    row("compiled, selective checkpointing", 2, "1f1b", train=SELECTIVE | {"compile": True}),
    row("parameters freed after forward", 2, "1f1b", parallel={"reshard_after_forward": True}),
    row("chunked loss", 2, "zbv", micro_batch_size=2, train={"loss_chunk_tokens": 7}),
    row("three stages a rank", 2, "interleaved_1f1b", parallel={"stages_per_rank": 3}),
    row("four stages a rank", 2, "interleaved_zero_bubble", parallel={"stages_per_rank": 4}),
    *(row("bf16", 2, schedule, param_dtype="bfloat16", tolerance=5e-2) for schedule in ("1f1b", "zbv")),
    *(row("fsdp 2, unequal tokens", 4, schedule, masked=True) for schedule in SCHEDULES),
    *(row("fsdp 2, tied", 4, schedule, model="deep tied") for schedule in ("1f1b", "dualpipev")),
    *(row("fsdp 2, moe", 4, schedule, model="deep moe") for schedule in ("1f1b", "zbv")),
    *(
        row("tensor 2, tied", 4, schedule, model="deep even tied", parallel={"tensor_parallel": 2})
        for schedule in ("1f1b", "zbv")
    ),
    row("replicas 2", 4, "interleaved_1f1b", parallel=HYBRID | {"fully_sharded": 1}),
    *(row("", 4, schedule, degree=4) for schedule in ("1f1b", "interleaved_1f1b", "zbv")),
    row("tied", 4, "interleaved_zero_bubble", degree=4, model="deep tied"),
    *(row("hsdp 2x2, tied", 8, schedule, model="deep tied", parallel=HYBRID) for schedule in ("1f1b", "zbv")),
]


@functools.cache
def launched(ranks: int) -> list[dict[str, Curve]]:
    return run_distributed(run_rows, ranks, [row for row in ROWS if row.ranks == ranks], timeout_s=240)


@pytest.mark.train
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_parity(row: Row):
    compare(row, [curves[row.name] for curves in launched(row.ranks)])
