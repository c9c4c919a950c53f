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
from chimera_sm.planner.coefficients import FILE as COEFFICIENTS

FILES = sorted(catalog.DATA.glob("*.csv"))


@pytest.mark.parametrize("path", [*FILES, COEFFICIENTS], ids=lambda path: path.stem)
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


def test_offered_tells_no_from_unknown() -> None:
    assert catalog.offered("ml.p5.48xlarge", "us-east-1") is True
    assert catalog.offered("ml.p4d.24xlarge", "eu-west-3") is False
    assert catalog.offered("ml.p6e-gb200.36xlarge", "us-east-1") is None
    assert catalog.offered("ml.p5.48xlarge", "us-gov-west-1") is None


def test_spot_buckets_are_those_with_a_rate() -> None:
    with COEFFICIENTS.open(encoding="utf-8") as file:
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
