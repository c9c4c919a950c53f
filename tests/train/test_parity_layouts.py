"""Every way to compute a step against one process without any parallelism: losses, gradients, norms, initial weights.

A table: a row is a name, ranks, and what differs from the plain recipe. One launch a world size runs all its rows, and
pytest still reports each.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spawn import run_distributed
from tensors import whole

from chimera_train.config import (
    CheckpointConfig,
    DataConfig,
    LatentAttention,
    MeshLayout,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    TrainRecipe,
    batch_plan,
    layout,
)
from chimera_train.loss import IGNORE_INDEX
from chimera_train.model import Decoder, initialize
from chimera_train.model.moe import MixtureOfExperts
from chimera_train.optim import build_optimizer, learning_rate, set_learning_rate
from chimera_train.parallel import Meshes, Pipeline, RouterBias, build_model
from chimera_train.step import finish_gradients, forward_backward

GLOBAL_BATCH, SEQUENCE, VOCAB = 8, 16, 67  # 67 rows do not divide over any number of ranks
DENSE = ModelConfig(
    name="dense", vocab_size=VOCAB, hidden_size=48, intermediate_size=56, num_layers=2, num_heads=6, num_kv_heads=2,
    initializer_range=0.1,
)  # fmt: skip
HALVES = replace(DENSE, vocab_size=70, intermediate_size=58)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tie_embeddings=True),
    # Tensor parallel halves their sizes. Halves of vocabulary and feed-forward are odd, so their shards are uneven.
    "halves": HALVES,
    "halves, tied": replace(HALVES, tie_embeddings=True),
    "halves, biases and qk-norm": replace(HALVES, attention_bias=True, qk_norm=True),
    "halves, latent attention": replace(
        HALVES,
        latent_attention=LatentAttention(
            q_lora_rank=10, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=7
        ),
    ),
    "window": replace(DENSE, sliding_window=5),
    # Three experts: with four ranks, one holds no row of the router.
    "moe": replace(DENSE, num_experts=3, experts_per_token=2, router_aux_loss_coefficient=0.05),
    "moe of 4": replace(DENSE, num_experts=4, experts_per_token=2, router_aux_loss_coefficient=0.05),
    "moe of 4, tied": replace(
        DENSE, num_experts=4, experts_per_token=2, router_aux_loss_coefficient=0.05, tie_embeddings=True
    ),
    # As DeepSeek-V3.
    "deepseek": replace(
        DENSE,
        num_experts=8,
        experts_per_token=3,
        expert_intermediate_size=24,
        num_shared_experts=2,
        num_dense_layers=1,
        router_scoring="sigmoid",
        routed_scaling_factor=1.5,
        router_aux_loss_coefficient=0.01,
        router_bias_update_speed=0.02,
    ),
    # Layers for the stages of pipelines, in unequal numbers.
    "deep": replace(DENSE, num_layers=9),
    "deep tied": replace(DENSE, num_layers=9, tie_embeddings=True),
    "deep even tied": replace(DENSE, num_layers=9, tie_embeddings=True, vocab_size=VOCAB + 1),
    "deep moe": replace(DENSE, num_layers=5, num_experts=3, experts_per_token=2, router_aux_loss_coefficient=0.05),
}
MODELS["deep deepseek"] = replace(MODELS["deepseek"], num_layers=5)
MODELS |= {f"halves, {name}": replace(MODELS[name], vocab_size=HALVES.vocab_size) for name in ("moe of 4", "deepseek")}


@dataclass(frozen=True)
class Row:
    name: str
    ranks: int
    model: str = "dense"
    steps: int = 4
    micro_batch_size: int = 1
    masked: bool = False
    """Labels left out, unequally over the sequences."""
    documents: bool = False
    """Attention inside documents only."""
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    param_dtype: str = "float32"
    tolerance: float = 1e-5


ROWS = [
    Row("one process, 50 steps", 1, steps=50, micro_batch_size=2),
    Row("one process, whole batch", 1, micro_batch_size=8),
    Row("one process, unequal tokens", 1, masked=True, micro_batch_size=2),
    Row("one process, bf16", 1, param_dtype="bfloat16", tolerance=3e-2),
    Row("one process, window", 1, model="window", micro_batch_size=4),
    Row("one process, documents", 1, documents=True, masked=True, micro_batch_size=4),
    Row("fsdp 2, 50 steps", 2, steps=50),
    Row("fsdp 2, no accumulation", 2, micro_batch_size=4),
    Row("fsdp 2, deferred sync", 2, parallel={"defer_gradient_sync": True}),
    Row("fsdp 2, parameters kept", 2, parallel={"reshard_after_forward": False}),
    Row("fsdp 2, full checkpointing", 2, train={"activation_checkpointing": "full"}),
    Row("fsdp 2, selective checkpointing", 2, train={"activation_checkpointing": "selective"}),
    Row("fsdp 2, every second block checkpointed", 2,
        train={"activation_checkpointing": "full", "activation_checkpointing_every": 2}),
    Row("fsdp 2, full checkpointing, offloaded", 2,
        train={"activation_checkpointing": "full", "activation_offload": True}),
    Row("fsdp 2, compiled, memory budget, offloaded", 2,
        train={"compile": True, "activation_memory_budget": 0.3, "activation_offload": True}),
    Row("fsdp 2, chunked loss", 2, micro_batch_size=2, train={"loss_chunk_tokens": 7}),
    Row("fsdp 2, tied", 2, model="tied"),
    Row("fsdp 2, tied, deferred sync, chunked", 2, model="tied", parallel={"defer_gradient_sync": True},
        train={"loss_chunk_tokens": 5}),
    Row("fsdp 2, moe", 2, model="moe"),
    Row("fsdp 2, moe, selective checkpointing", 2, model="moe", train={"activation_checkpointing": "selective"}),
    Row("fsdp 2, moe, full checkpointing", 2, model="moe", train={"activation_checkpointing": "full"}),
    Row("fsdp 2, unequal tokens", 2, masked=True),
    Row("fsdp 2, bf16", 2, param_dtype="bfloat16", tolerance=3e-2),
    Row("fsdp 2, compiled", 2, train={"compile": True}),
    Row("fsdp 2, compiled, selective checkpointing", 2,
        train={"compile": True, "activation_checkpointing": "selective"}),
    Row("fsdp 2, compiled, full checkpointing", 2, train={"compile": True, "activation_checkpointing": "full"}),
    Row("fsdp 2, moe, compiled, selective checkpointing, bf16", 2, model="moe", param_dtype="bfloat16", tolerance=5e-2,
        train={"compile": True, "activation_checkpointing": "selective"}),
    Row("replicas 2", 2, parallel={"data_parallel": 2, "fully_sharded": 1}),
    Row("fsdp 4, 50 steps", 4, steps=50),
    Row("fsdp 4, tied", 4, model="tied", micro_batch_size=2),
    Row("fsdp 4, moe", 4, model="moe"),
    Row("fsdp 4, unequal tokens", 4, masked=True),
    Row("hsdp 2x2, 50 steps", 4, steps=50, parallel={"data_parallel": 2}),
    Row("hsdp 2x2, no accumulation", 4, micro_batch_size=2, parallel={"data_parallel": 2}),
    Row("hsdp 2x2, deferred sync", 4, parallel={"data_parallel": 2, "defer_gradient_sync": True}),
    Row("hsdp 2x2, tied, unequal tokens", 4, model="tied", masked=True, parallel={"data_parallel": 2}),
    Row("hsdp 2x2, moe, bf16", 4, model="moe", parallel={"data_parallel": 2}, param_dtype="bfloat16", tolerance=5e-2),
]  # fmt: skip


def recipe_of(row: Row) -> TrainRecipe:
    return TrainRecipe(
        name="parity",
        model=MODELS[row.model],
        parallel=ParallelConfig(**row.parallel),
        train=TrainConfig(
            num_steps=row.steps,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=row.micro_batch_size,
            sequence_length=SEQUENCE,
            **row.train,
        ),
        data=DataConfig(name="none", separate_documents=row.documents),
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=2, max_grad_norm=0.5),
        precision=PrecisionConfig(name="p", param_dtype=row.param_dtype),
        checkpoint=CheckpointConfig(interval_steps=0),
    )


END_OF_DOCUMENT = 2


def global_batch(step: int, masked: bool, documents: bool = False) -> np.ndarray:
    """Int64 [GLOBAL_BATCH, SEQUENCE + 1] that can be learned: each token follows from the one before."""
    random = np.random.default_rng(step)
    tokens = np.empty((GLOBAL_BATCH, SEQUENCE + 1), dtype=np.int64)
    tokens[:, 0] = random.integers(0, VOCAB, GLOBAL_BATCH)
    for position in range(SEQUENCE):
        tokens[:, position + 1] = (tokens[:, position] * 3 + random.integers(0, 2, GLOBAL_BATCH)) % VOCAB
    if documents:  # of 1 to 16 tokens, one to three in a sequence
        for sequence in range(GLOBAL_BATCH):
            tokens[sequence, [sequence, (3 * sequence + 5) % SEQUENCE]] = END_OF_DOCUMENT
    if masked:
        for sequence in range(GLOBAL_BATCH):
            tokens[sequence, SEQUENCE + 1 - 2 * sequence :] = IGNORE_INDEX
    return tokens


@dataclass
class Curve:
    initial: dict[str, torch.Tensor]
    """Of the parameters that this rank has a part of."""
    losses: list[float]
    norms: list[float]
    grads: dict[str, torch.Tensor]
    """Of the first step, after clipping."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the last step."""


