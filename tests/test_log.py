"""Logging: set up once, on our own logger only, and only where nobody else did; text, JSON, single requests."""

import json
import logging
import os
import re
from collections.abc import Iterator

import pytest

from octavo import log
from octavo.errors import InvalidConfig
from octavo.observe.request_log import RequestLog
from octavo.types import SamplingParams


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


def test_json_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    drop_handlers(monkeypatch)
    log.set_up("json", "engine")
    log.logger.info("two\nlines of %s", "text", extra={"request_id": "r1", "odd": {1}})
    try:
        raise ValueError("cause")
    except ValueError:
        log.logger.exception("went wrong")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == "two\nlines of text"
    assert (first["level"], first["logger"], first["process"]) == ("INFO", "octavo", "engine")
    assert (first["request_id"], first["odd"]) == ("r1", "{1}")
    assert first["file"] == "test_log.py" and first["pid"] == os.getpid()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "ValueError: cause" in second["exception"]


def test_a_second_set_up_changes_format_and_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drop_handlers(monkeypatch)
    log.set_up()
    log.set_up("text", "api-0")
    log.logger.info("once")
    assert re.fullmatch(r"\(api-0 pid=\d+\) INFO .* once", capsys.readouterr().err.strip())
    with pytest.raises(InvalidConfig, match="log_format='xml'"):
        log.set_up("xml")  # type: ignore[arg-type]


def test_a_library_speaks_through_our_handler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drop_handlers(monkeypatch)
    library = logging.getLogger("some_library")
    log.route("some_library")
    assert library.handlers == []  # Octavo has no handler here
    log.set_up("json")
    log.route("some_library", "WARNING")
    library.info("hidden")
    library.warning("shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["logger"] == "some_library"


@pytest.mark.parametrize(("name", "coloured"), [("FORCE_COLOR", True), ("NO_COLOR", False)])
def test_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, coloured: bool
) -> None:
    drop_handlers(monkeypatch)
    monkeypatch.setenv(name, "1")
    log.set_up()
    log.logger.warning("look")
    assert ("\x1b[" in capsys.readouterr().err) is coloured


def test_requests_are_logged_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0.5, stop=("secret stop",), bad_words=("secret word",))
    requests = RequestLog(max_log_len=9)
    with caplog.at_level(logging.INFO, "octavo"):
        requests.received("id\nINFO forged", params, 7, "secret prompt that is long")
        requests.finished("id", "length", 3)
    assert "secret" not in caplog.text
    assert "\nINFO forged" not in caplog.text
    assert "7 prompt tokens, params: SamplingParams(temperature=0.5, stop=<1>, bad_words=<1>)" in caplog.text
    assert "Finished request 'id': length after 3 tokens" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "octavo"):
        requests.received("id", params, 7, "secret prompt that is long")
    assert "prompt: 'secret pr'" in caplog.text
