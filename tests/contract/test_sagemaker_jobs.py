"""Submit, status, logs, metrics, stop and resume against a SageMaker that refuses what AWS refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from sagemaker_cases import ACCOUNT, RUN_ID, planned, rendered, request_of
from strict_sagemaker import FAKED, StrictSageMaker, strict_sagemaker

from chimera_sm.aws.bundle import Bundle
from chimera_sm.errors import AwsRefused, UsageError
from chimera_sm.runs.record import RunRecord
from chimera_sm.targets.sagemaker import SageMakerTarget, observe
from chimera_train.metrics import format_line

OVERRIDES = (
    "recipe=8b",
    *ACCOUNT,
    "data.uri=s3://ours/shards/",
    "env.kms_key_id=1234abcd",
    "capacity.max_run_hours=72",
)
NOW = int(time.time() * 1000) - 60_000
SMALL = Bundle({"launch.py": b"pass"})
GROUP = "/aws/sagemaker/TrainingJobs"
TARGET = SageMakerTarget()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path / "runs"))
    lock = {"target": "sagemaker", "plan": planned(*OVERRIDES).to_json()}
    return RunRecord.create(RUN_ID, lock, rendered(*OVERRIDES).files)


@pytest.fixture
def aws() -> Iterator[StrictSageMaker]:
    with strict_sagemaker(planned(*OVERRIDES)) as strict:
        boto3.client("s3", "us-east-1").create_bucket(Bucket="ours")
        yield strict


def submit(record: RunRecord, bundle: Bundle = SMALL) -> None:
    TARGET.submit(planned(*OVERRIDES), replace(rendered(*OVERRIDES), bundle=bundle), record)


@pytest.fixture
def say() -> Callable[..., None]:
    """Writes lines into a host's log."""

    def write(job: str, host: str, *lines: str, at: int = NOW) -> None:
        logs = boto3.client("logs", "us-east-1")
        stream = f"{job}/{host}-1700000000"
        if not logs.describe_log_groups(logGroupNamePrefix=GROUP)["logGroups"]:
            logs.create_log_group(logGroupName=GROUP)
        if not logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=stream)["logStreams"]:
            logs.create_log_stream(logGroupName=GROUP, logStreamName=stream)
        events = [{"timestamp": at + i, "message": line} for i, line in enumerate(lines)]
        logs.put_log_events(logGroupName=GROUP, logStreamName=stream, logEvents=events)

    return write


def test_submit_uploads_the_bundle_once_and_creates_the_very_request(aws: StrictSageMaker, record: RunRecord) -> None:
    artifacts = rendered(*OVERRIDES)
    submit(record, artifacts.bundle)
    (created,) = aws.named("CreateTrainingJob")
    assert created == request_of(artifacts)
    s3 = boto3.client("s3", "us-east-1")
    prefix = f"chimera/code/{artifacts.bundle.sha256}/"
    there = s3.list_objects_v2(Bucket="ours", Prefix=prefix)["Contents"]
    assert {entry["Key"].removeprefix(prefix) for entry in there} == set(artifacts.bundle.files)
    assert (
        s3.get_object(Bucket="ours", Key=f"{prefix}recipe.json")["Body"].read() == artifacts.bundle.files["recipe.json"]
    )
    puts = aws.named("PutObject")
    assert all(put["ServerSideEncryption"] == "aws:kms" and put["SSEKMSKeyId"] == "1234abcd" for put in puts)
    assert all(put["ExpectedBucketOwner"] == "123456789012" for put in puts)

    s3.delete_object(Bucket="ours", Key=f"{prefix}recipe.json")
    submit(record, artifacts.bundle)
    assert len(aws.named("CreateTrainingJob")) == 1
    assert [put["Key"] for put in aws.named("PutObject")[len(puts) :]] == [f"{prefix}recipe.json"]


def test_submit_refuses_placeholders_and_names_every_key(aws: StrictSageMaker, record: RunRecord) -> None:
    plan, artifacts = planned("recipe=70b"), rendered("recipe=70b")
    with pytest.raises(AwsRefused) as caught:
        TARGET.submit(plan, artifacts, record)
    for placeholder in artifacts.placeholders:
        assert f"{placeholder.key} is not set: {placeholder.fix}" in str(caught.value)
    assert aws.named("PutObject") == []


def test_a_name_that_another_run_has_is_refused(aws: StrictSageMaker, record: RunRecord) -> None:
    request = request_of(rendered(*OVERRIDES)) | {"Tags": []}
    boto3.client("sagemaker", "us-east-1").create_training_job(**request)
    with pytest.raises(AwsRefused, match=f"{RUN_ID} exists in us-east-1, but is of another run"):
        submit(record)


