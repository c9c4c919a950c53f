"""Expert parallel: every rank of the expert axis has some experts whole, and tokens travel to them and back.

None is dropped and nothing is padded: ranks tell each other how many tokens they send, and send just these. Shapes, by
suffix: D hidden size, E experts, N ranks, L = E / N experts of a rank, R routed copies of this rank's tokens, Q copies
that came to this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, all_to_all_single_autograd

from ..model import Decoder
from ..model.moe import Experts, MixtureOfExperts
from .meshes import Meshes
from .split import split_parameter


class AllToAllDispatch:
    """Experts are split over the ranks of `group`, in rank order."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def start(self, counts_E: Tensor) -> Callable[[Experts, Tensor], Tensor]:
        """The host has to know the counts, or it could not allocate what is received. It waits for them when the
        experts are to run, so what is queued in between keeps the device busy."""
        counts_NL = all_to_all_single(counts_E, None, None, self._group).unflatten(0, (self._group.size(), -1))
        rows = torch.stack((counts_E.view_as(counts_NL).sum(dim=1), counts_NL.sum(dim=1)))
        return partial(self._run, counts_NL, _copy_to_host(rows))

    def _run(self, counts_NL: Tensor, rows: Callable[[], list[list[int]]], experts: Experts, x_RD: Tensor) -> Tensor:
        sent, received = rows()
        x_QD = all_to_all_single_autograd(x_RD, received, sent, self._group)
        # They come sorted by sender, and by expert of each sender. Sorted by expert, an expert's rows are still in the
        # order of senders, so that sums over them have one order.
        ranks, experts_here = counts_NL.shape
        expert_Q = torch.arange(experts_here, device=x_RD.device).repeat(ranks)
        expert_Q = expert_Q.repeat_interleave(counts_NL.flatten(), output_size=sum(received))
        order_Q = expert_Q.argsort(stable=True)
        out_QD = experts(x_QD[order_Q], counts_NL.sum(dim=0).cumsum(0).to(torch.int32))
        return all_to_all_single_autograd(out_QD[order_Q.argsort()], sent, received, self._group)


def _copy_to_host(tensor: Tensor) -> Callable[[], list[list[int]]]:
    """Start the copy; the result waits for it."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[list[int]]:
        copied.synchronize()
        return on_host.tolist()

    return wait


def apply_expert_parallel(model: Decoder, meshes: Meshes) -> None:
    """In place, before FSDP; `model` may be on the meta device. Collective."""
    if not model.config.num_experts:
        return
    layout = meshes.layout
    if layout.experts_apart:
        meshes.make_expert_mesh()
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if layout.expert > 1:
        for mixture in mixtures:
            mixture.dispatch = AllToAllDispatch(meshes.expert.get_group())
            for name, _ in list(mixture.experts.named_parameters()):
                split_parameter(mixture.experts, name, meshes.expert, dim=0)
    if layout.context * layout.tensor > 1:
        group = meshes.group("context", "tensor")
        for mixture in mixtures:
            mixture.num_pieces = group.size()
            mixture.sum_over_pieces = partial(all_reduce, reduceOp="sum", group=group)
