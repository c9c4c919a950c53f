"""Rules of the local target: what its submit would refuse on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from chimera_sm.recipe.schema import LOCAL
from chimera_sm.targets.local.data import check_held_out, check_initial_weights, check_shards, num_samples
from chimera_sm.targets.local.job import local_job
from chimera_sm.targets.local.layout import check_checkpoint_path

from .registry import Context, Said, plan_rule


@plan_rule("local_shards", "data.uri")
def local_shards(context: Context) -> Iterator[Said]:
    """Shards are there, whole, long enough, and made with a tokenizer that the model has room for."""
    recipe = context.plan.recipe
    if recipe.target.name != LOCAL:
        return
    for channel in local_job(context.plan, context.artifacts.run_id).channels.values():
        yield from _said(
            check_shards(
                channel,
                recipe.model.vocab_size,
                vocab_size=recipe.data.vocab_size,
                sequence_length=recipe.train.sequence_length,
            )
        )


@plan_rule("local_corpus_size", "train.global_batch_size", severity="warning")
def local_corpus_size(context: Context) -> Iterator[Said]:
    """A step that repeats samples learns less from them than its size promises."""
    recipe = context.plan.recipe
    if recipe.target.name != LOCAL:
        return
    channel = local_job(context.plan, context.artifacts.run_id).channels[recipe.data.channel]
    found, batch = num_samples(channel, recipe.train.sequence_length), recipe.train.global_batch_size
    if found is not None and 0 < found < batch:
        yield Said(
            f"{batch} is more than the {found} samples of the corpus: every step repeats some",
            f"use at most {found}, or more text",
        )


@plan_rule("local_held_out", "evaluation.sources")
def local_held_out(context: Context) -> Iterator[Said]:
    """What the run is evaluated on is there and whole."""
    recipe = context.plan.recipe
    if recipe.target.name == LOCAL:
        channel = local_job(context.plan, context.artifacts.run_id).channels[recipe.data.channel]
        yield from _said(check_held_out(channel, recipe.evaluation.sources))


@plan_rule("local_checkpoint_path", "checkpoint.path")
def local_checkpoint_path(context: Context) -> Iterator[Said]:
    plan = context.plan
    if plan.recipe.target.name == LOCAL:
        yield from _said(check_checkpoint_path(local_job(plan, context.artifacts.run_id)))


@plan_rule("local_initial_weights", "train.initial_weights")
def local_initial_weights(context: Context) -> Iterator[Said]:
    """The model to start from is there, and its tensors are those of the recipe's model."""
    recipe = context.plan.recipe
    if recipe.target.name == LOCAL:
        yield from _said(check_initial_weights(recipe.model, recipe.train.initial_weights))


def _said(problem: str | None) -> Iterator[Said]:
    """The target's sentences begin with the key, `KEY: …` or `KEY=VALUE …`; a finding has it apart."""
    if problem is not None:
        key, _, message = re.split(r"(: |=)", problem, maxsplit=1)
        yield Said(message, where=key)
