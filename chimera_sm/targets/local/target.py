"""The local target: submit, and answer for the run from any process on any day."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from chimera_sm.aws.bundle import build_bundle, recipe_file
from chimera_sm.errors import RunFailed, UsageError
from chimera_sm.planner.types import Plan
from chimera_sm.runs.record import RunRecord
from chimera_sm.runs.status import RunStatus
from chimera_sm.targets.base import Artifacts, ModelFiles
from chimera_train.config.contract import CODE_CHANNEL, RECIPE_FILE

from .data import channel_folder, check_held_out, check_initial_weights, check_shards, is_prepared, prepare_corpus
from .driver import EXIT_HELD, HELD
from .environment import driver_environment
from .job import JOB_FILE, LocalJob, local_job
from .layout import RunFolder, arrange, check_checkpoint_path, lay_out
from .observe import eta_s, read_logs, read_metrics, recent_metrics
from .process import ProcessId, signal_process
from .state import LocalState, read_state, write_state

BUNDLE_FILE = "bundle.json"
NEVER_STARTED = "never started: the launch was cut short"
PACKAGES = ("torch", "numpy", "safetensors")
CORPUS_PACKAGES = ("tokenizers",)


class LocalTarget:
    """Simulated hosts on this machine, driven by a background process that outlives the caller."""

    name = "local"
    request_file = JOB_FILE
    poll_s = 0.5

    def render(self, plan: Plan, run_id: str) -> Artifacts:
        bundle = build_bundle(recipe_file(plan), plan.recipe.code)
        files = {
            JOB_FILE: local_job(plan, run_id).to_bytes(),
            RECIPE_FILE: bundle.files[RECIPE_FILE],
            BUNDLE_FILE: (json.dumps(bundle.manifest, indent=2, sort_keys=True) + "\n").encode(),
        }
        return Artifacts(run_id=run_id, target=self.name, files=files, bundle=bundle)

    def ready(self, plan: Plan) -> list[str]:
        """Missing packages, missing or unfit shards, a checkpoint folder that would not be kept."""
        job = local_job(plan, "ready")
        needed = list(PACKAGES)
        problems = []
        for channel in job.channels.values():
            if channel.location == "stdlib" and not is_prepared(channel):
                needed += CORPUS_PACKAGES
            problems.append(
                check_shards(
                    channel,
                    plan.recipe.model.vocab_size,
                    vocab_size=plan.recipe.data.vocab_size,
                    sequence_length=plan.recipe.train.sequence_length,
                )
            )
        data = plan.recipe.data
        problems.append(check_held_out(job.channels[data.channel], plan.recipe.evaluation.sources))
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            problems.append(f"not installed: {', '.join(missing)}; pip install 'chimera_sm[train,data]'")
        problems.append(check_checkpoint_path(job))
        problems.append(check_initial_weights(plan.recipe.model, plan.recipe.train.initial_weights))
        return [problem for problem in problems if problem]

    def submit(self, plan: Plan, artifacts: Artifacts, record: RunRecord) -> None:
        """Prepare the corpus if need be, lay out the hosts, start the driver. A run that was started stays as it is."""
        state = read_state(record.path)
        if state is not None and (state.attempt > 0 or state.driver.alive):
            return
        # From here to the driver's first word this process is the one that a status looks for.
        claim = LocalState(state="queued", driver=ProcessId.of(os.getpid()), attempt=0, reason="being prepared")
        try:
            write_state(record.path, claim)
            self._prepare(plan, artifacts, RunFolder(record.path))
        except BaseException as error:
            reason = f"never started: {error or type(error).__name__}"
            with contextlib.suppress(OSError):
                now = read_state(record.path)
                if now is not None and now.driver == claim.driver:  # not where another launch has a driver by now
                    write_state(record.path, replace(claim, state="failed", reason=reason))
            if isinstance(error, OSError):
                cause = ": ".join(filter(None, (error.strerror or str(error), error.filename)))
                raise UsageError(f"run {record.run_id} could not be laid out: {cause}") from error
            raise

    def _prepare(self, plan: Plan, artifacts: Artifacts, run: RunFolder) -> None:
        if problems := self.ready(plan):
            raise UsageError("\n".join(problems))
        job = run.job()
        for channel in job.channels.values():
            if channel.location == "stdlib" and not is_prepared(channel):
                prepare_corpus(channel)
        folders = {name: channel_folder(channel) for name, channel in job.channels.items()}
        shutil.rmtree(run.path / "hosts", ignore_errors=True)  # of a launch that was cut short
        lay_out(run, job, artifacts.bundle.files, folders)
        _start_driver(run)

    def status(self, record: RunRecord) -> RunStatus:
        state = read_state(record.path)
        if state is None or (state.attempt == 0 and state.driver_died):
            return RunStatus(state="failed", reason=NEVER_STARTED)
        run = RunFolder(record.path)
        job = run.job()
        recent = recent_metrics(run.ml(job.host_names[0]).metrics)
        last = recent[-1] if recent else {}
        died = state.driver_died
        return RunStatus(
            state="interrupted" if died else state.state,
            reason=f"its driver (process {state.driver.pid}) is gone" if died else state.reason,
            step=last.get("step"),
            num_steps=job.num_steps,
            loss=last.get("loss"),
            tokens_per_s=last.get("tokens_per_s"),
            eta_s=eta_s(recent, job.num_steps) if recent and state.state == "running" and not died else None,
            exit_code=state.exit_code,
            needs_resume=died,
        )

    def logs(self, record: RunRecord, *, follow: bool = False) -> Iterator[str]:
        run = RunFolder(record.path)
        files = {host: run.log(host) for host in run.host_names()}

        def ended() -> bool:
            state = read_state(record.path)
            if state is not None and state.driver_died:  # its hosts may still be saving
                return not any(host.process and host.process.alive for host in state.hosts.values())
            return state is None or state.ended

        return read_logs(files, follow=follow, ended=ended)

    def metrics(self, record: RunRecord) -> list[dict[str, Any]]:
        run = RunFolder(record.path)
        return read_metrics(run.ml(run.job().host_names[0]).metrics)

    def model_files(self, record: RunRecord) -> ModelFiles:
        run = RunFolder(record.path)
        job = run.job()
        channel, source = next(iter(job.channels.items()))
        first = run.ml(job.host_names[0])
        tokenizer = first.channel(channel) / source.path / "tokenizer.json"
        return ModelFiles(
            checkpoints=run.checkpoints(job),
            recipe=first.channel(CODE_CHANNEL) / RECIPE_FILE,
            tokenizer=tokenizer if tokenizer.is_file() else None,
        )

    def stop(self, record: RunRecord) -> None:
        """Ask the run to save and stop; does not wait. Nothing to do for a run that is not running."""
        state = read_state(record.path)
        if state is not None and not state.ended:
            signal_process(state.driver, signal.SIGTERM)

    def saved_step(self, record: RunRecord) -> int | None:
        run = RunFolder(record.path)
        return run.saved_step(run.job())

    def amend(self, record: RunRecord, artifacts: Artifacts, lock: Mapping[str, Any]) -> None:
        """The code stays the one that was launched. A driver that cannot start with this recipe takes it back."""
        self._check_resumable(record, LocalJob.from_bytes(artifacts.files[JOB_FILE]))
        kept = {name: artifacts.files[name] for name in (JOB_FILE, RECIPE_FILE)}
        code = {name: record.lock[name] for name in ("code_sha256", "git", "chimera_sm_version")}
        record.amend({**lock, **code}, kept)

    def resume(self, record: RunRecord) -> None:
        """Start the hosts again. Raises UsageError for a run that is running, has completed, or lost its shards."""
        run = RunFolder(record.path)
        self._check_resumable(record, run.job())
        arrange(run, run.job())
        _start_driver(run)

    def _check_resumable(self, record: RunRecord, job: LocalJob) -> None:
        """`job`: what it would go on as."""
        state = read_state(record.path)
        run = RunFolder(record.path)
        if state is None or state.attempt == 0:
            raise UsageError(
                f"run {record.run_id} was never started", fix=f"the launch again, with --run-id {record.run_id}"
            )
        saved = run.saved_step(run.job())
        if state.state == "completed" and (saved is None or job.num_steps <= saved):
            longer = f"; chimera_sm resume {record.run_id} train.num_steps=N goes on to a step N above {saved}"
            raise UsageError(
                f"run {record.run_id} has completed: there is nothing to resume",
                fix=f"chimera_sm export {record.run_id} --out FOLDER writes its model" + (longer if saved else ""),
            )
        if not state.ended and not state.driver_died:
            raise UsageError(
                f"run {record.run_id} is {state.state}; only a run that is not running can be resumed",
                fix=f"chimera_sm stop {record.run_id}",
            )
        for name, channel in run.job().channels.items():
            folder = run.ml("algo-1").channel(name)
            if not (folder / channel.path).is_dir():
                raise UsageError(f"the training data of run {record.run_id} is gone: {folder.resolve()}")


def _start_driver(run: RunFolder) -> None:
    """Start it and wait until it has written its state. Raises UsageError where the run has a driver."""
    command = [sys.executable, "-m", f"{__package__}.driver", str(run.path)]
    done = subprocess.run(
        command, env=driver_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode == EXIT_HELD:
        raise UsageError(
            f"run {run.path.name} is running: {HELD}; only a run that is not running can be resumed",
            fix=f"chimera_sm stop {run.path.name}",
        )
    if done.returncode != 0:
        reason = done.stderr.strip() or f"see {run.driver_log}"
        raise RunFailed(f"the driver of run {run.path.name} did not start: {reason}")
