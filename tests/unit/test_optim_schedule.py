import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chimera_train.config import OptimConfig
from chimera_train.optim import (
    build_optimizer,
    clip_factor,
    learning_rate,
    local_grad_norm_squared,
    scale_gradients,
    wsd_decay_steps,
)


def optim(**changes) -> OptimConfig:
    return OptimConfig(learning_rate=1.0, **changes)


def test_cosine_values():
    config = optim(schedule="cosine", warmup_steps=10, min_learning_rate_ratio=0.1)
    values = [learning_rate(s, config, 110) for s in (1, 5, 10, 35, 60, 85, 110)]
    assert values == pytest.approx([0.1, 0.5, 1.0, 0.1 + 0.9 * 0.8535533905932737, 0.55, 0.23180194846605362, 0.1])


def test_wsd_values():
    config = optim(schedule="wsd", warmup_steps=4, min_learning_rate_ratio=0.0, decay_steps=20)
    values = [learning_rate(s, config, 100) for s in (2, 4, 50, 80, 81, 90, 99, 100)]
    assert values == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.95, 0.5, 0.05, 0.0])


def test_wsd_decays_over_a_tenth_by_default_but_not_into_the_warm_up():
    assert wsd_decay_steps(optim(schedule="wsd"), 250) == 25
    assert wsd_decay_steps(optim(schedule="wsd", warmup_steps=98), 100) == 2
    assert wsd_decay_steps(optim(schedule="wsd"), 5) == 1


def test_constant_values():
    config = optim(schedule="constant", warmup_steps=2)
    assert [learning_rate(s, config, 10) for s in (1, 2, 3, 10)] == [0.5, 1.0, 1.0, 1.0]


@given(
    st.sampled_from(["cosine", "wsd", "constant"]),
    st.integers(1, 60),
    st.data(),
)
def test_rate_rises_then_never_rises_again(schedule, num_steps, data):
    warmup = data.draw(st.integers(0, num_steps))
    floor = data.draw(st.floats(0, 1))
    config = optim(schedule=schedule, warmup_steps=warmup, min_learning_rate_ratio=floor)
    rates = [learning_rate(step, config, num_steps) for step in range(1, num_steps + 1)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[: warmup or 1] == sorted(rates[: warmup or 1])
    after = rates[max(0, warmup - 1) :]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(after))
    if schedule != "constant" and warmup < num_steps:
        assert rates[-1] == pytest.approx(floor)


def test_norms_have_no_weight_decay():
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(8, 4), "norm": torch.nn.RMSNorm(4)})
    decayed, others = build_optimizer(model, optim(weight_decay=0.3)).param_groups
    assert [p.shape for p in decayed["params"]] == [(8, 4)]
    assert decayed["weight_decay"] == 0.3
    assert [p.shape for p in others["params"]] == [(4,)]
    assert others["weight_decay"] == 0.0


def test_clipping_equals_torchs():
    parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    for p in parameters:
        p.grad = torch.randn_like(p)
    reference = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for r, p in zip(reference, parameters, strict=True):
        r.grad = p.grad.clone()
    theirs = torch.nn.utils.clip_grad_norm_(reference, 0.7)
    norm = local_grad_norm_squared(parameters, world_size=1).sqrt().item()
    assert norm == pytest.approx(theirs.item(), rel=1e-6)
    scale_gradients(parameters, clip_factor(norm, 0.7))
    for r, p in zip(reference, parameters, strict=True):
        torch.testing.assert_close(p.grad, r.grad)


def test_clip_factor():
    assert clip_factor(5.0, 0) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
