// JSON that can be folded. Long texts and lists are cut, and say so.

import { html, useState } from "../vendor/preact-htm.js"
import { numText } from "./format.js"

const ITEMS = 100
const TEXT = 2_000
const OPEN_DEPTH = 2
const DEPTH_MAX = 200

/** A JSON value that can be folded; deep parts are closed at first. */
export const Json = ({ value, open = OPEN_DEPTH }) => html`<div class="json"><${Value} value=${value} depth=${0} open=${open} /></div>`

function Value({ value, depth, open }) {
  if (value === null) return html`<span class="json-word">null</span>`
  if (typeof value === "string") return html`<${Text} value=${value} />`
  if (typeof value !== "object") return html`<span class=${typeof value === "number" ? "json-number" : "json-word"}>${String(value)}</span>`
  return html`<${Folded} value=${value} depth=${depth} open=${open} />`
}

function Text({ value }) {
  const [all, setAll] = useState(false)
  const cut = !all && value.length > TEXT
  return html`<span class="json-text">"${cut ? value.slice(0, TEXT) : value}"</span>
    ${cut && html` <button type="button" class="linklike" onClick=${() => setAll(true)}>and ${numText(value.length - TEXT)} more characters</button>`}`
}

function Folded({ value, depth, open }) {
  const isList = Array.isArray(value)
  const size = isList ? value.length : Object.keys(value).length
  const [isOpen, setOpen] = useState(depth < open && size <= ITEMS)
  const [count, setCount] = useState(ITEMS)
  const [before, after] = isList ? ["[", "]"] : ["{", "}"]
  if (size === 0) return html`<span>${before}${after}</span>`
  if (depth >= DEPTH_MAX) return html`<span class="muted">${before} deeper than ${DEPTH_MAX} levels ${after}</span>`
  const toggle = html`<button type="button" class="fold" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
    ${before}${!isOpen && html`<span class="muted"> ${numText(size)} ${isList ? "item" : "field"}${size > 1 && "s"} </span>${after}`}</button>`
  if (!isOpen) return toggle
  const entries = isList ? value.slice(0, count).map((one, number) => [number, one]) : Object.entries(value).slice(0, count)
  return html`<span>${toggle}<ul>
    ${entries.map(([name, one]) => html`<li key=${name}>${!isList && html`<span class="json-name">${name}</span>: `}
      <${Value} value=${one} depth=${depth + 1} open=${open} /></li>`)}
    ${size > count && html`<li><button type="button" class="linklike" onClick=${() => setCount(count * 10)}>
      and ${numText(size - count)} more</button></li>`}
  </ul>${after}</span>`
}
