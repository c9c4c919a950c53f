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
    activation_checkpointing_every: int = 1
    """Of the blocks, every n-th is checkpointed; 1 is all."""
    activation_memory_budget: float | None = None
    """In (0, 1]: the compiler chooses what a block keeps for backward so that it is this share of what it would keep by
    itself, and computes the cheapest rest again. In place of activation_checkpointing; needs train.compile."""
    activation_offload: bool = False
    """Move what blocks keep for backward to the host's memory, and back in time. With activation_checkpointing=full
    that is a tensor a block; without, the host's link to the GPU is likely to be too slow. selective holds what it
    keeps where it cannot be moved."""
    compile: bool = False
    """torch.compile each block."""
    loss_chunk_tokens: int = 2048
    """Logits are made and consumed for this many tokens at a time, so that they never stand whole in memory.
    0 makes them in one piece."""
    z_loss: float = 0.0
    """Coefficient of the squared log-normaliser of each token's softmax, added to what is minimised, not to the loss
    that is reported; it keeps logits from drifting (arXiv 2204.02311, §5: 1e-4). 0: none."""
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
        if self.z_loss < 0:
            problems.append(Problem("train.z_loss", f"{self.z_loss} is negative", "0 is none"))
        problems += self._checkpointing_problems()
        if not 0 < self.collective_timeout_s <= 86_400:
            problems.append(
                Problem("train.collective_timeout_s", f"{self.collective_timeout_s:g} is not in (0, 86400]")
            )
        return problems

    def _checkpointing_problems(self) -> list[Problem]:
        problems = []
        if self.activation_offload and self.activation_checkpointing == "selective":
            message = "would move the inputs of blocks, but nothing that activation_checkpointing=selective keeps"
            fix = "set train.activation_checkpointing=full, or train.activation_offload=false"
            problems.append(Problem("train.activation_offload", message, fix))
        every, budget = self.activation_checkpointing_every, self.activation_memory_budget
        if every < 1:
            problems.append(Problem("train.activation_checkpointing_every", f"{every} is not positive", "1 is all"))
        elif every > 1 and self.activation_checkpointing == "none":
            message = f"{every} would be ignored by train.activation_checkpointing=none"
            fix = "set train.activation_checkpointing=full or selective, or train.activation_checkpointing_every=1"
            problems.append(Problem("train.activation_checkpointing_every", message, fix, no_effect=True))
        if budget is None:
            return problems
        key = "train.activation_memory_budget"
        if not 0 < budget <= 1:
            fix = "0.5 keeps half of what the compiler would keep; train.activation_checkpointing=full keeps least"
            problems.append(Problem(key, f"{budget} is not in (0, 1]", fix))
        if not self.compile:
            fix = f"set train.compile=true, or {key}=null and train.activation_checkpointing instead"
            message = f"{budget} is kept by the compiler, and train.compile is false"
            problems.append(Problem(key, message, fix, no_effect=True))
        if self.activation_checkpointing != "none":
            message = f"{budget} decides what is kept, and so does train.activation_checkpointing="
            fix = f"set train.activation_checkpointing=none, or {key}=null"
            problems.append(Problem(key, message + self.activation_checkpointing, fix))
        return problems
