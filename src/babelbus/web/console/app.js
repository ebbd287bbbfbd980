// The shell: session, navigation, the page of the address, keys that work everywhere.

import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./vendor/preact-htm.js"
import { events, get, post, serverIsAway } from "./api.js"
import { Button, Busy, Icon, Notice, Toasts, messageOf } from "./ui/basics.js"
import { Dialog } from "./ui/dialogs.js"
import { Session, forgetRights, usePoll } from "./ui/hooks.js"
import { pref, setPref, usePref } from "./ui/prefs.js"
import { Route, go, link, match, useFragment } from "./ui/route.js"
import { PAGES } from "./pages.js"

const RETRY_SECONDS = 2
const THEMES = { auto: "light", light: "dark", dark: "auto" }
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" }
const KEYS = [
  ["?", "show these keys"],
  ["/", "go to the search field"],
  ["t", "show charts as tables, and back"],
  ["g, then a letter", "open a page: the letter is underlined in the navigation"],
  ["Esc", "close a dialog"],
]
const modules = new Map() // name -> promise of the page's module

function load(page) {
  if (!modules.has(page.name)) {
    const promise = import(`./pages/${page.name}.js`).then((module) => module.default)
    promise.catch(() => modules.delete(page.name)) // tried again when it is asked for again
    modules.set(page.name, promise)
  }
  return modules.get(page.name)
}

function find(path) {
  for (const page of PAGES) {
    for (const route of page.routes) {
      const params = match(route, path)
      if (params) return { page, params }
    }
  }
  return null
}

/** Return the session, the failure to find it, a function that asks again, and whether the session ended by itself.
 *
 * The session is undefined while it is asked for, and null when there is none.
 */
function useSessionState() {
  const [session, setSession] = useState(undefined)
  const [error, setError] = useState(null)
  const [ended, setEnded] = useState(false)
  const timer = useRef(0)
  const leaving = useRef(false)
  const ask = async () => {
    clearTimeout(timer.current)
    try {
      const found = await get("/api/console/session")
      forgetRights()
      setSession(found)
      setError(null)
      setEnded(false)
    } catch (failure) {
      if (failure.status === 401) {
        setSession(null)
        setError(null)
        setEnded(false)
        return
      }
      setError(failure)
      if (failure.isAway) timer.current = setTimeout(ask, RETRY_SECONDS * 1000)
    }
  }
  const logout = async () => {
    leaving.current = true
    try {
      await post("/api/console/logout").catch((failure) => {
        if (failure.status !== 401) throw failure
      })
      await ask()
    } finally {
      leaving.current = false
    }
  }
  useEffect(() => {
    ask()
    const end = () => setSession((old) => {
      // The server ends the log-in before it answers: what a page asks meanwhile is refused, and nobody is thrown out.
      if (!old || leaving.current) return old
      setEnded(true)
      return null
    })
    events.addEventListener("unauthorized", end)
    return () => events.removeEventListener("unauthorized", end)
  }, [])
  return [session, error, ask, ended, logout]
}

function useAway() {
  const [away, setAway] = useState(serverIsAway())
  useEffect(() => {
    const update = () => setAway(serverIsAway())
    events.addEventListener("away", update)
    events.addEventListener("back", update)
    return () => {
      events.removeEventListener("away", update)
      events.removeEventListener("back", update)
    }
  }, [])
  // The page may ask for nothing by itself: the shell finds out that the server is back.
  usePoll((signal) => away && get("/api/console/session", {}, { signal }), away ? RETRY_SECONDS : 0, [away])
  return away
}

const isTyping = (element) => element?.closest?.("input, textarea, select, [contenteditable]") !== null

function useKeys(showKeys) {
  useEffect(() => {
    let before = 0
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || document.querySelector("dialog[open]")) return
      const letter = event.key
      if (Date.now() - before < 1_500) {
        before = 0
        const page = PAGES.find((one) => one.key === letter)
        if (page) {
          event.preventDefault()
          go(page.routes[0])
        }
        return
      }
      if (letter === "?") showKeys(true)
      else if (letter === "/") {
        const field = document.querySelector("[data-search]")
        if (!field) return
        event.preventDefault()
        field.focus()
        field.select()
      } else if (letter === "t") setPref("charts", pref("charts") === "table" ? "lines" : "table")
      else if (letter === "g") before = Date.now()
    }
    addEventListener("keydown", press)
    return () => removeEventListener("keydown", press)
  }, [])
}

