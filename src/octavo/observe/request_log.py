"""The log lines of single requests, for those who ask for them (`--enable-log-requests`)."""

import logging

from octavo.errors import shown
from octavo.observe.requests import Record
from octavo.types import SamplingParams

logger = logging.getLogger("octavo")


class RequestLog:
    """Ids, parameters and counts at INFO; the text of prompts at DEBUG only, cut at `max_log_len` characters.

    What a client wrote is shown as a quoted literal, so that it cannot forge a line.
    """

    def __init__(self, max_log_len: int | None = None) -> None:
        self.max_log_len = max_log_len

    def received(self, request_id: str, params: SamplingParams, num_prompt_tokens: int, prompt: str | None) -> None:
        extra = {"request_id": request_id, "num_prompt_tokens": num_prompt_tokens}
        logger.info(
            "Received request %s: %d prompt tokens, params: %s", shown(request_id), num_prompt_tokens, _told(params),
            extra=extra,
        )  # fmt: skip
        if prompt is not None:
            logger.debug("Request %s prompt: %r", shown(request_id), prompt[: self.max_log_len], extra=extra)

    def ended(self, record: Record) -> None:
        """Append it to `Metrics.on_finished`."""
        self.finished(record.request.id, str(record.reason), record.num_generated)

    def finished(self, request_id: str, reason: str, num_generated_tokens: int) -> None:
        extra = {"request_id": request_id, "finish_reason": reason, "num_generated_tokens": num_generated_tokens}
        logger.info(
            "Finished request %s: %s after %d tokens", shown(request_id), reason, num_generated_tokens, extra=extra
        )


TEXTS = ("stop", "bad_words")  # written by the user, as the prompt is


def _told(params: SamplingParams) -> str:
    """What differs from the defaults; of texts only how many there are."""
    default = SamplingParams()
    told = []
    for name in SamplingParams.__dataclass_fields__:
        value = getattr(params, name)
        if value != getattr(default, name):
            told.append(f"{name}=<{len(value)}>" if name in TEXTS else f"{name}={shown(value)}")
    return f"SamplingParams({', '.join(told)})"
