// The chat: a conversation kept in this page, sent whole with every message.

import { answer, answering, stopAnswer } from "./answer.js";
import { $, el, follow } from "./dom.js";
import { formFields } from "./form.js";
import { samplingFields } from "./sampling.js";

const messages = []; // { role, content, node }; with calls of tools also { tool_calls, results }

export function startChat(model) {
  const box = $("message");
  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send(model);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(model);
    }
  });
  box.addEventListener("input", () => grow(box));
  $("chat-stop").addEventListener("click", stopAnswer);
  $("chat-clear").addEventListener("click", () => {
    for (const { node } of messages.splice(0)) node.remove();
    $("hint").hidden = false;
    update();
    box.focus();
  });
  $("chat-again").addEventListener("click", () => {
    while (messages.at(-1)?.role === "assistant") messages.pop().node.remove();
    reply(model);
  });
}

// As tall as its text, to a limit that the style sheet sets.
function grow(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function send(model) {
  const box = $("message");
  const content = box.value.trim();
  if (!content || answering() || !model()) return;
  if (samplingFields("chat") === null || formFields() === null) return;
  box.value = "";
  grow(box);
  show("user", content).querySelector(".body").append(el("div", { class: "text" }, content));
  $("log").scrollTop = $("log").scrollHeight;
  reply(model);
}

function show(role, content) {
  $("hint").hidden = true;
  const name = role === "user" ? "You" : "Model";
  const node = el("article", { class: `message ${role}`, "aria-label": name }, el("h3", {}, name), el("div", { class: "body" }));
  $("log").append(node);
  messages.push({ role, content, node });
  return node;
}

async function reply(model) {
  const sampling = samplingFields("chat");
  const form = formFields();
  if (sampling === null || form === null) return;
  const system = $("system").value.trim();
  const history = messages.flatMap(said);
  const node = show("assistant", "");
  const entry = messages.at(-1);
  update(true);
  const done = await answer({
    path: "v1/chat/completions",
    body: { model: model(), messages: [...(system ? [{ role: "system", content: system }] : []), ...history], ...sampling, ...form },
    place: node.querySelector(".body"),
    read: ({ delta }) => ({ content: delta?.content, reasoning: delta?.reasoning ?? delta?.reasoning_content, toolCalls: delta?.tool_calls, errors: delta?.tool_call_errors }),
    onChange: (change) => follow($("log"), change),
  });
  entry.content = done.text;
  if (done.reason === "tool_calls") {
    entry.tool_calls = done.calls.whole;
    done.calls.ask((results) => {
      entry.results = results;
      reply(model);
    });
  }
  update(false);
}

// What the model is told of a message: calls only with their results.
function said({ role, content, tool_calls, results }) {
  if (results) return [{ role, content, tool_calls }, ...results];
  return content ? [{ role, content }] : [];
}

function update(busy = false) {
  $("chat-stop").hidden = !busy;
  $("chat-send").hidden = busy;
  $("chat-clear").disabled = $("chat-again").disabled = busy || !messages.length;
}
