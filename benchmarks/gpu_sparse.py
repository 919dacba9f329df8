"""What 2:4 pruning saves on one GPU: the image recipe's cnn, pruned by `mgt compress`, in bfloat16.

    python benchmarks/gpu_sparse.py --out benchmarks/gpu_sparse.json      about a minute on an H200
    python benchmarks/gpu_sparse.py --device cpu --quick                  tries the script

All models have the same pruned weights; torch's semi-structured kernels take the zeros out. They
exist for matrix products alone, so that a convolution needs its patches copied into a matrix first.

dense           cuDNN's convolutions and cuBLAS's products: the zeros are multiplied
sparse linear   the large linear layer by a sparse kernel, dense convolutions
patches         dense, but the convolutions as products of copied patches
sparse patches  the same, by sparse kernels wherever their shapes fit
tuned           the faster of the two sparse ones, with cuSPARSELt's search for each product

The clock is the GPU's: each model is recorded as a CUDA graph, and models take turns, so that the
processor does not count. "As called" is a call from Python, where it does. A model that cannot be
recorded is named, and nothing is timed in its place. Weights are random: what is lost in
accuracy is measured by benchmarks/compression.py. Every model must agree with the dense one.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multi_gpu_training.compress.pruning import prune_two_of_four, sparse_layers
from multi_gpu_training.recipes.image.image_model import cnn

WIDTHS, BATCHES = (32, 256), (1, 64, 1024)
ROUNDS, ROUND_S = 7, 0.04
IN_A_GRAPH = 10  # calls: launching a graph would outweigh one of a small model
MOST_APART = 2e-2  # bfloat16 has eight bits, and kernels add in different orders


class Product(nn.Module):
    """A linear layer, or a 3x3 convolution over copied patches, by a sparse or a dense kernel."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, sparse: bool) -> None:
        super().__init__()
        self.convolves = isinstance(layer, nn.Conv2d)
        self.dense = layer.weight.detach().flatten(1).contiguous()
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.sparse = sparse
        self.weight = compressed(self.dense) if sparse else self.dense

    def forward(self, x: Tensor) -> Tensor:
        if not self.convolves:
            return F.linear(x, self.weight, self.bias)
        count, _, height, width = x.shape
        patches = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(count * height * width, -1)
        found = F.linear(rows, self.weight, self.bias)
        return found.view(count, height, width, -1).permute(0, 3, 1, 2)

    def tune(self, rows: Tensor) -> int:
        """Let cuSPARSELt try its algorithms on an input of this shape; returns the best one."""
        rows = F.pad(rows, (0, 0, 0, -len(rows) % 8))
        weight: Any = compressed(self.dense)
        found = torch._cslt_sparse_mm_search(
            weight.packed, rows.t(), bias=self.bias, transpose_result=True
        )
        weight.alg_id_cusparselt = int(found)
        self.weight = weight
        return int(found)


def compressed(weight: Tensor) -> Tensor:
    if weight.device.type != "cuda":
        return weight  # only to try the script
    from torch.sparse import to_sparse_semi_structured

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its interface may still change
        return to_sparse_semi_structured(weight)


