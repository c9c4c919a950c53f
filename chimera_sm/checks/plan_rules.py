"""Rules over the plan: what the catalogue and the predictions say against it."""

from __future__ import annotations

from collections.abc import Iterator

from chimera_sm.catalog import UnknownInstance, instance, offered
from chimera_sm.planner.types import DiskBudget
from chimera_sm.recipe.schema import LOCAL
from chimera_train.config.precision import FLOAT8_CAPABILITY

from .registry import Context, Said, plan_rule

SLOW_RESTORE_GB = 500.0


@plan_rule("memory_fits", "parallel")
def memory_fits(context: Context) -> Iterator[Said]:
    memory = context.plan.memory
    if memory.fits is False:
        parts = sorted(memory.components_gib.items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{name} {gib:.1f}" for name, gib in parts)
        yield Said(
            f"rank {memory.rank} needs {memory.total_gib:.1f} GiB of {memory.capacity_gib:.1f} GiB "
            f"(largest: {largest})",
            "shard over more ranks, use a smaller train.micro_batch_size, train.activation_checkpointing=full, or "
            "accelerators with more memory",
        )


@plan_rule("fallback_memory_fits", "instances.fallbacks")
def fallback_memory_fits(context: Context) -> Iterator[Said]:
    """A job that gets a fallback keeps its layout and batches."""
    for found in context.plan.fallbacks:
        memory = found.memory
        if memory.fits is False:
            yield Said(
                f"rank {memory.rank} needs {memory.total_gib:.1f} GiB of the {memory.capacity_gib:.1f} GiB that an "
                f"accelerator of {found.type} has",
                "name a type with as much memory as the first choice, or take this one out",
                where=f"instances.fallbacks[{found.index}].type",
            )


@plan_rule("fallback_disk_fits", "instances.fallbacks")
def fallback_disk_fits(context: Context) -> Iterator[Said]:
    for found in context.plan.fallbacks:
        disk = found.disk
        if disk.fits is False:
            yield Said(
                f"a host of {found.type} has {disk.available_gb:.0f} GB and needs: {_disk_needs(disk)}",
                "use checkpoint=fsx and data=fsx, a larger instances.volume_gb, or a type with larger NVMe disks",
                where=f"instances.fallbacks[{found.index}].type",
            )


@plan_rule("disk_fits", "checkpoint.keep_last")
def disk_fits(context: Context) -> Iterator[Said]:
    disk = context.plan.disk
    if disk.fits is False:
        yield Said(
            f"a host has {disk.available_gb:.0f} GB and needs: {_disk_needs(disk)}",
            "use checkpoint=fsx and data=fsx, a larger instances.volume_gb, or a type with larger NVMe disks",
        )


def _disk_needs(disk: DiskBudget) -> str:
    data = "unknown" if disk.data_gb is None else f"{disk.data_gb:.0f}"
    return f"checkpoints {disk.checkpoints_on_disk_gb:.0f}, data {data}, model {disk.model_gb:.0f}"


@plan_rule("slow_restore", "checkpoint.storage", severity="warning")
def slow_restore(context: Context) -> Iterator[Said]:
    """SageMaker restores the whole checkpoint prefix on every host before a job starts again."""
    recipe, total = context.plan.recipe, context.plan.disk.checkpoints_on_disk_gb
    if recipe.target.name != LOCAL and recipe.checkpoint.storage == "per_host" and total > SLOW_RESTORE_GB:
        yield Said(
            f"every host downloads {total:,.0f} GB of checkpoints whenever the job starts again",
            "use data=fsx checkpoint=fsx",
        )


@plan_rule("instance_offered", "instances.type", severity="warning")
def instance_offered(context: Context) -> Iterator[Said]:
    region = context.plan.recipe.env.region
    for kind, where in _rented(context):
        try:
            found = offered(kind, region)
        except UnknownInstance:
            continue
        if found is False:
            yield Said(
                f"{kind} is not offered in {region}, as far as the catalogue knows",
                "choose another env.region or instances",
                where=where,
            )


@plan_rule("float8_hardware", "precision.float8")
def float8_hardware(context: Context) -> Iterator[Said]:
    """The worker would refuse it, on machines that are paid for by then."""
    float8 = context.plan.recipe.precision.float8
    for kind, where in _rented(context) if float8 != "none" else ():
        try:
            found = instance(kind)
        except UnknownInstance:
            continue
        needs, has = FLOAT8_CAPABILITY[float8], found.compute_capability
        if has is None or has < needs:
            is_what = "no CUDA GPU" if has is None else f"of compute capability {has[0]}.{has[1]}"
            yield Said(
                f"{float8} needs a GPU of compute capability {needs[0]}.{needs[1]}, and the {found.accelerator} of "
                f"{kind} is {is_what}",
                f"set precision=bf16, or {'take this type out' if where else 'choose other instances'}",
                where=where,
            )


def _rented(context: Context) -> Iterator[tuple[str, str]]:
    """Type of every choice of machines that are not this one, and its key where it is a fallback."""
    for number, choice in enumerate(context.plan.instances):
        if choice.type != LOCAL:
            yield choice.type, f"instances.fallbacks[{number - 1}].type" if number else ""


@plan_rule("isolated_requirements", "target.network_isolation", severity="warning")
def isolated_requirements(context: Context) -> Iterator[Said]:
    """launch.py installs what the image lacks, from pip's index unless the bundle carries wheels."""
    bundle, target = context.artifacts.bundle, context.plan.recipe.target
    if not target.network_isolation or any(path.startswith("wheels/") for path in bundle.files):
        return
    lines = bundle.files.get("requirements.txt", b"").decode().splitlines()
    needed = [line for line in lines if line.strip() and not line.startswith("#")]
    if needed:
        yield Said(
            f"an isolated container cannot install what its image lacks of {', '.join(needed)}, and would fail",
            "name an image that has them with target.image, or set target.network_isolation=false",
        )


@plan_rule("placeholder", "env", severity="warning", blocks_submit=True)
def placeholder(context: Context) -> Iterator[Said]:
    for missing in context.artifacts.placeholders:
        yield Said(f"is not set; {missing.value} stands for it in this dry run", missing.fix, where=missing.key)
