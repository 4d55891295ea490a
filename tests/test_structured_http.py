"""Structured output over HTTP: every way to ask for it, statuses of what is refused, and the clients people use."""

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

import tiny_models
import tiny_tokenizers
from server_process import TINY_FLAGS, ServerProcess, running_server

MODEL = {"max_tokens": 200, "temperature": 1.0, "seed": 3}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Ann", "Bob"]
    age: Literal[7, 8, 9]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("structured-http")
    tiny_models.save(tiny_models.oracle(vocab_size=640), folder)
    tiny_tokenizers.f_bpe(folder)
    with running_server(folder, *TINY_FLAGS, folder=folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        yield client


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {**MODEL, "messages": [{"role": "user", "content": "Who?"}], **fields}
    return client.post("/v1/chat/completions", json=body)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_every_way_to_ask(client: httpx.Client) -> None:
    schema = Person.model_json_schema()
    wrapped = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for fields in (
        {"response_format": wrapped},
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
    ):
        Person.model_validate_json(text(chat(client, **fields)))
    assert text(chat(client, structured_outputs={"choice": ["yes", "no"]})) in ("yes", "no")
    older = chat(client, guided_regex="[0-9]{3}")
    assert len(text(older)) == 3
    assert older.headers["x-octavo-notice"] == "guided_regex is read as structured_outputs.regex"
    body = {**MODEL, "prompt": "Who?", "structured_outputs": {"regex": "a{3}"}}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "aaa"


def test_a_lenient_answer_lists_what_is_not_enforced(client: httpx.Client) -> None:
    schema = {"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": True}
    answer = chat(client, structured_outputs={"json": schema, "lenient": True})
    assert answer.headers["x-octavo-not-enforced"] == "uniqueItems"
    assert json.loads(text(answer)) in ([], [None], [None, None])


@pytest.mark.case("SO-01")
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}], ids=str)
def test_refusals_are_quick_and_named(client: httpx.Client, more: dict[str, Any]) -> None:
    bad = [
        ({"guided_json": {"type": "str"}}, "structured_outputs"),
        ({"guided_json": []}, "guided_json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice"),
    ]
    for fields, param in bad:
        begin = time.monotonic()
        answer = chat(client, **fields, **more)
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["param"] == param
        assert time.monotonic() - begin < 5
    assert text(chat(client, structured_outputs={"choice": ["alive"]})) == "alive"


def test_a_stream_ends_where_the_form_does(client: httpx.Client) -> None:
    answer = chat(client, structured_outputs={"regex": "[0-9]{3}"}, stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert len("".join(pieces)) == 3
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_openai_parses_pydantic_models(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "Who?"}], response_format=Person, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_langchain_structures_its_output(server: ServerProcess) -> None:
    url = f"http://127.0.0.1:{server.port}/v1"
    llm = ChatOpenAI(base_url=url, api_key="none", model="", max_tokens=200)  # type: ignore[arg-type]
    llm.model_name = openai.OpenAI(base_url=url, api_key="none").models.list().data[0].id
    assert isinstance(llm.with_structured_output(Person, method="json_schema").invoke("Who?"), Person)
