from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.config_file import (
    READY_CONFIGS,
    flatten,
    merge,
    read_config_file,
    read_override,
    ready_configs,
    schema,
    split,
)
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import read_yaml

# The two files of guide 004, as they stand there.
MULTI_GPU = """\
defaults:
  - base_config
  - distributed

training:
  batch_size: 32  # Will be divided across GPUs
  lr: 2e-3        # Scaled for 2 GPUs
"""
DISTRIBUTED = """\
distributed:
  enabled: true
  backend: "nccl"              # Best for GPU-to-GPU communication
  find_unused_parameters: false # Optimization for DDP
  sync_batchnorm: true         # Synchronize batch norm across GPUs
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files, name=text; the path of the last one comes back."""

    def write(**files: str) -> str:
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return str(tmp_path / f"{name}.yaml")

    return write


def problems(call: Callable[..., Any], *arguments: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        call(*arguments)
    return raised.value.problems


def problem(call: Callable[..., Any], *arguments: Any) -> str:
    [only] = problems(call, *arguments)
    return only


def test_reading_a_config_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from multi_gpu_training.config_file import read_config_file;"
        "read_config_file('production'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# The guides' own files


def test_the_files_of_guide_004_give_the_fields_they_mean(write: Write) -> None:
    base = "training:\n  epochs: 5\n  lr: 1e-3\n  batch_size: 16\nseed: 7\n"
    path = write(base_config=base, distributed=DISTRIBUTED, multi_gpu=MULTI_GPU)
    fields, options = split(flatten(read_config_file(path)), [])
    assert options == {}
    assert fields == {
        "epochs": 5,
        "learning_rate": 0.002,
        "global_batch_size": 32,
        "seed": 7,
        "training_mode": "distributed_data_parallel",
        "backend": "nccl",
        "find_unused_parameters": False,
        "sync_bn": True,
    }
    config = MultiGPUConfig(**fields)
    assert config.learning_rate == 2e-3
    # 2e-3 in the guide is "scaled for 2 GPUs" already; it must not be scaled a second time.
    assert config.lr_scaling == "none"
    assert "lr_scaling" not in fields


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "development",
            {
                "training_mode": TrainingMode.DATA_PARALLEL,
                "device_ids": [0, 1],
                "use_mixed_precision": True,
                "batch_size": 32,
                "num_workers": 2,
            },
        ),
        (
            "production",
            {
                "training_mode": TrainingMode.DISTRIBUTED_DATA_PARALLEL,
                "world_size": 8,
                "use_mixed_precision": True,
                "gradient_accumulation_steps": 4,
                "enable_fault_tolerance": True,
                "checkpoint_frequency": 1000,
            },
        ),
        (
            "large_model",
            {
                "training_mode": TrainingMode.DISTRIBUTED_DATA_PARALLEL,
                "use_mixed_precision": True,
                "gradient_accumulation_steps": 8,
                "max_grad_norm": 1.0,
                "sync_bn": True,
                "use_gradient_checkpointing": True,
            },
        ),
    ],
)
def test_ready_configs_are_those_that_guide_003_recommends(
    name: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = read_config_file(name)
    assert values == expected
    assert MultiGPUConfig(**flatten(values)) == MultiGPUConfig(**expected)
    assert (READY_CONFIGS / f"{name}.yaml").read_text().startswith("# ")


def test_a_written_config_reads_back_equal(write: Write) -> None:
    config = MultiGPUConfig(
        training_mode="dp", device_ids=[0, 0], learning_rate=3e-5, timeout=90, run_name="8"
    )
    for each in (config, MultiGPUConfig()):
        path = write(config=yaml.safe_dump(each.plain(), sort_keys=False))
        assert MultiGPUConfig(**split(flatten(read_config_file(path)), [])[0]) == each
    # PyYAML leaves this name unquoted, and it would come back as a number; OmegaConf quotes it.
    config.run_name = "1e5"
    path = write(config=OmegaConf.to_yaml(config.plain()))
    assert MultiGPUConfig(**flatten(read_config_file(path))) == config


# Numbers, references, `defaults`


@pytest.mark.parametrize("number", ["2e-3", "1e-3", "1E-5", "2.5e-4", "1.e-3", ".5e-3", "-1e+2"])
def test_scientific_numbers_are_numbers(number: str, write: Write) -> None:
    value = read_config_file(write(numbers=f"value: {number}\nquoted: '{number}'\n"))
    assert value == {"value": float(number), "quoted": number}
    assert read_override(f"value={number}") == ("value", float(number))


def test_references_are_resolved_over_the_merged_files(write: Write) -> None:
    path = write(
        base="training: {lr: 1e-3}\nrun_name: lr-${training.lr}\n",
        own="defaults: [base]\ntraining:\n  lr: 2e-3\n  weight_decay: ${training.lr}\n",
    )
    values = read_config_file(path)
    assert values["run_name"] == "lr-0.002"
    assert values["training"]["weight_decay"] == 0.002


def test_later_defaults_win_and_the_file_wins_over_all(write: Write) -> None:
    first = "a: 1\nb: 1\nc: 1\nmodel: {hidden: 1, layers: {n: 1, kind: x}}\nids: [1, 2]\n"
    second = "b: 2\nc: 2\nmodel: {layers: {n: 2}}\n"
    own = "c: 3\nmodel: {depth: 3}\nids: [3]\n"
    path = write(first=first, second=second, own=f"defaults: [first, second.yaml]\n{own}")
    assert read_config_file(path) == {
        "a": 1,
        "b": 2,
        "c": 3,
        "model": {"hidden": 1, "layers": {"n": 2, "kind": "x"}, "depth": 3},
        "ids": [3],
    }
    path = write(own=f"defaults: [first, _self_, second]\n{own}")
    assert read_config_file(path)["c"] == 2
    assert read_config_file(path)["ids"] == [3]


def test_defaults_reach_through_folders_and_back_to_the_ready_configs(
    tmp_path: Path, write: Write
) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "speed.yaml").write_text("defaults: [beside, production]\nseed: 1\n")
    (tmp_path / "parts" / "beside.yml").write_text("log_every: 5\n")
    values = read_config_file(write(own="defaults: [parts/speed]\nworld_size: 2\n"))
    assert (values["world_size"], values["seed"], values["log_every"]) == (2, 1, 5)
    assert values["checkpoint_frequency"] == 1000
    # A file beside comes before the ready config of its name.
    assert read_config_file(write(production="seed: 3", own="defaults: [production]")) == {
        "seed": 3
    }


