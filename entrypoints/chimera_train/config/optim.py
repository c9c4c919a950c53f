"""The optimizer and its learning rate: the recipe's `optim` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem

LearningRateSchedule = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with a warm-up and a decay."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float
    min_learning_rate_ratio: float = 0.1
    """Floor of the decay, as a share of `learning_rate`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices; norms, biases and the embedding have none."""
    max_grad_norm: float = 1.0
    """Global L2 norm to which gradients are clipped; 0 does not clip."""
    schedule: LearningRateSchedule = "cosine"
    warmup_steps: int = 0
    """Steps of linear warm-up; a run shorter than that (a trial) ends on its slope."""
    decay_steps: int | None = None
    """`wsd` only: length of the final linear decay; None takes a tenth of the run."""

    def validate(self) -> list[Problem]:
        problems = []
        if self.learning_rate <= 0:
            problems.append(Problem("optim.learning_rate", f"{self.learning_rate} is not positive"))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(Problem(f"optim.{name}", f"{getattr(self, name)} is not in [0, 1)"))
        if not 0 <= self.min_learning_rate_ratio <= 1:
            problems.append(
                Problem("optim.min_learning_rate_ratio", f"{self.min_learning_rate_ratio} is not in [0, 1]")
            )
        for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
            if getattr(self, name) < 0:
                problems.append(Problem(f"optim.{name}", f"{getattr(self, name)} is negative"))
        if self.eps <= 0:
            problems.append(Problem("optim.eps", f"{self.eps} is not positive"))
        if self.decay_steps is not None and self.schedule != "wsd":
            problems.append(
                Problem(
                    "optim.decay_steps",
                    f"would be ignored by optim.schedule={self.schedule}",
                    "set optim.schedule=wsd, or optim.decay_steps=null",
                )
            )
        return problems