function Keys({ onClose }) {
  return html`<${Dialog} title="Keys"
    onClose=${onClose} actions=${html`<${Button} onClick=${onClose}>Close</${Button}>`}>
    <table class="keys"><caption class="hidden">Keys and what they do</caption><tbody>
      ${KEYS.map(([key, text]) => html`<tr key=${key}><th scope="row"><kbd>${key}</kbd></th><td>${text}</td></tr>`)}
      ${PAGES.filter((one) => one.key).map((one) => html`<tr key=${one.name}><th scope="row"><kbd>g ${one.key}</kbd></th><td>${one.title}</td></tr>`)}
    </tbody></table></${Dialog}>`
}

function Title({ page }) {
  const at = page.title.toLowerCase().indexOf(page.key ?? "\0")
  if (at < 0) return page.title
  return html`${page.title.slice(0, at)}<u>${page.title[at]}</u>${page.title.slice(at + 1)}`
}

function Navigation({ current, session, open, onClose, onLogout, showKeys }) {
  const [theme, setTheme] = usePref("theme")
  const [zone, setZone] = usePref("zone")
  const groups = [...new Set(PAGES.map((page) => page.group))]
  return html`<aside class="side ${open ? "open" : ""}" id="navigation">
    <a class="brand" href="#/"><img src="/console/icon.svg" alt="" width="24" height="24" /> Babelbus</a>
    <nav aria-label="Pages" onClick=${onClose}>
      ${groups.map((group) => html`<ul key=${group}>
        ${PAGES.filter((page) => page.group === group && !(page.gate && !session.enforcing)).map((page) => html`<li key=${page.name}>
          <a href=${link(page.routes[0])} aria-current=${page === current ? "page" : undefined}>
            <${Icon} name=${page.icon ?? page.name} /><span><${Title} page=${page} /></span></a></li>`)}
      </ul>`)}
    </nav>
    <div class="side-foot">
      <div class="who" title=${session.source}><strong>${session.principal}</strong>
        <small>${session.root ? `below ${session.root}` : session.enforcing ? "the gate is on" : "the gate is off"}</small></div>
      <div class="side-buttons">
        <button type="button" class="icon-button" title="Theme: ${theme}" aria-label="Theme: ${theme}. Change it." onClick=${() => setTheme(THEMES[theme])}>
          <${Icon} name=${THEME_ICONS[theme]} /></button>
        <button type="button" class="icon-button text" aria-label=${zone === "utc" ? "Times in UTC. Change to local time." : "Times in local time. Change to UTC."}
          title=${zone === "utc" ? "Times in UTC" : "Times in local time"} onClick=${() => setZone(zone === "utc" ? "local" : "utc")}>
          <${Icon} name="clock" />${zone === "utc" ? "UTC" : "local"}</button>
        <button type="button" class="icon-button" title="Keys (?)" aria-label="Show the keys" onClick=${showKeys}><${Icon} name="keys" /></button>
        <button type="button" class="icon-button" title="Log out" aria-label="Log out" onClick=${onLogout}><${Icon} name="out" /></button>
      </div>
      <small class="version">Babelbus ${session.version}</small>
    </div>
  </aside>`
}

function Guarded({ Page, params, query }) {
  const [error, reset] = useErrorBoundary((failure) => console.error(failure))
  if (!error) return html`<${Page} params=${params} query=${query} />`
  return html`<${Notice} kind="error" title="The page failed."
    actions=${html`<${Button} small onClick=${reset}>Try again</${Button}>`}>
    ${messageOf(error)}</${Notice}>`
}

/** Do something again and again while it fails; `state` is a new object after each time. */
function useRetry(again, state) {
  useEffect(() => {
    const timer = state.error && setTimeout(again, RETRY_SECONDS * 1000)
    return () => clearTimeout(timer)
  }, [state])
}

function Outlet({ found, query, path }) {
  const [state, setState] = useState({ name: null, Page: null, error: null })
  const name = found?.page.name
  const wanted = useRef(null)
  wanted.current = name
  // Pages may come in another order than they were asked for: the last one counts.
  const fetchPage = () => found && load(found.page).then(
    ({ Page }) => wanted.current === name && setState({ name, Page, error: null }),
    (error) => wanted.current === name && setState({ name, Page: null, error }),
  )
  useEffect(() => {
    fetchPage()
  }, [name])
  useRetry(fetchPage, state)
  if (!found) {
    return html`<h1 tabIndex="-1">No such page</h1><${Notice} kind="warning">There is no page at <code>${path}</code>.
      <a href="#/">Go to the overview.</a></${Notice}>`
  }
  if (state.name !== name) return html`<${Busy} />`
  if (state.error) {
    return html`<${Notice} kind="error" title="The page could not be loaded."
      actions=${html`<${Button} small onClick=${fetchPage}>Try again</${Button}>`}>
      ${messageOf(state.error)}</${Notice}>`
  }
  return html`<${Guarded} key=${`${name} ${JSON.stringify(found.params)}`} Page=${state.Page} params=${found.params} query=${query} />`
}

