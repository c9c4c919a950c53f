"""Balance of experts without a loss: the routers' biases move against the load of the whole global batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import ModelConfig
from ..model.moe import MixtureOfExperts
from .meshes import Meshes


class RouterBias:
    """Moves the bias of every mixture of experts in `model` once a step, alike on all ranks (arXiv 2408.15664,
    algorithm 1). Does nothing where the model has no bias, or one that stays as it is.

    Construct when the model is on its device. Collective, and so is `step`.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, meshes: Meshes):
        self._speed = config.router_bias_update_speed or 0.0
        self._biases: list[Tensor] = []
        self._loads: list[Tensor] = []
        self._group = None
        if not self._speed:
            return
        if meshes.layout.pipeline > 1:
            self._group = meshes.group("data_parallel", "fully_sharded", "context", "tensor")
        for mixture in model.modules():
            if isinstance(mixture, MixtureOfExperts) and mixture.expert_bias is not None:
                mixture.load = torch.zeros_like(mixture.expert_bias, dtype=torch.int64)
                self._biases.append(mixture.expert_bias)
                self._loads.append(mixture.load)

    def step(self) -> None:
        """Experts that more copies of tokens went to than on average become less likely, and the others more."""
        if not self._loads:
            return
        loads_ME = torch.stack(self._loads)
        dist.all_reduce(loads_ME, group=self._group)
        # (mean - load) × E, in integers, so that its sign is exact.
        missing_ME = loads_ME.sum(dim=1, keepdim=True) - loads_ME * loads_ME.shape[1]
        torch._foreach_add_(self._biases, list((missing_ME.sign() * self._speed).unbind()))
        torch._foreach_zero_(self._loads)
