// Values of the state: text or folded JSON, what differs between two values, and moments that a user chooses.

import { html, useMemo, useState } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import { Badge, Button, Bytes, Json, Notice, Tabs, bytesText, copyText, numText, toast } from "../ui.js"

const LINES_MAX = 1_500
/** Wörterbuch's clients have such ids. */
export const IS_ID = /^[0-9a-f]{8}-[0-9a-f-]{27}$/
const SHOWN_MAX = 2 ** 20
const WHOLE_BYTES_MAX = 64 * 2 ** 20
const STEPS = 1_000
/** A number that JavaScript would round. */
const LONG_NUMBER = /(^|[[,:\s])-?\d[\d.]{15,}/

/** Return a path with a query that keeps empty texts: a key may be empty. */
export function stateAddress(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null)
  return `${path}?${new URLSearchParams(given.map(([name, value]) => [name, value === true ? "1" : String(value)]))}`
}

/** Return the JSON of a request about a key. */
export const ask = (path, query, options) => get(stateAddress(path, query), undefined, options)

/** Return the parsed value of a view, or undefined if the text is cut off or no JSON. */
export function parsed(view) {
  if (!view || view.clipped) return undefined
  try {
    return JSON.parse(view.text)
  } catch {
    return undefined
  }
}

/** Return a JSON text with one line for each part; a text that is cut off stays as it is. */
export function pretty(view) {
  if (!view) return ""
  const value = LONG_NUMBER.test(view.text) ? undefined : parsed(view)
  return value === undefined ? view.text : JSON.stringify(value, null, 2)
}

/** A value in one line of a table. */
export function Preview({ view, none = "no value" }) {
  if (!view) return html`<span class="muted">${none}</span>`
  return html`<span class="state-preview">${view.text}${view.clipped && " …"}</span>`
}

/** The protocol and the name of who made a change; a source is PROTOCOL:NAME. */
export function Source({ source }) {
  if (!source) return html`<span class="muted">unknown</span>`
  const [protocol, ...rest] = source.split(":")
  const name = rest.join(":")
  const isId = IS_ID.test(name)
  return html`<${Badge}>${protocol}</${Badge}> ${name && html`<bdi class=${isId ? "mono" : undefined} title=${isId ? name : undefined}>${isId ? name.slice(0, 8) : name}</bdi>`}`
}

async function download(key, query) {
  const entry = await ask("/api/state/entry", { key, bytes_max: WHOLE_BYTES_MAX, ...query }, { timeout: 120_000 })
  const address = URL.createObjectURL(new Blob([entry.value.text], { type: "application/octet-stream" }))
  const anchor = document.createElement("a")
  anchor.href = address
  anchor.download = `${key.split("/").pop().replace(/[^\w.-]+/g, "_") || "value"}.json`
  anchor.click()
  setTimeout(() => URL.revokeObjectURL(address), 60_000)
  toast(`${bytesText(entry.value.bytes)} are stored as ${anchor.download}.`)
}

/** The value of a key: folded JSON or the text itself. `onMore(bytes)` loads more of a value that is cut off. */
export function Value({ name, view, query = {}, onMore }) {
  const value = useMemo(() => parsed(view), [view])
  const isRounded = value !== undefined && LONG_NUMBER.test(view.text)
  const [choice, setChoice] = useState(null)
  const shown = value === undefined ? "text" : (choice ?? (isRounded ? "text" : "json"))
  const text = shown === "text" && value !== undefined ? pretty(view) : view.text
  return html`<div class="state-value">
    <div class="toolbar">
      ${value !== undefined && html`<${Tabs} label="Form of the value" value=${shown} onChange=${setChoice}
        tabs=${[{ name: "json", title: "Folded" }, { name: "text", title: "Text" }]} />`}
      <span class="push"></span>
      <${Button} small icon="copy" onClick=${() => copyText(view.text, view.clipped ? "The part that is shown" : "The value")}>Copy</${Button}>
      <${Button} small icon="download" onClick=${() => download(name, query)}>Download</${Button}>
    </div>
    ${view.clipped && html`<${Notice} kind="info" actions=${onMore && view.text.length < SHOWN_MAX && html`<${Button} small onClick=${() => onMore(view.text.length * 16)}>Show more</${Button}>`}>
      The first ${bytesText(new Blob([view.text]).size)} of ${bytesText(view.bytes)} are shown.${onMore && view.text.length >= SHOWN_MAX ? " Download the value to see all of it." : ""}</${Notice}>`}
    ${shown === "json" && isRounded && html`<p class="muted">Numbers with many digits are rounded here. The text has all digits.</p>`}
    ${shown === "json" ? html`<${Json} value=${value} />` : html`<pre class="state-text" tabIndex="0" aria-label="Text of the value">${text}</pre>`}
  </div>`
}

