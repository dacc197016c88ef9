// Talking to the server. Paths are relative to the page, wherever a proxy publishes it.

const STORED = "seqserve.key";

/** What the server refused or failed at, in its own words. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, requestId = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.requestId = requestId;
    this.retryAfter = retryAfter;
  }
}

/** The API key of this tab; empty without one. */
export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => sessionStorage.setItem(STORED, value),
};

/** The JSON that a path has. */
export async function get(path) {
  return (await ask(path)).json();
}

/** The text that a path has. */
export async function text(path) {
  return (await ask(path)).text();
}

/** The JSON answer to a body. */
export async function post(path, body, signal) {
  return (await ask(path, body, signal)).json();
}

/** The answer to a body as bytes. */
export async function bytes(path, body, signal) {
  return (await ask(path, body, signal)).arrayBuffer();
}

/**
 * The events of a stream, as they come.
 *
 * An error in the middle is thrown like one at the beginning.
 */
export async function* stream(path, body, signal) {
  const response = await ask(path, body, signal);
  for await (const data of messages(response.body)) {
    const event = JSON.parse(data);
    if (event.error !== undefined) throw refusal(event, response);
    yield event;
  }
}

async function ask(path, body, signal) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  const options = body === undefined
    ? { headers, signal }
    : { method: "POST", headers, body: JSON.stringify(body), signal };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw refusal(await envelope(response), response);
  return response;
}

async function envelope(response) {
  try {
    return await response.json();
  } catch {
    return {}; // not this server's: a proxy's page
  }
}

function refusal(content, response) {
  return new ApiError(content.error ?? `The server answered with status ${response.status}.`, {
    status: response.status,
    param: content.param ?? null,
    requestId: content.request_id ?? response.headers.get("x-request-id"),
    retryAfter: response.headers.get("retry-after"),
  });
}

function brokenOff(error) {
  throw error.name === "AbortError" ? error : new ApiError("The connection broke off.");
}

/** The data of server-sent events, which come in pieces of any length. */
async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(brokenOff);
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data:")) yield part.slice("data:".length).trim();
      }
    }
  } finally {
    await reader.cancel(); // whoever stops listening ends the generation
  }
}
