"""The command line: what it prints, and which exit code it leaves with."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from chimera_sm.cli.main import COMMANDS, run
from chimera_sm.cli.options import print_json
from chimera_sm.recipe.compose import compose
from chimera_train.config import encode


def test_help_lists_every_command(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    if name == "data":
        assert run(["data", "--help"]) == 0
    else:
        assert run([name, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys):
    assert run(["lunch"]) == 2
    assert "Did you mean launch?" in capsys.readouterr().err


def test_recipes_lists_them_by_size(capsys):
    assert run(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in rows] == ["tiny", "1b", "8b", "8x7b", "70b", "405b"]
    assert rows[4]["instance"] == "ml.p4d.24xlarge"
    assert run(["recipes"]) == 0
    table = capsys.readouterr().out
    assert "32 × ml.p4d.24xlarge" in table
    assert "70.6B" in table


def test_recipes_show_prints_what_composes_to_the_same(capsys):
    assert run(["recipes", "show", "70b", "train.seed=5"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown == encode(compose(["recipe=70b", "train.seed=5"]))


def test_recipes_explain(capsys):
    assert run(["recipes", "explain", "70b", "train.seed", "train.seed=5"]) == 0
    assert capsys.readouterr().out.splitlines() == ["override train.seed=5", "train.seed = 5"]
    assert run(["recipes", "explain", "70b", "instances.count", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["value"] == 32
    assert "recipe/70b.yaml:" in found["settings"][-1]


def test_a_wrong_recipe_exits_2_with_one_message(capsys):
    assert run(["plan", "recipe=70b", "train.num_stepz=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "error: train.num_stepz: no such key",
        "  set by: override train.num_stepz=3",
        "  fix: did you mean train.num_steps?",
    ]


def test_an_unknown_run_exits_2(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path))
    for command in ("status", "logs", "stop", "resume"):
        assert run([command, "nothing"]) == 2
        assert "no run 'nothing'" in capsys.readouterr().err


def test_a_bug_of_ours_exits_1(capsys, monkeypatch):
    monkeypatch.setattr("chimera_sm.sdk.compose", lambda *_, **__: 1 / 0)
    assert run(["plan"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_reader_of_our_output_may_leave():
    done = subprocess.run(
        f"{sys.executable} -m chimera_sm recipes show 70b | head -1; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] in ("0", "141"), "0 where all of it fitted into the pipe"
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written():
    done = subprocess.run(
        f"{sys.executable} -m chimera_sm plan > /dev/full", shell=True, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "error: No space left on device\n"


def test_records_that_cannot_be_written_or_read(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path / "file"))
    assert run(["launch", "recipe=tiny", "--detach"]) == 2
    assert "CHIMERA_RUNS" in capsys.readouterr().err
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "launch.lock").write_text("{")
    assert run(["runs", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == []
    assert "torn" in captured.err
    assert run(["status", "torn"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("run_id", ["../../evil", "", "last", "a/b", "under_score", "x" * 64, "-x"])
def test_a_run_id_names_a_folder_and_a_job(run_id, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path / "runs"))
    for extra in ("--dry-run", "--detach"):
        assert run(["launch", "recipe=tiny", "--run-id", run_id, extra]) == 2
        assert "run id" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_json_has_no_nan(capsys):
    print_json({"loss": float("nan"), "list": [float("inf"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "list": [None, 1.5]}


@pytest.mark.parametrize(
    ("terminal", "options", "answer", "code", "launched"),
    [
        (True, [], "y\n", 0, 1),
        (True, [], "n\n", 130, 0),
        (True, [], "\n", 130, 0),
        (True, ["--yes"], "", 0, 1),
        (False, [], "", 2, 0),
        (False, ["--yes"], "", 0, 1),
    ],
)
def test_launch_asks_once_before_it_spends_money(terminal, options, answer, code, launched, capsys, monkeypatch):
    launches = []

    def launch(plan, **_):
        launches.append(plan)
        return SimpleNamespace(id="r-1")

    monkeypatch.setattr("chimera_sm.cli.launch.is_terminal", lambda: terminal)
    monkeypatch.setattr("chimera_sm.sdk.refuse", lambda *_: None)
    monkeypatch.setattr("chimera_sm.sdk.launch", launch)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert run(["launch", "recipe=8b", *options]) == code
    assert len(launches) == launched
    captured = capsys.readouterr()
    question = "Launch 4 × ml.p5.48xlarge at $253.18 an hour, about $"
    assert (question in captured.out) == (terminal and not options)
    if not terminal and not options:
        assert "add --yes" in captured.err


HEAVY = "{'torch', 'sagemaker', 'boto3', 'botocore', 'hydra', 'rich', 'moto', 'transformers', 'pandas'}"


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import chimera_sm", HEAVY),
        ("from chimera_sm.cli.main import run; assert run(['--help']) == 0", HEAVY),
        (
            "from chimera_sm.cli.main import run; assert run(['launch', 'recipe=70b', '--dry-run', '--json']) == 0",
            "{'torch', 'sagemaker', 'moto', 'pandas'}",
        ),
        (
            "from chimera_sm.cli.main import run; assert run(['plan', 'recipe=tiny']) == 0",
            "{'torch', 'sagemaker', 'boto3'}",
        ),
    ],
)
def test_heavy_packages_stay_out(statement, heavy):
    code = f"import sys\n{statement}\nprint(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_dry_run_leaves_every_file_that_would_be_sent(tmp_path, capsys):
    folder = tmp_path / "dry" / "8b"
    assert run(["launch", "recipe=8b", "--dry-run", "--json", "--out", str(folder)]) == 0
    request = capsys.readouterr().out
    assert (folder / "create_training_job.json").read_text() == request
    assert json.loads((folder / "recipe.json").read_text())["recipe"]["name"] == "8b"


def test_out_is_of_a_dry_run_and_a_folder_that_can_be_written(tmp_path, capsys):
    assert run(["launch", "recipe=8b", "--out", str(tmp_path)]) == 2
    assert "add --dry-run" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run(["launch", "recipe=8b", "--dry-run", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err
