// The choices of this browser: theme, time zone, charts or tables. Kept in local storage, which never holds a secret.

import { useEffect, useState } from "../vendor/preact-htm.js"

const PLACE = "babelbus.console"
const DEFAULTS = { theme: "auto", zone: "local", charts: "lines" }
const changed = new EventTarget()
let prefs = read()

function read() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(PLACE) ?? "{}") }
  } catch {
    return { ...DEFAULTS } // storage is turned off, or holds something else
  }
}

/** Return one choice: `theme`, `zone`, `charts`. */
export function pref(name) {
  return prefs[name]
}

/** Set one choice, here and in the other pages of this browser. */
export function setPref(name, value) {
  prefs = { ...prefs, [name]: value }
  try {
    localStorage.setItem(PLACE, JSON.stringify(prefs))
  } catch {
    // Without storage the choice holds until the page is closed.
  }
  apply()
}

function apply() {
  document.documentElement.dataset.theme = prefs.theme
  changed.dispatchEvent(new Event("change"))
}

/** Return one choice, and draw again when it changes. */
export function usePref(name) {
  const [value, setValue] = useState(prefs[name])
  useEffect(() => {
    const update = () => setValue(prefs[name])
    changed.addEventListener("change", update)
    return () => changed.removeEventListener("change", update)
  }, [name])
  return [value, (next) => setPref(name, next)]
}

addEventListener("storage", (event) => {
  if (event.key !== PLACE) return
  prefs = read()
  apply()
})
apply()
