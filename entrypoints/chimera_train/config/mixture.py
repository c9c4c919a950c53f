"""Rules of the `model` section that concern mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .problem import Problem, divisors

if TYPE_CHECKING:
    from .model import ModelConfig

_OF_EXPERTS = (
    "expert_intermediate_size",
    "num_shared_experts",
    "num_dense_layers",
    "router_scoring",
    "normalize_expert_weights",
    "routed_scaling_factor",
    "num_expert_groups",
    "expert_groups_per_token",
    "router_aux_loss_coefficient",
    "router_bias_update_speed",
)


def mixture_problems(model: ModelConfig) -> list[Problem]:
    """Every broken rule; other fields of `model` are valid."""
    if model.num_experts < 0 or (model.num_experts == 0) != (model.experts_per_token == 0):
        return [
            Problem(
                "model.experts_per_token",
                f"num_experts={model.num_experts} with experts_per_token={model.experts_per_token}",
                "set both, or neither",
            )
        ]
    if model.num_experts == 0:
        fields = type(model).__dataclass_fields__
        return [
            Problem(
                f"model.{name}",
                f"{getattr(model, name)} would be ignored: model.num_experts=0",
                f"leave it at {fields[name].default}, or set model.num_experts",
            )
            for name in _OF_EXPERTS
            if getattr(model, name) != fields[name].default
        ]
    return _sizes(model) + _routing(model)


def _sizes(model: ModelConfig) -> list[Problem]:
    problems = []
    width_key = "intermediate_size" if model.expert_intermediate_size is None else "expert_intermediate_size"
    if model.expert_width < 1:
        problems.append(Problem(f"model.{width_key}", f"{model.expert_width} is not positive"))
    for key, size in (("hidden_size", model.hidden_size), (width_key, model.expert_width)):
        if size % 8:
            problems.append(
                Problem(
                    f"model.{key}",
                    f"{size} is not a multiple of 8; grouped matrix products of experts want rows of 16 bytes",
                )
            )
    if model.num_shared_experts < 0:
        problems.append(Problem("model.num_shared_experts", f"{model.num_shared_experts} is negative"))
    if not 0 <= model.num_dense_layers < model.num_layers:
        problems.append(
            Problem(
                "model.num_dense_layers",
                f"{model.num_dense_layers} of model.num_layers={model.num_layers} leave no layer for experts",
                f"use 0 to {model.num_layers - 1}, or set model.num_experts=0",
            )
        )
    return problems


def _routing(model: ModelConfig) -> list[Problem]:
    problems = []
    if model.routed_scaling_factor <= 0:
        problems.append(Problem("model.routed_scaling_factor", f"{model.routed_scaling_factor} is not positive"))
    if model.router_bias_update_speed is not None and model.router_bias_update_speed < 0:
        problems.append(
            Problem(
                "model.router_bias_update_speed",
                f"{model.router_bias_update_speed} is negative",
                "0 keeps the bias as it is, null has none",
            )
        )
    groups, chosen = model.num_expert_groups, model.expert_groups_per_token
    if (groups == 0) != (chosen == 0):
        problems.append(
            Problem(
                "model.expert_groups_per_token",
                f"num_expert_groups={groups} with expert_groups_per_token={chosen}",
                "set both, or neither",
            )
        )
    elif groups < 0 or (groups and model.num_experts % groups):
        problems.append(
            Problem(
                "model.num_expert_groups",
                f"{groups} does not divide model.num_experts={model.num_experts}",
                f"use one of {divisors(model.num_experts)}",
            )
        )
    elif not 0 <= chosen <= groups:
        problems.append(
            Problem("model.expert_groups_per_token", f"{chosen} is not between 1 and model.num_expert_groups={groups}")
        )
    elif groups and model.num_experts // groups < 2 and model.router_bias_update_speed is not None:
        problems.append(
            Problem(
                "model.num_expert_groups",
                f"{groups} leaves one expert a group, and with a bias a group's score is the sum of its best two",
                f"use a divisor of {model.num_experts // 2}",
            )
        )
    available = model.num_experts // groups * chosen if groups else model.num_experts
    if not problems and model.experts_per_token > available:
        of = f"{chosen} of {groups} groups of " if groups else ""
        problems.append(
            Problem(
                "model.experts_per_token",
                f"{model.experts_per_token} exceeds the {available} experts of {of}model.num_experts="
                f"{model.num_experts}",
            )
        )
    return problems
