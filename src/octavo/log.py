"""The logger of Octavo: one name, one format, set up once and only where the program around it did not."""

import logging

from octavo import env
from octavo.errors import InvalidConfig

FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
TIME_FORMAT = "%m-%d %H:%M:%S"

logger = logging.getLogger("octavo")


def set_up() -> None:
    """Show the messages of Octavo on standard error, from the level in OCTAVO_LOGGING_LEVEL.

    The root logger is left alone. Handlers that a program put on `octavo` or on the root stay the only
    ones, and so does the level it chose.

    Raises:
        InvalidConfig: a level that Python's logging does not know.
    """
    if not env.configures_logging() or logger.hasHandlers():
        return
    level = env.logging_level()
    known = logging.getLevelNamesMapping()
    if level not in known:
        raise InvalidConfig(f"OCTAVO_LOGGING_LEVEL={level} is not a level.", f"It is one of {', '.join(known)}.")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT, TIME_FORMAT))
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
