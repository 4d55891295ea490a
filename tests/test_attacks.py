"""Attacks from outside that once did harm: input of every kind, interrupts, races, damaged files, the command line."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import gguf_files
import tiny_models
import tiny_tokenizers
from conftest import Make
from octavo import AsyncLLM, RequestOutputKind, SamplingParams
from octavo.errors import EngineDead, InvalidConfig, InvalidRequest, InvalidWeights, ModelNotFound
from octavo.formats.gguf import GGUFFile
from octavo.hub import find_model
from octavo.observe.stats import Stats
from octavo.text import chat
from octavo.text.detokenize import Detokenizer
from octavo.text.tokenizer import Tokenizer, eos_token_ids
from test_async import OPTIONS, last
from test_cli import octavo
from test_engine import GREEDY, ids, run
from test_invariance import assert_idle, texts

HUGE = 10**5000  # Python refuses to write it out
PROMPTS = [ids(40, 1), ids(3, 2), ids(17, 3)]
PARAMS = SamplingParams(max_tokens=20, **GREEDY)
ENDLESS = SamplingParams(max_tokens=None, **GREEDY)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


# Parameters and prompts


@pytest.mark.case("LP-06", "SEC-03")
@pytest.mark.parametrize(
    "given",
    [
        {"stop": 5}, {"stop": True}, {"stop": 0}, {"stop": {"a": 1}}, {"stop": b"a"}, {"bad_words": 5},
        {"stop_token_ids": 0}, {"stop_token_ids": b"a"}, {"stop_token_ids": {5: 1}}, {"allowed_token_ids": b"a"},
        {"logit_bias": {"9" * 5000: 1}}, {"logit_bias": {HUGE: 1}}, {"max_tokens": HUGE}, {"temperature": HUGE},
        {"temperature": Unspeakable()}, {"seed": HUGE}, {"n": HUGE}, {"logprobs": HUGE}, {"stop_token_ids": [HUGE]},
        {"ignore_eos": "false"}, {"detokenize": None}, {"include_stop_str_in_output": 1},
        {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_a_parameter_of_a_wrong_kind_or_size_is_refused_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**given)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(5), seed=np.int64(3))  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, max_tokens=5, seed=3)
    assert type(params.max_tokens) is int


@pytest.mark.case("LEN-08")
@pytest.mark.parametrize(
    "prompt",
    [
        b"hello", bytearray(b"hello"), memoryview(b"hello"), {5, 6}, [b"hello"], torch.tensor([5, 6]), [HUGE],
        {"prompt_token_ids": 5}, {"prompt_token_ids": b"hello"}, {"prompt_token_ids": {5: 6}}, {1: 2, "a": 3},
        [{5, 6}],
    ],
    ids=lambda prompt: type(prompt).__name__,
)  # fmt: skip
def test_what_only_looks_like_token_ids_is_refused(make_llm: Make, prompt: Any) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest):
        run(llm, prompt)
    assert_idle(llm)


def test_arrays_of_numpy_are_prompts(make_llm: Make) -> None:
    llm = make_llm()
    expected = texts(run(llm, [5, 6, 7], PARAMS))
    assert texts(run(llm, np.array([5, 6, 7]), PARAMS)) == expected
    assert texts(run(llm, [np.array([5, 6, 7])] * 2, PARAMS)) == expected * 2


def test_a_priority_that_is_no_list_is_refused(make_llm: Make) -> None:
    for priority in (5, "1", HUGE):
        with pytest.raises(InvalidRequest, match="priority"):
            run(make_llm(), [[5]], PARAMS, priority=priority)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_offline_answer_is_whole_whatever_the_output_kind(make_llm: Make, kind: RequestOutputKind) -> None:
    llm = make_llm()
    params = SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True, output_kind=kind)
    assert [len(sample.token_ids) for sample in run(llm, [[5]], params)[0].outputs] == [6, 6]


@pytest.fixture
def chat_folder(tiny: PreTrainedModel, tmp_path: Path) -> Path:
    tiny_models.save(tiny, tmp_path)
    return tiny_tokenizers.f_bpe(tmp_path)


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (USER, {}), (5, {}), ({"a"}, {}), ((m for m in [USER]), {}),
        ([USER], {"chat_template": 5}), ([USER], {"chat_template": [1]}),
        ([USER], {"chat_template": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}"}),
        ([USER], {"chat_template": "{% if 1 %}" * 2000 + "{% endif %}" * 2000}),
        ([USER], {"chat_template_kwargs": "abc"}), ([USER], {"chat_template_kwargs": {5: 1}}),
        ([USER], {"tools": 5}), ([USER], {"tools": "abc"}),
        ([{"role": "user", "content": [{"type": [], "text": "x"}]}], {}),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100000}}]}], {}),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_malformed_chat_is_refused(make_llm: Make, chat_folder: Path, messages: Any, options: Any) -> None:
    llm = make_llm(chat_folder)
    with pytest.raises(InvalidRequest):
        llm.chat(messages, PARAMS, use_tqdm=False, **options)
    assert llm.chat([USER], PARAMS, use_tqdm=False, chat_template_kwargs={"add_generation_prompt": False})


@pytest.mark.case("SEC-03")
def test_samples_share_their_stop_strings_and_bad_words(chat_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(chat_folder)
    params = SamplingParams(stop=[f"word {i}" for i in range(100)])
    one, other = (Detokenizer(tokenizer, [5], params) for _ in range(2))
    assert one._stops is not None
    assert one._stops is other._stops


def test_bad_words_are_tokenized_once_for_all_samples(make_llm: Make, chat_folder: Path) -> None:
    engine = make_llm(chat_folder).engine
    assert engine.tokenizer is not None
    calls = 0
    encode = engine.tokenizer.encode

    def counted(*args: Any, **options: Any) -> list[int]:
        nonlocal calls
        calls += 1
        return encode(*args, **options)

    engine.tokenizer.encode = counted  # type: ignore[method-assign]
    group = engine.check(
        [5], SamplingParams(n=50, bad_words=["foul", "a long one that cannot come about"], max_tokens=3)
    )
    assert calls == 4
    assert all(len(word) <= 3 for word in group.requests[49].bad_words)


def test_a_default_of_max_tokens_gives_way_to_the_context(make_llm: Make, chat_folder: Path) -> None:
    (chat_folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 100000, "do_sample": False}))
    llm = make_llm(chat_folder, max_model_len=64)
    (output,) = llm.generate([ids(60)], use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 4
    with pytest.raises(InvalidRequest, match="max_tokens=100000"):
        llm.generate([ids(60)], llm.get_default_sampling_params(), use_tqdm=False)


# Breaks in the middle of a step


@pytest.mark.case("ABT-06")
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["fault", "interrupt"])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("where", ["forward", "logits", "plan", "commit"])
def test_after_a_step_that_broke_off_the_engine_is_as_new(
    make_llm: Make, where: str, depth: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(depth=depth)
    expected = texts(run(llm, PROMPTS, PARAMS))
    engine = llm.engine
    stats = Stats(engine.cache_size.block_size)
    engine.scheduler.subscribers.append(stats)
    runner: Any = engine.loop.executor.runner  # type: ignore[attr-defined]
    place, name = {
        "forward": (runner, "_forward"),
        "logits": (runner.sampler, "sample"),
        "plan": (engine.scheduler, "_take"),
        "commit": (engine.scheduler, "_seal"),
    }[where]
    work, count = getattr(place, name), 0

    def breaking(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise error
        return work(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, breaking)
        with pytest.raises(type(error)):
            run(llm, PROMPTS, PARAMS)
    assert_idle(llm)
    assert not stats.held
    assert texts(run(llm, PROMPTS, PARAMS)) == expected


INTERRUPTED = """
import os, random, signal, sys, threading
from octavo import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=256, kv_cache_memory_bytes="16M",
          num_threads=1, max_num_batched_tokens=20)
