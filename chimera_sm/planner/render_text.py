"""A plan as plain text, for a person who is about to spend money."""

from __future__ import annotations

from collections.abc import Iterable

from chimera_sm.recipe.listing import short_count
from chimera_sm.recipe.schema import LOCAL

from .types import CostEstimate, Distribution, InstancePlan, Plan

UNKNOWN = "unknown"
LABEL = 14
"""Width of the left column."""


def format_plan(plan: Plan) -> str:
    """Sections of aligned lines; what is not known says so. This machine has no price and no failure rate to show."""
    here = plan.recipe.instances.type == LOCAL
    lines = [
        f"{plan.recipe.name}: {plan.recipe.description}" if plan.recipe.description else plan.recipe.name,
        "",
        *_section("model", [_model(plan)]),
        *_section("machines", [_machines(choice) for choice in plan.instances]),
        *_section("layout", _layout(plan)),
        *_section("batch", _batch(plan)),
        *_section("memory", [*_memory(plan), *_fallback_memory(plan)]),
        *([] if here else _price_of_time(plan)),
        *_section("checkpoints", [_checkpoints(plan)]),
        *([] if here else _section("disk", [_disk(plan)])),
        *_section("notes", plan.notes),
        *_section("made from", [f"recipe {plan.recipe_hash[:12]}, catalogue {plan.catalog_version}"]),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _price_of_time(plan: Plan) -> list[str]:
    return [
        *_section("step", _step(plan)),
        *_section("capacity", [_cost(cost) for cost in plan.costs]),
        *_section("", [f"{cost.kind}: {cost.price_basis}" for cost in plan.costs]),
        *_section("", [_elsewhere(plan)]),
        *_section("in all", _total(plan)),
        *_section("jobs", [_jobs(plan)]),
        *_section("failures", _failures(plan)),
    ]


def _section(label: str, body: Iterable[str]) -> list[str]:
    return [f"{label if first else '':<{LABEL}}{line}" for first, line in zip(_first(), body, strict=False)]


def _first() -> Iterable[bool]:
    yield True
    while True:
        yield False


def _model(plan: Plan) -> str:
    model = plan.recipe.model
    size = f"{plan.num_parameters:,} parameters"
    if plan.num_active_parameters != plan.num_parameters:
        size += f", {plan.num_active_parameters:,} active"
    return f"{model.name}, {size}"


def _machines(choice: InstancePlan) -> str:
    if choice.type == LOCAL:
        return f"this machine, as {_count(choice.count, 'host')} of {_count(choice.workers_per_host, 'worker')}"
    before = "or instead " if choice.role == "fallback" else ""
    disk = f", {choice.nvme_gb:,.0f} GB NVMe" if choice.nvme_gb else ""
    network = f", {choice.network_gbps:,.0f} Gbps" if choice.network_gbps else ""
    efa = f" over {choice.efa_interfaces} EFA" if choice.efa_interfaces else ""
    inside = f"{choice.accelerators_per_host} × {choice.accelerator}{network}{efa}{disk}"
    return f"{before}{choice.count} × {choice.type} ({inside})"


def _layout(plan: Plan) -> list[str]:
    mesh = plan.layout
    degrees = [
        f"{name} {degree}"
        for name, degree in (
            ("pipeline", mesh.pipeline),
            ("replicas", mesh.data_parallel),
            ("fully sharded", mesh.fully_sharded),
            ("context", mesh.context),
            ("tensor", mesh.tensor),
        )
        if degree > 1
    ]
    ranks = f"{_count(mesh.world_size, 'rank')} = {_count(mesh.hosts, 'host')} × {mesh.workers_per_host}"
    lines = [f"{ranks} = {' × '.join(degrees) if degrees else 'one rank'}"]
    if mesh.expert > 1:
        lines.append(f"experts over {mesh.expert} ranks of the sharded group")
    return lines


def _batch(plan: Plan) -> list[str]:
    batch = plan.batch
    return [
        f"{batch.global_batch_size:,} sequences of {batch.sequence_length:,} tokens a step = micro-batch "
        f"{batch.micro_batch_size} × {batch.data_parallel_size} data-parallel × {batch.accumulation_steps} accumulated",
        f"{batch.num_steps:,} steps of {batch.tokens_per_step:,} tokens = {short_count(batch.total_tokens)} tokens",
    ]


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    capacity = UNKNOWN if memory.capacity_gib is None else f"{memory.capacity_gib:.1f} GiB"
    verdict = {True: "fits", False: "DOES NOT FIT", None: "not compared"}[memory.fits]
    parts = [f"{name.replace('_', ' ')} {gib:.1f}" for name, gib in memory.components_gib.items() if gib >= 0.05]
    return [
        f"{memory.total_gib:.1f} GiB on the fullest rank ({memory.rank}), capacity {capacity}: {verdict}",
        " + ".join(parts) if parts else "every part below 0.05 GiB",
    ]


def _fallback_memory(plan: Plan) -> list[str]:
    return [
        f"{found.memory.total_gib:.1f} of {found.memory.capacity_gib:.1f} GiB on {found.type}: "
        f"{'fits' if found.memory.fits else 'DOES NOT FIT'}"
        for found in plan.fallbacks
    ]


def _step(plan: Plan) -> list[str]:
    step = plan.step
    if step.total_s is None:
        return [f"{UNKNOWN} ({step.basis}); {step.flops_per_token:.3g} FLOPs a token"]
    shares = [
        f"{name.replace('_', ' ')} {seconds / step.total_s:.0%}"
        for name, seconds in sorted(step.components_s.items(), key=lambda item: -item[1])
        if seconds / step.total_s >= 0.005
    ]
    return [
        f"{step.total_s:.3g} s, {step.tokens_per_s:,.0f} tokens/s ({step.tokens_per_s_per_accelerator:,.0f} each), "
        f"MFU {step.mfu:.1%}",
        ", ".join(shares),
        f"basis: {step.basis}",
    ]


def _cost(cost: CostEstimate) -> str:
    mark = "*" if cost.chosen else " "
    rate = UNKNOWN if cost.usd_per_hour is None else f"${cost.usd_per_hour:,.2f}/h"
    return f"{mark} {cost.kind:<14} {rate:>14}   {_spread(cost.days, '', 1)} days   {_spread(cost.usd, '$', 0)} in all"


def _elsewhere(plan: Plan) -> str:
    """The same machines by the hour, as other services rent them out on demand."""
    names = {"ec2": "EC2", "training_job": "a training job", "hyperpod": "HyperPod"}
    rates = [
        f"{names[cost.service]} {UNKNOWN if cost.usd_per_hour is None else f'${cost.usd_per_hour:,.2f}/h'}"
        for cost in plan.other_services
        if cost.kind == "on_demand" and cost.service is not None
    ]
    return f"the same machines on demand elsewhere: {', '.join(rates)}"


def _total(plan: Plan) -> list[str]:
    """The run with what it stores and moves; a sum with an unknown part does not call itself the total."""
    total = plan.total
    if total is None:
        return []
    spread = _spread(total.known_usd, "$", 0)
    if total.unknown:
        missing = ", ".join(name.replace("_", " ") for name in total.unknown)
        spread = f"{UNKNOWN}: {spread} without {missing}" if total.known_usd else f"{UNKNOWN}: {missing}"
    lines = [spread]
    for part in total.parts[1:]:
        price = UNKNOWN if part.usd is None else f"${part.usd.p50:,.{0 if part.usd.p50 >= 10 else 2}f}"
        lines.append(f"{part.name.replace('_', ' ')} {price}: {part.basis.removeprefix('unknown: ')}")
    return lines


def _spread(value: Distribution | None, unit: str, digits: int) -> str:
    if value is None:
        return UNKNOWN
    return f"{unit}{value.p50:,.{digits}f} ({unit}{value.p10:,.{digits}f} to {unit}{value.p90:,.{digits}f})"


def _jobs(plan: Plan) -> str:
    first = plan.segments[0]
    hours = f"at most {first.max_run_s / 3600:g} h each"
    if first.max_wait_s is not None:
        hours += f", {first.max_wait_s / 3600:g} h with waiting"
    slower = "".join(
        f"; {_count(found.num_jobs, 'job')} on {found.type}"
        for found in plan.fallbacks
        if found.num_jobs not in (None, len(plan.segments))
    )
    return f"{_count(len(plan.segments), 'job')}, {hours}{slower}"


def _failures(plan: Plan) -> list[str]:
    reliability = plan.reliability
    if reliability.failures_per_day is None:
        return [f"{UNKNOWN} ({reliability.basis})"]
    over = UNKNOWN if reliability.failures_expected is None else f"{reliability.failures_expected:.1f}"
    if reliability.failures is not None:
        over += f" ({reliability.failures.p10:.0f} to {reliability.failures.p90:.0f})"
    lines = [f"{reliability.failures_per_day:.2g} a day, {over} over the run", f"basis: {reliability.basis}"]
    if reliability.effective_share is not None:
        lines.append(f"{reliability.effective_share:.1%} of the running time computes what lasts")
    if plan.recipe.capacity.kind == "spot":
        lines.append(f"spot interruptions a month, by the advisor: {reliability.spot_interruption_bucket or UNKNOWN}")
    return lines


def _checkpoints(plan: Plan) -> str:
    reliability = plan.reliability
    every = f"every {reliability.checkpoint_interval_steps:,} steps"
    if reliability.checkpoint_interval_steps == 0:
        every = "at the end only"
    advice = reliability.recommended_interval_steps
    best = f"; {advice:,} would cost least" if advice is not None else ""
    return f"{every}{best}; {_gb(plan.disk.checkpoint_gb)} each"


def _disk(plan: Plan) -> str:
    disk = plan.disk
    parts = [
        f"checkpoints {_gb(disk.checkpoints_on_disk_gb)}",
        f"data {UNKNOWN if disk.data_gb is None else _gb(disk.data_gb)}",
        f"model {_gb(disk.model_gb)}",
    ]
    available = UNKNOWN if disk.available_gb is None else _gb(disk.available_gb)
    verdict = {True: "fits", False: "DOES NOT FIT", None: "not compared"}[disk.fits]
    return f"{' + '.join(parts)} on a host, available {available}: {verdict}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _gb(value: float) -> str:
    return f"{value:,.0f} GB" if value >= 10 or value == 0 else f"{value:.2g} GB"
