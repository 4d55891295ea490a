"""What users of other engines type: keywords known by name, taken at a harmless value, else explained."""

import dataclasses
import difflib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

logger = logging.getLogger("octavo")
Cls = TypeVar("Cls", bound=type)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A keyword that another engine has: `harmless` values change nothing here, others are refused with `why`."""

    why: str
    harmless: tuple[Any, ...] = (None, False)


def drop_known(owner: str, names: set[str], known: Mapping[str, Elsewhere], given: dict[str, Any]) -> dict[str, Any]:
    """Keep what `owner` has. Known foreign keywords are noted and dropped, or refused; others are a TypeError.

    Raises:
        ValueError: a known keyword with a value that asks for something Octavo does not do.
        TypeError: a keyword nobody knows; the message names the nearest one.
    """
    kept = {}
    for name, value in given.items():
        if name in names:
            kept[name] = value
        elif name not in known:
            near = difflib.get_close_matches(name, [*names, *known], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{owner}: unknown keyword {name!r}.{hint}")
        elif not any(value is h or (type(value) is type(h) and value == h) for h in known[name].harmless):
            raise ValueError(f"{owner}: {name}={value!r} is not available: {known[name].why}")
        else:
            _notice(owner, name)
    return kept


@functools.cache
def _notice(owner: str, name: str) -> None:
    logger.info("%s: %s is accepted and has no effect here.", owner, name)


def knows(known: Mapping[str, Elsewhere]) -> Callable[[Cls], Cls]:
    """Class decorator for dataclasses: `__init__` goes through `drop_known`."""

    def wrap(cls: Cls) -> Cls:
        init: Any = cls.__init__  # type: ignore[misc]  # replaced on the class itself, never on an instance
        names = {field.name for field in dataclasses.fields(cls)}

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **drop_known(cls.__name__, names, known, kwargs))

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return wrap
