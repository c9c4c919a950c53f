"""Another recipe for a run that exists."""

import json

import pytest

import chimera_sm as ch
from chimera_sm.errors import RecipeError, UsageError
from chimera_sm.recipe.amend import amend
from chimera_sm.runs.record import RunRecord
from chimera_train.config import encode


@pytest.fixture(scope="module")
def recorded():
    return json.loads(json.dumps(encode(ch.compose(["recipe=tiny"]))))


def test_values_change_and_all_else_stays(recorded):
    amended = amend(recorded, ["train.num_steps=9", "parallel.data_parallel=2", "target.environment.A=1"])
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
