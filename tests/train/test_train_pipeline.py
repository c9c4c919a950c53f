"""Pipelines in train.py: a run that changes its pipeline, and a rank that fails in the middle of one."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from spawn import run_ranks
from test_parity_layouts import Row, global_batch, parallelized, recipe_of
from test_parity_train import check_other_layouts, recipe_file, root  # noqa: F401 root is a fixture

from chimera_train.config import layout
from chimera_train.model import initialize
from chimera_train.parallel import Pipeline
from chimera_train.step import forward_backward

pytestmark = pytest.mark.train
TIED = {"name": "t", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 5, "num_heads": 4}
TIED |= {"num_kv_heads": 2, "tie_embeddings": True}


def test_a_run_goes_on_with_another_pipeline(root):  # noqa: F811
    one = recipe_file(model=TIED)
    v_shaped = recipe_file(workers=2, model=TIED, parallel={"pipeline_parallel": 2, "pipeline_schedule": "zbv"})
    plain = recipe_file(workers=2, model=TIED, parallel={"pipeline_parallel": 2}, checkpoint={"export_at_end": True})
    check_other_layouts(root, v_shaped, one, plain)


def fail_in_a_stage(rank: int, schedule: str) -> None:
    recipe = recipe_of(Row("", 3, model="deep", parallel={"pipeline_parallel": 3, "pipeline_schedule": schedule}))
    model, _ = parallelized(recipe, layout(recipe.parallel, hosts=1, workers_per_host=3))
    initialize(model, seed=0)
    if rank == 1:
        passes = iter(range(100))

        def third_time(*_):
            if next(passes) == 2:
                raise ValueError("planted")

        next(iter(model.layers.values())).register_forward_pre_hook(third_time)
    forward_backward(model, recipe, np.split(global_batch(1, masked=False)[:6], 6), torch.device("cpu"))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_stage_that_fails_fails_every_rank_at_once(schedule):
    started = time.monotonic()
    results = run_ranks(3, fail_in_a_stage, schedule)
    assert time.monotonic() - started < 45
    assert "[Stage 1] failed to run forward" in results[1][1], results
    for other in (results[0], results[2]):
        assert other[0] == "RuntimeError", results
        assert "onnection" in other[1] or "gloo" in other[1], results


def rows_of(rank: int, schedule: str) -> tuple[list[float], list[float], bool]:
    """Forward only, forward and backward; and whether the first has left a gradient."""
    parallel = {"pipeline_parallel": 2, "pipeline_schedule": schedule}
    recipe = recipe_of(Row("", 2, model="deep tied", parallel=parallel))
    model, _ = parallelized(recipe, layout(recipe.parallel, hosts=1, workers_per_host=2))
    assert isinstance(model, Pipeline)
    initialize(model, seed=0)
    tokens = torch.from_numpy(global_batch(1, masked=True))
    inputs, labels = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
    alone = model.forward_only(inputs, labels, num_micro_batches=4)
    left = any(parameter.grad is not None for parameter in model.parameters())
    trained = model.forward_backward(inputs, labels, num_micro_batches=4)
    again = model.forward_only(inputs, labels, num_micro_batches=8)
    torch.testing.assert_close(again, alone)
    return alone.tolist(), trained.tolist(), left


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_forward_only_gives_the_same_losses_in_the_same_order_and_no_gradient(schedule):
    ranks = run_ranks(2, rows_of, schedule)
    alone = [sum(values) for values in zip(*(rank[0] for rank in ranks), strict=True)]
    trained = [sum(values) for values in zip(*(rank[1] for rank in ranks), strict=True)]
    assert alone == pytest.approx(trained, rel=1e-6)
    assert all(before > after for before, after in itertools.pairwise(alone)), "fewer tokens, row by row"
    assert not any(rank[2] for rank in ranks)
