// Files that the browser saves, and requests whose answer is JSON lines.

import { ApiError, address } from "../../api.js"

const HEADERS = { "X-Babelbus-Console": "1" }

async function send(target, options = {}) {
  let response
  try {
    response = await fetch(target, { ...options, headers: { ...HEADERS, ...options.headers }, credentials: "same-origin", cache: "no-store", redirect: "error" })
  } catch {
    throw new ApiError(0, "The server does not answer.", "unreachable")
  }
  if (response.ok) return response
  const told = await response.json().catch(() => ({}))
  throw new ApiError(response.status, told.error ?? `The server answered ${response.status}.`, told.code)
}

function nameOf(response) {
  return /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1] ?? "records"
}

/** Let the browser save the answer of a request; `onBytes` hears how much has come. */
export async function download(target, query = {}, onBytes = () => {}, signal = undefined) {
  const response = await send(address(target, query), { signal })
  const reader = response.body.getReader()
  const parts = []
  let size = 0
  for (;;) {
    const { value, done } = await reader.read()
    if (done) break
    parts.push(value)
    size += value.length
    onBytes(size)
  }
  const url = URL.createObjectURL(new Blob(parts, { type: "application/octet-stream" }))
  const anchor = document.createElement("a")
  anchor.href = url
  anchor.download = nameOf(response)
  anchor.click()
  setTimeout(() => URL.revokeObjectURL(url), 60_000)
  return size
}

/** Send a JSON body; call `onLine` with each line of the answer. */
export async function postLines(target, body, onLine, signal) {
  const response = await send(target, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal })
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""
  for (;;) {
    const { value, done } = await reader.read()
    if (done) break
    const cut = (rest + value).split("\n")
    rest = cut.pop()
    for (const line of cut) if (line.trim()) onLine(JSON.parse(line))
  }
  if (rest.trim()) onLine(JSON.parse(rest))
}
