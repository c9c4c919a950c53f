"""Published measurements: what was measured, and the case that it was measured on."""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chimera_sm.planner.case import Case, batch
from chimera_sm.planner.published import Unusable, case_of

FOLDS = 5
MOST_ROWS_OF_A_SOURCE = 60
"""A source with more weighs no more than so many rows."""
COLUMNS = (
    "source_repo_or_paper", "model", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "gpu",
    "num_gpus", "gpus_per_node", "interconnect", "framework", "precision", "dp", "fsdp", "tp", "pp", "vp", "cp", "ep",
    "num_experts", "top_k", "micro_batch", "global_batch_seqs", "grad_accum", "activation_ckpt", "step_time_s",
    "tokens_per_s_per_gpu", "peak_mem_gib", "status", "workload", "moe_ffn_hidden", "gated_mlp", "zero_stage",
    "derived_tok_s_gpu", "config_group",
)  # fmt: skip


@dataclass(frozen=True)
class TimedRuns:
    """Rows with a measured speed that can be predicted."""

    rows: list[dict[str, str]]
    case: Case
    log_step_s: np.ndarray

    def take(self, chosen: np.ndarray) -> TimedRuns:
        return TimedRuns([self.rows[i] for i in chosen], self.case.take(chosen), self.log_step_s[chosen])


def read(path: Path) -> list[dict[str, str]]:
    """Raises ValueError where the file lacks columns."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: missing columns {', '.join(missing)}")
        return list(reader)


def measured_step_s(row: dict[str, str], case: Case) -> float | None:
    """Seconds of a step: as printed, or from the printed tokens/s and the batch. None where neither is given."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    rate = row["tokens_per_s_per_gpu"] or row["derived_tok_s_gpu"]
    if not rate or not float(rate) or not row["num_gpus"] or not row["seq_len"]:
        return None
    sequences = case.micro_batch * case.micro_batches * case.world / (case.tensor * case.pipeline * case.context)
    return sequences * case.sequence / (float(rate) * float(row["num_gpus"]))


def timed_runs(rows: Sequence[dict[str, str]]) -> tuple[TimedRuns, Counter[str]]:
    """Those that can be predicted, and why the others cannot."""
    kept, cases, times = [], [], []
    unusable: Counter[str] = Counter()
    for row in rows:
        if row["status"] != "ok" or not (row["step_time_s"] or row["tokens_per_s_per_gpu"] or row["derived_tok_s_gpu"]):
            continue
        try:
            case = case_of(row)
        except Unusable as error:
            unusable[str(error).split(":")[0]] += 1
            continue
        seconds = measured_step_s(row, case)
        if seconds is None:
            unusable["no time can be worked out of its tokens/s"] += 1
            continue
        kept.append(row)
        cases.append(case)
        times.append(seconds)
    return TimedRuns(kept, batch(cases), np.log(times)), unusable


def fold(row: dict[str, str]) -> int:
    """By a hash of the configuration's group: near twins are on one side of a split."""
    return int(hashlib.sha256(row["config_group"].encode()).hexdigest(), 16) % FOLDS


def weights(rows: Sequence[dict[str, str]]) -> np.ndarray:
    counts = Counter(row["source_repo_or_paper"] for row in rows)
    return np.array([min(1.0, MOST_ROWS_OF_A_SOURCE / counts[row["source_repo_or_paper"]]) for row in rows])
