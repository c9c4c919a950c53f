"""The public functions: arrows of one line, compose → plan → render → check → launch, and the Run they end in.

Nothing before `launch` opens a socket; nothing here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from chimera_sm.errors import AwsRefused, ChecksFailed, RunFailed, RunStopped, UsageError

if TYPE_CHECKING:
    from chimera_sm.planner.types import Plan
    from chimera_sm.recipe.schema import Recipe
    from chimera_sm.runs.record import RunRecord
    from chimera_sm.runs.status import RunStatus
    from chimera_sm.targets.base import Artifacts, Finding, Target


def compose(overrides: Sequence[str] = (), *, recipes: Sequence[str | PathLike[str]] = ()) -> Recipe:
    """Compose and validate a recipe from Hydra overrides.

    `recipes` are folders searched before CHIMERA_RECIPES and the shipped one.
    Raises RecipeError with every broken rule and what set the key.

    >>> compose(["recipe=70b"]).instances.count
    32
    """
    from chimera_sm.recipe.compose import compose as compose_recipe

    return compose_recipe(overrides, recipes=recipes)


def plan(recipe: Recipe) -> Plan:
    """Work out layout, batches, memory, step time, cost and failures. No network, no torch.

    Raises RecipeError where degrees, batches or instance types do not go together.

    >>> plan(compose(["recipe=70b"])).layout.world_size
    256
    """
    from chimera_sm.errors import RecipeError
    from chimera_sm.planner.plan import plan as make_plan

    problems = recipe.validate()  # it may have been changed since compose, with dataclasses.replace
    if problems:
        raise RecipeError(problems, recipe.origins)
    return make_plan(recipe)


def render(plan: Plan, run_id: str | None = None) -> Artifacts:
    """The exact bytes that would be sent, by file name. The same recipe, code and run id give the same bytes.

    Without a run id, one that follows from the recipe's hash: a dry run can be kept as a golden file.

    >>> sorted(render(plan(compose(["recipe=70b"]))).files)
    ['bundle.json', 'create_training_job.json', 'recipe.json']
    """
    from chimera_sm.runs.record import check_run_id, dry_run_id

    run_id = dry_run_id(plan.recipe.name, plan.recipe_hash) if run_id is None else check_run_id(run_id)
    return _target(plan).render(plan, run_id)


def check(plan: Plan, artifacts: Artifacts | None = None, online: bool = False) -> list[Finding]:
    """What would go wrong, errors first.

    Raises NotImplementedError for `online=True`: checks against the account are not there yet.

    >>> [f.id for f in check(plan(compose(["recipe=tiny"]))) if f.severity == "error"]
    []
    """
    from chimera_sm.checks import run_checks

    if online:
        raise NotImplementedError("online checks are not there yet; offline checks are what check() runs")
    return run_checks(plan, artifacts or render(plan))


def launch(plan: Plan, *, run_id: str | None = None, on_record: Callable[[str], None] | None = None) -> Run:
    """Check, record and submit. Returns at once; the run goes on by itself.

    `run_id`: launch again under an id whose record exists (after a failed submit): nothing starts twice.
    `on_record` is called with the run's id as soon as the record is there, before anything is submitted.
    Raises ChecksFailed when a check finds an error, AwsRefused when the account or AWS says no.

    >>> run = launch(plan(compose(["recipe=tiny"])))  # doctest: +SKIP
    >>> run.wait().state                              # doctest: +SKIP
    'completed'
    """
    from chimera_sm.runs.record import RunRecord, check_run_id, mint_run_id

    target = _target(plan)
    run_id = mint_run_id(plan.recipe.name) if run_id is None else check_run_id(run_id)
    artifacts = target.render(plan, run_id)
    refuse(target, plan, artifacts)
    if run_id in RunRecord.list_ids():
        record = RunRecord.find(run_id)
        if record.lock["artifacts_sha256"] != artifacts.sha256:
            raise UsageError(
                f"run {run_id} was recorded with another recipe or other code", fix="launch without --run-id"
            )
    else:
        record = RunRecord.create(run_id, _lock(plan, artifacts), artifacts.files)
    if on_record:
        on_record(run_id)
    target.submit(plan, artifacts, record)
    return Run(record, target)


def refuse(target: Target, plan: Plan, artifacts: Artifacts) -> None:
    """Raise for whatever stands against a submit: missing account values and credentials first, then checks."""
    findings = check(plan, artifacts)
    missing = [f"{p.key} is not set: {p.fix}" for p in artifacts.placeholders] + target.ready(plan)
    raise_errors(plan, findings)
    if missing:
        # An account's values and credentials are AWS's affair; a package that is missing here is the user's.
        kind = UsageError if target.name == "local" else AwsRefused
        raise kind("cannot submit:\n" + "\n".join(f"  {line}" for line in missing))
    blocking = [f for f in findings if f.blocks_submit]
    if blocking:
        raise ChecksFailed("\n".join(said(plan, f) for f in blocking))


def raise_errors(plan: Plan, findings: Sequence[Finding]) -> None:
    """Raise ChecksFailed with every finding that is an error."""
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        raise ChecksFailed("\n".join(said(plan, f) for f in errors))


def said(plan: Plan, finding: Finding) -> str:
    """A finding as a person reads it: key, message, what set the key, what to type instead."""
    from chimera_sm.errors import origin_of

    lines = [f"{finding.where}: {finding.message} [{finding.id}]"]
    if origin := origin_of(finding.where, plan.recipe.origins):
        lines.append(f"  set by: {origin}")
    if finding.fix:
        lines.append(f"  fix: {finding.fix}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Run:
    """A handle on a run. Works from another process, and on another day.

    >>> run = Run.attach("last")     # doctest: +SKIP
    >>> run.status().state           # doctest: +SKIP
    'running'
    """

    record: RunRecord
    target: Target

    @classmethod
    def attach(cls, run_id: str) -> Run:
        """The run of that id; a unique beginning is enough, `last` is the newest. Raises UsageError."""
        from chimera_sm import targets
        from chimera_sm.runs.record import RunRecord

        record = RunRecord.find(run_id)
        return cls(record, targets.get(record.lock["target"]))

    @property
    def id(self) -> str:
        return self.record.run_id

    def status(self) -> RunStatus:
        return self.target.status(self.record)

    def wait(self, *, timeout_s: float | None = None, poll_s: float | None = None) -> RunStatus:
        """Wait for the end. Raises RunFailed, RunStopped, or TimeoutError; returns the status of a completed run.

        `poll_s` is the time between two questions; None takes the target's own.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status.ended or status.needs_resume:
                return finished(self.id, status)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} is still {status.state} after {timeout_s:g} s")
            time.sleep(self.target.poll_s if poll_s is None else poll_s)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Lines of the run's log."""
        return self.target.logs(self.record, follow=follow)

    def metrics(self) -> list[dict[str, Any]]:
        """One dict a logged step, in order: `step`, `loss`, `tokens_per_s`, …"""
        return self.target.metrics(self.record)

    def stop(self) -> None:
        """Ask the run to save and stop; a run that has ended stays as it is."""
        self.target.stop(self.record)

    def resume(self, overrides: Sequence[str] = (), *, on_note: Callable[[str], None] | None = None) -> Run:
        """Go on from the newest complete checkpoint; `overrides` change values of the recorded recipe.

        Another layout, batch, number of steps or learning rate is another recipe of the same run: parameters, optimizer
        and the place in the data are resharded. What the checkpoint cannot honour (`recipe.lasting` lists it) is
        refused. A completed run goes on to a larger train.num_steps. Raises RecipeError, ChecksFailed or UsageError for
        a recipe with which the run cannot go on; it stays as it was then.

        `on_note` is called with each line on what the overrides change beyond their own keys.

        >>> Run.attach("last").resume(["parallel.tensor_parallel=1"])     # doctest: +SKIP
        """
        if overrides:
            from chimera_sm.recipe.amend import amend

            recorded = self.record.lock["plan"]["recipe"]
            amended = amend(recorded, overrides, saved_step=self.target.saved_step(self.record))
            new = plan(amended.recipe)
            artifacts = self.target.render(new, self.id)
            refuse(self.target, new, artifacts)
            self.target.amend(self.record, artifacts, _lock(new, artifacts))
            if on_note:
                for note in amended.notes:
                    on_note(note)
        self.target.resume(self.record)
        return self


