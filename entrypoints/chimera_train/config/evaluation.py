"""When and on what the model is evaluated while it trains: the recipe's `evaluation` section."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .data import leaves_channel
from .problem import Problem

MAX_SOURCES = 8
"""Each has metrics of its own, and SageMaker takes 40 metric definitions a job."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss and perplexity, on an interval and at the end of the run. Without `sources` there is none."""

    sources: dict[str, str] = field(default_factory=dict)
    """Name → folder inside the channel `data.channel`, made by the tokenizer of the training data.
    `chimera_sm data prepare --held-out` puts such documents into `val`."""
    interval_steps: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    max_samples: int | None = None
    """Sequences of each source that are read, spread evenly over it and the same ones every time; null reads all."""

    def validate(self) -> list[Problem]:
        problems = []
        if self.interval_steps < 0:
            problems.append(Problem("evaluation.interval_steps", f"{self.interval_steps} is negative"))
        if self.max_samples is not None and self.max_samples < 1:
            problems.append(Problem("evaluation.max_samples", f"{self.max_samples} is not positive", "null reads all"))
        if len(self.sources) > MAX_SOURCES:
            problems.append(Problem("evaluation.sources", f"{len(self.sources)} of them", f"use at most {MAX_SOURCES}"))
        for name, path in self.sources.items():
            key = f"evaluation.sources.{name}"
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
                problems.append(
                    Problem(
                        key, "the name becomes part of metric names", "use 1 to 32 of a-z, 0-9 and _, a letter first"
                    )
                )
            if leaves_channel(path):
                problems.append(Problem(key, f"{path!r} leaves the channel", "give a folder inside the channel"))
        for key in ("interval_steps", "max_samples"):
            if not self.sources and getattr(self, key):
                problems.append(
                    Problem(
                        f"evaluation.{key}",
                        f"{getattr(self, key)}, but nothing is evaluated",
                        "name what is: evaluation.sources.held_out=val",
                        no_effect=True,
                    )
                )
        return problems
