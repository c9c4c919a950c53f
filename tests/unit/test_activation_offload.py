"""Offloaded activations give the same bits, and what is offloaded is what blocks keep, weights excepted."""

import pytest
import torch

from chimera_train.config import ModelConfig
from chimera_train.model import Decoder, initialize
from chimera_train.parallel import activation_offload
from chimera_train.parallel.activation_checkpoint import apply_activation_checkpointing
from chimera_train.parallel.activation_offload import Offload

MODEL = ModelConfig(
    name="m", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2
)


def gradients(mode: str, offload: Offload | None) -> dict[str, torch.Tensor]:
    """Of two micro-batches whose forward passes both come before the first backward."""
    model = Decoder(MODEL)
    initialize(model, 0)
    for block in model.layers.values():
        apply_activation_checkpointing(block, mode)
        if offload is not None:
            offload.apply(block)
    tokens = torch.randint(0, 61, (2, 1, 20), generator=torch.Generator().manual_seed(0))
    losses = [model(batch[:, :-1], batch[:, 1:]).total for batch in tokens]
    for loss in losses:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["none", "full"])
def test_gradients_are_the_same_bits(mode, monkeypatch):
    parked = []

    class Recorded(activation_offload.Parked):
        def __init__(self, tensor, stream):
            super().__init__(tensor, stream)
            parked.append(tuple(tensor.shape))

    monkeypatch.setattr(activation_offload, "Parked", Recorded)
    expected = gradients(mode, None)
    offload = Offload("cpu")
    found = gradients(mode, offload)
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
    assert not offload._passes, "nothing is left behind"
    if mode == "full":
        assert parked.count((1, 19, 32)) == 6, "the input of each block, once"
    else:
        assert len(parked) > 12
    weights = {tuple(p.shape) for p in Decoder(MODEL).layers["0"].parameters()}
    assert not weights.intersection(parked)
