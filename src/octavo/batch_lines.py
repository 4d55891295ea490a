"""The lines of a batch file in OpenAI's form: what a request line must say, and what its answer or error looks like."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from octavo.errors import InvalidRequest, shown

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = 64 << 20
MAX_CUSTOM_ID = 512


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `number` counts from 1, as editors and error messages do."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


class BadLine(InvalidRequest):
    """A line that is no request. `code` is OpenAI's word for why; `custom_id` is empty where none could be read."""

    def __init__(self, line: int, code: str, message: str, param: str = "", custom_id: str = "") -> None:
        super().__init__(message, param=param)
        self.line, self.code, self.custom_id = line, code, custom_id

    def described(self) -> dict[str, Any]:
        """An entry of a batch's `errors.data`."""
        return {"code": self.code, "message": self.message, "param": self.param or None, "line": self.line}


def raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, read one by one; a line over `MAX_LINE_BYTES` comes cut one byte past it."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        whole = line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1)  # the rest of it is skipped
        if number == 1:
            whole = whole.removeprefix(b"\xef\xbb\xbf")  # what some editors write before the first line
        if whole.strip():
            yield number, whole


def parse(number: int, raw: bytes, endpoint: str | None = None) -> Line:
    """Read one line; with an `endpoint`, its url must be that one.

    Raises:
        BadLine: says what is wrong with it.
    """
    if len(raw) > MAX_LINE_BYTES:
        raise BadLine(number, "line_too_long", f"Line {number} is longer than {MAX_LINE_BYTES} bytes.")
    try:
        line = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(number, "invalid_json_line", f"Line {number} is not JSON: {error}.") from None
    if not isinstance(line, dict):
        raise BadLine(number, "invalid_json_line", f"Line {number} is not a JSON object.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise BadLine(
            number, "missing_required_parameter", f"Line {number}: custom_id={shown(custom_id)} is not allowed: "
            f"it must be a string of 1 to {MAX_CUSTOM_ID} characters.", "custom_id",
        )  # fmt: skip
    allowed = (endpoint,) if endpoint else ENDPOINTS
    for name, value, good in (
        ("method", line.get("method", "POST"), ("POST",)),
        ("url", line.get("url"), allowed),
    ):
        if value not in good:
            message = f"Line {number}: {name}={shown(value)} is not allowed: it must be {' or '.join(good)}."
            raise BadLine(number, f"invalid_{name}", message, name, custom_id)
    body = line.get("body")
    if not isinstance(body, dict):
        message = f"Line {number}: body must be a JSON object with the request."
        raise BadLine(number, "missing_required_parameter", message, "body", custom_id)
    if body.get("stream"):
        message = f"Line {number}: stream=true is not allowed: an answer in a batch is whole."
        raise BadLine(number, "invalid_request", message, "body.stream", custom_id)
    return Line(number, custom_id, line["url"], body)


def answer(custom_id: str, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """The output line of a request that was answered, well (status 200) or not."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _id(), "custom_id": custom_id, "response": response, "error": None}


def failure(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """The output line of a request that was never answered."""
    return {"id": _id(), "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def _id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
