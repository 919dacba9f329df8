"""From one measured step to N GPUs: time, memory, cost. Arithmetic only, without torch."""

from multi_gpu_training.measure.memory_model import MemoryPoint

from .cost import price_per_gpu, price_per_node, prices_from_catalog
from .interconnect import Curve, Interconnect, joined, measured, named, named_interconnects
from .predictor import predict
from .profile import GradientBucket, StepProfile
from .result import Forecast, ForecastRow, Price

__all__ = [
    "Curve",
    "Forecast",
    "ForecastRow",
    "GradientBucket",
    "Interconnect",
    "MemoryPoint",
    "Price",
    "StepProfile",
    "joined",
    "measured",
    "named",
    "named_interconnects",
    "predict",
    "price_per_gpu",
    "price_per_node",
    "prices_from_catalog",
]
