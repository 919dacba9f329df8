"""Writes the all-reduce times that ship with the forecast from published measurements.

    python benchmarks/allreduce_tables.py --data FOLDER

reads FOLDER/allreduce_curves.csv and `allreduce_more.csv` beside this script (both with the columns
of `mgt check --save-curve`), gives each machine type its name and writes
src/multi_gpu_training/planning/forecast/allreduce.csv. Every row keeps its source.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE.parent / "src/multi_gpu_training/planning/forecast/allreduce.csv"
COLUMNS = ("hardware", "gpus", "nodes", "bytes", "time_us", "source")

# What the sources call their machines, and what we call them.
NAMES = {
    "V100": "v100-nvlink",
    "A100": "a100-nvlink",
    "A100 (ND A100 v4)": "a100-nvlink",
    "A100 NVSwitch": "a100-nvlink",
    "H100 (ND H100 v5)": "h100-nvlink",
    "H200 (ND H200 v5)": "h200-nvlink",
    "H200 NVSwitch": "h200-nvlink",
    "B200 NVSwitch": "b200-nvlink",
    "B200 NVSwitch + 8x400G EFA": "efa-8x400g",
    "4 nodes x 8 GPUs, ~100 GB/s/node class fabric": "fabric-100GBps",
    "V100 PCIe, no NVLink": "pcie-gen3",
    "DGX-1 + InfiniBand": "infiniband-4x100g",
    "8x200 Gb/s InfiniBand": "infiniband-8x200g",
    "p5.48xlarge H100 + 32 EFA": "efa-32x100g",
    "p3dn.24xlarge V100 + 100 Gb/s EFA": "ethernet-100g",
    "A10G, 10 Gb/s class network": "ethernet-10g",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="with allreduce_curves.csv")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    rows = []
    for path in (options.data / "allreduce_curves.csv", HERE / "allreduce_more.csv"):
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    unknown = sorted({row["hardware"] for row in rows} - set(NAMES))
    if unknown:
        raise SystemExit(f"no name for {', '.join(unknown)}: add it to NAMES")
    for row in rows:
        row["hardware"] = NAMES[row["hardware"]]
    rows.sort(
        key=lambda row: (
            row["hardware"],
            int(row["nodes"]),
            int(row["gpus"]),
            row["source"],
            int(row["bytes"]),
        )
    )
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{options.out}: {len(rows)} times of {len({row['hardware'] for row in rows})} machines")


if __name__ == "__main__":
    main()
