"""Rotary positions beyond the context that a model was first trained on: the recipe's `model.rope_scaling`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from .problem import Problem

RopeType = Literal["llama3", "yarn", "linear"]
FIELDS_OF: dict[RopeType, tuple[str, ...]] = {
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "linear": (),
}
"""What a type reads beside `factor`."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies are slowed so that `factor` times the original context fits. Keys are Hugging Face's."""

    type: RopeType = "llama3"
    """`llama3`: Llama 3.1's, by wavelength; `yarn`: arXiv 2309.00071; `linear`: every frequency divided by `factor`."""
    factor: float = 8.0
    original_max_position_embeddings: int = 8192
    """Context of the first training, in tokens (`llama3`, `yarn`)."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths that fit fewer times into the original context are slowed by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths that fit more often keep their frequency."""
    beta_fast: float = 32.0
    """`yarn`: channels that turn more often within the original context keep their frequency."""
    beta_slow: float = 1.0
    """`yarn`: channels that turn less often are slowed by `factor`."""
    attention_factor: float | None = None
    """`yarn`: on cosines and sines; null: from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float | None = None
    """`yarn`: DeepSeek's weight of log(factor) in `attention_factor`, over that of `mscale_all_dim`."""
    mscale_all_dim: float | None = None
    """`yarn`: also sharpens the softmax of latent attention."""
    truncate: bool = True
    """`yarn`: the two borders between channels are rounded outwards to whole channels."""

    @property
    def table_scale(self) -> float:
        """On cosines and sines, so that scores keep their spread (arXiv 2309.00071, §3.4)."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._yarn_mscale(self.mscale) / self._yarn_mscale(self.mscale_all_dim)
        return self._yarn_mscale(1.0)

    @property
    def softmax_scale(self) -> float:
        """On the scores of latent attention, beside 1 / sqrt(channels of a head) (DeepSeek-V3's own model.py)."""
        if self.type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return self._yarn_mscale(self.mscale_all_dim) ** 2

    def _yarn_mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def validate(self) -> list[Problem]:
        problems = []
        used = ("type", "factor", *FIELDS_OF[self.type])
        for field in dataclasses.fields(self):
            if field.name not in used and getattr(self, field.name) != field.default:
                problems.append(
                    Problem(
                        f"model.rope_scaling.{field.name}",
                        f"would be ignored by model.rope_scaling.type={self.type}",
                        "leave it out, or set the type",
                    )
                )
        if self.factor < 1:
            problems.append(Problem("model.rope_scaling.factor", f"{self.factor} is below 1", "null does not scale"))
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            message = f"{self.low_freq_factor} is not between 0 and high_freq_factor={self.high_freq_factor}"
            problems.append(Problem("model.rope_scaling.low_freq_factor", message))
        if not 0 < self.beta_slow <= self.beta_fast:
            message = f"{self.beta_slow} is not above 0 and up to beta_fast={self.beta_fast}"
            problems.append(Problem("model.rope_scaling.beta_slow", message))
        if self.original_max_position_embeddings < 1:
            problems.append(
                Problem(
                    "model.rope_scaling.original_max_position_embeddings",
                    f"{self.original_max_position_embeddings} is not positive",
                )
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                problems.append(Problem(f"model.rope_scaling.{name}", f"{value} is not positive", "null leaves it out"))
        return problems