/** Return the lines of two texts as {sign, text}: " " in both, "-" only in the first, "+" only in the second. */
export function differingLines(before, after) {
  const [old, now] = [before.split("\n"), after.split("\n")]
  let start = 0
  while (start < old.length && start < now.length && old[start] === now[start]) start += 1
  let end = 0
  while (end < old.length - start && end < now.length - start && old[old.length - 1 - end] === now[now.length - 1 - end]) end += 1
  const [left, right] = [old.slice(start, old.length - end), now.slice(start, now.length - end)]
  const same = (texts) => texts.map((text) => ({ sign: " ", text }))
  const middle = left.length > LINES_MAX || right.length > LINES_MAX
    ? [...left.map((text) => ({ sign: "-", text })), ...right.map((text) => ({ sign: "+", text }))]
    : longestCommon(left, right)
  return [...same(old.slice(0, start)), ...middle, ...same(old.slice(old.length - end))]
}

function longestCommon(left, right) {
  const width = right.length + 1
  const lengths = new Uint16Array((left.length + 1) * width)
  for (let one = left.length - 1; one >= 0; one -= 1) {
    for (let other = right.length - 1; other >= 0; other -= 1) {
      lengths[one * width + other] = left[one] === right[other]
        ? lengths[(one + 1) * width + other + 1] + 1
        : Math.max(lengths[(one + 1) * width + other], lengths[one * width + other + 1])
    }
  }
  const lines = []
  let [one, other] = [0, 0]
  while (one < left.length || other < right.length) {
    if (one < left.length && other < right.length && left[one] === right[other]) {
      lines.push({ sign: " ", text: left[one] })
      one += 1
      other += 1
    } else if (other >= right.length || (one < left.length && lengths[(one + 1) * width + other] >= lengths[one * width + other + 1])) {
      lines.push({ sign: "-", text: left[one] })
      one += 1
    } else {
      lines.push({ sign: "+", text: right[other] })
      other += 1
    }
  }
  return lines
}

const SAID = { " ": "", "-": "only before: ", "+": "only after: " }
const KINDS = { " ": "", "-": "gone", "+": "new" }

/** Two values, line by line; `null` is no value. */
export function ValueDiff({ before, after, titles = ["before", "after"] }) {
  const lines = useMemo(() => differingLines(pretty(before), pretty(after)), [before, after])
  const cut = before?.clipped || after?.clipped
  const [gone, fresh] = ["-", "+"].map((sign) => lines.filter((line) => line.sign === sign).length)
  return html`<div>
    <p class="muted">${titles[0]}: ${before ? html`<${Bytes} value=${before.bytes} />` : "no value"}, ${titles[1]}: ${after ? html`<${Bytes} value=${after.bytes} />` : "no value"}.
      ${gone + fresh === 0 ? " The values are equal." : ` ${numText(gone)} lines are only in the first (−), ${numText(fresh)} only in the second (+).`}
      ${cut && " Only the beginning of a long value is compared."}</p>
    <pre class="state-diff" tabIndex="0" aria-label="Differing lines">${lines.map((line, number) => html`<div key=${number} class=${KINDS[line.sign]}>
      <span aria-hidden="true">${line.sign === "-" ? "−" : line.sign}</span><span class="hidden">${SAID[line.sign]}</span>${line.text || " "}</div>`)}</pre>
  </div>`
}

/** Return the moment of a text of the type datetime-local in ms, null if it is none; its end, when it has no fraction. */
export function momentOf(text, zone) {
  const ms = Date.parse(zone === "utc" ? `${text}Z` : text)
  return Number.isNaN(ms) ? null : ms + (text.includes(".") ? 0 : 999)
}

/** Return the position of a moment on a slider between two ends, and the other way round. */
export const stepOf = (ms, first, last) => Math.round(((ms - first) / Math.max(1, last - first)) * STEPS)
/** Return the moment of a position on a slider. */
export const momentAt = (step, first, last) => Math.round(first + (step / STEPS) * (last - first))
/** The highest position of a slider. */
export const SLIDER_STEPS = STEPS
