"""The tensors of a checkpoint by name, and the random generators of a rank.

Names are those of the single-process model, whatever wraps it: `model.<parameter>` for parameters and buffers,
`optimizer.<parameter>.<state>` for what the optimizer keeps of a parameter. Tensors share storage with the live
objects, so loading into them is loading the run. Learning rate, betas and the like are not saved: they are the
recipe's, as a function of the step.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import torch
from torch import Tensor, nn

from ..optim.sharded import ShardedOptimizer

MODEL = "model."
OPTIMIZER = "optimizer."
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Activation checkpointing's and torch.compile's marks in names."""


def plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; a tied parameter once, under the first of its names."""
    state = model.state_dict()  # first: it brings FSDP's parameters back to their shards
    aliases = {plain_name(n) for n, _ in model.named_parameters(remove_duplicate=False)}
    aliases -= {plain_name(n) for n, _ in model.named_parameters()}
    return {MODEL + n: t for n, t in ((plain_name(k), t) for k, t in state.items()) if n not in aliases}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Prefix of a parameter (`optimizer.<parameter>.`) → the names and tensors of its state."""
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        prefix = f"{OPTIMIZER}{names[parameter]}."
        tensors[prefix] = {prefix + key: value for key, value in state.items()}
    return tensors


def fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state: torch's by a step with zero gradients and learning rate."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.allocate()
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


def drop_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, prefixes: set[str]) -> None:
    """Forget the state of the parameters with these prefixes: they had none when the checkpoint was made."""
    for name, parameter in model.named_parameters():
        if f"{OPTIMIZER}{plain_name(name)}." in prefixes:
            optimizer.state.pop(parameter, None)


def random_state() -> dict[str, Any]:
    """The generators of Python, NumPy, torch and the current CUDA device, as JSON can hold them."""
    import numpy

    version, internal, gauss = random.getstate()
    generator, keys, where, has_gauss, cached = numpy.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [generator, [int(k) for k in keys], int(where), int(has_gauss), float(cached)],
        "torch": _to_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _to_text(torch.cuda.get_rng_state())
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    import numpy

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    generator, keys, *rest = state["numpy"]
    numpy.random.set_state((generator, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(_from_text(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(state["cuda"]))


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
