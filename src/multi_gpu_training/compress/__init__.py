"""Methods that make a trained model smaller, on any nn.Module.

    quantization.py     int8 and int4 weights, int8 activations (torchao)
    pruning.py          whole channels, or two of every four weights
    distillation.py     a small model learns from the large one
    tensor_packing.py   quantised and sparse weights as plain tensors, as small as they can be
    compressed_model.py the same changes on a freshly built model, so that weights can be loaded

Nothing here knows runs, recipes or commands: `delivery.compress_run` does.
"""

from __future__ import annotations

SCHEMES = ("int8", "int8-dynamic", "int4")
