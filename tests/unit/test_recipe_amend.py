"""Another recipe for a run that exists."""

import dataclasses
import json

import pytest

import chimera_sm as ch
from chimera_sm.errors import RecipeError, UsageError
from chimera_sm.recipe.amend import amend
from chimera_sm.recipe.lasting import CHANGEABLE, LASTING
from chimera_sm.recipe.schema import Recipe
from chimera_sm.runs.record import RunRecord
from chimera_train.config import encode
from chimera_train.config.decode import fields_of


@pytest.fixture(scope="module")
def recorded():
    return json.loads(json.dumps(encode(ch.compose(["recipe=tiny"]))))


def test_values_change_and_all_else_stays(recorded):
    amended = amend(recorded, ["train.num_steps=9", "parallel.data_parallel=2", "target.environment.A=1"]).recipe
    assert (amended.train.num_steps, amended.parallel.data_parallel) == (9, 2)
    assert amended.target.environment["A"] == "1", "text stays text"
    expected = ch.compose(["recipe=tiny", "train.num_steps=9", "parallel.data_parallel=2", "target.environment.A=1"])
    assert encode(amended) == encode(expected)


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("parallel=fsdp", UsageError, "picks a file"),
        ("~train.num_steps", UsageError, "removes a key"),
        ("train.num_step=9", RecipeError, "did you mean train.num_steps"),
        ("train.num_steps=soon", RecipeError, "set by: override train.num_steps=soon"),
        ("train.num_steps.more=1", UsageError, "no section"),
        ("optim.warmup_steps=-1", RecipeError, "is negative"),
    ],
)
def test_a_bad_override_is_refused(recorded, override, error, said):
    before = json.dumps(recorded)
    with pytest.raises(error) as caught:
        amend(recorded, [override])
    assert said in f"{caught.value} {getattr(caught.value, 'fix', '')}"
    assert json.dumps(recorded) == before


def test_the_newest_amendment_counts_and_a_torn_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path))
    record = RunRecord.create("run-1", {"target": "local", "plan": 1}, {"a.json": b"1"})
    record.amend({"plan": 2}, {"a.json": b"2"})
    assert (record.lock["plan"], record.lock["target"]) == (2, "local")
    assert (record.artifacts / "a.json").read_bytes() == b"2"
    torn = record.path / "resumes" / "2" / "artifacts"
    torn.mkdir(parents=True)
    (torn / "a.json").write_bytes(b"3")
    assert (record.artifacts / "a.json").read_bytes() == b"2"
    record.amend({"plan": 4}, {"a.json": b"4"})
    assert record.lock["plan"] == 4
    assert json.loads((record.path / "launch.lock").read_text())["plan"] == 1, "what was launched stays on record"
    assert RunRecord.list_ids() == ["run-1"]
    record.withdraw(record.current)
    assert record.lock["plan"] == 2, "the newest that was not withdrawn"
    record.amend({"plan": 5}, {})
    assert record.lock["plan"] == 5
    record.withdraw(record.current)
    record.withdraw(record.current)
    assert (record.lock["plan"], record.current) == (1, record.path), "at last the launch"


def keys() -> list[str]:
    """Every `section.key` of a recipe, and its keys outside of sections."""
    found = []
    for name, kind in fields_of(Recipe).items():
        found += [f"{name}.{inner}" for inner in fields_of(kind)] if dataclasses.is_dataclass(kind) else [name]
    return found


def test_every_key_lasts_or_may_change():
    known = keys()
    for key in known:
        lasts = key in LASTING or key.partition(".")[0] in LASTING
        assert lasts != (key in CHANGEABLE), f"{key} belongs into one of LASTING and CHANGEABLE"
    sections = {key.partition(".")[0] for key in known}
    assert {*LASTING, *CHANGEABLE} <= {*known, *sections}, "keys that are no more"


def test_a_place_in_the_data_lasts():
    from chimera_train.config.lasting import DATA_PLACE

    assert set(DATA_PLACE.values()) <= set(LASTING)


def another(value):
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "other"


@pytest.mark.parametrize("key", [k for k in keys() if k in LASTING])
def test_what_lasts_is_refused(recorded, key):
    """With the key, both values, the reason and what to do, whatever else would be wrong with the other value."""
    section, _, name = key.rpartition(".")
    old = recorded[section][name] if section else recorded[name]
    new = OTHERS.get(key, another(old))
    with pytest.raises(RecipeError) as caught:
        amend(recorded, [f"{key}={json.dumps(new) if isinstance(new, bool) else new}"])
    (problem,) = [p for p in caught.value.problems if p.key == key]
    assert LASTING[key] in problem.message
    assert f"set by: override {key}=" in str(caught.value)
    assert "or launch a new run" in problem.fix


