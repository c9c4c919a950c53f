"""Exported models are what transformers reads: the same logits, the same greedy text; and what export refuses."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import make_checkpointer, recipe_file
from spawn import run_ranks

from chimera_train import export as export_module
from chimera_train import generate
from chimera_train.checkpoint import LoopState
from chimera_train.config import ModelConfig, RopeScaling, encode
from chimera_train.data.tokenizer import train_tokenizer
from chimera_train.export import ExportError, TokenizerFile, export, export_model
from chimera_train.model import Decoder, initialize
from chimera_train.weights import CheckpointWeights, ExportedWeights, load_model

os.environ["HF_HUB_OFFLINE"] = "1"

SIZES = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_layers": 2, "num_heads": 4}
SIZES |= {"num_kv_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3}
MODELS = {
    "dense": SIZES,
    "tied": SIZES | {"tie_embeddings": True},
    "long_rope": SIZES | {"rope_scaling": RopeScaling(original_max_position_embeddings=32), "head_dim": 16},
    "experts": SIZES | {"num_experts": 4, "experts_per_token": 2},
}


def config_of(kind: str) -> ModelConfig:
    return ModelConfig(name=kind, **MODELS[kind])


def save_checkpoint(root: Path, kind: str) -> Decoder:
    model = Decoder(config_of(kind))
    initialize(model, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logits = model(torch.arange(8)[None])
    logits.square().mean().backward()
    optimizer.step()
    checkpointer = make_checkpointer(root, world_size=1, recipe=recipe_file(**MODELS[kind] | {"name": kind}))
    checkpointer.save(1, model, optimizer, LoopState(1, 8, 1))
    return model.eval()


def store_folder(root: Path) -> Path:
    return root / "fsx" / "run"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> TokenizerFile:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["naïve façade — déjà vu ✓\n" * 50, "def f(x):\n    return x\n" * 50], 290, path)
    return TokenizerFile.open(path)


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_reads_it_and_computes_the_same_logits(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    model = save_checkpoint(tmp_path, kind)
    export(CheckpointWeights(store_folder(tmp_path)), tmp_path / "out", dtype="float32")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours = model(tokens)
        difference = (ours - theirs.eval()(tokens).logits).abs().max().item()
    assert difference < 1e-5 * max(1.0, ours.abs().max().item())
    assert (theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight) == (kind == "tied")


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_large_model_is_cut_into_files_with_an_index(tmp_path, kind):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    save_checkpoint(tmp_path, kind)
    weights = CheckpointWeights(store_folder(tmp_path))
    export(weights, tmp_path / "one", dtype="float32")
    export(weights, tmp_path / "many", dtype="float32", max_file_bytes=60_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == {name for name, where in index["weight_map"].items() if where == path.name}
    one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "many"))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_bfloat16_halves_it_and_says_so(tmp_path):
    from transformers import AutoModelForCausalLM

    model = save_checkpoint(tmp_path, "dense")
    export(CheckpointWeights(store_folder(tmp_path)), tmp_path / "out", dtype="bfloat16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.lm_head.weight, model.head.weight.bfloat16())


@pytest.mark.parametrize("kind", MODELS)
def test_our_own_reader_gets_back_what_was_exported(tmp_path, kind):
    model = save_checkpoint(tmp_path, kind)
    export(CheckpointWeights(store_folder(tmp_path)), tmp_path / "out", dtype="float32")
    weights = ExportedWeights(tmp_path / "out")
    again = load_model(weights, device=torch.device("cpu"), dtype=torch.float32)
    ignored = {"name", "initializer_range", "router_aux_loss_coefficient", "head_dim"}
    ours, back = encode(config_of(kind)), encode(weights.model)
    assert {k: v for k, v in ours.items() if k not in ignored} == {k: v for k, v in back.items() if k not in ignored}
    for (name, mine), (other, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(mine, theirs)


def test_nothing_is_overwritten(tmp_path):
    save_checkpoint(tmp_path, "dense")
    weights = CheckpointWeights(store_folder(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(ExportError, match="nothing is overwritten"):
        export(weights, out, dtype="float32")
    assert [p.name for p in out.iterdir()] == ["precious"]


def test_a_failed_export_leaves_an_empty_folder(tmp_path):
    save_checkpoint(tmp_path, "dense")
    weights = CheckpointWeights(store_folder(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (59_000, limits[1]))  # the first file fits, the second does not
    try:
        with pytest.raises(ExportError, match=r"the export to .* failed: .*File too large"):
            export(weights, tmp_path / "out", dtype="float32", max_file_bytes=60_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_tokenizer_goes_with_it_and_its_ids_are_transformers_ids(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    save_checkpoint(tmp_path, "dense")
    export(CheckpointWeights(store_folder(tmp_path)), tmp_path / "out", dtype="float32", tokenizer=tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id == tokenizer.eod_id
    text = "def naïve(x): ✓\n"
    assert theirs.decode(theirs(text).input_ids) == text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eod_id


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path, tokenizer, capsys):
    model = Decoder(ModelConfig(name="small", **SIZES | {"vocab_size": 100}))
    with pytest.raises(ExportError, match=r"ids up to \d+, and the model a vocabulary of 100"):
        tokenizer.check_against(model.config)


def export_sharded(rank: int, root: Path, kind: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Decoder(config_of(kind))
    initialize(model, 7)
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    export_model(model, config_of(kind), root / "sharded", dtype="float32")


def refused_sharded(rank: int, root: Path) -> str:
    model = Decoder(config_of("dense"))
    initialize(model, 7)
    try:
        export_model(model, config_of("dense"), root, dtype="float32")
    except ExportError as error:
        return str(error)
    return ""


@pytest.mark.train
@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_a_sharded_live_model_gives_the_same_files(tmp_path, kind):
    assert run_ranks(3, export_sharded, tmp_path, kind) == [None] * 3
    model = Decoder(config_of(kind))
    initialize(model, 7)
    export_model(model, config_of(kind), tmp_path / "whole", dtype="float32")
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "sharded").iterdir())
    for name in names:
        assert (tmp_path / "sharded" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.train
def test_a_refused_export_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "precious").touch()
    for message in run_ranks(2, refused_sharded, tmp_path):
        assert "nothing is overwritten" in message


def test_a_later_attempt_of_a_run_replaces_what_an_earlier_one_exported(tmp_path, tokenizer):
    model, config = Decoder(config_of("dense")), config_of("dense")
    initialize(model, 7)
    export_model(model, config, tmp_path / "out", dtype="float32", tokenizer=tokenizer)
    (tmp_path / "out" / "model-00001-of-00002.safetensors").write_bytes(b"half")
    export_model(model, config, tmp_path / "out", dtype="bfloat16")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert ExportedWeights(tmp_path / "out").read("norm.weight").dtype == torch.bfloat16
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(ExportError, match="nothing is overwritten"):
        export_model(model, config, tmp_path / "out", dtype="bfloat16")


def test_greedy_text_is_transformers_greedy_text(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM

    model = save_checkpoint(tmp_path, "dense")
    export(CheckpointWeights(store_folder(tmp_path)), tmp_path / "out", dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = [5, 17, 40]
    settings = {"temperature": 0, "top_k": 0, "seed": 0, "vocab_size": 300, "end": -1}
    ours = list(generate.sample(model, prompt, max_new_tokens=20, **settings))
    expected = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 3), do_sample=False, max_new_tokens=20, pad_token_id=0
    )
    assert expected[0].tolist() == prompt + ours
    # Past the window of 64 positions it goes on with the last 64 tokens.
    assert len(list(generate.sample(model, prompt, max_new_tokens=80, **settings))) == 80


def test_sampling_depends_on_the_seed_alone_and_obeys_top_k_and_vocabulary(tmp_path):
    model = Decoder(config_of("dense"))
    initialize(model, 3)

    def draw(**changes):
        settings = {"max_new_tokens": 30, "temperature": 1.5, "top_k": 0, "seed": 1, "vocab_size": 50, "end": -1}
        return list(generate.sample(model, [1], **settings | changes))

    assert draw() == draw() != draw(seed=2)
    assert max(draw()) < 50
    assert draw(top_k=1) == draw(temperature=0)
    first = draw()[0]
    assert draw(end=first) == []


def test_the_commands(tmp_path, tokenizer, capfd):
    save_checkpoint(tmp_path, "dense")
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(encode(recipe_file(**MODELS["dense"] | {"name": "dense"}))))
    checkpoints, out = str(store_folder(tmp_path)), str(tmp_path / "out")
    common = ["--checkpoints", checkpoints, "--recipe", str(recipe), "--tokenizer", str(tokenizer.path)]
    assert export_module.main([*common, "--out", out]) == 0
    assert f"exported {checkpoints}/step-1 (step 1) to {out} in float32" in capfd.readouterr().out
    assert export_module.main([*common, "--out", out]) == 2
    assert "error: " + out in capfd.readouterr().err
    assert export_module.main([*common, "--step", "9", "--out", out + "2"]) == 2
    assert f"--step 9: no complete checkpoint of that step in {checkpoints}; there are: 1" in capfd.readouterr().err
    assert export_module.main(["--checkpoints", checkpoints, "--out", out + "3"]) == 0
    assert f"warning: {out}3 has no tokenizer" in capfd.readouterr().err

    sampling = ["--prompt", "def ", "--max-new-tokens", "12", "--seed", "4"]
    assert generate.main([*common, *sampling, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert generate.main([*common, *sampling]) == 0
    assert capfd.readouterr().out == "def " + result["text"] + "\n"
    assert generate.main(["--export", out, *sampling, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["tokens"] == result["tokens"]
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--checkpoints", checkpoints])
    assert "holds no tokenizer" in capfd.readouterr().err


def code_and_error(capfd, main, *arguments) -> tuple[int, str]:
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    return code, capfd.readouterr().err


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """The arguments that name a good checkpoint with its recipe and tokenizer."""
    root = tmp_path_factory.mktemp("saved")
    save_checkpoint(root, "dense")
    (root / "recipe.json").write_text(json.dumps(encode(recipe_file(**MODELS["dense"] | {"name": "dense"}))))
    folder = store_folder(root)
    return ["--checkpoints", folder, "--recipe", root / "recipe.json", "--tokenizer", tokenizer.path]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "nan"], "--temperature: nan is out of range"),
        (["--temperature", "inf"], "--temperature: inf is out of range"),
        (["--temperature=-0.5"], "--temperature: -0.5 is out of range"),
        (["--temperature", "warm"], "--temperature: 'warm' is no number"),
        (["--top-k=-1"], "--top-k: -1 is out of range: at least 0"),
        (["--seed", "9" * 23], "is out of range: from 0 to"),
        (["--seed=-1"], "--seed: -1 is out of range"),
        (["--max-new-tokens", "0"], "--max-new-tokens: 0 is out of range: at least 1"),
        (["--max-new-tokens", "1.5"], "'1.5' is no integer"),
        (["--prompt", "def " * 100], "tokens, and the model a context of 64: shorten it"),
        (["--prompt", "", "--max-new-tokens", "65"], "--max-new-tokens 65: the model has a context of 64 tokens"),
        (["--prompt", "\udcff"], "--prompt: is no UTF-8 text"),
        (["--step", "99"], "--step 99: no complete checkpoint of that step"),
        (["--tokenizer", "gone.json"], "gone.json: no such file"),
        (["--recipe", "gone.json"], "gone.json: no such file; it is to be the recipe.json"),
        (["--checkpoints", "gone"], "gone is no folder: the run has not saved one yet"),
        (["--checkpoints", "."], "holds no checkpoint"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode(),
)
def test_wrong_arguments_of_generate_are_one_line_and_exit_2(saved, tmp_path, monkeypatch, capfd, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, errors = code_and_error(capfd, generate.main, *saved, *arguments)
    assert code == 2
    assert says in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--temperature", "1e-40"], ["--prompt", ""], ["--top-k", "9999"]])
def test_odd_arguments_of_generate_that_have_a_meaning(saved, capfd, arguments):
    code, errors = code_and_error(capfd, generate.main, *saved, "--max-new-tokens", 3, *arguments)
    assert (code, errors) == (0, "")


def test_a_temperature_next_to_nothing_takes_the_likeliest():
    logits = torch.tensor([1.0, 30.0, 29.999, -4.0])
    for temperature in (1e-40, 5e-324, 1e-6):
        assert generate._draw(logits, temperature, 0, torch.Generator().manual_seed(0)) == 1
    with pytest.raises(ExportError, match="no finite numbers"):
        generate._draw(torch.tensor([1.0, float("nan")]), 1.0, 0, torch.Generator())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--step", "99", "--out", "new"], "--step 99: no complete checkpoint of that step"),
        (["--out", "full"], "full is not an empty folder; nothing is overwritten"),
        (["--out", "full/file"], "full/file is not an empty folder"),
        (["--out", "/proc/foo/bar"], "/proc/foo/bar cannot be made: No such file or directory; name another folder"),
        (["--recipe", "gone.json", "--out", "new"], "gone.json: no such file; it is to be the recipe.json"),
        (["--recipe", "full/file", "--out", "new"], "full/file cannot be read as a recipe"),
        (["--checkpoints", "gone", "--out", "new"], "gone is no folder"),
        ([], "--out"),
    ],
    ids=str,
)
def test_wrong_arguments_of_export_are_one_line_and_exit_2(saved, tmp_path, monkeypatch, capfd, arguments, says):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").write_text("precious")
    code, errors = code_and_error(capfd, export_module.main, *saved, *arguments)
    assert code == 2
    assert says in errors
    assert errors.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


def test_a_step_beside_one_checkpoint_would_be_ignored(saved, tmp_path, capfd):
    one = saved[1] / "step-1"
    code, errors = code_and_error(
        capfd, export_module.main, *saved, "--checkpoints", one, "--step", 1, "--out", tmp_path / "out"
    )
    assert code == 2
    assert "--step 1 would be ignored" in errors


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    from chimera_train.checkpoint import CheckpointError

    save_checkpoint(tmp_path, "dense")
    path = store_folder(tmp_path) / "step-1" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0\.distcp does not match"):
        CheckpointWeights(store_folder(tmp_path))