def test_one_default_may_be_asked_for_twice(write: Write) -> None:
    path = write(base="a: 1", left="defaults: [base]", own="defaults: [left, base]\nb: 2")
    assert read_config_file(path) == {"a": 1, "b": 2}


def test_an_emptied_section_does_not_erase_the_defaults(write: Write) -> None:
    path = write(base="training: {lr: 1e-3}", own="defaults: [base]\ntraining:\n  # lr: 1\n")
    assert flatten(read_config_file(path)) == {"learning_rate": 1e-3}


def test_names_are_found_without_their_suffix_and_an_empty_file_is_no_error(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(own="seed: 3", empty="# nothing\n")
    monkeypatch.chdir(tmp_path)
    assert read_config_file("own") == read_config_file("own.yaml") == {"seed": 3}
    assert read_config_file("empty") == {}


# Files that cannot be read


def test_a_circle_of_defaults_is_shown(write: Write) -> None:
    path = write(b="defaults: [a]", a="defaults: [b]", own="defaults: [a]")
    message = problem(read_config_file, path)
    assert "a -> b -> a" in message
    assert "b.yaml: `defaults` go in a circle" in message
    assert "take one name out" in message
    assert "own -> own" in problem(read_config_file, write(own="defaults: [own]"))


def test_a_missing_file_says_what_was_looked_for_and_where(tmp_path: Path, write: Write) -> None:
    message = problem(read_config_file, str(tmp_path / "nowhere"))
    assert "nowhere' not found" in message
    assert f"looked for {tmp_path / 'nowhere.yaml'}" in message
    assert f"ready configs {', '.join(ready_configs())}" in message
    assert {"base_config", "development", "multi_gpu", "production"} <= set(ready_configs())
    assert "give the path of a YAML file" in message
    assert "did you mean 'production'?" in problem(read_config_file, "prodution")
    assert "is a folder; give the path" in problem(read_config_file, str(tmp_path))

    path = write(own="defaults: [common]")
    message = problem(read_config_file, path)
    assert message.startswith(f"{path}: `defaults` names 'common', not found")
    assert f"looked for {tmp_path / 'common.yaml'}" in message
    assert "create it, or take it out" in message


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("training:\n  lr: 1\n\tepochs: 2\n", 3, "tab; indent with spaces"),
        ("training:\n\tlr: 1\n", 2, "tab; indent with spaces"),
        ("a: 1\nb: c: d\n", 2, "space after each colon"),
        ("a:1\nb: 2\n", 2, "in the line above"),
        ("a:\n  b: 1\n c: 2\n", 3, "indent the keys of a section alike"),
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key a in 'a: 3'; keep one"),
        ("x: 1\na: [1, 2\n", 2, "close the bracket"),
        ("x: 1\na: {b: ${x}}\n", 2, "quote a ${...} inside brackets"),
        ("x: 1\na: 'b\nc: 2\n", 2, "close the quote"),
        ("a: 1\nb: @x\n", 2, "put the value in quotes"),
        ("a: 1\n---\nb: 1\n", 2, "remove the `---`"),
        ("a: 1\nb: \x07\n", 2, "take it out"),
        ("a: !!python/object/apply:os.getcwd []\n", 1, "take it out"),
    ],
)
def test_bad_yaml_is_an_error_with_file_line_and_hint(
    text: str, line: int, says: str, write: Write
) -> None:
    path = write(bad=text)
    message = problem(read_config_file, path)
    assert message.startswith(f"{path}, line {line}: ")
    assert says in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "top level is a sequence; a config file holds `key: value`"),
        ("hello", "top level is a scalar"),
        ("3", "top level is a scalar"),
        ("a: {b: '${c}'}", "a.b: Interpolation key 'c' not found; set a.b, or what it refers to"),
        ("a: ${b", "write a reference as ${name}"),
        ("a: ???", "Missing mandatory value: a; set a"),
        ("null: 1", "a key as text or a number"),
        ("defaults: base", "defaults='base' must be a list of names"),
        ("defaults: [{model: small}]", "must be a list of names"),
        ("defaults: [_self_, _self_]", "holds _self_ 2 times; keep one"),
    ],
)
def test_what_no_config_can_be_made_of_is_an_error(text: str, says: str, write: Write) -> None:
    path = write(bad=text)
    message = problem(read_config_file, path)
    assert message.startswith(f"{path}: ")
    assert says in message


