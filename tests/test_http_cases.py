"""The HTTP API of a real server process with the real SmolLM2: the hard cases that clients run into."""

import asyncio
import concurrent.futures
import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from real_models import SMOLLM2, real_gguf
from server_process import TINY_FLAGS, ServerProcess, running_server

pytestmark = pytest.mark.real_model
KEY = "secret-key"
FRANCE = "The capital of France is"
USER = [{"role": "user", "content": "What is the capital of France?"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ALL_STREAM_OPTIONS = (None, {}, {"include_usage": True}, {"include_usage": False})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = (*TINY_FLAGS, "--served-model-name=smollm2", "--served-model-name=org/other name")
    with running_server(real_gguf(SMOLLM2), *flags, folder=tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def still_well(client: httpx.Client) -> Iterator[None]:
    """After each case: the engine is idle, and a plain request has its known answer."""
    yield
    assert complete(client, prompt=FRANCE, max_tokens=1)["choices"][0]["text"] == " Paris"
    assert client.get("/load").json()["running"] == 0


def complete(client: httpx.Client, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(client: httpx.Client, path: str = COMPLETIONS, **body: Any) -> list[dict[str, Any]]:
    """The chunks, after checking the life of the stream."""
    answer = client.post(path, json={"temperature": 0, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == ("text_completion" if path == COMPLETIONS else "chat.completion.chunk")
    finished = set()
    opened = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in finished
            if path == CHAT and choice["index"] not in opened:
                opened.add(choice["index"])
                assert choice["delta"] == {"role": "assistant", "content": ""}
            if choice["finish_reason"]:
                finished.add(choice["index"])
    return chunks


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + new
    return joined


def refused(client: httpx.Client, path: str, status: int = 400, param: str | None = None, **body: Any) -> str:
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert set(error) == {"message", "type", "param", "code"}
    if param:
        assert error["param"] == param, error
    return str(error["message"])


RAW = [
    b"",
    b" ",
    b"{",
    b'{"prompt":',
    b"[]",
    b"1",
    b"null",
    b'"text"',
    b"\xef\xbb\xbf{}",
    b'{"prompt":"\xff"}',
    b'{"prompt":"a","prompt":"b"}',
    b"[" * 100_000,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
    b'{"prompt":"a","temperature":NaN}',
    b'{"prompt":"a","temperature":1e999}',
    b"{'prompt':'a'}",
    b"\x00\x01",
    b'{"prompt":"\\ud800"}',
    b'{"messages":[{"role":"user","content":"\\ud800"}],"tokens":"x"}',
]


@pytest.mark.case("HTTP-01")
def test_bodies_that_are_no_request(client: httpx.Client) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        for body in RAW:
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, (path, body[:50], answer.text)
            assert answer.json()["error"]["message"]
        for kind in ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"):
            answer = client.post(path, content=b'{"prompt":"a"}', headers={"content-type": kind})
            assert answer.status_code == 415 and answer.json()["error"]["type"] == "UnsupportedMediaTypeError"
        assert client.get(path).status_code == 405
        assert client.head(path).status_code == 405
        assert client.post(path + "/", json={}).status_code == 404
    assert client.post("/v1/models", json={}).status_code == 405
    answer = client.get("/v1/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["message"]


@pytest.mark.case("HTTP-02")
def test_null_is_absent_and_types_are_exact(client: httpx.Client) -> None:
    api = client.get("/openapi.json").json()["components"]["schemas"]
    for path, name, given in (
        (COMPLETIONS, "CompletionBody", {"prompt": FRANCE}),
        (CHAT, "ChatBody", {"messages": USER}),
    ):
        nulls = dict.fromkeys(api[name]["properties"]) | {"max_tokens": 2, "temperature": 0} | given
        answer = client.post(path, json=nulls)
        assert answer.status_code == 200, answer.text
        assert "x-octavo-ignored" not in answer.headers
        assert answer.json()["choices"] == complete(client, path, max_tokens=2, **given)["choices"]
        for field, value in {
            "temperature": "0.5",
            "max_tokens": "5",
            "stream": 1,
            "n": "1",
            "seed": 1.5,
            "stop": 7,
            "priority": "high",
            "logit_bias": [],
            "user": 5,
            "ignore_eos": "yes",
            "timeout_ms": 0,
            "stream_options": "x",
        }.items():
            refused(client, path, param=field, **given | {field: value})
        assert client.post(path, json={**given, "max_tokens": 1, "foo": 1}).headers["x-octavo-ignored"] == "foo"


@pytest.mark.case("HTTP-03")
def test_names_of_the_model(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["smollm2", "org/other name"]
    assert listed["data"][0]["max_model_len"] == 512
    for name in ("smollm2", "org/other name"):
        assert complete(client, prompt=FRANCE, max_tokens=1, model=name)["model"] == name
        assert stream(client, prompt=FRANCE, max_tokens=1, model=name)[0]["model"] == name
    assert client.get("/v1/models/org/other%20name").json()["id"] == "org/other name"
    assert client.get("/v1/models/org%2Fother%20name").json()["id"] == "org/other name"
    for name in ("", "nope", "../smollm2", "SmolLM2", "\u00fc"):
        refused(client, COMPLETIONS, 404, "model", prompt="a", model=name)
    answer = client.get("/v1/models/nope")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert complete(client, prompt=FRANCE, max_tokens=1)["model"] == "smollm2"
    refused(client, COMPLETIONS, 400, "model", prompt="a", model=5)


@pytest.mark.case("HTTP-02", "HTTP-07")
def test_errors_in_the_openai_client(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
    attempts: list[int] = []
    send = client._client.send

    def counted(*args: Any, **kwargs: Any) -> Any:
        attempts.append(1)
        return send(*args, **kwargs)

    client._client.send = counted  # type: ignore[method-assign]
    for kind, call in (
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"max_tokens": 10**9}),
        (openai.BadRequestError, {"prompt": ""}),
        (openai.BadRequestError, {"prompt": "word " * 2000}),
        (openai.NotFoundError, {"model": "nope"}),
    ):
        attempts.clear()
        with pytest.raises(kind) as found:
            client.completions.create(**{"model": "smollm2", "prompt": "a", **call})  # type: ignore[call-overload]
        assert len(attempts) == 1
        assert found.value.body["message"] and found.value.param in (*call, "prompt")  # type: ignore[index]


def test_the_openai_client_reads_it_strictly(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", _strict_response_validation=True)
    assert [model.id for model in client.models.list()] == ["smollm2", "org/other name"]
    assert client.models.retrieve("smollm2").object == "model"
    completion = client.completions.create(model="smollm2", prompt=FRANCE, temperature=0, max_tokens=3, logprobs=2)
    assert completion.choices[0].text.startswith(" Paris")
    assert completion.usage and completion.usage.completion_tokens == 3
    answer = client.chat.completions.create(
        model="smollm2",
        messages=USER,
        temperature=0,
        logprobs=True,
        top_logprobs=2,  # type: ignore[arg-type]
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop" and answer.system_fingerprint
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=USER,  # type: ignore[arg-type]
            temperature=0,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage == answer.usage or chunks[-1].usage
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == answer.choices[0].message.content


def test_the_async_openai_client(server: ServerProcess) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:

            async def one() -> str:
                chunks = await client.chat.completions.create(
                    model="smollm2",
                    messages=USER,
                    temperature=0,
                    stream=True,  # type: ignore[arg-type]
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            return await asyncio.gather(*(one() for _ in range(8)))

    assert asyncio.run(ask()) == ["The capital of France is Paris."] * 8


@pytest.mark.case("SSE-01")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_counts_of_streams(client: httpx.Client, path: str) -> None:
    given = {"prompt": FRANCE} if path == COMPLETIONS else {"messages": USER}
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    for options in (*ALL_STREAM_OPTIONS, continuous):
        more: dict[str, Any] = {} if options is None else {"stream_options": options}
        for body in ({"max_tokens": 1}, {"max_tokens": 8}, {"max_tokens": 8, "stop": ["a"]}, N2):
            whole = complete(client, path, **given, **body)["usage"]
            assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
            chunks = stream(client, path, **given, **body, **more)
            asked = bool(options and options.get("include_usage"))
            last = [chunk for chunk in chunks if not chunk["choices"]]
            assert len(last) == asked
            if asked:
                assert chunks[-1] == last[0]
                counts = ("prompt_tokens", "completion_tokens", "total_tokens")
                assert [last[0]["usage"][name] for name in counts] == [whole[name] for name in counts]
            others = [chunk.get("usage") for chunk in chunks if chunk["choices"]]
            if options is continuous:
                assert all(others) and others[-1]["completion_tokens"] == whole["completion_tokens"]
            else:
                assert not any(others)
    refused(client, path, param="stream_options", stream_options={}, **given)


N2 = {"n": 2, "temperature": 1, "seed": 3, "max_tokens": 6}


@pytest.mark.case("SSE-02", "SMP-01")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_say_what_whole_answers_say(client: httpx.Client, path: str) -> None:
    given = {"prompt": FRANCE} if path == COMPLETIONS else {"messages": USER}
    logprobs: dict[str, Any] = {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    for number, (max_tokens, n, more) in enumerate(itertools.product((1, 9), (1, 4), ({}, logprobs))):
        body = given | {"max_tokens": max_tokens, "n": n, "temperature": 1, "seed": 42 + number, **more}
        whole = complete(client, path, **body)
        chunks = stream(client, path, **body)
        expected = {c["index"]: c["text"] if path == COMPLETIONS else c["message"]["content"] for c in whole["choices"]}
        assert texts(chunks) == expected and list(expected) == list(range(n))
        if n == 4 and max_tokens == 9:
            assert len(set(expected.values())) > 1
        finish = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
        assert finish == {c["index"]: c["finish_reason"] for c in whole["choices"]}
        assert set(finish.values()) <= {"stop", "length"}
    # An answer that is nothing but the end of the text
    silent = complete(client, prompt="What is the capital of France?", max_tokens=5)
    assert silent["choices"][0]["text"] == "" and silent["choices"][0]["finish_reason"] == "stop"
    assert texts(stream(client, prompt="What is the capital of France?", max_tokens=5)) == {0: ""}


@pytest.mark.case("LEN-01")
def test_limits_of_length(client: httpx.Client) -> None:
    assert complete(client, prompt=FRANCE)["usage"]["completion_tokens"] <= 16
    assert complete(client, prompt=FRANCE, ignore_eos=True)["usage"]["completion_tokens"] == 16
    assert complete(client, prompt=FRANCE, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16
    long = [{"role": "user", "content": "word " * 440}]
    chat = complete(client, CHAT, messages=long, ignore_eos=True)
    assert chat["usage"]["total_tokens"] == 512 and chat["choices"][0]["finish_reason"] == "length"
    for path, given in ((COMPLETIONS, {"prompt": FRANCE}), (CHAT, {"messages": USER})):
        names = ["max_tokens"] if path == COMPLETIONS else ["max_tokens", "max_completion_tokens"]
        for name in names:
            for count in (1, 2):
                found = complete(client, path, **given, **{name: count})
                assert found["usage"]["completion_tokens"] == count
                assert found["choices"][0]["finish_reason"] == "length"
            for bad in (0, -1, 1.5, "5", 10**9, True):
                for more in ({}, {"stream": True}):
                    assert name in refused(
                        client, path, param=name if bad != 10**9 else None, **given, **{name: bad}, **more
                    )
    both = complete(client, CHAT, messages=USER, max_tokens=9, max_completion_tokens=2)
    assert both["usage"]["completion_tokens"] == 2
    scored = complete(client, prompt=FRANCE, max_tokens=0, echo=True, logprobs=1)
    choice = scored["choices"][0]
    assert choice["text"] == FRANCE and choice["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == ["The", " capital", " of", " France", " is"]
    assert choice["logprobs"]["token_logprobs"][0] is None and len(choice["logprobs"]["token_logprobs"]) == 5
    assert texts(stream(client, prompt=FRANCE, max_tokens=0, echo=True)) == {0: FRANCE}


@pytest.mark.case("LEN-02")
def test_the_border_of_the_context(client: httpx.Client) -> None:
    for count, max_tokens in itertools.product((510, 511, 512, 1000), (None, 1, 2)):
        body: dict[str, Any] = {"prompt": [504] * count, "temperature": 0, "ignore_eos": True}
        if max_tokens:
            body["max_tokens"] = max_tokens
        fits = count + (max_tokens or 16) <= 512
        messages = set()
        for more in ({}, {"stream": True}, {"n": 2, "temperature": 1}):
            answer = client.post(COMPLETIONS, json=body | more)
            assert answer.status_code == (200 if fits else 400), (count, max_tokens, answer.text)
            if not fits:
                messages.add(answer.json()["error"]["message"])
                assert "512" in answer.text and str(count) in answer.text
        assert len(messages) <= 1
    assert "512" in refused(client, CHAT, messages=[{"role": "user", "content": "word " * 600}])
    assert "512" in refused(client, COMPLETIONS, prompt="word " * 600)
    cut = complete(client, prompt="word " * 600 + FRANCE, truncate_prompt_tokens=5, max_tokens=1, return_token_ids=True)
    assert cut["usage"]["prompt_tokens"] == 5 and cut["choices"][0]["text"] == " Paris"
    assert complete(client, prompt=[504] * 600, truncate_prompt_tokens=-1, max_tokens=2)["usage"]["total_tokens"] <= 512
    right = complete(
        client, prompt=[504, 3575, 282], truncate_prompt_tokens=1, truncation_side="right", return_token_ids=True
    )
    assert right["choices"][0]["prompt_token_ids"] == [504]


@pytest.mark.case("LEN-07")
def test_empty_prompts(client: httpx.Client) -> None:
    for prompt in ("", [], [[]], [""], None):
        refused(client, COMPLETIONS, prompt=prompt)
    refused(client, COMPLETIONS, param="prompt")
    for messages in ([], None, "x", [{}], [5], [{"role": "user", "content": []}], [{"role": "user", "content": None}]):
        refused(client, CHAT, messages=messages)
    refused(client, CHAT, param="messages")
    assert complete(client, CHAT, messages=[{"role": "user", "content": ""}], max_tokens=1)["choices"]


@pytest.mark.case("LEN-08")
def test_prompts_of_token_ids(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": FRANCE}).json()["tokens"]
    by_text = complete(client, prompt=FRANCE, max_tokens=4, echo=True)["choices"][0]["text"]
    assert complete(client, prompt=ids, max_tokens=4, echo=True)["choices"][0]["text"] == by_text
    several = complete(client, prompt=[ids, [504, 3575]], max_tokens=2, n=1)
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    assert several["usage"]["prompt_tokens"] == len(ids) + 2
    both = complete(client, prompt=["a", FRANCE], max_tokens=4)
    assert both["choices"][1]["text"] == by_text.removeprefix(FRANCE)
    for prompt in ([1, "a"], 5, [[1], "a", 5], [True], [1.0], [-1], [49152], [10**12], {"prompt": "a"}, [{}], [["a"]]):
        refused(client, COMPLETIONS, prompt=prompt)
    for prompt in ([-1], [49152], [10**12], [[504], [-1]]):
        refused(client, COMPLETIONS, param="prompt", prompt=prompt)
    assert refused(client, COMPLETIONS, prompt=[[504], [-1]]).startswith("Prompt 1:")
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": FRANCE}
    for tokens in ("x", [-1], [49152], [1.5], None, {}):
        refused(client, "/detokenize", param="tokens", tokens=tokens)


@pytest.mark.case("LP-02", "LP-04")
def test_logprobs_of_every_shape(client: httpx.Client) -> None:
    for seed in range(2):
        body: dict[str, Any] = {"temperature": 1.5, "seed": seed, "max_tokens": 6, "ignore_eos": True}
        assert complete(client, prompt=FRANCE, **body)["choices"][0]["logprobs"] is None
        for count in (0, 1, 5):
            found = complete(client, prompt=FRANCE, logprobs=count, return_token_ids=True, **body)["choices"][0]
            lists = found["logprobs"]
            assert {len(values) for values in lists.values()} == {6} and len(found["token_ids"]) == 6
            for token, logprob, top in zip(
                lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
            ):
                assert top[token] == logprob and len(top) in ({1} if not count else {count, count + 1})
        assert complete(client, CHAT, messages=USER, **body)["choices"][0]["logprobs"] is None
        for top in (None, 0, 1, 5):
            more = {} if top is None else {"top_logprobs": top}
            choice = complete(client, CHAT, messages=USER, logprobs=True, **more, **body)["choices"][0]
            entries = choice["logprobs"]["content"]
            assert all(len(entry["top_logprobs"]) == (top or 0) for entry in entries)
            assert b"".join(bytes(e["bytes"] or ()) for e in entries) == choice["message"]["content"].encode()
            chunks = stream(client, CHAT, messages=USER, logprobs=True, **more, **body)
            streamed = [
                e for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]
            ]
            assert streamed == entries
    named = complete(client, prompt=FRANCE, max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)
    assert named["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    rows = complete(client, prompt=FRANCE, max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == 5 and all("rank" in entry for row in rows[1:] for entry in row.values())
    rows = complete(client, CHAT, messages=USER, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    assert rows[0] is None and all(len(row) == 1 for row in rows[1:])


@pytest.mark.case("LP-06")
def test_logprobs_that_cannot_be(client: httpx.Client) -> None:
    for value in (21, 10**9, -2, "five", 2.5, [1], -1):
        for more in ({}, {"stream": True}):
            refused(client, COMPLETIONS, param="logprobs", prompt="a", logprobs=value, **more)
    for body, param in (
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ):
        refused(client, CHAT, param=param, messages=USER, **body)


@pytest.mark.case("LP-01")
def test_lm_eval_scores_by_echo(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": FRANCE + " Paris.", "add_special_tokens": False}).json()["tokens"]
    body = {"prompt": [ids, ids[:3]], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    found = complete(client, **body)["choices"]
    assert [choice["index"] for choice in found] == [0, 1]
    lists = found[0]["logprobs"]
    assert len(lists["tokens"]) == len(ids) + 1 and lists["token_logprobs"][0] is None
    for token, logprob, top in list(zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True))[
        1:
    ]:
        assert top[token] == logprob
    assert lists["token_logprobs"][5] == max(lists["top_logprobs"][5].values())  # Paris is what it would say
    assert lists["text_offset"] == [len("".join(lists["tokens"][:i])) for i in range(len(lists["tokens"]))]


@pytest.mark.case("SMP-02")
def test_seeds(client: httpx.Client) -> None:
    def sampled(seed: int, **more: Any) -> list[str]:
        body = {"prompt": FRANCE, "temperature": 1, "max_tokens": 20, "seed": seed, **more}
        return [choice["text"] for choice in complete(client, **body)["choices"]]

    first = {seed: sampled(seed) for seed in (0, 1, 2**31, 2**63 - 1)}
    assert {seed: sampled(seed) for seed in first} == first
    assert len({text[0] for text in first.values()}) == 4
    assert sampled(7, n=3) == sampled(7, n=3) and len(set(sampled(7, n=3))) == 3
    for bad in (2**64, "1", 1.5, -(2**63) - 1):
        refused(client, COMPLETIONS, param="seed", prompt="a", seed=bad)
    assert sampled(-1)  # as if none were given


@pytest.mark.case("SMP-07")
def test_numbers_that_are_none(client: httpx.Client) -> None:
    fields = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    plain = complete(client, prompt=FRANCE, max_tokens=40, ignore_eos=True)["choices"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, client, prompt=FRANCE, max_tokens=40, ignore_eos=True)
        for text in (b"NaN", b"Infinity", b"-Infinity", b"1e400"):
            bodies = {field: b'{"prompt":"a","%s":%s}' % (field.encode(), text) for field in fields}
            for field, body in (*bodies.items(), ("5", b'{"prompt":"a","logit_bias":{"5":%s}}' % text)):
                answer = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
                assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text
        assert running.result()["choices"] == plain
    for value in (0, -1):
        refused(client, COMPLETIONS, param="repetition_penalty", prompt="a", repetition_penalty=value)


@pytest.mark.case("SMP-08")
def test_tokens_asked_for_and_banned(client: httpx.Client) -> None:
    for bias in ({"999999": 5}, {"-1": 5}, {"a": 1}, {"5": "x"}):
        refused(client, COMPLETIONS, param="logit_bias", prompt="a", logit_bias=bias)
    for allowed in ([], [-1], [10**7]):
        refused(client, COMPLETIONS, param="allowed_token_ids", prompt="a", allowed_token_ids=allowed)
    refused(client, COMPLETIONS, param="stop_token_ids", prompt="a", stop_token_ids=[-1])
    assert complete(client, prompt="a", logit_bias={"5": 101}, max_tokens=1)["choices"]
    only = complete(client, prompt="a", allowed_token_ids=[300], max_tokens=3, return_token_ids=True)
    assert only["choices"][0]["token_ids"] == [300] * 3
    free = complete(client, prompt=FRANCE, bad_words=["Paris"], max_tokens=8, n=3, temperature=1, seed=1)
    assert not any("Paris" in choice["text"] for choice in free["choices"])


@pytest.mark.case("PFX-01", "PFX-06")
def test_cached_tokens_and_salts(client: httpx.Client) -> None:
    prompt = client.post("/tokenize", json={"prompt": "Some text of no importance. " * 20}).json()["tokens"][:100]

    def cached(**more: Any) -> int:
        usage = complete(client, prompt=prompt, max_tokens=1, **more)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 96]
    assert [cached(cache_salt="s1"), cached(cache_salt="s1"), cached(cache_salt="s2")] == [0, 96, 0]
    for salt in ("", "x" * (1 << 20), 5, "a/b", "a@b"):
        refused(client, COMPLETIONS, param="cache_salt", prompt="a", cache_salt=salt)


@pytest.mark.case("STOP-01", "STOP-03", "STOP-04")
def test_stop_strings(client: httpx.Client) -> None:
    whole = complete(client, CHAT, messages=USER)["choices"][0]
    assert whole["message"]["content"] == "The capital of France is Paris." and whole["stop_reason"] is None
    for stop, kept in (
        ("Fra", "The capital of "),
        (["is Pa"], "The capital of France "),
        ([".", "x"], whole["message"]["content"][:-1]),
    ):
        found = complete(client, CHAT, messages=USER, stop=stop)
        choice = found["choices"][0]
        assert choice["message"]["content"] == kept and choice["finish_reason"] == "stop"
        assert choice["stop_reason"] in (stop if isinstance(stop, list) else [stop])
        chunks = stream(client, CHAT, messages=USER, stop=stop, stream_options={"include_usage": True})
        assert texts(chunks) == {0: kept}
        assert chunks[-1]["usage"]["completion_tokens"] == found["usage"]["completion_tokens"]
    kept = complete(client, CHAT, messages=USER, stop="Fra", include_stop_str_in_output=True)
    assert kept["choices"][0]["message"]["content"] == "The capital of Fra"
    echoed = complete(client, prompt=FRANCE, stop=["France"], echo=True, max_tokens=2)["choices"][0]
    assert echoed["text"].startswith(FRANCE + " Paris")  # only what is generated is searched
    ended = complete(client, prompt=FRANCE, stop_token_ids=[7042], prompt_logprobs=None, max_tokens=3)
    assert ended["choices"]
    for stop in ([""], "", [1], {"a": 1}):
        refused(client, COMPLETIONS, param="stop", prompt="a", stop=stop)


@pytest.mark.case("CHAT-02")
def test_contents_of_messages(client: httpx.Client) -> None:
    def rendered(*messages: dict[str, Any], **more: Any) -> str:
        answer = client.post("/tokenize", json={"messages": messages, **more})
        assert answer.status_code == 200, answer.text
        text = client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
        assert "None" not in text and "[{" not in text
        return str(text)

    part = {"type": "text", "text": "a"}
    assert rendered({"role": "user", "content": "a"}) == rendered({"role": "user", "content": [part]})
    assert "a\na" in rendered({"role": "user", "content": [part, part]})
    for role in ("system", "developer", "tool", "critic"):
        assert f"{role}\nhello" in rendered({"role": "user", "content": "x"}, {"role": role, "content": "hello"})
    both = rendered({"role": "system", "content": "one"}, {"role": "system", "content": "two"})
    assert "one" in both and "two" in both
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rendered({"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]})


@pytest.mark.case("SEC-02")
def test_nothing_is_fetched(client: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        port = trap.getsockname()[1]
        for url in (
            f"http://127.0.0.1:{port}/",
            f"http://allowed\\@127.0.0.1:{port}/",
            "file:///etc/passwd",
            "data:,x",
        ):
            for kind in ("image_url", "video_url", "input_audio", "unknown"):
                content = [{"type": kind, kind: {"url": url}}]
                refused(client, CHAT, messages=[{"role": "user", "content": content}])
        with pytest.raises(TimeoutError):
            trap.accept()


@pytest.mark.case("CHAT-04")
def test_variables_of_the_template(client: httpx.Client) -> None:
    for name in ("tokenize", "chat_template", "messages", "conversation", "add_generation_prompt", "tools"):
        refused(client, CHAT, messages=USER, chat_template_kwargs={name: True}, max_tokens=1)
    refused(client, CHAT, param="chat_template", messages=USER, chat_template="{{ 7*7 }}")
    for variables in ({"enable_thinking": False}, {"typo_key": 1}, {"x": "y" * (2 << 20)}):
        answer = client.post(CHAT, json={"messages": USER, "chat_template_kwargs": variables, "max_tokens": 1})
        assert answer.status_code == 200
        assert answer.headers["x-octavo-ignored"] == f"chat_template_kwargs.{next(iter(variables))}"
    refused(client, CHAT, messages=USER, chat_template_kwargs=[1])
    for body, param in (
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ):
        refused(client, CHAT, param=param, messages=USER, **body)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert complete(client, CHAT, messages=USER, tools=tools, tool_choice="none", max_tokens=1)["choices"]


@pytest.mark.case("CHAT-05")
def test_messages_that_are_continued(client: httpx.Client) -> None:
    messages = [*USER, {"role": "assistant", "content": "The capital of France"}]
    open_end = {"continue_final_message": True, "add_generation_prompt": False}
    tokens = client.post("/tokenize", json={"messages": messages, **open_end}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith("The capital of France")
    found = complete(client, CHAT, messages=messages, **open_end)["choices"][0]["message"]
    assert found == found | {"role": "assistant", "content": " is Paris."}
    echoed = complete(client, CHAT, messages=messages, echo=True, **open_end)["choices"][0]["message"]["content"]
    assert echoed == "The capital of France is Paris."
    assert texts(stream(client, CHAT, messages=messages, echo=True, **open_end)) == {0: echoed}
    assert complete(client, CHAT, messages=USER, echo=True)["choices"][0]["message"]["content"] == echoed
    user = complete(client, CHAT, messages=USER, max_tokens=2, **open_end)["choices"][0]["message"]
    assert user["role"] == "user"


@pytest.mark.case("TOK-07")
def test_prompt_ids_are_those_of_tokenize(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"messages": USER}).json()["tokens"]
    found = complete(client, CHAT, messages=USER, max_tokens=2, return_token_ids=True)
    assert found["prompt_token_ids"] == tokens and len(found["choices"][0]["token_ids"]) == 2
    chunks = stream(client, CHAT, messages=USER, max_tokens=2, return_token_ids=True)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == tokens
    streamed = [t for chunk in chunks for c in chunk["choices"] for t in c.get("token_ids") or ()]
    assert streamed == found["choices"][0]["token_ids"]
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["chat_template"]