def parallelized(recipe: TrainRecipe, mesh_layout: MeshLayout) -> tuple[Decoder | Pipeline, Meshes]:
    """On every rank of a process group: its part of the model, with storage but without values."""
    meshes = Meshes(mesh_layout, "cpu")
    return build_model(recipe, meshes, torch.device("cpu"), compile_backend="aot_eager"), meshes


def run_row(row: Row) -> Curve:
    """On every rank of a process group."""
    recipe = recipe_of(row)
    mesh_layout = layout(recipe.parallel, hosts=1, workers_per_host=torch.distributed.get_world_size())
    data_rank = mesh_layout.data_rank(torch.distributed.get_rank())
    plan = batch_plan(recipe.train, mesh_layout)
    model, meshes = parallelized(recipe, mesh_layout)
    if row.documents:
        model.sequence.end_of_document = END_OF_DOCUMENT
    initialize(model, recipe.train.seed)
    optimizer = build_optimizer(model, recipe, meshes)
    router_bias = RouterBias(model, recipe.model, meshes)
    curve = Curve({n: whole(p) for n, p in model.named_parameters()}, [], [], {})
    share = GLOBAL_BATCH // plan.data_parallel_size
    for step in range(1, row.steps + 1):
        mine = global_batch(step, row.masked, row.documents)[data_rank * share : (data_rank + 1) * share]
        micro_batches = np.split(mine, plan.accumulation_steps)
        sums = forward_backward(model, recipe, micro_batches, torch.device("cpu"))
        result = finish_gradients(model, recipe.optim, sums, meshes, step=step)
        if step == 1:
            curve.grads = {n: whole(p.grad) for n, p in model.named_parameters()}
        set_learning_rate(optimizer, learning_rate(step, recipe.optim, row.steps))
        optimizer.step()
        router_bias.step()
        optimizer.zero_grad()
        curve.losses.append(result.loss)
        curve.norms.append(result.grad_norm)
    curve.buffers = {n: b.clone() for n, b in model.named_buffers()}
    return curve