function useTitleAndFocus(found, path) {
  const first = useRef(true)
  useEffect(() => {
    const subject = Object.values(found?.params ?? {}).join(" · ")
    document.title = `${subject ? `${subject} · ` : ""}${found?.page.title ?? "No such page"} · Babelbus`
    if (first.current) {
      first.current = false
      return
    }
    scrollTo(0, 0)
    document.getElementById("main")?.focus({ preventScroll: true })
  }, [path])
}

function Shell({ session, onLogout }) {
  const { path, query } = useFragment()
  const [open, setOpen] = useState(false)
  const [keys, setKeys] = useState(false)
  const away = useAway()
  const found = find(path)
  useKeys(setKeys)
  useTitleAndFocus(found, path)
  useEffect(() => setOpen(false), [path])
  useEffect(() => {
    const close = (event) => event.key === "Escape" && setOpen(false)
    addEventListener("keydown", close)
    return () => removeEventListener("keydown", close)
  }, [])
  const skip = (event) => {
    event.preventDefault()
    document.getElementById("main").focus()
  }
  return html`<${Route.Provider} value=${{ path, query, params: found?.params ?? {} }}>
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <div class="top"><button type="button" class="icon-button" aria-label="Navigation" aria-expanded=${open} aria-controls="navigation"
      onClick=${() => setOpen(!open)}><${Icon} name=${open ? "close" : "menu"} /></button>
      <a class="brand" href="#/"><img src="/console/icon.svg" alt="" width="22" height="22" /> Babelbus</a></div>
    ${open && html`<div class="veil" onClick=${() => setOpen(false)}></div>`}
    <${Navigation} current=${found?.page} session=${session} open=${open} onClose=${() => setOpen(false)} onLogout=${onLogout}
      showKeys=${() => setKeys(true)} />
    <main id="main" tabIndex="-1">
      <div aria-live="polite">${away && html`<${Notice} kind="warning" title="The server does not answer.">
        The page shows what was read last, and goes on by itself when the server is back.</${Notice}>`}</div>
      <${Outlet} found=${found} query=${query} path=${path} />
    </main>
    ${keys && html`<${Keys} onClose=${() => setKeys(false)} />`}
  </${Route.Provider}>`
}

/** The log-in page, which a browser with a session does not load. */
function LogIn({ onDone, ended }) {
  const [state, setState] = useState({})
  const fetchPage = () => import("./login.js").then(({ Login }) => setState({ Login }), (error) => setState({ error }))
  useEffect(() => {
    fetchPage()
  }, [])
  useRetry(fetchPage, state)
  if (state.Login) return html`<${state.Login} onDone=${onDone} ended=${ended} />`
  return html`<main class="alone">${state.error
    ? html`<${Notice} kind="error" title="The log-in could not be loaded." actions=${html`<${Button} small onClick=${fetchPage}>Try again</${Button}>`}>
      ${messageOf(state.error)}</${Notice}>`
    : html`<${Busy} />`}</main>`
}

function App() {
  const [session, error, ask, ended, logout] = useSessionState()
  let page
  if (session) page = html`<${Shell} session=${session} onLogout=${logout} />`
  else if (session === null) page = html`<${LogIn} onDone=${ask} ended=${ended} />`
  else if (error) {
    page = html`<main class="alone"><h1>Babelbus</h1><${Notice} kind="warning" title=${error.isAway ? "The server does not answer." : "The console cannot start."}
      actions=${html`<${Button} small onClick=${ask}>Try again</${Button}>`}>${error.isAway ? "The console goes on by itself when it is back." : messageOf(error)}</${Notice}></main>`
  } else page = html`<main class="alone"><${Busy} /></main>`
  return html`<${Session.Provider} value=${session ?? null}>${page}<${Toasts} /></${Session.Provider}>`
}

const place = document.getElementById("app")
place.replaceChildren()
render(html`<${App} />`, place)
