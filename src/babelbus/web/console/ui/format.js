// Numbers, bytes, times and durations as text. Digits have one width, so that columns do not jump.

import { html } from "../vendor/preact-htm.js"
import { pref, usePref } from "./prefs.js"

const NONE = "–"
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 })
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 })
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]

const isNumber = (value) => typeof value === "number" && Number.isFinite(value)

/** Return a number with groups of three digits; small fractions keep three digits. */
export function numText(value) {
  if (!isNumber(value)) return NONE
  return Number.isInteger(value) || Math.abs(value) >= 1000 ? whole.format(value) : short.format(value)
}

/** Return a size such as "1.2 MiB". */
export function bytesText(value) {
  if (!isNumber(value)) return NONE
  let unit = 0
  let size = Math.abs(value)
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024
    unit += 1
  }
  const digits = unit === 0 || size >= 100 ? 0 : size >= 10 ? 1 : 2
  return `${value < 0 ? "-" : ""}${size.toFixed(digits)} ${UNITS[unit]}`
}

/** Return a duration in ms, such as "3 h 12 min", with two units at most. */
export function durationText(ms) {
  if (!isNumber(ms)) return NONE
  if (ms < 0) return `-${durationText(-ms)}`
  if (ms < 1000) return `${ms < 10 ? short.format(ms) : Math.round(ms)} ms`
  const seconds = Math.round(ms / 1000)
  if (ms < 10_000) return `${(ms / 1000).toFixed(1)} s`
  if (seconds < 60) return `${seconds} s`
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]
  const first = parts.findIndex(([size]) => seconds >= size)
  const [size, unit] = parts[first]
  const [next, nextUnit] = parts[first + 1] ?? [1, "s"]
  const rest = Math.floor((seconds % size) / next)
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${nextUnit}` : ""}`
}

/** Return a moment in ms as date and time, in the zone of the user or in UTC; `precise` adds the milliseconds. */
export function timeText(ms, { zone = pref("zone"), precise = false, clock = false } = {}) {
  if (!isNumber(ms) || Math.abs(ms) > 8.64e15) return NONE
  const moment = new Date(ms)
  const shifted = zone === "utc" ? moment : new Date(ms - moment.getTimezoneOffset() * 60_000)
  const iso = shifted.toISOString() // years beyond 9999 keep their sign
  const [date, time] = iso.split("T")
  const hours = time.slice(0, precise ? 12 : 8)
  return `${clock ? "" : `${date} `}${hours}${zone === "utc" ? "Z" : ""}`
}

/** Return a moment in the form of an input of the type datetime-local, in the user's zone or UTC. */
export const localText = (ms, zone) => timeText(ms, { zone }).replace(" ", "T").replace("Z", "")

/** A number in digits of one width. */
export const Num = ({ value, title }) => html`<span class="num" title=${title}>${numText(value)}</span>`
/** A size in bytes; the exact count is its title. */
export const Bytes = ({ value }) =>
  html`<span class="num" title=${isNumber(value) ? `${whole.format(value)} bytes` : undefined}>${bytesText(value)}</span>`
/** A rate per second; `bytes` makes it bytes per second. */
export const Rate = ({ value, bytes = false }) =>
  html`<span class="num">${isNumber(value) ? `${bytes ? bytesText(value) : numText(value)}/s` : NONE}</span>`
/** A duration in ms. */
export const Duration = ({ ms }) => html`<span class="num">${durationText(ms)}</span>`

/** A moment in ms; it follows the choice between the user's zone and UTC. `ago` shows how long it was. */
export function Time({ ms, precise = false, ago = false }) {
  usePref("zone") // draw again when it changes
  if (!isNumber(ms) || Math.abs(ms) > 8.64e15) return html`<span class="num">${NONE}</span>`
  const text = timeText(ms, { precise })
  const past = Date.now() - ms
  const relative = past >= 0 ? `${durationText(past)} ago` : `in ${durationText(-past)}`
  return html`<time class="num" dateTime=${new Date(ms).toISOString()} title=${ago ? text : relative}>
    ${ago ? relative : text}</time>`
}
