"""Expert parallel against one process: losses, gradients, norms, the routers' biases. The table is another's."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from spawn import run_distributed
from test_parity_layouts import MODELS, Curve, Row, compare, run_rows
from torch import Tensor, nn

from chimera_train.model.moe import MixtureOfExperts
from chimera_train.parallel.expert import AllToAllDispatch

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
    # The first stage has no experts, and still takes part in making their mesh.
    Row("pipeline 2, experts 2, deepseek", 4, model="deepseek", steps=8,
        parallel={"pipeline_parallel": 2, "expert_parallel": 2}),
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


def one_sided(split: bool) -> tuple[Tensor, ...]:
    """Output and gradients of a mixture whose router sends all tokens to the experts of rank 0, whole on every rank."""
    layer = MixtureOfExperts(MODELS["moe of 4"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.1, generator=generator)
        layer.router.weight[:2, 0], layer.router.weight[2:, 0] = 100.0, -100.0
        if split:
            layer.dispatch = AllToAllDispatch(dist.group.WORLD)
            for name, weight in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, nn.Parameter(weight.chunk(2)[dist.get_rank()].clone()))
    x_BSD = torch.randn(1, 6, 48, generator=generator)
    x_BSD[..., 0] = 1.0
    out_BSD = layer(x_BSD.requires_grad_(), None)
    out_BSD.square().sum().backward()
    grads = [parameter.grad for parameter in layer.experts.parameters()]
    if split:
        parts = [[torch.empty_like(grad) for _ in range(2)] for grad in grads]
        for whole, grad in zip(parts, grads, strict=True):
            dist.all_gather(whole, grad)
        grads = [torch.cat(whole) for whole in parts]
    return out_BSD.detach(), x_BSD.grad, layer.router.weight.grad, *grads


@pytest.mark.train
def test_a_rank_that_gets_no_token_is_no_special_case():
    expected = one_sided(split=False)
    assert (expected[3].chunk(2)[1] == 0).all(), "the last experts were to get none"
    for rank in run_distributed(one_sided, 2, True):
        for index, (ours, theirs) in enumerate(zip(rank, expected, strict=True)):
            # Both ranks have the same tokens, so that experts get everything twice.
            torch.testing.assert_close(ours, theirs * (2 if index >= 3 else 1))
