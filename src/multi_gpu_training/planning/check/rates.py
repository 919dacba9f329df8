"""How fast the network cards of this machine are, as the kernel says."""

from __future__ import annotations

from pathlib import Path


def network_gbps(classes: Path) -> float | None:
    """GB/s out of this machine: all InfiniBand cards together, else the fastest Ethernet card.

    `classes` is /sys/class; None where it does not say.
    """
    cards = [
        rate
        for card in sorted((classes / "infiniband").glob("*"))
        if (rate := _infiniband(card)) is not None
    ]
    if cards:
        return sum(cards)
    speeds = [
        speed
        for card in sorted((classes / "net").glob("*"))
        if card.name != "lo" and (speed := _number(card / "speed")) is not None
    ]
    return max(speeds) / 8000 if speeds else None  # the kernel counts in Mbit/s


def _infiniband(card: Path) -> float | None:
    """Of the ports that are up; `rate` reads like `400 Gb/sec (4X NDR)`."""
    found = []
    for port in sorted((card / "ports").glob("*")):
        try:
            if "ACTIVE" in (port / "state").read_text():
                found.append(float((port / "rate").read_text().split()[0]) / 8)
        except (OSError, ValueError, IndexError):
            continue
    return sum(found) if found else None


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value > 0 else None