def test_a_list_over_a_section_and_bytes_that_are_no_text_are_errors(
    tmp_path: Path, write: Write
) -> None:
    message = problem(read_config_file, write(base="a: {b: 1}", own="defaults: [base]\na: [1]"))
    assert "own.yaml: _self_ in `defaults` does not fit" in message
    assert "make the key a list in each, or a section in each" in message
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    assert "must be a text file in UTF-8" in problem(
        read_config_file, str(tmp_path / "binary.yaml")
    )


# Overrides


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=2e-3", ("lr", 0.002)),
        ("training.lr=1e-3", ("training.lr", 0.001)),
        ("device_ids=[0,1]", ("device_ids", [0, 1])),
        ("sync_bn=true", ("sync_bn", True)),
        ("run_name=a=b", ("run_name", "a=b")),
        ("run_name='8'", ("run_name", "8")),
        ("max_steps=null", ("max_steps", None)),
        ("max_steps=", ("max_steps", None)),
        ("model={hidden: 8, rate: 1e-2}", ("model", {"hidden": 8, "rate": 0.01})),
    ],
)
def test_an_override_is_typed_as_yaml_types_it(text: str, expected: tuple[str, Any]) -> None:
    key, value = read_override(text)
    assert (key, value) == expected
    assert type(value) is type(expected[1])


@pytest.mark.parametrize("text", ["lr", "", "=3", " =3", "training.=1", ".lr=1", "a..b=1"])
def test_an_override_without_key_or_equals_is_an_error(text: str) -> None:
    message = problem(read_override, text)
    assert repr(text) in message
    assert "write key=value, for example lr=2e-3" in message


@pytest.mark.parametrize("text", ["ids=[0,1", "lr=${nothing}", "x='a"])
def test_an_override_that_cannot_be_read_says_how_to_quote_it(text: str) -> None:
    message = problem(read_override, text)
    assert repr(text) in message
    assert "quote it" in message


