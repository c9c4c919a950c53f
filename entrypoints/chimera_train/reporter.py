"""Metric lines on stdout and, at full precision, in a file of each host."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from .config import BatchPlan, MlRoot, RecipeFile
from .config.contract import ATTEMPT_VARIABLE
from .config.flops import flops_per_token
from .distributed import Worker
from .evaluation import Evaluation
from .metrics import format_evaluation, format_line, format_source


class MetricFile:
    """JSON lines, appended. A line that cannot be written (a full disk) is told once on stderr and is lost, and
    training goes on: the same values are on stdout, and a run is worth more than its curve."""

    def __init__(self, path: Path):
        self.path = path
        self._told = False

    def append(self, record: Mapping[str, object]) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Opened anew for each line, so that a disk with room again, or mounted again, is used again.
            with self.path.open("a+b", buffering=0) as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # cut off by a kill or a full disk: this row is not to go down with it
                        line = b"\n" + line
                while line:
                    line = line[file.write(line) :]
        except OSError as error:
            if not self._told:
                self._told = True
                message = f"warning: {self.path} cannot be written ({error.strerror}): training goes on, rows are lost"
                print(message, file=sys.stderr, flush=True)


class Reporter:
    """Averages over the steps since its last line. Silent on all but the first worker of a host."""

    def __init__(self, recipe_file: RecipeFile, plan: BatchPlan, worker: Worker, root: MlRoot):
        self.interval = recipe_file.recipe.train.log_interval
        self.plan = plan
        self.worker = worker
        self.attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
        flops = flops_per_token(recipe_file.recipe.model, plan.sequence_length)
        peak = recipe_file.peak_tflops
        self.mfu_per_token_rate = flops / (worker.world_size * peak * 1e12) if peak else None
        self.file = MetricFile(root.metrics / f"host-{worker.host}.jsonl")
        self.evaluations = MetricFile(root.evaluations / f"host-{worker.host}.jsonl")
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin a new window, so that what is not a step (a checkpoint) is not counted as one."""
        self.started = time.perf_counter()
        self.steps = 0
        self.wait_s = 0.0
        self.phase_s: dict[str, float] = defaultdict(float)
        self.timed_steps = 0

    def step_done(
        self,
        step: int,
        *,
        loss: float,
        source_losses: Mapping[str, float | None],
        grad_norm: float,
        lr: float,
        waits_s: Sequence[float],
        phases_s: Mapping[str, float],
    ) -> None:
        """`source_losses`: by name; printed where there are several. `waits_s`: every rank's wait for its data in this
        step, by rank. `phases_s`: this rank's time by phase; empty where it is not known yet."""
        self.steps += 1
        first = self.worker.host * self.worker.local_world_size
        self.wait_s += max(waits_s[first : first + self.worker.local_world_size])
        self.timed_steps += bool(phases_s)
        for phase, seconds in phases_s.items():
            self.phase_s[phase] += seconds
        if step % self.interval and step != self.plan.num_steps:
            return
        step_s = (time.perf_counter() - self.started) / self.steps
        if self.worker.leads_host:
            tokens_per_s = self.plan.tokens_per_step / step_s
            values = {
                "loss": loss,
                "tokens_per_s": tokens_per_s,
                "mfu": None if self.mfu_per_token_rate is None else tokens_per_s * self.mfu_per_token_rate,
                "data_wait_s": self.wait_s / self.steps,
                **peak_memory_gib(self.worker.device),
                "grad_norm": grad_norm,
                "lr": lr,
                "step_s": step_s,
                **{f"{phase}_s": seconds / self.timed_steps for phase, seconds in self.phase_s.items()},
            }
            print(format_line(step, values), flush=True)
            record = {"step": step, **values, "time": time.time(), "attempt": self.attempt}
            if len(source_losses) > 1:
                record["source_loss"] = dict(source_losses)
                for name, source_loss in source_losses.items():
                    if source_loss is not None:
                        print(format_source(step, name, source_loss), flush=True)
            self.file.append(record)
        self.restart_clock()

    def evaluated(self, step: int, results: Sequence[Evaluation]) -> None:
        """A line and a row for each source."""
        if not self.worker.leads_host:
            return
        for result in results:
            values = {"loss": result.loss, "perplexity": result.perplexity}
            print(format_evaluation(step, result.source, values), flush=True)
            record = {"step": step, "source": result.source, **values, "num_tokens": result.num_tokens}
            self.evaluations.append({**record, "time": time.time(), "attempt": self.attempt})

    def say(self, text: str) -> None:
        """A plain line, once a job."""
        if self.worker.is_first:
            print(text, flush=True)


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """Metrics of memory. On a GPU the most since the last call that tensors took, and that torch's allocator held for
    them; on a CPU the process's resident set now."""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"mem_gib": allocated / 2**30, "mem_reserved_gib": reserved / 2**30}
    return {"mem_gib": _resident_gib()}


def _resident_gib() -> float:
    try:
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    except OSError:  # no /proc: macOS, which counts bytes here
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30
