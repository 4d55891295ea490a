// The completion playground: a prompt, and what the model makes of it.

import { answer, answering, stopAnswer } from "./answer.js";
import { $ } from "./dom.js";
import { samplingFields } from "./sampling.js";

export function startCompletion(model) {
  let last = "";
  $("completion-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const prompt = $("prompt").value;
    const fields = samplingFields("completion");
    if (!prompt || fields === null || answering() || !model()) return;
    const output = $("output");
    output.replaceChildren();
    busy(true);
    const done = await answer({
      path: "v1/completions",
      body: { model: model(), prompt, max_tokens: 256, ...fields },
      place: output,
      read: ({ text }) => ({ content: text }),
      onChange: (change) => change(),
    });
    last = done.text;
    busy(false);
    $("completion-append").disabled = !last;
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      $("completion-form").requestSubmit();
    }
  });
  $("completion-stop").addEventListener("click", stopAnswer);
  $("completion-append").addEventListener("click", () => {
    $("prompt").value += last;
    $("completion-append").disabled = true;
    $("prompt").focus();
  });
}

function busy(now) {
  $("completion-stop").hidden = !now;
  $("completion-send").hidden = now;
}
