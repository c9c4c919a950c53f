"""Which settings a schedule that splits backward gets right: gradients against 1F1B's, parameter by parameter.

    python tests/train/split_backward.py      prints the table

It builds what the recipe's rules refuse, so that they can be dropped once torch is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from spawn import run_ranks
from tensors import whole
from test_parity_layouts import Row, global_batch, parallelized, recipe_of

from chimera_train.config import batch_plan, layout
from chimera_train.model import initialize
from chimera_train.step import forward_backward

SCHEDULES = ("interleaved_zero_bubble", "zbv", "dualpipev")
SETTINGS: dict[str, dict[str, Any]] = {
    "parameters kept": {},
    "full checkpointing": {"train": {"activation_checkpointing": "full"}},
    "parameters freed after forward": {"parallel": {"reshard_after_forward": True}},
    "selective checkpointing": {"train": {"activation_checkpointing": "selective"}},
    "compiled": {"train": {"compile": True}},
}


@dataclass
class Found:
    wrong: int = 0
    missing: int = 0
    parameters: int = 0
    error: str = ""
    """What torch raised; empty where it went through."""

    @property
    def right(self) -> bool:
        return not (self.error or self.wrong or self.missing)

    def __str__(self) -> str:
        if self.error:
            return f"raises: {self.error[:60]}"
        return "right" if self.right else f"{self.wrong} wrong, {self.missing} missing of {self.parameters}"


def gradients(schedule: str, setting: str) -> dict[str, torch.Tensor | None]:
    """Of the parameters of this rank's stages, on pipeline 2 × fsdp 2."""
    changes = SETTINGS[setting]
    parallel = {"pipeline_parallel": 2, "pipeline_schedule": schedule, **changes.get("parallel", {})}
    recipe = recipe_of(Row("", 4, model="deep", parallel=parallel, train=changes.get("train", {})))
    mesh_layout = layout(recipe.parallel, hosts=1, workers_per_host=4)
    model, _ = parallelized(recipe, mesh_layout)
    initialize(model, seed=0)
    share = 8 // mesh_layout.data_parallel_size
    first = mesh_layout.data_rank(torch.distributed.get_rank()) * share
    micro_batches = np.split(
        global_batch(1, masked=False)[first : first + share], batch_plan(recipe.train, mesh_layout).accumulation_steps
    )
    forward_backward(model, recipe, micro_batches, torch.device("cpu"))
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def compared(rank: int, schedules: tuple[str, ...], settings: tuple[str, ...]) -> dict[tuple[str, str], Found]:
    expected = gradients("1f1b", "parameters kept")
    everywhere: list[Any] = [None] * 4
    torch.distributed.all_gather_object(everywhere, expected)
    whole = {name: grad for of_rank in everywhere for name, grad in of_rank.items()}
    found = {}
    for schedule in schedules:
        for setting in settings:
            counts = Found()
            for name, grad in gradients(schedule, setting).items():
                counts.parameters += 1
                counts.missing += grad is None
                counts.wrong += grad is not None and not torch.allclose(grad, whole[name], rtol=1e-4, atol=1e-5)
            found[schedule, setting] = counts
    return found


def outcome(schedule: str, setting: str) -> Found:
    """Of all stages together. A launch of its own, because where one rank raises, the others wait for it."""
    results = run_ranks(4, compared, (schedule,), (setting,), environment={"TORCH_LOGS": "-all"})
    errors = [result[1] for result in results if isinstance(result, tuple) and "onnection" not in result[1]]
    if errors:
        cause = next((line.strip() for line in errors[0].splitlines() if line.strip()), "")
        return Found(error=cause)
    if not all(isinstance(result, dict) for result in results):
        return Found(error="a rank was lost")
    return together(results, schedule, setting)


def together(results: list[dict[tuple[str, str], Found]], schedule: str, setting: str) -> Found:
    # Two ranks hold the same stages, and have the same gradients.
    stages = (results[0][schedule, setting], results[2][schedule, setting])
    return Found(*(sum(getattr(found, key) for found in stages) for key in ("wrong", "missing", "parameters")))


if __name__ == "__main__":
    print(f"torch {torch.__version__}, pipeline 2 × fsdp 2, gloo")
    for setting in SETTINGS:
        for schedule in SCHEDULES:
            print(f"{setting:32} {schedule:24} {outcome(schedule, setting)}", flush=True)
