"""Fitting the effective parameters of the step-time model to published runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from chimera_sm.planner.effective import Effective, Parameter, parameters
from chimera_sm.planner.step_model import step_time

from .observations import TimedRuns, weights

SCALE = 0.08
"""Log error beyond which a row pulls less and less."""
PRIOR = 0.1
"""Pull towards the table's values, in rows of one SCALE for a factor of e: for parameters that few rows speak of."""


def fit(runs: TimedRuns, start: Sequence[Parameter] | None = None, *, evaluations: int = 80) -> tuple[Parameter, ...]:
    """Least squares of the logarithm of step time, robust against outliers, within each parameter's bounds."""
    table = tuple(start or parameters())
    free = [index for index, parameter in enumerate(table) if parameter.lower < parameter.upper]
    lower, upper = (np.log([getattr(table[index], name) for index in free]) for name in ("lower", "upper"))
    prior = np.log([table[index].value for index in free])
    root_weight = np.sqrt(weights(runs.rows))

    def residuals(logs: np.ndarray) -> np.ndarray:
        error = log_errors(runs, _with(table, free, logs)) / SCALE
        robust = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([root_weight * robust, PRIOR * (logs - prior)])

    start_logs = np.clip(prior, lower + 1e-6, upper - 1e-6)
    found = least_squares(residuals, start_logs, bounds=(lower, upper), max_nfev=evaluations, x_scale=0.3)
    return _with(table, free, found.x)


def log_errors(runs: TimedRuns, table: Sequence[Parameter]) -> np.ndarray:
    """Of predicted over measured step time."""
    return np.log(step_time(runs.case, Effective(table)).total) - runs.log_step_s


def _with(table: Sequence[Parameter], free: Sequence[int], logs: np.ndarray) -> tuple[Parameter, ...]:
    values = dict(zip(free, np.exp(logs), strict=True))
    return tuple(
        replace(parameter, value=float(values[index])) if index in values else parameter
        for index, parameter in enumerate(table)
    )
