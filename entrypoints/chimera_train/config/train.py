"""How long, in what batches, and how one step is computed: the recipe's `train` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem

ActivationCheckpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in what batches, and how one step is computed."""

    num_steps: int
    """Optimizer steps of the whole run, over all its segments and resumes."""
    global_batch_size: int
    """Sequences an optimizer step: micro_batch_size × data-parallel size × accumulation steps."""
    micro_batch_size: int
    """Sequences a rank holds in one forward pass."""
    sequence_length: int
    """Tokens a sequence."""
    seed: int = 1234
    """Of the initial weights and of the order of the data. The order depends on it alone, never on the world size."""
    initial_weights: str | None = None
    """Folder of a model in Hugging Face's format (config.json, safetensors) to start from: an absolute path, or
    `<channel>/<folder>` among the input channels; null: random weights. A run that has a checkpoint resumes from that.
    """
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False
    """torch.compile each block."""
    loss_chunk_tokens: int = 2048
    """Logits are made and consumed for this many tokens at a time, so that they never stand whole in memory.
    0 makes them in one piece."""
    deterministic: bool = False
    """Deterministic kernels: the same bits on the same hardware, slower on GPUs."""
    log_interval: int = 1
    """Steps between metric lines."""
    collective_timeout_s: float = 600.0
    """A collective that takes longer is a hang: the worker exits non-zero so that the service repairs it."""

    def validate(self) -> list[Problem]:
        problems = [
            Problem(f"train.{name}", f"{getattr(self, name)} is not positive")
            for name in ("num_steps", "global_batch_size", "micro_batch_size", "sequence_length", "log_interval")
            if getattr(self, name) < 1
        ]
        if self.initial_weights is not None and (not self.initial_weights or ".." in self.initial_weights.split("/")):
            problems.append(
                Problem(
                    "train.initial_weights",
                    f"{self.initial_weights!r} is no folder",
                    "an absolute path, <channel>/<folder> among the input channels, or null for random weights",
                )
            )
        if self.loss_chunk_tokens < 0:
            problems.append(Problem("train.loss_chunk_tokens", f"{self.loss_chunk_tokens} is negative"))
        if not 0 < self.collective_timeout_s <= 86_400:
            problems.append(
                Problem("train.collective_timeout_s", f"{self.collective_timeout_s:g} is not in (0, 86400]")
            )
        return problems
