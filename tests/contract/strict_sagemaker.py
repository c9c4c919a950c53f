"""SageMaker as moto has it, made as strict as AWS: requests are checked, names are unique, jobs start as InProgress
and can be stopped. What moto lacks is in `FAKED`; a test fails once moto has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import botocore.client
from botocore.exceptions import ClientError
from moto import mock_aws
from moto.sagemaker.models import sagemaker_backends

from chimera_sm.aws.shapes import service_model
from chimera_sm.checks import JOB_RULES
from chimera_sm.checks.registry import TrainingJob
from chimera_sm.planner.types import Plan

FAKED = ("StopTrainingJob",)
MOTO_ACCOUNT = "123456789012"


class StrictSageMaker:
    def __init__(self, plan: Plan, region: str):
        self.plan = plan
        self.region = region
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refusals: dict[str, tuple[str, str]] = {}
        """Operation → code and message that it answers with."""

    @property
    def jobs(self) -> dict[str, Any]:
        jobs: dict[str, Any] = sagemaker_backends[MOTO_ACCOUNT][self.region].training_jobs
        return jobs

    def set(self, name: str, status: str, secondary: str, **more: Any) -> None:
        job = self.jobs[name]
        job.training_job_status, job.secondary_status = status, secondary
        for key, value in more.items():
            setattr(job, key, value)

    def named(self, operation: str) -> list[dict[str, Any]]:
        return [params for name, params in self.calls if name == operation]

    def call(self, moto: Any, client: Any, operation: str, params: dict[str, Any]) -> Any:
        self.calls.append((operation, params))
        if operation in self.refusals:
            refuse(operation, *self.refusals[operation])
        if operation == "StopTrainingJob":
            job = self.jobs[params["TrainingJobName"]]
            if job.training_job_status != "InProgress":
                refuse(operation, "ValidationException", f"The request was rejected: {job.training_job_status}")
            self.set(params["TrainingJobName"], "Stopping", "Stopping")
            return {}
        if operation != "CreateTrainingJob":
            return moto(client, operation, params)
        name = params["TrainingJobName"]
        if name in self.jobs:
            refuse(operation, "ResourceInUse", f"Training job names must be unique: {name}")
        self._validate(operation, params)
        answer = moto(client, operation, json.loads(json.dumps(params)))
        self.set(name, "InProgress", "Starting")
        return answer

    def _validate(self, operation: str, params: dict[str, Any]) -> None:
        broken = [f"{v.path}: {v.message}" for v in service_model("sagemaker").validate(operation, params)]
        job = TrainingJob(params, self.plan)
        for rule in JOB_RULES.values():
            broken += [f.message for f in rule.findings(job) if f.severity == "error"]
        if broken:
            refuse(operation, "ValidationException", "; ".join(broken))


def refuse(operation: str, code: str, message: str) -> None:
    raise ClientError({"Error": {"Code": code, "Message": message}}, operation)


@contextmanager
def strict_sagemaker(plan: Plan) -> Iterator[StrictSageMaker]:
    moto = botocore.client.BaseClient._make_api_call
    strict = StrictSageMaker(plan, plan.recipe.env.region)
    with (
        mock_aws(),
        patch.object(
            botocore.client.BaseClient,
            "_make_api_call",
            lambda client, operation, params: strict.call(moto, client, operation, params),
        ),
    ):
        yield strict
