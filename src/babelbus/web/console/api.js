// Requests to the server: JSON, JSON lines, and every failure as an ApiError whose message can be shown.

const TIMEOUT_MS = 30_000
const HEADERS = { "X-Babelbus-Console": "1", Accept: "application/json" }

/** A request that failed: `status` is that of HTTP, 0 when the server does not answer; `code` is a word for programs. */
export class ApiError extends Error {
  constructor(status, message, code = "failed") {
    super(message)
    this.name = "ApiError"
    this.status = status
    this.code = code
  }

  /** Whether the server was not reached: the same request may succeed later. */
  get isAway() {
    return this.status === 0 || this.status === 502 || this.status === 504
  }
}

/** Events of all requests: "away" and "back" when the server comes and goes, "unauthorized" when the session is over. */
export const events = new EventTarget()
let isAway = false

/** Return whether the last request found no server. */
export function serverIsAway() {
  return isAway
}

function setAway(now) {
  if (now === isAway) return
  isAway = now
  events.dispatchEvent(new Event(now ? "away" : "back"))
}

/** Return a path with a query; empty values are left out, lists become several values of one name. */
export function address(path, query = {}) {
  const pairs = Object.entries(query).flatMap(([name, value]) => [].concat(value).map((one) => [name, one]))
  const given = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "")
  const text = new URLSearchParams(given.map(([name, value]) => [name, value === true ? "1" : String(value)])).toString()
  return text ? `${path}?${text}` : path
}

/** Return a path from a template: path`/api/topics/${name}` encodes each value. */
export function path(texts, ...values) {
  return texts.reduce((before, text, number) => before + encodeURIComponent(values[number - 1]) + text)
}

/** Send a request; return its response, whose body is still to come, or throw an ApiError. */
export async function send(method, target, { query, body, text, signal, timeout = TIMEOUT_MS, headers } = {}) {
  const timer = timeout ? AbortSignal.timeout(timeout) : null
  const signals = [signal, timer].filter(Boolean)
  let response
  try {
    response = await fetch(address(target, query), {
      method,
      headers: { ...HEADERS, ...(body === undefined && text === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
      body: text ?? (body === undefined ? undefined : JSON.stringify(body)),
      signal: signals.length ? AbortSignal.any(signals) : undefined,
      credentials: "same-origin",
      cache: "no-store",
      redirect: "error",
    })
  } catch (error) {
    if (signal?.aborted) throw error
    setAway(true)
    if (timer?.aborted) throw new ApiError(0, `The server has not answered within ${timeout / 1000} seconds.`, "timeout")
    throw new ApiError(0, "The server does not answer.", "unreachable")
  }
  setAway(false)
  if (response.ok) return response
  throw await failure(response)
}

async function failure(response) {
  let told = {}
  try {
    told = await response.json()
  } catch {
    // A proxy answers in its own words: the status has to do.
  }
  if (response.status === 401) events.dispatchEvent(new Event("unauthorized"))
  const text = typeof told.error === "string" ? told.error : `The server answered ${response.status} ${response.statusText}.`
  const error = new ApiError(response.status, text, told.code)
  return Object.assign(error, { told })
}

async function json(method, target, options) {
  const response = await send(method, target, options)
  return response.status === 204 ? null : response.json()
}

/** Return the JSON at a path. `options`: `signal`, `timeout` in ms (0 for none). */
export const get = (target, query, options) => json("GET", target, { query, ...options })
/** Send a JSON body with POST; return the JSON of the answer. */
export const post = (target, body = {}, options) => json("POST", target, { body, ...options })
/** Send a JSON body with PUT; return the JSON of the answer. The option `text` is sent as it is instead. */
export const put = (target, body = {}, options) => json("PUT", target, { body, ...options })
/** Send a JSON body with PATCH; return the JSON of the answer. */
export const patch = (target, body = {}, options) => json("PATCH", target, { body, ...options })
/** Send DELETE, with a JSON body if there is one; return the JSON of the answer. */
export const del = (target, body, options) => json("DELETE", target, { body, ...options })

/** Call `onLine` with each value of an answer of JSON lines; return when the answer ends. Abort `signal` to stop. */
export async function lines(target, query, onLine, signal, { method = "GET", body } = {}) {
  const response = await send(method, target, { query, body, signal, timeout: 0, headers: { Accept: "application/x-ndjson" } })
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  let parts = []
  try {
    for (;;) {
      const { value, done } = await reader.read()
      if (done) break
      const cut = value.split("\n")
      parts.push(cut[0])
      for (const next of cut.slice(1)) {
        const line = parts.join("")
        parts = [next]
        if (line.trim()) onLine(JSON.parse(line)) // an empty line says that the server lives
      }
    }
  } catch (error) {
    if (signal?.aborted) throw error
    if (error instanceof TypeError) {
      setAway(true)
      throw new ApiError(0, "The answer of the server broke off.", "unreachable")
    }
    throw error
  } finally {
    reader.cancel().catch(() => {}) // it fails only if the answer has ended already
  }
  const last = parts.join("").trim()
  if (last) onLine(JSON.parse(last))
}
