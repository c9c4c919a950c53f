"""`model=hf`: a folder's config.json becomes the model section, and its weights the first of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_model_reference import MODELS

from chimera_sm.errors import RecipeError
from chimera_sm.planner.plan import plan
from chimera_sm.recipe.compose import compose
from chimera_sm.recipe.listing import explain_key
from chimera_sm.recipe.schema import Recipe
from chimera_sm.sdk import check
from chimera_sm.targets.sagemaker.request import build_request
from chimera_train.config import decode, encode
from chimera_train.config.hf_architectures import BY_NAME, architecture_of
from chimera_train.config.hf_config import hf_config
from chimera_train.config.hf_weights import pieces, tensor_shapes

S3 = "model.weights_uri=s3://bucket/llama"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The config.json of a small Llama 3.1, without weights."""
    config = hf_config(compose(["recipe=8b"]).model) | {"hidden_size": 256, "num_hidden_layers": 2, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def composed(recipe: str, folder: Path, *overrides: str) -> Recipe:
    return compose([f"recipe={recipe}", "model=hf", f"model.path={folder}", *overrides])


def test_the_config_fills_the_model_and_overrides_win(folder: Path) -> None:
    recipe = composed("8b", folder, S3, "model.num_layers=4", "model.rope_scaling.factor=16")
    model = recipe.model
    assert (model.hidden_size, model.num_layers, model.intermediate_size) == (256, 4, 14336)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.factor, model.rope_scaling.low_freq_factor) == (16.0, 1.0)
    assert model.name == folder.name
    assert explain_key(recipe, "model.hidden_size")["settings"] == [f"{folder}/config.json"]
    assert explain_key(recipe, "model.num_layers")["settings"][-1] == "override model.num_layers=4"
    assert decode(Recipe, encode(recipe)) == recipe


@pytest.mark.parametrize(
    ("recipe", "overrides", "weights"),
    [
        ("tiny", [], "{folder}"),
        ("tiny", ["train.initial_weights=null"], None),
        ("tiny", ["train.initial_weights=/elsewhere"], "/elsewhere"),
        ("8b", [S3], "model"),
        ("8b", ["model.weights_uri=/models/llama"], "model"),
        ("8b", [S3, "train.initial_weights=model/step-9"], "model/step-9"),
        ("8b", ["train.initial_weights=null"], None),
        ("8b", ["train.initial_weights=train/llama"], "train/llama"),
        ("8b", ["train.initial_weights=/opt/ml/input/data/train/llama"], "/opt/ml/input/data/train/llama"),
    ],
)
def test_the_run_starts_from_the_folder_unless_told_otherwise(
    folder: Path, recipe: str, overrides: list[str], weights: str | None
) -> None:
    expected = weights.replace("{folder}", str(folder)) if weights is not None else None
    assert composed(recipe, folder, *overrides).train.initial_weights == expected


def test_weights_of_a_shipped_model_need_no_folder_here() -> None:
    assert compose(["recipe=8b", S3]).train.initial_weights == "model"


@pytest.mark.parametrize(
    ("recipe", "overrides", "key", "says"),
    [
        ("8b", [], "model.weights_uri", "is a folder of this machine, which the job cannot read"),
        ("8b", [S3, "train.initial_weights=train/llama"], "model.weights_uri", "would be ignored"),
        ("8b", ["train.initial_weights=model"], "model.weights_uri", "is required by train.initial_weights=model"),
        ("8b", ["train.initial_weights=other/x"], "train.initial_weights", "is in no input channel"),
        ("8b", ["model.weights_uri=bucket/llama"], "model.weights_uri", "is no S3 URI and no absolute path"),
        ("tiny", [S3], "model.weights_uri", "would be ignored by target=local"),
        ("tiny", ["train.initial_weights=model"], "train.initial_weights", "give an absolute path"),
        ("tiny", ["train.initial_weights=../x"], "train.initial_weights", "is no folder"),
    ],
)
def test_weights_that_the_target_cannot_have_are_refused(
    folder: Path, recipe: str, overrides: list[str], key: str, says: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        composed(recipe, folder, *overrides)
    assert any(p.key == key and says in f"{p.message} {p.fix}" for p in caught.value.problems), caught.value


def test_an_error_names_the_folder_the_key_and_the_override(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(RecipeError) as caught:
        composed("tiny", folder)
    text = str(caught.value)
    assert f"model.path: {folder}/config.json: hidden_act: 'gelu' is not what this decoder computes" in text
    assert f"override model.path={folder}" in text
    with pytest.raises(RecipeError, match=r"model\.path: must be set"):
        compose(["recipe=tiny", "model=hf"])


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("s3://bucket/llama", {"S3Uri": "s3://bucket/llama/"}),
        ("/models/llama", {"DirectoryPath": "/placehld/models/llama", "FileSystemAccessMode": "ro"}),
    ],
)
def test_the_job_gets_the_weights_as_a_channel(folder: Path, uri: str, source: dict[str, str]) -> None:
    made = plan(composed("8b", folder, f"model.weights_uri={uri}"))
    request, _ = build_request(made, "run-20260101-000000-abcdef", "0" * 64)
    (channel,) = (channel for channel in request["InputDataConfig"] if channel["ChannelName"] == "model")
    (found,) = channel["DataSource"].values()
    assert source.items() <= found.items()
    assert ("VpcConfig" in request) == uri.startswith("/")
    assert made.recipe.train_recipe.train.initial_weights == "model"


def test_a_local_folder_without_its_weights_is_found_before_the_start(folder: Path) -> None:
    findings = [f for f in check(plan(composed("tiny", folder))) if f.where == "train.initial_weights"]
    (finding,) = findings
    assert f"{folder}: holds neither model.safetensors nor" in finding.message
    assert finding.severity == "error"


ONE_OF_EACH = {architecture_of(MODELS[name]).name: name for name in MODELS}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("export", ["true", "false"])
def test_a_folder_of_every_architecture_passes_the_checks(tmp_path: Path, name: str, export: str) -> None:
    config = replace(MODELS[ONE_OF_EACH[name]], vocab_size=384)
    shapes = {
        piece.tensor: (piece.rows, *shape[1:])
        for ours, shape in tensor_shapes(config).items()
        for piece in pieces(ours, shape[0], config)
    }
    save_file({tensor: torch.zeros(shape) for tensor, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config)))
    recipe = composed("tiny", tmp_path, "train.sequence_length=64", f"checkpoint.export_at_end={export}")
    assert [f"{f.where}: {f.message}" for f in check(plan(recipe)) if f.severity == "error"] == []
    # What was decoded has fields beside the model's own, which say nothing of what is computed.
    assert architecture_of(recipe.model).name == name


def test_an_override_that_no_architecture_has_is_a_finding_and_no_crash(tmp_path: Path) -> None:
    config = replace(MODELS["qwen3 moe"], vocab_size=384)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config)))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    recipe = composed("tiny", tmp_path, "train.sequence_length=64", "model.attention_bias=true")
    (finding,) = [f for f in check(plan(recipe)) if f.severity == "error"]
    assert finding.where == "train.initial_weights"
    assert "no architecture of Hugging Face computes this model" in finding.message
    assert "model.path" not in finding.message
