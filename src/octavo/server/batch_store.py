"""Files and batches on disk: one SQLite database (WAL) and a folder; any number of processes may open it."""

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import InvalidConfig, OctavoError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_UNFINISHED_MARKS = ",".join("?" * len(UNFINISHED))
LEFT_ALONE = 3600  # seconds after which a file that no row names belongs to nobody
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, served TEXT NOT NULL,
    endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, status TEXT NOT NULL,
    model TEXT, output_file_id TEXT, error_file_id TEXT, errors TEXT, metadata TEXT, output_lifetime INTEGER,
    created_at INTEGER NOT NULL, in_progress_at INTEGER, expires_at INTEGER NOT NULL, finalizing_at INTEGER,
    completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0, completion_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS unfinished ON batches (served, status);
CREATE TABLE IF NOT EXISTS answers (
    batch TEXT NOT NULL, line INTEGER NOT NULL, good INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (batch, line)
);
"""


class NotFound(OctavoError):
    """Nothing of that id, or nothing of the asking key's."""

    status = 404


class InUse(OctavoError):
    """A file that a running batch reads."""

    status = 409


class Store:
    """All methods block for a moment: call them from a thread. They may be called from any.

    Raises:
        InvalidConfig: the folder cannot be written.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.clock = folder, clock
        self.files = folder / "files"
        self._lock = threading.Lock()
        try:
            self.files.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._database = sqlite3.connect(
                folder / "batches.sqlite3", timeout=30, isolation_level=None, check_same_thread=False
            )
            self._database.row_factory = sqlite3.Row
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")  # a crash of the process loses nothing
            self._database.executescript(SCHEMA)
            os.chmod(folder / "batches.sqlite3", 0o600)
        except (OSError, sqlite3.Error) as error:
            raise InvalidConfig(
                f"The folder {folder} cannot hold files and batches: {error}.", "Give another with --data-dir."
            ) from error

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _rows(self, query: str, values: Iterable[Any] = ()) -> list[Row]:
        with self._lock:
            return [dict(row) for row in self._database.execute(query, tuple(values))]

    @property
    def now(self) -> int:
        return int(self.clock())

    # Files

    def path(self, file_id: str) -> Path:
        return self.files / file_id

    def add_file(self, file_id: str, tenant: str, purpose: str, filename: str, size: int, lifetime: int | None) -> Row:
        """Register what already lies at `path(file_id)`."""
        with self._transaction() as database:
            self._insert_file(database, file_id, tenant, purpose, filename, size, lifetime)
        return self.file(file_id, tenant)

    def _insert_file(
        self, database: sqlite3.Connection, file_id: str, tenant: str, purpose: str, filename: str, size: int,
        lifetime: int | None,
    ) -> None:  # fmt: skip
        expires = None if lifetime is None else self.now + lifetime
        database.execute(
            "INSERT OR REPLACE INTO files (id, tenant, purpose, filename, bytes, created_at, expires_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file_id, tenant, purpose, filename, size, self.now, expires),
        )

    def file(self, file_id: str, tenant: str) -> Row:
        found = self._rows(
            "SELECT * FROM files WHERE id = ? AND tenant = ? AND (expires_at IS NULL OR expires_at > ?)",
            (file_id, tenant, self.now),
        )
        if not found:
            raise NotFound(f"No such File object: {file_id}.")
        return found[0]

    def list_files(
        self, tenant: str, limit: int, after: str | None, purpose: str | None, ascending: bool
    ) -> tuple[list[Row], bool]:
        where, values = "tenant = ? AND (expires_at IS NULL OR expires_at > ?)", [tenant, self.now]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        return self._page("files", where, values, limit, after and self.file(after, tenant)["number"], ascending)

    def delete_file(self, file_id: str, tenant: str) -> None:
        self.file(file_id, tenant)
        with self._transaction() as database:
            user = database.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({_UNFINISHED_MARKS})",
                (file_id, *UNFINISHED),
            ).fetchone()
            if user:
                raise InUse(f"The file {file_id} is read by {user['id']}.", "Cancel that batch, or wait for its end.")
            database.execute("DELETE FROM files WHERE id = ? AND tenant = ?", (file_id, tenant))
        self.path(file_id).unlink(missing_ok=True)

    # Batches

    def add_batch(self, tenant: str, served: str, lifetime: int, **columns: Any) -> Row:
        batch_id = f"batch_{uuid.uuid4().hex}"
        values = {
            "id": batch_id, "tenant": tenant, "served": served, "status": "validating", "created_at": self.now,
            "expires_at": self.now + lifetime, **columns,
        }  # fmt: skip
        with self._transaction() as database:
            marks = ",".join("?" * len(values))
            database.execute(f"INSERT INTO batches ({', '.join(values)}) VALUES ({marks})", (*values.values(),))
        return self.batch(batch_id, tenant)

    def batch(self, batch_id: str, tenant: str | None = None) -> Row:
        """With a tenant: only if it is theirs."""
        found = self._rows("SELECT * FROM batches WHERE id = ?", (batch_id,))
        if not found or tenant not in (None, found[0]["tenant"]):
            raise NotFound(f"No batch found with id '{batch_id}'.")
        return found[0]

    def list_batches(self, tenant: str, limit: int, after: str | None) -> tuple[list[Row], bool]:
        number = after and self.batch(after, tenant)["number"]
        return self._page("batches", "tenant = ?", [tenant], limit, number, ascending=False)

    def _page(
        self, table: str, where: str, values: list[Any], limit: int, after: int | str | None, ascending: bool
    ) -> tuple[list[Row], bool]:
        """Some rows, newest first unless `ascending`, and whether there are more."""
        if after is not None:
            where, values = f"{where} AND number {'>' if ascending else '<'} ?", [*values, after]
        order = "ASC" if ascending else "DESC"
        rows = self._rows(f"SELECT * FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?", [*values, limit + 1])
        return rows[:limit], len(rows) > limit

    def move(self, batch_id: str, to: str, since: Iterable[str], **columns: Any) -> bool:
        """Change a batch's status if it is one of `since` now; false means that somebody was faster."""
        since = tuple(since)
        values = {"status": to, f"{to}_at": self.now, **columns}
        marks = ",".join("?" * len(since))
        with self._transaction() as database:
            changed = database.execute(
                f"UPDATE batches SET {_assignments(values)} WHERE id = ? AND status IN ({marks})",
                (*values.values(), batch_id, *since),
            )
            return changed.rowcount == 1

    def unfinished(self, served: str, limit: int) -> list[Row]:
        """The oldest batches of a model that are not at their end."""
        return self._rows(
            f"SELECT * FROM batches WHERE served = ? AND status IN ({_UNFINISHED_MARKS}) ORDER BY number LIMIT ?",
            (served, *UNFINISHED, limit),
        )

    def answered(self, batch_id: str) -> set[int]:
        """The lines that need nothing more."""
        return {row["line"] for row in self._rows("SELECT line FROM answers WHERE batch = ?", (batch_id,))}

    def record(self, batch_id: str, line: int, record: Row, usage: tuple[int, int] = (0, 0)) -> bool:
        """Keep the answer to a line, once: false when it has one already."""
        response = record["response"]
        good = response is not None and response["status_code"] == 200
        with self._transaction() as database:
            new = database.execute(
                "INSERT OR IGNORE INTO answers (batch, line, good, record) VALUES (?, ?, ?, ?)",
                (batch_id, line, good, msgspec.json.encode(record)),
            )
            if new.rowcount:
                database.execute(
                    f"UPDATE batches SET {'completed = completed' if good else 'failed = failed'} + 1,"
                    " prompt_tokens = prompt_tokens + ?, completion_tokens = completion_tokens + ? WHERE id = ?",
                    (*usage, batch_id),
                )
        return bool(new.rowcount)

    def finish(self, batch: Row, status: str) -> None:
        """Write the answers into files, then, in one transaction, name the files and end the batch.

        Interrupted at any point it can be done again: the names of the files follow from the batch's.
        """
        batch_id, columns, files = batch["id"], {}, []
        for good, column, word in ((1, "output_file_id", "output"), (0, "error_file_id", "error")):
            file_id = f"file-{hashlib.sha256(f'{batch_id} {word}'.encode()).hexdigest()[:24]}"
            size = self._write_answers(self.path(file_id), batch_id, good)
            if size:
                columns[column] = file_id
                files.append((file_id, f"{batch_id}_{word}.jsonl", size))
        values = {"status": status, f"{status}_at": self.now, **columns}
        with self._transaction() as database:
            for file_id, filename, size in files:
                lifetime = batch["output_lifetime"]
                self._insert_file(database, file_id, batch["tenant"], "batch_output", filename, size, lifetime)
            database.execute(f"UPDATE batches SET {_assignments(values)} WHERE id = ?", (*values.values(), batch_id))
            database.execute("DELETE FROM answers WHERE batch = ?", (batch_id,))

    def _write_answers(self, path: Path, batch_id: str, good: int) -> int:
        part = path.with_suffix(".part")
        after, size = 0, 0
        with open(part, "wb") as file:
            while rows := self._rows(
                "SELECT line, record FROM answers WHERE batch = ? AND good = ? AND line > ? ORDER BY line LIMIT 200",
                (batch_id, good, after),
            ):
                for row in rows:
                    size += file.write(row["record"] + b"\n")
                after = rows[-1]["line"]
            file.flush()
            os.fsync(file.fileno())
        if size:
            part.replace(path)
        else:
            part.unlink()
        return size

    def sweep(self) -> None:
        """Delete what expired, and what interrupted uploads and deletions left on disk."""
        with self._transaction() as database:
            database.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN"
                f" (SELECT input_file_id FROM batches WHERE status IN ({_UNFINISHED_MARKS}))",
                (self.now, *UNFINISHED),
            )
        known = {row["id"] for row in self._rows("SELECT id FROM files")}
        for path in self.files.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name not in known and path.stat().st_mtime < time.time() - LEFT_ALONE:
                    path.unlink()

    def own(self, served: str) -> int | None:
        """Become the one process that runs a model's batches: a descriptor to keep open, or None while another is.

        The system lets the lock go when the process ends, however it ends.
        """
        name = hashlib.sha256(served.encode()).hexdigest()[:16]
        descriptor = os.open(self.folder / f"owner-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor


def _assignments(names: Iterable[str]) -> str:
    return ", ".join(f"{name} = ?" for name in names)
