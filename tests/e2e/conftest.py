"""What the runs on simulated hosts share: a small corpus, and a folder for their records."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import chimera_sm as ch
from chimera_sm.paths import entrypoints_dir
from chimera_sm.runs.record import RunRecord

VOCABULARY = 512


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(5)
    for document in range(20):
        text = " ".join(f"{words.choice('abcdefgh')}{words.randrange(40)}" for _ in range(1500))
        (folder / f"{document}.txt").write_text(text)
    command = [sys.executable, "-m", "chimera_train.data.prepare", "--source", str(folder)]
    command += ["--train-tokenizer", str(VOCABULARY), "--output", str(folder / "shards"), "--workers", "1"]
    command += ["--held-out", "10"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(entrypoints_dir())}, timeout=120)
    return folder / "shards"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for the records; no run outlives the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHIMERA_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield
        for run_id in RunRecord.list_ids():
            ch.Run.attach(run_id).stop()
