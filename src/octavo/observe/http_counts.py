"""HTTP requests as an API process counts them, on their way to the engine's metrics."""

Row = tuple[str, str, int, float]  # method, route, status, seconds


class HttpCounts:
    """Rows wait here until the next message to the engine takes them."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """`route` is the template ("/v1/models/{id}"), not the path: a label must not have a value for each caller."""
        self._rows.append((method, route, status, seconds))

    def take(self) -> list[Row]:
        rows, self._rows = self._rows, []
        return rows
