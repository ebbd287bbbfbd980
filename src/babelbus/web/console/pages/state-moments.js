// A moment of the past, chosen with a slider or typed.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js"
import { Button, Time, localText, timeText, usePref } from "../ui.js"
import { SLIDER_STEPS, momentAt, momentOf, stepOf } from "./state-values.js"

const PAUSE_MS = 200

/** A slider with a field for the exact time. `value` in ms, null is now; `ends` is the answer of /api/state/ends. */
export function Moment({ label, value, ends, onChange, now = true }) {
  const [zone] = usePref("zone")
  const [first, last] = [ends.earliest.time_ms ?? ends.now_ms, Math.max(ends.latest.time_ms ?? 0, ends.earliest.time_ms ?? 0)]
  const [moving, setMoving] = useState(null)
  const timer = useRef(0)
  useEffect(() => () => clearTimeout(timer.current), [])
  const at = moving === null ? value : moving
  const step = at === null ? SLIDER_STEPS : Math.min(SLIDER_STEPS, Math.max(0, stepOf(at, first, last)))
  const send = (ms) => {
    clearTimeout(timer.current)
    setMoving(null)
    onChange(ms)
  }
  const slide = (event) => {
    const place = Number(event.currentTarget.value)
    const ms = now && place >= SLIDER_STEPS ? null : momentAt(place, first, last)
    if (ms === null) {
      send(null)
      return
    }
    setMoving(ms)
    clearTimeout(timer.current)
    timer.current = setTimeout(() => send(ms), PAUSE_MS)
  }
  const type = (event) => {
    const ms = momentOf(event.currentTarget.value, zone)
    if (ms !== null) send(ms)
  }
  const text = at === null ? "now" : timeText(at)
  return html`<div class="state-moment" role="group" aria-label=${label}>
    <span class="state-moment-label">${label}</span>
    <input type="range" min="0" max=${SLIDER_STEPS} value=${step} aria-label="${label}, between the earliest moment and the last change"
      aria-valuetext=${text} onInput=${slide} disabled=${last <= first} />
    <input type="datetime-local" step="1" aria-label="${label}, exactly" value=${at === null ? "" : localText(at, zone)} onChange=${type} />
    ${now && html`<${Button} small disabled=${at === null} onClick=${() => send(null)}>Now</${Button}>`}
    <small class="muted">from <${Time} ms=${first} /> to <${Time} ms=${last} /></small>
  </div>`
}
