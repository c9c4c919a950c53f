"""Exit codes and the failure file."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_train.supervisor.devices import check_accelerators
from chimera_train.supervisor.errors import HostError
from chimera_train.supervisor.failure import (
    WorkerEnd,
    describe,
    first_failure,
    read_error_file,
    shorten,
    write_failure,
)
from chimera_train.supervisor.host import usable_grace
from chimera_train.supervisor.requirements import missing_requirements


@pytest.mark.parametrize(
    ("code", "asked", "exit_code"),
    [
        (0, False, 0),
        (143, True, 143),
        (143, False, 143),
        (1, False, 1),
        (1, True, 1),
        (2, False, 1),
        (75, False, 75),
        (-9, False, 75),
        (-11, False, 75),
        (-7, False, 75),
        (-15, False, 75),
        (-15, True, 143),
        (137, False, 75),
        (139, False, 75),
        (200, False, 1),
    ],
)
def test_exit_code_of_a_worker(code: int, asked: bool, exit_code: int) -> None:
    assert WorkerEnd(0, code, 0.0).host_exit(asked) == exit_code


def test_the_cause_is_not_the_worker_that_lost_its_peer() -> None:
    lost_peer, killed = WorkerEnd(0, 75, 1.0), WorkerEnd(1, -9, 2.0)
    assert first_failure([lost_peer, killed], False) is killed
    assert first_failure([WorkerEnd(3, 1, 5.0), WorkerEnd(1, 1, 4.0)], False).rank == 1
    assert first_failure([WorkerEnd(0, 0, 1.0), WorkerEnd(1, 143, 1.0)], True) is None


@given(st.text(max_size=3000), st.text(max_size=3000))
def test_the_failure_text_fits_and_cuts_no_line(head: str, detail: str) -> None:
    text = shorten(head, detail)
    assert len(text) <= 1024
    if len(head.strip()) <= 1024:
        assert text.startswith(head.strip())
        rest = text.removeprefix(head.strip()).removeprefix("\n").removeprefix("…\n")
        assert f"\n{detail.strip()}".endswith(f"\n{rest}") or not rest


def test_a_long_text_ends_with_whole_lines_and_words() -> None:
    frames = "".join(f'  File "/opt/ml/code/file.py", line {n}, in run\n' for n in range(99))
    head, more, *lines = shorten("ValueError: no", frames).split("\n")
    assert (head, more) == ("ValueError: no", "…")
    assert lines == frames.strip().split("\n")[-len(lines) :]
    assert len(lines) > 10
    assert shorten("word " * 400, frames).endswith("word word …")
    assert shorten("m" * 3000, frames) == "m" * 1022 + " …"


def test_description_of_an_error_and_of_a_signal(tmp_path: Path) -> None:
    report = tmp_path / "error.json"
    report.write_text(
        json.dumps(
            {"rank": 3, "time": 12.5, "exit_code": 1, "message": "ValueError: loss is nan", "traceback": "T\n" * 5000}
        )
    )
    end = read_error_file(report, WorkerEnd(3, 1, 99.0))
    assert end.time == 12.5
    text = describe(end, "algo-2", ["ignored\n"])
    assert text.startswith("rank 3 on algo-2: ValueError: loss is nan (exit code 1)\n…\nT\nT\n")
    assert describe(WorkerEnd(3, 1, 0.0, "its own words", reported=True), "a", ["noise"]).endswith("(exit code 1)")
    killed = describe(WorkerEnd(1, -9, 0.0), "algo-1", ["last words\n"])
    assert killed.startswith("rank 1 on algo-1 was killed by SIGKILL (out of memory?")
    assert killed.endswith("last words")
    assert "SIGBUS" in describe(WorkerEnd(1, -signal.SIGBUS, 0.0), "a", [])
    assert "no report" in describe(WorkerEnd(1, 3, 0.0), "a", [])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rank": 0}', '{"time": "x", "message": "m"}'])
def test_a_torn_error_file_is_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "e").write_text(content)
    end = WorkerEnd(0, 1, 5.0)
    assert read_error_file(tmp_path / "e", end) == end
    assert read_error_file(tmp_path / "missing", end) == end


def test_the_first_failure_stays(tmp_path: Path) -> None:
    file = tmp_path / "output" / "failure"
    write_failure(file, "first " + "é" * 2000)
    write_failure(file, "second")
    assert file.read_text().startswith("first é")
    assert len(file.read_text()) == 1024
    assert [p.name for p in file.parent.iterdir()] == ["failure"]


def test_missing_requirements() -> None:
    text = "# what the image lacks\npytest>=8  # there\nchimera-no-such-thing==1.0 ; python_version > '3'\n\n"
    assert missing_requirements(text) == ["chimera-no-such-thing==1.0 ; python_version > '3'"]
    with pytest.raises(HostError, match="--index-url"):
        missing_requirements("--index-url https://example.org\n")


def test_accelerators() -> None:
    check_accelerators(8, 8, expected=True)
    check_accelerators(2, 8, expected=True)
    check_accelerators(2, 0, expected=False)
    with pytest.raises(HostError, match="planned for 8 workers on this host, one an accelerator, but only 4"):
        check_accelerators(8, 4, expected=False)
    with pytest.raises(HostError, match="only 0"):
        check_accelerators(8, 0, expected=True)


def test_grace_leaves_time_to_tell() -> None:
    assert usable_grace(120.0) == 115.0
    assert usable_grace(10.0) == 9.0
