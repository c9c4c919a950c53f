"""The CreateTrainingJob request: golden bytes, validity, and what each part of a recipe does to it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator
from sagemaker_cases import ACCOUNT, RUN_ID, planned, rendered, request_of

from chimera_sm.checks import run_checks
from chimera_sm.errors import ChecksFailed
from chimera_sm.runs.record import mint_run_id
from chimera_sm.targets.sagemaker import request as requests
from chimera_train.metrics import METRICS, format_evaluation, format_line, format_source

GOLDEN = Path(__file__).parent / "golden" / "create_training_job_70b.json"
SHIPPED = ["70b", "405b", "8x7b", "8b", "1b"]


def botocore_report(request: dict[str, Any]) -> str:
    shape = ServiceModel(Loader().load_service_model("sagemaker", "service-2")).shape_for("CreateTrainingJobRequest")
    report: str = ParamValidator().validate(request, shape).generate_report()
    return report


def test_the_reference_case_equals_its_golden_file() -> None:
    """The hashes of the code and of the recipe change with every edit of either, so names stand for them."""
    artifacts = rendered("recipe=70b")
    text = artifacts.files["create_training_job.json"].decode()
    text = text.replace(artifacts.bundle.sha256, "<code sha256>")
    text = text.replace(planned("recipe=70b").recipe_hash, "<recipe hash>")
    if os.environ.get("CHIMERA_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "intended? CHIMERA_UPDATE_GOLDEN=1 writes the file anew"


def test_the_reference_case_is_what_it_says() -> None:
    request = request_of(rendered("recipe=70b"))
    assert request["ResourceConfig"] == {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 32}
    assert request["EnableManagedSpotTraining"] is True
    stopping = request["StoppingCondition"]
    assert stopping["MaxWaitTimeInSeconds"] >= stopping["MaxRuntimeInSeconds"]
    assert request["CheckpointConfig"]["LocalPath"] == "/opt/ml/checkpoints"
    source = request["InputDataConfig"][1]["DataSource"]["FileSystemDataSource"]
    assert (source["FileSystemType"], source["FileSystemAccessMode"]) == ("FSxLustre", "rw")
    assert request["OutputDataConfig"]["CompressionType"] == "NONE"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_render_to_valid_requests(name: str) -> None:
    artifacts = rendered(f"recipe={name}")
    assert botocore_report(request_of(artifacts)) == ""
    findings = run_checks(planned(f"recipe={name}"), artifacts)
    job_errors = [f for f in findings if f.severity == "error" and f.id != "offline.memory_fits"]
    assert job_errors == []
    placeholders = {f.where for f in findings if f.id == "offline.placeholder"}
    assert {"env.role_arn", "env.bucket"} <= placeholders


def test_two_renders_give_the_same_bytes() -> None:
    first, second = rendered("recipe=70b"), rendered("recipe=70b")
    assert first.files == second.files
    assert first.sha256 == second.sha256
    assert first.sha256 != rendered("recipe=70b", run_id="other").sha256


def test_render_and_check_open_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    run_checks(planned("recipe=70b"), rendered("recipe=70b"))


def test_render_and_check_import_nothing_heavy() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests/contract'); from sagemaker_cases import planned, rendered;"
        "from chimera_sm.checks import run_checks; run_checks(planned('recipe=70b'), rendered('recipe=70b'));"
        "print([m for m in ('boto3', 'botocore', 'torch', 'sagemaker', 'rich', 'pathspec') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


def test_an_account_leaves_no_placeholder() -> None:
    artifacts = rendered("recipe=70b", *ACCOUNT)
    request = request_of(artifacts)
    assert artifacts.placeholders == ()
    assert b"placeh" not in artifacts.files["create_training_job.json"]
    assert request["InputDataConfig"][1]["DataSource"]["FileSystemDataSource"]["DirectoryPath"] == "/abcdefgh"
    assert request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] == (
        f"s3://ours/chimera/code/{artifacts.bundle.sha256}/"
    )
    assert request["CheckpointConfig"]["S3Uri"] == f"s3://ours/chimera/runs/{RUN_ID}/checkpoints"


def test_placeholders_name_the_key_and_satisfy_the_patterns() -> None:
    artifacts = rendered("recipe=70b")
    assert [p.key for p in artifacts.placeholders] == [
        "env.bucket",
        "env.fsx_file_system_id",
        "env.fsx_mount_name",
        "env.role_arn",
        "env.security_groups",
        "env.subnets",
    ]
    assert all(
        p.fix and p.value in artifacts.files["create_training_job.json"].decode() for p in artifacts.placeholders
    )
    assert "data.uri" in [p.key for p in rendered("recipe=8b").placeholders]  # the shipped sample bucket


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["data.uri=s3://bucket/shards"], "InputDataConfig.1.DataSource.S3DataSource.S3Uri", "s3://bucket/shards/"),
        (["data.input_mode=File"], "InputDataConfig.1.InputMode", "File"),
        (["instances=g5"], "ResourceConfig", {"InstanceType": "ml.g5.12xlarge", "InstanceCount": 4}),
        (["env.kms_key_id=1234abcd"], "OutputDataConfig.KmsKeyId", "1234abcd"),
        (["env.kms_key_id=1234abcd"], "ResourceConfig", {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 4}),
        (["capacity.keep_alive_minutes=30"], "ResourceConfig.KeepAlivePeriodInSeconds", 1800),
        (["capacity.max_retries=3"], "RetryStrategy.MaximumRetryAttempts", 3),
        (["capacity.max_pending_hours=2"], "StoppingCondition.MaxPendingTimeInSeconds", 7200),
        (["target.remote_debug=true"], "RemoteDebugConfig.EnableRemoteDebug", True),
        (["target.infra_check=false"], "InfraCheckConfig.EnableInfraCheck", False),
        (["target.network_isolation=true"], "EnableNetworkIsolation", True),
        (["target.encrypt_inter_container_traffic=true"], "EnableInterContainerTrafficEncryption", True),
        (["target.image=123456789012.dkr.ecr.us-east-1.amazonaws.com/a:1"], "AlgorithmSpecification.TrainingImage",
         "123456789012.dkr.ecr.us-east-1.amazonaws.com/a:1"),
        (["+target.environment.NCCL_DEBUG=INFO"], "Environment.NCCL_DEBUG", "INFO"),
        (["+env.tags.team=nlp"], "Tags.2", {"Key": "team", "Value": "nlp"}),
        (["checkpoint.s3_uri='s3://c/x/{run_id}'"], "CheckpointConfig.S3Uri", f"s3://c/x/{RUN_ID}"),
        (["env.subnets=[subnet-0123456789abcdef0]"], "VpcConfig.Subnets", ["subnet-0123456789abcdef0"]),
        (["env.region=cn-north-1"], "RoleArn", "arn:aws-cn:iam::000000000000:role/placeholder"),
    ],
)  # fmt: skip
def test_what_a_recipe_sets(overrides: list[str], path: str, value: Any) -> None:
    artifacts = rendered("recipe=8b", *overrides)
    request = request_of(artifacts)
    found: Any = request
    for step in path.split("."):
        found = found[int(step)] if isinstance(found, list) else found[step]
    assert found == value
    assert botocore_report(request) == ""


def test_fallbacks_become_instance_preferences() -> None:
    overrides = ("recipe=8b", "instances.fallbacks=[{type: ml.p5en.48xlarge, count: 4}]")
    request = request_of(rendered(*overrides))
    assert request["ResourceConfig"] == {
        "InstancePreferences": [
            {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 4},
            {"InstanceType": "ml.p5en.48xlarge", "InstanceCount": 4},
        ]
    }


def test_a_job_from_a_training_plan() -> None:
    arn = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/ours"
    overrides = ("recipe=8b", "capacity=reserved", f"capacity.training_plan_arn={arn}")
    assert request_of(rendered(*overrides))["ResourceConfig"]["TrainingPlanArn"] == arn
    assert [f for f in run_checks(planned(*overrides), rendered(*overrides)) if f.severity == "error"] == []


def test_a_secret_in_the_environment_is_never_rendered() -> None:
    token = "h" + "f_" + "Ab1" * 12
    with pytest.raises(ChecksFailed, match=r"target\.environment\.MY_VAR: holds a secret") as caught:
        rendered("recipe=8b", f"+target.environment.MY_VAR={token}")
    assert token not in str(caught.value)


def test_metric_definitions_find_the_trainers_line() -> None:
    lines = [
        format_line(7, {metric.name: 1.5 for metric in METRICS}),
        format_evaluation(7, "books", {"loss": 2.5, "perplexity": 3.5}),
        format_evaluation(7, "code", {"loss": 4.5, "perplexity": 5.5}),
        format_source(7, "web", 6.5),
    ]
    sources = "evaluation.sources={books: val/books, code: val/code}"
    definitions = request_of(rendered("recipe=8b", sources))["AlgorithmSpecification"]["MetricDefinitions"]
    found = {d["Name"]: [m.group(1) for line in lines if (m := re.search(d["Regex"], line))] for d in definitions}
    assert found == {
        **{metric.name: ["1.5"] for metric in METRICS},
        "eval_loss_books": ["2.5"],
        "eval_perplexity_books": ["3.5"],
        "eval_loss_code": ["4.5"],
        "eval_perplexity_code": ["5.5"],
    }


def test_job_names_fit_and_stay_apart() -> None:
    run_id = mint_run_id("a" * 40)
    names = [requests.job_name(run_id, suffix) for suffix in ("", "-s1", "-r1", "-s12-r3")]
    assert all(len(name) <= 63 for name in names)
    assert len(set(names)) == 4
    assert all(run_id[-22:] in name for name in names)
    assert requests.job_name("short", "-s1") == "short-s1"


def test_later_segments_differ_in_name_and_time_only() -> None:
    plan = planned("recipe=70b")
    assert len(plan.segments) > 1
    first = request_of(rendered("recipe=70b"))
    second = requests.next_request(first, RUN_ID, attempt=0, segment=plan.segments[1], max_pending_hours=None)
    assert second["TrainingJobName"] == f"{RUN_ID}-s1"
    assert {k for k in first if first[k] != second[k]} <= {"TrainingJobName", "StoppingCondition"}
