// One streamed answer: its text, a stop button, its error, and what it took.

import { ServerError, stream } from "./api.js";
import { Calls } from "./calls.js";
import { el } from "./dom.js";
import { TokenText, readLogprobs } from "./tokens.js";

let current = null; // one answer at a time

export function stopAnswer() {
  current?.abort();
}

export const answering = () => current !== null;

// Streams into `place`; `read` takes text and logprobs out of a choice. Returns text and calls, also of a stopped answer.
export async function answer({ path, body, place, read, onChange }) {
  const controller = (current = new AbortController());
  const thought = el("p", { class: "thought" });
  const fold = el("details", { class: "fold", hidden: true }, el("summary", {}, "Thought"), thought);
  const made = el("div", { class: "calls" });
  const calls = new Calls(made);
  const box = el("div", { class: "text", "aria-busy": "true" });
  const note = el("p", { class: "note" });
  place.append(fold, box, made, note);
  const text = new TokenText(box);
  const begin = performance.now();
  let first = 0, last = begin, usage = null, reason = "";
  try {
    for await (const event of stream(path, body, controller.signal)) {
      if (event.usage) usage = event.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const { content, reasoning, toolCalls, errors } = read(choice);
      last = performance.now();
      if (content || reasoning || toolCalls) first ||= last;
      onChange(() => {
        if (reasoning) {
          fold.hidden = false;
          thought.append(reasoning);
        }
        text.add(content ?? "", readLogprobs(choice.logprobs));
        calls.add(toolCalls, errors);
      });
      if (choice.finish_reason) reason = choice.finish_reason;
    }
  } catch (error) {
    if (error.name === "AbortError") {
      reason = "stopped";
    } else {
      onChange(() => place.append(problem(error)));
      reason = "error";
    }
  } finally {
    current = null;
    box.removeAttribute("aria-busy");
  }
  onChange(() => note.append(summary(reason, usage, first && first - begin, last - first)));
  return { text: text.text, reason, calls };
}

const rate = (value) => (value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));

function summary(reason, usage, firstMs, decodeMs) {
  const parts = [];
  const count = usage?.completion_tokens ?? 0;
  if (count) parts.push(`${count} token${count === 1 ? "" : "s"}`);
  if (count > 1 && decodeMs > 0) parts.push(`${rate(((count - 1) / decodeMs) * 1000)} tokens/s`);
  if (firstMs) parts.push(`first after ${Math.round(firstMs)} ms`);
  const thoughts = usage?.completion_tokens_details?.reasoning_tokens;
  if (thoughts) parts.push(`${thoughts} of them thought`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens from the cache`);
  const told = { stop: "ended by itself", tool_calls: "calls a tool", length: "cut at the limit of tokens", stopped: "stopped by you", abort: "ended by the server", error: "failed" };
  if (reason) parts.push(told[reason] ?? reason);
  return parts.join(" · ");
}

export function problem(error) {
  const known = error instanceof ServerError;
  const where = known && error.param ? `${error.param}: ` : "";
  return el("p", { class: "banner", role: "alert" }, known ? where + error.message : `This page failed: ${error.message}`);
}
