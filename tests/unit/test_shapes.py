"""The shape walker against planted values, and against botocore's own validator on random mutations."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel as BotoModel
from botocore.validate import ParamValidator
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera_sm.aws.shapes import Violation, service_model

REQUEST: dict[str, Any] = {
    "TrainingJobName": "run-1",
    "RoleArn": "arn:aws:iam::123456789012:role/train",
    "AlgorithmSpecification": {
        "TrainingImage": "image",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["python3"],
        "MetricDefinitions": [{"Name": "loss", "Regex": "loss=(.*)"}],
    },
    "InputDataConfig": [
        {
            "ChannelName": "code",
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/p/"}},
            "InputMode": "FastFile",
        }
    ],
    "OutputDataConfig": {"S3OutputPath": "s3://b/out"},
    "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2, "VolumeSizeInGB": 1},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxPendingTimeInSeconds": 7200},
    "EnableManagedSpotTraining": False,
    "Environment": {"A_1": "x"},
    "Tags": [{"Key": "Zürich 3/é", "Value": "ok"}],
    "RetryStrategy": {"MaximumRetryAttempts": 3},
}
BOTO_SHAPE = BotoModel(Loader().load_service_model("sagemaker", "service-2")).shape_for("CreateTrainingJobRequest")


def violations(request: Any) -> list[Violation]:
    return service_model("sagemaker").validate("CreateTrainingJob", request)


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    request = copy.deepcopy(REQUEST)
    at: Any = request
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return request


def test_a_valid_request_has_no_violation() -> None:
    assert violations(REQUEST) == []


@pytest.mark.parametrize(
    ("path", "value", "rule", "where"),
    [
        (["TrainingJobName"], "a_b", "pattern", "TrainingJobName"),
        (["TrainingJobName"], "a\n", "pattern", "TrainingJobName"),
        (["TrainingJobName"], "", "min", "TrainingJobName"),
        (["TrainingJobName"], "a" * 64, "max", "TrainingJobName"),
        (["TrainingJobName"], 7, "type", "TrainingJobName"),
        (["RoleArn"], "arn:aws:iam::12:role/train", "pattern", "RoleArn"),
        (["ResourceConfig", "InstanceType"], "ml.p5.47xlarge", "enum", "ResourceConfig.InstanceType"),
        (["ResourceConfig", "InstanceCount"], -1, "min", "ResourceConfig.InstanceCount"),
        (["ResourceConfig", "InstanceCount"], True, "type", "ResourceConfig.InstanceCount"),
        (["ResourceConfig", "InstanceCount"], 2.0, "type", "ResourceConfig.InstanceCount"),
        (["ResourceConfig", "KeepAlivePeriodInSeconds"], 999_999, "max", "ResourceConfig.KeepAlivePeriodInSeconds"),
        (["ResourceConfig", "InstanceTypo"], "x", "unknown", "ResourceConfig.InstanceTypo"),
        (["StoppingCondition", "MaxPendingTimeInSeconds"], 60, "min", "StoppingCondition.MaxPendingTimeInSeconds"),
        (["Environment", "A_1"], "v" * 513, "max", "Environment.A_1"),
        (["Environment", "1A"], "v", "pattern", "Environment.1A (key)"),
        (["Tags", 0, "Key"], "a#b", "pattern", "Tags[0].Key"),
        (["Tags", 0, "Key"], "a\tb", "pattern", "Tags[0].Key"),
        (["Tags"], [{"Key": str(i), "Value": ""} for i in range(51)], "max", "Tags"),
        (["Tags", 0], {"Key": "a"}, "required", "Tags[0].Value"),
        (["InputDataConfig"], [], "min", "InputDataConfig"),
        (["InputDataConfig", 0, "DataSource"], None, "type", "InputDataConfig[0].DataSource"),
        (["InputDataConfig", 0, "InputMode"], "fastfile", "enum", "InputDataConfig[0].InputMode"),
        (["HyperParameters"], {"k": "v" * 2501}, "max", "HyperParameters.k"),
        (["HyperParameters"], {"k": "a\nb"}, "pattern", "HyperParameters.k"),
        (["HyperParameters"], {str(i): "" for i in range(101)}, "max", "HyperParameters"),
        (["EnableManagedSpotTraining"], "true", "type", "EnableManagedSpotTraining"),
        (["RetryStrategy"], {}, "required", "RetryStrategy.MaximumRetryAttempts"),
    ],
)
def test_a_planted_value_is_found_with_its_path_and_rule(path: list[Any], value: Any, rule: str, where: str) -> None:
    assert (where, rule) in [(v.path, v.rule) for v in violations(changed(path, value))]


def test_hints_name_the_nearest() -> None:
    (enum,) = violations(changed(["ResourceConfig", "InstanceType"], "ml.p5.48xlrage"))
    assert enum.fix == "did you mean ml.p5.48xlarge?"
    (unknown,) = violations(changed(["ResourceConfig", "InstanceTypes"], "x"))
    assert unknown.fix == "did you mean InstanceType?"


def test_enums_are_botocores() -> None:
    ours = service_model("sagemaker").enum("TrainingInstanceType")
    assert (
        list(ours)
        == BotoModel(Loader().load_service_model("sagemaker", "service-2")).shape_for("TrainingInstanceType").enum
    )


def test_other_services() -> None:
    (found,) = service_model("fsx").validate("DescribeFileSystems", {"FileSystemIds": ["fs-0123456789"], "x": 1})
    assert (found.path, found.rule) == ("x", "unknown")


def test_a_union_takes_exactly_one_member() -> None:
    model = service_model("sagemaker")
    name = next(n for n, shape in model.shapes.items() if shape.get("union") and len(shape["members"]) > 1)
    two = dict.fromkeys(list(model.shapes[name]["members"])[:2])
    for value in ({}, two):
        assert "union" in [v.rule for v in model.validate_shape(name, value)]


def test_the_model_is_read_without_importing_botocore() -> None:
    code = (
        "import sys; from chimera_sm.aws.shapes import service_model; "
        "service_model('sagemaker').validate('CreateTrainingJob', {}); "
        "print([m for m in ('botocore', 'boto3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- against botocore -------------------------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.lists(st.text(max_size=2), max_size=2),
    st.dictionaries(st.sampled_from(["Key", "Value", "S3Uri", "junk"]), st.text(max_size=2), max_size=2),
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] * bool(at) + [p for key, item in items for p in paths(item, (*at, key))]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    request = copy.deepcopy(REQUEST)
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(paths(request)))
        at: Any = request
        for step in path[:-1]:
            at = at[step]
        action = draw(st.sampled_from(["replace", "delete", "add"]))
        if action == "delete":
            del at[path[-1]]
        elif action == "add" and isinstance(at, dict):
            at[draw(st.sampled_from(["Junk", "VpcConfig", "Key", "A_2", "CheckpointConfig"]))] = draw(JUNK)
        else:
            at[path[-1]] = draw(JUNK)
        if not request:
            break
    return request


def botocores(request: Any) -> set[tuple[str, str]]:
    kinds = {
        "missing required field": "required",
        "unknown field": "unknown",
        "invalid type": "type",
        "invalid range": "min",
        "invalid length": "min",
    }
    found = set()
    for reason, name, extra in ParamValidator().validate(request, BOTO_SHAPE)._errors:
        member = extra.get("required_name") or extra.get("unknown_param")
        path = f"{name}.{member}" if member else name
        found.add((path.removeprefix("."), kinds[reason]))
    return found


def has_bool_for_number(request: Any) -> bool:
    """botocore takes True for an integer, and compares it with the minimum; for AWS it is of a wrong type."""
    return any(
        isinstance(value, bool)
        for path in paths(request)
        if path[-1] != "EnableManagedSpotTraining"
        for value in [_at(request, path)]
    )


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


@settings(max_examples=300, deadline=None)
@given(mutated())
def test_types_required_unknown_and_minima_agree_with_botocore(request: dict[str, Any]) -> None:
    ours = {
        (v.path, v.rule)
        for v in violations(request)
        if v.rule in ("required", "unknown", "type", "min") and not v.path.endswith("(key)")
    }
    theirs = botocores(request)
    if has_bool_for_number(request):
        assert {path for path, _ in theirs} <= {path for path, _ in ours}
    else:
        assert ours == theirs
