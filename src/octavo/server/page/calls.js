// Calls of tools in an answer: put together from their pieces, shown, and answered by the person at the page.

import { el } from "./dom.js";

export class Calls {
  constructor(place) {
    this.place = place;
    this.calls = []; // { id, name, arguments }, by index
    this.nodes = [];
  }

  add(deltas, errors) {
    for (const { index, id, function: piece } of deltas ?? []) {
      if (!this.calls[index]) {
        this.calls[index] = { id, name: piece.name, arguments: "" };
        const node = (this.nodes[index] = el("div", { class: "call" }, el("strong", {}, piece.name), el("code", {})));
        this.place.append(node);
      }
      this.calls[index].arguments += piece.arguments ?? "";
      this.nodes[index].querySelector("code").textContent = this.calls[index].arguments;
    }
    for (const { index, reason } of errors ?? []) {
      this.nodes[index]?.remove();
      delete this.calls[index];
      this.place.append(el("p", { class: "faint small" }, `This is no call of a tool: ${reason}.`));
    }
  }

  get whole() {
    return this.calls.filter((call) => call).map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }

  // A form for the results; `give` gets one message for each call.
  ask(give) {
    const calls = this.whole;
    if (!calls.length) return;
    const boxes = calls.map(({ function: { name } }) => el("input", { "aria-label": `Result of ${name}`, placeholder: `Result of ${name}` }));
    const form = el("form", { class: "results" }, ...boxes, el("button", { type: "submit", class: "quiet" }, "Give results"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      give(calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: boxes[i].value })));
    });
    this.place.append(form);
  }
}
