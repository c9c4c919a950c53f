"""A mixture of experts: every token goes to its best few experts, and none is dropped.

Shapes, by suffix: T tokens, D hidden size, E experts, K experts a token, R = T × K routed copies of tokens, F width of
an expert's SwiGLU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .local import Linear, local
from .side_loss import add_side_loss


class Experts(nn.Module):
    """The experts' SwiGLUs, stacked. Rows of expert e are [e × rows, (e + 1) × rows) of each matrix.

    Two dimensions rather than three, so that sharding by rows is even whatever the number of experts and ranks.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, width = config.num_experts, config.hidden_size, config.intermediate_size
        self.num_experts = experts
        self.gate_proj = nn.Parameter(torch.empty(experts * width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts * hidden, width))

    def forward(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        """`x_RD` sorted by expert; `ends_E` (int32) is where each expert's rows end. No rows is a valid share.

        One kernel for all experts on Hopper and later; before, torch loops over them and waits for `ends_E`.
        """
        gate_EFD, up_EFD, down_EDF = (
            local(weight).unflatten(0, (self.num_experts, -1))
            for weight in (self.gate_proj, self.up_proj, self.down_proj)
        )
        gate_RF = F.grouped_mm(x_RD, gate_EFD.transpose(1, 2), offs=ends_E)
        up_RF = F.grouped_mm(x_RD, up_EFD.transpose(1, 2), offs=ends_E)
        return F.grouped_mm(F.silu(gate_RF) * up_RF, down_EDF.transpose(1, 2), offs=ends_E)


def load_balancing_loss(probabilities_TE: Tensor, counts_E: Tensor) -> Tensor:
    """E × Σ_e f_e P_e (Switch Transformer, arXiv 2101.03961, eq. 4): f_e routed copies to expert e for each token, P_e
    its mean probability. Balanced, it is K."""
    share_E = counts_E.float() / probabilities_TE.shape[0]
    return probabilities_TE.shape[1] * (share_E * probabilities_TE.mean(dim=0)).sum()


class MixtureOfExperts(nn.Module):
    """Softmax over all experts, the top few renormalised to sum to one (Mixtral, arXiv 2401.04088, §2.1)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.experts_per_token = config.experts_per_token
        self.router = Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x_BSD: Tensor, balance_weight: Tensor | None) -> Tensor:
        """The experts' mix. `balance_weight` (scalar) × the load-balancing loss is added to what is minimised."""
        x_TD = x_BSD.flatten(0, 1)
        probabilities_TE = self.router(x_TD).softmax(dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = probabilities_TE.topk(self.experts_per_token, dim=-1)
        weights_TK = (weights_TK / weights_TK.sum(dim=-1, keepdim=True)).to(x_TD.dtype)

        # Counting by comparison, because bincount would make the host wait for the device.
        experts_R = experts_TK.flatten()
        counts_E = (experts_R[:, None] == torch.arange(self.num_experts, device=x_TD.device)).sum(dim=0)
        order_R = experts_R.argsort(stable=True)
        sorted_RD = x_TD[order_R // self.experts_per_token]
        out_RD = self.experts(sorted_RD, counts_E.cumsum(0).to(torch.int32))
        # Undoing the sort and adding over K has one order of summation, which a scatter-add has not.
        out_TKD = out_RD[order_R.argsort()].unflatten(0, (-1, self.experts_per_token))
        out_TD = (out_TKD * weights_TK[..., None]).sum(dim=1)

        if balance_weight is not None:
            balance = load_balancing_loss(probabilities_TE, counts_E)
            out_TD = add_side_loss(out_TD, balance_weight * balance)
        return out_TD.view_as(x_BSD)
