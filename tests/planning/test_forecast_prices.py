"""Prices come from the user and say where they are from."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.planning.forecast import (
    price_from_catalog,
    price_per_gpu,
    price_per_node,
)

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
    with pytest.raises(ConfigError, match="--price=0 is no price"):
        price_per_gpu(0)


def test_the_cheapest_offer_of_a_catalog_is_taken(tmp_path: Path) -> None:
    price = price_from_catalog(catalog(tmp_path), "h100")
    assert price.per_gpu_hour == pytest.approx(23.92 / 8) and price.gpus_billed_together == 8
    assert price.source == "vms.csv: gpu_8x_h100, us-east-1" and price.date == "2025-03-04"


def test_a_catalog_is_searched_by_count_region_and_spot(tmp_path: Path) -> None:
    path = catalog(tmp_path)
    assert price_from_catalog(path, "H100", gpus=1).per_gpu_hour == 3.29
    assert price_from_catalog(path, "H100", region="Europe").per_gpu_hour == 3.99
    spot = price_from_catalog(path, "H100", spot=True)
    assert spot.per_gpu_hour == 1.0 and "spot" in spot.source


def test_what_a_catalog_does_not_have_is_said(tmp_path: Path) -> None:
    path = catalog(tmp_path)
    with pytest.raises(ConfigError, match="no B200; it has A10, H100"):
        price_from_catalog(path, "B200")
    with pytest.raises(ConfigError, match="none with a price and 8 GPUs, asia"):
        price_from_catalog(path, "H100", gpus=8, region="asia")
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match="is no SkyPilot catalog: it lacks AcceleratorName"):
        price_from_catalog(tmp_path / "x.csv", "H100")
    with pytest.raises(ConfigError, match="no price catalog"):
        price_from_catalog(tmp_path / "none.csv", "H100")
