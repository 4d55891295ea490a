"""One engine of benchmarks/cpu.py in a process of its own, run by that engine's interpreter: Octavo or a peer.

    PYTHON cpu_engines.py ENGINE MODEL THREADS

Imports nothing of Octavo but for Octavo's own rows. Reads {"column": ..., "seed": ..., "warm": ...} lines, answers each
with {"seconds": ..., "tokens": ..., "others": cores that other processes used meanwhile}; the first line it writes says
that one token was generated, the last how much memory it had.
"""

import contextlib
import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Generate = Callable[[list[list[int]], list[int]], Sequence[Sequence[int]]]
PADDING = 2
SLOTS = 32  # of engines that batch statically


def work(column: str, seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths: fresh prompts for each seed, so that a prefix cache has nothing to find."""
    shapes = random.Random(0)
    if column == "ragged":
        lengths = [(shapes.randint(16, 256), shapes.randint(16, 256)) for _ in range(64)]
    elif column.startswith("ttft"):
        lengths = [(int(column[4:]), 1)]
    elif column == "busy":
        lengths = [(32, 32)]
    else:
        lengths = [(32, 128)] * int(column[1:])
    rng = random.Random(f"{column} {seed}")
    return [[rng.randrange(1000, 48000) for _ in range(into)] for into, _ in lengths], [out for _, out in lengths]


def octavo(model: str, threads: int, quantization: str = "none") -> Generate:
    from octavo import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", quantization=quantization, num_threads=threads, max_model_len=4096)

    def generate(prompts: list[list[int]], lengths: list[int]) -> Sequence[Sequence[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    return generate


def transformers(model: str, threads: int) -> Generate:
    """Static batches, padded on the left, each as long as its longest output."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def generate(prompts: list[list[int]], lengths: list[int]) -> Sequence[Sequence[int]]:
        found: list[list[int]] = []
        for begin in range(0, len(prompts), SLOTS):
            batch, wanted = prompts[begin : begin + SLOTS], lengths[begin : begin + SLOTS]
            width = max(map(len, batch))
            ids = torch.tensor([[PADDING] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            config = GenerationConfig(
                max_new_tokens=max(wanted), do_sample=False, eos_token_id=None, pad_token_id=PADDING
            )
            with torch.inference_mode():
                out = network.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
            found += [row[:n] for row, n in zip(out, wanted, strict=True)]
        return found

    return generate


def openvino(model: str, threads: int) -> Generate:
    """OpenVINO GenAI's pipeline with continuous batching; it builds the network from the GGUF file."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def config(length: int) -> object:
        found = genai.GenerationConfig()
        found.max_new_tokens, found.do_sample, found.ignore_eos = length, False, True
        found.apply_chat_template = False
        return found

    def generate(prompts: list[list[int]], lengths: list[int]) -> Sequence[Sequence[int]]:
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [row.m_generation_ids[0] for row in pipeline.generate(inputs, [config(n) for n in lengths])]

    return generate


def llamacpp(model: str, threads: int) -> Generate:
    """Continuous batching over llama_decode, as the library's own class decodes one sequence at a time."""
    import llama_cpp as library
    import numpy as np

    most = 2048
    silent = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(silent, ctypes.c_void_p(0))
    library.llama_backend_init()
    loading = library.llama_model_default_params()
    # Its AMX path ended with a segmentation fault for quantized files (llama-cpp-python 0.3.36, gcc 12).
    loading.use_extra_bufts = "BF16" in model
    weights = library.llama_model_load_from_file(model.encode(), loading)
    vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(weights))
    contexts: dict[int, object] = {}
    batch = library.llama_batch_init(most, 0, 1)
    array = np.ctypeslib.as_array
    tokens, positions, wants = (array(getattr(batch, name), (most,)) for name in ("token", "pos", "logits"))
    array(batch.n_seq_id, (most,))[:] = 1
    sequence = [array(batch.seq_id[i], (1,)) for i in range(most)]

    def context(slots: int) -> object:
        if slots not in contexts:
            params = library.llama_context_default_params()
            params.n_ctx, params.n_seq_max = (4096, 1) if slots == 1 else (slots * 512, slots)
            params.n_batch, params.n_ubatch = most, 512
            params.n_threads = params.n_threads_batch = threads
            contexts[slots] = library.llama_init_from_model(weights, params)
        return contexts[slots]

    def generate(prompts: list[list[int]], lengths: list[int]) -> Sequence[Sequence[int]]:
        slots = 1 if len(prompts) == 1 else SLOTS
        current = context(slots)
        memory = library.llama_get_memory(current)
        library.llama_memory_clear(memory, False)
        found: list[list[int]] = [[] for _ in prompts]
        waiting, free = list(range(len(prompts)))[::-1], list(range(slots))[::-1]
        running: dict[int, list[int]] = {}  # by slot: request, position, next token
        while waiting or running:
            rows: list[tuple[list[int], int, int]] = [([state[2]], state[1], slot) for slot, state in running.items()]
            taken = len(rows)
            while waiting and free and taken + len(prompts[waiting[-1]]) <= most:
                request, slot = waiting.pop(), free.pop()
                running[slot] = [request, 0, 0]
                rows.append((prompts[request], 0, slot))
                taken += len(prompts[request])
            count, ends = 0, []
            for ids, position, slot in rows:
                size = len(ids)
                tokens[count : count + size] = ids
                positions[count : count + size] = np.arange(position, position + size)
                wants[count : count + size] = 0
                wants[count + size - 1] = 1
                for i in range(count, count + size):
                    sequence[i][0] = slot
                running[slot][1] = position + size
                count += size
                ends.append((count - 1, slot))
            batch.n_tokens = count
            if library.llama_decode(current, batch):
                raise RuntimeError("llama_decode failed")
            for row, slot in ends:
                state = running[slot]
                state[2] = int(array(library.llama_get_logits_ith(current, row), (vocabulary,)).argmax())
                found[state[0]].append(state[2])
                if len(found[state[0]]) == lengths[state[0]]:
                    library.llama_memory_seq_rm(memory, slot, -1, -1)
                    del running[slot]
                    free.append(slot)
        return found

    return generate


def vllm(model: str, threads: int) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False, max_num_seqs=64)

    def generate(prompts: list[list[int]], lengths: list[int]) -> Sequence[Sequence[int]]:
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False) for n in lengths]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]

    return generate


