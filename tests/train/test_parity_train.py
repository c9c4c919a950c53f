"""train.py as the processes of a job: exit codes, metrics, stop and resume, and what it says when it cannot go on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from spawn import ENTRYPOINTS, finish, start_train
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from chimera_train.config import (
    CheckpointConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecipeFile,
    TrainConfig,
    TrainRecipe,
    encode,
)
from chimera_train.data.dataset import DatasetInfo, TokenizerInfo, file_sha256, write_json
from chimera_train.data.indexed import ShardWriter, token_dtype
from chimera_train.metrics import parse_line
from chimera_train.weights import CheckpointWeights, ExportedWeights, empty_model

pytestmark = pytest.mark.train
VOCAB, SEQUENCE, STEPS = 64, 16, 8


def recipe_file(hosts: int = 1, workers: int = 1, **sections: dict) -> RecipeFile:
    def of(section: str, **defaults):
        return {**defaults, **sections.get(section, {})}

    recipe = TrainRecipe(
        name="small",
        model=ModelConfig(
            **of(
                "model",
                name="small",
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=64,
                num_layers=2,
                num_heads=4,
                num_kv_heads=2,
            )
        ),
        parallel=ParallelConfig(**of("parallel")),
        train=TrainConfig(
            **of("train", num_steps=STEPS, global_batch_size=8, micro_batch_size=2, sequence_length=SEQUENCE)
        ),
        data=DataConfig(**of("data", name="test")),
        optim=OptimConfig(**of("optim", learning_rate=3e-3, warmup_steps=2)),
        precision=PrecisionConfig(name="fp32", param_dtype="float32"),
        checkpoint=CheckpointConfig(**of("checkpoint", interval_steps=3, storage="shared")),
    )
    return RecipeFile(
        recipe=recipe, layout=LayoutConfig(hosts=hosts, workers_per_host=workers), recipe_hash="0" * 64, peak_tflops=1.0
    )


@pytest.fixture
def root(tmp_path):
    """An ml root with a shard of 200 documents, in which each token follows from the one before."""
    folder = tmp_path / "ml" / "input" / "data" / "train"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    with ShardWriter(folder / "shard-00000", token_dtype(VOCAB)) as writer:
        for _ in range(200):
            tokens = [int(random.integers(1, VOCAB))]
            for choice in random.integers(0, 2, 30):
                tokens.append((tokens[-1] * 5 + int(choice)) % (VOCAB - 1) + 1)
            writer.add(np.array([*tokens, 0]))
        shard = writer.finish()
    words = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, VOCAB)}}
    Tokenizer(WordLevel(words, unk_token="w1")).save(str(folder / "tokenizer.json"))
    info = DatasetInfo(
        schema_version=1,
        shards=(shard,),
        num_documents=shard.num_documents,
        num_tokens=shard.num_tokens,
        vocab_size=VOCAB,
        dtype=token_dtype(VOCAB),
        eod_id=0,
        tokenizer=TokenizerInfo(file="tokenizer.json", sha256=file_sha256(folder / "tokenizer.json")),
        source={},
    )
    write_json(folder / "dataset.json", info)
    return tmp_path / "ml"


def write(root, file: RecipeFile):
    path = root.parent / "recipe.json"
    path.write_text(json.dumps(encode(file)))
    return path


def records(root, host: int = 0) -> dict[int, dict]:
    """By step; of a step that ran twice, the second."""
    lines = (root / "output/data/metrics" / f"host-{host}.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


def losses(root) -> list[float]:
    found = records(root)
    return [found[step]["loss"] for step in sorted(found)]


def run(root, file: RecipeFile, env=None) -> tuple[list[int], list[str]]:
    shape = file.layout
    processes = start_train(
        root, write(root, file), hosts=shape.hosts, workers_per_host=shape.workers_per_host, env=env
    )
    return finish(processes)


def fresh(root, name: str):
    """Another ml root over the same data."""
    other = root.parent / name
    other.mkdir()
    (other / "input").symlink_to(root / "input")
    return other


def test_one_process_needs_no_environment_and_equals_two_and_four(root):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    env |= {"CHIMERA_ML_ROOT": str(root), "CHIMERA_RECIPE": str(write(root, recipe_file()))}
    done = subprocess.run(
        [sys.executable, str(ENTRYPOINTS / "train.py")], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [parsed for line in done.stdout.splitlines() if (parsed := parse_line(line))]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    alone = records(root)
    for line in lines:
        record = alone[line["step"]]
        assert line["loss"] == pytest.approx(record["loss"], rel=1e-8)
        assert 0 < line["mfu"] < 1
        assert line["tokens_per_s"] == pytest.approx(8 * SEQUENCE / record["step_s"], rel=1e-3)
        assert record["attempt"] == 1
        assert record["mem_gib"] > 0.05
        assert 0 <= record["data_wait_s"] <= record["step_s"]
        phases = [record[f"{phase}_s"] for phase in ("forward", "backward", "sync", "optimizer")]
        assert min(phases) > 0
        assert record["data_wait_s"] + sum(phases) <= record["step_s"]
    assert lines[0]["lr"] == pytest.approx(1.5e-3)
    assert lines[-1]["lr"] == pytest.approx(3e-4)
    assert alone[STEPS]["loss"] < alone[1]["loss"]

    two = fresh(root, "two")
    codes, outputs = run(two, recipe_file(hosts=2))
    assert codes == [0, 0], outputs
    assert losses(two) == pytest.approx(losses(root), abs=1e-5)
    assert {step: r["loss"] for step, r in records(two, host=1).items()} == {
        step: r["loss"] for step, r in records(two, host=0).items()
    }
    four = fresh(root, "four")
    codes, outputs = run(four, recipe_file(workers=4, parallel={"data_parallel": 2}))
    assert codes == [0] * 4, outputs
    assert losses(four) == pytest.approx(losses(root), abs=1e-5)
    assert "chimera step" not in outputs[1], "one line a host"


def test_sigterm_to_one_rank_stops_all_and_resume_is_bit_exact(root):
    file = recipe_file(hosts=2, train={"num_steps": 200}, checkpoint={"interval_steps": 0})
    file = replace(file, recipe=replace(file.recipe, optim=replace(file.recipe.optim, schedule="constant")))
    processes = start_train(root, write(root, file), hosts=2)
    wait_for(has_steps(root, 3), processes)
    processes[1].send_signal(signal.SIGTERM)
    processes[1].send_signal(signal.SIGTERM)
    codes, outputs = finish(processes)
    assert codes == [143, 143], outputs
    stopped = max(records(root))
    assert f"checkpoint of step {stopped} saved" in outputs[0]
    longer = stopped + 4
    file = replace(file, recipe=replace(file.recipe, train=replace(file.recipe.train, num_steps=longer)))
    codes, outputs = run(root, file)
    assert codes == [0, 0], outputs
    assert f"steps {stopped + 1} to {longer}" in outputs[0]

    straight = fresh(root, "straight")
    codes, outputs = run(straight, file)
    assert codes == [0, 0], outputs
    assert losses(root) == losses(straight)
    assert [r["grad_norm"] for r in records(root).values()] == [r["grad_norm"] for r in records(straight).values()]


def wait_for(condition, processes):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        assert all(p.poll() is None for p in processes)
        time.sleep(0.02)


def has_steps(root, count: int):
    file = root / "output/data/metrics/host-0.jsonl"
    return lambda: file.exists() and len(file.read_text().splitlines()) >= count


def test_sigterm_while_starting_stops_after_the_first_step(root):
    (process,) = start_train(root, write(root, recipe_file(train={"num_steps": 1000})))

    def handles_sigterm() -> bool:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)

    wait_for(handles_sigterm, [process])
    process.send_signal(signal.SIGTERM)
    codes, outputs = finish([process])
    assert codes == [143], outputs
    assert list(records(root)) == [1]
    assert "checkpoint of step 1 saved" in outputs[0]


def test_a_hang_is_a_failure_worth_a_retry(root):
    file = recipe_file(hosts=2, train={"num_steps": 100_000, "collective_timeout_s": 2.0})
    processes = start_train(root, write(root, file), hosts=2)
    wait_for(has_steps(root, 2), processes)
    processes[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    code = processes[0].wait(timeout=30)
    assert code == 75
    assert time.monotonic() - stopped < 10
    processes[1].kill()
    _, outputs = finish(processes)
    assert "Timed out" in outputs[0]
    recorded = root / "output/data/flight_recorder/rank-0.json"
    assert f"the last collectives of rank 0 are in {recorded}" in outputs[0]
    entries = json.loads(recorded.read_text())["entries"]
    assert any("all_reduce" in entry["profiling_name"] for entry in entries)
    assert 10 < len(entries) <= 2000
    assert recorded.stat().st_size < 5e6


def test_the_end_exports_a_model_that_transformers_reads(root):
    file = recipe_file(hosts=2, checkpoint={"export_at_end": True})
    codes, outputs = run(root, file)
    assert codes == [0, 0], outputs
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "model")
    assert model.config.num_hidden_layers == 2
    tokens = np.fromfile(root / "input/data/train/shard-00000.bin", dtype=np.uint16)[: 40 * SEQUENCE].astype(np.int64)
    batch = torch.from_numpy(tokens.reshape(40, SEQUENCE))
    with torch.no_grad():
        loss = model(batch, labels=batch).loss.item()
    assert loss == pytest.approx(records(root)[STEPS]["loss"], abs=0.15)


def test_experts_train_deterministically_and_lines_come_at_the_interval(root):
    experts = {"num_experts": 4, "experts_per_token": 2, "router_aux_loss_coefficient": 0.01, "tie_embeddings": True}
    file = recipe_file(
        hosts=2,
        model=experts,
        train={"deterministic": True, "log_interval": 3, "activation_checkpointing": "selective"},
    )
    codes, outputs = run(root, file)
    assert codes == [0, 0], outputs
    steps = [int(parsed["step"]) for line in outputs[0].splitlines() if (parsed := parse_line(line))]
    assert steps == [3, 6, STEPS]
    again = fresh(root, "again")
    run(again, file)
    assert losses(root) == losses(again)


def test_experts_over_ranks_stop_and_go_on_on_one_and_back(root):
    model = {"num_experts": 4, "experts_per_token": 2, "router_aux_loss_coefficient": 0.02, "num_shared_experts": 1}
    model |= {"router_scoring": "sigmoid", "router_bias_update_speed": 0.01}

    def file(workers: int, num_steps: int, **parallel: int) -> RecipeFile:
        train = {"num_steps": num_steps, "micro_batch_size": 1}
        made = recipe_file(workers=workers, model=model, train=train, parallel=parallel)
        return replace(made, recipe=replace(made.recipe, optim=replace(made.recipe.optim, schedule="constant")))

    alone = fresh(root, "alone")
    assert run(alone, file(1, 9))[0] == [0]
    for workers, num_steps, parallel in ((2, 3, {"expert_parallel": 2}), (1, 6, {}), (2, 9, {"expert_parallel": 2})):
        codes, outputs = run(root, file(workers, num_steps, **parallel))
        assert codes == [0] * workers, outputs
    assert losses(root) == pytest.approx(losses(alone), abs=1e-5)


def test_a_killed_rank_ends_the_others_with_retry_and_resume_is_bit_exact(root):
    file = recipe_file(hosts=2)
    error_file = root.parent / "error.json"
    codes, outputs = run(root, file, env={"CHIMERA_FAULT": "kill:step:5:1", "CHIMERA_ERROR_FILE": str(error_file)})
    assert codes == [75, -signal.SIGKILL], outputs
    report = json.loads(error_file.read_text())
    assert (report["rank"], report["exit_code"]) == (0, 75)
    assert report["traceback"].startswith("Traceback")
    assert report["message"] not in report["traceback"], "it is told once"
    codes, outputs = run(root, file, env={"CHIMERA_ATTEMPT": "2"})
    assert codes == [0, 0], outputs
    assert "steps 4 to 8" in outputs[0]
    assert records(root)[4]["attempt"] == 2
    straight = fresh(root, "straight")
    run(straight, file)
    assert losses(root) == losses(straight)


def killed_at(step: int) -> dict[str, str]:
    return {"CHIMERA_FAULT": f"kill:step:{step}:0"}


def check_other_layouts(root, first: RecipeFile, one: RecipeFile, last: RecipeFile) -> None:
    """Killed on the two ranks of `first` and on the one of `one`, a run ends on the two of `last`, which exports: its
    losses are those of `one` alone, and its export is its last checkpoint."""
    codes, outputs = run(root, first, env=killed_at(4))
    assert codes == [-signal.SIGKILL, 75], outputs
    codes, outputs = run(root, one, env=killed_at(7))
    assert codes == [-signal.SIGKILL], outputs
    assert "steps 4 to 8" in outputs[0]
    codes, outputs = run(root, last)
    assert codes == [0, 0], outputs
    assert "steps 7 to 8" in outputs[0]

    straight = fresh(root, "straight")
    run(straight, one)
    assert losses(root) == pytest.approx(losses(straight), abs=1e-5)
    saved, exported = CheckpointWeights(root / "checkpoints"), ExportedWeights(root / "model")
    for name, _ in empty_model(one.recipe.model).named_parameters():
        assert torch.equal(saved.read(name), exported.read(name)), name


def test_a_run_goes_on_with_another_tensor_parallel_degree(root):
    two = recipe_file(workers=2, parallel={"tensor_parallel": 2}, checkpoint={"export_at_end": True})
    check_other_layouts(root, two, recipe_file(), two)


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_weights_move(root):
    file = recipe_file(hosts=2, optim={"learning_rate": 1e30, "max_grad_norm": 0.0})
    codes, outputs = run(root, file)
    assert codes == [1, 1], outputs
    for output in outputs:
        assert re.search(
            r"NotFinite: step [23]: loss=\S+ grad_norm=\S+. The weights were not moved. There is no ", output
        )
        assert re.search(r"\(fix: chimera_sm resume \S+ optim.learning_rate=5e\+29\)", output)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (recipe_file(hosts=2), "layout: planned for 2 hosts × 1 workers, started as 1 workers"),
        (recipe_file(data={"name": "test", "path": "elsewhere"}), "elsewhere"),
        (recipe_file(model={"vocab_size": 32}), "model.vocab_size"),
        (recipe_file(train={"global_batch_size": 7}), "train.global_batch_size: 7 is not a multiple"),
        (recipe_file(checkpoint={"keep_last": 1}), "checkpoint.keep_last"),
    ],
    ids=["layout", "no data", "tokenizer", "batch", "rule"],
)
def test_what_cannot_run_exits_1_and_names_the_key(root, file, message):
    codes, outputs = finish(start_train(root, write(root, file)))
    assert codes == [1], outputs
    assert message in outputs[0]


def test_compiling_without_a_compiler_is_one_line(root):
    file = recipe_file(train={"compile": True})
    codes, outputs = finish(start_train(root, write(root, file), env={"PATH": "/nowhere", "CXX": ""}))
    assert codes == [1], outputs
    assert "error: train.compile: compiling needs a C++ compiler, and this machine has none" in outputs[0]
    assert "Traceback" not in outputs[0]


def test_a_run_goes_on_with_another_degree_of_context_parallel(root):
    def file(degree: int, steps: int) -> RecipeFile:
        return recipe_file(
            workers=2,
            parallel={"context_parallel": degree},
            train={"num_steps": steps},
            data={"separate_documents": True},
            optim={"schedule": "constant"},
        )

    for degree, steps in ((2, 4), (1, 6), (2, STEPS)):
        codes, outputs = run(root, file(degree, steps))
        assert codes == [0, 0], outputs
    assert "steps 7 to 8" in outputs[0]
    straight = fresh(root, "straight")
    codes, outputs = run(straight, file(1, STEPS))
    assert codes == [0, 0], outputs
    assert losses(root) == pytest.approx(losses(straight), abs=1e-5)
