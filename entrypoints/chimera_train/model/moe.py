"""A mixture of experts: every token goes to its best few experts, and none is dropped.

Shapes, by suffix: T tokens, D hidden size, E experts, G groups of experts, K experts a token, R = T × K routed copies
of tokens, F width of an expert's SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .feed_forward import FeedForward
from .local import Linear, local
from .side_loss import add_side_loss, count_in_backward


class Experts(nn.Module):
    """The experts' SwiGLUs, stacked. Rows of expert e are [e × rows, (e + 1) × rows) of each matrix.

    Two dimensions rather than three, so that sharding by rows is even whatever the number of experts and ranks.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, self.width = config.num_experts, config.hidden_size, config.expert_width
        self.gate_proj = nn.Parameter(torch.empty(experts * self.width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts * self.width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts * hidden, self.width))

    def forward(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        """`x_RD` sorted by expert; `ends_E` (int32) is where each expert's rows end. No rows is a valid share. The
        experts are those of this rank's weights.

        One kernel for all experts on Hopper and later; before, torch loops over them and waits for `ends_E`.
        """
        gate_EFD = local(self.gate_proj).unflatten(0, (-1, self.width))
        up_EFD = local(self.up_proj).unflatten(0, (-1, self.width))
        down_EDF = local(self.down_proj).unflatten(0, (-1, x_RD.shape[1]))
        gate_RF = F.grouped_mm(x_RD, gate_EFD.transpose(1, 2), offs=ends_E)
        up_RF = F.grouped_mm(x_RD, up_EFD.transpose(1, 2), offs=ends_E)
        return F.grouped_mm(F.silu(gate_RF) * up_RF, down_EDF.transpose(1, 2), offs=ends_E)


class Dispatch(Protocol):
    """How routed copies of tokens come to their experts and back."""

    def start(self, counts_E: Tensor) -> Callable[[Experts, Tensor], Tensor]:
        """Announce how many copies go to each expert (int64). The result takes the experts and the copies [R, D],
        sorted by expert, and gives what their experts make of them, in the same order."""
        ...


class LocalDispatch:
    """All experts are on this rank."""

    def start(self, counts_E: Tensor) -> Callable[[Experts, Tensor], Tensor]:
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return lambda experts, x_RD: experts(x_RD, ends_E)


def load_balancing_loss(probabilities_TE: Tensor, counts_E: Tensor, num_tokens: int) -> Tensor:
    """E × Σ_e f_e P_e (Switch Transformer, arXiv 2101.03961, eq. 4): f_e routed copies to expert e for each token, P_e
    its mean probability. Balanced, it is K.

    `counts_E` is of `num_tokens` tokens. Where these are more than the T of `probabilities_TE`, the result is an
    addend: the sum over all who hold a part of the tokens is the loss, and so it is with the gradient.
    """
    share_E = counts_E.float() / num_tokens
    return probabilities_TE.shape[1] * (share_E * probabilities_TE.sum(dim=0)).sum() / num_tokens


class MixtureOfExperts(nn.Module):
    """The router, its experts, and the experts that all tokens share.

    Mixtral (arXiv 2401.04088, §2.1) and Qwen3-MoE score by softmax over all experts; DeepSeek-V3 (arXiv 2412.19437,
    §2.1.2) by sigmoid, with a bias for choosing and a choice limited to a few groups of experts.
    """

    expert_bias: Tensor | None
    """[E], float32 whatever the model computes in. Part of the model, but not trained by gradient."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.router = Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        shared_width = config.num_shared_experts * config.expert_width
        self.shared_experts = FeedForward(config.hidden_size, shared_width) if shared_width else None
        has_bias = config.router_bias_update_speed is not None
        self.register_buffer("expert_bias", torch.empty(config.num_experts, dtype=torch.float32) if has_bias else None)
        self.load: Tensor | None = None
        """Int64 [E]: routed copies to each expert since the last step, once somebody wants to know."""
        self.dispatch: Dispatch = LocalDispatch()
        self.sum_over_pieces: Callable[[Tensor], Tensor] | None = None
        """Sums a vector over the ranks that hold the other pieces of this rank's sequences; None: it has them whole."""
        self.num_pieces = 1

    def forward(self, x_BSD: Tensor, balance_weight: Tensor | None) -> Tensor:
        """The experts' mix. `balance_weight` (scalar; this rank's addend of it) × the load-balancing loss is added to
        what is minimised."""
        x_TD = x_BSD.flatten(0, 1)
        scores_TE = self._scores(x_TD)
        weights_TK, experts_TK = self._choose(scores_TE)

        # Counting by comparison, because bincount would make the host wait for the device.
        experts_R = experts_TK.flatten()
        counts_E = (experts_R[:, None] == torch.arange(self.config.num_experts, device=x_TD.device)).sum(dim=0)
        run = self.dispatch.start(counts_E)
        shared_TD = self.shared_experts(x_TD) if self.shared_experts is not None else None
        order_R = experts_R.argsort(stable=True)
        out_RD = run(self.experts, x_TD[order_R // self.config.experts_per_token])
        # Undoing the sort and adding over K has one order of summation, which a scatter-add has not.
        out_TKD = out_RD[order_R.argsort()].unflatten(0, (-1, self.config.experts_per_token))
        out_TD = (out_TKD * weights_TK.to(x_TD.dtype)[..., None]).sum(dim=1)
        if shared_TD is not None:
            out_TD = out_TD + shared_TD

        if balance_weight is not None:
            out_TD = add_side_loss(out_TD, self._balance_loss(scores_TE, counts_E, balance_weight))
        if self.load is not None:
            out_TD = count_in_backward(out_TD, counts_E, self.load)
        return out_TD.view_as(x_BSD)

    def _scores(self, x_TD: Tensor) -> Tensor:
        """[T, E], float32, in 0 to 1."""
        logits_TE = self.router(x_TD).float()
        return logits_TE.sigmoid() if self.config.router_scoring == "sigmoid" else logits_TE.softmax(dim=-1)

    def _choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (float32) and numbers of every token's experts, each [T, K]."""
        config = self.config
        choice_TE = scores_TE if self.expert_bias is None else scores_TE + self.expert_bias
        if config.num_expert_groups:
            choice_TE = self._within_best_groups(choice_TE)
        experts_TK = choice_TE.topk(config.experts_per_token, dim=-1).indices
        weights_TK = scores_TE.gather(-1, experts_TK)
        if config.normalize_expert_weights:
            # The addend is DeepSeek-V3's: sigmoids may all be 0.
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_TK * config.routed_scaling_factor, experts_TK

    def _within_best_groups(self, choice_TE: Tensor) -> Tensor:
        """Minus infinity for experts outside of a token's best groups. A group is as good as its best expert
        (DeepSeek-V2, arXiv 2405.04434, §2.1.2) or, with a bias, its best two together (DeepSeek-V3)."""
        config = self.config
        choice_TGE = choice_TE.unflatten(-1, (config.num_expert_groups, -1))
        best = 1 if self.expert_bias is None else 2
        groups_TG = choice_TGE.topk(best, dim=-1).values.sum(dim=-1)
        chosen = groups_TG.topk(config.expert_groups_per_token, dim=-1).indices
        outside_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter(-1, chosen, False)
        return choice_TGE.masked_fill(outside_TG[..., None], float("-inf")).flatten(-2)

    def _balance_loss(self, scores_TE: Tensor, counts_E: Tensor, weight: Tensor) -> Tensor:
        if self.config.router_scoring == "sigmoid":
            scores_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
        if self.sum_over_pieces is not None:
            *_, weight = summed = self.sum_over_pieces(torch.cat((counts_E, weight[None])))
            counts_E = summed[:-1]
        return weight * load_balancing_loss(scores_TE, counts_E, self.num_pieces * scores_TE.shape[0])
