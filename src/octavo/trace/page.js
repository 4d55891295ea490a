// The page of `octavo trace html`: a view of some steps, one chosen step, one chosen request; everything is drawn from these.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const last = Math.max(data.launched.length - 1, 0);
const ROW = 14; // pixels of a request's line
const state = { step: 0, chosen: 0, from: 0, to: last + 1 };

// What the trace says, in the shapes that drawing needs.

const requests = data.requests.map((request, number) => ({
  ...request, number,
  end: request.end < 0 ? last + 1 : request.end,
  hue: (number * 137.508) % 360,
  stays: request.stays.map(([slot, first, end, shared, copied, known, by, lost, blocks, runs]) => ({
    slot, first, end: end < 0 ? last + 1 : end, shared, copied, known, by, lost, blocks, runs,
  })),
}));
const spans = []; // a block with one request: {block, first, end, request}
for (const request of requests)
  for (const stay of request.stays)
    for (let i = 0; i < stay.blocks.length; i += 2)
      spans.push({ block: stay.blocks[i + 1], first: stay.blocks[i], end: stay.end, request });
const used = [...new Set(spans.map((span) => span.block))].sort((a, b) => a - b);
const rowOf = new Map(used.map((block, row) => [block, row]));
const ofBlock = new Map(used.map((block) => [block, []]));
for (const span of spans) ofBlock.get(span.block).push(span);
for (const list of ofBlock.values()) list.sort((a, b) => a.first - b.first);

const stayAt = (request, step) => request.stays.find((stay) => stay.first <= step && step < stay.end);
const holders = (block, step) => (ofBlock.get(block) || []).filter((span) => span.first <= step && step < span.end);

function tableAt(stay, step) {
  const table = [];
  for (let i = 0; i < stay.blocks.length; i += 2)
    if (stay.blocks[i] <= step) table.push({ block: stay.blocks[i + 1], since: stay.blocks[i] });
  return table;
}

function computed(stay, step) {
  let done = stay.shared + stay.copied;
  for (let i = 0; i < stay.runs.length && stay.runs[i] <= step; i += 3)
    done = stay.runs[i + 1] + Math.min(step - stay.runs[i], stay.runs[i + 2] - 1);
  return done;
}

function decodesFrom(stay) { // the first step behind the one that reached the end of what was known
  for (let i = 0; i < stay.runs.length; i += 3) {
    const missing = Math.max(stay.known - stay.runs[i + 1], 0);
    if (missing < stay.runs[i + 2]) return Math.min(stay.runs[i] + missing + 1, stay.end);
  }
  return stay.end;
}

function phases(request) {
  const found = [];
  let since = request.arrived, what = "queued";
  for (const stay of request.stays) {
    const decode = decodesFrom(stay);
    found.push([what, since, stay.first], ["prefill", stay.first, decode], ["decode", decode, stay.end]);
    since = stay.end;
    what = "preempted";
  }
  found.push([what, since, request.end]);
  return found.filter(([, first, end]) => end > first);
}
for (const request of requests) request.phases = phases(request);

// Drawing

let style = {};
function readStyle() {
  const read = getComputedStyle(document.documentElement);
  for (const name of ["text", "queued", "preempted", "accent", "light", "soft", "dim", "faint", "plot"])
    style[name] = read.getPropertyValue(`--${name}`).trim();
}
const colour = (request, light) => `hsl(${request.hue} 62% ${light})`;

function fit(canvas) {
  const ratio = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width, height];
}
const x = (step, width) => ((step - state.from) / (state.to - state.from)) * width;
const stepAt = (px, width) => clamp(Math.floor(state.from + (px / width) * (state.to - state.from)), 0, last);
const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function drawGrid() {
  const [pen, width, height] = fit($("grid"));
  const row = height / Math.max(used.length, 1), gap = row >= 5 ? 1 : 0;
  const chosen = requests[state.chosen];
  const paint = (span, depth, least = 0.7) => {
    if (span.end <= state.from || span.first >= state.to) return;
    const left = x(span.first, width), wide = Math.max(x(span.end, width) - left, 0.7);
    const top = rowOf.get(span.block) * row;
    pen.fillStyle = colour(span.request, style.light);
    pen.fillRect(left, top + (depth ? row / 2 : 0), wide, Math.max((depth ? row / 2 : row) - gap, least));
  };
  pen.globalAlpha = chosen && chosen.stays.length ? 0.28 : 1;
  for (const list of ofBlock.values()) {
    let busy = -1; // until when the row has a span: a second one is drawn in its lower half
    for (const span of list) {
      paint(span, span.first < busy); // shared
      busy = Math.max(busy, span.end);
    }
  }
  pen.globalAlpha = 1;
  if (chosen) for (const span of spans) if (span.request === chosen) paint(span, false, 2);
  $("axis-from").textContent = `step ${state.from}`;
  $("axis-to").textContent = `step ${state.to - 1}`;
}

