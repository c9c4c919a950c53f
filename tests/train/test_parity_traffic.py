"""What a step sends: gradient accumulation and resharding without a collective more than they need."""

from collections import Counter

import numpy as np
import pytest
import torch
from spawn import run_distributed
from test_parity_layouts import Row, global_batch, parallelized, recipe_of
from torch.utils._python_dispatch import TorchDispatchMode

from chimera_train.config import layout
from chimera_train.model import Decoder, initialize
from chimera_train.parallel import Meshes, parallelize
from chimera_train.step import finish_gradients, forward_backward

GROUPS = 2 + 3  # blocks; embedding, head, and the root with the last norm
MICRO_BATCHES = 2
GATHERS = GROUPS + 1  # backward gathers again all blocks but the last, and nothing else
EXPECTED = {
    # name: all-gathers, reduce-scatters and all-reduces of a step, the loop's own single all-reduce apart
    "fsdp": (GATHERS * MICRO_BATCHES, GROUPS * MICRO_BATCHES, 0),
    "deferred": (GATHERS * MICRO_BATCHES, GROUPS, 0),
    "parameters kept": (GROUPS * MICRO_BATCHES, GROUPS * MICRO_BATCHES, 0),
    "hsdp": (GATHERS * MICRO_BATCHES, GROUPS * MICRO_BATCHES, GROUPS),
    "hsdp deferred": (GATHERS * MICRO_BATCHES, GROUPS, GROUPS),
}
PARALLEL = {
    "fsdp": {},
    "deferred": {"defer_gradient_sync": True},
    "parameters kept": {"reshard_after_forward": False},
    "hsdp": {"data_parallel": 2},
    "hsdp deferred": {"data_parallel": 2, "defer_gradient_sync": True},
}


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in func._schema.name:
            self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def count() -> dict[str, tuple[Counter, Counter]]:
    rank, found = torch.distributed.get_rank(), {}
    for name, parallel in PARALLEL.items():
        recipe = recipe_of(Row(name, 4, parallel=parallel))
        mesh_layout = layout(recipe.parallel, hosts=1, workers_per_host=4)
        model = Decoder(recipe.model)
        initialize(model, 0)
        meshes = Meshes(mesh_layout, "cpu")
        parallelize(model, recipe, meshes)
        micro_batches = np.split(global_batch(1, False)[2 * rank : 2 * rank + 2], MICRO_BATCHES)
        for _ in range(2):  # the second is like every one after it
            with Collectives() as computing:
                sums = forward_backward(model, recipe, micro_batches, torch.device("cpu"))
            with Collectives() as finishing:
                finish_gradients(model, recipe.optim, sums, meshes, step=1)
            model.zero_grad()
        found[name] = (computing.counts, finishing.counts)
    return found


@pytest.fixture(scope="module")
def counted():
    return run_distributed(count, 4)[0]


@pytest.mark.train
@pytest.mark.parametrize("name", EXPECTED)
def test_collectives_of_a_step(counted, name):
    computing, finishing = counted[name]
    seen = tuple(computing[op] for op in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"))
    assert seen == EXPECTED[name], computing
    assert sum(computing.values()) == sum(seen), computing
    assert finishing == {"allreduce_": 1}


BLOCKS, BORDERS = 2, 4  # of two blocks: into attention and feed-forward, and out of them
TENSOR_EXPECTED = {
    # Gathers and scatters. Forward: one at every border, a gather before the head and one of the loss's normalizers, a
    # scatter after the embedding. Backward: the opposite of each but the normalizers'.
    "none": (2 * BORDERS + 3, 2 * BORDERS + 2),
    # The repetition gathers again what was not kept,
    "selective": (2 * BORDERS + 3 + BORDERS, 2 * BORDERS + 2),
    # and scatters after attention; it ends before the scatter after the feed-forward, which nothing in backward reads.
    "full": (2 * BORDERS + 3 + BORDERS, 2 * BORDERS + 2 + BLOCKS),
}


def count_tensor() -> dict[str, tuple[Counter, Counter]]:
    found = {}
    for mode in TENSOR_EXPECTED:
        row = Row(mode, 2, "halves", parallel={"tensor_parallel": 2}, train={"activation_checkpointing": mode})
        recipe = recipe_of(row)
        model, meshes = parallelized(recipe, layout(recipe.parallel, hosts=1, workers_per_host=2))
        initialize(model, 0)
        with Collectives() as computing:
            sums = forward_backward(model, recipe, [global_batch(1, False)], torch.device("cpu"))
        with Collectives() as finishing:
            finish_gradients(model, recipe.optim, sums, meshes, step=1)
        found[mode] = (computing.counts, finishing.counts)
    return found


@pytest.mark.train
def test_collectives_of_a_step_with_tensor_parallel():
    for mode, (computing, finishing) in run_distributed(count_tensor, 2)[0].items():
        gathers, scatters = TENSOR_EXPECTED[mode]
        assert computing == {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": scatters}, mode
        assert finishing == {"allreduce_": 2}, "what is not split is completed at once; then all that ranks agree on"
