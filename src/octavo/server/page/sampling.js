// The sampling controls: their ranges are those the server accepts; an empty one is not sent.

import { $, el } from "./dom.js";

// Ranges of the sliders; least and most are those of the numbers where they go further. Unset sliders rest at `rest`.
const KNOBS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, rest: 1 },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, rest: 1 },
  { name: "top_k", label: "Top k", min: 0, max: 200, step: 1, most: 1e9, rest: 0 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, rest: 0 },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 4096, step: 1, most: 1e9, rest: 1024 },
];
const MORE = [
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, rest: 0 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, rest: 0 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.05, least: 0.000001, most: 1e6, rest: 1 },
  { name: "seed", label: "Seed", min: 0, step: 1, most: Number.MAX_SAFE_INTEGER },
];
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);
const ALTERNATIVES = 5;

export function buildControls() {
  $("knobs").append(...KNOBS.map(control));
  $("more-knobs").append(...MORE.map(control));
  $("sampling-reset").addEventListener("click", () => {
    for (const { name } of [...KNOBS, ...MORE]) setValue(name, "");
    $("stop").value = "";
    $("probabilities").checked = false;
  });
}

function control({ name, label, min, max, step, rest, least = min, most = max }) {
  const number = el("input", {
    type: "number", id: name, min: least, max: most, step: WHOLE.has(name) ? 1 : "any",
    placeholder: "default", inputmode: WHOLE.has(name) ? "numeric" : "decimal",
  });
  const parts = [el("div", { class: "row" }, el("label", { for: name }, label), number)];
  if (max !== undefined) {
    // The slider doubles the number for the mouse; the keyboard and screen readers have the number.
    const slider = el("input", { type: "range", min, max, step, tabindex: "-1", "aria-hidden": "true", "data-for": name, "data-rest": rest });
    slider.classList.add("unset");
    slider.value = rest;
    slider.addEventListener("input", () => setValue(name, slider.value));
    number.addEventListener("input", () => setValue(name, number.value));
    parts.push(slider);
  }
  return el("div", { class: "knob" }, ...parts);
}

function setValue(name, value) {
  const number = $(name);
  if (number.value !== value) number.value = value;
  const slider = document.querySelector(`input[data-for="${name}"]`);
  if (!slider) return;
  slider.classList.toggle("unset", value === "");
  slider.value = value === "" ? slider.dataset.rest : value;
}

// The request's fields, or null when a control holds what the server would refuse; the browser then says which.
export function samplingFields(kind) {
  const fields = {};
  for (const { name } of [...KNOBS, ...MORE]) {
    const input = $(name);
    if (!input.checkValidity()) {
      input.closest("details")?.setAttribute("open", "");
      $("settings").classList.add("open");
      input.reportValidity();
      return null;
    }
    if (input.value !== "") fields[name] = Number(input.value);
  }
  const stop = $("stop").value.split("\n").filter((line) => line);
  if (stop.length) fields.stop = stop;
  if ($("probabilities").checked) {
    Object.assign(fields, kind === "chat" ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES });
  }
  return fields;
}