@pytest.mark.parametrize(
    ("operation", "code", "message", "fix"),
    [
        (
            "CreateTrainingJob",
            "ResourceLimitExceeded",
            "The account-level service limit 'ml.p5.48xlarge for training job usage' is 0 Instances",
            "request more of ml.p5.48xlarge for training job usage in Service Quotas",
        ),
        ("CreateTrainingJob", "AccessDeniedException", "User: x is not authorized", "permission for CreateTrainingJob"),
        ("PutObject", "AccessDenied", "Access Denied", "permission for PutObject"),
        ("DescribeTrainingJob", "ExpiredTokenException", "The security token is expired", "aws sso login"),
        ("CreateTrainingJob", "ValidationException", "No such image", ""),
    ],
)
def test_refusals_carry_awss_message_and_a_fix(
    aws: StrictSageMaker, record: RunRecord, operation: str, code: str, message: str, fix: str
) -> None:
    aws.refusals[operation] = (code, message)
    with pytest.raises(AwsRefused) as caught:
        submit(record)
    assert f"{code}: {message}" in caught.value.message
    assert fix in caught.value.fix
    assert caught.value.exit_code == 6
    assert RunRecord.find(RUN_ID) == record


def test_a_refused_submit_can_be_taken_up_again(aws: StrictSageMaker, record: RunRecord) -> None:
    aws.refusals["CreateTrainingJob"] = ("ResourceLimitExceeded", "limit")
    with pytest.raises(AwsRefused):
        submit(record)
    assert TARGET.status(record).state == "failed"
    assert "resume submits it again" in TARGET.status(record).reason
    aws.refusals.clear()
    TARGET.resume(record)
    assert list(aws.jobs) == [RUN_ID]
    assert TARGET.status(record).state == "provisioning"


def test_no_credentials(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    plan, target = planned(*OVERRIDES), SageMakerTarget()
    (line,) = target.ready(plan)
    assert "no AWS credentials" in line
    with pytest.raises(AwsRefused, match="no AWS credentials"):
        target.submit(plan, rendered(*OVERRIDES), record)
    monkeypatch.setenv("AWS_PROFILE", "absent")
    (line,) = SageMakerTarget().ready(plan)
    assert "absent" in line


def test_ready_with_credentials() -> None:
    assert TARGET.ready(planned(*OVERRIDES)) == []


@pytest.mark.parametrize(
    ("status", "secondary", "state"),
    [
        ("InProgress", "Pending", "queued"),
        ("InProgress", "Starting", "provisioning"),
        ("InProgress", "Downloading", "downloading"),
        ("InProgress", "Training", "running"),
        ("InProgress", "Interrupted", "interrupted"),
        ("InProgress", "Restarting", "restarting"),
        ("InProgress", "Uploading", "uploading"),
        ("InProgress", "Transmogrifying", "Transmogrifying"),
        ("Completed", "Completed", "completed"),
        ("Failed", "Failed", "failed"),
        ("Stopped", "MaxWaitTimeExceeded", "stopped"),
        ("Stopped", "Stopped", "stopped"),
    ],
)
def test_states(aws: StrictSageMaker, record: RunRecord, status: str, secondary: str, state: str) -> None:
    submit(record)
    aws.set(RUN_ID, status, secondary)
    found = TARGET.status(record)
    assert found.state == state
    assert found.step is None
    assert ("MaxWaitTimeExceeded" in found.reason) == (secondary == "MaxWaitTimeExceeded")


def test_progress_comes_from_the_log(aws: StrictSageMaker, record: RunRecord, say: Callable[..., None]) -> None:
    submit(record)
    aws.set(RUN_ID, "InProgress", "Training")
    say(RUN_ID, "algo-1", "hello", format_line(41, {"loss": 3.5, "step_s": 2.0}))
    say(
        RUN_ID,
        "algo-1",
        format_line(42, {"loss": 3.25, "step_s": 2.0, "tokens_per_s": 1000.0}),
        "bye",
        at=NOW + 1000,
    )
    status = TARGET.status(record)
    steps = planned(*OVERRIDES).recipe.train.num_steps
    assert (status.step, status.num_steps, status.loss, status.tokens_per_s) == (42, steps, 3.25, 1000.0)
    assert status.eta_s == (steps - 42) * 2.0
    aws.set(RUN_ID, "Failed", "Failed", failure_reason="AlgorithmError: NCCL timeout, exit code: 75")
    status = TARGET.status(record)
    assert (status.exit_code, status.eta_s) == (75, None)
    assert "NCCL timeout" in status.reason


def test_status_survives_logs_that_may_not_be_read(aws: StrictSageMaker, record: RunRecord) -> None:
    submit(record)
    aws.refusals["DescribeLogStreams"] = ("AccessDeniedException", "no")
    assert TARGET.status(record).state == "provisioning"


def test_logs_and_metrics_over_all_jobs(aws: StrictSageMaker, record: RunRecord, say: Callable[..., None]) -> None:
    submit(record)
    assert list(TARGET.logs(record)) == []
    assert TARGET.metrics(record) == []
    say(RUN_ID, "algo-1", format_line(1, {"loss": 4.0}), format_line(2, {"loss": 3.0}))
    say(RUN_ID, "algo-2", format_line(1, {"loss": 4.0}), at=NOW + 2000)
    aws.set(RUN_ID, "Failed", "Failed")
    TARGET.resume(record)
    say(f"{RUN_ID}-r1", "algo-1", format_line(2, {"loss": 3.5}), format_line(3, {"loss": 2.0}), at=NOW + 3000)
    assert TARGET.metrics(record) == [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.5}, {"step": 3, "loss": 2.0}]
    assert list(TARGET.logs(record)) == [
        "algo-1 | chimera step=1 loss=4",
        "algo-1 | chimera step=2 loss=3",
        "algo-2 | chimera step=1 loss=4",
        "algo-1 | chimera step=2 loss=3.5",
        "algo-1 | chimera step=3 loss=2",
    ]


