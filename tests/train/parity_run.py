"""Runs rows of the parity table: what all ranks together compute, and what one process does.

python tests/train/parity_run.py [--full] [--only TEXT]      prints the table
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity_table import GLOBAL_BATCH, MODELS, SEQUENCE, STEPS, Row, full, pairwise
from spawn import run_distributed
from tensors import whole

from chimera_train.checkpoint import Checkpointer, LoopState
from chimera_train.config import (
    LayoutConfig,
    MlRoot,
    ParallelConfig,
    RecipeFile,
    TrainRecipe,
    batch_plan,
    layout,
)
from chimera_train.loss import IGNORE_INDEX
from chimera_train.model import Decoder, initialize
from chimera_train.optim import build_optimizer, learning_rate, set_learning_rate
from chimera_train.parallel import Meshes, build_model
from chimera_train.step import finish_gradients, forward_backward

CPU = torch.device("cpu")
HALF = STEPS // 2


@dataclass
class Curve:
    """Of some consecutive steps."""

    losses: list[float]
    norms: list[float]
    grads: list[dict[str, torch.Tensor]]
    """By step: what this rank's parameters got, after clipping, made whole."""

    def __add__(self, other: Curve) -> Curve:
        return Curve(self.losses + other.losses, self.norms + other.norms, self.grads + other.grads)


@dataclass(frozen=True)
class Difference:
    """The largest of all steps, each relative to the size of what is compared."""

    loss: float
    grad_norm: float
    grads: float
    parameter: str
    """The one whose gradient differs most."""

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.grads)


def global_batch(step: int, row: Row) -> np.ndarray:
    """Int64 [GLOBAL_BATCH, SEQUENCE + 1]; uneven: half of the sequences have few labels, one has none."""
    vocab = MODELS[row.model].vocab_size
    tokens = np.random.default_rng(step).integers(0, vocab, (GLOBAL_BATCH, SEQUENCE + 1))
    if row.tokens == "uneven":
        for sequence in range(1, GLOBAL_BATCH, 2):
            tokens[sequence, 1 + sequence % SEQUENCE // 2 :] = IGNORE_INDEX
        tokens[5] = IGNORE_INDEX
    return tokens


def steps_of(recipe: TrainRecipe, row: Row, folder: Path, steps: range, *, save: bool = False) -> Curve:
    """On every rank: build, begin or resume, and compute `steps` (from 1)."""
    world = dist.get_world_size()
    mesh_layout = layout(recipe.parallel, hosts=1, workers_per_host=world)
    plan = batch_plan(recipe.train, mesh_layout)
    meshes = Meshes(mesh_layout, "cpu")
    model = build_model(recipe, meshes, CPU)
    optimizer = build_optimizer(model, recipe, meshes)
    checkpointer = Checkpointer(
        recipe.checkpoint,
        root=MlRoot(folder),
        run_id="parity",
        recipe=RecipeFile(recipe=recipe, layout=LayoutConfig(hosts=1, workers_per_host=world), recipe_hash="0"),
        layout=mesh_layout,
    )
    if steps.start == 1:
        initialize(model, recipe.train.seed)
    else:
        state = checkpointer.load(model, optimizer)
        assert state is not None
        assert state.step == steps.start - 1
    data_rank, share = mesh_layout.data_rank(dist.get_rank()), GLOBAL_BATCH // plan.data_parallel_size
    curve = Curve([], [], [])
    for step in steps:
        mine = global_batch(step, row)[data_rank * share : (data_rank + 1) * share]
        sums = forward_backward(model, recipe, np.split(mine, plan.accumulation_steps), CPU)
        result = finish_gradients(model, recipe.optim, sums, meshes, step=step)
        curve.losses.append(result.loss)
        curve.norms.append(result.grad_norm)
        curve.grads.append({name: whole(p.grad) for name, p in model.named_parameters()})
        set_learning_rate(optimizer, learning_rate(step, recipe.optim, STEPS))
        optimizer.step()
        optimizer.zero_grad()
    if save:
        checkpointer.save(steps[-1], model, optimizer, LoopState(step=steps[-1], tokens_seen=0, samples_seen=0))
    return curve


def run_rows(rows: list[Row], folders: list[Path], resumed: bool) -> list[tuple[Curve, float]]:
    """On every rank: each row's curve and seconds. `resumed`: the second half of rows that resume in one process."""
    found = []
    for row, folder in zip(rows, folders, strict=True):
        dist.barrier()
        started = time.perf_counter()
        recipe = row.recipe()
        if resumed:
            plain = replace(recipe, parallel=ParallelConfig())
            curve = steps_of(plain, row, folder, range(HALF + 1, STEPS + 1))
        elif row.resume == "none":
            curve = steps_of(recipe, row, folder, range(1, STEPS + 1))
        else:
            curve = steps_of(recipe, row, folder, range(1, HALF + 1), save=True)
            if row.resume == "same layout":
                curve += steps_of(recipe, row, folder, range(HALF + 1, STEPS + 1))
        found.append((curve, time.perf_counter() - started))
    return found


def run_table(rows: list[Row], *, timeout_s: float = 280.0) -> dict[Row, tuple[list[Curve], float]]:
    """Row → every rank's curve, and seconds. One launch a number of ranks."""
    found: dict[Row, tuple[list[Curve], float]] = {}
    root = Path(tempfile.mkdtemp())
    try:
        folders = {row: root / str(number) for number, row in enumerate(rows)}
        for ranks in sorted({row.ranks for row in rows}):
            mine = [row for row in rows if row.ranks == ranks]
            by_rank = run_distributed(run_rows, ranks, mine, [folders[row] for row in mine], False, timeout_s=timeout_s)
            for index, row in enumerate(mine):
                found[row] = [of_rank[index][0] for of_rank in by_rank], by_rank[0][index][1]
        rest = [row for row in rows if row.resume == "one process"]
        if rest:
            (alone,) = run_distributed(run_rows, 1, rest, [folders[row] for row in rest], True, timeout_s=timeout_s)
            for row, (curve, seconds) in zip(rest, alone, strict=True):
                curves, before = found[row]
                # The one process has all gradients, which stand beside those of the first half's ranks.
                found[row] = [each + curve for each in curves], before + seconds
    finally:
        shutil.rmtree(root)
    return found


@functools.cache
def reference(model_name: str, micro_batch_size: int, tokens: str) -> Curve:
    """One process: torch's own loss and clipping, and plain AdamW, over the micro-batches of the global batch."""
    row = Row(model=model_name, micro_batch_size=micro_batch_size, tokens=tokens)
    recipe = row.recipe()
    model = Decoder(recipe.model)
    initialize(model, recipe.train.seed)
    optim = recipe.optim
    embedding = model.embedding.weight if model.embedding is not None else None
    matrices = [p for p in model.parameters() if p.ndim > 1 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim == 1 or p is embedding]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        foreach=False,
    )
    curve = Curve([], [], [])
    for step in range(1, STEPS + 1):
        batch = torch.from_numpy(global_batch(step, row))
        num_tokens = (batch[:, 1:] != IGNORE_INDEX).sum()
        loss = 0.0
        for micro_batch in batch.split(micro_batch_size):
            inputs, labels = micro_batch[:, :-1].clamp(min=0), micro_batch[:, 1:]
            if recipe.model.num_experts:  # whose loss has the load-balancing loss of the micro-batch in its gradient
                total = model(inputs, labels).total
            else:
                total = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
            total.backward()
            loss += total.item() / num_tokens.item()
        for parameter in model.parameters():
            parameter.grad /= num_tokens
        curve.losses.append(loss)
        curve.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm).item())
        curve.grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, optim, STEPS)
        optimizer.step()
        optimizer.zero_grad()
    return curve


