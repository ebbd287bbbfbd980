// Parts of the page about access: rows, credentials, secrets that are shown once, and quotas.

import { html, render, useState } from "../vendor/preact-htm.js"
import { Badge, Button, Dialog, Field, Notice, Time, copyText } from "../ui.js"

export const ACTIONS = ["publish", "subscribe", "read", "consume", "write-state", "manage", "admin"]
export const TABLE = "table"
const SOON_MS = 14 * 86_400_000

/** Kinds of credentials: what a kind is called, and what a user fills in. */
export const KINDS = {
  token: { title: "Token", about: "The server makes a token for the administration API, and shows it once." },
  password: { title: "Password", about: "For doors with user and password. Without a password of yours, the server makes one." },
  "api-key": { title: "API key", about: "Key and secret that sign requests of zbus. The server makes both, and shows the secret once." },
  jebp: { title: "jebp certificate", about: "The fingerprint of the client's certificate, as 'babelbus login' shows it." },
  tls: { title: "TLS client certificate", about: "A name in a certificate that an authority of the server has signed." },
  peer: { title: "Process of this machine", about: "The user or the group of processes that connect over a unix socket." },
}

/** Whether a row allows or denies. */
export const Effect = ({ effect }) => html`<${Badge} kind=${effect === "deny" ? "error" : "good"}>${effect}</${Badge}>`

/** A row as one line of text. */
export const rowText = (row) => `${row.effect} ${row.who} ${row.action} ${row.pattern}`

/** Where an entry comes from; only entries of the table can be changed here. */
export const Origin = ({ origin }) => html`<${Badge} kind=${origin === TABLE ? "plain" : "info"}>${origin}</${Badge}>`

/** When something expires. */
export function Expiry({ ms }) {
  if (!ms) return html`<span class="muted">never</span>`
  const left = ms - Date.now()
  return html`<${Time} ms=${ms} />${left < 0 ? html` <${Badge} kind="error">expired</${Badge}>` : left < SOON_MS && html` <${Badge} kind="warning">soon</${Badge}>`}`
}

/** A row with the table's own words: who may do an action on a pattern. */
export function RowLine({ row }) {
  return html`<span class="access-row"><${Effect} effect=${row.effect} /> <bdi><code>${row.who}</code></bdi> <code>${row.action}</code> <bdi><code>${row.pattern}</code></bdi></span>`
}

function Secret({ name, secrets, note, onClose }) {
  const [sure, setSure] = useState(false)
  return html`<${Dialog} title="Keep this secret now" onClose=${() => sure && onClose()} actions=${html`
      <${Button} kind="primary" disabled=${!sure} onClick=${onClose}>Close</${Button}>`}>
    <${Notice} kind="warning">The server has no copy that it could show again. ${note}</${Notice}>
    ${secrets.map((one) => html`<div key=${one.id} class="access-secret">
      <p><strong>${KINDS[one.kind]?.title ?? one.kind}</strong> of ${name}</p>
      ${one.key && html`<div class="access-copy"><code>${one.key}</code><${Button} small icon="copy" onClick=${() => copyText(one.key, "The key")}>Copy key</${Button}></div>`}
      <div class="access-copy"><code data-secret>${one.secret}</code><${Button} small icon="copy" onClick=${() => copyText(one.secret, "The secret")}>Copy</${Button}></div>
    </div>`)}
    <${Field} type="checkbox" label="I have kept it" value=${sure} onChange=${setSure} />
  </${Dialog}>`
}

/** Show secrets once. The dialog is outside of the page: a change of one's own credentials ends the session, not it. */
export function showSecrets(name, secrets, note = "") {
  if (!secrets?.length) return
  const place = document.createElement("div")
  document.body.append(place)
  const close = () => {
    render(null, place)
    place.remove()
  }
  render(html`<${Secret} name=${name} secrets=${secrets} note=${note} onClose=${close} />`, place)
}

/** The fields of a credential to be made. */
export function WishFields({ kind, setKind, none = false }) {
  return html`
    <${Field} label="Credential" type="select" name="kind" value=${kind} onChange=${setKind}
      options=${[...(none ? [{ value: "", title: "none now" }] : []), ...Object.entries(KINDS).map(([value, one]) => ({ value, title: one.title }))]}
      help=${KINDS[kind]?.about ?? "Without a credential, nobody can be this principal."} />
    ${kind === "password" && html`<${Field} label="Password" name="password" type="password" autocomplete="new-password" help="Leave it empty: the server makes one." />`}
    ${kind === "jebp" && html`<${Field} label="Fingerprint" name="fingerprint" required />`}
    ${kind === "tls" && html`<div class="form-row"><${Field} label="Part of the certificate" name="name_kind" type="select" options=${["cn", "dns", "email", "uri"]} /><${Field} label="Name" name="value" required /></div>`}
    ${kind === "peer" && html`<div class="form-row"><${Field} label="User id" name="uid" type="number" min="0" /><${Field} label="Group id" name="gid" type="number" min="0" /></div>`}
    ${kind && html`<${Field} label="Expires in" name="days" type="number" min="1" max="36500" unit="days" help="Empty: never." />`}`
}

const WISHED = { password: ["password"], jebp: ["fingerprint"], tls: ["name_kind", "value"], peer: ["uid", "gid"] }

/** Return the wish for a credential that the values of a form say, as the API takes it; null for none. */
export function wishOf(kind, values) {
  if (!kind) return null
  const wish = { kind }
  for (const name of WISHED[kind] ?? []) if (values[name] !== "" && values[name] !== null && values[name] !== undefined) wish[name] = values[name]
  if (values.days) wish.lifetime_ms = values.days * 86_400_000
  return wish
}

/** Return the names in a text that are separated by commas or spaces. */
export const namesOf = (text) => [...new Set(text.split(/[\s,]+/).filter(Boolean))]

/** Quotas: the name of a field, its title and its unit. */
export const QUOTAS = [
  ["publish_bytes_per_second", "Published", "bytes/s"],
  ["read_bytes_per_second", "Read", "bytes/s"],
  ["connections", "Connections", ""],
  ["subscriptions", "Subscriptions", ""],
  ["topics", "Topics", ""],
  ["requests", "Requests", ""],
]
