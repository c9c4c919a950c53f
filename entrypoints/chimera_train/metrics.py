"""The one table of metrics, and the line that carries them: standard library only.

Everything that reads a training log (CloudWatch metric definitions, progress, ETA, comparison) derives its pattern
from `METRICS`, so a metric is added in one place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "chimera"
UNKNOWN = "unknown"
NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?|nan|inf)"


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    description: str
    digits: int
    """Significant digits in the line."""

    @property
    def regex(self) -> str:
        """Pattern with one group, as CloudWatch's MetricDefinitions wants it (at most 500 characters)."""
        return rf"{PREFIX} step=.*\b{self.name}=({NUMBER})"


METRICS: tuple[Metric, ...] = (
    Metric("loss", "nats/token", "training loss, mean over the global batch's valid tokens", 9),
    Metric("tokens_per_s", "tokens/s", "tokens of the whole job a second, waiting for data included", 5),
    Metric("mfu", "ratio", "model FLOPs utilisation: 6 N + 12 L h s per token over the dense bf16 peak", 4),
    Metric("data_wait_s", "s", "time the step waited for its data, slowest rank of the host", 4),
    Metric("mem_gib", "GiB", "most memory of the device in use since the last line (resident set size on CPU)", 4),
    Metric("mem_reserved_gib", "GiB", "the same with what torch's allocator holds in reserve; on GPUs only", 4),
    Metric("grad_norm", "", "global L2 norm of the gradients before clipping", 9),
    Metric("lr", "", "learning rate of the step", 6),
    Metric("step_s", "s", "wall time of the step", 5),
    Metric("forward_s", "s", "time of a step in forward passes, overlapping communication included", 4),
    Metric("backward_s", "s", "time of a step in backward passes, overlapping communication included", 4),
    Metric("pipeline_s", "s", "time of a step in the pipeline's schedule: forward, backward and its bubble", 4),
    Metric("sync_s", "s", "time of a step in norm and all-reduce, waiting for the slowest rank included", 4),
    Metric("optimizer_s", "s", "time of a step in the optimizer's update", 4),
)
EVALUATION_PREFIX = "chimera_eval"
EVALUATION_METRICS: tuple[Metric, ...] = (
    Metric("loss", "nats/token", "held-out loss, mean over the source's tokens", 9),
    Metric("perplexity", "", "exp(loss)", 6),
)
"""Of each source of `evaluation.sources`, in lines of its own."""


def evaluation_regexes(source: str) -> dict[str, str]:
    """Metric name → pattern with one group, for one source."""
    return {
        f"eval_{metric.name}_{source}": rf"{EVALUATION_PREFIX} step=.* source={source} .*\b{metric.name}=({NUMBER})"
        for metric in EVALUATION_METRICS
    }


SOURCE_PREFIX = "chimera_source"
"""Of each source of a mixture, in lines of its own: the training loss over its tokens."""


def format_source(step: int, source: str, loss: float) -> str:
    """`chimera_source step=100 source=code loss=1.25`"""
    return f"{SOURCE_PREFIX} step={step} source={source} loss={loss:.{BY_NAME['loss'].digits}g}"


def format_evaluation(step: int, source: str, values: Mapping[str, float]) -> str:
    """`chimera_eval step=100 source=held_out loss=2.5 perplexity=12.1825`"""
    parts = [f"{m.name}={values[m.name]:.{m.digits}g}" for m in EVALUATION_METRICS]
    return " ".join([f"{EVALUATION_PREFIX} step={step} source={source}", *parts])


BY_NAME = {metric.name: metric for metric in METRICS}
_LINE = re.compile(rf"\b{PREFIX} step=([0-9]+)((?: [a-z_]+=\S+)+)")


def format_line(step: int, values: Mapping[str, float | None]) -> str:
    """`chimera step=3 loss=2.5 …` in the table's order; None prints `unknown`; an unlisted name is an error."""
    unlisted = set(values) - set(BY_NAME)
    if unlisted:
        raise ValueError(f"not in the metric table: {', '.join(sorted(unlisted))}")
    parts = [f"{PREFIX} step={step}"]
    for metric in METRICS:
        if metric.name in values:
            value = values[metric.name]
            parts.append(f"{metric.name}={UNKNOWN if value is None else f'{value:.{metric.digits}g}'}")
    return " ".join(parts)


def parse_line(line: str) -> dict[str, float] | None:
    """The metrics of a log line (`step` among them, unknown ones left out), or None for any other line."""
    match = _LINE.search(line)
    if not match:
        return None
    found = {"step": float(match.group(1))}
    for pair in match.group(2).split():
        name, _, text = pair.partition("=")
        if name in BY_NAME and text != UNKNOWN:
            try:
                found[name] = float(text)
            except ValueError:
                return None  # a torn line
    return found