def test_following_a_log_shows_each_line_once_and_ends_with_the_job(
    aws: StrictSageMaker, record: RunRecord, say: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(record)
    say(RUN_ID, "algo-1", "one")

    def later(_: float) -> None:
        say(RUN_ID, "algo-1", "two", at=NOW + 1000)
        aws.set(RUN_ID, "Completed", "Completed")

    monkeypatch.setattr(observe.time, "sleep", later)
    assert list(TARGET.logs(record, follow=True)) == ["algo-1 | one", "algo-1 | two"]


def test_stop_is_asked_once_and_is_nothing_for_an_ended_run(aws: StrictSageMaker, record: RunRecord) -> None:
    TARGET.stop(record)  # never submitted
    submit(record)
    TARGET.stop(record)
    status = TARGET.status(record)
    assert (status.state, status.reason) == ("running", "Stopping")
    TARGET.stop(record)
    aws.set(RUN_ID, "Stopped", "Stopped")
    TARGET.stop(record)
    assert len(aws.named("StopTrainingJob")) == 1


def test_resume_goes_on_over_the_same_checkpoints(aws: StrictSageMaker, record: RunRecord) -> None:
    submit(record)
    with pytest.raises(UsageError, match="is still InProgress"):
        TARGET.resume(record)
    aws.set(RUN_ID, "Stopped", "Stopped")
    TARGET.resume(record)
    aws.set(f"{RUN_ID}-r1", "Failed", "Failed")
    TARGET.resume(record)
    first, second, third = aws.named("CreateTrainingJob")
    assert [second["TrainingJobName"], third["TrainingJobName"]] == [f"{RUN_ID}-r1", f"{RUN_ID}-r2"]
    for later in (second, third):
        assert {k for k in first if first[k] != later[k]} == {"TrainingJobName"}
    aws.set(f"{RUN_ID}-r2", "Completed", "Completed")
    with pytest.raises(UsageError, match="is completed"):
        TARGET.resume(record)


def test_a_run_out_of_time_goes_on_with_the_next_segment(aws: StrictSageMaker, record: RunRecord) -> None:
    plan = planned(*OVERRIDES)
    assert len(plan.segments) > 1
    submit(record)
    aws.set(RUN_ID, "Stopped", "MaxRuntimeExceeded")
    TARGET.resume(record)
    assert aws.named("CreateTrainingJob")[1]["TrainingJobName"] == f"{RUN_ID}-s1"
    aws.set(f"{RUN_ID}-s1", "Failed", "Failed")
    TARGET.resume(record)
    assert aws.named("CreateTrainingJob")[2]["TrainingJobName"] == f"{RUN_ID}-s1-r1"


def test_what_was_never_submitted_cannot_be_resumed(aws: StrictSageMaker, record: RunRecord) -> None:
    assert TARGET.status(record).state == "failed"
    with pytest.raises(UsageError, match="never submitted"):
        TARGET.resume(record)


def test_model_files_say_where_the_checkpoints_are(record: RunRecord) -> None:
    with pytest.raises(UsageError, match=f"s3://ours/chimera/runs/{RUN_ID}/checkpoints"):
        TARGET.model_files(record)


def test_the_fake_is_strict(aws: StrictSageMaker, record: RunRecord) -> None:
    artifacts = rendered(*OVERRIDES)
    request = request_of(artifacts) | {"EnableManagedSpotTraining": True}
    files = {**artifacts.files, "create_training_job.json": json.dumps(request).encode()}
    with pytest.raises(AwsRefused, match="spot capacity needs MaxWaitTimeInSeconds"):
        TARGET.submit(planned(*OVERRIDES), replace(artifacts, files=files), record)


@pytest.mark.parametrize("operation", FAKED)
def test_moto_still_lacks_what_is_faked(operation: str) -> None:
    client: Any = boto3.client("sagemaker", "us-east-1")
    with mock_aws(), pytest.raises(NotImplementedError):
        client.stop_training_job(TrainingJobName="x")
