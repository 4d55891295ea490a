// Puts the page together: tabs, model picker, API key, and the keys that work everywhere.

import { stopAnswer } from "./answer.js";
import { get, useKey } from "./api.js";
import { startChat } from "./chat.js";
import { startCompletion } from "./completion.js";
import { $, el } from "./dom.js";
import { pollNow, startEngine } from "./engine.js";
import { buildControls } from "./sampling.js";

const KEY = "octavo-key"; // kept for this tab only
const VIEWS = ["chat", "completion", "engine"];
const AGAIN = 3000;

let loading = 0;

function select(name, focus = false) {
  for (const view of VIEWS) {
    const chosen = view === name;
    $(`tab-${view}`).setAttribute("aria-selected", chosen);
    $(`tab-${view}`).tabIndex = chosen ? 0 : -1;
    $(`view-${view}`).hidden = !chosen;
    if (chosen && focus) $(`tab-${view}`).focus();
  }
  $("work").hidden = name === "engine";
  $("system-part").hidden = name !== "chat";
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
}

function startTabs() {
  for (const [i, view] of VIEWS.entries()) {
    const tab = $(`tab-${view}`);
    tab.addEventListener("click", () => select(view));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) select(VIEWS[(i + step + VIEWS.length) % VIEWS.length], true);
    });
  }
  const asked = location.hash.slice(1);
  select(VIEWS.includes(asked) ? asked : "chat");
}

async function loadModels() {
  clearTimeout(loading);
  const picker = $("model");
  try {
    const { data } = await get("v1/models");
    const before = picker.value;
    picker.replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
    if (data.some(({ id }) => id === before)) picker.value = before;
    picker.disabled = false;
  } catch (error) {
    picker.replaceChildren(el("option", { value: "" }, error.status === 401 ? "API key needed" : "No model yet"));
    picker.disabled = true;
    if (error.status !== 401) loading = setTimeout(loadModels, AGAIN); // it is starting, or it comes back
  }
}

function startKey() {
  const input = $("key");
  input.value = sessionStorage.getItem(KEY) ?? "";
  useKey(input.value);
  input.addEventListener("change", () => {
    sessionStorage.setItem(KEY, input.value);
    useKey(input.value);
    loadModels();
    pollNow();
  });
}

function startSettings() {
  const panel = $("settings");
  for (const button of document.querySelectorAll("[data-opens-settings]")) {
    button.addEventListener("click", () => {
      const open = panel.classList.toggle("open");
      button.setAttribute("aria-expanded", open);
      if (open) panel.querySelector("textarea, input")?.focus();
    });
  }
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopAnswer();
});

const model = () => $("model").value;
startKey();
startTabs();
buildControls();
startSettings();
startChat(model);
startCompletion(model);
startEngine();
loadModels();
$("message").focus({ preventScroll: true });
