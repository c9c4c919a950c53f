"""The catalogue's files and look-ups."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from chimera_sm import catalog
from chimera_sm.paths import recipes_dir
from chimera_sm.planner.tables import DATA as PLANNER_DATA

FILES = sorted(catalog.DATA.glob("*.csv"))


@pytest.mark.parametrize(
    "path", [*FILES, PLANNER_DATA / "coefficients.csv", PLANNER_DATA / "fleets.csv"], ids=lambda path: path.stem
)
def test_every_row_has_a_source_and_a_date(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for number, row in enumerate(rows, start=2):
        assert row["source"], f"{path.name}:{number}"
        assert row["date"], f"{path.name}:{number}"
        assert None not in row, f"{path.name}:{number} has too many cells"
        assert None not in row.values(), f"{path.name}:{number} has too few cells"


@pytest.mark.parametrize("path", sorted((recipes_dir() / "instances").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_choice_of_instances_is_known(path: Path) -> None:
    kind = yaml.safe_load(path.read_text())["type"]
    if kind != "local":
        assert catalog.instance(kind).training


def test_training_flag_agrees_with_botocore() -> None:
    import botocore.session

    model = botocore.session.Session().get_service_model("sagemaker")
    enum = set(model.shape_for("TrainingInstanceType").enum)
    for name in catalog.instance_types():
        assert catalog.instance(name).training == (name in enum), name


def test_regions_cover_those_of_botocore() -> None:
    import botocore.session

    session = botocore.session.Session()
    offered = {
        name
        for partition in ("aws", "aws-cn", "aws-us-gov")
        for name in session.get_available_regions("sagemaker", partition)
    }
    assert offered <= set(catalog.regions())


def test_instance_has_the_published_figures() -> None:
    p4d = catalog.instance("ml.p4d.24xlarge")
    assert (p4d.accelerators, p4d.accelerator_memory_gib, p4d.bf16_tflops) == (8, 40.0, 312.0)
    assert (p4d.efa_interfaces, p4d.network_gbps, p4d.nvme_gb) == (4, 400.0, 8000.0)
    assert catalog.instance("ml.p5en.48xlarge").family == "h100"
    assert not catalog.instance("ml.g5.12xlarge").switched_link


@pytest.mark.parametrize(
    ("value", "nearest"), [("ml.p4d.24xlrge", "ml.p4d.24xlarge"), ("p5.48xlarge", "ml.p5.48xlarge"), ("quantum", None)]
)
def test_unknown_instance_names_the_nearest(value: str, nearest: str | None) -> None:
    with pytest.raises(catalog.UnknownInstance, match=value) as caught:
        catalog.instance(value)
    assert caught.value.nearest == nearest


def test_unknown_region_names_the_nearest() -> None:
    for look_up in (
        lambda: catalog.price("ml.p5.48xlarge", "us-eats-1"),
        lambda: catalog.offered("ml.p5.48xlarge", "us-eats-1"),
        lambda: catalog.spot_bucket("ml.p5.48xlarge", "us-eats-1"),
        lambda: catalog.training_image("us-eats-1", "2.13"),
    ):
        with pytest.raises(catalog.UnknownRegion, match="us-east-1"):
            look_up()


def test_price_is_the_published_one_and_says_from_where() -> None:
    price = catalog.price("ml.p5.48xlarge", "us-west-2")
    assert price.on_demand_usd_h == 63.296
    assert price.on_demand_date
    assert price.spot_usd_h is not None
    assert price.spot_usd_h < price.on_demand_usd_h


def test_unknown_price_is_none_and_says_why() -> None:
    no_row = catalog.price("ml.p4d.24xlarge", "sa-east-1")
    no_premium = catalog.price("ml.trn1.32xlarge", "us-east-1")
    for price in (no_row, no_premium):
        assert price.on_demand_usd_h is None
        assert price.on_demand_basis.startswith("unknown")


def test_prices_are_positive_and_spot_is_no_dearer_than_on_demand() -> None:
    for row in csv.DictReader((catalog.DATA / "prices.csv").open(encoding="utf-8")):
        for column in ("on_demand_usd_h", "spot_low_usd_h", "spot_usd_h", "training_plan_usd_h"):
            assert row[column] == "" or float(row[column]) > 0
        if row["spot_usd_h"]:
            assert float(row["spot_low_usd_h"]) <= float(row["spot_usd_h"]) <= float(row["on_demand_usd_h"])


def test_services_have_the_observed_rates() -> None:
    def usd_h(service: catalog.Service, kind: catalog.RateKind, type: str = "ml.p5.48xlarge") -> float | None:
        return catalog.rate(type, "us-east-1", service, kind).usd_h

    assert usd_h("ec2", "on_demand") == 55.04
    assert usd_h("training_job", "on_demand") == 63.296
    assert usd_h("hyperpod", "on_demand") == 66.048
    assert usd_h("hyperpod", "reserved") == 45.7675
    assert usd_h("ec2", "spot") < usd_h("training_job", "spot") < usd_h("ec2", "on_demand")
    assert usd_h("ec2", "capacity_block", "ml.p5en.48xlarge") == 41.61


def test_hyperpods_premium_stands_in_where_no_price_was_seen() -> None:
    derived = catalog.rate("ml.p5.48xlarge", "eu-north-1", "hyperpod", "on_demand")
    assert derived.usd_h == pytest.approx(58.8928 * 1.2, abs=1e-4)
    assert "EC2 on-demand 58.8928 (skypilot-catalog v9) x 1.2 HyperPod premium, observed" in derived.source
    for type in ("ml.p4de.24xlarge", "ml.p6-b200.48xlarge", "ml.trn1.32xlarge", "ml.p5.4xlarge"):
        unknown = catalog.rate(type, "us-east-1", "hyperpod", "on_demand")
        assert unknown.usd_h is None
        assert unknown.basis.startswith("unknown")


def test_a_training_job_costs_ec2_times_its_premium() -> None:
    compared = 0
    for row in csv.DictReader((catalog.DATA / "prices.csv").open(encoding="utf-8")):
        ec2 = catalog.rate(row["type"], row["region"], "ec2", "on_demand").usd_h
        factor = catalog.premium(row["type"], "training_job")
        if ec2 is None or factor is None:
            assert not row["on_demand_usd_h"]
            continue
        assert float(row["on_demand_usd_h"]) == pytest.approx(ec2 * factor[0], rel=1e-3), row["type"]
        compared += 1
    assert compared > 100


def test_every_service_answers_for_every_type_and_says_why_it_does_not_know() -> None:
    for service, kinds in catalog.SOLD.items():
        for kind in kinds:
            for type in catalog.instance_types():
                for region in ("us-east-1", "sa-east-1", "cn-north-1"):
                    found = catalog.rate(type, region, service, kind)
                    assert (found.service, found.kind) == (service, kind)
                    assert found.usd_h is None or found.usd_h > 0
                    assert (found.usd_h is None) == found.basis.startswith("unknown"), found
                    assert found.date or found.usd_h is None
    with pytest.raises(KeyError, match="ec2 sells no reserved"):
        catalog.rate("ml.p5.48xlarge", "us-east-1", "ec2", "reserved")


def test_rates_are_positive_and_spot_is_no_dearer_than_on_demand() -> None:
    for row in csv.DictReader((catalog.DATA / "rates.csv").open(encoding="utf-8")):
        assert row["usd_h"] == "" or float(row["usd_h"]) > 0
        assert (row["type"], row["region"]) == ("*", "*") or catalog.instance(row["type"])
        on_demand = catalog.rate(row["type"], row["region"], "ec2", "on_demand").usd_h if row["type"] != "*" else None
        if row["kind"] == "spot" and row["usd_h"] and on_demand is not None:
            assert float(row["low_usd_h"]) <= float(row["usd_h"]) <= on_demand


def test_storage_and_transfer_have_their_prices() -> None:
    assert catalog.fsx_price("PERSISTENT_2-250", "us-west-2").usd == 0.21
    assert catalog.s3_price("us-east-1").usd == 0.023
    assert catalog.transfer_price("us-east-1", "us-west-2").usd == 0.02
    assert catalog.transfer_price("us-east-1", "us-east-2").usd == 0.01
    assert catalog.transfer_price("af-south-1", "us-east-1").usd == 0.147
    assert catalog.transfer_price("us-west-2", "us-west-2").usd == 0
    for unknown in (
        catalog.fsx_price("PERSISTENT_2-250", "eu-west-1"),
        catalog.s3_price("eu-west-1"),
        catalog.transfer_price("cn-north-1", "us-east-1"),
    ):
        assert unknown.usd is None
        assert unknown.basis.startswith("unknown")
    with pytest.raises(catalog.UnknownTier, match="PERSISTENT_2-250"):
        catalog.fsx_price("PERSISTENT_2_250", "us-east-1")


def test_offered_tells_no_from_unknown() -> None:
    assert catalog.offered("ml.p5.48xlarge", "us-east-1") is True
    assert catalog.offered("ml.p4d.24xlarge", "eu-west-3") is False
    assert catalog.offered("ml.p6e-gb200.36xlarge", "us-east-1") is None
    assert catalog.offered("ml.p5.48xlarge", "us-gov-west-1") is None


def test_spot_buckets_are_those_with_a_rate() -> None:
    with (PLANNER_DATA / "coefficients.csv").open(encoding="utf-8") as file:
        known = {row["scope"] for row in csv.DictReader(file) if row["name"] == "spot_monthly_share"}
    buckets = {row["bucket"] for row in csv.DictReader((catalog.DATA / "spot.csv").open(encoding="utf-8"))}
    assert buckets == known
    assert catalog.spot_bucket("ml.p4d.24xlarge", "us-east-1") == "10-15%"
    assert catalog.spot_bucket("ml.p5.48xlarge", "af-south-1") is None


def test_training_image_uris() -> None:
    east = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker"
    assert catalog.training_image("us-east-1", "2.13", "gpu") == east
    china = "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:2.12-cpu-amzn2023-sagemaker"
    assert catalog.training_image("cn-north-1", "2.12", "cpu") == china


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("us-east-1", "2.10", "gpu"), "2.11, 2.12, 2.13, 2.14"),
        (("us-gov-west-1", "2.14", "gpu"), "aws-us-gov"),
        (("us-east-1", "2.13", "trainium"), "target.image"),
    ],
)
def test_a_missing_image_says_what_to_do(arguments: tuple[str, str, str], word: str) -> None:
    with pytest.raises(catalog.NoImage, match=word):
        catalog.training_image(*arguments)  # type: ignore[arg-type]


def test_every_shipped_image_matches_the_field_of_the_request() -> None:
    for region in catalog.regions():
        uri = catalog.training_image(region, "2.13", "gpu")
        assert len(uri) <= 255
        assert " " not in uri


def test_version_is_of_the_content() -> None:
    assert catalog.catalog_version() == catalog.CATALOG_VERSION
    assert len(catalog.CATALOG_VERSION) == 12


def test_first_look_up_reads_one_file_quickly() -> None:
    script = (
        "import time; from chimera_sm import catalog; from chimera_sm.catalog import tables; t = time.process_time();"
        "catalog.instance('ml.p5.48xlarge');"
        "print(time.process_time() - t, tables.rows.cache_info().currsize)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert float(out[0]) < 0.05
    assert out[1] == "1"


def test_cached_look_ups_take_no_time() -> None:
    catalog.price("ml.p5.48xlarge", "us-east-1")
    start = time.process_time()
    for _ in range(1000):
        catalog.price("ml.p5.48xlarge", "us-east-1")
    assert time.process_time() - start < 0.5


def test_every_gpu_has_a_compute_capability() -> None:
    with (catalog.DATA / "instances.csv").open(newline="", encoding="utf-8") as file:
        types = [row["type"] for row in csv.DictReader(file)]
    for found in map(catalog.instance, types):
        assert (found.compute_capability is None) == found.is_trainium
