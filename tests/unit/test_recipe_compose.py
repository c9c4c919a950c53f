"""Composition: values, precedence, team folders, and one clear error for every way to get a recipe wrong."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from chimera_sm.errors import ChimeraError, RecipeError, UsageError
from chimera_sm.paths import recipes_dir
from chimera_sm.recipe.compose import compose
from chimera_sm.recipe.listing import explain_key, list_recipes, short_count
from chimera_sm.recipe.schema import Recipe
from chimera_train.config import ConfigError, decode, encode, sha256_of
from chimera_train.config.hf_config import hf_config


def model_folder(folder: Path) -> Path:
    """A folder with the config.json of the shipped Llama 3.1 8B."""
    (folder / "config.json").write_text(json.dumps(hf_config(compose(["recipe=8b"]).model)))
    return folder


SHIPPED = sorted(p.stem for p in (recipes_dir() / "recipe").glob("*.yaml"))


def test_the_shipped_recipes_are_those_that_are_promised():
    assert SHIPPED == ["1b", "405b", "70b", "8b", "8x7b", "tiny"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_composes_and_survives_a_round_trip(name):
    recipe = compose([f"recipe={name}"])
    assert recipe.name == name
    again = decode(Recipe, encode(recipe))
    assert again == recipe
    assert again.hash == recipe.hash == sha256_of(recipe)


@pytest.mark.parametrize(
    ("group", "option"),
    [(p.parent.name, p.stem) for p in sorted(recipes_dir().glob("*/*.yaml")) if p.parent.name != "recipe"],
)
def test_every_option_of_every_group_decodes(group, option, tmp_path):
    needs = {
        ("data", "local"): ["data.uri=/tmp"],
        ("model", "hf"): [f"model.path={model_folder(tmp_path)}", "model.weights_uri=s3://bucket/llama/"],
        ("capacity", "reserved"): [
            "capacity.training_plan_arn=arn:aws:sagemaker:us-east-1:123456789012:training-plan/x"
        ],
    }
    base = ["recipe=8b"] if option not in ("local", "stdlib") or group == "checkpoint" else ["recipe=tiny"]
    extra = {
        ("parallel", "fsdp_tp_pp"): ["parallel.tensor_parallel=8"],
        ("model", "llama2_7b"): ["train.sequence_length=4096"],
        ("model", "llama3_tiny"): ["train.sequence_length=512"],
        ("model", "mixtral_tiny"): ["train.sequence_length=512"],
        ("instances", "g5"): [],
    }
    compose([*base, f"{group}={option}", *needs.get((group, option), []), *extra.get((group, option), [])])


def test_the_reference_case():
    recipe = compose(["recipe=70b"])
    assert (recipe.instances.type, recipe.instances.count) == ("ml.p4d.24xlarge", 32)
    assert recipe.parallel.tensor_parallel > 1
    assert recipe.parallel.pipeline_parallel > 1
    assert recipe.capacity.kind == "spot"
    assert recipe.capacity.max_wait_hours is not None
    assert recipe.data.location == "fsx"
    assert recipe.checkpoint.storage == "shared"


def test_precedence_of_overrides():
    assert compose(["recipe=70b"]).train.num_steps == 23842
    assert compose(["recipe=70b", "train.num_steps=7"]).train.num_steps == 7
    assert compose(["train.num_steps=7", "recipe=70b"]).train.num_steps == 7, "a value beats a file wherever it stands"
    assert compose(["recipe=70b", "train.num_steps=7", "train.num_steps=8"]).train.num_steps == 8
    assert compose(["recipe=70b", "instances=p5"]).instances.type == "ml.p5.48xlarge", "a choice beats the recipe's"
    assert compose(["recipe=70b", "instances=p5"]).instances.count == 32, "what the recipe sets itself stays"


def test_keys_that_only_the_schema_knows_can_be_set():
    assert compose(["optim.eps=1e-6"]).optim.eps == 1e-6
    assert compose(["target.environment.NCCL_DEBUG=INFO"]).target.environment == {"NCCL_DEBUG": "INFO"}
    fallback = compose(["recipe=8b", "instances.fallbacks=[{type: ml.p5en.48xlarge, count: 4}]"]).instances.fallbacks
    assert [(f.type, f.count) for f in fallback] == [("ml.p5en.48xlarge", 4)]


PLANTED = [
    (["recipe=70bb"], "recipe", "recipe=70b"),
    (["recpie=70b"], "recpie", "recipe"),
    (["model=llama3_70"], "model", "llama3_70b"),
    (["train.num_stepz=5"], "train.num_stepz", "train.num_steps"),
    (["parallel.tensor_paralel=2"], "parallel.tensor_paralel", "parallel.tensor_parallel"),
    (["train.num_steps=many"], "train.num_steps", "whole number"),
    (["train.num_steps=1.5"], "train.num_steps", "whole number"),
    (["train.compile=perhaps"], "train.compile", "true or false"),
    (["train.num_steps=null"], "train.num_steps", "null"),
    (["train.global_batch_size=0"], "train.global_batch_size", "not positive"),
    (["train.activation_checkpointing=ful"], "train.activation_checkpointing", "full"),
    (["parallel.tensor_parallel=7"], "parallel.tensor_parallel", "[1, 2]"),
    (["recipe=70b", "parallel.stages_per_rank=2"], "parallel.stages_per_rank", "pipeline_schedule=1f1b has 1 a rank"),
    (["model.num_kv_heads=4"], "model.num_kv_heads", "divide model.num_heads=6"),
    (["train.sequence_length=4096"], "train.sequence_length", "max_position_embeddings"),
    (["optim.beta2=1.5"], "optim.beta2", "[0, 1)"),
    (["optim.learning_rate=nan"], "optim.learning_rate", "finite"),
    (["train.collective_timeout_s=inf"], "train.collective_timeout_s", "finite"),
    (["train={num_steps:-5}"], "train.num_steps", "override train={num_steps:-5}"),
    (["model.head_dim=0"], "model.head_dim", "not positive"),
    (["model.rope_theta=0"], "model.rope_theta", "not positive"),
    (["recipe=8b", "model.rope_scaling.factor=0"], "model.rope_scaling.factor", "below 1"),
    (["env.kms_key_id="], "env.kms_key_id", "null leaves it out"),
    (["code.path="], "code.path", "empty"),
    (["data.size_gb=-1"], "data.size_gb", "negative"),
    (["description=${nowhere}"], "description", "nowhere"),
    (["description=${oc.env:CHIMERA_SURELY_UNSET}"], "description", "CHIMERA_SURELY_UNSET"),
    (["recipe=8b", "~model"], "model", "required"),
    (["optim.decay_steps=5"], "optim.decay_steps", "would be ignored"),
    (["optim.momentum=0.9"], "optim.momentum", "optim.name=adamw"),
    (["optim=muon", "optim.momentum=1.0"], "optim.momentum", "[0, 1)"),
    (["optim=lion", "optim.eps=1e-6"], "optim.eps", "optim.name=lion"),
    (["optim.name=sgd"], "optim.name", "adamw, lion, muon"),
    (["recipe=70b", "optim.state_dtype=int8", "model.intermediate_size=14400"], "optim.state_dtype", "bfloat16"),
    (
        ["precision=fp32", "precision.master_weights=false"],
        "precision.master_weights",
        "precision.param_dtype=bfloat16",
    ),
    (["precision=fp32", "precision.float8=rowwise"], "precision.float8", "bfloat16"),
    (["precision.float8_filter=[attention]"], "precision.float8_filter", "would be ignored"),
    (["precision.float8_all_gather=true"], "precision.float8_all_gather", "precision.float8=none"),
    (["precision=fp8_rowwise", "precision.float8_all_gather=true"], "precision.float8_all_gather", "precision=fp8"),
    (["precision=mxfp8", "precision.float8_all_gather=true"], "precision.float8_all_gather", "precision.float8=mxfp8"),
    (
        ["precision=fp8", "precision.float8_all_gather=true", "parallel.fully_sharded=1", "parallel.data_parallel=2"],
        "precision.float8_all_gather",
        "would be ignored",
    ),
    (["precision.float8=rowwise", "train.micro_batch_size=1", "train.sequence_length=40"], "precision.float8", "16"),
    (["train.z_loss=-1"], "train.z_loss", "negative"),
    (["train.activation_checkpointing_every=2"], "train.activation_checkpointing_every", "would be ignored"),
    (["train.activation_offload=true", "train.activation_checkpointing=selective"], "train.activation_offload", "full"),
    (["train.activation_memory_budget=0.5"], "train.activation_memory_budget", "train.compile=true"),
    (["train.activation_memory_budget=2", "train.compile=true"], "train.activation_memory_budget", "(0, 1]"),
    (
        ["train.activation_memory_budget=0.5", "train.compile=true", "train.activation_checkpointing=full"],
        "train.activation_memory_budget",
        "train.activation_checkpointing=none",
    ),
    (["checkpoint.keep_last=1"], "checkpoint.keep_last", "2 or more"),
    (["checkpoint.path=/tmp"], "checkpoint.path", "leaves"),
    (["recipe=70b", "capacity.max_wait_hours=1"], "capacity.max_wait_hours", "max_run_hours"),
    (["recipe=70b", "capacity.max_wait_hours=null"], "capacity.max_wait_hours", "required"),
    (["recipe=8b", "capacity.max_wait_hours=900"], "capacity.max_wait_hours", "only for capacity.kind=spot"),
    (["recipe=8b", "capacity.max_run_hours=1000"], "capacity.max_run_hours", "672"),
    (["recipe=70b", "capacity.keep_alive_minutes=10"], "capacity.keep_alive_minutes", "spot"),
    (["recipe=8b", "instances.type=p5.48xlarge"], "instances.type", "ml.p5.48xlarge"),
    (["recipe=8b", "instances.count=0"], "instances.count", "not positive"),
    (["target=sagemaker"], "instances.type", "local"),
    (["recipe=8b", "data=stdlib"], "data.location", "this machine only"),
    (["recipe=8b", "data.uri=bucket/prefix"], "data.uri", "s3://"),
    (["data=local"], "data.uri", "must be set"),
    (["env.account_id='12'"], "env.account_id", "twelve digits"),
    (["env.role_arn=me"], "env.role_arn", "IAM role"),
    (["env.bucket=s3://ours"], "env.bucket", "without s3://"),
    (["env.subnets=[subnet-0123456789abcdef0,bad]"], "env.subnets[1]", "subnet-"),
    (["env.security_groups=[subnet-0123456789abcdef0]"], "env.security_groups[0]", "sg-"),
    (["recipe=8b", "target.grace_s=60"], "target.grace_s", "120"),
    (["name=under_score"], "name", "hyphens"),
    (["data.vocab_size=50000"], "model.vocab_size", "smaller"),
    (["recipe=tiny", "model.vocab_size=100"], "model.vocab_size", "use 257 or more"),
    (["recipe=tiny", "data.vocab_size=100"], "data.vocab_size", "use 257 or more"),
    (["recipe=tiny", "model.vocab_size=1e9"], "model.vocab_size", "use 16777216 or less"),
    (["train.num_steps=99999999999999999999"], "train.num_steps", "2^53"),
    (["profiling.ranks=[0,9007199254740993]"], "profiling.ranks[1]", "2^53"),
    (["instances.volume_gb=1e300"], "instances.volume_gb", "2^53"),
    (["model.num_layers=1e15"], "model.num_layers", "at most 2000"),
    (["target.environment.CHIMERA_FAULT=kill:stop:3"], "target.environment.CHIMERA_FAULT", "point step"),
]


@pytest.mark.parametrize(("overrides", "key", "says"), PLANTED, ids=[" ".join(p[0]) for p in PLANTED])
def test_planted_errors(overrides, key, says):
    with pytest.raises(RecipeError) as caught:
        compose(overrides)
    assert key in [p.key for p in caught.value.problems]
    assert says in str(caught.value)


@pytest.mark.parametrize(("overrides", "key", "says"), PLANTED, ids=[" ".join(p[0]) for p in PLANTED])
def test_every_error_says_what_set_the_key(overrides, key, says):
    with pytest.raises(RecipeError) as caught:
        compose(overrides)
    origin = caught.value.origins[key]
    assert origin.startswith("override ") or ".yaml:" in origin


@pytest.mark.parametrize("text", ["70b", "train.num_steps=1,2", "train.num_steps=range(1,3)", "a=[1", "=3"])
def test_what_is_no_override_at_all(text):
    with pytest.raises(ChimeraError):
        compose([text])


def test_no_key_and_an_unknown_key():
    with pytest.raises(UsageError, match="'=3' names no key"):
        compose(["=3"])
    with pytest.raises(RecipeError) as caught:
        compose(["foo=1"])
    known = caught.value.problems[0].fix.removeprefix("known: ").split(", ")
    assert len(known) == len(set(known))


def test_all_errors_of_a_recipe_are_shown_at_once():
    with pytest.raises(RecipeError) as caught:
        compose(["train.num_stepz=1", "optim.lr=2", "model.hidden_sizes=3"])
    assert {p.key for p in caught.value.problems} == {"train.num_stepz", "optim.lr", "model.hidden_sizes"}


@pytest.fixture
def team(tmp_path: Path) -> Path:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "ours.yaml").write_text("name: ours\nregion: us-west-2\naccount_id: '123456789012'\n")
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - tiny\n  - _self_\nname: mine\ntrain:\n  num_steps: 12\n"
    )
    return tmp_path


def test_a_team_folder_adds_files_and_comes_first(team, monkeypatch):
    recipe = compose(["recipe=mine", "env=ours"], recipes=[team])
    assert (recipe.name, recipe.train.num_steps, recipe.env.region) == ("mine", 12, "us-west-2")
    (team / "model").mkdir()
    tiny = (recipes_dir() / "model" / "llama3_tiny.yaml").read_text()
    (team / "model" / "llama3_tiny.yaml").write_text(tiny.replace("num_layers: 4", "num_layers: 5"))
    assert compose(recipes=[team]).model.num_layers == 5
    assert compose().model.num_layers == 4
    monkeypatch.setenv("CHIMERA_RECIPES", str(team))
    assert compose().model.num_layers == 5
    assert "mine" in [row["recipe"] for row in list_recipes()]


def test_a_broken_team_file_is_named_and_does_not_hide_the_others(team):
    (team / "recipe" / "bad.yaml").write_text("# @package _global_\nname: bad\ntrain:\n  num_stepz: 3\n")
    with pytest.raises(RecipeError) as caught:
        compose(["recipe=bad"], recipes=[team])
    assert f"{team / 'recipe' / 'bad.yaml'}:4" in str(caught.value)
    rows = {row["recipe"]: row for row in list_recipes([team])}
    assert "train." in rows["bad"]["error"]
    assert "error" not in rows["mine"]


def test_a_team_file_without_its_package_line_is_explained(team):
    (team / "recipe" / "bare.yaml").write_text("name: bare\n")
    with pytest.raises(RecipeError, match="@package _global_"):
        compose(["recipe=bare"], recipes=[team])


def test_a_team_file_that_is_no_yaml(team):
    (team / "env" / "torn.yaml").write_text("name: [\n")
    with pytest.raises(UsageError, match=r"torn\.yaml"):
        compose(["env=torn"], recipes=[team])


def test_a_folder_that_is_not_there_or_not_of_recipes(team):
    with pytest.raises(UsageError, match="no folder"):
        compose(recipes=["/nowhere"])
    with pytest.raises(UsageError, match="holds none of") as caught:
        compose(recipes=[team / "recipe"])
    assert str(team) in caught.value.fix


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("loop", b"# @package _global_\ndefaults: [loop]\n"),
        ("five", b"# @package _global_\ndefaults: 5\n"),
        ("latin", b"# @package _global_\nname: caf\xe9\n"),
        ("scalar", b"just a word\n"),
        ("unset", b"# @package _global_\ndefaults: [tiny]\ndescription: ${oc.env:CHIMERA_SURELY_UNSET}\n"),
        ("missing", b"# @package _global_\ndefaults: [nowhere]\n"),
    ],
)
def test_one_broken_file_is_an_error_of_its_own(team, name, content):
    (team / "recipe" / f"{name}.yaml").write_bytes(content)
    with pytest.raises(ChimeraError):
        compose([f"recipe={name}"], recipes=[team])
    rows = {row["recipe"]: row for row in list_recipes([team])}
    assert "error" in rows[name]
    assert "error" not in rows["tiny"]


def test_text_that_looks_like_a_number_stays_as_it_was_typed():
    recipe = compose(
        ["env.account_id=012345678901", "target.environment.HF_HUB_OFFLINE=1", "target.framework_version=2.10"]
    )
    assert recipe.env.account_id == "012345678901"
    assert recipe.target.environment == {"HF_HUB_OFFLINE": "1"}
    assert recipe.target.framework_version == "2.10"


def test_bytes_that_are_no_text():
    with pytest.raises(ChimeraError):
        compose(["description=\udcff"])
    with pytest.raises(ConfigError, match="UTF-8"):
        decode(Recipe, {"name": "\udcff"})


def test_a_recipe_travels_to_another_process():
    recipe = compose(["recipe=70b", "train.seed=3"])
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe
    assert again.origins["train.seed"] == "override train.seed=3"


def test_explain_names_the_line():
    recipe = compose(["recipe=70b", "train.seed=3"])
    found = explain_key(recipe, "parallel.tensor_parallel")
    assert found["value"] == 8
    for setting, text in zip(found["settings"], ("tensor_parallel: 8", "tensor_parallel: 8"), strict=True):
        file, _, line = setting.rpartition(":")
        assert Path(file).read_text().splitlines()[int(line) - 1].strip() == text
    assert explain_key(recipe, "train.seed")["settings"] == ["override train.seed=3"]
    assert explain_key(recipe, "optim.eps")["settings"] == ["the schema's default"]
    with pytest.raises(RecipeError, match=r"train\.seed"):
        explain_key(recipe, "train.sed")


def test_a_callers_own_hydra_stays_as_it_was(tmp_path):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    (tmp_path / "theirs.yaml").write_text("x: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose(["recipe=70b"]).name == "70b"
        assert hydra_compose("theirs").x == 1


@pytest.mark.parametrize(("number", "text"), [(1_235_814_400, "1.24B"), (999, "999"), (46_702_792_704, "46.7B")])
def test_short_counts(number, text):
    assert short_count(number) == text
