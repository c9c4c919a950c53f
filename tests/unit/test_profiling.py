"""Which steps a rank profiles, and that requests cannot fill the disk."""

import gzip
import json

import pytest
import torch

from chimera_sm.errors import RecipeError
from chimera_sm.recipe.compose import compose
from chimera_train.config import ConfigError, ProfilingConfig
from chimera_train.distributed import Worker
from chimera_train.profiling import MAX_PROFILES, StepProfiler


def profiler(folder, *, rank=0, world_size=2, **config) -> StepProfiler:
    worker = Worker(rank, world_size, rank, world_size, torch.device("cpu"))
    return StepProfiler(ProfilingConfig(**config), worker, folder)


def steps(of: StepProfiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        of.before_step(step)
        torch.ones(2, 2) @ torch.ones(2, 2)
        of.after_step(step)


def traces(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def test_planned_and_requested_profiles_hold_their_steps(tmp_path):
    one = profiler(tmp_path, start_step=5, num_steps=2)
    steps(one, 1, 1)
    one.request(2)
    one.request(3)  # under way: that one shows it
    steps(one, 2, 9)
    assert traces(tmp_path) == ["step-2-rank-0.json.gz", "step-5-rank-0.json.gz"]
    for path in tmp_path.iterdir():
        names = [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        assert names.count("aten::mm") == 2


def test_ranks_that_are_not_named_write_nothing(tmp_path):
    other = profiler(tmp_path, rank=1, start_step=1)
    steps(other, 1, 5)
    assert other.finish() is None
    assert traces(tmp_path) == []


def test_a_run_that_ends_early_keeps_what_there_is(tmp_path):
    one = profiler(tmp_path, start_step=2, num_steps=20)
    steps(one, 1, 3)
    assert str(tmp_path / "step-2-rank-0.json.gz") in one.finish()
    assert traces(tmp_path) == ["step-2-rank-0.json.gz"]


def test_requests_without_end_write_so_many(tmp_path, capsys):
    one = profiler(tmp_path, num_steps=1)
    for step in range(1, MAX_PROFILES + 4):
        one.request(step)
        steps(one, step, step)
    assert len(traces(tmp_path)) == MAX_PROFILES
    assert capsys.readouterr().out.count("no profile") == 3


def test_a_folder_that_cannot_be_made_costs_the_profile_alone(tmp_path):
    (tmp_path / "file").write_text("")
    one = profiler(tmp_path / "file" / "profile", start_step=1, num_steps=1)
    one.before_step(1)
    assert one.after_step(1).startswith("warning: the profile ")


def test_a_rank_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"profiling.ranks: 7: no rank of a world of 2 \(use ranks from 0 to 1\)"):
        profiler(tmp_path, ranks=(0, 7))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("profiling.start_step=0", "profiling.start_step: 0 is not positive"),
        ("profiling.start_step=801", "profiling.start_step: 801 never comes: train.num_steps=800"),
        ("profiling.num_steps=21", r"profiling.num_steps: 21 is not in \[1, 20\]"),
        ("profiling.ranks=[]", "profiling.ranks"),
        ("profiling.ranks=[-1]", "profiling.ranks"),
    ],
)
def test_what_cannot_be_profiled_is_refused(override, message):
    with pytest.raises(RecipeError, match=message):
        compose(["recipe=tiny", override])
