"""One rank of a run without its machines: build it, step it on tensors that hold no data, and count their memory.

    python -m chimera_train.trace --recipe recipe.json [--rank 0 | --stages] [--json]

What runs is the training loop's own code: the same model, wrapped and scheduled the same way, over a process group
whose collectives return at once. What is counted is what torch's allocator would be asked for on the device;
fragmentation and the buffers of CUDA and NCCL come on top. Kernels that exist on GPUs alone are replaced by those of
the CPU, with the same inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining.schedules import _PipelineSchedule

from .command import EXIT_USAGE, Parser, call, integer
from .config import ConfigError, RecipeFile, TrainRecipe, batch_plan, layout
from .config.contract import EXIT_FINISHED
from .export import WrongArgument, read_recipe_file
from .memory_trace import ACTIVATIONS, GATHERED, MemoryTrace
from .model.local import local
from .model.moe import Experts
from .optim import build_optimizer, local_grad_norm_squared, scale_gradients
from .parallel import Meshes, build_model
from .parallel.expert import AllToAllDispatch
from .step import forward_backward

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer states"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS)
GIB = 2**30


@dataclass(frozen=True)
class Trace:
    """The peak of one rank over a whole optimizer step."""

    rank: int
    stages: tuple[int, ...]
    """Pipeline stages that it holds."""
    num_layers: int
    num_parameters: int
    """That it stores, after all sharding."""
    micro_batches: int
    """That were traced: more of them would wait in the same memory."""
    peak_gib: float
    by_kind_gib: dict[str, float]
    """At the moment of the peak. Gradients: also those kept whole between micro-batches; while one micro-batch goes
    backward, its own count as buffers."""
    seconds: float
    """That tracing took."""


def trace_ranks(recipe_file: RecipeFile, ranks: Sequence[int]) -> list[Trace]:
    """Trace ranks, each in a process of its own: torch remembers the groups of the first for the life of a process.

    Raises ConfigError for a recipe that cannot run.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, max_tasks_per_child=1) as pool:
        return list(pool.map(trace, [recipe_file] * len(ranks), ranks))


