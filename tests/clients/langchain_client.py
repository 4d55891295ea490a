"""LangChain against a running server: `python langchain_client.py URL MODEL`, where langchain-openai is."""

import asyncio
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1] + "/v1", sys.argv[2]


def check(what: str, good: bool) -> None:
    print(f"{'ok' if good else 'FAILED'}: {what}")
    if not good:
        sys.exit(1)


chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=24, max_retries=0)
question = [SystemMessage("You are a helpful assistant."), HumanMessage("What is the capital of France?")]
answer = chat.invoke(question)
check("ChatOpenAI.invoke answers with text", bool(answer.content) and "Paris" in str(answer.content))
check("usage_metadata is filled", answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0)
check("finish_reason is reported", answer.response_metadata["finish_reason"] in ("stop", "length"))

parts = list(chat.stream(question, stream_usage=True))
check("a stream has several chunks", len(parts) > 3)
check("its text is that of the whole answer", "".join(str(part.content) for part in parts) == answer.content)
total = sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata)
check("its usage too", answer.usage_metadata is not None and total == answer.usage_metadata["output_tokens"])

turns = [*question, AIMessage(str(answer.content)), HumanMessage("And of Italy?")]
check("a conversation of several turns", bool(chat.invoke(turns).content))
check("batch() answers in order", [bool(a.content) for a in chat.batch([question] * 4)] == [True] * 4)
check("ainvoke", asyncio.run(chat.ainvoke(question)).content == answer.content)
logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(question).response_metadata["logprobs"]["content"]
check("logprobs", len(logprobs) > 3 and len(logprobs[0]["top_logprobs"]) == 2)

complete = OpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=8, max_retries=0)
text = complete.invoke("The capital of France is")
check("OpenAI.invoke completes", "Paris" in text)
check("OpenAI.stream completes the same", "".join(complete.stream("The capital of France is")) == text)
try:
    ChatOpenAI(base_url=url, api_key="none", model="nope", max_retries=0).invoke(question)
    check("an unknown model is an error", False)
except Exception as error:
    check("an unknown model is NotFoundError", "404" in str(error) and "nope" in str(error))
