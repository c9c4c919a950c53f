"""Which parameter is treated how, by its name in the single-process model."""

from __future__ import annotations

from torch import nn


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices of blocks and to the output head; not to norms, biases and the
    embedding, tied or not."""
    return parameter.ndim >= 2 and not name.startswith("embedding.")


def is_orthogonalised(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon applies: to the matrices of blocks but for the router, whose rows are one expert's each. Embedding,
    head, norms and biases go by AdamW."""
    return parameter.ndim >= 2 and name.startswith("layers.") and ".router." not in name


def matrices_in(name: str, num_experts: int) -> int:
    """How many matrices stand in one parameter: the experts of a stack are each their own."""
    return num_experts if ".experts." in name else 1
