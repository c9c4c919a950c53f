"""What a rule is, and the list of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from chimera_sm.catalog import Instance, UnknownInstance, instance
from chimera_sm.planner.types import Plan
from chimera_sm.targets.base import Artifacts, Finding

Severity = Literal["error", "warning", "info"]
TRAINING_JOB_FILE = "create_training_job.json"


@dataclass(frozen=True)
class Said:
    """What a rule found: one broken instance of it."""

    message: str
    fix: str = ""
    where: str = ""
    """Recipe key, if another than the rule's."""
    severity: Severity | None = None
    """If another than the rule's."""


class TrainingJob:
    """A CreateTrainingJob request whose shape is valid, with what rules ask of it."""

    def __init__(self, request: dict[str, Any], plan: Plan):
        self.request = request
        self.plan = plan
        self.resources: dict[str, Any] = request.get("ResourceConfig", {})
        self.stopping: dict[str, Any] = request.get("StoppingCondition", {})
        self.channels: list[dict[str, Any]] = request.get("InputDataConfig", [])
        self.groups: list[dict[str, Any]] = self.resources.get("InstanceGroups", [])
        self.preferences: list[dict[str, Any]] = self.resources.get("InstancePreferences", [])
        self.environment: dict[str, str] = request.get("Environment", {})
        self.spot: bool = request.get("EnableManagedSpotTraining", False)
        self.isolated: bool = request.get("EnableNetworkIsolation", False)
        self.remote_debug: bool = request.get("RemoteDebugConfig", {}).get("EnableRemoteDebug", False)
        self.keep_alive_s: int = self.resources.get("KeepAlivePeriodInSeconds", 0)
        self.subnets: list[str] = request.get("VpcConfig", {}).get("Subnets", [])

    @property
    def hosts(self) -> list[tuple[str, int]]:
        """Type and count of every group, or of every choice where one of several is taken."""
        entries = self.groups or self.preferences or ([self.resources] if "InstanceType" in self.resources else [])
        default = self.resources.get("InstanceCount", 1)
        return [(entry["InstanceType"], entry.get("InstanceCount", default)) for entry in entries]

    @property
    def instances(self) -> list[Instance]:
        """The catalogue's facts of the types that it knows."""
        found = []
        for kind, _ in self.hosts:
            try:
                found.append(instance(kind))
            except UnknownInstance:  # AWS knows more types than the catalogue of accelerated ones
                continue
        return found

    @property
    def crosses_efa(self) -> bool:
        """More than one host, over EFA."""
        counts = [count for _, count in self.hosts]
        together = max(counts, default=0) if self.preferences else sum(counts)
        return together > 1 and any(facts.efa_interfaces for facts in self.instances)

    def s3_sources(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Channel and its S3 source, for the channels that have one."""
        for channel in self.channels:
            if "S3DataSource" in channel["DataSource"]:
                yield channel, channel["DataSource"]["S3DataSource"]

    def file_systems(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for channel in self.channels:
            if "FileSystemDataSource" in channel["DataSource"]:
                yield channel, channel["DataSource"]["FileSystemDataSource"]


@dataclass(frozen=True)
class Context:
    plan: Plan
    artifacts: Artifacts

    @cached_property
    def request(self) -> dict[str, Any] | None:
        """The CreateTrainingJob request, or None for a target without one."""
        content = self.artifacts.files.get(TRAINING_JOB_FILE)
        return None if content is None else json.loads(content)


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Severity
    where: str
    blocks_submit: bool
    run: Callable[[Any], Iterator[Said]]

    def findings(self, subject: Any) -> Iterator[Finding]:
        for said in self.run(subject):
            yield Finding(
                id=self.id,
                severity=said.severity or self.severity,
                message=said.message,
                where=said.where or self.where,
                fix=said.fix,
                blocks_submit=self.blocks_submit,
            )


PLAN_RULES: dict[str, Rule] = {}
"""Over the plan and all its artefacts, whatever the target."""
JOB_RULES: dict[str, Rule] = {}
"""Over a CreateTrainingJob request."""


Body = TypeVar("Body", bound=Callable[[Any], Iterator[Said]])


def plan_rule(
    name: str, where: str, *, severity: Severity = "error", blocks_submit: bool = False
) -> Callable[[Body], Body]:
    """Registers a function of a Context."""
    return _register(PLAN_RULES, f"offline.{name}", severity, where, blocks_submit)


def job_rule(name: str, where: str, *, severity: Severity = "error") -> Callable[[Body], Body]:
    """Registers a function of a TrainingJob."""
    return _register(JOB_RULES, f"offline.{name}", severity, where, False)


def _register(
    rules: dict[str, Rule], id: str, severity: Severity, where: str, blocks_submit: bool
) -> Callable[[Body], Body]:
    assert id not in rules, id

    def add(function: Body) -> Body:
        rules[id] = Rule(id, severity, where, blocks_submit, function)
        return function

    return add
