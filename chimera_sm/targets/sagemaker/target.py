"""A run as SageMaker training jobs: one a segment, and one more for every resume, over one checkpoint prefix."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from chimera_sm.aws.bundle import build_bundle, recipe_file
from chimera_sm.errors import AwsRefused, UsageError
from chimera_sm.planner.types import Plan, Segment
from chimera_sm.runs.record import RunRecord
from chimera_sm.runs.status import RunStatus
from chimera_sm.targets.base import Artifacts, ModelFiles
from chimera_train.config.contract import CODE_CHANNEL, RECIPE_FILE

from . import request as requests
from .jobs import Job, JobList

if TYPE_CHECKING:
    from chimera_sm.aws.session import Session

REQUEST_FILE = "create_training_job.json"
BUNDLE_FILE = "bundle.json"


class SageMakerTarget:
    """Implements `chimera_sm.targets.base.Target`."""

    name = "sagemaker"
    request_file = REQUEST_FILE
    poll_s = 30.0

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def _session(self, region: str) -> Session:
        """One a region: whoever polls a run pays for its clients once."""
        if region not in self._sessions:
            from chimera_sm.aws.session import Session

            self._sessions[region] = Session(region)
        return self._sessions[region]

    def render(self, plan: Plan, run_id: str) -> Artifacts:
        bundle = build_bundle(recipe_file(plan), plan.recipe.code)
        request, placeholders = requests.build_request(plan, run_id, bundle.sha256)
        files = {
            REQUEST_FILE: requests.to_bytes(request),
            RECIPE_FILE: bundle.files[RECIPE_FILE],
            BUNDLE_FILE: requests.to_bytes(bundle.manifest),
        }
        return Artifacts(run_id=run_id, target=self.name, files=files, bundle=bundle, placeholders=placeholders)

    def ready(self, plan: Plan) -> list[str]:
        try:
            if self._session(plan.recipe.env.region).has_credentials():
                return []
        except AwsRefused as error:
            return [str(error)]
        return ["no AWS credentials: run `aws sso login` or `aws configure`, or set AWS_PROFILE"]

    def submit(self, plan: Plan, artifacts: Artifacts, record: RunRecord) -> None:
        if artifacts.placeholders:
            missing = "\n".join(f"  {p.key} is not set: {p.fix}" for p in artifacts.placeholders)
            raise AwsRefused(f"cannot submit {artifacts.run_id}: values of the account are missing\n{missing}")
        from chimera_sm.aws.upload import upload_bundle

        env, request = plan.recipe.env, json.loads(artifacts.files[REQUEST_FILE])
        session = self._session(env.region)
        upload_bundle(
            session, artifacts.bundle, _code_uri(request), kms_key_id=env.kms_key_id, account_id=env.account_id
        )
        JobList(record).add(Job(request["TrainingJobName"], segment=0, attempt=0))
        _create(session, request, record.run_id)

    def status(self, record: RunRecord) -> RunStatus:
        from . import observe

        job = JobList(record).newest()
        if job is None:
            return RunStatus(state="failed", reason="was never submitted")
        return observe.status(self._session(_region(record)), job.name, _num_steps(record))

    def logs(self, record: RunRecord, *, follow: bool = False) -> Iterator[str]:
        from . import observe

        return observe.logs(self._session(_region(record)), [job.name for job in JobList(record).all()], follow=follow)

    def metrics(self, record: RunRecord) -> list[dict[str, Any]]:
        from . import observe

        return observe.metrics(self._session(_region(record)), [job.name for job in JobList(record).all()])

    def model_files(self, record: RunRecord) -> ModelFiles:
        request = json.loads((record.artifacts / REQUEST_FILE).read_bytes())
        checkpoint = record.lock["plan"]["recipe"]["checkpoint"]
        recipe = record.artifacts / RECIPE_FILE
        export = f"python -m chimera_train.export --checkpoints FOLDER --recipe {recipe} --out MODEL"
        if checkpoint["storage"] == "shared":
            path = checkpoint["path"].replace("{run_id}", record.run_id)
            raise UsageError(
                f"the checkpoints of {record.run_id} are on the job's file system, at /opt/ml/{path} in its containers",
                fix=f"mount the file system, then {export}",
            )
        uri = request["CheckpointConfig"]["S3Uri"]
        raise UsageError(
            f"the checkpoints of {record.run_id} are in {uri}, not on this machine",
            fix=f"aws s3 sync {uri} FOLDER, then {export}",
        )

    def stop(self, record: RunRecord) -> None:
        from chimera_sm.aws.session import aws_errors

        from . import observe

        job = JobList(record).newest()
        session = self._session(_region(record))
        described = observe.describe(session, job.name) if job else None
        if job and described and described["TrainingJobStatus"] == "InProgress":
            with aws_errors(f"stop {job.name}"):
                session.client("sagemaker").stop_training_job(TrainingJobName=job.name)

    def saved_step(self, record: RunRecord) -> int | None:
        """Unknown: only the job's own containers look into the checkpoints."""
        return None

    def amend(self, record: RunRecord, artifacts: Artifacts, lock: Mapping[str, Any]) -> None:
        raise UsageError(
            f"run {record.run_id} is a training job, which goes on with the recipe that it was launched with",
            fix="launch a new run with the other recipe and with this run's checkpoint.s3_uri",
        )

    def resume(self, record: RunRecord) -> None:
        """The next segment where the last job ran out of its time, else another attempt at the same one. A job that
        AWS never took is submitted again as it was."""
        from . import observe

        jobs, session = JobList(record), self._session(_region(record))
        job = jobs.newest()
        if job is None:
            raise UsageError(f"run {record.run_id} was never submitted", fix="launch it again under the same run id")
        described = observe.describe(session, job.name)
        if described:
            job = self._successor(record, jobs, job, described)
            jobs.add(job)
        request = json.loads((record.artifacts / REQUEST_FILE).read_bytes())
        plan = record.lock["plan"]
        segment = Segment(**plan["segments"][job.segment])
        pending = plan["recipe"]["capacity"]["max_pending_hours"]
        request = requests.next_request(
            request, record.run_id, attempt=job.attempt, segment=segment, max_pending_hours=pending
        )
        _create(session, request, record.run_id)

    def _successor(self, record: RunRecord, jobs: JobList, job: Job, described: Mapping[str, Any]) -> Job:
        status = described["TrainingJobStatus"]
        if status == "Completed":
            raise UsageError(f"run {record.run_id} is completed: there is nothing to resume")
        if status not in ("Failed", "Stopped"):
            raise UsageError(f"job {job.name} is still {status}", fix=f"stop it first: chimera_sm stop {record.run_id}")
        segment, attempt = job.segment, job.attempt + 1
        out_of_time = described["SecondaryStatus"] == "MaxRuntimeExceeded"
        if out_of_time and segment + 1 < len(record.lock["plan"]["segments"]):
            segment, attempt = segment + 1, 0
        suffix = (f"-s{segment}" if segment else "") + (f"-r{attempt}" if attempt else "")
        return Job(requests.job_name(record.run_id, suffix), segment=segment, attempt=attempt)


def _create(session: Session, request: Mapping[str, Any], run_id: str) -> None:
    """Create the job, once: one of this name that carries the run's tag is the one that was asked for."""
    from botocore.exceptions import ClientError

    from chimera_sm.aws.session import aws_errors, error_code

    from . import observe

    name = request["TrainingJobName"]
    if observe.is_there(session, name, run_id):
        return
    with aws_errors(f"create the training job {name}"):
        try:
            session.client("sagemaker").create_training_job(**request)
        except ClientError as error:
            if error_code(error) != "ResourceInUse" or not observe.is_there(session, name, run_id):
                raise


def _code_uri(request: Mapping[str, Any]) -> str:
    (channel,) = (c for c in request["InputDataConfig"] if c["ChannelName"] == CODE_CHANNEL)
    uri: str = channel["DataSource"]["S3DataSource"]["S3Uri"]
    return uri


def _region(record: RunRecord) -> str:
    region: str = record.lock["plan"]["recipe"]["env"]["region"]
    return region


def _num_steps(record: RunRecord) -> int:
    steps: int = record.lock["plan"]["recipe"]["train"]["num_steps"]
    return steps
