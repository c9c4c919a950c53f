"""From a recipe to a plan: catalogue facts, layout, and predictions. Pure: no network, no torch, no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar

from chimera_sm import catalog
from chimera_sm.errors import RecipeError
from chimera_sm.recipe.schema import LOCAL, InstanceChoice, Recipe
from chimera_train.config import (
    BatchPlan,
    ConfigError,
    MeshLayout,
    Problem,
    batch_plan,
    flash_problems,
    flops_per_token,
    layout,
    num_active_parameters,
    num_parameters,
)
from chimera_train.config.precision import gather_problems

from . import cost, reliability
from .coefficients import coefficient
from .disk import checkpoint_gb, estimate_disk
from .memory import Occupancy, estimate_memory
from .notes import notes
from .segments import MAX_SEGMENTS, count, split, steps_per_job
from .step_time import NOT_PREDICTED, Workload, estimate_step, unknown_step
from .storage_cost import total_cost
from .types import (
    CostEstimate,
    FallbackEstimate,
    InstancePlan,
    JobLength,
    MemoryEstimate,
    Plan,
    ReliabilityEstimate,
    Segment,
    StepEstimate,
)

Result = TypeVar("Result")
MOST_LOCAL_WORKERS = 64
"""A host of this machine that an error proposes has at most so many."""


def plan(recipe: Recipe) -> Plan:
    """Work out everything that can be said before a run.

    Raises RecipeError with every problem found: unknown instance types and regions, degrees that do not multiply to
    the machines, batches that do not divide, fallbacks that the job could not run on.
    """
    problems: list[Problem] = []
    _collect(problems, "env.region", lambda: catalog.region(recipe.env.region))
    if (origin := recipe.data.region) is not None:
        _collect(problems, "data.region", lambda: catalog.region(origin))
    if (tier := recipe.env.fsx_tier) is not None and recipe.env.region in catalog.regions():
        _collect(problems, "env.fsx_tier", lambda: catalog.fsx_price(tier, recipe.env.region))
    instances = _instances(recipe, problems)
    mesh, batch = _layout(recipe, instances, problems)
    if problems or mesh is None or batch is None:
        raise RecipeError(problems, recipe.origins)

    machine = None if recipe.instances.type == LOCAL else catalog.instance(recipe.instances.type)
    parameters = num_parameters(recipe.model)
    memory = _memory(recipe, mesh, batch, machine)
    step = _step(recipe, mesh, batch, machine)
    costs, elsewhere, reliable, step_share_s = _run(recipe, parameters, machine, step)
    length = None
    if machine is not None:
        length = JobLength(
            startup_s=coefficient("startup_s"),
            save_s=_stall_s(recipe, parameters),
            step_s=step.total_s,
            limit_s=recipe.capacity.max_run_hours * 3600,
        )
    return Plan(
        recipe=recipe,
        recipe_hash=recipe.hash,
        num_parameters=parameters,
        num_active_parameters=num_active_parameters(recipe.model),
        layout=mesh,
        batch=batch,
        instances=tuple(instances),
        segments=_segments(recipe, step_share_s),
        memory=memory,
        step=step,
        costs=costs,
        reliability=reliable,
        disk=estimate_disk(recipe, parameters, instances[0].nvme_gb),
        catalog_version=catalog.catalog_version(),
        fallbacks=tuple(
            _fallback(recipe, parameters, mesh, batch, index, choice) for index, choice in enumerate(instances[1:])
        ),
        job_length=length,
        other_services=elsewhere,
        total=None if machine is None else total_cost(recipe, parameters, next(c for c in costs if c.chosen)),
        notes=notes(recipe, mesh, machine),
    )


def _collect(problems: list[Problem], key: str, look_up: Callable[[], Result]) -> Result | None:
    """The result, or None and a problem of `key`."""
    try:
        return look_up()
    except catalog.UnknownName as error:
        problems.append(Problem(key, error.message, error.fix))
        return None


def _instances(recipe: Recipe, problems: list[Problem]) -> list[InstancePlan]:
    """The chosen machines, then their fallbacks; without the choices that have a problem."""
    chosen = recipe.instances
    group = _instance(recipe, "instances", chosen, problems)
    plans = [] if group is None else [group]
    for index, choice in enumerate(chosen.fallbacks):
        key = f"instances.fallbacks[{index}]"
        found = _instance(recipe, key, choice, problems)
        if found is None:
            continue
        plans.append(found)
        if group and (found.count, found.workers_per_host) != (group.count, group.workers_per_host):
            problems.append(
                Problem(
                    key,
                    f"{found.count} × {found.workers_per_host} workers, but the job is laid out for "
                    f"{group.count} × {group.workers_per_host}",
                    "a fallback has as many hosts, and as many accelerators in each",
                )
            )
    return plans


def _instance(recipe: Recipe, key: str, choice: InstanceChoice, problems: list[Problem]) -> InstancePlan | None:
    role: Literal["group", "fallback"] = "group" if key == "instances" else "fallback"
    workers = recipe.instances.workers_per_host
    if choice.type == LOCAL:
        if role == "fallback":
            problems.append(Problem(f"{key}.type", "this machine is no fallback for a job", "remove it"))
            return None
        return InstancePlan(
            type=LOCAL,
            count=choice.count,
            role="group",
            accelerator=None,
            accelerators_per_host=0,
            workers_per_host=workers or 1,
            accelerator_memory_gib=None,
            peak_tflops=None,
            efa_interfaces=0,
            network_gbps=None,
            nvme_gb=0.0,
        )
    facts = _collect(problems, f"{key}.type", lambda: catalog.instance(choice.type))
    if facts is None:
        return None
    if not facts.training:
        problems.append(Problem(f"{key}.type", f"{facts.type} is not offered for SageMaker training jobs"))
    if facts.is_trainium:
        problems.append(
            Problem(
                f"{key}.type",
                f"{facts.type} has Trainium chips; the trainer runs on NVIDIA GPUs",
                "use a p or g type",
            )
        )
    if workers is not None and workers > facts.accelerators:
        problems.append(
            Problem(
                "instances.workers_per_host",
                f"{workers} exceeds the {facts.accelerators} accelerators of {facts.type}",
                "null starts one worker an accelerator",
            )
        )
        return None
    return InstancePlan(
        type=facts.type,
        count=choice.count,
        role=role,
        accelerator=facts.accelerator,
        accelerators_per_host=facts.accelerators,
        workers_per_host=workers or facts.accelerators,
        accelerator_memory_gib=facts.accelerator_memory_gib,
        peak_tflops=facts.bf16_tflops,
        efa_interfaces=facts.efa_interfaces,
        network_gbps=facts.network_gbps,
        nvme_gb=facts.nvme_gb,
    )


def _layout(
    recipe: Recipe, instances: list[InstancePlan], problems: list[Problem]
) -> tuple[MeshLayout | None, BatchPlan | None]:
    """Ranks and batches, where the machines are known; their problems join the others."""
    if not instances or instances[0].role != "group":
        return None, None
    group = instances[0]
    problems.extend(recipe.profiling.world_problems(group.count * group.workers_per_host))
    if group.type != LOCAL:
        problems.extend(flash_problems(recipe.train_recipe))
    try:
        mesh = layout(recipe.parallel, hosts=group.count, workers_per_host=group.workers_per_host)
    except ConfigError as error:
        more = _more_workers(recipe, group) if group.type == LOCAL else ""
        problems.extend(replace(problem, fix=problem.fix + more) for problem in error.problems)
        return None, None
    problems.extend(gather_problems(recipe.precision, mesh.shard))
    try:
        return mesh, batch_plan(recipe.train, mesh)
    except ConfigError as error:
        problems.extend(error.problems)
        return None, None


def _more_workers(recipe: Recipe, group: InstancePlan) -> str:
    """What to add to the fix of a layout that does not factor: on this machine, workers are free."""
    for workers in range(group.workers_per_host + 1, MOST_LOCAL_WORKERS + 1):
        try:
            batch_plan(recipe.train, layout(recipe.parallel, hosts=group.count, workers_per_host=workers))
        except ConfigError:
            continue
        return f", or instances.workers_per_host={workers}"
    return ""


def _memory(recipe: Recipe, mesh: MeshLayout, batch: BatchPlan, machine: catalog.Instance | None) -> MemoryEstimate:
    return estimate_memory(
        Occupancy(
            model=recipe.model,
            train=recipe.train,
            parallel=recipe.parallel,
            optim=recipe.optim,
            precision=recipe.precision,
            layout=mesh,
            batch=batch,
            overhead_gib=coefficient("memory_overhead_gib", "" if machine else LOCAL),
        ),
        machine.accelerator_memory_gib if machine else None,
    )


def _fallback(
    recipe: Recipe, parameters: int, mesh: MeshLayout, batch: BatchPlan, index: int, choice: InstancePlan
) -> FallbackEstimate:
    """The same layout on other machines."""
    machine = catalog.instance(choice.type)
    step = _step(recipe, mesh, batch, machine)
    span = cost.duration(run_shape(recipe, parameters, machine, step), recipe.capacity.kind)
    share_s = _share_s(recipe, span)
    limit_s = recipe.capacity.max_run_hours * 3600
    return FallbackEstimate(
        index=index,
        type=choice.type,
        memory=_memory(recipe, mesh, batch, machine),
        disk=estimate_disk(recipe, parameters, choice.nvme_gb),
        step=step,
        num_jobs=None if share_s is None else count(recipe.train.num_steps, share_s, coefficient("startup_s"), limit_s),
    )


def _step(recipe: Recipe, mesh: MeshLayout, batch: BatchPlan, machine: catalog.Instance | None) -> StepEstimate:
    if machine is None:
        return unknown_step(flops_per_token(recipe.model, batch.sequence_length), NOT_PREDICTED)
    return estimate_step(
        Workload(
            model=recipe.model,
            train=recipe.train,
            parallel=recipe.parallel,
            precision=recipe.precision,
            layout=mesh,
            batch=batch,
            instance=machine,
        )
    )


def _run(
    recipe: Recipe, parameters: int, machine: catalog.Instance | None, step: StepEstimate
) -> tuple[tuple[CostEstimate, ...], tuple[CostEstimate, ...], ReliabilityEstimate, float | None]:
    """Costs by kind of capacity, here and by other services, failures, and a step's share of the running time."""
    capacity, interval = recipe.capacity, recipe.checkpoint.interval_steps
    if machine is None:
        this_machine = CostEstimate(
            kind=capacity.kind, chosen=True, usd_per_hour=None, price_basis="this machine", usd=None, days=None
        )
        nothing = ReliabilityEstimate(
            failures_per_day=None,
            failures_expected=None,
            spot_interruption_bucket=None,
            checkpoint_interval_steps=interval,
            recommended_interval_steps=None,
            basis=NOT_PREDICTED,
        )
        return (this_machine,), (), nothing, None

    run = run_shape(recipe, parameters, machine, step)
    service = cost.SERVICE_OF_TARGET[recipe.target.name]
    costs, elsewhere = cost.estimate_costs(run, service, capacity.kind, recipe.env.region, step.basis)
    days = next(c.days for c in costs if c.chosen)
    reliable = reliability.estimate_reliability(
        interruptions=cost.interruptions(run, capacity.kind),
        failures=reliability.job_failure_rate(run.hosts, machine.accelerators, capacity.failures),
        seen=capacity.failures,
        spot_bucket=run.spot_bucket,
        interval_steps=interval,
        num_steps=run.num_steps,
        step_s=step.total_s,
        stall_s=run.stall_s,
        days=days.p50 if days else None,
    )
    return costs, elsewhere, reliable, _share_s(recipe, cost.duration(run, capacity.kind))


