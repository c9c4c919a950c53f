"""Which parameter is treated how, by its name in the single-process model."""

from __future__ import annotations

from torch import nn


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices of blocks and to the output head; not to norms, biases and the
    embedding, tied or not."""
    return parameter.ndim >= 2 and not name.startswith("embedding.")