def difference(row: Row, ranks: list[Curve]) -> Difference:
    """Of all ranks together from one process. AssertionError where ranks disagree, or lack a gradient."""
    expected = reference(row.model, row.micro_batch_size, row.tokens)
    first = ranks[0]
    for other in ranks:
        assert (other.losses, other.norms) == (first.losses, first.norms), "ranks disagree"
    worst, worst_name = 0.0, ""
    for step, grads in enumerate(expected.grads):
        for name, grad in grads.items():
            held = [rank.grads[step][name] for rank in ranks if name in rank.grads[step]]
            assert held, f"no rank has a gradient of {name}"
            found = max(((own - grad).abs().max() / grad.abs().max()).item() for own in held)
            if not found <= worst:  # a NaN as well
                worst, worst_name = found, f"{name}, step {step + 1}"
    return Difference(
        loss=max(abs(a - b) / b for a, b in zip(first.losses, expected.losses, strict=True)),
        grad_norm=max(abs(a - b) / b for a, b in zip(first.norms, expected.norms, strict=True)),
        grads=worst,
        parameter=worst_name,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The parity table against one process, in float32.")
    parser.add_argument("--full", action="store_true", help="every legal combination of the parallel columns")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    options = parser.parse_args()
    rows = [row for row in (full() if options.full else pairwise()) if options.only in row.name]
    print(f"{len(rows)} rows\n{'ranks':>5} {'loss':>8} {'norm':>8} {'grads':>8} {'s':>6}  row", flush=True)
    worst, failed = 0.0, 0
    for start in range(0, len(rows), 20):
        for row, (ranks, seconds) in run_table(rows[start : start + 20], timeout_s=1200).items():
            found = difference(row, ranks)
            worst = max(worst, found.largest)
            failed += not found.largest <= 1e-5
            print(
                f"{row.ranks:>5} {found.loss:>8.1e} {found.grad_norm:>8.1e} {found.grads:>8.1e} {seconds:>6.1f}  "
                f"{row.name}" + ("" if found.largest <= 1e-5 else f"  <-- {found.parameter}"),
                flush=True,
            )
    print(f"largest relative difference {worst:.1e}; {failed} of {len(rows)} rows above 1e-5")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
