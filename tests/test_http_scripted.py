"""HTTP over a real server whose tiny model says what a script tells it: split characters, ends, templates, counts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tiny_models
import tiny_tokenizers
from server_process import TINY_FLAGS, ServerProcess, running_server

SPECIAL = ("</s>", "<|im_end|>")
SCRIPTS: dict[str, tuple[list[str | bytes], int | str]] = {  # pieces, and what comes after them
    "split": ([b"\xf0", b"\x9f\x98\x80", "x", b"\xf0\x9f", b"\x98\x81", b"\xe6", b"\xad\xaa", " ok"], 0),
    "no text": (["a", b"\x85", "b", b"\xc0", b"\xed\xa0\x80", "c", b"\xff"], 0),
    "stop": (["one ", "two ", "ST"], 0),
    "ends": (["hi", " there"], 1),
    "ignored": (["u"], "round"),
}
FLAGS = (*TINY_FLAGS, "--max-model-len=1024", "--served-model-name=script")


def write(folder: Path) -> dict[str, int]:
    """The model; returns the first token of each script, which is never said itself."""
    pieces: list[str | bytes] = []
    chain: dict[int, int] = {}
    starts: dict[str, int] = {}
    for name, (own, end) in SCRIPTS.items():
        starts[name] = len(SPECIAL) + len(pieces)
        pieces += [f"<{name}>", *own]
        for token in range(starts[name], starts[name] + len(own)):
            chain[token] = token + 1
        last = starts[name] + len(own)
        if end == "round":  # both ends of sequence on the way, and again
            chain |= {last: 0, 0: 1, 1: last}
        else:
            chain[last] = int(end)
    tiny_models.save(tiny_models.chain_model(chain, len(SPECIAL) + len(pieces)), folder)
    tiny_tokenizers.f_script(folder, pieces, SPECIAL)
    return starts


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("script")
    return folder, write(folder)


@pytest.fixture(scope="module")
def server(starts: tuple[Path, dict[str, int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = tuple(flag for flag in FLAGS if flag != "--max-model-len=512")
    with running_server(starts[0], *flags, folder=tmp_path_factory.mktemp("server")) as running:
        yield running


class Said:
    """A script's answer, whole and streamed; both must be the same, with one finish."""

    def __init__(self, server: ServerProcess, start: int, **body: Any) -> None:
        body = {"prompt": [start], "temperature": 0, "max_tokens": 60, **body}
        whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert whole.status_code == 200, whole.text
        self.choices = whole.json()["choices"]
        self.usage = whole.json()["usage"]
        self.text, self.finish_reason = self.choices[0]["text"], self.choices[0]["finish_reason"]
        streamed = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=30).text
        assert streamed.endswith("data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
        self.deltas: list[str] = []
        for choice in self.choices:
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
            assert "".join(one["text"] for one in mine) == choice["text"]
            assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [choice["finish_reason"]]
            self.deltas += [one["text"] for one in mine]


@pytest.mark.case("TOK-01")
def test_split_characters_come_whole(server: ServerProcess, starts: tuple[Path, dict[str, int]]) -> None:
    said = Said(server, starts[1]["split"])
    assert said.text == "😀x😁歪 ok"
    assert not any("\ufffd" in delta for delta in said.deltas)


@pytest.mark.case("TOK-03")
def test_bytes_that_are_no_text_do_not_end_a_stream(server: ServerProcess, starts: tuple[Path, dict[str, int]]) -> None:
    said = Said(server, starts[1]["no text"])
    assert said.text.replace("\ufffd", "") == "abc"
    assert said.text.endswith("\ufffd")


@pytest.mark.case("STOP-05")
@pytest.mark.parametrize("n", [1, 2])
def test_what_was_held_back_comes_with_the_finish(
    server: ServerProcess, starts: tuple[Path, dict[str, int]], n: int
) -> None:
    more = {"n": 2, "temperature": 0.01} if n == 2 else {}
    limit = Said(server, starts[1]["stop"], stop=["STOP"], max_tokens=3, **more)
    assert [choice["text"] for choice in limit.choices] == ["one two ST"] * n
    assert limit.finish_reason == "length"
    ended = Said(server, starts[1]["stop"], stop=["STOP"], **more)
    assert [choice["text"] for choice in ended.choices] == ["one two ST"] * n
    assert ended.finish_reason == "stop"


@pytest.mark.case("LEN-05")
def test_every_listed_end_ends_the_text(server: ServerProcess, starts: tuple[Path, dict[str, int]]) -> None:
    said = Said(server, starts[1]["ends"])
    assert (said.text, said.finish_reason) == ("hi there", "stop")
    first = starts[1]["ends"] + 1
    assert Said(server, starts[1]["ends"], stop_token_ids=[first + 1]).text == "hi"


@pytest.mark.case("LEN-03")
def test_ignored_ends_do_not_end_the_text(server: ServerProcess, starts: tuple[Path, dict[str, int]]) -> None:
    said = Said(server, starts[1]["ignored"], ignore_eos=True, max_tokens=512)
    assert (said.finish_reason, said.usage["completion_tokens"]) == ("length", 512)
    stopped = Said(server, starts[1]["ignored"], ignore_eos=True, max_tokens=512, stop=["uu"])
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


@pytest.mark.case("CHAT-01")
def test_without_a_template_only_chat_is_refused(server: ServerProcess, starts: tuple[Path, dict[str, int]]) -> None:
    answer = chat(server, [{"role": "user", "content": "hi"}])
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]["message"]
    assert Said(server, starts[1]["ends"]).text == "hi there"


