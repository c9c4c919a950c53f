"""Plans and requests that the SageMaker tests share."""

from __future__ import annotations

import functools
import json
from typing import Any

from chimera_sm.planner.plan import plan
from chimera_sm.planner.types import Plan
from chimera_sm.recipe.compose import compose
from chimera_sm.targets.base import Artifacts
from chimera_sm.targets.sagemaker import SageMakerTarget

ACCOUNT = (
    "env.account_id='123456789012'",
    "env.role_arn=arn:aws:iam::123456789012:role/train",
    "env.bucket=ours",
    "env.subnets=[subnet-0a1b2c3d4e5f60718]",
    "env.security_groups=[sg-0a1b2c3d4e5f60718]",
    "env.fsx_file_system_id=fs-0a1b2c3d4e5f60718",
    "env.fsx_mount_name=abcdefgh",
)
RUN_ID = "70b-20261130-120000-abcdef"


@functools.cache
def planned(*overrides: str) -> Plan:
    return plan(compose(list(overrides)))


def rendered(*overrides: str, run_id: str = RUN_ID) -> Artifacts:
    return SageMakerTarget().render(planned(*overrides), run_id)


def request_of(artifacts: Artifacts) -> dict[str, Any]:
    request: dict[str, Any] = json.loads(artifacts.files["create_training_job.json"])
    return request
