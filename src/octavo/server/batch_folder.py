"""Where a server keeps files and batches, and whose they are."""

from pathlib import Path

from fastapi import FastAPI, Request

from octavo import env
from octavo.server.batch_store import Store


def store_of(app: FastAPI) -> Store:
    """The server's store, opened when it is first needed."""
    if not hasattr(app.state, "batch_store"):
        folder = app.state.options.data_dir
        app.state.batch_store = Store(Path(folder).expanduser() if folder else env.cache_root() / "data")
    store: Store = app.state.batch_store
    return store


def tenant_of(request: Request) -> str:
    """Whose the request is: "" where the server has no keys, else a digest of the key."""
    return str(request.scope.get("octavo.tenant", ""))
