"""How far the reliability model holds: `python benchmarks/planner_reliability.py [--runs 10000] [--json OUT]`.

Prints the closed form of running time against the simulation, the record of Llama 3 405B against what the other
published fleets make one expect of it, and the bands of the shipped recipes' lengths from both.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from chimera_sm import catalog
from chimera_sm.planner import cost
from chimera_sm.planner.coefficients import coefficient
from chimera_sm.planner.fleets import failure_prior, fleets
from chimera_sm.planner.plan import plan, run_shape
from chimera_sm.planner.reliability import (
    daly_interval_s,
    job_failure_rate,
    reclaim_rate_per_h,
    wall_clock_factor,
    young_interval_s,
)
from chimera_sm.planner.simulate import SimulatedJob, Spread, simulate
from chimera_sm.recipe.compose import compose

HOUR = 3600.0
NODES, DAYS, UNEXPECTED = 2_048, 54, 419
"""Llama 3 405B's pre-training; more than 90% of the time was effective."""
STALL_S, RESTART_S = 10.0, 240.0
"""An asynchronous save, and detect, replace and reload: what that effective time implies."""
CASES = [
    # useful hours, interval, save, restart (seconds), interruptions an hour
    (1000, 3600, 60, 900, 0.02),
    (1000, 3600, 60, 900, 0.5),
    (200, 600, 10, 240, 0.3233),
    (100, 7200, 300, 1800, 0.3),
    (50, 36000, 600, 3600, 0.15),
    (100, 1800, 1800, 60, 0.8),
]
RECIPES = [("8b", "on_demand"), ("70b", "on_demand"), ("70b", "spot"), ("405b", "on_demand"), ("405b", "spot")]


def closed_form(runs: int) -> list[dict[str, Any]]:
    rows = []
    for useful_h, interval_s, stall_s, restart_s, rate in CASES:
        job = SimulatedJob(
            useful_s=useful_h * HOUR,
            interval_s=interval_s,
            stall_s=stall_s,
            restart_s=restart_s,
            failures_per_h=rate,
        )
        start = time.perf_counter()
        made = simulate(job, runs=runs)
        seconds = time.perf_counter() - start
        mean, error = float(made.billed_h.mean()), float(made.billed_h.std()) / math.sqrt(runs)
        expected = useful_h * wall_clock_factor(interval_s, stall_s, restart_s, rate)
        rows.append(
            {
                "useful_h": useful_h,
                "interval_s": interval_s,
                "stall_s": stall_s,
                "restart_s": restart_s,
                "rate_per_h": rate,
                "closed_form_h": expected,
                "simulated_h": mean,
                "standard_errors": (mean - expected) / error,
                "seconds": seconds,
            }
        )
    return rows


