"""`mgt federated`: simulate a federation here, or be the server or a client of a real one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.federated.federation_settings import FederatedSettings
from multi_gpu_training.recipes import RECIPES
from multi_gpu_training.safe_output import brief

EXTRA = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")
MOST = 10_000  # clients at a time, and GPUs of each
_OWN = ("rounds", "clients", "strategy")  # the others are read from the words that are left
FLAGS = "\n".join(
    f"--{name.replace('_', '-')}  {field.description or ''}\n"
    for name, field in FederatedSettings.model_fields.items()
    if name not in _OWN
)
federated = typer.Typer(
    no_args_is_help=True, help="Federated training with Flower: data stays with its clients."
)

Target = Annotated[str, Argument(metavar="RECIPE|SCRIPT.py", help="what each client trains")]
Rounds = Annotated[int, Option(help="number of rounds")]
Clients = Annotated[int, Option(help="how many take part")]
Strategy = Annotated[
    str, Option(help="fedavg, fedavgm (--server-momentum), fedprox (--mu) or fedadam (--server-lr)")
]
SaveDir = Annotated[str, Option(help="folder of the federation")]
Resume = Annotated[bool, Option("--resume", help="continue after the last saved round")]
Device = Annotated[str, Option(help="auto, cpu, cuda, mps or xpu")]
Ranks = Annotated[int, Option("--num-gpus", help="GPUs per client; without GPUs, CPU ranks")]
CaFile = Annotated[str | None, Option(help="CA certificate of the server")]


@federated.command(context_settings=EXTRA, epilog=FLAGS)
def simulate(
    ctx: typer.Context,
    target: Target,
    clients: Clients = 10,
    partition: Annotated[str, Option(help="iid or dirichlet:ALPHA")] = "iid",
    rounds: Rounds = 20,
    strategy: Strategy = "fedavg",
    save_dir: SaveDir = "runs/federated",
    resume: Resume = False,
    device: Device = "auto",
    num_gpus: Ranks = 1,
    parallel: Annotated[int | None, Option(help="clients at a time; default: by cores")] = None,
    gpus_per_client: Annotated[float, Option(help="share of a GPU, for Ray")] = 0.0,
    client_processes: Annotated[
        bool, Option("--client-processes", help="each round in its own process")
    ] = False,
) -> None:
    """Train a federation on this machine, with Flower's simulation engine.

    Other flags are those of the federation, listed below, and those of the recipe or script.
    """
    from multi_gpu_training.federated.simulation import Simulation
    from multi_gpu_training.federated.simulation import simulate as run

    own, rest = federation_flags(ctx.args)
    problems = client_problems(num_gpus, device)
    if parallel is not None and not 1 <= parallel <= MOST:
        problems.append(f"--parallel {brief(parallel)}: use 1 to {MOST:,}")
    if not 0 <= gpus_per_client <= MOST:
        problems.append(f"--gpus-per-client {gpus_per_client:g}: use 0 to {MOST:,}")
    if problems:
        raise ConfigError(problems)
    federation = FederatedSettings(rounds=rounds, clients=clients, strategy=strategy, **own)
    settings, words = training_settings(target, rest, own)
    simulation = Simulation(
        target,
        Path(_path(save_dir)),
        federation,
        partition,
        settings,
        words,
        num_gpus,
        device,
        client_processes,
        parallel,
        gpus_per_client,
    )
    _end(lambda: _closing(run(simulation, resume, _say), simulation.folder))


@federated.command(context_settings=EXTRA, epilog=FLAGS)
def server(
    ctx: typer.Context,
    clients: Clients = 2,
    rounds: Rounds = 20,
    strategy: Strategy = "fedavg",
    save_dir: SaveDir = "runs/federated",
    resume: Resume = False,
    address: Annotated[str, Option(help="HOST:PORT to listen on")] = "0.0.0.0:9092",
    ca_file: CaFile = None,
    certificate: Annotated[str | None, Option(help="certificate of this server, PEM")] = None,
    key: Annotated[str | None, Option(help="private key of the certificate")] = None,
    client_keys: Annotated[
        str | None, Option(help="folder of the clients' public keys, *.pub")
    ] = None,
    insecure_network: Annotated[
        bool, Option("--insecure-network", help="no TLS: trust the network")
    ] = False,
) -> None:
    """Serve a federation: Flower's SuperLink with TLS, for clients with known keys only.

    The server needs neither data nor model: its first weights come from a client.
    """
    from multi_gpu_training.federated.deployment import ServerPlace, serve

    own, rest = federation_flags(ctx.args)
    if rest:
        raise ConfigError(
            f"unknown: {' '.join(rest)}; `mgt federated server --help` lists all", code="MGT101"
        )
    federation = FederatedSettings(rounds=rounds, clients=clients, strategy=strategy, **own)
    folder = Path(_path(save_dir))
    place = ServerPlace(address, ca_file, certificate, key, client_keys, insecure_network)
    _end(lambda: serve(federation, folder, place, resume, _say))


@federated.command(context_settings=EXTRA)
def client(
    ctx: typer.Context,
    target: Target,
    server: Annotated[str, Option(help="HOST:PORT")],
    name: Annotated[str, Option(help="name that the server shows; default: this machine's")] = "",
    save_dir: SaveDir = "runs/federated-client",
    device: Device = "auto",
    num_gpus: Ranks = 1,
    ca_file: CaFile = None,
    key: Annotated[str | None, Option(help="private key whose public part the server has")] = None,
    require_secure: Annotated[
        bool, Option("--require-secure", help="answer only with SecAgg+")
    ] = False,
    insecure_network: Annotated[
        bool, Option("--insecure-network", help="no TLS: trust the network")
    ] = False,
) -> None:
    """Take part in a federation with the data of this machine, until Ctrl-C.

    Other flags are those of the recipe or script.
    """
    from multi_gpu_training.federated.client_run import ClientSetup
    from multi_gpu_training.federated.deployment import ClientPlace, take_part

    problems = client_problems(num_gpus, device)
    if not name.isprintable() or len(name) > 100:
        problems.append(f"--name {brief(name, 80)}: use 100 characters at most, all printable")
    if problems:
        raise ConfigError(problems)
    settings, words = training_settings(target, ctx.args, {})
    folder = str(Path(_path(save_dir)).absolute())
    setup = ClientSetup(
        str(Path(target).absolute()) if target not in RECIPES else target,
        folder,
        settings,
        words,
        num_gpus,
        device,
        require_secure=require_secure,
        name=name or os.uname().nodename,
    )
    _end(lambda: take_part(setup, ClientPlace(server, ca_file, key, insecure_network), _say))


@federated.command()
def keys(
    folder: Annotated[str, Argument(help="where to write them")],
    host: Annotated[str, Option(help="name or address at which clients reach the server")],
    client: Annotated[list[str], Option(help="name of a client; repeatable")],
) -> None:
    """Make a CA, a server certificate and a key pair per client, to try a federation with TLS."""
    from multi_gpu_training.federated.federation_keys import make_keys

    for line in make_keys(Path(_path(folder)), host, client):
        _say(line)


def client_problems(num_gpus: int, device: str) -> list[str]:
    """What is wrong with where a client trains."""
    from multi_gpu_training.cli.measured_script import rank_problems

    problems = []
    if device not in DEVICES:
        problems.append(f"--device {brief(device, 80)}: use one of {', '.join(DEVICES)}")
    if num_gpus < 1:
        problems.append(f"--num-gpus {brief(num_gpus, 40)}: use at least 1")
    return problems or rank_problems("--num-gpus", num_gpus, device)


def federation_flags(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Flags that are settings of the federation, and the words that are left."""
    from multi_gpu_training.cli.train_command import extra_settings

    found: dict[str, Any] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        field = FederatedSettings.model_fields.get(name.replace("-", "_"))
        if not word.startswith("--") or field is None:
            rest.append(word)
            continue
        taken = [word]
        if not equals and left and not left[0].startswith("--"):
            taken.append(left.pop(0))
        found |= dict(extra_settings(taken))
    return found, rest


