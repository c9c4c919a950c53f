"""The metric file of a host: rows survive a torn line before them, and training survives a disk that is full."""

import json
import resource

from chimera_train.reporter import MetricFile


def rows(path):
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line)["step"])
        except ValueError:
            found.append(None)
    return found


def test_a_torn_line_does_not_swallow_the_next_attempts_first_row(tmp_path):
    path = tmp_path / "metrics" / "host-0.jsonl"
    MetricFile(path).append({"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    again = MetricFile(path)
    again.append({"step": 2})
    again.append({"step": 3})
    assert rows(path) == [1, None, 2, 3]


def test_a_full_disk_is_told_once_and_rows_go_on_when_there_is_room(tmp_path, capsys):
    path = tmp_path / "host-0.jsonl"
    file = MetricFile(path)
    file.append({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))  # in the middle of the next line
    try:
        file.append({"step": 2})
        file.append({"step": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.append({"step": 4})
    assert rows(path) == [1, None, 4]
    said = capsys.readouterr().err
    assert said == f"warning: {path} cannot be written (File too large): training goes on, rows are lost\n"


def test_a_folder_that_cannot_be_made_is_no_end_of_training(tmp_path, capsys):
    (tmp_path / "metrics").write_text("a file")
    MetricFile(tmp_path / "metrics" / "host-0.jsonl").append({"step": 1})
    assert "training goes on" in capsys.readouterr().err
