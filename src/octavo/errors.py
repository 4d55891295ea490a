"""The exceptions a caller may catch: each has an HTTP status and, where one exists, a hint that mends it."""


class OctavoError(Exception):
    """Something Octavo refuses or cannot do.

    `str()` gives the cause, followed by the hint where there is one, so that the last line a person
    sees says what to do.
    """

    status = 500

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class InvalidRequest(OctavoError, ValueError):
    """A request that can never run. `param` names the field at fault."""

    status = 400

    def __init__(self, message: str, hint: str = "", param: str = "") -> None:
        super().__init__(message, hint)
        self.param = param


class InvalidConfig(OctavoError, ValueError):
    """Engine options that contradict each other, the model or the machine."""


class ModelNotFound(OctavoError, FileNotFoundError):
    """No model, or no such file of a model, at the given place."""

    status = 404


class InvalidWeights(OctavoError, ValueError):
    """A weight file that is damaged, incomplete or of another model."""


class EngineDead(OctavoError):
    """The engine stopped for good; the message carries the cause."""

    status = 503


class Overloaded(OctavoError):
    """The queue is full; nothing of the request ran. Try again after `retry_after_s` seconds.

    `reason` is "num_reqs" or "num_tokens", whichever limit was met.
    """

    status = 503

    def __init__(self, message: str, hint: str = "", retry_after_s: int = 1, reason: str = "num_reqs") -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s
        self.reason = reason


class ShuttingDown(OctavoError):
    """The server takes no new requests: it ends when those at work are done."""

    status = 503


class TimedOut(OctavoError):
    """The time that a request gave itself (`timeout_ms`) was over before its first token."""

    status = 408


def shown(value: object, limit: int = 80) -> str:
    """A value as a message shows it: its `repr`, cut at `limit` characters; its type where it has no `repr`."""
    try:
        text = repr(value)
    except Exception:  # integers of many thousand digits, and objects of others
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
