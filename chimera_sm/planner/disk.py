"""What must fit on the disk of one host."""

from __future__ import annotations

from chimera_sm.recipe.schema import LOCAL, Recipe

from .types import DiskBudget

CHECKPOINT_BYTES = 12
"""A parameter in a checkpoint: float32 weight and AdamW's two moments."""
EXPORT_BYTES = 2
GB = 1e9


def checkpoint_gb(num_parameters: int) -> float:
    return num_parameters * CHECKPOINT_BYTES / GB


def estimate_disk(recipe: Recipe, num_parameters: int, nvme_gb: float) -> DiskBudget:
    """`fits` is None where the free space, or the size of data that is copied, is unknown.

    In per-host folders, a restore puts all files of all hosts on every host; new checkpoints add this host's share.
    Shards are copied to the disk in File mode only. On this machine nothing is counted against a capacity.
    """
    one = checkpoint_gb(num_parameters)
    on_disk = 0.0
    if recipe.checkpoint.storage == "per_host":
        on_disk = recipe.checkpoint.keep_last * one + one / recipe.instances.count
    copies_data = recipe.data.location == "s3" and recipe.data.input_mode == "File"
    data = recipe.data.size_gb if copies_data or recipe.data.location in ("local", "stdlib") else 0.0
    model = num_parameters * EXPORT_BYTES / GB if recipe.checkpoint.export_at_end else 0.0
    local = recipe.instances.type == LOCAL
    available = None if local else nvme_gb or float(recipe.instances.volume_gb)
    fits = None
    if available is not None:
        if on_disk + model + (data or 0.0) > available:
            fits = False
        elif data is not None:
            fits = True
    return DiskBudget(
        checkpoint_gb=one,
        checkpoints_on_disk_gb=on_disk,
        data_gb=data,
        model_gb=model,
        available_gb=available,
        fits=fits,
    )
