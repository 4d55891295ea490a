// The server's HTTP API: JSON, streams of server-sent events, and errors as a person reads them.

let key = "";

export function useKey(value) {
  key = value.trim();
}

export class ServerError extends Error {
  constructor(message, status = 0, param = "") {
    super(message);
    this.status = status;
    this.param = param;
  }
}

// Addresses are relative to the page, so that it works behind a proxy's path.
async function call(path, body, signal) {
  const headers = {};
  if (key) headers["authorization"] = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await readable(response);
  return response;
}

async function readable(response) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // no JSON: a proxy's page, say
  }
  const { status } = response;
  if (status === 401) return new ServerError("This server needs an API key. Put it into the field “API key”, at the top.", status);
  let message = told.message || `The server answered with status ${status}.`;
  if (status === 503 && response.headers.get("retry-after")) {
    message += ` Try again in ${response.headers.get("retry-after")} s.`;
  }
  return new ServerError(message, status, told.param || "");
}

export async function get(path, signal) {
  return (await call(path, null, signal)).json();
}

// Each event of a streamed answer, parsed. A server that says nothing about its end has broken off.
export async function* stream(path, body, signal) {
  const response = await call(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (waiting + value).split(/\r\n|\n/);
      waiting = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message || "The server ended the answer with an error.");
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError("The connection broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ServerError("The connection ended before the answer did.");
}
