"""Flags of commands, read off option dataclasses, with an options file; what other engines call by name is known."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import yaml
from cyclopts import App, ArgumentCollection, Parameter
from cyclopts.config import Dict

from octavo.config import ENGINE_ELSEWHERE, SAME_AS, TITLES, EngineConfig, Option, options
from octavo.errors import InvalidConfig
from octavo.known import Elsewhere, drop_known

T = TypeVar("T")


class Family(NamedTuple):
    """Options that together become one configuration, and what other engines have in their place."""

    make: Callable[..., Any]
    """Called with the command's name and the given options as keywords."""
    options: tuple[Option, ...]
    elsewhere: Mapping[str, Elsewhere]


ENGINE = Family(EngineConfig.from_keywords, options(), ENGINE_ELSEWHERE)

SHORT = {
    "max_model_len": "-len",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
    "optimization_level": "-O",
}
"""Short names that users of other engines type."""


def with_options(*, positional: str = "", **families: Family) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator of a command: each keyword names a parameter of the command and the family it is made of.

    The command gets a flag for each option of the families, hidden flags for what is known from other
    engines, and `--config`, a YAML file of the same names; the command line wins over the file. A flag of
    another engine is dropped with a notice where its value changes nothing, and refused otherwise.

    Args:
        positional: an option that may also be given without its name, as the command's first argument.
    """

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        owner = f"octavo {command.__name__.replace('_', '-')}"
        own = [p for name, p in inspect.signature(command).parameters.items() if name not in families]
        named = {option.name: option for family in families.values() for option in family.options}
        elsewhere = {name: known for family in families.values() for name, known in family.elsewhere.items()}
        foreign = {name: known for name, known in elsewhere.items() if name not in named}

        @functools.wraps(command)
        def run(*args: Any, config_file: Path | None = None, **given: Any) -> T:
            mine = {p.name: given.pop(p.name) for p in own if p.name in given}
            given |= {name: _meant(value) for name, value in given.items() if name in foreign}
            if positional and args:
                given[positional], *args = args  # type: ignore[assignment]
            try:
                given = drop_known(owner, set(named), foreign, given)
            except ValueError as error:
                raise InvalidConfig(f"{error}.".removeprefix(f"{owner}: ")) from None
            for name, family in families.items():
                names = {option.name for option in family.options}
                mine[name] = family.make(owner, **{n: value for n, value in given.items() if n in names})
            return command(*args, **mine)

        flags = [_flag(option, option.name == positional) for option in named.values()]
        parameters = [*flags, *own, *(_foreign_flag(*item) for item in foreign.items()), _CONFIG_FILE]
        run.__signature__ = inspect.Signature(sorted(parameters, key=lambda p: p.kind))  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def read_config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill what the command line leaves open from the YAML file that `--config` names; for `App(config=...)`.

    Raises:
        InvalidConfig: a file that cannot be read or is no mapping; names nobody knows are told by cyclopts.
    """
    repeated = {name for argument in arguments if get_origin(argument.hint) in (tuple, list) for name in argument.names}
    for argument in arguments:
        if "--config" in argument.names and argument.tokens:
            path = argument.tokens[0].value
            given = _mapping(path)
            for name, value in given.items():
                if isinstance(value, dict | list) and f"--{name.replace('_', '-')}" not in repeated:
                    given[name] = json.dumps(value)  # as on the command line
            Dict(data=given, source=path, use_commands_as_keys=False)(app, commands, arguments)


def _mapping(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfig(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InvalidConfig(f"--config {path} is no YAML mapping of option names to values.")
    return {name: value for name, value in content.items() if value is not None}


def _flag(option: Option, is_positional: bool) -> inspect.Parameter:
    kind: Any = option.type
    if option.name in SAME_AS:
        kind = Literal[(*get_args(kind), *(name for name in SAME_AS[option.name] if name not in get_args(kind)))]
    about = Parameter(
        name=[f"--{option.name.replace('_', '-')}", *_short(option.name)],
        help=option.help,
        group=TITLES.get(option.group, option.group),
        negative_iterable=(),
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD if is_positional else inspect.Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=Annotated[kind, about],
    )


def _foreign_flag(name: str, known: Elsewhere) -> inspect.Parameter:
    is_switch = any(isinstance(value, bool) for value in known.harmless)
    about = Parameter(
        name=[f"--{name.replace('_', '-')}", *_short(name)], show=False, allow_leading_hyphen=not is_switch
    )
    kind: Any = bool if is_switch else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, about]
    )


def _short(name: str) -> list[str]:
    return [SHORT[name]] if name in SHORT else []


def _meant(value: Any) -> Any:
    """The value that a flag's text stands for: a number, a list or a mapping as JSON has them, else the text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None if value == "None" else value


_CONFIG_FILE = inspect.Parameter(
    "config_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        Parameter(name="--config", help="YAML file of these options by name; flags win over it."),
    ],
)
