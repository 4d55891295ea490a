"""Flags read off option dataclasses, an options file of the same names, and what users of other engines type."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from cyclopts import App, CoercionError, UnknownOptionError

from octavo.config import ENGINE_ELSEWHERE, EngineConfig, options, options_of
from octavo.errors import InvalidConfig
from octavo.flags import ENGINE, Family, read_config_file, with_options
from octavo.known import Elsewhere


@dataclass(frozen=True)
class _Door:
    """Options of another kind, as a server has them."""

    port: int = 8000
    """Where to listen."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients use."""
    level: Literal["low", "high"] = "low"
    """How much."""


def _make_door(owner: str, **given: Any) -> _Door:
    return _Door(**given)


DOOR = Family(_make_door, tuple(options_of(_Door, "Door")), {"ssl_keyfile": Elsewhere("no TLS", (None,))})


@with_options(positional="model", config=ENGINE, door=DOOR)
def _open_door(*, loud: bool = False, config: EngineConfig, door: _Door) -> tuple[bool, EngineConfig, _Door]:  # type: ignore[misc]
    """Open it."""
    return loud, config, door


def run(*words: str) -> tuple[bool, EngineConfig, _Door]:
    app = App(config=read_config_file, exit_on_error=False, print_error=False, result_action="return_value")
    app.command(_open_door, name="open")
    return app(["open", *words])  # type: ignore[no-any-return]


def config_of(*words: str) -> EngineConfig:
    return run(*words)[1]


def test_nothing_given_is_every_default() -> None:
    assert run() == (False, EngineConfig(), _Door())


def test_each_option_has_its_flag() -> None:
    for option in options():
        value = {bool: not option.default, int: 7, float: 0.5}.get(type(option.default))
        flag = f"--{option.name.replace('_', '-')}"
        if isinstance(value, bool):
            words = (flag,) if value else (f"--no-{flag[2:]}",)
        elif value is not None:
            words = (flag, str(value))
        else:
            continue
        config = config_of(*words)
        assert getattr(getattr(config, option.group), option.name) == value, flag


def test_flags_are_read_as_users_write_them() -> None:
    loud, config, door = run(
        "here", "--loud", "--max_model_len=4k", "--dtype", "half", "--port", "9", "--level", "high"
    )
    assert loud
    assert config.model == replace(EngineConfig().model, model="here", max_model_len="4k", dtype="float16")
    assert door == _Door(port=9, level="high")
    assert config_of("--model", "here", "--max-model-len", "-1").model.max_model_len == -1
    assert run("--served-model-name", "a", "--served-model-name", "b")[2].served_model_name == ("a", "b")


def test_flags_of_other_engines_are_noted_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    words = ("-tp", "1", "--trust-remote-code", "--no-enable-lora", "--tokenizer-mode", "auto", "--watermark", "0.0")
    with caplog.at_level(logging.INFO, logger="octavo"):
        assert config_of(*words, "-O3", "--hf-overrides", "{}") == EngineConfig()
    for words, message in (
        (("-tp", "2"), "tensor_parallel_size=2 is not available: this engine runs on one device"),
        (("--enable-lora",), "enable_lora=True"),
        (("--speculative-config", '{"method": "ngram"}'), "there is no speculation yet"),
        (("--ssl-keyfile", "a.key"), "no TLS"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            run(*words)
    with pytest.raises(CoercionError, match="awq.*gguf.*int8"):
        run("--quantization=awq")


def test_every_known_name_is_a_flag_and_refused_at_a_value_it_does_not_have() -> None:
    for name, known in ENGINE_ELSEWHERE.items():
        flag = f"--{name.replace('_', '-')}"
        if any(isinstance(value, bool) for value in known.harmless):
            if True not in known.harmless:
                with pytest.raises(InvalidConfig, match=name):
                    run(flag)
        elif name not in {option.name for option in DOOR.options}:
            with pytest.raises(InvalidConfig, match=name):
                run(flag, "something")


def test_an_unknown_flag_gets_the_nearest_name() -> None:
    with pytest.raises(UnknownOptionError) as caught:
        run("--max-num-sequences", "3")
    assert "Did you mean --max-num-seqs?" in str(caught.value)


def test_a_file_fills_what_the_command_line_leaves_open(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: /a/folder\nmax-model-len: 4k\nenable_prefix_caching: false\nblock-size: 32\nrevision: null\n"
        "served-model-name: [one, two]\ntensor-parallel-size: 1\ncompilation-config: {}\nlora_modules: []\n"
    )
    _, config, door = run("--config", str(file), "--block-size", "64")
    assert config.model.model == "/a/folder" and config.model.max_model_len == "4k"
    assert config.cache == replace(EngineConfig().cache, block_size=64, enable_prefix_caching=False)
    assert door.served_model_name == ("one", "two")
    assert config_of("/other", "--config", str(file)).model.model == "/other"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("blok-size: 3", UnknownOptionError, "Did you mean --block-size"),
        ("block-size: wide", CoercionError, "options.yaml"),
        ("tensor-parallel-size: 2", InvalidConfig, "tensor_parallel_size=2"),
        ("compilation-config: {level: 3}", InvalidConfig, "compilation_config="),
        ("lora-modules: [a=b]", InvalidConfig, "lora_modules="),
        ("block-size: 0", InvalidConfig, "block_size=0"),
        ("- a\n- b", InvalidConfig, "no YAML mapping"),
        ("a: [", InvalidConfig, "options.yaml cannot be read"),
        ("3: 4", InvalidConfig, "no YAML mapping"),
        ("\x00", InvalidConfig, "options.yaml cannot be read"),
    ],
)
def test_a_file_at_fault_is_refused_by_name(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(error) as caught:
        run("--config", str(file))
    assert message in str(caught.value)


def test_an_empty_file_changes_nothing_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("")
    assert config_of("--config", str(file)) == EngineConfig()
    with pytest.raises(InvalidConfig, match="No such file"):
        run("--config", str(tmp_path / "none.yaml"))
