"""LiteLLM against a running server: `python litellm_client.py URL MODEL`, in an environment with litellm."""

import asyncio
import sys

import litellm

url, model = sys.argv[1] + "/v1", sys.argv[2]
messages = [{"role": "user", "content": "What is the capital of France?"}]
litellm.suppress_debug_info = True


def check(what: str, good: bool) -> None:
    print(f"{'ok' if good else 'FAILED'}: {what}")
    if not good:
        sys.exit(1)


for provider in ("openai", "hosted_vllm"):
    common = {"model": f"{provider}/{model}", "api_base": url, "api_key": "none", "num_retries": 0}
    chat = {**common, "messages": messages, "temperature": 0, "max_tokens": 24}
    answer = litellm.completion(**chat)
    text = answer.choices[0].message.content
    check(f"{provider}: completion answers", "Paris" in text and answer.usage.completion_tokens > 0)
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(f"{provider}: a stream has the same text", len(chunks) > 3 and streamed == text)
    usage = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    check(f"{provider}: and usage at its end", usage[-1].completion_tokens == answer.usage.completion_tokens)
    check(f"{provider}: acompletion", asyncio.run(litellm.acompletion(**chat)).choices[0].message.content == text)
    check(f"{provider}: n=2", len(litellm.completion(**{**chat, "temperature": 1, "n": 2}).choices) == 2)
    try:
        litellm.completion(**{**chat, "model": f"{provider}/nope"})
        check(f"{provider}: an unknown model is an error", False)
    except litellm.NotFoundError:
        check(f"{provider}: an unknown model is NotFoundError", True)
    try:
        litellm.completion(**{**chat, "messages": [{"role": "user", "content": "word " * 5000}]})
        check(f"{provider}: too long a prompt is an error", False)
    except litellm.ContextWindowExceededError:
        check(f"{provider}: too long a prompt is ContextWindowExceededError", True)
found = litellm.text_completion(
    model=f"text-completion-openai/{model}", api_base=url, api_key="none", prompt="The capital of France is",
    max_tokens=8, temperature=0,
)  # fmt: skip
check("text_completion completes", "Paris" in found.choices[0].text)
