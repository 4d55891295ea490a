"""A thinking budget ends a thought with the model's own mark, whatever else runs."""

from pathlib import Path
from typing import Any

import pytest

import tiny_models
import tiny_tokenizers
from conftest import Make
from octavo import LLM, SamplingParams
from octavo.errors import InvalidConfig, InvalidRequest
from octavo.text.tools.formats import REASONING_FORMATS, Formats
from octavo.text.tools.thinking import ThoughtState, is_opened
from octavo.types import Thinking
from test_invariance import assert_idle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose marks are several tokens each."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(tiny_models.oracle(vocab_size=600), folder)
    return tiny_tokenizers.f_bpe(folder)


PROMPTS = [[40 + i, 50, 60, 70 + 3 * i, *range(100, 100 + 5 * i)] for i in range(6)]


def ids(llm: LLM, budgets: list[int | None], **more: Any) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, thinking_token_budget=budget, **{"temperature": 0, **more})
        for budget in budgets
    ]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "options",
    [{}, {"depth": 0}, {"num_scheduler_steps": 8}, {"num_gpu_blocks_override": 8, "block_size": 16, "depth": 4}],
)
def test_the_budget_forces_the_end_of_the_thought_and_changes_nothing_before(
    make_llm: Make, folder: Path, options: dict[str, Any]
) -> None:
    budgets: list[int | None] = [None, 0, 1, 5, -1, 27]
    with make_llm(folder, max_model_len=128, reasoning_parser="deepseek_r1", **options) as llm:
        mark = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
        assert len(mark) > 1
        free = ids(llm, [None] * 6)
        for _ in range(2):  # the second time on a warm prefix cache
            found = ids(llm, budgets)
            for budget, tokens, without in zip(budgets, found, free, strict=True):
                if budget is None or budget < 0:
                    assert tokens == without
                else:
                    assert tokens[:budget] == without[:budget]
                    assert tokens[budget : budget + len(mark)] == mark[: 30 - budget]
                    assert len(tokens) == 30
        if "num_gpu_blocks_override" in options:
            assert llm.engine.scheduler.num_preemptions > 0
        alone = llm.generate(
            [PROMPTS[3]], SamplingParams(max_tokens=30, ignore_eos=True, thinking_token_budget=5, temperature=0)
        )
        assert alone[0].outputs[0].token_ids == found[3]
        assert_idle(llm)


def test_a_budget_wins_over_what_rules_tokens_out(make_llm: Make, folder: Path) -> None:
    with make_llm(folder, max_model_len=128, reasoning_parser="deepseek_r1") as llm:
        mark = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
        found = ids(llm, [4] * 6, allowed_token_ids=[45, 46, 47], temperature=1.0, seed=1)
        for tokens in found:
            assert tokens[4 : 4 + len(mark)] == mark
            assert set(tokens) - set(mark) <= {45, 46, 47}


def test_a_model_that_marks_no_thoughts_takes_no_budget(make_llm: Make, folder: Path) -> None:
    with make_llm(folder, max_model_len=128) as llm, pytest.raises(InvalidRequest, match="marks no thoughts"):
        ids(llm, [3] * 6)
    with pytest.raises(InvalidConfig, match="deepseek_r1"):
        make_llm(folder, reasoning_parser="deepseek-r1")
    for wrong in (-2, 1.5, True, "3"):
        with pytest.raises(InvalidRequest, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=wrong)  # type: ignore[arg-type]


def test_tokens_of_thoughts_are_counted_between_their_marks() -> None:
    state = ThoughtState(Thinking(begin=(1, 2), end=(3, 4), forced=(3, 4)))
    states = []
    for token in (9, 1, 2, 7, 3, 7, 3, 4, 9, 1, 2, 3, 4):
        state.feed(token)
        states.append(state.inside)
    assert states == [False, False, True, True, True, True, True, False, False, False, True, True, False]
    assert state.length == 3
    opened = ThoughtState(Thinking(begin=(1,), end=(3,), forced=(3,), opened=True))
    for token in (5, 6, 3, 8):
        opened.feed(token)
    assert (opened.inside, opened.length) == (False, 2)


def test_an_answer_begins_inside_a_thought_where_the_prompt_ends_with_its_mark() -> None:
    by_name = {form.name: form for form in REASONING_FORMATS}
    assert is_opened(by_name["qwen3"], "<|im_start|>assistant\n<think>\n")
    assert not is_opened(by_name["qwen3"], "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not is_opened(by_name["qwen3"], "What does <think> mean?<|im_end|>\n<|im_start|>assistant\n")
    assert is_opened(by_name["deepseek_r1"], "anything")
    assert Formats.of("{{ '<think>' }}").reasoning == by_name["qwen3"]
    assert Formats.of("{{ '<think>' }}", None, "none").reasoning is None
