"""What every driver is given and what it gives back, so that all train the same model on the same tokens.

A driver is called as `python DRIVER.py WORKLOAD.json RESULT.json`, as one process a rank; where there are several, with
torchrun's environment variables. This file needs numpy and torch alone, because drivers run in an environment that
has not got the project.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Model:
    """Llama's shape; names as in `chimera_train.config.ModelConfig`."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tie_embeddings: bool


@dataclass(frozen=True, kw_only=True)
class Workload:
    model: Model
    tokens: str
    """A file of raw token ids, one after the other."""
    token_dtype: str
    micro_batch_size: int
    """Sequences a rank and step; there is no accumulation."""
    sequence_length: int
    num_steps: int
    compile: bool
    save_memory: bool
    """Chunked loss and selective activation checkpointing."""
    param_dtype: str
    learning_rate: float = 8e-4
    max_grad_norm: float = 1.0
    log_interval: int = 10


def read_workload() -> Workload:
    given = json.loads(Path(sys.argv[1]).read_text())
    return Workload(**{**given, "model": Model(**given["model"])})


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def windows(workload: Workload) -> Iterator[np.ndarray]:
    """This rank's batches, int64 [B, S + 1]: the corpus from its start, step by step, as the project's loader cuts it
    without shuffling."""
    ids = np.memmap(workload.tokens, dtype=workload.token_dtype, mode="r")
    length, size = workload.sequence_length, workload.micro_batch_size
    first = rank() * size
    while True:
        starts = range(first * length, (first + size) * length, length)
        yield np.stack([ids[start : start + length + 1].astype(np.int64) for start in starts])
        first += size * int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class Recorder:
    """Collects the ends of steps; the first rank writes the result."""

    num_parameters: int
    ends_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Where the framework prints one, in nats a token."""

    def step_done(self) -> None:
        if torch.cuda.is_available() and len(self.ends_s) % 10 == 0:
            torch.cuda.synchronize()  # not in every step: the host may run ahead in between
        self.ends_s.append(time.perf_counter())

    def write(self) -> None:
        if rank() == 0:
            peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else None
            result = {**asdict(self), "peak_memory_gib": peak, "torch": torch.__version__}
            Path(sys.argv[2]).write_text(json.dumps(result))
