"""Loss and perplexity on held-out data, with the model as it trains and without a trace in its state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .config import MeshLayout, TrainRecipe
from .data.held_out import HeldOut
from .distributed import Worker
from .model import Decoder
from .parallel import Meshes, Pipeline, free_gathered, refresh_scales
from .signals import StopRequest
from .step import forward_only

STOP_CHECK_BATCHES = 16
"""Forward passes between two questions whether some rank was asked to stop: a long evaluation must not use up the time
that is left for saving."""


@dataclass(frozen=True)
class Evaluation:
    """Of one source; the same on all ranks."""

    source: str
    loss: float
    """Cross-entropy in nats, mean over the tokens."""
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Evaluator:
    """The held-out data of a run. Construct and call on all ranks alike."""

    def __init__(
        self, recipe: TrainRecipe, layout: MeshLayout, worker: Worker, *, channel: Path, tokenizer_sha256: str
    ):
        """Raises DataError where a source cannot be evaluated on."""
        self._device = worker.device
        self._batch_size = recipe.train.micro_batch_size
        self._rank, self._num_ranks = layout.data_rank(worker.rank), layout.data_parallel_size
        self._sources = {
            name: HeldOut(
                channel / path,
                key=f"evaluation.sources.{name}",
                sequence_length=recipe.train.sequence_length,
                max_samples=recipe.evaluation.max_samples,
                tokenizer_sha256=tokenizer_sha256,
            )
            for name, path in recipe.evaluation.sources.items()
        }

    def run(self, model: Decoder | Pipeline, meshes: Meshes, stop: StopRequest) -> list[Evaluation] | None:
        """Evaluate on every source; None where some rank was asked to stop in between. Collective."""
        sums = torch.zeros(len(self._sources), 2, dtype=torch.float64, device=self._device)
        refresh_scales(model)
        model.eval()
        try:
            with torch.no_grad():
                for number, (source, batch) in enumerate(self._batches()):
                    if number and number % STOP_CHECK_BATCHES == 0 and self._agreed(stop):
                        return None
                    sums[source] += forward_only(model, batch, self._device)
        finally:
            model.train()
            if not isinstance(model, Pipeline):  # which does it itself
                free_gathered(model)
        sums *= meshes.reports_loss
        dist.all_reduce(sums)
        return [
            Evaluation(name, loss_sum / num_tokens, int(num_tokens))
            for name, (loss_sum, num_tokens) in zip(self._sources, sums.tolist(), strict=True)
        ]

    def _batches(self) -> Iterator[tuple[int, np.ndarray]]:
        for number, source in enumerate(self._sources.values()):
            for batch in source.batches(self._batch_size, self._rank, self._num_ranks):
                yield number, batch

    def _agreed(self, stop: StopRequest) -> bool:
        requests: Tensor = torch.tensor(float(stop.requested), device=self._device)
        dist.all_reduce(requests)
        return requests.item() > 0
