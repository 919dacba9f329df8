"""How often noise alone would choose a setting in `mgt bench --tune`, by the rule that is asked.

    python benchmarks/tuning_noise.py

No training: times are drawn. All candidates are as fast as the config; each search draws 6 times of
the config and 3 of each of 6 candidates. The last lines give how often a setting that is faster is
found.
"""

from __future__ import annotations

import argparse
import random
from statistics import median

from multi_gpu_training.planning.bench.tuning import beats

CANDIDATES, ROUNDS = 6, 3


def times(source: random.Random, count: int, noise: float, scale: float = 1.0) -> list[float]:
    return [scale * (1 + noise * source.random()) for _ in range(count)]


def chosen_by_noise(source: random.Random, searches: int, noise: float) -> dict[str, float]:
    """Share of searches in which each rule names a winner."""
    found = {"a faster median": 0, "faster in every round": 0}
    found |= {"... by more than the spread": 0, "... and once more": 0}
    for _ in range(searches):
        base = times(source, 2 * ROUNDS, noise)
        tried = [times(source, ROUNDS, noise) for _ in range(CANDIDATES)]
        found["a faster median"] += any(median(t) < median(base) for t in tried)
        found["faster in every round"] += any(max(t) < min(base) for t in tried)
        if any(beats(t, base) for t in tried):
            found["... by more than the spread"] += 1
            again, fresh = times(source, ROUNDS, noise), times(source, ROUNDS, noise)
            found["... and once more"] += beats(again, fresh)
    return {rule: count / searches for rule, count in found.items()}


def found_if_faster(source: random.Random, searches: int, gain: float, noise: float) -> float:
    def round_of(base: int) -> bool:
        return beats(times(source, ROUNDS, noise, 1 - gain), times(source, base, noise))

    return sum(round_of(2 * ROUNDS) and round_of(ROUNDS) for _ in range(searches)) / searches


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--searches", type=int, default=20_000)
    parser.add_argument("--noise", type=float, default=0.3, help="largest share added to a time")
    options = parser.parse_args()
    source = random.Random(0)
    print("| rule | searches in which noise chooses |\n|---|---|")
    for rule, share in chosen_by_noise(source, options.searches, options.noise).items():
        print(f"| {rule} | {share:.2%} |")
    print("\n| faster by | noise | found |\n|---|---|---|")
    for gain, noise in ((0.05, 0.02), (0.1, 0.05), (0.1, 0.1), (0.2, 0.1), (0.2, 0.3)):
        share = found_if_faster(source, options.searches // 5, gain, noise)
        print(f"| {gain:.0%} | {noise:.0%} | {share:.0%} |")


if __name__ == "__main__":
    main()
