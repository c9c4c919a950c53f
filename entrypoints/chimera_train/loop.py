"""The training loop: fetch, compute gradients, step, report, save."""

from __future__ import annotations

import gc
import time

from . import faults
from .checkpoint import Checkpointer, LoopState
from .clock import StepClock
from .config import MlRoot, RecipeFile, batch_plan, layout, num_parameters
from .config.contract import EXIT_FINISHED, EXIT_STOPPED
from .config.hf_config import CONFIG_FILE
from .data.loader import Loader
from .distributed import Worker, set_collective_timeout
from .evaluation import Evaluator
from .initial_weights import folder_of, load_initial_weights
from .model import initialize
from .optim import build_optimizer, learning_rate, set_learning_rate
from .parallel import Meshes, RouterBias, build_model
from .profiling import StepProfiler
from .reporter import Reporter
from .signals import ProfileRequest, StopRequest
from .step import NotFinite, StepResult, finish_gradients, forward_backward

GC_INTERVAL_STEPS = 100
"""Python's garbage is collected by all ranks in the same step: a pause of one is a pause of all."""


class Trainer:
    """One worker's part of a run. Construct and call on all ranks alike."""

    def __init__(self, recipe_file: RecipeFile, worker: Worker, root: MlRoot, run_id: str):
        recipe = recipe_file.recipe
        mesh_layout = layout(
            recipe.parallel, hosts=recipe_file.layout.hosts, workers_per_host=recipe_file.layout.workers_per_host
        )
        self.recipe, self.worker, self.root, self.run_id = recipe, worker, root, run_id
        self.plan = batch_plan(recipe.train, mesh_layout)
        self.loader = Loader(
            recipe.data,
            recipe.train,
            folder=root.channel(recipe.data.channel) / recipe.data.path,
            data_rank=mesh_layout.data_rank(worker.rank),
            data_parallel_size=mesh_layout.data_parallel_size,
            accumulation_steps=self.plan.accumulation_steps,
            vocab_size=recipe.model.vocab_size,
        )
        self.evaluator = Evaluator(
            recipe,
            mesh_layout,
            worker,
            channel=root.channel(recipe.data.channel),
            tokenizer_sha256=self.loader.dataset.info.tokenizer.sha256,
        )
        self.reporter = Reporter(recipe_file, self.plan, worker, root)
        self.clock = StepClock(worker.device)
        self.profiler = StepProfiler(recipe.profiling, worker, root.profiles)

        self.meshes = Meshes(mesh_layout, worker.device.type)
        self.model = build_model(recipe, self.meshes, worker.device)
        if recipe.data.separate_documents:
            self.model.sequence.end_of_document = self.loader.dataset.info.eod_id
        self.optimizer = build_optimizer(self.model, recipe, self.meshes)
        self.router_bias = RouterBias(self.model, recipe.model, self.meshes)

        self.checkpointer = Checkpointer(
            recipe.checkpoint, root=root, run_id=run_id, recipe=recipe_file, layout=mesh_layout
        )
        state = self.checkpointer.load(self.model, self.optimizer)
        if state is None:
            self._set_initial_weights()
            state = LoopState(step=0, tokens_seen=0, samples_seen=0)
        else:
            self.loader.load_state_dict(state.loader)
        self.step, self.tokens_seen, self.samples_seen = state.step, state.tokens_seen, state.samples_seen

    def _set_initial_weights(self) -> None:
        train = self.recipe.train
        if train.initial_weights is None:
            initialize(self.model, train.seed)
            return
        folder = folder_of(train.initial_weights, self.root)
        for difference in load_initial_weights(self.model, self.recipe.model, folder):
            self.reporter.say(
                f"warning: train.initial_weights: {folder / CONFIG_FILE}: {difference}; the recipe's holds"
            )
        self.reporter.say(f"initial weights from {folder}")

    def run(self, stop: StopRequest, profile: ProfileRequest) -> int:
        """Train to the end, or to the end of the step in which a stop is asked for; returns the exit code."""
        train, interval = self.recipe.train, self.recipe.checkpoint.interval_steps
        self.reporter.say(
            f"{self.recipe.name}: {num_parameters(self.recipe.model):,} parameters, "
            f"{self.worker.world_size} × {self.worker.device.type}, {self.plan.tokens_per_step:,} tokens a step "
            f"({self.plan.accumulation_steps} micro-batches a rank), steps {self.step + 1} to {train.num_steps}"
        )
        gc.disable()
        first_step, stopping = self.step + 1, False
        self.reporter.restart_clock()
        while self.step < train.num_steps and not stopping:
            self.step += 1
            self.profiler.before_step(self.step)
            result = self._train_step(stop, profile)
            stopping = result.stop
            self._profile_after_step(result, profile)
            if self.step == first_step:
                set_collective_timeout(self.meshes.all_groups(), train.collective_timeout_s)
                gc.collect()
                gc.freeze()  # what a run is made of stays to its end, and later collections need not look at it
            if self.step % GC_INTERVAL_STEPS == 0:
                gc.collect()
            if self._evaluation_is_due() and not stopping:
                stopping = self._evaluate(stop)
            last = stopping or self.step == train.num_steps
            if last or (interval and self.step % interval == 0):
                self._save()
        self._tell(self.profiler.finish())
        self.loader.close()
        if self.step < train.num_steps:
            return EXIT_STOPPED
        if self.recipe.checkpoint.export_at_end:
            self._export()
        return EXIT_FINISHED

    def _train_step(self, stop: StopRequest, profile: ProfileRequest) -> StepResult:
        lr = learning_rate(self.step, self.recipe.optim, self.plan.num_steps)
        set_learning_rate(self.optimizer, lr)
        batch = self.loader.next_step()
        names = self.loader.source_names
        sums = forward_backward(
            self.model,
            self.recipe,
            batch.micro_batches,
            self.worker.device,
            source_ids=batch.source_ids if len(names) > 1 else None,
            num_sources=len(names),
            clock=self.clock,
        )
        try:
            with self.clock.phase("sync"):
                result = finish_gradients(
                    self.model,
                    self.recipe.optim,
                    sums,
                    self.meshes,
                    step=self.step,
                    stop=stop.requested,
                    profile=profile.requested,
                    wait_s=batch.wait_s,
                )
        except NotFinite as error:
            raise NotFinite(f"{error}. {self._how_to_go_on()}") from None
        with self.clock.phase("optimizer"):
            self.optimizer.step()
        self.router_bias.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens_seen += self.plan.tokens_per_step
        self.samples_seen += self.plan.global_batch_size
        self.reporter.step_done(
            self.step,
            loss=result.loss,
            source_losses=dict(zip(names, result.source_losses, strict=True)),
            grad_norm=result.grad_norm,
            lr=lr,
            waits_s=result.waits_s,
            phases_s=self.clock.step_done(),
        )
        faults.at("step", step=self.step, rank=self.worker.rank)
        return result

    def _how_to_go_on(self) -> str:
        """After a step that was not finite, which comes again where nothing is changed."""
        newest = self.checkpointer.newest
        kept = f"The newest checkpoint is {newest}" if newest else "There is no checkpoint yet"
        rate = self.recipe.optim.learning_rate / 2
        return (
            f"{kept}. Look at the data, lengthen optim.warmup_steps or lower the learning rate "
            f"(fix: chimera_sm resume {self.run_id} optim.learning_rate={rate:g})"
        )

    def _profile_after_step(self, result: StepResult, profile: ProfileRequest) -> None:
        if result.profile:
            profile.requested = False
            self.profiler.request(self.step + 1)
        self._tell(self.profiler.after_step(self.step))

    def _tell(self, written: str | None) -> None:
        """Of a profile that this rank wrote, which took time that is no step's."""
        if written is not None:
            print(written, flush=True)
            self.reporter.restart_clock()

    def _evaluation_is_due(self) -> bool:
        config = self.recipe.evaluation
        if not config.sources:
            return False
        at_end = self.step == self.recipe.train.num_steps
        return at_end or bool(config.interval_steps and self.step % config.interval_steps == 0)

    def _evaluate(self, stop: StopRequest) -> bool:
        """Returns whether some rank was asked to stop, which ends the evaluation without a result."""
        started = time.perf_counter()
        results = self.evaluator.run(self.model, self.meshes, stop)
        if results is not None:
            self.reporter.evaluated(self.step, results)
            self.reporter.say(f"evaluated at step {self.step} in {time.perf_counter() - started:.1f} s")
        self.reporter.restart_clock()
        return results is None

    def _save(self) -> None:
        started = time.perf_counter()
        state = LoopState(
            step=self.step,
            tokens_seen=self.tokens_seen,
            samples_seen=self.samples_seen,
            loader=self.loader.state_dict(),
        )
        self.checkpointer.save(self.step, self.model, self.optimizer, state)
        self.reporter.say(f"checkpoint of step {self.step} saved in {time.perf_counter() - started:.1f} s")
        self.reporter.restart_clock()

    def _export(self) -> None:
        from .export import TokenizerFile, export_model

        dataset, dtype = self.loader.dataset, self.recipe.precision.param_dtype
        tokenizer = TokenizerFile.open(dataset.folder / dataset.info.tokenizer.file)
        export_model(self.model, self.recipe.model, self.root.model, dtype=dtype, tokenizer=tokenizer)
        self.reporter.say(f"exported to {self.root.model} in {dtype}")
