// Parts of a record as text: keys, origins, previews, bytes in hex.

const PREVIEW = 240
const HEX_BYTES = 4096
const SHORT = 22

/** Return the bytes of a base64 text. */
export function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0))
}

/** Return the bytes of a payload, as far as the server has sent them. */
export function payloadBytes(record) {
  return record.payload_b64 !== undefined ? bytesOf(record.payload_b64) : new TextEncoder().encode(record.payload ?? "")
}

/** Return the key as text; one that is no UTF-8 as hex. */
export function keyText(record) {
  if (record.key !== undefined) return record.key_bytes ? `${record.key}…` : record.key
  if (record.key_b64 !== undefined) return hexText(bytesOf(record.key_b64).slice(0, 32))
  return "–"
}

const hexText = (bytes) => Array.from(bytes, (one) => one.toString(16).padStart(2, "0")).join(" ")

/** Return a text that fits into a column. */
export function short(text) {
  const line = text.slice(0, SHORT + 1).replace(/[\r\n\t]/g, "␣")
  return line.length > SHORT ? `${line.slice(0, SHORT - 1)}…` : line
}

/** Return who published a record, as the record says. */
export function originText(origin) {
  if (!origin.protocol) return "–"
  return origin.principal ? `${origin.protocol}: ${origin.principal}` : origin.protocol
}

/** Return the beginning of a payload in one line, and a note if it is shortened or no text. */
export function previewOf(record) {
  if (record.payload_b64 !== undefined) return { text: hexText(bytesOf(record.payload_b64).slice(0, 32)), note: "bytes" }
  const line = (record.payload ?? "").slice(0, PREVIEW * 2).replace(/\s+/g, " ")
  const text = line.length > PREVIEW ? `${line.slice(0, PREVIEW)}…` : line
  return { text, note: record.payload === "" ? "empty" : record.clipped ? "shortened" : "" }
}

/** Return lines of hex with the letters beside them, and how many bytes they show. */
export function hexDump(bytes) {
  const shown = bytes.slice(0, HEX_BYTES)
  const lines = []
  for (let at = 0; at < shown.length; at += 16) {
    const row = shown.slice(at, at + 16)
    const letters = Array.from(row, (one) => (one >= 32 && one < 127 ? String.fromCharCode(one) : ".")).join("")
    lines.push(`${at.toString(16).padStart(6, "0")}  ${hexText(row).padEnd(47)}  ${letters}`)
  }
  return { text: lines.join("\n"), count: shown.length }
}

/** Return the JSON value of a text, `undefined` if it is none. */
export function jsonOf(text) {
  if (typeof text !== "string" || !/^\s*[[{"\-\dtfn]/.test(text)) return undefined
  try {
    return JSON.parse(text)
  } catch {
    return undefined
  }
}
