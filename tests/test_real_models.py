"""SmolLM2 and Gemma 3 as people get them: GGUF in, transformers' text out, token for token in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import real_models
from conftest import Make
from octavo import LLM, SamplingParams
from test_greedy import oracle_logprobs
from test_invariance import same

PROMPTS = [
    "The capital of France is",
    "Write one sentence about the sea.",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the river,",
    "1, 1, 2, 3, 5, 8,",
    "The three states of matter are",
    "Dear Sir or Madam,\n\n",
    "人工智能是",
]

pytestmark = pytest.mark.real_model


def oracle(name: str) -> PreTrainedModel:
    gguf = real_models.real_gguf(name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize(("name", "count", "num_tokens"), [("smollm2", 8, 64), ("gemma3-270m", 3, 24)])
def test_greedy_text_is_transformers(name: str, count: int, num_tokens: int, make_llm: Make) -> None:
    reference = oracle(name)
    llm = make_llm(real_models.real_gguf(name), max_model_len=512)
    prompts = PROMPTS[:count]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    for text, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        ids = output.prompt_token_ids
        sample = output.outputs[0]
        with torch.inference_mode():
            whole = torch.tensor([ids + sample.token_ids])
            logits = reference(whole).logits[0]
        # One teacher-forced pass tells what greedy decoding would have said at each position.
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == sample.token_ids, text
        found = [row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert found == pytest.approx(oracle_logprobs(reference, ids, sample.token_ids), abs=1e-3)


def test_the_capital_of_france(make_llm: Make) -> None:
    """The default model answers a chat. In float32: in bfloat16 its first word is a near tie that kernels decide."""
    llm = make_llm(real_models.real_gguf("smollm2"), dtype="float32")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0].outputs[0]
    assert output.text == "The capital of France is Paris."
    assert output.token_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert output.finish_reason == "stop"


def test_gemma_knows_it_too(make_llm: Make) -> None:
    llm = make_llm(real_models.real_gguf("gemma3-270m"))
    output = llm.generate(
        "What is the capital of France?", SamplingParams(temperature=0, max_tokens=10), use_tqdm=False
    )
    assert output[0].outputs[0].text.startswith("\n\nThe capital of France is Paris.")


@pytest.mark.case("KV-04")
def test_nothing_but_the_request_decides_on_a_real_model(make_llm: Make) -> None:
    model = real_models.real_gguf("smollm2")
    params = [
        SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=24, logprobs=1, ignore_eos=True),
    ] * 3
    prompts = PROMPTS[:6]

    def run(llm: LLM) -> list:
        return llm.generate(prompts, params, use_tqdm=False)

    with make_llm(model, max_num_seqs=1, enable_prefix_caching=False, depth=0) as llm:
        expected = run(llm)
    for options in (
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"num_scheduler_steps": 8, "depth": 4},
        {"max_model_len": 64, "block_size": 4, "num_gpu_blocks_override": 24},
    ):
        with make_llm(model, **options) as llm:
            same(run(llm), expected)
            same(run(llm), expected)
