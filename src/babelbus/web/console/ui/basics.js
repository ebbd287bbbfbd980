// Small parts: buttons, notices, badges, panels, headings, tabs.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js"
import { ApiError } from "../api.js"
import { ICONS } from "./icons.js"

const words = (...names) => names.filter(Boolean).join(" ")
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
  if (error instanceof ApiError || error instanceof Error) return error.message
  return String(error)
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
  return html`<${Notice} kind="error" title="${what} could not be loaded." actions=${again}>${messageOf(error)}</${Notice}>`
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