def run_rows(rows: list[Row]) -> dict[str, Curve]:
    curves = {}
    for row in rows:
        torch.compiler.reset()
        curves[row.name] = run_row(row)
    return curves


@functools.cache
def launched(ranks: int) -> list[dict[str, Curve]]:
    """Curves by row, of every rank."""
    return run_distributed(run_rows, ranks, [row for row in ROWS if row.ranks == ranks], timeout_s=240)


def texts(sequence: torch.Tensor, documents: bool) -> list[torch.Tensor]:
    """The sequence, or its documents, each with the label of its last token."""
    ends = (sequence[:-1] == END_OF_DOCUMENT).nonzero().flatten().tolist() if documents else []
    borders = sorted({0, *(end + 1 for end in ends), SEQUENCE})
    return [sequence[start : end + 1] for start, end in itertools.pairwise(borders)]


@functools.cache
def reference(model_name: str, steps: int, masked: bool, documents: bool) -> Curve:
    """One process, torch's own loss, clipping and plain AdamW, in float32, a document at a time; biases of routers as
    the paper has them."""
    recipe = recipe_of(Row("reference", 1, model=model_name, steps=steps, masked=masked))
    model = Decoder(recipe.model)
    initialize(model, recipe.train.seed)
    optim = recipe.optim

    def decays(parameter: torch.nn.Parameter) -> bool:
        return parameter.ndim > 1 and not (model.embedding and parameter is model.embedding.weight)

    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if decays(p)], "weight_decay": optim.weight_decay},
            {"params": [p for p in model.parameters() if not decays(p)], "weight_decay": 0.0},
        ],
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        foreach=False,
    )
    curve = Curve({n: p.detach().clone() for n, p in model.named_parameters()}, [], [], {})
    loads = {}  # of every router with a bias; counted in both forwards of a sequence, which changes no sign
    for mixture in model.modules():
        if isinstance(mixture, MixtureOfExperts) and mixture.expert_bias is not None:
            loads[mixture] = torch.zeros(recipe.model.num_experts)
            mixture.router.register_forward_hook(functools.partial(_count_choices, mixture, loads[mixture]))
    for step in range(1, steps + 1):
        tokens = torch.from_numpy(global_batch(step, masked, documents))
        num_tokens = (tokens[:, 1:] != IGNORE_INDEX).sum()
        loss = torch.zeros(())
        for text in (text for sequence in tokens for text in texts(sequence, documents)):
            inputs, labels = text[None, :-1].clamp(min=0), text[None, 1:]
            cross_entropy = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
            # The load-balancing loss is a matter of each micro-batch, which is a sequence in the rows with experts.
            total = model(inputs, labels).total if recipe.model.num_experts else cross_entropy
            total.backward()
            loss = loss + cross_entropy.detach() / num_tokens
        for parameter in model.parameters():
            parameter.grad /= num_tokens
        curve.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm).item())
        if step == 1:
            curve.grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, optim, steps)
        optimizer.step()
        optimizer.zero_grad()
        for mixture, load in loads.items():
            mixture.expert_bias += recipe.model.router_bias_update_speed * (load.mean() - load).sign()
            load.zero_()
        curve.losses.append(loss.item())
    curve.buffers = dict(model.named_buffers())
    return curve


