"""The optimizer and its learning rate: the recipe's `optim` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem

OptimizerName = Literal["adamw", "lion", "muon"]
LearningRateSchedule = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]
StateDtype = Literal["float32", "bfloat16", "int8"]

QUANTISATION_BLOCK = 128
"""Elements of one row that share a scale in 8-bit states."""
MUON_MOMENTUM = 0.95
EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, with a warm-up and a decay of its learning rate."""

    name: OptimizerName = "adamw"
    """adamw; lion (the sign of a momentum: half the states; a third to a tenth of AdamW's learning_rate, with as much
    more weight_decay); muon (the momentum of blocks' matrices made orthogonal, AdamW for everything else; its updates
    are of AdamW's size, so that learning_rate and weight_decay are AdamW's)."""
    learning_rate: float
    min_learning_rate_ratio: float = 0.1
    """Floor of the decay, as a share of `learning_rate`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = EPS
    """AdamW's; lion has none."""
    momentum: float | None = None
    """Of muon alone; null is 0.95."""
    weight_decay: float = 0.1
    """On matrices; norms, biases and the embedding have none."""
    state_dtype: StateDtype = "float32"
    """What the states of matrices are kept in. bfloat16 is rounded stochastically; int8 is block-wise dynamic
    quantisation, a scale for every 128 elements of a row. Updates are computed in float32 all the same."""
    offload: bool = False
    """Keep optimizer states in the host's memory; they pass through the GPU in every step. GPUs only."""
    max_grad_norm: float = 1.0
    """Global L2 norm to which gradients are clipped; 0 does not clip."""
    schedule: LearningRateSchedule = "cosine"
    warmup_steps: int = 0
    """Steps of linear warm-up; a run shorter than that (a trial) ends on its slope."""
    decay_steps: int | None = None
    """`wsd` only: length of the final linear decay; None takes a tenth of the run."""

    @property
    def spans_the_run(self) -> bool:
        """Whether the learning rate of a step depends on how many steps there are."""
        return self.schedule in ("cosine", "linear", "wsd")

    @property
    def muon_momentum(self) -> float:
        return MUON_MOMENTUM if self.momentum is None else self.momentum

    def validate(self) -> list[Problem]:
        problems = []
        if self.learning_rate <= 0:
            problems.append(Problem("optim.learning_rate", f"{self.learning_rate} is not positive"))
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                key = name.removeprefix("muon_")
                problems.append(Problem(f"optim.{key}", f"{getattr(self, name)} is not in [0, 1)"))
        if not 0 <= self.min_learning_rate_ratio <= 1:
            problems.append(
                Problem("optim.min_learning_rate_ratio", f"{self.min_learning_rate_ratio} is not in [0, 1]")
            )
        for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
            if getattr(self, name) < 0:
                problems.append(Problem(f"optim.{name}", f"{getattr(self, name)} is negative"))
        if self.eps <= 0:
            problems.append(Problem("optim.eps", f"{self.eps} is not positive"))
        return problems + self._ignored()

    def _ignored(self) -> list[Problem]:
        """Settings that the others leave without effect."""
        problems = []
        if self.decay_steps is not None and self.schedule != "wsd":
            problems.append(
                Problem(
                    "optim.decay_steps",
                    f"would be ignored by optim.schedule={self.schedule}",
                    "set optim.schedule=wsd, or optim.decay_steps=null",
                    no_effect=True,
                )
            )
        if self.momentum is not None and self.name != "muon":
            fix = "set optim.name=muon, or optim.momentum=null; adamw and lion have beta1 and beta2"
            message = f"would be ignored by optim.name={self.name}"
            problems.append(Problem("optim.momentum", message, fix, no_effect=True))
        if self.eps != EPS and self.name == "lion":
            message, fix = "would be ignored by optim.name=lion", f"set optim.eps={EPS}"
            problems.append(Problem("optim.eps", message, fix, no_effect=True))
        return problems