# Names


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"training": {"batch_size": 32}}, {"global_batch_size": 32}),
        ({"batch_size": 32}, {"batch_size": 32}),
        ({"training": {"lr": 1e-3, "epochs": 3}}, {"learning_rate": 1e-3, "epochs": 3}),
        ({"training.lr": 1e-3}, {"learning_rate": 1e-3}),
        ({"distributed": {"enabled": True}}, {"training_mode": "distributed_data_parallel"}),
        ({"distributed": {"enabled": False}}, {"training_mode": "single"}),
        ({"distributed": {"sync_batchnorm": True}}, {"sync_bn": True}),
        ({"distributed": {"backend": "gloo"}}, {"backend": "gloo"}),
        ({"distributed": {"bucket_cap_mb": 1, "timeout": 60}}, {"bucket_cap_mb": 1, "timeout": 60}),
        ({"lr": 1e-3}, {"learning_rate": 1e-3}),
        ({"grad_accum_steps": 2}, {"gradient_accumulation_steps": 2}),
        ({"gpu_ids": [0]}, {"device_ids": [0]}),
        ({"num_gpus": 2}, {"world_size": 2}),
        ({"num_gpus": -1}, {}),
        ({"distributed": {"num_gpus": -1}}, {}),
        ({"multi_gpu": "ddp"}, {"training_mode": "distributed_data_parallel"}),
        ({"multi_gpu": "dp"}, {"training_mode": "data_parallel"}),
        ({"multi_gpu": False}, {"training_mode": "single"}),
        ({"sync_batchnorm": True}, {"sync_bn": True}),
        ({"warmup": 10}, {"warmup_steps": 10}),
        ({"training": {"warmup": 10}}, {"warmup_steps": 10}),
        ({"training": None, "distributed": {}}, {}),
        ({"model": {"lr": 1}}, {"model": {"lr": 1}}),
        ({"model.a": 1, "model.b.c": 2}, {"model": {"a": 1, "b": {"c": 2}}}),
    ],
)
def test_every_spelling_leads_to_its_field(
    values: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert flatten(values) == expected


def test_two_spellings_of_a_field_must_agree() -> None:
    same = {"lr": 1e-3, "learning_rate": 0.001, "training": {"lr": 1e-3}}
    assert flatten(same) == {"learning_rate": 1e-3}
    assert flatten({"multi_gpu": "ddp", "distributed": {"enabled": True}}) == {
        "training_mode": "distributed_data_parallel"
    }
    found = problems(
        flatten,
        {"lr": 1e-3, "training": {"lr": 2e-3}, "sync_bn": True, "sync_batchnorm": False},
    )
    assert len(found) == 2
    assert found[0].startswith("lr=0.001 and training.lr=0.002 both set learning_rate; keep one")
    assert "sync_bn=True and sync_batchnorm=False both set sync_bn" in found[1]
    assert "distributed.enabled=False" in str(
        problems(flatten, {"training_mode": "ddp", "distributed": {"enabled": False}})
    )


def test_a_section_that_is_none_is_an_error() -> None:
    found = problems(flatten, {"training": 3, "distributed": True})
    assert found[0] == "training=3 is a section; put its keys below it, as in `lr: 2e-3`"
    assert "distributed=True is a section" in found[1]
    assert "must be true or false" in problem(flatten, {"distributed": {"enabled": "maybe"}})


def test_an_override_wins_over_the_file_whatever_its_spelling(write: Write) -> None:
    path = write(own="training: {lr: 1e-3}\nmodel: {hidden: 8, depth: 2}\n")
    overrides = dict(map(read_override, ["learning_rate=5e-3", "model.depth=3"]))
    assert merge(flatten(read_config_file(path)), flatten(overrides)) == {
        "learning_rate": 5e-3,
        "model": {"hidden": 8, "depth": 3},
    }


def test_fields_and_options_are_told_apart() -> None:
    values = {"epochs": 2, "hidden": 64, "model": {"depth": 2}}
    assert split(values, ["hidden", "model"]) == (
        {"epochs": 2},
        {"hidden": 64, "model": {"depth": 2}},
    )


def test_all_unknown_keys_are_named_at_once() -> None:
    found = problems(split, {"epocs": 2, "hiden": 64, "zzzzzz": 1, "seed": 1}, iter(["hidden"]))
    assert found == [
        "unknown key 'epocs'; did you mean 'epochs'?",
        "unknown key 'hiden'; did you mean 'hidden'?",
        "unknown key 'zzzzzz'; `mgt config-schema` lists every key",
    ]
    # YAML reads a bare `on` as true; it still has to be reported, not to crash.
    assert "unknown key 'True'" in problem(split, {True: 1}, [])


def test_the_schema_knows_every_field_its_default_and_its_description() -> None:
    properties = schema()["properties"]
    assert set(properties) == set(MultiGPUConfig.model_fields)
    plain = MultiGPUConfig().plain()
    plain["save_dir"] = Path(plain["save_dir"]).name  # a config holds it as an absolute path
    for name, field in MultiGPUConfig.model_fields.items():
        assert properties[name]["default"] == plain[name], name
        assert properties[name].get("description") == field.description, name
    # Files give seconds; pydantic alone would allow only ISO durations here.
    assert {"type": "number"} in properties["timeout"]["anyOf"]


@pytest.mark.parametrize("value", ["!!timestamp x", "!!omap [1]", "!!int x"])
def test_a_tag_that_its_value_does_not_fit_is_refused_in_words(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.yaml").write_text(f"recipe: image\nlr: {value}\n")
    with pytest.raises(ConfigError):
        read_config_file(str(tmp_path / "config.yaml"))
    with pytest.raises(ConfigError):
        read_override(f"lr={value}")
    with pytest.raises(ValueError, match="unreadable"):
        read_yaml(tmp_path / "config.yaml")
