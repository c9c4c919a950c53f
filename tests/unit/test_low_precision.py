"""8-bit products, emulated, against bfloat16 and against an independent cast of the operands."""

from dataclasses import replace

import pytest
import torch

from chimera_train.config import ConfigError, ModelConfig, PrecisionConfig
from chimera_train.model import Decoder, initialize
from chimera_train.parallel import low_precision
from chimera_train.parallel.low_precision import apply_low_precision

pytest.importorskip("torchao")

MODEL = ModelConfig(
    name="m", vocab_size=61, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    initializer_range=0.1, attention_bias=True,
)  # fmt: skip
KINDS = ["tensorwise", "rowwise", "mxfp8"]


def step(float8: str, model: ModelConfig = MODEL, **settings) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss a token and gradients of one step in bfloat16."""
    decoder = Decoder(model)
    initialize(decoder, 0)
    decoder.bfloat16()
    apply_low_precision(decoder, PrecisionConfig(name="p", float8=float8, **settings), "cpu")
    tokens = torch.randint(0, 61, (2, 33), generator=torch.Generator().manual_seed(0))
    loss = decoder(tokens[:, :-1], tokens[:, 1:]).total
    loss.backward()
    return loss.item() / 64, {n: p.grad.float() for n, p in decoder.named_parameters()}


@pytest.mark.parametrize("float8", KINDS)
def test_loss_and_gradients_are_in_a_band_around_bfloat16(float8):
    """An operand in e4m3 is off by up to 2^-4 of itself, in e5m2 by up to 2^-3, and errors add up over two blocks."""
    expected, grads = step("none")
    loss, found = step(float8)
    assert loss != expected, "something was cast"
    assert loss == pytest.approx(expected, rel=0.01)
    for name, grad in grads.items():
        error = (found[name] - grad).norm() / grad.norm()
        assert error < 0.25, f"{name}: {error}"


def test_a_tensorwise_product_is_that_of_operands_cast_to_e4m3():
    x, weight = torch.randn(16, 32).bfloat16(), torch.randn(48, 32).bfloat16()

    def cast(t):
        scale = 448 / t.abs().max().float()
        return (t.float() * scale).to(torch.float8_e4m3fn).float() / scale

    product = low_precision._product("tensorwise", emulate=True)
    torch.testing.assert_close(product(x, weight).float(), cast(x) @ cast(weight).T, rtol=2**-7, atol=0.05)
    exact = x.float() @ weight.float().T
    assert (product(x, weight).float() - exact).abs().max() > 0.05, "it is not the product of the operands themselves"


def test_the_filter_and_the_sizes_choose_the_projections():
    def chosen(model, **settings):
        decoder = Decoder(model)
        apply_low_precision(decoder, PrecisionConfig(name="p", **settings), "cpu")
        return {name for name, module in decoder.named_modules() if "product" in vars(module)}

    names = {f"layers.{layer}.attention.{p}_proj" for layer in (0, 1) for p in "qkvo"}
    names |= {f"layers.{layer}.feed_forward.{p}_proj" for layer in (0, 1) for p in ("gate", "up", "down")}
    assert chosen(MODEL, float8="rowwise") == names
    assert chosen(MODEL, float8="rowwise", float8_filter=("layers.1.attention",)) == {
        n for n in names if n.startswith("layers.1.attention")
    }
    odd = replace(MODEL, intermediate_size=100)
    assert chosen(odd, float8="tensorwise") == {n for n in names if "attention" in n}
    moe = replace(MODEL, num_experts=16, experts_per_token=2)
    assert chosen(moe, float8="tensorwise") == {n for n in names if "attention" in n}, "no router, no experts"
    with pytest.raises(ConfigError, match="in names that contain one of attentoin"):
        chosen(MODEL, float8="rowwise", float8_filter=("attentoin",))


@pytest.mark.parametrize(
    ("float8", "capability", "needs"),
    [("tensorwise", (8, 0), "8.9"), ("rowwise", (8, 9), "9.0"), ("mxfp8", (9, 0), "10.0")],
)
def test_hardware_without_the_format_is_refused_by_name(float8, capability, needs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU-X")
    with pytest.raises(ConfigError, match=rf"precision.float8: {float8} needs .* {needs}, and this is a GPU-X"):
        apply_low_precision(Decoder(MODEL), PrecisionConfig(name="p", float8=float8), "cuda")


def test_without_torchao_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"tensorwise needs torchao .*pip install 'torchao"):
        apply_low_precision(Decoder(MODEL), PrecisionConfig(name="p", float8="tensorwise"), "cpu")
