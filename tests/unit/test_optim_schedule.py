import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chimera_train.config import ModelConfig, OptimConfig
from chimera_train.model import Decoder
from chimera_train.optim import (
    clip_factor,
    learning_rate,
    local_grad_norm_squared,
    scale_gradients,
)
from chimera_train.optim.groups import decays
from chimera_train.optim.schedule import wsd_decay_steps

SMALL = ModelConfig(
    name="s", vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2
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


def test_linear_values():
    config = optim(schedule="linear", warmup_steps=10, min_learning_rate_ratio=0.1)
    values = [learning_rate(s, config, 110) for s in (5, 10, 11, 60, 110)]
    assert values == pytest.approx([0.5, 1.0, 0.991, 0.55, 0.1])


def test_inverse_sqrt_values():
    config = optim(schedule="inverse_sqrt", warmup_steps=4, min_learning_rate_ratio=0.3)
    values = [learning_rate(s, config, 10**6) for s in (2, 4, 16, 25, 36, 10**6)]
    assert values == pytest.approx([0.5, 1.0, 0.5, 0.4, 1 / 3, 0.3])
    assert learning_rate(9, optim(schedule="inverse_sqrt"), 10) == pytest.approx(1 / 3)


@given(
    st.sampled_from(["cosine", "wsd", "linear", "inverse_sqrt", "constant"]),
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
    if schedule not in ("constant", "inverse_sqrt") and warmup < num_steps:
        assert rates[-1] == pytest.approx(floor)


@pytest.mark.parametrize("tied", [False, True])
def test_norms_biases_and_the_embedding_have_no_weight_decay(tied):
    model = Decoder(replace(SMALL, tie_embeddings=tied))
    decayed = {name.split(".")[-2] for name, p in model.named_parameters() if decays(name, p)}
    head = set() if tied else {"head"}
    assert decayed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} | head
    assert not decays("layers.0.attention.q_proj.bias", torch.nn.Parameter(torch.zeros(4)))


def test_clipping_equals_torchs():
    parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    for p in parameters:
        p.grad = torch.randn_like(p)
    reference = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for r, p in zip(reference, parameters, strict=True):
        r.grad = p.grad.clone()
    theirs = torch.nn.utils.clip_grad_norm_(reference, 0.7)
    norm = local_grad_norm_squared(parameters, ranks=1).sqrt().item()
    assert norm == pytest.approx(theirs.item(), rel=1e-6)
    scale_gradients(parameters, clip_factor(norm, 0.7))
    for r, p in zip(reference, parameters, strict=True):
        torch.testing.assert_close(p.grad, r.grad)


def test_clip_factor():
    assert clip_factor(5.0, 0) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
