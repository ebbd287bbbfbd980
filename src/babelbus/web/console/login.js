// The log-in: a token, a user with a password, or a code that was made by `babelbus console`.

import { html, useEffect, useState } from "./vendor/preact-htm.js"
import { post } from "./api.js"
import { Busy, Notice, Tabs, messageOf } from "./ui/basics.js"
import { Field, Form } from "./ui/forms.js"
import { go, useFragment } from "./ui/route.js"

const WAYS = [
  { name: "token", title: "Token" },
  { name: "password", title: "User and password" },
]

/** The log-in page; `onDone` is called when there is a session, `ended` says that there was one. */
export function Login({ onDone, ended }) {
  const { path, query } = useFragment()
  const [way, setWay] = useState("token")
  const [error, setError] = useState(null)
  const [busy, setBusy] = useState(path === "/login" && Boolean(query.code))
  const enter = async (proof) => {
    await post("/api/console/login", proof)
    if (path === "/login") go("/", {}, { replace: true })
    await onDone()
  }

  useEffect(() => {
    document.title = "Log in · Babelbus"
    if (path !== "/login" || !query.code) return
    const code = query.code
    go("/login", {}, { replace: true }) // a code is used once, and need not stay in the history
    enter({ code }).catch((failure) => {
      setError(failure)
      setBusy(false)
    })
  }, [])

  if (busy) return html`<main class="alone"><${Busy}>Logging in …</${Busy}></main>`
  const send = (values) => {
    setError(null)
    return enter(way === "token" ? { token: values.token.trim() } : { user: values.user, password: values.password })
  }
  return html`<main class="alone" id="main">
    <div class="login-card">
      <h1><img src="/console/icon.svg" alt="" width="32" height="32" /> Babelbus</h1>
      ${ended && !error && html`<${Notice} kind="warning" title="The log-in has ended.">Log in again to go on where you were.</${Notice}>`}
      ${error && html`<${Notice} kind="error">${messageOf(error)}</${Notice}>`}
      <${Tabs} label="How to log in" tabs=${WAYS} value=${way} onChange=${setWay} />
      <${Form} key=${way} submit="Log in" onSubmit=${send}>
        ${way === "token"
          ? html`<${Field} label="Token" name="token" type="password" required autocomplete="current-password"
              help="The token of the server is in its data folder: the file conf/admin_token. The command babelbus console logs you in without it." />`
          : html`<${Field} label="User" name="user" required autocomplete="username" />
            <${Field} label="Password" name="password" type="password" required autocomplete="current-password" />`}
      </${Form}>
    </div>
  </main>`
}
