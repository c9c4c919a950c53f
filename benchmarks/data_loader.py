"""How fast the loader reads: `python benchmarks/data_loader.py [--tokens 64e6] [--json out.json]`.

Writes random shards into a temporary folder and prints tokens/s cold (page cache of the shards dropped) and warm, with
and without the reading thread, the time to the first batch of a run that resumes in the middle, and what a step waits
when it computes as long as an 8B model on eight H100 takes for its share (66,000 tokens/s a host).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from chimera_train.config import DataConfig, TrainConfig
from chimera_train.data.dataset import DatasetInfo, TokenizerInfo, file_sha256, write_json
from chimera_train.data.indexed import ShardWriter
from chimera_train.data.loader import Loader

VOCAB_SIZE = 50_257
NUM_SHARDS = 8
SEQUENCE_LENGTH = 4096
MICRO_BATCH_SIZE = 8


def write_corpus(folder: Path, num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    shards = []
    for number in range(NUM_SHARDS):
        with ShardWriter(folder / f"shard-{number:05d}", "uint16") as writer:
            left = num_tokens // NUM_SHARDS
            while left > 0:
                length = min(left, int(rng.integers(50, 4000)))
                writer.add(rng.integers(0, VOCAB_SIZE, length))
                left -= length
            shards.append(writer.finish())
    (folder / "tokenizer.json").write_text("{}")
    infos = tuple(shard for shard in shards if shard is not None)
    info = DatasetInfo(
        schema_version=1,
        shards=infos,
        num_documents=sum(shard.num_documents for shard in infos),
        num_tokens=sum(shard.num_tokens for shard in infos),
        vocab_size=VOCAB_SIZE,
        dtype="uint16",
        eod_id=0,
        tokenizer=TokenizerInfo(file="tokenizer.json", sha256=file_sha256(folder / "tokenizer.json")),
        source={"description": "random"},
    )
    write_json(folder / "dataset.json", info)


def drop_page_cache(folder: Path) -> None:
    for path in folder.glob("shard-*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def make(folder: Path, prefetch: int) -> Loader:
    train = TrainConfig(
        num_steps=1,
        global_batch_size=MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        sequence_length=SEQUENCE_LENGTH,
    )
    return Loader(
        DataConfig(name="benchmark", prefetch_batches=prefetch),
        train,
        folder=folder,
        data_rank=0,
        data_parallel_size=1,
        accumulation_steps=1,
        vocab_size=VOCAB_SIZE,
    )


def measure(folder: Path, *, cold: bool, prefetch: int, steps: int) -> dict[str, object]:
    if cold:
        drop_page_cache(folder)
    started = time.perf_counter()
    loader = make(folder, prefetch)
    opened = time.perf_counter()
    loader.load_state_dict({"samples_consumed": loader.num_samples // 2})
    loader.next_step()
    first = time.perf_counter()
    for _ in range(steps):
        loader.next_step()
    seconds = time.perf_counter() - first
    tokens_per_step = MICRO_BATCH_SIZE * SEQUENCE_LENGTH
    compute_s = tokens_per_step / 66_000
    waits = []
    for _ in range(5):
        time.sleep(compute_s)
        waits.append(loader.next_step().wait_s)
    loader.close()
    return {
        "cache": "cold" if cold else "warm",
        "prefetch_batches": prefetch,
        "open_ms": round(1e3 * (opened - started), 1),
        "first_batch_ms": round(1e3 * (first - opened), 1),
        "mtokens_per_s": round(steps * tokens_per_step / seconds / 1e6, 1),
        "wait_per_step_ms": round(1e3 * max(waits), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, default=64e6)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, int(given.tokens))
        rows = [
            measure(folder, cold=cold, prefetch=prefetch, steps=given.steps)
            for prefetch in (0, 4)
            for cold in (True, False)
        ]
    print(f"{given.tokens / 1e6:,.0f} M tokens, {NUM_SHARDS} shards, batches of {MICRO_BATCH_SIZE} x {SEQUENCE_LENGTH}")
    print("  ".join(f"{key:>16}" for key in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>16}" for value in row.values()))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