def finished(run_id: str, status: RunStatus) -> RunStatus:
    """The status of a completed run, or the error that an ended one stands for."""
    from chimera_train.config.contract import EXIT_FAILED

    if status.state == "failed" or status.needs_resume:
        fix = f"chimera_sm logs {run_id}, then chimera_sm resume {run_id}"
        if status.exit_code == EXIT_FAILED and not status.needs_resume:  # unchanged, it would fail again
            fix += " KEY=VALUE with what has to change"
        raise RunFailed(f"run {run_id} {status.state}: {status.reason or 'no reason given'}", fix=fix)
    if status.state == "stopped":
        raise RunStopped(
            f"run {run_id} was stopped: {status.reason or 'by request'}", fix=f"chimera_sm resume {run_id}"
        )
    return status


def _target(plan: Plan) -> Target:
    from chimera_sm import targets

    return targets.get(plan.recipe.target.name)


def _lock(plan: Plan, artifacts: Artifacts) -> dict[str, Any]:
    """What `launch.lock` says: enough to know, and to do again, exactly what was launched."""
    import platform

    from chimera_sm import __version__
    from chimera_sm.runs.git import describe_checkout

    return {
        "target": plan.recipe.target.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "recipe_hash": plan.recipe_hash,
        "plan": plan.to_json(),
        "code_sha256": artifacts.bundle.sha256,
        "artifacts_sha256": artifacts.sha256,
        "catalog_version": plan.catalog_version,
        "git": describe_checkout(),
        "chimera_sm_version": __version__,
        "python": platform.python_version(),
    }
