// Addresses of pages: the fragment of the URL, such as #/browse/orders?partition=0.

import { createContext, useCallback, useContext, useEffect, useState } from "../vendor/preact-htm.js"

/** The current route: `{path, params, query}`. */
export const Route = createContext({ path: "/", params: {}, query: {} })

/** Return path and query of a fragment. */
export function readFragment(fragment = location.hash) {
  const [path, text = ""] = fragment.replace(/^#/, "").split(/\?(.*)/s)
  return { path: path || "/", query: Object.fromEntries(new URLSearchParams(text)) }
}

/** Return the values of a pattern such as "/groups/:topic/:group" in a path, or null if it does not fit. */
export function match(pattern, path) {
  const wanted = pattern.split("/")
  const given = path.replace(/(.)\/$/, "$1").split("/")
  if (wanted.length !== given.length) return null
  const params = {}
  for (const [number, part] of wanted.entries()) {
    if (!part.startsWith(":")) {
      if (part !== given[number]) return null
      continue
    }
    try {
      params[part.slice(1)] = decodeURIComponent(given[number])
    } catch {
      return null // an address that somebody has cut
    }
  }
  return params
}

/** Return the address of a page: link("/topics/:name", {name, offset: 5}) is "#/topics/NAME?offset=5". */
export function link(pattern, values = {}) {
  const rest = { ...values }
  const path = pattern.replace(/:(\w+)/g, (whole, name) => {
    if (!(name in values)) return whole
    delete rest[name]
    return encodeURIComponent(values[name])
  })
  const given = Object.entries(rest).filter(([, value]) => value !== undefined && value !== null && value !== "")
  const text = new URLSearchParams(given.map(([name, value]) => [name, value === true ? "1" : String(value)])).toString()
  return `#${path}${text ? (path.includes("?") ? "&" : "?") + text : ""}`
}

/** Open a page; `replace` leaves no entry in the history. */
export function go(pattern, values = {}, { replace = false } = {}) {
  const address = pattern.startsWith("#") ? pattern : link(pattern, values)
  if (!replace) {
    location.hash = address
    return
  }
  history.replaceState(null, "", address)
  dispatchEvent(new HashChangeEvent("hashchange"))
}

/** Return the current path and query, and draw again when they change. */
export function useFragment() {
  const [fragment, setFragment] = useState(readFragment())
  useEffect(() => {
    const update = () => setFragment(readFragment())
    addEventListener("hashchange", update)
    update() // the address may have changed since it was read
    return () => removeEventListener("hashchange", update)
  }, [])
  return fragment
}

/** Return the current route. */
export const useRoute = () => useContext(Route)

/** Return the query of the address, and a function that changes values of it (null removes a value). */
export function useQuery() {
  const { query } = useRoute()
  const change = useCallback((changes, { replace = true } = {}) => {
    const now = readFragment()
    go(`#${now.path}${link("", { ...now.query, ...changes }).slice(1)}`, {}, { replace })
  }, [])
  return [query, change]
}
