// Small parts: buttons, notices, badges, panels, headings, tabs.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js"
import { ApiError } from "../api.js"

/** Return names of classes, without those that do not hold. */
export const words = (...names) => names.filter(Boolean).join(" ")
let number = 0

/** Return an id that no other element of the page has. */
export function useId(prefix = "x") {
  const id = useRef(null)
  id.current ??= `${prefix}${(number += 1)}`
  return id.current
}

/** One of our drawings; it says nothing by itself, so a text or a label stands beside it. */
export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true" focusable="false">
  <path d=${ICONS[name] ?? ""} /></svg>`

/** Return what a failure says to a user. */
export function messageOf(error) {
  const text = error instanceof ApiError || error instanceof Error ? error.message : String(error)
  return text.charAt(0).toUpperCase() + text.slice(1)
}

const toasts = new EventTarget()

/** Show a sentence for some seconds, and say it to screen readers; `kind`: good, error, info. */
export function toast(text, kind = "good") {
  toasts.dispatchEvent(new CustomEvent("toast", { detail: { text, kind } }))
}

const TOAST_MS = { good: 5_000, info: 5_000, error: 12_000 }

/** The place of the toasts; the shell has one. */
export function Toasts() {
  const [shown, setShown] = useState([])
  const remove = (id) => setShown((old) => old.filter((one) => one.id !== id))
  useEffect(() => {
    let count = 0
    const add = ({ detail }) => {
      const id = (count += 1)
      setShown((old) => [...old.slice(-3), { id, ...detail }])
      setTimeout(() => remove(id), TOAST_MS[detail.kind] ?? 5_000)
    }
    toasts.addEventListener("toast", add)
    return () => toasts.removeEventListener("toast", add)
  }, [])
  return html`<div class="toasts" role="status" aria-live="polite">
    ${shown.map((one) => html`<div key=${one.id} class=${words("toast", one.kind)}>
      <span>${one.text}</span>
      <button type="button" class="icon-button" aria-label="Close the message" onClick=${() => remove(one.id)}>
        <${Icon} name="close" /></button>
    </div>`)}
  </div>`
}

/** A button. While the promise of `onClick` runs it is busy; its failure is shown. `kind`: plain, primary, danger, quiet. */
export function Button({ kind = "plain", icon, small, busy, disabled, onClick, children, type = "button", ...rest }) {
  const [waiting, setWaiting] = useState(false)
  const gone = useRef(false)
  useEffect(() => () => {
    gone.current = true
  }, [])
  const click = async (event) => {
    if (waiting || busy) return
    const result = onClick?.(event)
    if (!(result instanceof Promise)) return
    setWaiting(true)
    try {
      await result
    } catch (error) {
      toast(messageOf(error), "error")
    } finally {
      if (!gone.current) setWaiting(false)
    }
  }
  const isBusy = busy || waiting
  return html`<button type=${type} class=${words("button", kind, small && "small", isBusy && "busy")}
    disabled=${disabled} aria-busy=${isBusy || undefined} onClick=${click} ...${rest}>
    ${icon && html`<${Icon} name=${icon} />`}${children}</button>`
}

/** A sentence that matters; `kind`: info, good, warning, error. An error is said at once. */
export function Notice({ kind = "info", title, children, actions }) {
  return html`<div class=${words("notice", kind)} role=${kind === "error" ? "alert" : "status"}>
    <${Icon} name=${kind === "good" ? "check" : kind === "info" ? "info" : "warning"} />
    <div>${title && html`<strong>${title}</strong>`}<div class="notice-text">${children}</div></div>
    ${actions && html`<div class="notice-actions">${actions}</div>`}
  </div>`
}

/** Why something cannot be shown: the sentence fits a missing right, a server that is away, or another failure. */
export function Failure({ error, reload, what = "This" }) {
  if (!error) return null
  const again = reload && html`<${Button} small onClick=${() => reload()}>Try again</${Button}>`
  if (error.status === 403) {
    return html`<${Notice} kind="warning" title="You may not see this.">${messageOf(error)}</${Notice}>`
  }
  if (error.isAway) {
    return html`<${Notice} kind="warning" title="The server does not answer." actions=${again}>
      ${what} is shown as soon as it is back.</${Notice}>`
  }
  return html`<${Notice} kind="error" title="${what} could not be loaded."
    actions=${again}>${messageOf(error)}</${Notice}>`
}

/** The state of a poll: busy, failed, or what `children(data)` draws; old data stays below a notice. */
export function Loaded({ poll, what = "This", children }) {
  const { data, error, reload } = poll
  if (data === undefined) {
    return error ? html`<${Failure} error=${error} reload=${reload} what=${what} />` : html`<${Busy} />`
  }
  const gone = error && !error.isAway // the shell itself says that the server is away
  return html`${gone && html`<${Failure} error=${error} reload=${reload} what=${what} />`}${children(data)}`
}

/** A sentence where there is nothing, and what one can do about it. */
export const Empty = ({ title = "Nothing here yet.", children, actions }) => html`<div class="empty">
  <strong>${title}</strong>${children && html`<p>${children}</p>`}${actions && html`<div class="actions">${actions}</div>`}</div>`

/** A sign that something is being loaded. */
export const Busy = ({ children = "Loading …" }) => html`<div class="busy-box" role="status"><span class="spinner" />${children}</div>`

/** A word in a coloured box; `kind`: plain, good, warning, error, info. */
export const Badge = ({ kind = "plain", children, title }) => html`<span class=${words("badge", kind)} title=${title}>${children}</span>`

/** The head of a page: `crumbs` is a list of [text, address], `actions` are buttons. */
export function Heading({ title, crumbs = [], badge, actions, children }) {
  return html`<header class="heading">
    ${crumbs.length > 0 && html`<nav class="crumbs" aria-label="Breadcrumb">
      ${crumbs.map(([text, address]) => html`<a key=${address} href=${address}>${text}</a>`)}</nav>`}
    <div class="heading-row"><h1 tabIndex="-1">${title}</h1>${badge}<div class="actions">${actions}</div></div>
    ${children && html`<p class="lead">${children}</p>`}
  </header>`
}

/** A part of a page with a heading of its own. */
export function Panel({ title, actions, children, class: name, level = 2 }) {
  const id = useId("panel")
  return html`<section class=${words("panel", name)} aria-labelledby=${title ? id : undefined}>
    ${(title || actions) && html`<div class="panel-head">
      ${title && html`<${level === 3 ? "h3" : "h2"} id=${id}>${title}</>`}<div class="actions">${actions}</div></div>`}
    ${children}
  </section>`
}

/** A figure with its name; `note` stands below in small. */
export const Stat = ({ label, children, note, kind }) => html`<div class=${words("stat", kind)}>
  <dt>${label}</dt><dd>${children}${note && html`<small>${note}</small>`}</dd></div>`

/** Tabs: `tabs` is a list of {name, title, count}; the page draws what belongs to `value`. Arrow keys move. */
export function Tabs({ tabs, value, onChange, label = "Views" }) {
  const list = useRef(null)
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key]
    if (step === undefined) return
    event.preventDefault()
    const now = tabs.findIndex((one) => one.name === value)
    const next = Number.isFinite(step) ? (now + step + tabs.length) % tabs.length : step < 0 ? 0 : tabs.length - 1
    onChange(tabs[next].name)
    list.current.querySelectorAll("[role=tab]")[next].focus()
  }
  return html`<div class="tabs" role="tablist" aria-label=${label} ref=${list} onKeyDown=${move}>
    ${tabs.map((one) => html`<button key=${one.name} type="button" role="tab" aria-selected=${one.name === value}
      tabIndex=${one.name === value ? 0 : -1} onClick=${() => onChange(one.name)}>
      ${one.title}${one.count !== undefined && html`<span class="count">${one.count}</span>`}</button>`)}
  </div>`
}

const SEARCH_MS = 250

/** A search field: "/" focuses it, and `onSearch` is called when the typing pauses. */
export function Search({ value = "", onSearch, label = "Search", placeholder = label, wide = false }) {
  const [text, setText] = useState(value)
  const timer = useRef(0)
  const sent = useRef(value)
  useEffect(() => {
    if (value !== sent.current) setText(value) // changed by something else, such as the back button
    sent.current = value
  }, [value])
  useEffect(() => () => clearTimeout(timer.current), [])
  const send = (next) => {
    clearTimeout(timer.current)
    sent.current = next
    onSearch(next)
  }
  const type = (event) => {
    const next = event.currentTarget.value
    setText(next)
    clearTimeout(timer.current)
    timer.current = setTimeout(() => send(next), SEARCH_MS)
  }
  return html`<label class=${words("search", wide && "wide")}><span class="hidden">${label}</span>
    <${Icon} name="search" />
    <input type="search" data-search placeholder=${placeholder} value=${text} onInput=${type} spellcheck=${false}
      autocomplete="off" onKeyDown=${(event) => event.key === "Enter" && send(event.currentTarget.value)} /></label>`
}

/** Copy a text, and say that it was copied. */
export async function copyText(text, what = "The text") {
  try {
    await navigator.clipboard.writeText(text)
  } catch {
    // Without TLS a browser offers no clipboard beyond loopback: the old way asks for nothing.
    const area = document.createElement("textarea")
    area.value = text
    area.className = "hidden"
    const place = document.querySelector("dialog[open]") ?? document.body
    const focused = document.activeElement
    place.append(area)
    area.select()
    const done = document.execCommand("copy")
    area.remove()
    focused?.focus()
    if (!done) {
      toast("The browser does not let the page copy.", "error")
      return
    }
  }
  toast(`${what} is copied.`)
}

// Drawings of 16 x 16: lines, drawn with the colour of the text.
const ICONS = {
  overview: "M2 9.5h3l2-6 3 9 2-6h2",
  topics: "M2.5 3.5h11M2.5 8h11M2.5 12.5h7",
  browse: "M2.5 2.5h11v11h-11zM5 6h6M5 8.5h6M5 11h3",
  groups: "M5.5 7.5a2 2 0 1 0 0-4 2 2 0 0 0 0 4zM11 7.5a1.7 1.7 0 1 0 0-3.4M1.8 13c.2-2.300 1.700-3.500 3.700-3.500s3.500 1.200 3.700 3.500M11 9.500c1.900 0 3 1.100 3.200 3.500",
  "dead-letters": "M1.800 4h12.400v8.500H1.800zM1.800 4.500 8 9l6.200-4.500",
  state: "M3 3.500h4M3 3.500v9h4M3 8h4M9.500 2h4.200v3H9.500zM9.500 6.500h4.200v3H9.500zM9.500 11h4.200v3H9.500z",
  connections: "M5 5.500a2 2 0 1 0-2-2 2 2 0 0 0 2 2zM11.500 14a2 2 0 1 0-2-2 2 2 0 0 0 2 2zM5 5.500v3A3.500 3.500 0 0 0 8.500 12h1",
  pipelines: "M1.800 5.500h4v5h-4zM10.200 2h4v4.500h-4zM10.200 9.500h4V14h-4zM5.800 8h2M7.800 8V4.200h2.400M7.800 8v3.800h2.400",
  access: "M4 7.500h8v6H4zM5.500 7.500V5a2.500 2.500 0 0 1 5 0v2.500M8 10v1.500",
  audit: "M3.500 2h6l3 3v9h-9zM9.500 2v3h3M5.500 8h5M5.500 10.800h5",
  search: "M7 12A5 5 0 1 0 7 2a5 5 0 0 0 0 10zM10.600 10.600 14 14",
  close: "M3.500 3.500l9 9M12.500 3.500l-9 9",
  check: "M2.500 8.500l3.500 3.500 7.500-8",
  warning: "M8 2 1.500 13.500h13zM8 6.500v3.500M8 11.700v.3",
  info: "M8 14.200A6.200 6.200 0 1 0 8 1.800a6.200 6.200 0 0 0 0 12.400zM8 7.200v4M8 4.700V5",
  menu: "M2 4h12M2 8h12M2 12h12",
  sun: "M8 11a3 3 0 1 0 0-6 3 3 0 0 0 0 6zM8 1.200v1.600M8 13.200v1.600M1.200 8h1.600M13.200 8h1.600M3.200 3.200l1.100 1.100M11.700 11.700l1.100 1.100M3.200 12.800l1.100-1.100M11.700 4.300l1.100-1.100",
  moon: "M13.500 9.600A5.800 5.800 0 0 1 6.400 2.500a5.800 5.800 0 1 0 7.100 7.100z",
  auto: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM8 2v12M8 4.500l4.200-.7M8 8h6M8 11.500l4.200.7",
  clock: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM8 4.500V8l2.500 1.500",
  out: "M6.500 2.500h-4v11h4M6.500 8h7M10.500 5l3 3-3 3",
  keys: "M1.500 4h13v8h-13zM4 6.500h.2M7 6.500h.2M10 6.500h.2M12 6.500h.2M4.500 9.500h7",
  add: "M8 2.500v11M2.500 8h11",
  remove: "M2.500 4h11M6 4V2.500h4V4M4 4l.700 9.500h6.600L12 4M6.700 6.500v4.500M9.300 6.500v4.500",
  edit: "M2.500 13.500l.8-3.300 7.500-7.500 2.500 2.500-7.500 7.500z",
  copy: "M5.500 5.500h8v8h-8zM10.500 5.500v-3h-8v8h3",
  chart: "M2 2v12h12M4.500 10.500l3-4 2.500 2 3.500-5",
  table: "M2 3h12v10.500H2zM2 6.500h12M2 10h12M6.500 3v10.500",
  up: "M8 13V3M4 7l4-4 4 4",
  down: "M8 3v10M4 9l4 4 4-4",
  left: "M10 3 5 8l5 5",
  right: "M6 3l5 5-5 5",
  play: "M4 2.500l9 5.500-9 5.500z",
  pause: "M5 3v10M11 3v10",
  reload: "M13.500 8A5.500 5.500 0 1 1 11.800 4M12.300 1.500V4.500h-3",
  download: "M8 2v8M4.500 7 8 10.500 11.500 7M2.500 13.500h11",
  more: "M3 8h.2M8 8h.2M13 8h.2",
}
