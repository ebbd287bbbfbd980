// Files that the browser saves.

import { send } from "../../api.js"

function nameOf(response) {
  return /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1] ?? "records"
}

/** Let the browser save the answer of a request; `onBytes` hears how much has come. */
export async function download(target, query = {}, onBytes = () => {}, signal = undefined) {
  const response = await send("GET", target, { query, signal, timeout: 0 })
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
