"""Commands for a trained model."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from multi_gpu_training.cli.flags import (
    NAMES,
    AsJson,
    Checkpoint,
    Device,
    Dtype,
    Ranks,
    TrainedRun,
    Trust,
    a_path,
)

commands = typer.Typer()


@commands.command()
def evaluate(
    run: TrainedRun,
    data: Annotated[
        str | None, Option(help="other data, as for `mgt train --data-dir`", callback=a_path)
    ] = None,
    part: Annotated[str | None, Option(help="val or all; default: val, or all of --data")] = None,
    checkpoint: Checkpoint = None,
    num_gpus: Ranks = -1,
    batch_size: Annotated[int | None, Option(min=1)] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on its validation data or on other data, on all GPUs."""
    from multi_gpu_training.cli.evaluate_command import EvaluateFlags, evaluate

    place = checkpoint, num_gpus, batch_size, device, dtype, trust
    raise typer.Exit(evaluate(EvaluateFlags(run, data, part, *place, as_json)))


@commands.command()
def predict(
    run: TrainedRun,
    inputs: Annotated[
        list[str] | None,
        Argument(metavar="INPUT...", help="files, folders or texts; for ppo, a number of episodes"),
    ] = None,
    task: Annotated[str | None, Option(help="generate or score (texts), play or act (ppo)")] = None,
    out: Annotated[str | None, Option(help="FILE.jsonl or FILE.csv", callback=a_path)] = None,
    form: Annotated[str | None, Option("--format", help="table, jsonl or csv")] = None,
    timeline: Annotated[
        str | None, Option(help="video: FILE.csv or FILE.svg", callback=a_path)
    ] = None,
    every: Annotated[int | None, Option(help="video: frames between two clips")] = None,
    new_tokens: Annotated[
        int | None, Option(help="generate: at most this many; default: 64")
    ] = None,
    temperature: Annotated[
        float | None, Option(help="generate: 0 picks the likeliest token")
    ] = None,
    seed: Annotated[int | None, Option(help="generate: seeds the draws")] = None,
    record: Annotated[
        str | None, Option(help="play: folder for a GIF of each episode", callback=a_path)
    ] = None,
    checkpoint: Checkpoint = None,
    num_gpus: Ranks = -1,
    batch_size: Annotated[int | None, Option(min=1)] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    trust: Trust = False,
) -> None:
    """Predict with a trained model, on all GPUs: one result per input, in the same order.

    Exits with 1 if an input could not be used.
    """
    from multi_gpu_training.cli.predict_command import PredictFlags, predict

    given = {
        "every": every,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "seed": seed,
        "record": record,
    }
    options = {name: value for name, value in given.items() if value is not None}
    place = checkpoint, num_gpus, batch_size, device, dtype, trust
    flags = PredictFlags(run, list(inputs or ()), task, out, form, timeline, *place, options)
    raise typer.Exit(predict(flags))


@commands.command()
def export(
    run: TrainedRun,
    to: Annotated[str, Option(help="onnx, torch-export, aoti, executorch, safetensors or hf")],
    out: Annotated[
        str | None, Option(help="output folder; default: exports/RECIPE-NAME-TO", callback=a_path)
    ] = None,
    checkpoint: Checkpoint = None,
    max_batch: Annotated[int, Option(min=2, help="largest batch of the exported program")] = 1024,
    length: Annotated[
        int | None, Option(min=2, help="longest input: samples of sound, tokens of a text")
    ] = None,
    license_name: Annotated[
        str, Option("--license", help="license of the weights, for the model card")
    ] = "unknown",
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Export a trained model and compare it with PyTorch on real samples."""
    from multi_gpu_training.cli.export_command import export_run

    raise typer.Exit(
        export_run(run, to, out, checkpoint, max_batch, length, license_name, trust, as_json)
    )


@commands.command(context_settings=NAMES)
def compress(
    run: Annotated[str, Argument(help="run folder or checkpoint", callback=a_path)],
    method: Annotated[
        list[str],
        Option(
            help="quantize[:int8|int8-dynamic|int4|onnx-int8], prune[:2:4|SHARE], "
            "distil[:SHARE|NAME=VALUE]; joined by + they combine; repeat to compare"
        ),
    ],
    max_drop: Annotated[
        str | None, Option(help="keep only models that lose at most this, such as 1%")
    ] = None,
    out: Annotated[str | None, Option(help="default: RUN-compressed", callback=a_path)] = None,
    device: Device = "auto",
    epochs: Annotated[int | None, Option(help="epochs of fine-tuning or distillation")] = None,
    lr: Annotated[float | None, Option(help="learning rate of fine-tuning or distillation")] = None,
    trust: Trust = False,
) -> None:
    """Make a trained model smaller; compare size, speed and accuracy before and after."""
    from multi_gpu_training.cli.compress_command import compress

    raise typer.Exit(compress(run, method, out, max_drop, device, epochs, lr, trust))


@commands.command(context_settings=NAMES)
def serve(
    ctx: typer.Context,
    run: Annotated[str, Argument(help="run folder or checkpoint", callback=a_path)],
    host: Annotated[
        str, Option(help="address to listen on; default: this machine only")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="0: pick a free port")] = 8000,
    device: Device = "auto",
    dtype: Dtype = "float32",
    checkpoint: Annotated[str | None, Option(help="best or step-N")] = None,
    task: Annotated[
        str | None, Option(help="generate, score, ... if the model has several")
    ] = None,
    max_batch: Annotated[int, Option(help="largest number of inputs computed together")] = 32,
    max_delay_ms: Annotated[float, Option(help="how long an input may wait for others")] = 5.0,
    max_waiting: Annotated[int, Option(help="length of the queue; further inputs get 503")] = 1024,
    max_body_mib: Annotated[float, Option(help="largest request; larger ones get 413")] = 10.0,
    rate: Annotated[float, Option(help="requests per second and client; 0: unlimited")] = 1000.0,
    allow_host: Annotated[
        list[str] | None, Option(help="another name of this server, besides HOST")
    ] = None,
    trust: Trust = False,
) -> None:
    """Serve a trained model: /predict, /health, /metrics, and a page to try it by hand."""
    from multi_gpu_training.cli.serve_command import serve

    flags = {name: value for name, value in ctx.params.items() if name != "run"}
    raise typer.Exit(serve(run, {**flags, "allow_host": allow_host or []}))
