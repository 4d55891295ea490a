// Text as it streams in, token by token where the server sends probabilities, with the alternatives in a tooltip.

import { $, el } from "./dom.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1]; // less likely tokens stand out more

// Chat and completion logprobs in one shape: [{ token, logprob, top: [{ token, logprob }] }].
export function readLogprobs(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs ?? [] }));
  }
  return (logprobs.tokens ?? []).map((token, i) => ({
    token,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
}

export class TokenText {
  constructor(container) {
    this.container = container;
    this.text = "";
    this.waiting = []; // tokens whose text has not come yet: half a character, or the beginning of a stop string
    container.addEventListener("pointerover", (event) => this.point(event.target.closest(".token")));
    container.addEventListener("pointerout", () => this.point(null));
    container.addEventListener("focus", () => this.move(0));
    container.addEventListener("blur", () => this.point(null));
    container.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
      if (!step || !this.container.querySelector(".token")) return;
      event.preventDefault();
      this.move(step);
    });
    this.place = 0;
    this.details = new WeakMap();
  }

  add(text, tokens) {
    this.text += text;
    this.waiting.push(...tokens);
    if (!text) return;
    if (!this.waiting.length) {
      this.container.append(text);
      return;
    }
    const joined = this.waiting.map(({ token }) => token).join("");
    if (joined === text) {
      for (const one of this.waiting) this.token(one.token, [one]);
    } else {
      this.token(text, this.waiting); // several tokens make up these characters together
    }
    this.waiting = [];
    this.container.tabIndex = 0;
  }

  token(text, tokens) {
    const likely = Math.exp(Math.min(...tokens.map(({ logprob }) => logprob)));
    const level = LEVELS.filter((bound) => likely < bound).length;
    const span = el("span", { class: `token level-${level}` }, text);
    this.details.set(span, tokens);
    this.container.append(span);
  }

  move(step) {
    const spans = this.container.querySelectorAll(".token");
    if (!spans.length) return;
    this.place = Math.max(0, Math.min(spans.length - 1, this.place + step));
    this.point(spans[this.place]);
  }

  point(span) {
    this.container.querySelector(".token.current")?.classList.remove("current");
    const tip = $("tip");
    tip.hidden = !span;
    if (!span) return;
    span.classList.add("current");
    tip.replaceChildren(...this.details.get(span).map(table));
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8));
    const below = at.bottom + 6;
    tip.style.left = `${left}px`;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? at.top - tip.offsetHeight - 6 : below}px`;
  }
}

function table({ token, logprob, top }) {
  const rows = top.some((other) => other.token === token) ? top : [...top, { token, logprob }];
  return el(
    "table",
    {},
    ...rows
      .toSorted((a, b) => b.logprob - a.logprob)
      .map((row) => {
        const share = Math.exp(row.logprob);
        const bar = el("span", { class: "share" });
        bar.style.width = `${Math.max(1, share * 100)}%`;
        return el(
          "tr",
          { class: row.token === token ? "chosen" : undefined },
          el("th", { scope: "row" }, visible(row.token)),
          el("td", { class: "bar" }, bar),
          el("td", {}, `${(share * 100).toFixed(share < 0.1 ? 2 : 1)} %`),
        );
      }),
  );
}

// White space that would not be seen.
function visible(token) {
  return token.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(empty)";
}
