"""Technical indicators of daily prices. Each looks back only; arrays are (days, assets)."""

from __future__ import annotations

import numpy as np

from multi_gpu_training.recipes.ppo.market import Prices


def exponential_mean(values: Prices, weight: float) -> Prices:
    """m[t] = m[t-1] + weight (v[t] - m[t-1]), from the first value on."""
    out = values.copy()
    for day in range(1, len(values)):
        out[day] = out[day - 1] + weight * (values[day] - out[day - 1])
    return out


def macd(close: Prices, fast: int = 12, slow: int = 26) -> Prices:
    """Moving average convergence divergence: the difference of two exponential means."""
    return exponential_mean(close, 2 / (fast + 1)) - exponential_mean(close, 2 / (slow + 1))


def rsi(close: Prices, period: int = 30) -> Prices:
    """Relative strength index, 0 to 100, with Wilder's smoothing; 50 where nothing moved."""
    change = np.diff(close, axis=0, prepend=close[:1])
    up = exponential_mean(np.maximum(change, 0), 1 / period)
    down = exponential_mean(np.maximum(-change, 0), 1 / period)
    total = up + down
    return np.where(total > 0, 100 * up / np.where(total > 0, total, 1), 50.0)


def cci(high: Prices, low: Prices, close: Prices, period: int = 30) -> Prices:
    """Commodity channel index: distance from the mean of `period` days, over 0.015 times its mean
    distance; 0 before that many days."""
    typical = (high + low + close) / 3
    out = np.zeros_like(typical)
    for day in range(period - 1, len(typical)):
        window = typical[day - period + 1 : day + 1]
        mean = window.mean(0)
        spread = np.abs(window - mean).mean(0)
        safe = np.where(spread > 0, spread, 1)
        out[day] = np.where(spread > 0, (typical[day] - mean) / (0.015 * safe), 0.0)
    return out


def adx(high: Prices, low: Prices, close: Prices, period: int = 30) -> Prices:
    """Average directional index, 0 to 100: how strong a trend is, whatever its direction."""
    up = np.diff(high, axis=0, prepend=high[:1])
    down = -np.diff(low, axis=0, prepend=low[:1])
    rising = np.where((up > down) & (up > 0), up, 0.0)
    falling = np.where((down > up) & (down > 0), down, 0.0)
    before = np.concatenate([close[:1], close[:-1]])
    true_range = np.maximum(high, before) - np.minimum(low, before)
    spans = exponential_mean(true_range, 1 / period)
    safe = np.where(spans > 0, spans, 1)
    plus = exponential_mean(rising, 1 / period) / safe
    minus = exponential_mean(falling, 1 / period) / safe
    total = plus + minus
    index = np.where(total > 0, 100 * np.abs(plus - minus) / np.where(total > 0, total, 1), 0.0)
    return exponential_mean(index, 1 / period)


def turbulence(close: Prices, period: int = 252) -> Prices:
    """How unusual each day's returns are (days,): their squared Mahalanobis distance from those
    of the `period` days before; 0 where there are not as many."""
    returns = np.diff(np.log(close), axis=0, prepend=np.log(close[:1]))
    out = np.zeros(len(close))
    for day in range(period + 1, len(close)):
        past = returns[day - period : day]
        apart = returns[day] - past.mean(0)
        covariance = np.cov(past, rowvar=False).reshape(len(apart), len(apart))
        # A pseudo-inverse: assets that move as one have a singular covariance.
        out[day] = max(0.0, float(apart @ np.linalg.pinv(covariance) @ apart))
    return out