def training_settings(
    target: str, words: list[str], own: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Settings of a recipe, or the words of a script."""
    from multi_gpu_training.cli.run_command import check_script
    from multi_gpu_training.cli.train_command import check_data_dir, extra_settings

    if target not in RECIPES:
        if not Path(target).is_file():
            raise ConfigError(
                f"{brief(target)} is neither a recipe ({', '.join(RECIPES)}) nor a script"
            )
        check_script(target, "mgt federated")
        return {}, words
    settings = dict(extra_settings(words))
    if "seed" in own:
        settings.setdefault("seed", own["seed"])
    data = settings.get("data_dir")
    check_data_dir(data, target)
    if isinstance(data, str):
        settings["data_dir"] = str(Path(data).expanduser().absolute())
    return settings, []


def _path(given: str) -> str:
    from multi_gpu_training.cli.measured_script import folder_problems

    problems = folder_problems("--save-dir", given)
    if problems:
        raise ConfigError(problems)
    return given


def _say(line: str) -> None:
    print(line, flush=True)


def _closing(state: Any, folder: Path) -> int:
    from multi_gpu_training.federated.rounds_report import write_report

    _say(f"{state.number} rounds are done; weights: {folder / 'checkpoints'}")
    _say(f"report: {write_report(folder)}")
    return 0


def _end(run: Callable[[], int]) -> None:
    """Exit with the code of `run`. Threads of Flower and Ray may still wait for clients that will
    never answer, so the interpreter must not wait for them."""
    try:
        code = run()
    except MultiGPUError as error:
        print(error.shown(), file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    raise typer.Exit(0)
