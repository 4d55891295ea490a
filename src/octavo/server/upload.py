"""Reads a multipart upload as it comes: its file goes to disk, its fields are small."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from octavo.errors import InvalidRequest, OctavoError

MAX_FIELD_BYTES = 64 << 10
MAX_FIELDS = 32


class TooLarge(OctavoError):
    """More bytes than may be uploaded."""

    status = 413


@dataclass
class Upload:
    """What a form held. `size` counts the file's bytes; `filename` is None where there was no file."""

    filename: str | None = None
    size: int = 0
    fields: dict[str, str] = field(default_factory=dict)


class _Parts:
    """The parser's callbacks."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self.file, self.max_bytes = file, max_bytes
        self.upload = Upload()
        self.ended = False
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._name, self._is_file, self._field = "", False, bytearray()

    def on_part_begin(self) -> None:
        self._disposition = b""
        self._field.clear()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = b"filename" in options
        if self._is_file:
            if self.upload.filename is not None or self._name != "file":
                raise InvalidRequest("A form with one file, called file, is expected.", param="file")
            # Only a name to show: what lies on disk is called by its id.
            name = options[b"filename"].decode(errors="replace").replace("\\", "/").rsplit("/", 1)[-1]
            self.upload.filename = name[:255] or "file"
        elif len(self.upload.fields) >= MAX_FIELDS:
            raise InvalidRequest(f"A form of at most {MAX_FIELDS} fields is expected.")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.upload.size += end - start
            if self.upload.size > self.max_bytes:
                limit = f"The file is larger than {self.max_bytes} bytes."
                raise TooLarge(limit, "Split it, or raise --max-file-bytes.")
            self.file.write(data[start:end])
        else:
            self._field += data[start:end]
            if len(self._field) > MAX_FIELD_BYTES:
                raise InvalidRequest(f"{self._name} is longer than {MAX_FIELD_BYTES} bytes.", param=self._name)

    def on_part_end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._name] = self._field.decode(errors="replace")

    def on_end(self) -> None:
        self.ended = True


async def receive(request: Request, path: Path, max_bytes: int) -> Upload:
    """Write the form's file to `path`; on any error nothing stays there.

    Raises:
        InvalidRequest: no form, no file in it, or a broken one.
        TooLarge: a file over `max_bytes`.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest("A file is uploaded as multipart/form-data with a boundary.", param="file")
    try:
        with open(path, "wb") as file:
            parts = _Parts(file, max_bytes)
            names = [name for name in dir(parts) if name.startswith("on_")]
            parser = MultipartParser(boundary, {name: getattr(parts, name) for name in names})  # type: ignore[arg-type]
            async for piece in request.stream():
                parser.write(piece)
            parser.finalize()
        if not parts.ended:
            raise InvalidRequest("The form ends before its last boundary.", param="file")
        if parts.upload.filename is None:
            raise InvalidRequest("The form has no file called file.", param="file")
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, MultipartParseError | ClientDisconnect):
            raise InvalidRequest(f"The form cannot be read: {error or 'the connection ended'}.", param="file") from None
        raise
    return parts.upload
