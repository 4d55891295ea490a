// The form of an answer: tools that may be called, and a JSON schema that it follows.

import { $ } from "./dom.js";

// The request's fields, or null when a box holds no JSON of its kind; the browser then says which.
export function formFields() {
  const tools = read("tools", (value) => Array.isArray(value), "This must be a list of tools, in JSON.");
  const schema = read("schema", (value) => value !== null && typeof value === "object" && !Array.isArray(value), "This must be a JSON schema, an object.");
  if (tools === null || schema === null) return null;
  const fields = {};
  if (tools?.length) Object.assign(fields, { tools, tool_choice: $("tool-choice").value });
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  return fields;
}

function read(id, fits, otherwise) {
  const box = $(id);
  let value;
  box.setCustomValidity("");
  if (!box.value.trim()) return undefined;
  try {
    value = JSON.parse(box.value);
  } catch {
    value = null;
  }
  if (value !== null && fits(value)) return value;
  box.setCustomValidity(otherwise);
  box.closest("details").open = true;
  $("settings").classList.add("open");
  box.reportValidity();
  box.addEventListener("input", () => box.setCustomValidity(""), { once: true });
  return null;
}
