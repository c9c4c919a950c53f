"""Evaluation while training: the right number at every layout, and no trace of it in what is trained."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spawn import run_distributed
from test_parity_layouts import DENSE, MODELS, Row, recipe_of
from test_parity_train import fresh, recipe_file, records, root, run  # noqa: F401 (root is a fixture)

from chimera_train.config import EvaluationConfig, ParallelConfig, layout
from chimera_train.data.dataset import DatasetInfo, TokenizerInfo, file_sha256, write_json
from chimera_train.data.indexed import ShardWriter, token_dtype
from chimera_train.distributed import Worker
from chimera_train.evaluation import STOP_CHECK_BATCHES, Evaluator
from chimera_train.model import Decoder, initialize
from chimera_train.parallel import Meshes, build_model
from chimera_train.signals import StopRequest

pytestmark = pytest.mark.train
CASES = [
    ("dense", 1, {}),
    ("dense", 2, {}),
    ("tied", 2, {}),
    ("moe", 2, {}),
    ("dense", 2, {"pipeline_parallel": 2}),
    ("halves", 2, {"tensor_parallel": 2}),
    ("dense", 2, {"context_parallel": 2}),
    ("dense", 4, {}),
    ("dense", 4, {"data_parallel": 2}),
]
"""Model, ranks, parallelism."""


def write_held_out(folder, documents, *, tokenizer):
    """A data set beside the training data, with its tokenizer."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    vocab_size = 1 + max(max(document) for document in documents)
    with ShardWriter(folder / "shard-00000", token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add(np.array(document))
        shard = writer.finish()
    write_json(
        folder / "dataset.json",
        DatasetInfo(
            schema_version=1,
            shards=(shard,),
            num_documents=shard.num_documents,
            num_tokens=shard.num_tokens,
            vocab_size=vocab_size,
            dtype=token_dtype(vocab_size),
            eod_id=0,
            tokenizer=TokenizerInfo(file="tokenizer.json", sha256=file_sha256(folder / "tokenizer.json")),
            source={},
        ),
    )


def documents_of(seed: int, count: int, vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[*random.integers(1, vocab_size, random.integers(3, 30)).tolist(), 0] for _ in range(count)]


def evaluate(channel, sources, tokenizer_sha256, model_name, parallel, stop_requested=False):
    """On every rank: loss and tokens by source, and whether every parameter is in shards afterwards."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    recipe = recipe_of(Row("evaluation", world_size, model=model_name))
    recipe = replace(recipe, parallel=ParallelConfig(**parallel), evaluation=EvaluationConfig(sources=sources))
    mesh_layout = layout(recipe.parallel, hosts=1, workers_per_host=world_size)
    meshes = Meshes(mesh_layout, "cpu")
    model = build_model(recipe, meshes, torch.device("cpu"))
    initialize(model, recipe.train.seed)
    worker = Worker(rank, world_size, rank, world_size, torch.device("cpu"))
    evaluator = Evaluator(recipe, mesh_layout, worker, channel=channel, tokenizer_sha256=tokenizer_sha256)
    stop = StopRequest()
    stop.requested = stop_requested and rank == world_size - 1
    results = evaluator.run(model, meshes, stop)
    sharded = all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    return (None if results is None else [(r.source, r.loss, r.num_tokens) for r in results]), sharded, model.training


@pytest.fixture(scope="module")
def channel(tmp_path_factory):
    """Two held-out sets of unequal size: `one` fills no window of 16."""
    folder = tmp_path_factory.mktemp("channel")
    (folder / "tokenizer.json").write_text("{}")
    vocab_size = DENSE.vocab_size
    sets = {"many": documents_of(0, 40, vocab_size), "one": [[5, 4, 3, 0]]}
    for name, documents in sets.items():
        write_held_out(folder / name, documents, tokenizer=folder / "tokenizer.json")
    return folder, sets


def reference(model_name: str, documents: list[list[int]], sequence_length: int) -> tuple[float, int]:
    """Plain torch: mean cross-entropy over windows of the documents in a row, and the count of its labels."""
    config = MODELS[model_name]
    model = Decoder(config)
    initialize(model, 1234)
    row = torch.tensor([token for document in documents for token in document])
    total = 0.0
    for start in range(0, len(row) - 1, sequence_length):
        window = row[start : start + sequence_length + 1]
        with torch.no_grad():
            logits = model(window[None, :-1])[0]
        total += F.cross_entropy(logits.double(), window[1:], reduction="sum").item()
    return total / (len(row) - 1), len(row) - 1


def evaluate_all(cases, *arguments):
    return [evaluate(*arguments, model_name, parallel) for model_name, _, parallel in cases]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_loss_is_exact_and_the_same_at_every_layout(channel, ranks):
    folder, sets = channel
    cases = [case for case in CASES if case[1] == ranks]
    sources = {name: name for name in sets}
    of_ranks = run_distributed(evaluate_all, ranks, cases, folder, sources, file_sha256(folder / "tokenizer.json"))
    for outcomes in of_ranks[1:]:
        assert outcomes == of_ranks[0], "ranks disagree"
    for (model_name, _, _), (results, sharded, training) in zip(cases, of_ranks[0], strict=True):
        assert sharded == (ranks > 1), "one rank has nothing to split"
        assert training
        for name, loss, num_tokens in results:
            expected_loss, expected_tokens = reference(model_name, sets[name], 16)
            assert num_tokens == expected_tokens
            assert loss == pytest.approx(expected_loss, rel=1e-6)


def test_a_stop_on_one_rank_ends_a_long_evaluation_on_all(channel):
    folder, sets = channel
    windows = math.ceil((sum(map(len, sets["many"])) - 1) / 16)
    assert windows > 2 * STOP_CHECK_BATCHES
    sha256 = file_sha256(folder / "tokenizer.json")
    outcomes = run_distributed(evaluate, 2, folder, {"many": "many"}, sha256, "dense", {}, True)
    assert outcomes == [(None, True, True)] * 2


def evaluations(ml_root) -> list[dict]:
    lines = (ml_root / "output/data/evaluations/host-0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_training_is_bit_equal_with_and_without_it_and_after_a_resume(root):  # noqa: F811
    train = root / "input" / "data" / "train"
    write_held_out(train / "val", documents_of(1, 30, 64), tokenizer=train / "tokenizer.json")
    plain = recipe_file(hosts=2)
    codes, outputs = run(root, plain)
    assert codes == [0, 0], outputs

    evaluated = fresh(root, "evaluated")
    evaluation = EvaluationConfig(sources={"held_out": "val"}, interval_steps=2)
    file = replace(plain, recipe=replace(plain.recipe, evaluation=evaluation))
    codes, outputs = run(evaluated, file, env={"CHIMERA_FAULT": "kill:step:5:1"})
    assert codes[1] == -9, outputs
    codes, outputs = run(evaluated, file, env={"CHIMERA_ATTEMPT": "2"})
    assert codes == [0, 0], outputs
    assert "steps 4 to 8" in outputs[0]

    def curve(ml_root):
        return [(step, r["loss"], r["grad_norm"], r["lr"]) for step, r in sorted(records(ml_root).items())]

    assert curve(evaluated) == curve(root)
    rows = evaluations(evaluated)
    assert [(row["step"], row["attempt"]) for row in rows] == [(2, 1), (4, 1), (4, 2), (6, 2), (8, 2)]
    assert rows[1]["loss"] == rows[2]["loss"], "the same weights give the same number"
    for row in rows:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert (
            f"chimera_eval step={row['step']} source=held_out loss={row['loss']:.9g}" in outputs[0]
            or row["attempt"] == 1
        )
    assert "chimera_eval" not in outputs[1] or outputs[1].count("chimera_eval") == 3, "once a host"


def test_a_source_that_is_not_there_is_one_error_at_the_start(root):  # noqa: F811
    file = recipe_file()
    missing = EvaluationConfig(sources={"held_out": "nowhere"})
    codes, outputs = run(root, replace(file, recipe=replace(file.recipe, evaluation=missing)))
    assert codes == [1], outputs
    assert "nowhere" in outputs[0]
    assert "chimera step=" not in outputs[0]
