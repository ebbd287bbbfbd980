// Who may do what: principals, rows, the mode of the gate, explanations and faults.

import { html, useMemo, useState } from "../vendor/preact-htm.js"
import { get, put } from "../api.js"
import {
  Badge, Button, Confirm, Dialog, Empty, Heading, Loaded, Notice, Num, Search, Table, Tabs, link, numText, toast, useMay, usePoll, useQuery,
} from "../ui.js"
import { Explain } from "./access-explain.js"
import { AddPrincipal, AddRow, PrincipalPage, Rows } from "./access-principal.js"
import { KINDS, Origin } from "./access-parts.js"

const SECONDS = 5
const ROWS_SHOWN = 300
const TABS = ["principals", "rows", "explain", "faults"]
const ENDS = "The sessions of principals in the console end: they log in again."

function Principals({ principals, counted, search, setSearch }) {
  const shown = useMemo(() => principals.filter((one) => `${one.name} ${one.roles.join(" ")} ${one.root ?? ""}`.toLowerCase().includes(search.toLowerCase())), [principals, search])
  const connections = (one) => one.used?.connections ?? 0
  return html`<div class="toolbar"><${Search} label="Search principals" value=${search} onSearch=${setSearch} />
      <span class="muted" role="status">${numText(shown.length)} of ${numText(principals.length)}</span></div>
    <${Table} caption="Principals" rows=${shown.slice(0, ROWS_SHOWN)} rowKey="name" first=${{ name: "name" }} columns=${[
      { name: "name", title: "Name", sort: true, grow: true,
        render: (one) => html`<a href=${link("/access/:name", { name: one.name })}><bdi>${one.name}</bdi></a>` },
      { name: "roles", title: "Roles", sort: true, value: (one) => one.roles.join(),
        render: (one) => (one.roles.length ? one.roles.map((role) => html`<${Badge} key=${role}>${role}</${Badge}>`) : "–") },
      { name: "root", title: "Root", sort: true, wide: true,
        render: (one) => (one.root ? html`<code>${one.root}</code>` : "–") },
      { name: "credentials", title: "Credentials", sort: true, wide: true, value: (one) => one.credentials.length, render: (one) => (one.credentials.length
        ? [...new Set(one.credentials.map((credential) => credential.kind))].map((kind) => html`<${Badge} key=${kind}>${KINDS[kind]?.title ?? kind}</${Badge}>`) : html`<span class="muted">none</span>`) },
      ...(counted ? [{ name: "connections", title: "Connections", right: true, sort: true, value: connections, render: (one) => html`<${Num} value=${connections(one)} />` }] : []),
      { name: "origin", title: "From", sort: true, wide: true,
        render: (one) => html`<${Origin} origin=${one.origin} />` },
    ]} empty=${search ? `No principal contains ${search}.` : html`<${Empty} title="There is no principal.">A principal is a user, a service or a tenant that proves who it is.</${Empty}>`} />
    ${shown.length > ROWS_SHOWN && html`<p class="muted">The first ${numText(ROWS_SHOWN)} are shown: search for others.</p>`}`
}

function AllRows({ rows, canChange, reload, search, setSearch }) {
  const shown = useMemo(() => {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean)
    return rows.filter((row) => words.every((word) => `${row.effect} ${row.who} ${row.action} ${row.pattern} ${row.origin}`.toLowerCase().includes(word)))
  }, [rows, search])
  return html`<div class="toolbar"><${Search} label="Search rows" value=${search} onSearch=${setSearch} />
      <span class="muted" role="status">${numText(shown.length)} of ${numText(rows.length)}</span></div>
    <${Rows} rows=${shown.slice(0, ROWS_SHOWN)} canChange=${canChange} reload=${reload} first=${{ name: "who" }} empty=${search ? `No row contains ${search}.` : "There are no rows."} />
    ${shown.length > ROWS_SHOWN && html`<p class="muted">The first ${numText(ROWS_SHOWN)} are shown: search for others.</p>`}`
}

/** What happens when the gate is turned on: it asks for an administrator first. */
function TurnOn({ principals, roles, faults, onClose, onDone }) {
  const admins = (roles.admin ?? []).filter((name) => principals.some((one) => one.name === name && one.credentials.length))
  const [first, setFirst] = useState(false)
  const turnOn = async () => {
    await put("/api/access/mode", { enforce: true })
    toast("The gate is on.")
    onDone()
  }
  if (first) return html`<${AddPrincipal} first onClose=${() => setFirst(false)} onDone=${onDone} />`
  return html`<${Dialog} title="Turn the gate on" onClose=${onClose} actions=${html`
      <${Button} onClick=${onClose}>Cancel</${Button}>
      <${Button} kind="primary" disabled=${admins.length === 0} onClick=${async () => { await turnOn(); onClose() }}>Turn on</${Button}>`}>
    <p>From then on every client of every protocol may do only what a row allows. Clients that prove nothing are <code>anonymous</code>, and have its rows and those of everybody (<code>*</code>).</p>
    ${admins.length ? html`<p>Administrators: ${admins.join(", ")}.</p>`
      : html`<${Notice} kind="warning" title="Nobody could administer access." actions=${html`<${Button} small onClick=${() => setFirst(true)}>Add the first administrator</${Button}>`}>
        No principal with a credential has the role admin. The token of the data folder always may.</${Notice}>`}
    ${faults.length > 0 && html`<${Notice} kind="warning" title="The table has faults."><ul>${faults.slice(0, 5).map((text) => html`<li key=${text}>${text}</li>`)}</ul></${Notice}>`}
    <${Notice}>${ENDS}</${Notice}></${Dialog}>`
}

