"""Weights gathered in 8 bits (`precision.float8_all_gather`): the same run as without it, bit for bit, in half the
bytes.

One launch a world size runs all its rows of the table, each with the setting and without.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from float8_run import DEEP, MODEL, Row, Run, run
from spawn import run_distributed

pytest.importorskip("torchao")

# Sizes that five ranks do not divide; the last of them has no row of the 16 of keys and values.
UNEVEN = replace(MODEL, num_kv_heads=1, num_layers=1)
MOE = replace(MODEL, num_experts=4, experts_per_token=2, router_aux_loss_coefficient=0.05)
PIPELINE = {"pipeline_parallel": 2, "fully_sharded": 2}
ROWS = [
    Row("fsdp 2", 2),
    Row("fsdp 2, parameters kept", 2, parallel={"reshard_after_forward": False}),
    Row("fsdp 2, deferred sync", 2, parallel={"defer_gradient_sync": True}),
    Row("fsdp 2, selective checkpointing", 2, train={"activation_checkpointing": "selective"}),
    Row("fsdp 2, full checkpointing, offloaded", 2,
        train={"activation_checkpointing": "full", "activation_offload": True}),
    Row("fsdp 2, compiled", 2, train={"compile": True}),
    Row("fsdp 2, compiled, selective checkpointing", 2,
        train={"compile": True, "activation_checkpointing": "selective"}),
    Row("fsdp 2, no master weights", 2, precision={"master_weights": False}),
    Row("fsdp 2, filtered", 2, precision={"float8_filter": ("feed_forward", "layers.1.")}),
    Row("fsdp 2, muon", 2, optim={"name": "muon"}),
    Row("fsdp 2, moe", 2, model=MOE),
    Row("fsdp 2, resumed", 2, resumed=True),
    Row("context 2", 2, parallel={"context_parallel": 2}),
    Row("hsdp 2x2", 4, parallel={"data_parallel": 2}),
    Row("hsdp 2x2, deferred sync, resumed", 4, resumed=True,
        parallel={"data_parallel": 2, "defer_gradient_sync": True}),
    Row("tensor 2, fsdp 2", 4, parallel={"tensor_parallel": 2}),
    Row("tensor 2, fsdp 2, compiled", 4, parallel={"tensor_parallel": 2}, train={"compile": True}),
    Row("tensor 2, fsdp 2, resumed", 4, parallel={"tensor_parallel": 2}, resumed=True),
    Row("1f1b, fsdp 2", 4, model=DEEP, parallel=PIPELINE | {"pipeline_schedule": "1f1b"}),
    Row("zbv, fsdp 2", 4, model=DEEP, parallel=PIPELINE | {"pipeline_schedule": "zbv"}),
    Row("uneven shards", 5, model=UNEVEN, batch=10),
]  # fmt: skip


def run_rows(rows: list[Row], folder: Path) -> dict[tuple[str, bool], Run]:
    found = {}
    for number, row in enumerate(rows):
        for gather in (False, True):
            found[row.name, gather] = run(row, folder / f"{number}-{gather}", gather=gather)
    return found


@functools.cache
def launched(ranks: int) -> list[dict[tuple[str, bool], Run]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(
            run_rows, ranks, [row for row in ROWS if row.ranks == ranks], Path(folder), timeout_s=280
        )


@pytest.mark.train
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_run_is_the_same_bit_for_bit(row: Row):
    for rank in launched(row.ranks):
        without, found = rank[row.name, False], rank[row.name, True]
        assert found.losses == without.losses
        assert found.norms == without.norms
        assert found.evaluated == without.evaluated
        for kind in ("grads", "weights"):
            for name, tensor in getattr(without, kind).items():
                assert torch.equal(getattr(found, kind)[name], tensor), f"{kind} of {name}"


@pytest.mark.train
def test_a_chosen_weight_travels_in_one_byte_an_element():
    hidden, keys, width = MODEL.hidden_size, MODEL.num_kv_heads * MODEL.value_dim, MODEL.intermediate_size
    layer = 2 * hidden * hidden + 2 * keys * hidden + 3 * width * hidden
    micro_batches, layers = 8 // 2, MODEL.num_layers
    gathers = {  # of a layer, in a step
        "fsdp 2": micro_batches * (2 * layers - 1),  # backward gathers again all but the last
        "fsdp 2, parameters kept": micro_batches * layers,
    }
    for name, times in gathers.items():
        without, found = (launched(2)[0][name, gather] for gather in (False, True))
        assert without.gathered_bytes - found.gathered_bytes == times * layer // 2, name
        assert found.all_reduces == without.all_reduces + 1, "of the scales of all weights, once a step"
