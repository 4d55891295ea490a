"""Logging: set up once, on our own logger only, and only where nobody else did."""

import logging
from collections.abc import Iterator

import pytest

from octavo import log
from octavo.errors import InvalidConfig


@pytest.fixture(autouse=True)
def keep_level() -> Iterator[None]:
    level, propagate = log.logger.level, log.logger.propagate
    yield
    log.logger.setLevel(level)
    log.logger.propagate = propagate


def drop_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers as a program finds them that configured nothing; in the test itself, since pytest adds its own."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(log.logger, "handlers", [])
    log.logger.setLevel(logging.NOTSET)


def test_it_is_set_up_once_and_leaves_the_root_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drop_handlers(monkeypatch)
    monkeypatch.setenv("OCTAVO_LOGGING_LEVEL", "warning")
    for _ in range(2):
        log.set_up()
    log.logger.info("hidden")
    log.logger.warning("shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING ")
    assert line.endswith("] shown")
    assert "[test_log.py:" in line
    assert logging.root.handlers == []


def test_what_a_program_set_up_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_handlers(monkeypatch)
    logging.root.addHandler(logging.NullHandler())
    log.set_up()
    assert log.logger.handlers == []
    drop_handlers(monkeypatch)
    monkeypatch.setenv("OCTAVO_CONFIGURE_LOGGING", "0")
    log.set_up()
    assert log.logger.handlers == []


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_handlers(monkeypatch)
    monkeypatch.setenv("OCTAVO_LOGGING_LEVEL", "loud")
    with pytest.raises(InvalidConfig, match="OCTAVO_LOGGING_LEVEL=LOUD"):
        log.set_up()
