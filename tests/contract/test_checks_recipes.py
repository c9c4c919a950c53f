"""Recipes with one mistake each: `check` finds it, by its rule, severity and key."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from sagemaker_cases import ACCOUNT
from test_sagemaker_rules import PREFERENCES, RULES, S3, SHAPE, SPOT_FSX, both, found, put

from chimera_sm import checks, sdk
from chimera_sm.checks import run_checks
from chimera_sm.errors import ChimeraError, RecipeError
from chimera_sm.planner.plan import plan
from chimera_sm.recipe.compose import compose
from chimera_sm.targets.base import Finding
from chimera_sm.targets.local import LocalTarget

PLAN_ARN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/ours"
RESERVED = (*S3, "capacity=reserved", f"capacity.training_plan_arn={PLAN_ARN}")
ROLE = "env.role_arn=arn:{}:iam::{}:role/train"
TINY = ("recipe=tiny",)


def checked(*overrides: str) -> list[Finding]:
    made = plan(compose(list(overrides)))
    return run_checks(made, sdk.render(made))


def fallback(*types: str) -> str:
    return f"instances.fallbacks=[{','.join(f'{{type:{kind},count:4}}' for kind in types)}]"


CASES: list[tuple[tuple[str, ...], str, str, str]] = [
    # fallbacks
    ((*S3, fallback("ml.p4d.24xlarge"), "train.micro_batch_size=2"), "fallback_memory_fits", "error",
     "instances.fallbacks[0].type"),
    ((*S3, fallback("ml.p5en.48xlarge", "ml.g6.48xlarge")), "fallback_memory_fits", "error",
     "instances.fallbacks[1].type"),
    ((*S3, fallback("ml.p4d.24xlarge"), "checkpoint.keep_last=100"), "fallback_disk_fits", "error",
     "instances.fallbacks[0].type"),
    ((*S3, fallback("ml.p5en.48xlarge", "ml.p5e.48xlarge")), "instance_offered", "warning",
     "instances.fallbacks[1].type"),
    # the checkpoints' prefix, and buckets
    ((*S3, "checkpoint.s3_uri=s3://ours/all"), "checkpoint_prefix", "warning", "checkpoint.s3_uri"),
    ((*SPOT_FSX, 'checkpoint.s3_uri="s3://ours/{run_id}"'), "checkpoint_prefix", "warning", "checkpoint.s3_uri"),
    ((*TINY, "checkpoint.s3_uri=s3://ours/all"), "checkpoint_prefix", "warning", "checkpoint.s3_uri"),
    *(((*S3, f"checkpoint.s3_uri=s3://{name}/x"), "bucket_names", "error", "checkpoint.s3_uri")
      for name in ("My_Bucket", "ab", "a..b", "-ours", "ours-", "10.0.0.1", "xn--ours", "a" * 64)),
    ((*S3, "data.uri=s3://a..b/shards/"), "bucket_names", "error", "data.uri"),
    ((*S3, "env.bucket=10.0.0.1"), "bucket_names", "error", "env.bucket"),
    # how long a job lasts
    ((*S3, "capacity.max_run_hours=0.01"), "job_length", "error", "capacity.max_run_hours"),
    ((*S3, "capacity.max_run_hours=0.001"), "job_length", "error", "capacity.max_run_hours"),
    ((*S3, "capacity.max_run_hours=0.17", "train.num_steps=100"), "job_length", "error", "capacity.max_run_hours"),
    ((*S3, "capacity.max_run_hours=0.01", "train.num_steps=1"), "job_length", "error", "capacity.max_run_hours"),
    ((*S3, "instances.type=ml.g7.48xlarge", "capacity.max_run_hours=0.01"), "job_length", "error",
     "capacity.max_run_hours"),
    ((*S3, "capacity.max_run_hours=0.7", "train.num_steps=1000"), "job_length", "warning", "capacity.max_run_hours"),
    ((*S3, "capacity.max_run_hours=4"), "job_length", "warning", "capacity.max_run_hours"),
    ((*S3, "checkpoint.interval_steps=0"), "job_length", "warning", "capacity.max_run_hours"),
    ((*S3, "checkpoint.interval_steps=5000", "instances.count=1", "capacity.max_run_hours=12",
      "model=llama3_70b", "train.num_steps=10000"), "job_length", "error", "capacity.max_run_hours"),
    # runs that never end
    ((*SPOT_FSX, "checkpoint.interval_steps=20000"), "spot_progress", "error", "capacity.kind"),
    (("recipe=405b", *ACCOUNT, "capacity=spot", "checkpoint.interval_steps=3000"), "spot_progress", "warning",
     "capacity.kind"),
    (("recipe=405b", *ACCOUNT, "checkpoint.interval_steps=0"), "failure_progress", "error",
     "checkpoint.interval_steps"),
    # training plans
    ((*RESERVED, fallback("ml.p5en.48xlarge")), "training_plan", "error", "instances.fallbacks"),
    ((*RESERVED, fallback("ml.g6.48xlarge")), "training_plan", "error", "instances.fallbacks"),
    ((*RESERVED, "instances.type=ml.g6e.48xlarge"), "training_plan", "error", "instances.type"),
    ((*S3, "capacity=reserved", "capacity.training_plan_arn=''"), "training_plan", "error",
     "capacity.training_plan_arn"),
    # whose things they are
    ((*S3, ROLE.format("aws-cn", "123456789012")), "role", "error", "env.role_arn"),
    ((*S3, ROLE.format("aws-us-gov", "123456789012")), "role", "error", "env.role_arn"),
    ((*S3, ROLE.format("aws", "123456789012"), "env.region=cn-north-1"), "role", "error", "env.role_arn"),
    ((*S3, ROLE.format("aws", "999999999999")), "role", "error", "env.role_arn"),
    ((*S3, "env.kms_key_id=arn:aws-cn:kms:us-east-1:999999999999:key/1234abcd"), "region_of_keys_and_buckets",
     "error", "env.kms_key_id"),
    ((*S3, "capacity=reserved", f"capacity.training_plan_arn={PLAN_ARN.replace('1234', '9999')}"), "training_plan",
     "error", "capacity.training_plan_arn"),
    # channels
    *(((*case, f"data.channel={name}"), "channel_name", "error", "data.channel")
      for case in (S3, TINY) for name in ("code", "a/b", "..", ".", "a.b", "/abs", "x" * 65)),
    ((*S3, "target.network_isolation=true", "target.environment.HF_HOME=/tmp/x"), "network_isolation", "warning",
     "target.environment.HF_HOME"),
    # this machine
    ((*TINY, "data=local", "data.uri=/nowhere/at/all"), "local_shards", "error", "data.uri"),
    ((*TINY, "checkpoint.path=elsewhere"), "local_checkpoint_path", "error", "checkpoint.path"),
    ((*TINY, "checkpoint.storage=shared", "checkpoint.path=input/data/train/all"), "local_checkpoint_path", "error",
     "checkpoint.path"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "rule", "severity", "where"), CASES, ids=[f"{c[1]}-{c[0][-1]}" for c in CASES])
def test_a_mistake_is_found(overrides: tuple[str, ...], rule: str, severity: str, where: str) -> None:
    findings = [(f.id, f.severity, f.where) for f in checked(*overrides)]
    assert (f"offline.{rule}", severity, where) in findings


RIGHT: list[tuple[str, ...]] = [
    S3,
    SPOT_FSX,
    TINY,
    RESERVED,
    (*S3, fallback("ml.p5en.48xlarge")),
    (*S3, 'checkpoint.s3_uri="s3://ours/{run_id}/kept"'),
    (*S3, "train.num_steps=50", "capacity.max_run_hours=0.5"),
    (*S3, "env.kms_key_id=arn:aws:kms:us-east-1:999999999999:key/1234abcd"),
    (*S3, "data.channel=my-shards_2"),
]


@pytest.mark.parametrize("overrides", RIGHT, ids=[case[-1] for case in RIGHT])
def test_what_is_right_is_left_alone(overrides: tuple[str, ...]) -> None:
    assert [f for f in checked(*overrides) if f.severity != "info"] == []


SHORT = {"vocab_size": 512, "num_tokens": 0, "shards": []}


@pytest.mark.parametrize(
    "content",
    [None, "{", "{}", '{"vocab_size": 999999}', json.dumps(SHORT)],
    ids=["none", "damaged", "empty", "vocabulary", "no tokens"],
)
def test_check_says_of_shards_what_launch_refuses(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "dataset.json").write_text(content)
    made = plan(compose([*TINY, "data=local", f"data.uri={tmp_path}", "evaluation=none"]))
    refused = [line for line in LocalTarget().ready(made) if "not installed" not in line]
    errors = [f for f in run_checks(made, sdk.render(made)) if f.severity == "error"]
    assert len(refused) == len(errors) == 1
    assert errors[0].message in refused[0]
    assert errors[0].where in refused[0]


@pytest.mark.parametrize(("tokens", "warned"), [(2049, []), (2048, ["train.global_batch_size"])])
def test_a_batch_larger_than_the_corpus_is_a_warning(tmp_path: Path, tokens: int, warned: list[str]) -> None:
    """Eight samples of 256 tokens, and one label more."""
    (tmp_path / "dataset.json").write_text(json.dumps({"num_tokens": tokens}))
    made = plan(compose([*TINY, "data=local", f"data.uri={tmp_path}", "evaluation=none"]))
    findings = [f for f in run_checks(made, sdk.render(made)) if f.id == "offline.local_corpus_size"]
    assert [f.where for f in findings] == warned
    assert all(f.severity == "warning" for f in findings)


def test_no_message_repeats_the_value_or_key_in_front_of_it() -> None:
    findings = [f for _, plant, _, _ in SHAPE for f in found(SPOT_FSX, plant)]
    findings += [f for overrides, *_ in CASES for f in checked(*overrides)]
    for finding in findings:
        words = re.findall(r"[^\s:]+", finding.message)
        assert not any(one == two for one, two in itertools.pairwise(words)), finding.message
        assert not finding.message.startswith(finding.where), finding.message


OVERRIDE = re.compile(r"(?<![\w.\[/])([a-z_]+(?:\.\w+)*)=(\"[^\"]*\"|\[[^\]]*\]|[^\s,;]+)")


def fixes() -> set[str]:
    """Every KEY=VALUE that a finding of these cases, or any plain text of the rules, tells a person to type."""
    findings = [f for overrides, *_ in CASES for f in checked(*overrides)]
    findings += [f for case in RULES for f in found(case[1], case[2])]
    findings += found(
        S3, both(put("ResourceConfig", {"InstancePreferences": PREFERENCES}), put("EnableManagedSpotTraining", True))
    )
    texts = [finding.fix for finding in findings]
    for file in Path(checks.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in inside)
        texts += [node.value for node in constants if isinstance(node.value, str)]
    return {match.group(0) for text in texts for match in OVERRIDE.finditer(text)}


def test_what_a_fix_says_to_type_can_be_typed() -> None:
    """Each on top of a recipe that it fits; a rule about another key may still be broken by it."""
    typed = sorted(fixes())
    assert len(typed) > 12
    for text in typed:
        base = SPOT_FSX if text.startswith(("capacity.max_wait_hours", "capacity.kind")) else ("recipe=8b", *ACCOUNT)
        key = text.partition("=")[0]
        try:
            compose([*base, text])
        except ChimeraError as error:
            about = [p.key for p in error.problems] if isinstance(error, RecipeError) else [key]
            if any(other.startswith(key) for other in about):
                pytest.fail(f"{text}: {error}")


def test_the_fix_of_a_broken_job_length_mends_it() -> None:
    for overrides in (
        (*S3, "capacity.max_run_hours=0.01"),
        (*SPOT_FSX, "capacity.max_run_hours=0.01", "capacity.max_wait_hours=0.01"),
    ):
        (finding,) = [f for f in checked(*overrides) if f.id == "offline.job_length"]
        small = ["train.num_steps=5"]
        again = checked(*overrides, *finding.fix.removeprefix("set ").split(), *small)
        assert [f for f in again if f.id == "offline.job_length"] == []


def test_a_fix_of_the_run_id_names_one_prefix_a_run() -> None:
    (finding,) = [f for f in checked(*S3, "checkpoint.s3_uri=s3://ours/all") if f.id == "offline.checkpoint_prefix"]
    made = plan(compose([*S3, *shlex.split(finding.fix)]))
    request = json.loads(sdk.render(made, "a-run").files["create_training_job.json"])
    assert request["CheckpointConfig"]["S3Uri"] == "s3://ours/all/a-run"


def test_nothing_is_recorded_of_a_launch_that_checks_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for override in ("data.channel=code", "data.channel=a/b", "checkpoint.path=elsewhere"):
        with pytest.raises(ChimeraError):
            sdk.launch(plan(compose([*TINY, override])))
    assert not list(tmp_path.rglob("launch.lock"))
