"""Rules over time: whether jobs and runs get anywhere before they end."""

from __future__ import annotations

from collections.abc import Iterator

from chimera_sm.planner.types import CostEstimate, JobLength, Plan

from .registry import Context, Said, plan_rule

STARTUP_SHARE = 0.2
INTERVALS = 10
"""A job that is cut off loses at most one interval: a tenth of a job of so many."""


@plan_rule("job_length", "capacity.max_run_hours")
def job_length(context: Context) -> Iterator[Said]:
    """A job must start, compute and save before its limit, and should mostly compute."""
    plan, length = context.plan, context.plan.job_length
    if length is None:
        return
    least_s = length.startup_s + (length.step_s or 0.0) + length.save_s
    step = "unknown" if length.step_s is None else f"{length.step_s:.3g} s"
    least = f"to start up ({length.startup_s:.0f} s), do one step ({step}) and save ({length.save_s:.0f} s)"
    if length.limit_s < least_s:
        yield Said(
            f"a job of {length.limit_s:g} s is too short {least}",
            f"set capacity.max_run_hours={_hours(max(least_s, length.startup_s / STARTUP_SHARE), plan)}",
        )
        return
    if length.limit_s < length.startup_s / STARTUP_SHARE and (length.step_s is None or len(plan.segments) > 1):
        yield Said(
            f"starting up takes {length.startup_s / length.limit_s:.0%} of every job of {length.limit_s:g} s",
            f"set capacity.max_run_hours={_hours(length.startup_s / STARTUP_SHARE, plan)}",
            severity="warning",
        )
    if length.step_s is not None and len(plan.segments) > 1:
        yield from _intervals(plan, length, length.step_s)


def _intervals(plan: Plan, length: JobLength, step_s: float) -> Iterator[Said]:
    """SIGTERM at the limit makes the trainer save; that must be done in the grace period."""
    recipe = plan.recipe
    interval_s = min(recipe.checkpoint.interval_steps or recipe.train.num_steps, recipe.train.num_steps) * step_s
    computing_s = length.limit_s - length.startup_s
    steps = recipe.checkpoint.interval_steps
    saves = 0 < steps < recipe.train.num_steps
    what = f"checkpoint.interval_steps={steps} ({interval_s:,.0f} s)" if saves else "the run, which saves at its end"
    fix = f"set checkpoint.interval_steps={max(1, int(computing_s / INTERVALS / step_s))}, or let a job run longer"
    if computing_s < interval_s and length.save_s > recipe.target.grace_s:
        yield Said(
            f"a job is over before {what}, and a save takes {length.save_s:.0f} s of the {recipe.target.grace_s:.0f} s "
            "that a job has after its limit: the run would never get on",
            fix,
        )
    elif computing_s < INTERVALS * interval_s:
        yield Said(
            f"a job of {length.limit_s / 3600:g} h holds {computing_s / interval_s:.1f} times {what}; what was done "
            "since the last save is lost where the one at the limit does not succeed",
            fix,
            severity="warning",
        )


def _hours(seconds: float, plan: Plan) -> str:
    """Rounded up to a quarter of an hour, with the wait that spot needs beside it."""
    hours = -(-seconds // 900) / 4
    wait = plan.recipe.capacity.max_wait_hours
    return f"{hours:g}" + (f" capacity.max_wait_hours={hours:g}" if wait is not None and wait < hours else "")


@plan_rule("spot_progress", "capacity.kind")
def spot_progress(context: Context) -> Iterator[Said]:
    """Reclaims come as often as the spot advisor says."""
    chosen = _chosen(context.plan)
    if chosen.kind == "spot":
        yield from _progress(context.plan, chosen, "use capacity=on_demand, fewer hosts, or save more often")


@plan_rule("failure_progress", "checkpoint.interval_steps")
def failure_progress(context: Context) -> Iterator[Said]:
    """Hardware fails as often as it did in published runs."""
    chosen = _chosen(context.plan)
    if chosen.kind != "spot":
        yield from _progress(context.plan, chosen, "save more often")


def _chosen(plan: Plan) -> CostEstimate:
    return next(cost for cost in plan.costs if cost.chosen)


def _progress(plan: Plan, chosen: CostEstimate, fix: str) -> Iterator[Said]:
    length = plan.job_length
    if length is None or length.limit_s <= length.startup_s:  # `job_length` says so
        return
    kind = chosen.kind.replace("_", "-")
    steps = plan.reliability.recommended_interval_steps
    fix += f": checkpoint.interval_steps={steps}" if steps is not None else ""
    if chosen.would_finish is False:
        yield Said(f"would not finish on {kind} at this interruption rate", fix)
    elif chosen.would_finish and chosen.days is None:
        yield Said(
            f"might not finish on {kind}: at the 90th percentile of interruptions, what is done between two saves is "
            "lost faster than it is made",
            fix,
            severity="warning",
        )
