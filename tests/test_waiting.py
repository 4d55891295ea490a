"""Parts of hard cases that need what is not built yet: refused with a sentence today, listed by `-m waits_for`."""

import pytest

from conftest import Make
from octavo.config import EngineConfig


@pytest.mark.case("PFX-05")
@pytest.mark.waits_for("LoRA adapters")
def test_adapters_are_refused(make_llm: Make) -> None:
    with pytest.raises(ValueError, match="enable_lora=True is not available: there are no adapters yet"):
        make_llm(enable_lora=True)


@pytest.mark.case("MOD-07", "LOAD-03", "LOAD-07", "GGUF-02")
@pytest.mark.waits_for("tensor parallelism")
def test_several_devices_are_refused(make_llm: Make) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2 is not available"):
        make_llm(tensor_parallel_size=2)


@pytest.mark.case("KV-03")
@pytest.mark.waits_for("LoRA adapters")
def test_adapter_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="max_loras=4 is not available"):
        EngineConfig.from_keywords("LLM", max_loras=4)


@pytest.mark.waits_for("speculative decoding")
def test_speculation_is_refused(make_llm: Make) -> None:
    with pytest.raises(ValueError, match="speculative_config=.* is not available: there is no speculation yet"):
        make_llm(speculative_config={"method": "ngram"})
