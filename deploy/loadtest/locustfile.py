"""Users of a server with OpenAI's API for Locust: chats, completions, and chats that are read as they stream.

locust -f deploy/loadtest/locustfile.py --headless -u 20 -r 5 -t 60s --host http://localhost:8000
"""

import json
import random
import time
from typing import Any

from locust import HttpUser, between, events, task

WORDS = ["time", "sea", "light", "stone", "river", "paper", "garden", "window", "signal", "copper", "winter", "engine"]
TIMEOUT_SECONDS = 120.0


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--model", default="", help="Name of the model; the first of /v1/models when not given.")
    parser.add_argument(
        "--api-key",
        env_var="OCTAVO_API_KEY",
        default="",
        is_secret=True,
        include_in_web_ui=False,
        help="Key of the server.",
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="Most tokens of an answer.")
    parser.add_argument("--prompt-words", type=int, default=40, help="Words of a prompt; no two prompts are equal.")


class ApiUser(HttpUser):
    """What all users share: the key, the model, and prompts that no prefix cache has seen."""

    abstract = True
    wait_time = between(0.1, 1.0)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        if options.api_key:
            self.client.headers["authorization"] = f"Bearer {options.api_key}"
        self.max_tokens, self.model = options.max_tokens, options.model
        if not self.model:
            self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    def prompt(self) -> str:
        words = random.choices(WORDS, k=max(1, self.environment.parsed_options.prompt_words - 1))
        return f"{random.randrange(10**9)} {' '.join(words)}"

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": self.max_tokens, **fields}

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        question = f"Write a sentence with these words: {self.prompt()}"
        return self.body(messages=[{"role": "user", "content": question}], **fields)

    def ask(self, path: str, body: dict[str, Any]) -> None:
        with self.client.post(path, json=body, timeout=TIMEOUT_SECONDS, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {response.text[:200]}")
            elif not response.json()["usage"]["completion_tokens"]:
                response.failure("an answer without tokens")


class ChatUser(ApiUser):
    @task
    def chat(self) -> None:
        self.ask("/v1/chat/completions", self.chat_body())


class CompletionUser(ApiUser):
    @task
    def complete(self) -> None:
        self.ask("/v1/completions", self.body(prompt=self.prompt()))


class StreamingUser(ApiUser):
    """Its request lasts to the last chunk; the row TTFT is the time to the first chunk with text."""

    @task
    def chat(self) -> None:
        name = "/v1/chat/completions (streamed)"
        body = self.chat_body(stream=True, stream_options={"include_usage": True})
        begin = time.perf_counter()
        first, finished, tokens = 0.0, False, 0
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, timeout=TIMEOUT_SECONDS, catch_response=True, name=name
        ) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {response.text[:200]}")
                return
            for line in response.iter_lines():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    finished = True
                    break
                event = json.loads(data)
                if "error" in event:
                    response.failure(str(event["error"])[:200])
                    return
                if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                    first = time.perf_counter()
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            end = time.perf_counter()
            response.request_meta["response_time"] = 1e3 * (end - begin)  # Locust's own ends with the headers
            if not finished or not tokens:
                response.failure("the stream ended without [DONE]" if not finished else "an answer without tokens")
                return
        if first:  # an answer may be a single special token, which has no text
            self.fire("TTFT", name, first - begin)
            if tokens > 1:
                self.fire("TPOT", name, (end - first) / (tokens - 1))

    def fire(self, kind: str, name: str, seconds: float) -> None:
        """A row of its own, in milliseconds."""
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=1e3 * seconds,
            response_length=0,
            exception=None,
            context={},
        )
