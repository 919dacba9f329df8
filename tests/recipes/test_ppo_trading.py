"""Trading: prices that are read and checked, books that add up, a test that was never seen."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.ppo import indicators
from multi_gpu_training.recipes.ppo.environment import take_environments
from multi_gpu_training.recipes.ppo.market import generate_market, read_market
from multi_gpu_training.recipes.ppo.policy import CLSTMPolicy
from multi_gpu_training.recipes.ppo.trading import (
    WARMUP_DAYS,
    Rules,
    Tables,
    TradingEnvironments,
    prepare,
)
from multi_gpu_training.recipes.ppo.trading_evaluation import (
    Performance,
    TradingTest,
    buy_and_hold,
    trade,
)

HEAD = "Date,Open,High,Low,Close,Volume"


def write(path: Path, rows: list[str], head: str = HEAD) -> Path:
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def days(count: int, close: float = 10.0) -> list[str]:
    """Working days of 2024 with prices around `close`."""
    found = []
    day = np.datetime64("2024-01-01")
    while len(found) < count:
        if np.is_busday(day):
            price = close + 0.1 * (len(found) % 7)
            found.append(f"{day},{price},{price + 1},{price - 1},{price},1000")
        day += np.timedelta64(1, "D")
    return found


# Reading


def test_files_of_a_folder_are_read_on_their_common_days(tmp_path: Path) -> None:
    write(tmp_path / "AAA.csv", days(30))
    write(tmp_path / "BBB.csv", days(40, close=50)[10:])
    market = read_market(str(tmp_path))
    assert market.symbols == ["AAA", "BBB"]
    assert market.close.shape == (20, 2)
    assert market.days[0] == days(11)[10][:10]
    assert market.close[0].tolist() == pytest.approx([10.3, 50.3])
    assert market.high[0].tolist() == pytest.approx([11.3, 51.3])
    assert "BBB begins last, AAA ends first" in market.describe()


def test_one_packed_file_may_hold_several_assets_and_splits_are_taken_out(tmp_path: Path) -> None:
    rows = [f"{s},{row},{float(row.split(',')[4]) / 2}" for s in ("A", "B") for row in days(5)]
    path = tmp_path / "stocks.csv.gz"
    text = "\n".join(["Ticker,Date,Open,High,Low,Close,Volume,Adj Close", *rows])
    path.write_bytes(gzip.compress(text.encode()))
    market = read_market(str(path), ["B"])
    assert market.symbols == ["B"]
    assert market.close[:, 0].tolist() == pytest.approx([5.0, 5.05, 5.1, 5.15, 5.2])
    assert market.low[0, 0] == pytest.approx(4.5)


def swap(rows: list[str], line: int, column: int, value: str) -> list[str]:
    parts = rows[line].split(",")
    parts[column] = value
    return [*rows[:line], ",".join(parts), *rows[line + 1 :]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (swap(days(9), 4, 4, "NaN"), ["line 6", "close", "NaN"]),
        (swap(days(9), 4, 1, ""), ["line 6", "open", "empty"]),
        (swap(days(9), 2, 4, "-3"), ["line 4", "close", "above 0"]),
        (swap(days(9), 2, 2, "1"), ["line 4", "high 1 is below low"]),
        (swap(days(9), 3, 0, "soon"), ["line 5", "soon", "not a date"]),
        ([*days(9)[4:], *days(9)[:4]], ["sort the rows"]),
        ([*days(9)[:3], days(9)[2]], ["twice"]),
        ([*days(40)[:3], *days(40)[20:]], ["gap of", "days"]),
        ([*days(3), "2024-02-01,1,2"], ["line 5", "3 values for 6 columns"]),
        ([], ["no row"]),
    ],
    ids=[
        "nan",
        "empty",
        "negative",
        "high below low",
        "not a date",
        "unsorted",
        "twice",
        "gap",
        "short line",
        "no row",
    ],
)
def test_bad_prices_are_named_with_their_place(
    tmp_path: Path, rows: list[str], words: list[str]
) -> None:
    path = write(tmp_path / "BAD.csv", rows)
    with pytest.raises(DataError) as caught:
        read_market(str(path))
    for word in ["BAD", *words]:
        assert word in str(caught.value)


def test_a_day_that_one_asset_lacks_is_a_gap(tmp_path: Path) -> None:
    write(tmp_path / "AAA.csv", days(20))
    write(tmp_path / "BBB.csv", [*days(20)[:5], *days(20)[6:]])
    with pytest.raises(DataError, match=r"BBB lacks 1 days .*2024-01-08"):
        read_market(str(tmp_path))


def test_wrong_files_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such CSV"):
        read_market(str(tmp_path / "none"))
    path = write(tmp_path / "A.csv", ["2024-01-01,1"], head="Date,Close")
    with pytest.raises(DataError, match="no column open, high, low, volume"):
        read_market(str(path))
    path = write(tmp_path / "B.csv", days(5))
    with pytest.raises(DataError, match="symbols=XYZ not in"):
        read_market(str(path), ["XYZ"])


def test_too_few_days_for_an_episode_are_an_error_with_the_sum(tmp_path: Path) -> None:
    market = read_market(str(write(tmp_path / "A.csv", days(100))))
    with pytest.raises(DataError, match=r"60 to warm up \+ 30 of an episode \+ 1 = 91"):
        prepare(market, Rules(), episode_days=30, test_fraction=0.2)


# Indicators


def test_indicators_look_back_only() -> None:
    market = generate_market(3, 400, seed=1)

    def all_of(stop: int) -> list[np.ndarray]:
        high, low, close = (a[:stop] for a in (market.high, market.low, market.close))
        return [
            indicators.macd(close),
            indicators.rsi(close),
            indicators.cci(high, low, close),
            indicators.adx(high, low, close),
            indicators.turbulence(close),
        ]

    for whole, part in zip(all_of(400), all_of(330), strict=True):
        np.testing.assert_allclose(whole[:330], part, rtol=1e-9, atol=1e-9)


def test_indicators_say_what_they_are_known_for() -> None:
    rising = np.linspace(10, 40, 200)[:, None]
    falling = rising[::-1].copy()
    flat = np.full((200, 1), 20.0)
    assert indicators.rsi(rising)[-1] == pytest.approx(100)
    assert indicators.rsi(falling)[-1] == pytest.approx(0)
    assert indicators.rsi(flat)[-1] == 50
    assert indicators.macd(rising)[-1] > 0 > indicators.macd(falling)[-1]
    assert indicators.cci(rising, rising, rising)[-1] > 100
    assert indicators.cci(flat, flat, flat)[-1] == 0
    # A trend without a pause is as strong as trends come.
    assert indicators.adx(rising + 0.1, rising - 0.1, rising)[-1] == pytest.approx(100, abs=1)
    assert indicators.adx(flat, flat, flat)[-1] == 0


def test_the_relative_strength_is_that_of_a_plain_loop() -> None:
    close = generate_market(1, 60, seed=2).close
    up = down = 0.0
    for day in range(1, 60):
        change = float(close[day, 0] - close[day - 1, 0])
        up += (max(change, 0) - up) / 30
        down += (max(-change, 0) - down) / 30
    expected = 100 - 100 / (1 + up / down)
    assert indicators.rsi(close)[-1, 0] == pytest.approx(expected)


def test_turbulence_marks_the_day_of_a_crash() -> None:
    market = generate_market(4, 500, seed=3)
    close = market.close.copy()
    close[420:] *= 0.8
    unrest = indicators.turbulence(close)
    assert unrest.argmax() == 420
    assert (unrest[:253] == 0).all()


# The environment


def tables(episode_days: int = 20, **rules: float) -> tuple[Tables, Rules]:
    chosen = Rules(**{"max_shares": 5000, **rules})  # type: ignore[arg-type]
    return prepare(generate_market(3, 400, seed=1), chosen, episode_days, 0.2), chosen


def copies(numbers: range, total: int = 6, seed: int = 0) -> TradingEnvironments:
    made, rules = tables()
    days = (WARMUP_DAYS, made.split - 1 - 20)
    return TradingEnvironments(made, rules, numbers, total, seed, days, 20)


def test_the_books_are_those_of_a_plain_loop() -> None:
    environments = copies(range(6))
    environments.reset()
    torch.manual_seed(0)
    made, rules = environments.tables, environments.rules
    close, opens, calm = made.market.close, made.market.open, made.calm.tolist()
    cash, shares = [1e6] * 6, [[0.0] * 3 for _ in range(6)]
    for _ in range(20):
        today = environments.day.tolist()
        actions = torch.randn(6, 3)
        step = environments.step(actions)
        for n in range(6):
            before = cash[n] + sum(s * p for s, p in zip(shares[n], close[today[n]], strict=True))
            price = opens[today[n] + 1]  # what was seen today is paid tomorrow
            orders = [round(max(-1.0, min(1.0, float(a))) * 5000) for a in actions[n]]
            if not calm[today[n]]:
                orders = [-s for s in shares[n]]
            for i, order in enumerate(orders):
                sold = min(max(-order, 0), shares[n][i])
                shares[n][i] -= sold
                cash[n] += sold * price[i] * 0.999
            bill = sum(max(o, 0) * p for o, p in zip(orders, price, strict=True)) * 1.001
            part = min(1.0, cash[n] / bill) if bill else 1.0
            for i, order in enumerate(orders):
                bought = math.floor(max(order, 0) * part)
                shares[n][i] += bought
                cash[n] -= bought * price[i] * 1.001
            assert cash[n] >= -1e-6
            tomorrow = close[today[n] + 1]
            worth = cash[n] + sum(s * p for s, p in zip(shares[n], tomorrow, strict=True))
            assert float(step.rewards[n]) == pytest.approx((worth - before) * 1e-4, abs=1e-5)
    assert step.ended
    assert step.truncated.all() and not step.terminated.any()
    assert step.final is not None
    expected = torch.tensor([c / rules.balance for c in cash], dtype=torch.float32)
    torch.testing.assert_close(step.final[:, 0], expected, rtol=1e-5, atol=1e-6)
    assert step.observations[:, 0].tolist() == [1.0] * 6  # a new episode


def test_on_a_turbulent_day_all_is_sold() -> None:
    environments = copies(range(6))
    environments.reset()
    environments.step(torch.ones(6, 3))
    assert (environments.shares > 0).any(1).all()
    environments.tables.calm[:] = False
    environments.step(torch.ones(6, 3))
    assert not environments.shares.any()


def test_a_copy_does_the_same_whoever_holds_it_and_goes_on_to_the_bit() -> None:
    everyone, part = copies(range(6)), copies(range(4, 6))
    assert torch.equal(everyone.reset()[4:], part.reset())
    torch.manual_seed(0)
    actions = torch.randn(50, 6, 3)
    for step in actions[:30]:  # into the second episode
        one, other = everyone.step(step), part.step(step[4:])
        assert torch.equal(one.observations[4:], other.observations)
    resumed = copies(range(1, 3))
    resumed.reset()
    seen = resumed.load(take_environments(everyone.mark()(), range(1, 3)))
    assert torch.equal(seen, one.observations[1:3])
    for step in actions[30:]:
        one, other = everyone.step(step), resumed.step(step[1:3])
        assert torch.equal(one.observations[1:3], other.observations)
        assert torch.equal(one.rewards[1:3], other.rewards)


def test_training_never_sees_a_day_of_the_test() -> None:
    environments = copies(range(200), total=200)
    environments.reset()
    last = 0
    for _ in range(100):
        environments.step(torch.zeros(200, 3))
        last = max(last, int(environments.day.max()))
    assert environments.tables.split - 10 < last < environments.tables.split


def test_scales_are_taken_from_the_training_days_alone() -> None:
    market = generate_market(3, 400, seed=1)
    changed = generate_market(3, 400, seed=1)
    changed.close[320:] *= 3
    one, other = (prepare(m, Rules(), 20, 0.2) for m in (market, changed))
    assert one.split == 320
    assert torch.equal(one.signals[:320], other.signals[:320])
    assert torch.equal(one.calm[:320], other.calm[:320])
    assert torch.equal(one.share_scale, other.share_scale)


# The test


def policy_for(made: Tables, lean: float | None = None, seed: int = 0) -> CLSTMPolicy:
    """An untrained policy; with `lean`, one that orders the same of every asset every day."""
    torch.manual_seed(seed)
    environments = TradingEnvironments(made, Rules(), range(1), 1, 0, (60, 60), 20)
    policy = CLSTMPolicy(
        environments.observation_size, environments.actions, window=3, features=4, hidden=4
    )
    if lean is not None:
        with torch.no_grad():
            policy.action_head.weight.zero_()
            policy.action_head.bias.fill_(lean)
    return policy


def result_of(
    drift: float, lean: float | None, begin: float | None = None, **rules: float
) -> TradingTest:
    """A market whose prices rise or fall by `drift` a day, and a policy with that `lean`, which had
    another when it began."""
    market = generate_market(3, 1000, seed=1)
    rise = np.exp(drift * np.arange(1000))[:, None]
    for prices in (market.open, market.high, market.low, market.close):
        prices[:] = 50 * (prices / 50) ** 0.1 * rise  # hardly anything but the drift
    chosen = Rules(**{"max_shares": 500, **rules})  # type: ignore[arg-type]
    made = prepare(market, chosen, 20, 0.3)
    return trade(policy_for(made, lean), policy_for(made, begin), made, chosen, normalise=False)


def test_orders_are_filled_at_the_next_price() -> None:
    """Who knows today's close cannot have bought at it: a jump after the close is not earned."""
    made, rules = tables(turbulence_quantile=1.0)
    made.market.open[201:] *= 2
    made.market.close[201:] *= 2
    jumped = prepare(made.market, rules, 20, 0.2)
    gains = {}
    for execution in ("next_open", "close"):
        chosen = Rules(max_shares=5000, turbulence_quantile=1.0, execution=execution)  # type: ignore[arg-type]
        market = prepare(jumped.market, chosen, 20, 0.2)
        market.calm[:] = True
        environments = TradingEnvironments(market, chosen, range(1), 1, 0, (0, 0), 20, [200])
        environments.reset()
        gains[execution] = float(environments.step(torch.ones(1, 3)).rewards) * 1e4
    assert gains["close"] > 200_000
    assert abs(gains["next_open"]) < 50_000


