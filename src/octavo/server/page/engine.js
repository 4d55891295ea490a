// The live view: asks the server once a second while the page is seen, and keeps the last minutes for the curves.

import { get } from "./api.js";
import { $, el } from "./dom.js";
import { sparkline } from "./sparkline.js";

const INTERVAL = 1000;
const AFTER_ERROR = 4000;
const KEPT = 300; // seconds
const SHORTEST = 60; // seconds that a curve shows at least

const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const whole = (value) => Math.round(value).toLocaleString("en");
const TILES = [
  { label: "Running", value: (s) => s.running, shown: whole, note: (s) => `of ${whole(s.max_num_seqs)} places` },
  { label: "Waiting", value: (s) => s.waiting, shown: whole, note: () => "in the queue" },
  { label: "Generated", value: (s) => s.tokens_per_second.generation, shown: whole, note: () => "tokens/s" },
  { label: "Prompts", value: (s) => s.tokens_per_second.prompt, shown: whole, note: () => "tokens/s" },
  { label: "KV cache", value: (s) => s.kv_cache_usage, shown: percent, note: (s) => `${whole(s.kv_blocks.used)} of ${whole(s.kv_blocks.total)} blocks`, most: () => 1 },
  { label: "Prefix hits", value: (s) => s.prefix_cache.hit_rate, shown: percent, note: () => "of recent prompt tokens", most: () => 1 },
];
const LATENCIES = { ttft: "First token", itl: "Next token", queue: "Queue", e2e: "Whole request" };
const TOTALS = { requests: "Requests", prompt_tokens: "Prompt tokens", generation_tokens: "Generated tokens", preemptions: "Preemptions" };

const history = [];
let timer = 0;

export function startEngine() {
  for (const tile of TILES) {
    tile.number = el("p", { class: "number" }, "–");
    tile.text = el("p", { class: "faint small" }, "");
    tile.curve = sparkline();
    $("tiles").append(
      el("section", { class: "card tile", "aria-label": tile.label }, el("h2", {}, tile.label), tile.number, tile.text, tile.curve.node),
    );
  }
  document.addEventListener("visibilitychange", pollNow);
  pollNow();
}

export function pollNow() {
  clearTimeout(timer);
  if (document.visibilityState === "visible") poll();
}

async function poll() {
  let wait = INTERVAL;
  try {
    const snapshot = await get("load", AbortSignal.timeout(10_000));
    const now = performance.now() / 1000;
    history.push({ at: now, snapshot });
    while (now - history[0].at > KEPT) history.shift();
    draw(snapshot, now);
    tell("live", `${whole(snapshot.running)} running · ${whole(snapshot.tokens_per_second.generation)} tokens/s`);
  } catch (error) {
    wait = AFTER_ERROR;
    const message = error.name === "TimeoutError" ? "The server takes more than ten seconds to answer." : error.message;
    tell(error.status === 401 || error.status === 503 ? "wait" : "down", { 401: "API key needed", 503: "Not ready" }[error.status] ?? "No answer");
    $("engine-error").hidden = false;
    $("engine-error").textContent = message;
  }
  clearTimeout(timer);
  if (document.visibilityState === "visible") timer = setTimeout(poll, wait);
}

function tell(state, text) {
  $("pulse").dataset.state = state;
  if ($("pulse-text").textContent !== text) $("pulse-text").textContent = text;
}

function draw(snapshot, now) {
  $("engine-error").hidden = true;
  for (const tile of TILES) {
    tile.number.textContent = tile.shown(tile.value(snapshot));
    tile.text.textContent = tile.note(snapshot);
    const points = history.map(({ at, snapshot: then }) => [at - now, tile.value(then)]);
    tile.curve.draw(points, Math.max(SHORTEST, -points[0][0]), tile.most?.(snapshot));
  }
  $("latency-caption").textContent = `Over the last ${Math.round(snapshot.window_s)} seconds`;
  $("latency").replaceChildren(
    ...Object.entries(LATENCIES).map(([name, label]) => {
      const found = snapshot.latency_ms[name];
      const cells = ["p50", "p90", "p99"].map((p) => el("td", {}, found ? duration(found[p]) : "–"));
      return el("tr", {}, el("th", { scope: "row" }, label), ...cells);
    }),
  );
  const rows = Object.entries(TOTALS).map(([name, label]) => [label, whole(snapshot.totals[name])]);
  rows.push(["Up for", duration(snapshot.uptime_s * 1000)]);
  $("totals").replaceChildren(...rows.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value))));
}

function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min`;
  const hours = Math.floor(ms / 3_600_000);
  return hours < 48 ? `${hours} h` : `${Math.floor(hours / 24)} days`;
}