def make(engine: str, model: str, threads: int) -> Generate:
    if engine.startswith("octavo"):
        return octavo(model, threads, engine.partition("-")[2] or "none")
    makers = {"transformers": transformers, "openvino": openvino, "llamacpp": llamacpp, "vllm": vllm}
    return makers[engine.partition("-")[0]](model, threads)


def family() -> list[Path]:
    """Of this process and those it started, in /proc."""
    found, todo = [], [os.getpid()]
    while todo:
        found.append(Path("/proc") / str(todo.pop()))
        with contextlib.suppress(OSError):
            threads = list((found[-1] / "task").iterdir())
            todo += [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return found


def peak() -> int:
    """Most bytes that this process and its children ever had in memory."""
    total = 0
    for process in family():
        with contextlib.suppress(OSError):
            lines = (process / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return total


def cpu_seconds() -> tuple[float, float]:
    """Used since the start by the whole machine, and by this process and its children."""
    machine = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    own = 0
    for process in family():
        with contextlib.suppress(OSError):
            own += sum(map(int, (process / "stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    ticks = os.sysconf("SC_CLK_TCK")
    return (sum(machine) - machine[3] - machine[4]) / ticks, own / ticks


def main() -> None:
    engine, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    generate = make(engine, model, threads)
    generate(work("b1", -1)[0], [1])
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, lengths = work(asked["column"], asked["seed"])
        if asked["warm"]:
            lengths = [min(n, 4) for n in lengths]
        before, begin = cpu_seconds(), time.perf_counter()
        found = generate(prompts, lengths)
        seconds, after = time.perf_counter() - begin, cpu_seconds()
        if [len(ids) for ids in found] != lengths:
            raise RuntimeError(f"{engine} stopped before it had all tokens that were asked for")
        others = (after[0] - before[0] - after[1] + before[1]) / seconds
        print(json.dumps({"seconds": seconds, "tokens": sum(lengths), "others": max(0, others)}), file=answers)
    print(json.dumps({"peak": peak()}), file=answers)
    answers.flush()
    os._exit(0)  # some peers do not end by themselves


if __name__ == "__main__":
    main()
