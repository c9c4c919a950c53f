"""Progress lines, and what a run's files say."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from chimera_sm.errors import RunFailed
from chimera_sm.runs.progress import describe, format_duration, watch
from chimera_sm.runs.status import RunStatus
from chimera_sm.targets.local.observe import eta_s, read_logs, read_metrics, recent_metrics


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (42.4, "0:42"), (3723, "1:02:03"), (90061, "1d 01:01:01"), (59.7, "1:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_description() -> None:
    status = RunStatus(state="running", step=120, num_steps=300, loss=3.21044, tokens_per_s=5310.2, eta_s=62.0)
    assert describe(status) == "running, step 120/300, loss 3.2104, 5,310 tokens/s, 1:02 left"
    assert describe(RunStatus(state="failed", reason="out of memory")) == "failed (out of memory)"


def test_watch_ends_with_the_run_and_prints_each_change_of_state() -> None:
    states = iter(
        [
            RunStatus(state="provisioning"),
            RunStatus(state="running", step=1),
            RunStatus(state="running", step=2),
            RunStatus(state="restarting", reason="rank 1 was killed", step=2),
            RunStatus(state="completed", step=3),
        ]
    )
    out = io.StringIO()
    assert watch(lambda: next(states), poll_s=0, stream=out).state == "completed"
    assert out.getvalue().splitlines() == [
        "provisioning",
        "running, step 1",
        "restarting, step 2 (rank 1 was killed)",
        "completed, step 3",
    ]


def test_watch_until_and_a_run_that_only_a_resume_moves() -> None:
    running = RunStatus(state="running", step=7)
    assert watch(lambda: running, until=lambda s: s.step == 7, poll_s=0, stream=io.StringIO()) is running
    with pytest.raises(RunFailed, match="driver is gone"):
        watch(
            lambda: RunStatus(state="interrupted", reason="driver is gone", needs_resume=True),
            poll_s=0,
            stream=io.StringIO(),
        )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_in_a_terminal() -> None:
    out = Terminal()
    watch(lambda: RunStatus(state="completed", step=3, num_steps=3, loss=1.5, tokens_per_s=10.0), poll_s=0, stream=out)
    assert "3/3" in out.getvalue()
    assert "loss 1.5000" in out.getvalue()


def write_rows(file: Path, rows: list[tuple[int, float]]) -> None:
    file.write_text("".join(json.dumps({"step": s, "loss": x, "step_s": 2.0}) + "\n" for s, x in rows))


def test_metrics_after_a_resume(tmp_path: Path) -> None:
    """Steps 3 and 4 of the first attempt were lost with it; 5 has not been reached again yet."""
    file = tmp_path / "host-0.jsonl"
    write_rows(file, [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5), (3, 1 / 3), (4, 1 / 7)])
    with file.open("a") as stream:
        stream.write('{"step": 5, "lo')  # torn by a kill
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.1), (2, 0.2), (3, 1 / 3), (4, 1 / 7)]
    assert eta_s(recent_metrics(tmp_path), 10) == 12.0
    assert read_metrics(tmp_path / "none") == []
    assert eta_s([], 10) is None


def test_recent_metrics_read_the_tail_only(tmp_path: Path) -> None:
    write_rows(tmp_path / "host-0.jsonl", [(step, 1 / step) for step in range(1, 5001)])
    recent = recent_metrics(tmp_path)
    assert [row["step"] for row in recent] == list(range(4981, 5001))


def test_logs_follow_to_the_end(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\ntw")
    rounds = iter([False, True])

    def ended() -> bool:
        is_last = next(rounds)
        if is_last:
            with log.open("a") as stream:
                stream.write("o\nthree")
        return is_last

    lines = read_logs({"algo-1": log, "algo-2": tmp_path / "missing"}, follow=True, ended=ended)
    assert list(lines) == ["algo-1 | one", "algo-1 | two", "algo-1 | three"]
    assert list(read_logs({"algo-1": log}, follow=False, ended=lambda: False)) == ["one", "two", "three"]