function drawCursor() {
  const [pen, width, height] = fit($("grid-cursor"));
  const left = x(state.step, width), wide = Math.max(x(state.step + 1, width) - left, 1);
  pen.fillStyle = style.text;
  pen.globalAlpha = 0.16;
  pen.fillRect(left, 0, wide, height);
  pen.globalAlpha = 1;
  pen.fillRect(left, 0, 1, height);
}

function drawLines() {
  const [pen, width, height] = fit($("timeline"));
  const top = $("lines").scrollTop, first = Math.floor(top / ROW);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (let i = first; i < requests.length && i * ROW - top < height; i++) {
    const request = requests[i], y = i * ROW - top;
    if (i === state.chosen) {
      pen.fillStyle = style.accent;
      pen.globalAlpha = 0.18;
      pen.fillRect(0, y, width, ROW);
      pen.globalAlpha = 1;
    }
    for (const [what, begin, end] of request.phases) {
      if (end <= state.from || begin >= state.to) continue;
      const left = x(begin, width);
      pen.fillStyle = { queued: style.queued, preempted: style.preempted, prefill: colour(request, style.light),
        decode: colour(request, style.soft) }[what];
      const thin = what === "queued" || what === "preempted";
      pen.fillRect(left, y + (thin ? 5 : 2), Math.max(x(end, width) - left, 1), thin ? 4 : ROW - 4);
    }
    if (i === state.chosen) {
      pen.fillStyle = style.text;
      const right = Math.max(x(request.end, width), 0) + 6, wide = pen.measureText(request.id).width;
      pen.fillText(request.id, right + wide < width ? right : Math.max(x(request.arrived, width) - wide - 6, 2), y + ROW / 2);
    }
  }
  pen.fillStyle = style.text;
  pen.fillRect(x(state.step, width), 0, 1, height);
}

function showNow() {
  const { step } = state, took = data.took[step];
  $("step").value = step;
  $("now").textContent = data.launched.length === 0 ? "There is no step in this trace." :
    `step ${step} of ${last} · ${(data.launched[step] / 1000).toFixed(1)} ms · ` +
    (took < 0 ? "not finished" : `took ${(took / 1000).toFixed(2)} ms`) +
    ` · ${count(data.running[step], "sequence")} · ${count(data.positions[step], "position")}`;
}

function showTable() {
  const request = requests[state.chosen], { step } = state;
  if (!request) return;
  $("request").value = state.chosen;
  const stay = stayAt(request, step);
  const phase = request.phases.find(([, first, end]) => first <= step && step < end);
  const done = stay ? computed(stay, step) : 0;
  const what = phase ? phase[0] : step < request.arrived ? "not there yet" : `ended: ${request.reason || "at work"}`;
  const parts = [what, `${request.prompt} prompt tokens, ${request.tokens} generated in all`];
  if (stay) parts.push(`slot ${stay.slot}`, `${done} positions computed`);
  if (stay && step === stay.first && stay.shared + stay.copied) parts.push(`${stay.shared + stay.copied} found in the cache`);
  $("state").textContent = parts.join(" · ");
  const cells = (stay ? tableAt(stay, step) : []).map(({ block, since }, i) => {
    const filled = clamp(done - i * data.size, 0, data.size), others = holders(block, step).length - 1;
    const cell = document.createElement("div"), name = document.createElement("b"), note = document.createElement("span");
    const bar = document.createElement("div"), full = document.createElement("i");
    cell.className = since === step ? "cell new" : "cell";
    cell.dataset.block = block;
    cell.dataset.filled = filled;
    cell.title = `entry ${i}: block ${block}, ${filled} of ${data.size} positions computed` + (others > 0 ? `, shared with ${others}` : "");
    name.textContent = block;
    note.textContent = others > 0 ? `×${others + 1}` : filled < data.size ? `${filled}/${data.size}` : "";
    bar.className = "bar";
    full.style.cssText = `width:${(100 * filled) / data.size}%;background:${colour(request, style.light)}`;
    bar.append(full);
    cell.append(note, name, bar);
    return cell;
  });
  $("table").replaceChildren(...cells);
}

// Whatever changes, the next frame draws it.

let wanted = new Set();
function draw(...what) {
  if (!wanted.size) requestAnimationFrame(() => {
    const now = wanted;
    wanted = new Set();
    if (now.has("grid")) drawGrid();
    drawCursor();
    drawLines();
    showNow();
    showTable();
  });
  for (const one of ["rest", ...what]) wanted.add(one);
}