def run_shape(recipe: Recipe, parameters: int, machine: catalog.Instance, step: StepEstimate) -> cost.RunShape:
    """The recipe's run on these machines, as costs and failures see it."""
    return cost.RunShape(
        step_s=step.total_s,
        num_steps=recipe.train.num_steps,
        interval_steps=recipe.checkpoint.interval_steps,
        stall_s=_stall_s(recipe, parameters),
        hosts=recipe.instances.count,
        instance=machine,
        num_experts=recipe.model.num_experts,
        max_run_s=recipe.capacity.max_run_hours * 3600,
        spot_bucket=catalog.spot_bucket(machine.type, recipe.env.region),
        failures=recipe.capacity.failures,
    )


def _stall_s(recipe: Recipe, parameters: int) -> float:
    return reliability.checkpoint_stall_s(checkpoint_gb(parameters), recipe.instances.count)


def _share_s(recipe: Recipe, span: cost.Duration | None) -> float | None:
    return span.training_h * 3600 / recipe.train.num_steps if span else None


def _segments(recipe: Recipe, step_s: float | None) -> tuple[Segment, ...]:
    """The cut into jobs. Raises RecipeError where there would be more than anyone submits."""
    capacity, num_steps, startup_s = recipe.capacity, recipe.train.num_steps, coefficient("startup_s")
    max_run_s = capacity.max_run_hours * 3600
    jobs = count(num_steps, step_s, startup_s, max_run_s)
    if jobs > MAX_SEGMENTS and step_s is not None:
        per_job = steps_per_job(step_s, startup_s, max_run_s)
        message = (
            f"{num_steps:,} steps of {step_s:.3g} s at {per_job:,} in a job of {capacity.max_run_hours:g} h "
            f"({startup_s:.0f} s of it to start up) make {jobs:,} jobs, more than {MAX_SEGMENTS:,}"
        )
        raise RecipeError(
            [
                Problem("train.num_steps", message, "fewer steps, or more or faster machines"),
                Problem("capacity.max_run_hours", f"{capacity.max_run_hours:g} makes {jobs:,} jobs", "at most 672"),
            ],
            recipe.origins,
        )
    return split(
        num_steps=num_steps,
        step_s=step_s,
        startup_s=startup_s,
        max_run_hours=capacity.max_run_hours,
        max_wait_hours=capacity.max_wait_hours,
    )