function Mode({ access, principals, faults, canChange, reload }) {
  const [dialog, setDialog] = useState(null)
  const close = () => setDialog(null)
  const turnOff = async () => {
    await put("/api/access/mode", { enforce: false })
    toast("The gate is off.")
    reload()
  }
  return html`
    ${!access.enforcing && html`<${Notice} kind="warning" title="The gate is off." actions=${canChange && html`<${Button} small kind="primary" onClick=${() => setDialog("on")}>Turn it on …</${Button}>`}>
      Clients may do everything. The table is kept, and is asked by the administration API only.</${Notice}>`}
    ${access.enforcing && html`<div class="toolbar"><${Badge} kind="good">the gate is on</${Badge}>
      <span class="muted">${access.mode === "enforce" ? "The configuration turns it on (access.mode)." : "The table turns it on."} ${access.wildcards === false ? "" : ""}</span>
      ${canChange && access.mode !== "enforce" && html`<span class="push"></span><${Button} small kind="danger" onClick=${() => setDialog("off")}>Turn it off …</${Button}>`}</div>`}
    ${dialog === "on" && html`<${TurnOn} principals=${principals} roles=${access.roles} faults=${faults} onClose=${close} onDone=${reload} />`}
    ${dialog === "off" && html`<${Confirm} title="Turn the gate off" confirm="Turn off" typed="off" onConfirm=${turnOff} onClose=${close}
      lost=${["Every client of every protocol may do everything, at once.", ENDS]} />`}`
}

function Overview({ canChange }) {
  const [query, change] = useQuery()
  const [dialog, setDialog] = useState(null)
  const poll = usePoll(async (signal) => {
    const [access, { principals, quotas_counted: counted }, { faults }] = await Promise.all(["/api/access", "/api/principals", "/api/access/faults"].map((target) => get(target, {}, { signal })))
    return { access, principals, counted, faults }
  }, SECONDS)
  const tab = TABS.includes(query.tab) ? query.tab : "principals"
  const search = query.search ?? ""
  const setSearch = (text) => change({ search: text })
  return html`<${Heading} title="Access" actions=${canChange && html`
      <${Button} icon="add" onClick=${() => setDialog("principal")}>Add principal</${Button}>
      <${Button} icon="add" onClick=${() => setDialog("row")}>Add row</${Button}>`}>Who may do what, for all protocols.</${Heading}>
    <${Loaded} poll=${poll} what="The table">${({ access, principals, counted, faults }) => html`
      <${Mode} access=${access} principals=${principals} faults=${faults} canChange=${canChange} reload=${poll.reload} />
      <${Tabs} label="Parts of access" value=${tab} onChange=${(name) => change({ tab: name === "principals" ? null : name, search: null }, { replace: false })} tabs=${[
        { name: "principals", title: "Principals", count: numText(principals.length) },
        { name: "rows", title: "Rows", count: numText(access.rows.length) },
        { name: "explain", title: "Explain" },
        { name: "faults", title: "Faults", count: numText(faults.length) },
      ]} />
      ${tab === "principals" && html`<${Principals} principals=${principals} counted=${counted} search=${search} setSearch=${setSearch} />`}
      ${tab === "rows" && html`<${AllRows} rows=${access.rows} canChange=${canChange} reload=${poll.reload} search=${search} setSearch=${setSearch} />`}
      ${tab === "explain" && html`<section class="panel"><${Explain} names=${principals.map((one) => one.name)} first=${query}
        onAsked=${(question) => change(question)} /></section>`}
      ${tab === "faults" && (faults.length === 0 ? html`<${Empty} title="The table has no faults.">Each row can decide something, and each principal has rows.</${Empty}>`
        : html`<section class="panel"><ul>${faults.map((text) => html`<li key=${text}>${text}</li>`)}</ul></section>`)}
      ${dialog === "principal" && html`<${AddPrincipal} roles=${Object.keys(access.roles)} onClose=${() => setDialog(null)} onDone=${poll.reload} />`}
      ${dialog === "row" && html`<${AddRow} onClose=${() => setDialog(null)} onDone=${poll.reload} />`}`}</${Loaded}>`
}

function Page({ params }) {
  const canChange = useMay("admin", "$access") !== false
  return params.name === undefined ? html`<${Overview} canChange=${canChange} />` : html`<${PrincipalPage} name=${params.name} canChange=${canChange} />`
}

export default { Page }
