"""Rules of the local target: what its submit would refuse on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from chimera_sm.recipe.schema import LOCAL
from chimera_sm.targets.local.data import check_shards
from chimera_sm.targets.local.job import local_job
from chimera_sm.targets.local.layout import check_checkpoint_path

from .registry import Context, Said, plan_rule


@plan_rule("local_shards", "data.uri")
def local_shards(context: Context) -> Iterator[Said]:
    """Shards are there, whole, and made with a tokenizer that the model has room for."""
    plan = context.plan
    if plan.recipe.target.name != LOCAL:
        return
    for channel in local_job(plan, context.artifacts.run_id).channels.values():
        problem = check_shards(channel, plan.recipe.model.vocab_size)
        if problem and problem.startswith("model.vocab_size="):
            yield Said(problem.removeprefix("model.vocab_size="), where="model.vocab_size")
        elif problem:
            yield Said(problem.removeprefix("data.uri: "))


@plan_rule("local_checkpoint_path", "checkpoint.path")
def local_checkpoint_path(context: Context) -> Iterator[Said]:
    plan = context.plan
    if plan.recipe.target.name == LOCAL:
        problem = check_checkpoint_path(local_job(plan, context.artifacts.run_id))
        if problem:
            yield Said(problem.removeprefix("checkpoint.path="))
