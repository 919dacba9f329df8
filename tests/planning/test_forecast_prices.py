"""Prices come from the user and say where they are from."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.planning.forecast import (
    Price,
    price_per_gpu,
    price_per_node,
    prices_from_catalog,
)
from multi_gpu_training.planning.forecast.cost import cheapest

# The columns of SkyPilot's catalogs, e.g. its catalogs/v6/lambda/vms.csv.
CATALOG = """\
InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,Price,SpotPrice
gpu_1x_h100,26,225,H100,1,,us-east-1,3.29,
gpu_8x_h100,208,1800,H100,8,,us-east-1,23.92,8.0
gpu_8x_h100,208,1800,H100,8,,europe,31.92,
gpu_1x_a10,30,200,A10,1,,us-east-1,0.75,
cpu_4x,4,16,,,,us-east-1,0.2,
"""


def catalog(folder: Path) -> Path:
    path = folder / "vms.csv"
    path.write_text(CATALOG)
    day = datetime.datetime(2025, 3, 4, 12).timestamp()
    os.utime(path, (day, day))
    return path


def test_a_price_says_where_it_is_from_and_of_which_day() -> None:
    price = price_per_gpu(3.99)
    assert price.source == "--price" and price.date == datetime.date.today().isoformat()
    node = price_per_node(32, 8, source="offer", date="2025-01-01")
    assert (node.per_gpu_hour, node.gpus_billed_together) == (4, 8)
    with pytest.raises(ConfigError, match="--price=0 is not a price"):
        price_per_gpu(0)


def one(found: tuple[Price, ...]) -> Price:
    (price,) = found
    return price


def test_a_catalog_gives_the_cheapest_of_each_size(tmp_path: Path) -> None:
    single, eight = prices_from_catalog(catalog(tmp_path), "h100")
    assert (single.per_gpu_hour, single.gpus_billed_together) == (3.29, 1)
    assert eight.per_gpu_hour == pytest.approx(23.92 / 8) and eight.gpus_billed_together == 8
    assert eight.source == "vms.csv: gpu_8x_h100, us-east-1" and eight.date == "2025-03-04"


def test_a_row_is_paid_with_the_cheapest_that_holds_its_node() -> None:
    single = Price(7.50, "gpu_1x", "2025-03-04", instance="gpu_1x")
    eight = Price(6.88, "p5", "2025-03-04", gpus_billed_together=8, instance="p5")
    offers = (single, eight)
    assert cheapest(offers, 1, 1) is single  # 7.50 an hour, not 55.04 for eight
    assert cheapest(offers, 2, 1) is eight  # two that share a node are not two instances
    assert cheapest(offers, 2, 2) is single
    assert cheapest(offers, 16, 2) is eight
    assert cheapest((single,), 8, 1) is single  # there is nothing else
    assert cheapest((), 8, 1) is None
    assert (single.hourly(2), eight.hourly(1), eight.hourly(9)) == pytest.approx(
        (15.0, 55.04, 110.08)
    )


def test_a_count_of_gpus_that_is_no_number_is_no_offer(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(
        "InstanceType,AcceleratorName,AcceleratorCount,Price\nodd,A100,nan,3\nendless,A100,inf,3\n"
        "p4d,A100,8,32.77\n"
    )
    assert one(prices_from_catalog(path, "A100")).instance == "p4d"
    with pytest.raises(ConfigError, match="odd, but none with a price and a count of GPUs"):
        prices_from_catalog(path, instance="odd")


def test_a_catalog_is_searched_by_count_region_and_spot(tmp_path: Path) -> None:
    path = catalog(tmp_path)
    assert one(prices_from_catalog(path, "H100", gpus=1)).per_gpu_hour == 3.29
    assert one(prices_from_catalog(path, "H100", region="Europe")).per_gpu_hour == 3.99
    spot = one(prices_from_catalog(path, "H100", spot=True))
    assert spot.per_gpu_hour == 1.0 and spot.source == "vms.csv: spot, gpu_8x_h100, us-east-1"


def test_what_a_catalog_does_not_have_is_said(tmp_path: Path) -> None:
    path = catalog(tmp_path)
    with pytest.raises(ConfigError, match="no B200; it has A10, H100"):
        prices_from_catalog(path, "B200")
    with pytest.raises(ConfigError, match="none with a price and 8 GPUs, asia"):
        prices_from_catalog(path, "H100", gpus=8, region="asia")
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match="is not a SkyPilot catalog: it lacks AcceleratorName"):
        prices_from_catalog(tmp_path / "x.csv", "H100")
    with pytest.raises(ConfigError, match="no price catalog"):
        prices_from_catalog(tmp_path / "none.csv", "H100")
