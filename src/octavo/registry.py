"""Plugs: modules found by scanning a folder of the package, and entry points of installed packages."""

import ast
import functools
import importlib
import importlib.util
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from octavo.errors import InvalidConfig


@functools.cache
def served(folder: str = "models", declaration: str = "ARCHITECTURES") -> dict[str, str]:
    """Map every name that a plug serves to its module.

    A module of `octavo/<folder>` says what it serves in a literal tuple called `declaration`, which is
    read without importing the module (so that a process without torch may ask). An entry point of
    group `octavo.<folder>` is called by the name it serves, and wins over our own.
    """
    spec = importlib.util.find_spec(f"octavo.{folder}")
    names: dict[str, str] = {}
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("*.py")):
            names |= dict.fromkeys(_literal(path, declaration), f"octavo.{folder}.{path.stem}")
    return names | {point.name: point.value for point in entry_points(group=f"octavo.{folder}")}


def _literal(path: Path, declaration: str) -> tuple[str, ...]:
    for node in ast.parse(path.read_bytes()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Name) and target.id == declaration:
            return tuple(ast.literal_eval(node.value))
    return ()


def check_architecture(name: str) -> str:
    """The module that serves the architecture `name`.

    Raises:
        InvalidConfig: nothing serves it; the message lists what is served.
    """
    names = served()
    if name not in names:
        raise InvalidConfig(f"The architecture {name} is not served.", f"Served are: {', '.join(sorted(names))}.")
    return names[name]


def model_module(architecture: str) -> ModuleType:
    """Import the module whose `build(spec)` makes a model of this architecture."""
    return importlib.import_module(check_architecture(architecture))
