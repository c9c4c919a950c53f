"""What a training job is doing: SageMaker's status and CloudWatch's log."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from chimera_sm.aws.session import Session, aws_errors, error_code
from chimera_sm.errors import AwsRefused
from chimera_sm.runs.status import RunStatus
from chimera_train.metrics import parse_line

from .request import RUN_ID_TAG

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_S = 5.0
MAX_STREAMS = 100
"""Of one FilterLogEvents."""

# SageMaker's words (botocore: SecondaryStatus of DescribeTrainingJob) to ours; a new one is shown as it came.
_RUNNING = {
    "Pending": "queued",
    "Starting": "provisioning",
    "LaunchingMLInstances": "provisioning",
    "PreparingTrainingStack": "provisioning",
    "DownloadingTrainingImage": "downloading",
    "Downloading": "downloading",
    "Training": "running",
    "Updating": "running",
    "Stopping": "running",
    "Interrupted": "interrupted",
    "Restarting": "restarting",
    "Uploading": "uploading",
}
_ENDED = {"Completed": "completed", "Failed": "failed", "Stopped": "stopped"}
_EXIT_CODE = re.compile(r"exit code:? (\d+)", re.IGNORECASE)


def describe(session: Session, name: str) -> dict[str, Any] | None:
    """DescribeTrainingJob, or None if there is no such job."""
    from botocore.exceptions import ClientError

    with aws_errors(f"describe the training job {name}"):
        try:
            job: dict[str, Any] = session.client("sagemaker").describe_training_job(TrainingJobName=name)
        except ClientError as error:
            # SageMaker answers ValidationException "Requested resource not found." for a name that it never saw.
            if re.search("not found|could not find", str(error), re.IGNORECASE):
                return None
            raise
    return job


def is_there(session: Session, name: str, run_id: str) -> bool:
    """Whether the job exists. Raises AwsRefused for a job of another run."""
    job = describe(session, name)
    if job is None:
        return False
    with aws_errors(f"read the tags of {name}"):
        pages = session.client("sagemaker").get_paginator("list_tags").paginate(ResourceArn=job["TrainingJobArn"])
        tags = {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}
    if tags.get(RUN_ID_TAG) != run_id:
        raise AwsRefused(
            f"a training job {name} exists in {session.region}, but is of another run: no tag {RUN_ID_TAG}={run_id}",
            fix="launch under another run id",
        )
    return True


def status(session: Session, name: str, num_steps: int) -> RunStatus:
    """State of the job, and progress from the end of its log."""
    job = describe(session, name)
    if job is None:
        return RunStatus(state="failed", reason=f"AWS has no training job {name}; resume submits it again")
    overall, secondary = job["TrainingJobStatus"], job["SecondaryStatus"]
    state = _ENDED.get(overall) or _RUNNING.get(secondary, secondary)
    reason = job.get("FailureReason", "")
    if not reason and (secondary == "Stopping" or (overall == "Stopped" and secondary != "Stopped")):
        reason = secondary
    exit_code = _EXIT_CODE.search(reason)
    last = _last_metrics(session, name)
    step = int(last["step"]) if "step" in last else None
    left = num_steps - step if step is not None else None
    return RunStatus(
        state=state,
        reason=reason,
        step=step,
        num_steps=num_steps,
        loss=last.get("loss"),
        tokens_per_s=last.get("tokens_per_s"),
        eta_s=left * last["step_s"] if left is not None and "step_s" in last and overall == "InProgress" else None,
        exit_code=0 if overall == "Completed" else int(exit_code.group(1)) if exit_code else None,
    )


def logs(session: Session, names: Sequence[str], *, follow: bool) -> Iterator[str]:
    """Lines of all hosts as CloudWatch took them, `algo-1 | …`; with `follow`, until the newest job ends."""
    for name in names[:-1] if follow else names:
        for event in _events(session, f"{name}/", 0):
            yield _labelled(event)
    if not follow or not names:
        return
    seen: set[str] = set()
    newest = 0
    while True:
        ended = _has_ended(session, names[-1])  # asked before the log is read, so that its end is not missed
        # CloudWatch takes events late and out of order: look back a minute, and tell by id what was shown.
        for event in _events(session, f"{names[-1]}/", max(0, newest - 60_000)):
            if event["eventId"] not in seen:
                seen.add(event["eventId"])
                newest = max(newest, event["timestamp"])
                yield _labelled(event)
        if ended:
            return
        time.sleep(POLL_S)


def metrics(session: Session, names: Sequence[str]) -> list[dict[str, Any]]:
    """One dict a logged step, from the first host's log. A step that was repeated after a resume counts once, as it
    came last."""
    found: dict[int, dict[str, Any]] = {}
    for name in names:
        for event in _events(session, f"{name}/algo-1-", 0):
            values = parse_line(event["message"])
            if values:
                found[int(values["step"])] = {**values, "step": int(values["step"])}
    return [found[step] for step in sorted(found)]


def _labelled(event: dict[str, Any]) -> str:
    host = re.match(r"[^/]+/(algo-\d+)", event["logStreamName"])
    return f"{host.group(1) if host else event['logStreamName']} | {event['message'].rstrip()}"


def _has_ended(session: Session, name: str) -> bool:
    job = describe(session, name)
    return job is None or job["TrainingJobStatus"] in _ENDED


def _streams(session: Session, prefix: str) -> list[str]:
    """Names of the log's streams; none before the first host has said something."""
    from botocore.exceptions import ClientError

    pages = session.client("logs").get_paginator("describe_log_streams")
    try:
        found = pages.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=prefix)
        return [stream["logStreamName"] for page in found for stream in page["logStreams"]]
    except ClientError as error:
        if error_code(error) != "ResourceNotFoundException":
            raise
    return []


def _events(session: Session, stream_prefix: str, start_ms: int) -> Iterator[dict[str, Any]]:
    """Events of the streams, in order of time."""
    pages = session.client("logs").get_paginator("filter_log_events")
    with aws_errors(f"read the log {LOG_GROUP}"):
        streams = _streams(session, stream_prefix)
        for first in range(0, len(streams), MAX_STREAMS):
            names = streams[first : first + MAX_STREAMS]
            for page in pages.paginate(logGroupName=LOG_GROUP, logStreamNames=names, startTime=start_ms):
                yield from page["events"]


def _last_metrics(session: Session, name: str) -> dict[str, float]:
    """The newest metric line of the first host; empty where the log has none, or may not be read."""
    from botocore.exceptions import ClientError

    with aws_errors(f"read the log {LOG_GROUP}"):
        try:
            for stream in reversed(_streams(session, f"{name}/algo-1-")):
                events = session.client("logs").get_log_events(
                    logGroupName=LOG_GROUP, logStreamName=stream, limit=200, startFromHead=False
                )
                for event in reversed(events["events"]):
                    values = parse_line(event["message"])
                    if values:
                        return values
        except ClientError as error:
            if error_code(error) != "AccessDeniedException":  # a status is worth having without progress
                raise
    return {}
