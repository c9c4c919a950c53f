"""Rules of context parallel and of attention inside documents."""

from __future__ import annotations

from .data import DataConfig
from .model import ModelConfig
from .parallel import ParallelConfig
from .problem import Problem, divisors
from .train import TrainConfig


def context_problems(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, data: DataConfig
) -> list[Problem]:
    """What attention over the ranks of a sequence cannot do."""
    degree, backend = parallel.context_parallel, parallel.context_backend
    problems = []
    if data.separate_documents and parallel.pipeline_parallel > 1:
        problems.append(
            Problem(
                "data.separate_documents",
                f"stages of a pipeline (parallel.pipeline_parallel={parallel.pipeline_parallel}) hand on hidden states "
                "alone, and not where documents end",
                "set parallel.pipeline_parallel=1, or data.separate_documents=false",
            )
        )
    if degree == 1:
        if backend != "all_gather":
            message = f"{backend} would be ignored: parallel.context_parallel is 1"
            fix = "set parallel.context_backend=all_gather, or parallel.context_parallel above 1"
            problems.append(Problem("parallel.context_backend", message, fix, no_effect=True))
        return problems
    tensor = parallel.tensor_parallel
    if train.sequence_length % (2 * degree * tensor):
        problems.append(
            Problem(
                "parallel.context_parallel",
                f"2 × context_parallel {degree} × tensor_parallel {tensor} = {2 * degree * tensor} does not divide "
                f"train.sequence_length={train.sequence_length}; every rank has two pieces of a sequence, a head and "
                "a tail, so that all have the same work",
                f"use a train.sequence_length that is a multiple of {2 * degree * tensor}",
            )
        )
    if backend == "ulysses":
        sizes = {"num_heads": model.num_heads}
        if model.latent_attention is None:  # which has as many heads of keys as of queries
            sizes["num_kv_heads"] = model.num_kv_heads
        for key, heads in sizes.items():
            if heads % (degree * tensor):
                problems.append(
                    Problem(
                        "parallel.context_backend",
                        f"ulysses gives every rank a share of the heads, and context_parallel {degree} × "
                        f"tensor_parallel {tensor} = {degree * tensor} does not divide model.{key}={heads}",
                        f"set parallel.context_backend=all_gather, or a product out of {divisors(heads)}",
                    )
                )
                break
    if backend == "ring":
        windowed = model.sliding_window is not None and model.sliding_window < train.sequence_length
        for key, set_ in (("data.separate_documents", data.separate_documents), ("model.sliding_window", windowed)):
            if set_:
                problems.append(
                    Problem(
                        "parallel.context_backend",
                        f"ring merges attention to whole pieces of a sequence, and {key} would cut into them",
                        "set parallel.context_backend=all_gather or ulysses",
                    )
                )
    return problems
