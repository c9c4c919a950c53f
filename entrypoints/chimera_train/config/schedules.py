"""Pipeline schedules: what each needs, and which rank of a pipeline holds which stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]


@dataclass(frozen=True)
class Schedule:
    """The constraints are torch's own (torch.distributed.pipelining.schedules)."""

    source: str
    default_stages_per_rank: int
    fixed_stages_per_rank: bool = True
    """No other number than the default is possible."""
    v_shaped: bool = False
    """Stages run down the ranks and back up, so the first and the last are on the same one; else they go round."""
    splits_backward: bool = False
    """Gradients of activations and of weights are computed at different times, to fill the bubble with the latter."""
    micro_batches_per_rank: int = 1
    """At least so many micro-batches times the ranks of the pipeline."""
    in_rounds: bool = False
    """Micro-batches go through a rank's stages in equal rounds, each of at least as many as there are ranks."""

    def allows(self, num_micro_batches: int, ranks: int) -> bool:
        """Whether the schedule exists, and every rank works at some time."""
        if num_micro_batches < self.micro_batches_per_rank * ranks:
            return False
        return not self.in_rounds or num_micro_batches % (num_micro_batches // ranks) == 0

    def rule(self, ranks: int) -> str:
        """What `allows` asks, in words."""
        rule = f"at least {self.micro_batches_per_rank * ranks} micro-batches"
        return rule + (f" in equal rounds of {ranks} or more" if self.in_rounds else "")


SCHEDULES: dict[PipelineSchedule, Schedule] = {
    "gpipe": Schedule("arXiv 1811.06965", 1),
    "1f1b": Schedule("arXiv 1806.03377", 1),
    "interleaved_1f1b": Schedule("arXiv 2104.04473, §2.2", 2, fixed_stages_per_rank=False, in_rounds=True),
    "interleaved_zero_bubble": Schedule(
        "arXiv 2401.10241, ZB-1P", 2, fixed_stages_per_rank=False, splits_backward=True, in_rounds=True
    ),
    "zbv": Schedule("arXiv 2401.10241, §6", 2, v_shaped=True, splits_backward=True),
    "dualpipev": Schedule(
        "arXiv 2412.19437, cut in half", 2, v_shaped=True, splits_backward=True, micro_batches_per_rank=2
    ),
}
