"""What a reader of a plan should know about how it was made."""

from __future__ import annotations

from chimera_sm import catalog
from chimera_sm.recipe.schema import Recipe
from chimera_train.config import MeshLayout

from .coefficients import coefficient, has_scope


def notes(recipe: Recipe, mesh: MeshLayout, machine: catalog.Instance | None) -> tuple[str, ...]:
    """Assumptions behind the numbers, each a sentence; `machine` is None on this machine."""
    found: list[str] = []
    model = recipe.model
    if recipe.train.compile and model.num_experts and (mesh.expert > 1 or model.router_bias_update_speed):
        found.append(
            "Of layers with experts, the attention alone is compiled: how many tokens travel is known too late."
        )
    if machine is None:
        return tuple(found)
    region, kind = recipe.env.region, recipe.capacity.kind
    if catalog.offered(machine.type, region) is False:
        found.append(f"{machine.type} was not offered in {region} when the catalogue was made.")
    idle = machine.accelerators - mesh.workers_per_host
    if idle > 0:
        found.append(f"{idle} of {machine.accelerators} accelerators of every host stay idle, and are paid for.")
    if machine.bf16_tflops is not None and not has_scope("step_error", machine.family):
        found.append(f"No published runs on {machine.accelerator} stand behind the step time; its spread is wide.")
    if recipe.model.num_experts:
        found.append("Step times of mixtures of experts are predicted from few published runs; their spread is wide.")
    if kind == "spot":
        minutes = [coefficient("spot_wait_s", p) / 60 for p in ("p10", "", "p90")]
        found.append(
            "After a reclaim, capacity is taken to come back within "
            f"{minutes[0]:.0f} / {minutes[1]:.0f} / {minutes[2]:.0f} minutes (p10 / p50 / p90); none is published."
        )
    if recipe.checkpoint.storage == "shared":
        found.append("Checkpoints go to the shared file system, whose free space the recipe does not say.")
    return tuple(found)
