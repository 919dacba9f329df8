"""All-reduce times come from tables and measurements, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.planning.forecast import (
    Curve,
    Interconnect,
    measured,
    named,
    named_interconnects,
)
from multi_gpu_training.planning.forecast.interconnect import ABOUT, CURVE_COLUMNS

MB = 2**20


def curve_file(folder: Path, *lines: str) -> Path:
    path = folder / "mine.csv"
    path.write_text("\n".join([",".join(CURVE_COLUMNS), *lines]) + "\n")
    return path


def test_measured_sizes_are_given_back() -> None:
    # stas00/ml-engineering, 8 B200: 33554432 bytes in 180.14 us; vTrain, 2 V100: 1508.9 us.
    assert named("b200-nvlink").allreduce_s(33554432, 8) == pytest.approx(180.14e-6)
    assert named("v100-nvlink").allreduce_s(33554432, 2) == pytest.approx(1508.9e-6)


def test_several_sources_of_one_machine_are_averaged() -> None:
    a100 = named("a100-nvlink").allreduce_s(33554432, 8)
    assert 358e-6 < a100 < 424e-6  # vTrain 358.1, stas00 424.0


def test_busbw_of_a_default_bucket_is_far_below_peak() -> None:
    # About two thirds of the peak on A100, less than half on B200.
    for name, peak, most in (("a100-nvlink", 235e9, 0.7), ("b200-nvlink", 845e9, 0.45)):
        bandwidth = 25 * MB / named(name).allreduce_s(25 * MB, 8) * 2 * 7 / 8
        assert 0.25 * peak < bandwidth < most * peak, name


def test_between_sizes_it_is_interpolated_in_logarithms() -> None:
    made = Interconnect("made", "", (Curve(4, 1, (100, 10_000), (1.0, 9.0), "up"),))
    assert made.allreduce_s(1000, 4) == pytest.approx(3.0)
    assert made.allreduce_s(10, 4) == pytest.approx(1.0)
    assert made.allreduce_s(40_000, 4) == pytest.approx(36.0)


def test_beyond_the_table_latency_grows_as_a_tree_and_bandwidth_as_a_ring() -> None:
    made = Interconnect("made", "", (Curve(16, 2, (1, 1000), (1.0, 11.0), "up"),))
    tree, ring = 10 / 4, (1023 / 1024) / (15 / 16)
    assert made.allreduce_s(1000, 1024, 128) == pytest.approx(1.0 * tree + 10.0 * ring)
    assert made.extrapolated(1024, 128) and not made.extrapolated(16, 2)


@pytest.mark.parametrize("name", ABOUT)
def test_larger_messages_and_groups_never_take_less(name: str) -> None:
    interconnect = named(name)
    nodes = 2 if interconnect.kind == "network" else 1
    gpus = interconnect.curves[0].gpus
    times = [interconnect.allreduce_s(2**power, gpus, nodes) for power in range(8, 35)]
    assert times == sorted(times) and times[0] > 0
    if nodes > 1:
        more = [interconnect.allreduce_s(25 * MB, 8 * n, n) for n in (2, 4, 16, 128)]
        assert more == sorted(more)
    assert interconnect.source and interconnect.allreduce_s(MB, 1) == 0


def test_every_kind_of_machine_is_listed() -> None:
    names = {each.name: each.kind for each in named_interconnects()}
    for name in ("v100", "a100", "h100", "h200", "b200"):
        assert names[f"{name}-nvlink"] == "node"
    for start in ("pcie", "infiniband", "ethernet"):
        assert any(name.startswith(start) for name in names)


def test_a_node_type_and_a_network_are_joined() -> None:
    both = named("a100-nvlink+infiniband-8x200g")
    assert both.kind == "node and network"
    assert both.allreduce_s(25 * MB, 8) == named("a100-nvlink").allreduce_s(25 * MB, 8)
    network = named("infiniband-8x200g")
    assert both.allreduce_s(25 * MB, 64, 8) == network.allreduce_s(25 * MB, 64, 8)


def test_without_table_or_measurement_it_refuses() -> None:
    with pytest.raises(ConfigError, match=r"16 GPUs on 2 nodes .* h100-nvlink\+infiniband"):
        named("h100-nvlink").allreduce_s(MB, 16, 2)
    with pytest.raises(ConfigError, match=r"measured only across nodes.*a node type"):
        named("ethernet-10g").allreduce_s(MB, 8, 1)
    with pytest.raises(ConfigError, match=r"no all-reduce times for 'tpu'; there are v100-nvlink"):
        named("tpu")


def test_your_own_curve_is_used_as_measured(tmp_path: Path) -> None:
    path = curve_file(
        tmp_path,
        "here,mgt check,2x RTX,2,1,1048576,100,",
        "here,mgt check,2x RTX,2,1,4194304,400,",
        "here,mgt check,2x RTX,1,1,4194304,1,",
    )
    mine = measured(path)
    assert mine.name == "mine" and len(mine.curves) == 1
    assert mine.allreduce_s(2 * MB, 2) == pytest.approx(200e-6)


def test_a_curve_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no all-reduce curve at"):
        measured(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="lacks the columns gpus, nodes, bytes, time_us"):
        measured(tmp_path / "other.csv")
    with pytest.raises(ConfigError, match="no time of two or more GPUs"):
        measured(curve_file(tmp_path, "x,y,z,1,1,1024,5,"))
    with pytest.raises(ConfigError, match=r"line 3: .*'-5'"):
        measured(curve_file(tmp_path, "x,y,z,2,1,1024,5,", "x,y,z,2,1,2048,-5,"))


def test_slow_nodes_are_no_faster_together_than_one_of_them() -> None:
    """The network's times are of nodes with NVLink: PCIe inside is slower than that."""
    slow, network = named("pcie-gen3"), named("infiniband-8x200g")
    both = named("pcie-gen3+infiniband-8x200g")
    for size in (4096, MB, 25 * MB, 400 * MB):
        within = slow.allreduce_s(size, 8)
        for nodes in (2, 4, 128):
            across = network.allreduce_s(size, 8 * nodes, nodes)
            assert both.allreduce_s(size, 8 * nodes, nodes) == max(within, across)
    assert both.allreduce_s(25 * MB, 16, 2) == slow.allreduce_s(25 * MB, 8)
    # Nodes of one GPU have nothing inside.
    assert both.allreduce_s(MB, 2, 2) == network.allreduce_s(MB, 2, 2)
    assert both.extrapolated(16, 2)  # four GPUs on PCIe were measured, not eight
    assert not both.extrapolated(8, 2)