def pruned(width: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = cnn((28, 28), 10, width=width).to(device, torch.bfloat16)
    prune_two_of_four(model)
    if device == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.eval()


def with_products(model: nn.Sequential, convolutions: bool, sparse: bool) -> nn.Sequential:
    """A copy whose pruned layers are products. Convolutions stay cuDNN's unless they are asked."""
    changed = copy.deepcopy(model)
    for name in sparse_layers(changed):
        layer = changed[int(name)]
        if isinstance(layer, nn.Linear) or convolutions:
            changed[int(name)] = Product(layer, sparse)  # type: ignore[arg-type]
    return changed


# Timing


class Timed:
    """A model on one input: how long the GPU needs for it, and a call from Python."""

    def __init__(self, model: nn.Module, batch: Tensor) -> None:
        self.model, self.batch = model, batch
        self.on_gpu = batch.device.type == "cuda"
        self.device_s: list[float] = []
        self.called_s: list[float] = []
        self.problem: str | None = None
        self.output: Tensor | None = None
        self.graph: Any = None
        try:
            with torch.no_grad():
                for _ in range(3):
                    self.output = model(batch).float()
            if self.on_gpu:
                torch.cuda.synchronize()
                self.graph = recorded(lambda: model(batch))
        except Exception as error:  # a kernel that this GPU or torch lacks: the others still count
            self.problem = f"{type(error).__name__}: {error}"[:300]

    def apart(self, other: Tensor) -> float | None:
        if self.output is None:
            return None
        return float((self.output - other).norm() / other.norm())

    @torch.no_grad()
    def round(self, seconds: float) -> None:
        if self.problem is not None:
            return
        self.called_s.append(self._mean(lambda: self.model(self.batch), seconds, each=True))
        if self.graph is not None:
            mean = self._mean(self.graph.replay, seconds, each=False)
            self.device_s.append(mean / IN_A_GRAPH)

    def _mean(self, call: Callable[[], Any], seconds: float, each: bool) -> float:
        """Mean seconds of a call; `each` waits for every one, as a single request would."""
        calls, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(1 if each else 4):
                call()
                calls += 1
                if each and self.on_gpu:
                    torch.cuda.synchronize()
            if self.on_gpu:
                torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls

    def row(self) -> dict[str, Any]:
        def median_us(found: list[float]) -> float | None:
            return round(statistics.median(found) * 1e6, 2) if found else None

        row: dict[str, Any] = {
            "device_us": median_us(self.device_s),
            "called_us": median_us(self.called_s),
        }
        return row if self.problem is None else row | {"problem": self.problem}


def recorded(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            call()
    return graph


def in_turns(models: dict[str, Timed], quick: bool) -> None:
    for _ in range(2 if quick else ROUNDS):
        for one in models.values():
            one.round(0.005 if quick else ROUND_S)


# Subjects


def whole_models(width: int, count: int, device: str, quick: bool) -> dict[str, Any]:
    dense = pruned(width, device)
    batch = torch.randn(count, 1, 28, 28, device=device, dtype=torch.bfloat16)
    models = {
        "dense": dense,
        "sparse linear": with_products(dense, False, True),
        "patches": with_products(dense, True, False),
        "sparse patches": with_products(dense, True, True),
    }
    timed = {name: Timed(model, batch) for name, model in models.items()}
    in_turns(timed, quick)
    sparse = [name for name in ("sparse linear", "sparse patches") if timed[name].problem is None]
    algorithms: dict[str, int] = {}
    if sparse and device == "cuda":
        best = min(sparse, key=lambda name: statistics.median(timed[name].device_s))
        # A new one: the graph of the other still reads its weights.
        model = with_products(dense, best == "sparse patches", True)
        try:
            algorithms = tune(model, batch)
        except Exception as error:  # the search is a private function of torch
            algorithms = {f"no search: {error}"[:200]: -1}
        timed["tuned"] = Timed(model, batch)
        for one in timed.values():
            one.device_s, one.called_s = [], []
        in_turns(timed, quick)
    wanted = timed["dense"].output
    assert wanted is not None, timed["dense"].problem
    rows = {name: one.row() | {"apart": one.apart(wanted)} for name, one in timed.items()}
    return {"rows": rows, "algorithms": algorithms}


@torch.no_grad()
def tune(model: nn.Module, batch: Tensor) -> dict[str, int]:
    """Search the best algorithm of every sparse product; returns them by shape."""
    found: dict[str, int] = {}
    inputs: list[tuple[Product, Tensor]] = []
    products = [one for one in model.modules() if isinstance(one, Product) and one.sparse]
    hooks = [
        one.register_forward_pre_hook(lambda module, args: inputs.append((module, args[0])))
        for one in products
    ]
    model(batch)
    for hook in hooks:
        hook.remove()
    for product, x in inputs:
        count = x.shape[0] * (x.shape[2] * x.shape[3] if product.convolves else 1)
        outputs, features = product.dense.shape
        rows = torch.randn(count, features, device=x.device, dtype=x.dtype)
        found[f"{count}x{features} to {outputs}"] = product.tune(rows)
    return found


def products_alone(width: int, count: int, device: str, quick: bool) -> dict[str, Any]:
    """The linear layer and the last convolution by themselves, the patches copied before."""
    found: dict[str, Any] = {}
    model = pruned(width, device)
    for name in sparse_layers(model):
        layer = model[int(name)]
        linear = isinstance(layer, nn.Linear)
        product = Product(layer, False)  # type: ignore[arg-type]
        product.convolves = False
        outputs, features = product.dense.shape
        pixels = 1 if linear else 196  # of an image, where the channels are merged once
        rows = torch.randn(count * pixels, features, device=device, dtype=torch.bfloat16)
        sparse = copy.copy(product)
        sparse.sparse, sparse.weight = True, compressed(product.dense)
        timed = {"dense": Timed(product, rows), "sparse": Timed(sparse, rows)}
        in_turns(timed, quick)
        wanted = timed["dense"].output
        assert wanted is not None, timed["dense"].problem
        shape = f"{len(rows)}x{features} to {outputs}"
        found[shape] = {k: one.row() | {"apart": one.apart(wanted)} for k, one in timed.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="few rounds, to try the script")
    parser.add_argument("--out", type=Path, default=Path("gpu_sparse.json"))
    asked = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    began = time.perf_counter()
    name = torch.cuda.get_device_name() if asked.device == "cuda" else platform.machine()
    document: dict[str, Any] = {"machine": f"{name}; torch {torch.__version__}", "models": {}}
    apart = []
    for width in asked.widths:
        for count in asked.batches:
            here = f"width {width}, {count} images"
            found = whole_models(width, count, asked.device, asked.quick)
            found["products"] = products_alone(width, count, asked.device, asked.quick)
            document["models"][here] = found
            products = [row for rows in found["products"].values() for row in rows.values()]
            apart += [row["apart"] for row in (*found["rows"].values(), *products)]
            document["seconds"] = time.perf_counter() - began
            asked.out.write_text(json.dumps(document, indent=1) + "\n")
            asked.out.with_suffix(".md").write_text(table(document))
    print(table(document))
    wrong = [one for one in apart if one is not None and not one <= MOST_APART]
    if wrong:
        print(f"FAILED: outputs are up to {max(wrong):.3g} apart from the dense model's")
    return 1 if wrong else 0


def table(document: dict[str, Any]) -> str:
    lines = ["# What 2:4 pruning saves on a GPU", "", "    python benchmarks/gpu_sparse.py", ""]
    seconds = document["seconds"]
    lines += [f"{document['machine']}, bfloat16; {seconds:.0f} s in all. See the script for the"]
    lines += ["models. Times are of the GPU alone; factors above 1 are faster than dense.", ""]
    lines += ["| | dense | sparse linear | patches | sparse patches | tuned | as called: dense |"]
    lines[-1] += " best sparse |"
    lines += ["|---|" + "---|" * 7]
    for here, found in document["models"].items():
        rows, cells = found["rows"], []
        base = rows["dense"]["device_us"] or rows["dense"]["called_us"]
        for name in ("dense", "sparse linear", "patches", "sparse patches", "tuned"):
            us = rows.get(name, {}).get("device_us") or rows.get(name, {}).get("called_us")
            cells.append("-" if us is None else f"{us:,.1f} us, x{base / us:.2f}")
        called = [
            rows[name]["called_us"]
            for name in ("sparse linear", "sparse patches", "tuned")
            if rows.get(name, {}).get("called_us")
        ]
        cells.append(f"{rows['dense']['called_us']:,.0f} us")
        cells.append(f"{min(called):,.0f} us" if called else "-")
        lines.append(f"| {here} | " + " | ".join(cells) + " |")
    lines += ["", "## Products alone", "", "| rows x features to outputs | dense | sparse | |"]
    lines += ["|---|---|---|---|"]
    for here, found in document["models"].items():
        for shape, pair in found["products"].items():
            dense, sparse = (
                pair[name]["device_us"] or pair[name]["called_us"] for name in ("dense", "sparse")
            )
            if dense is None or sparse is None:
                problem = pair["sparse"].get("problem", pair["dense"].get("problem"))
                lines.append(f"| {here}: {shape} | - | - | {problem} |")
                continue
            faster = f"x{dense / sparse:.2f}"
            lines.append(f"| {here}: {shape} | {dense:,.1f} us | {sparse:,.1f} us | {faster} |")
    problems = {
        f"- {here}, {name}: {row['problem']}"
        for here, found in document["models"].items()
        for name, row in found["rows"].items()
        if "problem" in row
    }
    if problems:
        lines += ["", "Not measured:", "", *sorted(problems)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
