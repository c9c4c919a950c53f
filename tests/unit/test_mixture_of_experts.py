"""Mixtures of experts in a recipe: rules, parameters, stages; and how a token chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chimera_train.config import ModelConfig, num_active_parameters, num_parameters
from chimera_train.config.flops import layer_parameters
from chimera_train.config.stages import stages
from chimera_train.model import Decoder, initialize
from chimera_train.model.moe import MixtureOfExperts

DENSE = ModelConfig(
    name="m", vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=6, num_heads=4, num_kv_heads=2
)
MODEL = replace(
    DENSE,
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=16,
    num_shared_experts=1,
    num_dense_layers=2,
    router_scoring="sigmoid",
    num_expert_groups=4,
    expert_groups_per_token=2,
    router_bias_update_speed=0.001,
)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_experts": 0}, "experts_per_token"),
        ({"experts_per_token": 0}, "experts_per_token"),
        ({"experts_per_token": 5}, "experts_per_token"),  # two groups of two have but four
        ({"expert_intermediate_size": 20}, "expert_intermediate_size"),
        ({"expert_intermediate_size": 0}, "expert_intermediate_size"),
        ({"expert_intermediate_size": None, "intermediate_size": 60}, "intermediate_size"),
        ({"num_shared_experts": -1}, "num_shared_experts"),
        ({"num_dense_layers": 6}, "num_dense_layers"),
        ({"num_dense_layers": -1}, "num_dense_layers"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
        ({"router_bias_update_speed": -0.1}, "router_bias_update_speed"),
        ({"num_expert_groups": 0}, "expert_groups_per_token"),
        ({"num_expert_groups": 3}, "num_expert_groups"),
        ({"num_expert_groups": 8}, "num_expert_groups"),  # a bias wants two experts a group
        ({"expert_groups_per_token": 5}, "expert_groups_per_token"),
    ],
)
def test_a_broken_rule_names_its_key(changes: dict, key: str):
    assert MODEL.validate() == []
    assert [problem.key for problem in replace(MODEL, **changes).validate()] == [f"model.{key}"]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_expert_groups": 8, "router_bias_update_speed": None},
        {"router_bias_update_speed": 0.0},
        {"num_expert_groups": 0, "expert_groups_per_token": 0, "experts_per_token": 8},
        {"num_dense_layers": 0, "num_shared_experts": 0, "expert_intermediate_size": None},
    ],
)
def test_what_is_right_is_not_refused(changes: dict):
    assert replace(MODEL, **changes).validate() == []


def test_what_a_dense_model_would_ignore_is_refused():
    problems = replace(MODEL, num_experts=0, experts_per_token=0).validate()
    assert {problem.key for problem in problems} == {
        "model.expert_intermediate_size",
        "model.num_shared_experts",
        "model.num_dense_layers",
        "model.router_scoring",
        "model.num_expert_groups",
        "model.expert_groups_per_token",
        "model.router_bias_update_speed",
    }


def test_parameters_are_those_of_the_model_and_active_ones_leave_experts_out():
    with torch.device("meta"):
        model = Decoder(MODEL)
    assert num_parameters(MODEL) == sum(p.numel() for p in model.parameters())
    left_out = MODEL.num_experts - MODEL.experts_per_token
    assert num_parameters(MODEL) - num_active_parameters(MODEL) == 4 * left_out * 3 * 32 * 16


@given(dense=st.integers(0, 11), count=st.integers(1, 12), width=st.sampled_from([8, 64, 512]))
def test_no_cut_into_stages_has_a_faster_slowest_stage(dense: int, count: int, width: int):
    model = replace(MODEL, num_layers=12, num_dense_layers=dense, intermediate_size=width)
    costs = [layer_parameters(model, layer, active=True) for layer in range(12)]
    costs[-1] += model.vocab_size * model.hidden_size
    found = stages(model, count)
    assert [layer for stage in found for layer in stage.layers] == list(range(12))
    assert all(stage.layers for stage in found)
    assert [stage.first for stage in found] == [True] + [False] * (count - 1)
    slowest = max(sum(costs[layer] for layer in stage.layers) for stage in found)
    # Filling stages up to just below that needs more of them than there are.
    needed, room = 1, slowest - 1
    for cost in costs:
        if cost > room:
            needed, room = needed + 1, slowest - 1
        room -= cost
    assert needed > count or max(costs) == slowest


def mixture(config: ModelConfig) -> MixtureOfExperts:
    model = Decoder(config)
    initialize(model, 0)
    found = model.layers["5"].feed_forward
    assert isinstance(found, MixtureOfExperts)
    return found


def test_without_a_bias_a_group_is_as_good_as_its_best_expert():
    layer = mixture(replace(MODEL, router_bias_update_speed=None, expert_groups_per_token=1, experts_per_token=1))
    scores_TE = torch.tensor([[0.6, 0.5, 0.9, 0.0, 0.1, 0.1, 0.1, 0.1]])
    assert layer._choose(scores_TE)[1].tolist() == [[2]]
    biased = mixture(replace(MODEL, expert_groups_per_token=1, experts_per_token=1))
    assert biased._choose(scores_TE)[1].tolist() == [[0]], "with a bias, as its best two together"


def test_the_bias_chooses_and_does_not_weigh():
    layer = mixture(replace(MODEL, num_expert_groups=0, expert_groups_per_token=0, normalize_expert_weights=False))
    assert layer.expert_bias is not None
    scores_TE = torch.linspace(0.1, 0.8, 8)[None]
    assert layer._choose(scores_TE)[1].sort().values.tolist() == [[6, 7]]
    layer.expert_bias[0] = 1.0
    weights_TK, experts_TK = layer._choose(scores_TE)
    assert experts_TK.tolist() == [[0, 7]]
    torch.testing.assert_close(weights_TK, torch.tensor([[0.1, 0.8]]))


def test_copies_are_counted_once_whatever_is_computed_again():
    layer = mixture(MODEL)
    layer.load = torch.zeros(8, dtype=torch.int64)
    x_BSD = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.no_grad():
        layer(x_BSD, None)
    assert layer.load.sum() == 0, "nothing was trained"
    out = torch.utils.checkpoint.checkpoint(layer, x_BSD, None, use_reentrant=False)
    out.sum().backward()
    assert layer.load.sum() == 2 * 5 * MODEL.experts_per_token
