"""Parameters that other ranks share in, as the tensors that this rank computes with."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter that tensor or expert parallel has split; any other tensor as it is.

    The gradient goes back to the whole parameter under the same split.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharing_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks that a parameter is split over, this one among them; None: it is whole here."""
    return tensor.device_mesh.get_group() if isinstance(tensor, DTensor) else None


class Linear(nn.Linear):
    """A projection that computes with this rank's part of its weight.

    Computing on local tensors, with collectives at the borders of modules, spares the dispatch of a distributed
    tensor in every operation, and lets any operation be used in between.
    """

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)
    """(x, weight, bias) → x @ weight.T + bias, in what format ever."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, local(self.weight), None if self.bias is None else local(self.bias))