def test_figures_of_a_known_curve() -> None:
    worth = np.array([100.0, 110.0, 99.0, 108.9])
    traded = np.array([50.0, 0.0, 20.0])
    found = Performance.of(worth, np.array([0, 0.5, 0.5, 0.2]), traded, cost=0.01)
    daily = np.array([0.1, -0.1, 0.1])
    assert found.total_return == pytest.approx(0.089)
    assert found.drawdown == pytest.approx(0.1)
    assert found.sharpe == pytest.approx(math.sqrt(252) * daily.mean() / daily.std(ddof=1))
    assert found.exposure == pytest.approx(0.4)
    assert found.turnover == pytest.approx(70 / worth.mean() * 252 / 3)
    assert found.costs == pytest.approx(0.007)
    # Next to nothing in shares: the ratio of two nothings is no merit.
    assert Performance.of(worth, np.full(4, 0.005), traded, 0.01).sharpe == 0


def test_buy_and_hold_pays_the_next_open_and_its_costs() -> None:
    made, _ = tables()
    made.fills[320] = torch.tensor([10.0, 100.0, 50.0], dtype=torch.float64)
    made.prices[321] = torch.tensor([20.0, 100.0, 50.0], dtype=torch.float64)
    made.prices[322] = made.prices[321]
    found = buy_and_hold(made, Rules(balance=3003.0, cost=0.001), 320, 2)
    # 100 shares, 10 and 20, for 1,001 each.
    assert found.total_return == pytest.approx(4000 / 3003 - 1)
    assert found.costs == pytest.approx(3 / 3003)
    assert found.exposure == pytest.approx(1)


