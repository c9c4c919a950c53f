"""What would go wrong: one small function a rule, registered by id. All of them are offline."""

from __future__ import annotations

from chimera_sm.planner.types import Plan
from chimera_sm.targets.base import Artifacts, Finding

from . import capacity_rules, job_rules, local_rules, name_rules, plan_rules, progress_rules
from .registry import JOB_RULES, PLAN_RULES, Context, TrainingJob
from .shape import shape_findings

__all__ = [
    "JOB_RULES",
    "PLAN_RULES",
    "capacity_rules",
    "job_rules",
    "local_rules",
    "name_rules",
    "plan_rules",
    "progress_rules",
    "run_checks",
]

_ORDER = {"error": 0, "warning": 1, "info": 2}
_UNREADABLE = frozenset({"offline.request_type", "offline.request_required", "offline.request_union"})
"""A request with one of these is too broken for rules that read it."""


def run_checks(plan: Plan, artifacts: Artifacts) -> list[Finding]:
    """Every finding, errors first. Reads no network and writes nothing."""
    context = Context(plan, artifacts)
    findings = [finding for rule in PLAN_RULES.values() for finding in rule.findings(context)]
    if context.request is not None:
        shape = list(shape_findings(context.request))
        findings += shape
        if not any(finding.id in _UNREADABLE for finding in shape):
            job = TrainingJob(context.request, plan)
            findings += [finding for rule in JOB_RULES.values() for finding in rule.findings(job)]
    return sorted(dict.fromkeys(findings), key=lambda finding: _ORDER[finding.severity])