function goTo(step) {
  state.step = clamp(step, 0, last);
  const wide = state.to - state.from;
  if (state.step < state.from || state.step >= state.to) {
    setView(state.step - wide / 2, wide);
    return draw("grid");
  }
  draw();
}

function choose(number) {
  if (!requests.length) return;
  state.chosen = clamp(number, 0, requests.length - 1);
  const box = $("lines"), y = state.chosen * ROW;
  if (y < box.scrollTop || y + ROW > box.scrollTop + box.clientHeight) box.scrollTop = y - box.clientHeight / 2;
  draw("grid");
}

function setView(from, wide) {
  wide = clamp(Math.round(wide), Math.min(10, last + 1), last + 1);
  state.from = clamp(Math.round(from), 0, last + 1 - wide);
  state.to = state.from + wide;
}

function zoom(factor, around = state.step) {
  const wide = state.to - state.from, share = (around - state.from) / wide;
  setView(around - share * wide * factor, wide * factor);
  draw("grid");
}

function nextChange(way) {
  const changes = requests[state.chosen].stays.flatMap((stay) =>
    [stay.first, stay.end, ...stay.blocks.filter((_, i) => i % 2 === 0)]);
  const ahead = changes.filter((step) => (way > 0 ? step > state.step : step < state.step));
  if (ahead.length) goTo(way > 0 ? Math.min(...ahead) : Math.max(...ahead));
}

// Listening

$("step").max = last;
$("step").addEventListener("input", () => goTo(Number($("step").value)));
$("back").addEventListener("click", () => goTo(state.step - 1));
$("forth").addEventListener("click", () => goTo(state.step + 1));
$("closer").addEventListener("click", () => zoom(0.5));
$("wider").addEventListener("click", () => zoom(2));
$("all").addEventListener("click", () => zoom(1e9));
$("request").addEventListener("change", () => choose(Number($("request").value)));
$("lines").addEventListener("scroll", () => draw());
addEventListener("resize", () => draw("grid"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readStyle(); draw("grid"); });

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.target.tagName === "SELECT") return;
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key], up = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (way && event.altKey) nextChange(way);
  else if (way) goTo(state.step + way * (event.shiftKey ? 10 : 1));
  else if (up) choose(state.chosen + up);
  else if (event.key === "+" || event.key === "=") zoom(0.5);
  else if (event.key === "-") zoom(2);
  else if (event.key === "0") zoom(1e9);
  else if (event.key === "Home" || event.key === "End") goTo(event.key === "Home" ? 0 : last);
  else return;
  event.preventDefault();
});

const spot = (event) => {
  const box = $("grid-cursor").getBoundingClientRect();
  const row = Math.floor(((event.clientY - box.top) / box.height) * used.length);
  return { step: stepAt(event.clientX - box.left, box.width), block: used[clamp(row, 0, used.length - 1)] };
};
$("grid-cursor").addEventListener("pointermove", (event) => {
  if (!used.length) return;
  const { step, block } = spot(event), who = holders(block, step).map((span) => span.request.id);
  const shown = who.length > 4 ? `${who.slice(0, 4).join(", ")} and ${who.length - 4} more` : who.join(", ");
  $("tip").textContent = `block ${block}, step ${step}: ${shown || "nobody's"}`;
  $("tip").hidden = false;
  $("tip").style.left = `${Math.min(event.clientX + 14, innerWidth - 330)}px`;
  $("tip").style.top = `${event.clientY + 14}px`;
});
$("grid-cursor").addEventListener("pointerleave", () => { $("tip").hidden = true; });
$("grid-cursor").addEventListener("click", (event) => {
  if (!used.length) return;
  const { step, block } = spot(event), found = holders(block, step);
  if (found.length) choose(found[0].request.number);
  goTo(step);
});
$("grid-box").addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.shiftKey) return; // the wheel alone scrolls the page
  event.preventDefault();
  zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, spot(event).step);
}, { passive: false });
$("timeline").addEventListener("click", (event) => {
  const box = $("timeline").getBoundingClientRect();
  choose(Math.floor((event.clientY - box.top + $("lines").scrollTop) / ROW));
  goTo(stepAt(event.clientX - box.left, box.width));
});

// Begin

const seconds = data.launched.length ? data.launched[last] / 1e6 : 0;
$("summary").textContent = `${data.model || "A run"}: ${requests.length} requests, ${data.launched.length} steps in ` +
  `${seconds.toFixed(1)} s; ${data.blocks} blocks of ${data.size} tokens, of which ${used.length} were used` +
  (data.complete ? "" : "; the recording was not closed");
$("request").append(...requests.map((request) => new Option(`${request.number}: ${request.id}`, request.number)));
$("lines-all").style.height = `${requests.length * ROW}px`;
readStyle();
choose(0);