def trace(recipe_file: RecipeFile, rank: int = 0) -> Trace:
    """Trace one rank, in a process that has had no process group. Raises ConfigError for a recipe that cannot run."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    started = time.perf_counter()
    recipe, machines = recipe_file.recipe, recipe_file.layout
    mesh_layout = layout(recipe.parallel, hosts=machines.hosts, workers_per_host=machines.workers_per_host)
    plan = batch_plan(recipe.train, mesh_layout)
    micro_batches = plan.accumulation_steps
    if mesh_layout.schedule != "gpipe":  # which alone holds all of them at once
        micro_batches = min(micro_batches, max(2, mesh_layout.num_stages))
    dist.init_process_group("fake", rank=rank, world_size=mesh_layout.world_size, store=FakeStore())
    try:
        return _trace(recipe, Meshes(mesh_layout, "cpu"), micro_batches, started)
    finally:
        dist.destroy_process_group()


def _trace(recipe: TrainRecipe, meshes: Meshes, micro_batches: int, started: float) -> Trace:
    train, cpu = recipe.train, torch.device("cpu")
    # Compiling fake tensors would trace the compiler, not the step.
    recipe = replace(recipe, train=replace(train, compile=False))
    model = build_model(recipe, meshes, torch.device("meta"))
    data = [np.zeros((train.micro_batch_size, train.sequence_length + 1), dtype=np.int64)] * micro_batches
    with (
        _shapes_are_known(),
        _balanced_experts(),
        FakeTensorMode(allow_non_fake_inputs=True),
        MemoryTrace() as memory,
        _gradients(memory),
    ):
        model.to_empty(device=cpu)
        optimizer = build_optimizer(model, recipe, meshes)
        memory.label(PARAMETERS, model.parameters())
        for _ in range(2):
            memory.forget_peak()  # the first step has no optimizer states yet
            forward_backward(model, recipe, data, cpu)
            parameters = list(model.parameters())
            memory.label(GRADIENTS, [p.grad for p in parameters if p.grad is not None])
            local_grad_norm_squared(parameters, 1)
            scale_gradients(parameters, 1.0)
            optimizer.step()
            states = (value for state in optimizer.state.values() for value in state.values())
            memory.label(OPTIMIZER, (value for value in states if isinstance(value, Tensor)))
            optimizer.zero_grad(set_to_none=True)
    by_kind = {kind: size / GIB for kind, size in memory.at_peak().items()}
    return Trace(
        rank=meshes.rank,
        stages=tuple(meshes.layout.stage_numbers(meshes.at["pipeline"])),
        num_layers=len(model.layers),
        num_parameters=sum(_local_numel(p) for p in model.parameters()),
        micro_batches=micro_batches,
        peak_gib=sum(by_kind.values()),
        by_kind_gib={kind: by_kind.get(kind, 0.0) for kind in KINDS},
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _shapes_are_known() -> Iterator[None]:
    """From torch 2.13 on, the stages of a pipeline first vote whether all know their shapes; ours do, and where nothing
    is received there is no vote to count."""
    before = getattr(_PipelineSchedule, "_warmup_p2p", None)
    if before is None:
        yield
        return

    def known(schedule: Any, stages: list[Any], *rest: Any) -> None:
        from torch.distributed.pipelining.stage import InferenceMode

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    _PipelineSchedule._warmup_p2p = known
    try:
        yield
    finally:
        _PipelineSchedule._warmup_p2p = before


@contextmanager
def _balanced_experts() -> Iterator[None]:
    """Tokens without data choose no experts: every rank is taken to send as many to each."""
    before = AllToAllDispatch.start

    def start(dispatch: AllToAllDispatch, counts_E: Tensor) -> Callable[[Experts, Tensor], Tensor]:
        def run(experts: Experts, x_RD: Tensor) -> Tensor:
            ranks = dispatch._group.size()
            rows = [len(x_RD) // ranks + (rank < len(x_RD) % ranks) for rank in range(ranks)]
            return dispatch._run(counts_E.unflatten(0, (ranks, -1)), lambda: [rows, rows], experts, x_RD)

        return run

    AllToAllDispatch.start = start
    try:
        yield
    finally:
        AllToAllDispatch.start = before


@contextmanager
def _gradients(memory: MemoryTrace) -> Iterator[None]:
    """Label the gradients that FSDP keeps whole until the last micro-batch of a step."""
    before = FSDPParam.to_accumulated_grad_if_needed

    def labelled(parameter: FSDPParam) -> None:
        grad = parameter._unsharded_param.grad
        if grad is not None:
            memory.label(GRADIENTS, [grad])
        before(parameter)
        if parameter.unsharded_accumulated_grad is not None:
            memory.label(GRADIENTS, [parameter.unsharded_accumulated_grad])

    FSDPParam.to_accumulated_grad_if_needed = labelled
    try:
        yield
    finally:
        FSDPParam.to_accumulated_grad_if_needed = before


def _local_numel(parameter: Tensor) -> int:
    return local(parameter.detach()).numel()


def table(traces: list[Trace]) -> str:
    """Lines for people, a rank each."""
    lines = [f"{'rank':>5} {'stages':>8} {'layers':>6} {'parameters':>14} {'peak GiB':>9}  of it"]
    for found in traces:
        parts = ", ".join(f"{kind} {gib:.2f}" for kind, gib in found.by_kind_gib.items() if gib >= 0.005)
        stages = ",".join(map(str, found.stages))
        lines.append(
            f"{found.rank:>5} {stages:>8} {found.num_layers:>6} {found.num_parameters:>14,} {found.peak_gib:>9.2f}  "
            f"{parts} ({found.seconds:.0f} s)"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="chimera_train.trace", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", type=Path, required=True, metavar="FILE", help="recipe.json, as a dry run shows it")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=integer(0), default=0, help="the rank to trace (default: 0)")
    which.add_argument("--stages", action="store_true", help="the first rank of every pipeline rank")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else on stdout")
    options: argparse.Namespace = parser.parse_args(arguments)
    try:
        recipe_file = read_recipe_file(options.recipe)
        machines = recipe_file.layout
        mesh_layout = layout(
            recipe_file.recipe.parallel, hosts=machines.hosts, workers_per_host=machines.workers_per_host
        )
        if options.rank >= machines.world_size:
            raise WrongArgument(f"--rank {options.rank}: the recipe has ranks 0 to {machines.world_size - 1}")
        each = mesh_layout.world_size // mesh_layout.pipeline
        ranks = range(0, mesh_layout.world_size, each) if options.stages else [options.rank]
        traces = trace_ranks(recipe_file, ranks)
    except (ConfigError, WrongArgument) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(json.dumps([asdict(found) for found in traces], indent=2) if options.json else table(traces))
    return EXIT_FINISHED


if __name__ == "__main__":
    call(main)
