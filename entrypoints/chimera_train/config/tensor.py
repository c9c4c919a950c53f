"""What tensor parallel asks of a recipe."""

from __future__ import annotations

import math

from .model import ModelConfig
from .parallel import ParallelConfig
from .problem import Problem, divisors
from .train import TrainConfig


def tensor_problems(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> list[Problem]:
    return _uneven(model, parallel, train) + _without_effect(parallel, train)


def _uneven(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> list[Problem]:
    """One problem, which names every size that the degree does not divide and the degrees that would do."""
    degree = parallel.tensor_parallel
    sizes = {"model.num_heads": model.num_heads, "model.vocab_size": model.vocab_size}
    if model.latent_attention is None:
        sizes["model.num_kv_heads"] = model.num_kv_heads
    if model.num_expert_layers < model.num_layers:  # experts are spread whole
        sizes["model.intermediate_size"] = model.intermediate_size
    of_context = " / parallel.context_parallel" if parallel.context_parallel > 1 else ""
    sizes[f"train.sequence_length{of_context}"] = train.sequence_length // parallel.context_parallel
    broken = [f"{key}={size}" for key, size in sizes.items() if size % degree]
    if not broken:
        return []
    fix = f"use one of {divisors(math.gcd(*sizes.values()))}"
    return [Problem("parallel.tensor_parallel", f"{degree} does not divide {', '.join(broken)}", fix)]


def _without_effect(parallel: ParallelConfig, train: TrainConfig) -> list[Problem]:
    if not parallel.async_tensor_parallel:
        return []
    key, off = "parallel.async_tensor_parallel", "set parallel.async_tensor_parallel=false"
    problems = []
    if parallel.tensor_parallel == 1:
        message = "true, but parallel.tensor_parallel=1 has no collectives to overlap"
        problems.append(Problem(key, message, f"{off}, or a degree above 1", no_effect=True))
    if not train.compile:
        message = "true, but it is the compiler that cuts the matrix products, and train.compile=false"
        problems.append(Problem(key, message, f"{off}, or train.compile=true", no_effect=True))
    return problems