def chat(server: ServerProcess, messages: list[dict[str, Any]]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages, "max_tokens": 2}, timeout=30)


def bpe_model(folder: Path, template: str | None, vocab_size: int = 600) -> Path:
    tiny_models.save(tiny_models.oracle(vocab_size=vocab_size), folder)
    tiny_tokenizers.f_bpe(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    return folder


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system messages here') }}{% endif %}"
    "{% if loop.index > 1 and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('Turns must alternate') }}"
    "{% endif %}{{ m.content }}{{ nowhere }}{% endfor %}"
)


@pytest.mark.case("CHAT-01", "TOK-06", "OPS-01")
def test_a_model_with_a_strict_template_and_padded_vocabulary(tmp_path: Path) -> None:
    model = bpe_model(tmp_path / "model", STRICT, vocab_size=640)
    with running_server(model, *TINY_FLAGS, folder=tmp_path) as server:
        check_counts(server)
        for messages, says in (
            ([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "No system messages here"),
            ([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], "Turns must alternate"),
        ):
            answer = chat(server, messages)
            assert answer.status_code == 400, answer.text
            assert says in answer.json()["error"]["message"]
        assert chat(server, [{"role": "user", "content": "x"}]).status_code in (200, 400)  # nowhere is undefined
        body = {"prompt": [5], "max_tokens": 4, "temperature": 0, "logit_bias": {"630": 100}, "ignore_eos": True}
        beyond = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()
        assert beyond["choices"][0]["text"] == ""
        assert beyond["usage"]["completion_tokens"] == 4
        plain = {"prompt": [5, 6], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=plain, timeout=30).json()["choices"][0]["text"]


def check_counts(server: ServerProcess) -> None:
    """Ten requests of nine ids and ten tokens, three with two samples, one that is refused: exact sums."""
    url = f"{server.url}/v1/completions"
    for i in range(10):
        body = {"prompt": [10 + i, *range(20, 28)], "max_tokens": 10, "ignore_eos": True, "temperature": 0}
        assert httpx.post(url, json=body, timeout=30).status_code == 200
    for i in range(3):
        body = {"prompt": [50 + i, 51, 52], "max_tokens": 5, "ignore_eos": True, "n": 2, "seed": i}
        assert httpx.post(url, json=body, timeout=30).status_code == 200
    assert httpx.post(url, json={"prompt": [99999]}, timeout=30).status_code == 400
    metrics = httpx.get(f"{server.url}/metrics", timeout=30)
    if metrics.status_code in (401, 403):
        pytest.fail("a server without keys answers /metrics")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text):
        for sample in family.samples:
            key = sample.name + ("|" + sample.labels["finished_reason"] if "finished_reason" in sample.labels else "")
            if "le" not in sample.labels:
                found[key] = found.get(key, 0) + sample.value
    assert found["octavo:generation_tokens_total"] == 10 * 10 + 3 * 2 * 5
    assert found["octavo:prompt_tokens_total"] in (10 * 9 + 3 * 3, 10 * 9 + 3 * 2 * 3)  # of requests, or of sequences
    assert found["octavo:request_success_total|length"] == 10 + 3 * 2
    assert found["octavo:time_to_first_token_seconds_count"] == 10 + 3 * 2
    assert found["octavo:e2e_request_latency_seconds_count"] == 10 + 3 * 2
    assert found["octavo:inter_token_latency_seconds_count"] == 10 * 9 + 3 * 2 * 4


@pytest.mark.case("CHAT-01")
def test_a_models_own_broken_template_leaves_completions(tmp_path: Path) -> None:
    model = bpe_model(tmp_path / "model", "{{ x")
    with running_server(model, *TINY_FLAGS, folder=tmp_path) as server:
        body = {"prompt": "hello", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200
        answer = chat(server, [{"role": "user", "content": "x"}])
        assert answer.status_code == 400, answer.text
        assert "template" in answer.json()["error"]["message"]


@pytest.mark.case("CHAT-01")
@pytest.mark.parametrize("value", ["/nowhere/template.jinja", "{{ x"])
def test_the_operators_broken_template_ends_the_start(tmp_path: Path, value: str) -> None:
    model = bpe_model(tmp_path / "model", None)
    with running_server(model, *TINY_FLAGS, "--chat-template", value, folder=tmp_path, wait=False) as server:
        assert server.wait(60) != 0
        assert "template" in server.log.strip().splitlines()[-1]