OTHERS = {
    "train.sequence_length": 64,
    "optim.name": "lion",
    "optim.state_dtype": "bfloat16",
    "checkpoint.storage": "shared",
    "data.location": "local",
    "data.input_mode": "File",
    "data.vocab_size": 512,
    "target.name": "sagemaker",
    "env.account_id": "'012345678901'",
    "train.initial_weights": "/models/m",
    "checkpoint.s3_uri": "s3://bucket/prefix",
}


def test_a_section_that_lasts_is_refused_by_its_keys(recorded):
    for override in ("model.num_layers=3", "model.rope_theta=1e5", "code.max_size_mb=9"):
        with pytest.raises(RecipeError) as caught:
            amend(recorded, [override])
        (problem,) = caught.value.problems
        assert problem.key == override.partition("=")[0]
    assert amend(recorded, [f"train.seed={recorded['train']['seed']}"]).notes == (), "it is no other value"


@pytest.mark.parametrize(
    ("launched", "overrides", "key"),
    [
        (["parallel.context_parallel=2", "parallel.context_backend=ring"], ["parallel.context_parallel=1"],
         "parallel.context_backend"),
        (["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=gpipe"], ["parallel.pipeline_parallel=1"],
         "parallel.pipeline_schedule"),
        (["parallel.pipeline_parallel=2", "parallel.stages_per_rank=1"], ["parallel.pipeline_parallel=1"],
         "parallel.stages_per_rank"),
        (["instances.workers_per_host=2", "parallel.tensor_parallel=2", "parallel.async_tensor_parallel=true",
          "train.compile=true"], ["parallel.tensor_parallel=1"], "parallel.async_tensor_parallel"),
        (["train.activation_checkpointing=full", "train.activation_checkpointing_every=2"],
         ["train.activation_checkpointing=none"], "train.activation_checkpointing_every"),
        (["train.compile=true", "train.activation_memory_budget=0.5"], ["train.compile=false"],
         "train.activation_memory_budget"),
        (["precision=fp8", "train.compile=true", "precision.float8_filter=[feed_forward]"], ["precision.float8=none"],
         "precision.float8_filter"),
        (["optim.schedule=wsd", "optim.decay_steps=5"], ["optim.schedule=cosine"], "optim.decay_steps"),
        (["evaluation.sources.val=val", "evaluation.interval_steps=5"], ["evaluation.sources={}"],
         "evaluation.interval_steps"),
        (["evaluation.sources.val=val", "evaluation.max_samples=5"], ["evaluation.sources={}"],
         "evaluation.max_samples"),
        (["profiling.start_step=100"], ["train.num_steps=50"], "profiling.start_step"),
        (["capacity.kind=spot", "capacity.max_wait_hours=400"], ["capacity.kind=on_demand"], "capacity.max_wait_hours"),
        (["capacity.kind=reserved", "capacity.training_plan_arn=arn"], ["capacity.kind=on_demand"],
         "capacity.training_plan_arn"),
    ],
)  # fmt: skip
def test_a_recorded_value_that_an_override_leaves_without_effect_is_dropped(launched, overrides, key):
    recorded = encode(ch.compose(["recipe=tiny", *launched]))
    amended = amend(recorded, overrides)
    section, _, name = key.partition(".")
    default = encode(next(f for f in dataclasses.fields(getattr(amended.recipe, section)) if f.name == name).default)
    assert encode(getattr(getattr(amended.recipe, section), name)) == (default or type(default)())
    assert any(note.startswith(f"{key} is back at its default") for note in amended.notes)
    typed = next(text for text in launched if text.startswith(f"{key}="))
    with pytest.raises(RecipeError, match=key):  # typed now, it is the user's mistake
        amend(recorded, [*overrides, typed])


def test_a_run_is_not_shortened_below_what_it_has_done(recorded):
    for num_steps in (10, 15):
        with pytest.raises(RecipeError) as caught:
            amend(recorded, [f"train.num_steps={num_steps}"], saved_step=15)
        (problem,) = caught.value.problems
        assert problem.key == "train.num_steps"
        assert f"{num_steps}, and the run has saved step 15" in problem.message
        assert problem.fix == "set train.num_steps=16 or more"
    amended = amend(recorded, ["train.num_steps=16"], saved_step=15)
    assert "optim.schedule=cosine now spans train.num_steps=16 steps instead of 800" in amended.notes[0]
    assert not amend(recorded, ["train.num_steps=16", "optim.schedule=constant"], saved_step=15).notes
    assert amend(recorded, ["train.log_interval=2"], saved_step=800), "steps that were not asked for now"
    with pytest.raises(RecipeError, match=r"profiling.start_step: 5 never comes"):
        amend(recorded, ["profiling.start_step=5"], saved_step=15)