prompts = [[5, 6, 7, 8] * 8, [9, 10, 11]] * 3
params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
answer = lambda: [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
expected, hits, rng = answer(), 0, random.Random(0)
for _ in range(6):
    timer = threading.Timer(rng.random() / 20, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            answer()
    except KeyboardInterrupt:
        hits += 1
    timer.join()
    assert llm.engine.num_unfinished == 0
    assert answer() == expected
print("interrupts", hits)
"""


@pytest.mark.case("ABT-06")
def test_ctrl_c_at_any_moment_leaves_an_llm_that_works(tiny_folder: Path) -> None:
    found = python(INTERRUPTED, str(tiny_folder))
    assert found.stdout == "interrupts 6\n", found.stderr[-2000:]


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "OCTAVO_LOGGING_LEVEL": "ERROR"},
    )  # fmt: skip


@pytest.mark.case("KV-09")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_nan_leaves_the_blocks_that_others_share(make_llm: Make, depth: int) -> None:
    beginning = ids(48)
    doomed, other = [*beginning, 100], [*beginning, 200]
    expected = texts(run(make_llm(), [other], PARAMS))
    llm = make_llm(depth=depth)
    sampler: Any = llm.engine.loop.executor.runner.sampler  # type: ignore[attr-defined]
    sample, count = sampler.sample, 0

    def failing(logits: Tensor, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 8:
            logits[0] = float("nan")
        return sample(logits, *args)

    sampler.sample = failing
    outputs = run(llm, [doomed, other], PARAMS)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert texts(outputs[1:]) == expected


# Threads, processes, callbacks


def test_threads_take_turns(make_llm: Make) -> None:
    llm = make_llm()
    expected = texts(run(llm, PROMPTS, PARAMS))
    found: list[Any] = []

    def work() -> None:
        for _ in range(3):
            try:
                found.append(texts(run(llm, PROMPTS, PARAMS)))
            except Exception as error:
                found.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 12


def test_a_progress_bar_that_generates_or_closes_gets_an_error(make_llm: Make) -> None:
    llm = make_llm()

    class Generating(tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            run(llm, [[5]], PARAMS)
            return None

    class Closing(tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            llm.close()
            return None

    expected = texts(run(llm, PROMPTS, PARAMS))
    with pytest.raises(InvalidRequest, match="generating already"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=Generating)
    assert_idle(llm)
    assert texts(run(llm, PROMPTS, PARAMS)) == expected
    with pytest.raises(EngineDead, match="closed"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=Closing)
    llm.close()


def in_child(work: Callable[[], object]) -> str:
    """What `work` says in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own(make_llm: Make, tiny_folder: Path) -> None:
    llm = make_llm()
    expected = texts(run(llm, PROMPTS, PARAMS))
    assert in_child(lambda: run(llm, PROMPTS, PARAMS)).startswith("EngineDead: This LLM belongs to the process")
    with closing_async(tiny_folder) as other:
        said = in_child(lambda: asyncio.run(asyncio.wait_for(last(other.generate([5], PARAMS)), 5)))
    assert said.startswith("EngineDead: This engine belongs to the process")
    assert texts(run(llm, PROMPTS, PARAMS)) == expected


# AsyncLLM


class closing_async:  # noqa: N801 - reads as a word in a with statement
    def __init__(self, folder: Path) -> None:
        self.llm = AsyncLLM(str(folder), **OPTIONS)

    def __enter__(self) -> AsyncLLM:
        return self.llm

    def __exit__(self, *_: object) -> None:
        self.llm.close()


async def idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(10):
        while llm.engine.has_unfinished:
            await asyncio.sleep(0.01)
    scheduler = llm.engine.scheduler
    scheduler.check()
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def with_async(folder: Path, work: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
    with closing_async(folder) as llm:
        asyncio.run(work(llm))
        asyncio.run(idle(llm))


@pytest.mark.case("ABT-05")
def test_a_name_may_be_used_again_as_soon_as_its_stream_was_left(tiny_folder: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        expected = (await last(llm.generate([5, 6], PARAMS))).outputs[0]
        for _ in range(30):
            stream = llm.generate([9, 9], ENDLESS, request_id="same")
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            assert (await last(llm.generate([5, 6], PARAMS, request_id="same"))).outputs[0] == expected

    with_async(tiny_folder, work)


@pytest.mark.case("ABT-01")
def test_event_loops_in_many_threads_come_and_go(tiny_folder: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        expected = (await last(llm.generate([5, 6], PARAMS))).outputs[0].token_ids
        faults: list[BaseException] = []

        async def mixed(seed: int) -> None:
            for i in range(9):
                stream = llm.generate([5, 6], PARAMS)
                if (i + seed) % 3 == 0:
                    await anext(stream)
                elif (i + seed) % 3 == 1:
                    task = asyncio.create_task(last(stream))
                    await asyncio.sleep(0.002 * seed)
                    task.cancel()
                else:
                    assert (await last(stream)).outputs[0].token_ids == expected

        def thread(seed: int) -> None:
            try:
                asyncio.run(mixed(seed))
            except BaseException as error:
                faults.append(error)

        await asyncio.gather(*[asyncio.to_thread(thread, seed) for seed in range(6)])
        assert not faults

    with_async(tiny_folder, work)


def test_a_request_whose_event_loop_is_gone_is_aborted(tiny_folder: Path) -> None:
    with closing_async(tiny_folder) as llm:
        loop = asyncio.new_event_loop()
        stream = llm.generate([5], SamplingParams(max_tokens=250, **GREEDY))
        loop.run_until_complete(anext(stream))  # type: ignore[arg-type]
        loop.close()
        asyncio.run(idle(llm))
        assert asyncio.run(last(llm.generate([5, 6], PARAMS))).finished


class Evil:
    def __iter__(self) -> Any:
        raise ZeroDivisionError("evil")


def test_a_prompt_that_raises_harms_nobody_else(tiny_folder: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        good = llm.generate([5, 6], SamplingParams(max_tokens=200, **GREEDY))
        await anext(good)
        with pytest.raises(ZeroDivisionError, match="evil"):
            await last(llm.generate(Evil(), PARAMS))  # type: ignore[arg-type]
        for options in ({"request_id": []}, {"request_id": 5}, {"request_id": ""}, {"priority": "x"}):
            with pytest.raises(InvalidRequest):
                await last(llm.generate([5], PARAMS, **options))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await last(llm.generate([HUGE], PARAMS))
        assert len((await last(good)).outputs[0].token_ids) == 200

    with_async(tiny_folder, work)


@pytest.mark.case("OPS-04")
def test_closing_from_several_sides_while_requests_come_ends_them_all(tiny_folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **OPTIONS)
        streams = [asyncio.create_task(last(llm.generate([5, 3 + i], ENDLESS))) for i in range(10)]
        await asyncio.sleep(0.02)
        ends = [asyncio.create_task(asyncio.to_thread(llm.close)) for _ in range(3)]
        streams += [asyncio.create_task(last(llm.generate([5, 3 + i], ENDLESS))) for i in range(10)]
        async with asyncio.timeout(10):
            found = await asyncio.gather(*streams, return_exceptions=True)
            await asyncio.gather(*ends)
        assert {type(error) for error in found} == {EngineDead}
        with pytest.raises(EngineDead, match="it was closed"):
            await llm.abort("x")
        llm.close()

    asyncio.run(main())


LEFT_OPEN = """
import asyncio, sys
from octavo import AsyncLLM, SamplingParams
llm = AsyncLLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes="16M", num_threads=1)
async def main():
    streams = [llm.generate([5, i + 3], SamplingParams(max_tokens=None, ignore_eos=True)) for i in range(8)]
    for stream in streams:
        await anext(stream)
    sys.exit(3)
asyncio.run(main())
"""


def test_a_program_may_end_without_closing(tiny_folder: Path) -> None:
    found = python(LEFT_OPEN, str(tiny_folder))
    assert (found.returncode, found.stderr) == (3, "")


# Files


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_nested_too_deep_is_refused_by_file(make_llm: Make, chat_folder: Path, name: str) -> None:
    (chat_folder / name).write_text("[" * 200000)
    with pytest.raises((InvalidConfig, InvalidWeights), match=name):
        make_llm(chat_folder)


def test_a_text_config_of_another_kind_has_no_ends() -> None:
    assert eos_token_ids({"eos_token_id": 2, "text_config": "x"}, {}, None) == {2}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_weights_that_are_no_plain_floats_are_refused(make_llm: Make, chat_folder: Path, dtype: torch.dtype) -> None:
    file, name = chat_folder / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    weights = load_file(file)
    weights[name] = torch.ones_like(weights[name]).to(dtype)
    save_file(weights, file)
    with pytest.raises(InvalidWeights, match=f"{name} is of type"):
        make_llm(chat_folder)


@pytest.mark.parametrize("name", [5, b"/tmp", [], True, Unspeakable()])
def test_a_model_named_by_no_string_is_refused(name: Any) -> None:
    with pytest.raises(InvalidConfig):
        find_model(name)


def test_a_model_may_be_named_by_a_path(tiny_folder: Path, tmp_path: Path) -> None:
    assert find_model(tiny_folder).folder == tiny_folder
    for absent in (tmp_path / "absent", tmp_path / "absent.gguf"):
        with pytest.raises(ModelNotFound, match="absent"):
            find_model(absent)


def test_a_split_count_that_is_no_number_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    gguf_files.export(tiny_models.oracle(num_hidden_layers=1), file, metadata={"split.count": "three"})
    with pytest.raises(InvalidWeights, match=r"split\.count"):
        GGUFFile(file)


def test_a_chat_template_that_is_no_text_is_none_at_all(chat_folder: Path) -> None:
    config = json.loads((chat_folder / "tokenizer_config.json").read_text())
    for template in (5, {"default": 5}, [{"name": "default", "template": 5}]):
        (chat_folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        with pytest.raises(InvalidRequest, match="no chat template"):
            chat.render(Tokenizer.from_folder(chat_folder), [USER])


def test_a_panic_inside_the_tokenizers_library_is_an_error_of_the_file(chat_folder: Path) -> None:
    state = json.loads((chat_folder / "tokenizer.json").read_text())
    end = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    }
    (chat_folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(InvalidConfig, match="panicked"):
        Tokenizer.from_folder(chat_folder)


def test_a_text_that_the_vocabulary_cannot_write_is_refused(tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer.from_folder(tiny_tokenizers.write(tmp_path, raw, {}, eos_token_id=1))
    assert tokenizer.encode("a b") == [0, 1]
    with pytest.raises(InvalidRequest, match="UNK"):
        tokenizer.encode("a c")


# The command line


@pytest.fixture
def small(chat_folder: Path) -> tuple[str, ...]:
    return (
        "--model", str(chat_folder), "--kv-cache-memory-bytes", "8M", "--max-model-len", "128", "--dtype", "float32",
        "--max-tokens", "8", "--num-threads", "1",
    )  # fmt: skip


def command(*args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "OCTAVO_LOGGING_LEVEL": "ERROR", **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "octavo", *args], stderr=subprocess.PIPE, timeout=60, check=False, env=env, **options
    )


@pytest.mark.case("ENV-04")
def test_a_dash_reads_the_prompt_from_standard_input(small: tuple[str, ...]) -> None:
    given = command("generate", "-", *small, input=b"some words", stdout=subprocess.PIPE)
    assert given.returncode == 0, given.stderr
    assert given.stdout == command("generate", "some words", *small, stdout=subprocess.PIPE).stdout
    broken = command("generate", "-", *small, input=b"\xff\xfe", stdout=subprocess.PIPE, env={"PYTHONUTF8": "0"})
    assert broken.returncode == 1
    assert b"Traceback" not in broken.stderr


@pytest.mark.case("ENV-04")
def test_an_output_that_cannot_be_written_ends_without_a_traceback(small: tuple[str, ...]) -> None:
    hot = ("--temperature", "2", "--sampling-seed", "3")
    ascii_only = command("generate", "hi", *small, *hot, stdout=subprocess.PIPE, env={"PYTHONIOENCODING": "ascii"})
    assert ascii_only.returncode == 0, ascii_only.stderr
    read, write = os.pipe()
    os.close(read)
    unread = command("generate", "hi", *small, stdout=write)
    os.close(write)
    assert (unread.returncode, unread.stderr) == (0, b"")
    with open("/dev/full", "wb") as full:
        found = command("generate", "hi", *small, stdout=full)
    assert found.returncode == 1
    assert b"no space left" in found.stderr
    assert b"Traceback" not in found.stderr


def test_an_unknown_logging_level_ends_with_its_cause() -> None:
    found = octavo("generate", "hi", OCTAVO_LOGGING_LEVEL="loud")
    assert found.returncode == 1
    assert found.stderr.startswith("octavo: OCTAVO_LOGGING_LEVEL=LOUD")


def test_a_fault_of_the_model_is_told_and_not_an_empty_answer(small: tuple[str, ...], chat_folder: Path) -> None:
    weights = load_file(chat_folder / "model.safetensors")
    weights["model.norm.weight"] *= 1e38  # finite itself, and infinite once multiplied
    save_file(weights, chat_folder / "model.safetensors")
    found = command("generate", "hi", *small, stdout=subprocess.PIPE)
    assert found.returncode == 1, found.stdout
    assert b"logits" in found.stderr