def _count_choices(mixture: MixtureOfExperts, load: torch.Tensor, _router: Any, _inputs: Any, logits: torch.Tensor):
    chosen = (logits.sigmoid() + mixture.expert_bias).topk(mixture.config.experts_per_token).indices
    load += chosen.flatten().bincount(minlength=len(load))


@pytest.mark.train
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_parity(row: Row):
    compare(row, [curves[row.name] for curves in launched(row.ranks)])


def compare(row: Row, ranks: list[Curve]) -> None:
    """Assert that all ranks together computed what one process does."""
    expected = reference(row.model, row.steps, row.masked, row.documents)
    whole = Curve({}, ranks[0].losses, ranks[0].norms, {})
    for curve in ranks:
        assert (curve.losses, curve.norms) == (whole.losses, whole.norms), "ranks disagree"
        for name, buffer in curve.buffers.items():
            assert torch.equal(buffer, whole.buffers.get(name, buffer)), f"{name}: ranks disagree"
        whole.initial |= curve.initial
        whole.grads |= curve.grads
        whole.buffers |= curve.buffers
    assert whole.initial.keys() == expected.initial.keys()
    for name, parameter in expected.initial.items():
        assert torch.equal(whole.initial[name], parameter), f"{name}: initial weights depend on the layout"
    assert whole.losses == pytest.approx(expected.losses, abs=row.tolerance, rel=0)
    assert whole.norms == pytest.approx(expected.norms, rel=10 * row.tolerance)
    for name, grad in expected.grads.items():
        bound = 1e-6 if row.param_dtype == "float32" else row.tolerance * grad.abs().max().item() + 1e-4
        torch.testing.assert_close(whole.grads[name], grad, atol=bound, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(whole.buffers[name], buffer, msg=lambda m, n=name: f"{n}: {m}")


def test_the_reference_learns_and_clips():
    curve = reference("dense", 50, False, False)
    assert curve.losses[-1] < 0.6 * curve.losses[0]
    assert curve.norms[0] > 0.5


@pytest.mark.train
def test_a_run_is_the_same_bit_for_bit():
    rows = [row for row in ROWS if row.name in ("fsdp 2, 50 steps", "fsdp 2, moe")]
    again = run_distributed(run_rows, 2, rows)[0]
    for row in rows:
        before = launched(2)[0][row.name]
        assert (again[row.name].losses, again[row.name].norms) == (before.losses, before.norms)
