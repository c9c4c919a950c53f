import torch

from chimera_train.config import ModelConfig
from chimera_train.model import Decoder, init, initialize

CONFIG = ModelConfig(
    name="t", vocab_size=500, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2
)


def build(seed: int) -> dict[str, torch.Tensor]:
    model = Decoder(CONFIG)
    initialize(model, seed)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_depends_on_the_seed_and_the_name_alone():
    one, again, other = build(1), build(1), build(2)
    assert all(torch.equal(one[n], again[n]) for n in one)
    matrices = [n for n in one if one[n].ndim == 2]
    assert not any(torch.equal(one[n], other[n]) for n in matrices)
    assert not torch.equal(one["layers.0.attention.q_proj.weight"], one["layers.1.attention.q_proj.weight"])
    assert not torch.equal(one["layers.0.feed_forward.gate_proj.weight"], one["layers.0.feed_forward.up_proj.weight"])


def test_any_rows_are_those_of_the_whole(monkeypatch):
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 64 * 7)  # 7 rows a block
    whole = init._draw_rows("w", (100, 64), 0.02, 5, 0, 100)
    for start, count in ((0, 1), (6, 2), (7, 7), (13, 50), (99, 1), (0, 100)):
        assert torch.equal(init._draw_rows("w", (100, 64), 0.02, 5, start, count), whole[start : start + count])


def test_spread_is_as_documented():
    weights = build(3)
    assert abs(weights["embedding.weight"].std().item() - 0.02) < 1e-3
    assert abs(weights["layers.1.feed_forward.down_proj.weight"].std().item() - 0.01) < 1e-3
    assert torch.equal(weights["norm.weight"], torch.ones(64))
    assert abs(weights["head.weight"].mean().item()) < 1e-3
