// Requests to the server: JSON, and server-sent events. Errors become ApiErrors with one line for the user.

const KEY = "nanoinfer.api_key";

export class ApiError extends Error {
  /** param: the field that the error is about, or null. status: of the response; 0 without one. */
  constructor(message, { param = null, status = 0 } = {}) {
    super(message);
    this.param = param;
    this.status = status;
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value.replace(/[^!-~]/g, "")), // fetch refuses others in a header
};

/** Return the response to a GET, or to a POST if there is a body. Raises ApiError for a status that is not 2xx. */
export async function request(path, body, signal) {
  const headers = apiKey.get() ? { Authorization: `Bearer ${apiKey.get()}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached: check that it runs, then try again.");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  const { status } = response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch { /* not the server's own answer, for example that of a proxy */ }
  let message = error.message ?? `The server answered with status ${status}.`;
  const wait = response.headers.get("Retry-After");
  if (status === 429 && wait) message += ` Try again in ${wait} s.`;
  return new ApiError(message, { param: error.param ?? null, status });
}

/** Yield the JSON of each event of a stream until [DONE]. Raises ApiError for an error event or a lost connection. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      part = { done: true };
    }
    if (part.done) throw new ApiError("The connection to the server was lost: the answer is not complete.");
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // the blank line after an event, or a comment
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, { param: event.error.param ?? null });
      yield event;
    }
  }
}