def llama(runs: int) -> dict[str, Any]:
    node_hours = NODES * DAYS * 24
    prior = failure_prior(exclude="llama3_405b")
    predicted = {name: prior.count_quantile(p, node_hours) for name, p in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))}
    own = next(fleet for fleet in fleets() if fleet.name == "llama3_405b")
    rates = {name: prior.quantile(p) * NODES for name, p in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))}
    rates["recorded"] = own.failures / own.node_hours * NODES
    rows = []
    for name, rate in rates.items():
        interval_s = daly_interval_s(STALL_S, HOUR / rate)
        made = simulate(
            SimulatedJob(
                useful_s=DAYS * 24 * HOUR,
                interval_s=interval_s,
                stall_s=STALL_S,
                restart_s=RESTART_S,
                failures_per_h=rate,
            ),
            runs=max(1, runs // 10),
        )
        rows.append(
            {
                "rate": name,
                "interruptions": rate * DAYS * 24,
                "mean_h_between": 1 / rate,
                "young_s": young_interval_s(STALL_S, HOUR / rate),
                "daly_s": interval_s,
                "effective_share": 1 / wall_clock_factor(interval_s, STALL_S, RESTART_S, rate),
                "effective_share_simulated": DAYS * 24 / float(made.elapsed_h.mean()),
            }
        )
    return {"recorded": UNEXPECTED, "predicted": predicted, "rows": rows}


def bands(runs: int) -> list[dict[str, Any]]:
    rows = []
    for name, kind in RECIPES:
        recipe = compose([f"recipe={name}"])
        made = plan(recipe)
        assert made.job_length is not None
        assert made.step.total_s is not None
        machine = catalog.instance(recipe.instances.type)
        run = run_shape(recipe, made.num_parameters, machine, made.step)
        reclaims = reclaim_rate_per_h(run.hosts, run.spot_bucket) if kind == "spot" else 0.0
        job = SimulatedJob(
            useful_s=run.num_steps * made.step.total_s,
            interval_s=run.interval_steps * made.step.total_s,
            stall_s=run.stall_s,
            restart_s=spread("restart_s"),
            failures_per_h=job_failure_rate(run.hosts, machine.accelerators, run.failures),
            reclaims_per_h=reclaims or 0.0,
            wait_s=spread("spot_wait_s"),
            startup_s=coefficient("startup_s"),
            max_run_s=run.max_run_s,
            step_spread=run.spread,
        )
        start = time.perf_counter()
        simulated = simulate(job, runs=runs).distribution("elapsed_h")
        seconds = time.perf_counter() - start
        days = cost.forecast(run, "spot" if kind == "spot" else "on_demand", "").days
        assert days is not None
        rows.append(
            {
                "recipe": name,
                "kind": kind,
                "closed_form_days": [days.p10, days.p50, days.p90],
                "simulated_days": [simulated.p10 / 24, simulated.p50 / 24, simulated.p90 / 24],
                "seconds": seconds,
            }
        )
    return rows


def spread(name: str) -> Spread:
    return Spread(p10=coefficient(name, "p10"), p50=coefficient(name), p90=coefficient(name, "p90"), per_run=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="simulated runs of each row")
    parser.add_argument("--json", type=Path, help="write the tables here too")
    options = parser.parse_args()
    if options.runs < 100:
        parser.error(f"--runs {options.runs} is too few for a percentile: 100 or more")
    simulate(SimulatedJob(useful_s=1, interval_s=1, stall_s=0, restart_s=0, failures_per_h=0), runs=1)  # loads numpy
    form, record, lengths = closed_form(options.runs), llama(options.runs), bands(options.runs)

    print(f"Running time in hours, closed form against the mean of {options.runs:,} simulated runs")
    print("useful   interval  save  restart  rate/h   closed form  simulated  std. errors  seconds")
    for row in form:
        print(
            f"{row['useful_h']:6,} {row['interval_s']:9,}s {row['stall_s']:4}s {row['restart_s']:7}s "
            f"{row['rate_per_h']:7.3f} {row['closed_form_h']:13,.2f} {row['simulated_h']:10,.2f} "
            f"{row['standard_errors']:12.2f} {row['seconds']:8.2f}"
        )
    print(f"\nLlama 3 405B: {NODES:,} nodes, {DAYS} days, {UNEXPECTED} unexpected interruptions, over 90% effective")
    found = record["predicted"]
    print(f"from the other fleets: {found['p50']:,} interruptions, 80% band {found['p10']:,} to {found['p90']:,}")
    print(f"with C = {STALL_S:.0f} s and R = {RESTART_S:.0f} s, saving at Daly's interval:")
    print("rate      interruptions  hours between  Young s  Daly s  effective  simulated")
    for row in record["rows"]:
        print(
            f"{row['rate']:9} {row['interruptions']:13,.0f} {row['mean_h_between']:14.2f} {row['young_s']:8.0f} "
            f"{row['daly_s']:7.0f} {row['effective_share']:10.1%} {row['effective_share_simulated']:10.1%}"
        )
    print("\nDays of shipped recipes, p10 / p50 / p90")
    print("recipe  kind        closed form            simulated              seconds")
    for row in lengths:
        closed, drawn = (
            " / ".join(f"{days:5.2f}" for days in row[f"{name}_days"]) for name in ("closed_form", "simulated")
        )
        print(f"{row['recipe']:7} {row['kind']:11} {closed:22} {drawn:22} {row['seconds']:7.2f}")
    if options.json:
        tables = {"closed_form": form, "llama3_405b": record, "bands": lengths}
        options.json.write_text(json.dumps(tables, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