def test_an_agent_that_sits_in_cash_has_learned_nothing_and_is_told_so() -> None:
    """A share a day of ten million: enough for a Sharpe ratio, not for a merit."""
    result = result_of(drift=0.001, lean=0.1, begin=0.1, max_shares=10, balance=1e7)
    assert result.agent.performance.total_return > 0
    assert not result.learned
    said = "\n".join(result.lines())
    assert "nothing learned: the policy is that of its start (KL 0 per step" in said
    assert "it sat in cash" in said
    assert "it cannot be told from its start" in said
    assert result.metrics()["learned"] == 0
    assert result.metrics()["test_sharpe"] == 0
    for name in ("agent", "its start", "random agent", "buy and hold", "exposure", "turnover"):
        assert name in said


def test_an_agent_that_buys_while_prices_rise_has_learned_and_one_that_buys_a_fall_has_not() -> (
    None
):
    rising, falling = (result_of(drift, lean=1.0) for drift in (0.002, -0.002))
    assert rising.learned
    assert rising.lines()[-1].startswith("learned: better than its start by +")
    assert len(rising.agent.parts) == 10
    assert rising.agent.performance.exposure > 0.5
    assert not falling.learned
    assert "is worse than the random agent" in falling.lines()[-1]


def test_the_test_walks_through_all_later_days() -> None:
    made, rules = tables()
    sells = policy_for(made, lean=-1.0)  # what it has: nothing
    result = trade(sells, policy_for(made), made, rules, normalise=False)
    assert (result.first_day, result.last_day) == ("day 320", "day 399")
    assert result.agent.performance == Performance(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert result.hold.performance.total_return != 0
    assert result.part_days == 26 and len(result.agent.parts) == 3
    assert len({one.total_return for one in result.chance.whole}) == 5
