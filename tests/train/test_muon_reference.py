"""Muon's whole update on one process, against the papers' formulas written out and against torch.optim.Muon."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from spawn import run_distributed
from tensors import whole
from test_parity_optim import Row, build, recipe_of, steps

from chimera_train.optim.groups import is_orthogonalised
from chimera_train.optim.newton_schulz import COEFFICIENTS

ROW = Row("muon", 1, {"name": "muon"}, precision={"param_dtype": "bfloat16"})
STEPS = 3


def ours(row: Row) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """Matrices before and after the steps, and the names of all parameters in their order."""

    def matrices() -> dict[str, torch.Tensor]:
        return {n: whole(p) for n, p in model.named_parameters() if is_orthogonalised(n, p)}

    model, optimizer = build(row, 1, 1)
    start = matrices()
    steps(model, optimizer, 1, STEPS)
    return start, matrices(), [name for name, _ in model.named_parameters()]


def errors() -> dict[str, tuple[float, float, float]]:
    """By matrix: how far ours in float32, ours in bfloat16 and torch's are from exact, as shares of the way."""
    start, rounded, names = ours(ROW)
    _, precise, _ = ours(replace(ROW, precision=None))
    optim, (a, b, c) = recipe_of(ROW, 1).optim, COEFFICIENTS
    rate, decay, beta = optim.learning_rate, optim.weight_decay, optim.muon_momentum
    theirs = {n: torch.nn.Parameter(w.clone()) for n, w in start.items()}
    torchs = torch.optim.Muon(
        theirs.values(), lr=rate, weight_decay=decay, momentum=beta, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    exact = {n: w.double() for n, w in start.items()}
    means = {n: torch.zeros_like(w) for n, w in exact.items()}
    for step in range(1, STEPS + 1):
        for name, parameter in theirs.items():
            generator = torch.Generator().manual_seed(1000 * step + names.index(name))
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            grad = parameter.grad.double()
            means[name] = beta * means[name] + (1 - beta) * grad
            u, s, vt = torch.linalg.svd((1 - beta) * grad + beta * means[name], full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = a * s + b * s**3 + c * s**5
            scale = 0.2 * math.sqrt(max(parameter.shape))
            exact[name] = exact[name] * (1 - rate * decay) - rate * scale * (u @ torch.diag(s) @ vt)
        torchs.step()
    found = {}
    for name, weight in exact.items():
        went = (weight - start[name]).norm()
        found[name] = tuple(
            ((other[name].detach().double() - weight).norm() / went).item() for other in (precise, rounded, theirs)
        )
    return found


@pytest.mark.train
def test_muon_is_exact_in_float32_and_no_rougher_than_torchs_in_bfloat16():
    found = run_distributed(errors, 1)[0]
    assert len(found) == 7
    for name, (precise, rounded, torchs) in found.items():
        assert precise < 1e-5, name
        assert 0 < rounded < 1.5 * torchs, f"{name}: {rounded} where torch's is {torchs}"
