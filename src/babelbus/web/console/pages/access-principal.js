// One principal: roles, root, quotas, credentials and the rows that concern it.

import { html, useState } from "../vendor/preact-htm.js"
import { del, get, patch, path, post } from "../api.js"
import {
  Badge, Button, Bytes, Confirm, Dialog, Empty, Field, Form, Heading, Loaded, Notice, Num, Panel, Table, Time, go, link, toast, usePoll, useSession,
} from "../ui.js"
import {
  ACTIONS, Effect, Expiry, KINDS, Origin, QUOTAS, TABLE, WishFields, namesOf, rowText, showSecrets, wishOf,
} from "./access-parts.js"
import { Explain } from "./access-explain.js"

const UNCOUNTED = ["connections", "requests"]
const OWN = "These are your own credentials: your session ends now, and you log in again."

/** A dialog that makes a principal. */
export function AddPrincipal({ onClose, onDone, roles = [], first = false }) {
  const [kind, setKind] = useState("token")
  const add = async (values) => {
    const wish = wishOf(kind, values)
    const made = await post("/api/principals", {
      name: values.name.trim(), roles: namesOf(values.roles), ...(values.root ? { root: values.root.trim() } : {}), issue: wish ? [wish] : [],
    })
    toast(`Principal ${made.name} is added.`)
    onClose()
    onDone(made.name)
    showSecrets(made.name, made.secrets)
  }
  return html`<${Dialog} title=${first ? "The first administrator" : "Add a principal"} onClose=${onClose}>
    <${Form} submit="Add" onSubmit=${add} onCancel=${onClose}>
      <${Field} label="Name" name="name" required autofocus help="No spaces, and none of / ? # * , { }" />
      <${Field} label="Roles" name="roles" value=${first ? "admin" : ""} help=${`Separated by commas.${roles.length ? ` There are: ${roles.join(", ")}.` : ""}`} />
      ${!first && html`<${Field} label="Root" name="root" help="A tenant: all its subjects are relative to the root, such as tenants/acme. Empty: none." />`}
      <${WishFields} kind=${kind} setKind=${setKind} none />
    </${Form}></${Dialog}>`
}

function Alter({ principal, onClose, onDone }) {
  const save = async (values) => {
    const quotas = {}
    for (const [name] of QUOTAS) if (values[name] !== null && values[name] !== undefined) quotas[name] = values[name]
    const body = { roles: namesOf(values.roles), root: values.root.trim() || null }
    if (Object.keys(quotas).length || principal.quotas) body.quotas = quotas
    await patch(path`/api/principals/${principal.name}`, body)
    toast(`Principal ${principal.name} is changed.`)
    onClose()
    onDone()
  }
  return html`<${Dialog} title=${`Change ${principal.name}`} onClose=${onClose}>
    <${Form} onSubmit=${save} onCancel=${onClose}>
      <${Field} label="Roles" name="roles" value=${principal.roles.join(", ")} help="Separated by commas." />
      <${Field} label="Root" name="root" value=${principal.root ?? ""} help="Its connections end when the root changes." />
      <fieldset><legend>Quotas</legend><div class="form-row">
        ${QUOTAS.map(([name, title, unit]) => html`<${Field} key=${name} label=${title} name=${name} type="number" min="1" unit=${unit} value=${principal.quotas?.[name] ?? ""} />`)}
      </div><small class="muted">Empty: no limit${principal.quotas ? "" : ". Without any number the defaults of the server hold"}.</small></fieldset>
    </${Form}></${Dialog}>`
}

function Issue({ principal, isOwn, onClose, onDone }) {
  const [kind, setKind] = useState("token")
  const issue = async (values) => {
    const made = await patch(path`/api/principals/${principal.name}`, { issue: [wishOf(kind, values)] })
    onClose()
    showSecrets(principal.name, made.secrets, isOwn ? OWN : "")
    if (!made.secrets.length) toast("The credential is added.")
    onDone()
  }
  return html`<${Dialog} title=${`New credential of ${principal.name}`} onClose=${onClose}>
    ${isOwn && html`<${Notice} kind="warning">${OWN}</${Notice}>`}
    <${Form} submit="Issue" onSubmit=${issue} onCancel=${onClose}><${WishFields} kind=${kind} setKind=${setKind} /></${Form}></${Dialog}>`
}

function Credentials({ principal, canChange, isOwn, reload }) {
  const [issuing, setIssuing] = useState(false)
  const [removed, setRemoved] = useState(null)
  const remove = async () => {
    await patch(path`/api/principals/${principal.name}`, { remove: [removed.id] })
    toast("The credential is removed.")
    reload()
  }
  return html`<${Panel} title="Credentials"
    actions=${canChange && html`<${Button} small icon="add" onClick=${() => setIssuing(true)}>Issue</${Button}>`}>
    <${Table} caption="Credentials" rows=${principal.credentials} rowKey="id" columns=${[
      { name: "kind", title: "Kind", sort: true, render: (one) => KINDS[one.kind]?.title ?? one.kind },
      { name: "id", title: "Id", grow: true, render: (one) => html`<span class="mono">${one.id}</span>` },
      { name: "created", title: "Made", wide: true,
        render: (one) => (one.created ? html`<${Time} ms=${one.created} />` : "–") },
      { name: "expires", title: "Expires", sort: true, render: (one) => html`<${Expiry} ms=${one.expires} />` },
      { name: "do", title: html`<span class="hidden">Actions</span>`, render: (one) => canChange && html`<${Button} small kind="danger" aria-label=${`Remove the credential ${one.id}`} onClick=${() => setRemoved(one)}>Remove</${Button}>` },
    ]} empty=${html`<${Empty} title="There is no credential.">Nobody can be this principal until it has one.</${Empty}>`} />
    ${issuing && html`<${Issue} principal=${principal} isOwn=${isOwn} onClose=${() => setIssuing(false)} onDone=${reload} />`}
    ${removed && html`<${Confirm} title="Remove the credential" confirm="Remove" onConfirm=${remove} onClose=${() => setRemoved(null)}
      lost=${[`Clients that show this ${KINDS[removed.kind]?.title ?? removed.kind} are not let in any more, and their connections end now.`, ...(isOwn ? [OWN] : [])]} />`}
  </${Panel}>`
}

/** A dialog that adds a row. */
export function AddRow({ who = "", onClose, onDone }) {
  const add = async (values) => {
    const row = { who: values.who.trim(), action: values.action, pattern: values.pattern.trim(), effect: values.effect }
    await post("/api/access/rows", { rows: [row] })
    toast(`The row is added: ${rowText(row)}`)
    onClose()
    onDone()
  }
  return html`<${Dialog} title="Add a row" onClose=${onClose}><${Form} submit="Add" onSubmit=${add} onCancel=${onClose}>
    <${Field} label="Who" name="who" value=${who} required help="A principal, role:NAME, or * for everybody." />
    <div class="form-row"><${Field} label="Effect" name="effect" type="select" options=${["allow", "deny"]} />
    <${Field} label="Action" name="action" type="select" options=${[...ACTIONS, { value: "*", title: "* (every action)" }]} /></div>
    <${Field} label="Subjects" name="pattern" required help="A subject, or a pattern: ? is one part, # at the end what is before it and everything below, {name} the principal's own name." />
    <p class="muted">A row that denies wins over every row that allows.</p></${Form}></${Dialog}>`
}

/** Rows with a button that removes those of the table. */
export function Rows({ rows, canChange, reload, caption = "Rows", empty, ...rest }) {
  const [removed, setRemoved] = useState(null)
  const remove = async () => {
    const { origin, ...row } = removed
    await del("/api/access/rows", { rows: [row] })
    toast(`The row is removed: ${rowText(row)}`)
    reload()
  }
  return html`<${Table} caption=${caption} rows=${rows} rowKey=${rowText} ...${rest} columns=${[
      { name: "who", title: "Who", sort: true, render: (one) => html`<bdi>${one.who}</bdi>` },
      { name: "effect", title: "Effect", sort: true, render: (one) => html`<${Effect} effect=${one.effect} />` },
      { name: "action", title: "Action", sort: true, nowrap: true },
      { name: "pattern", title: "Subjects", sort: true, grow: true,
        render: (one) => html`<bdi><code>${one.pattern}</code></bdi>` },
      { name: "origin", title: "From", sort: true, wide: true,
        render: (one) => html`<${Origin} origin=${one.origin} />` },
      { name: "do", title: html`<span class="hidden">Actions</span>`, render: (one) => canChange && one.origin === TABLE
        && html`<${Button} small kind="danger" aria-label=${`Remove ${rowText(one)}`} onClick=${() => setRemoved(one)}>Remove</${Button}>` },
    ]} empty=${empty} />
    ${removed && html`<${Confirm} title="Remove the row" confirm="Remove" onConfirm=${remove} onClose=${() => setRemoved(null)}
      lost=${[`${rowText(removed)}: it holds for open connections at once.`]} />`}`
}

function Used({ principal }) {
  const quotas = principal.quotas ?? principal.quota_defaults
  return html`<${Panel} title=${principal.quotas ? "Quotas" : "Quotas (the defaults of the server)"}>
    ${!principal.quotas_counted && html`<p class="muted">Nobody has a quota: connections and requests are not counted.</p>`}
    <${Table} caption="Quotas" rowKey="name" rows=${QUOTAS.map(([name, title]) => ({ name, title }))} columns=${[
      { name: "title", title: "What" },
      { name: "used", title: "Used now", right: true,
        render: ({ name }) => (name.includes("bytes") || (!principal.quotas_counted && UNCOUNTED.includes(name)) ? "–" : html`<${Num} value=${principal.used?.[name] ?? 0} />`) },
      { name: "limit", title: "Limit", right: true,
        render: ({ name }) => (quotas[name] === undefined || quotas[name] === null ? html`<span class="muted">none</span>` : name.includes("bytes") ? html`<${Bytes} value=${quotas[name]} />/s` : html`<${Num} value=${quotas[name]} />`) },
    ]} /></${Panel}>`
}

/** The page of one principal. */
export function PrincipalPage({ name, canChange }) {
  const session = useSession()
  const poll = usePoll((signal) => get(path`/api/principals/${name}`, {}, { signal }), 5, [name])
  const [dialog, setDialog] = useState(null)
  const isOwn = session?.source.endsWith(`:${name}`) ?? false // the built-in administrator is no principal
  const close = () => setDialog(null)
  const remove = async () => {
    await del(path`/api/principals/${name}`)
    toast(`Principal ${name} is removed.`)
    go("/access")
  }
  const { data } = poll
  const canAlter = canChange && data?.origin === TABLE
  return html`<${Heading} title=${name} crumbs=${[["Access", link("/access")]]}
    badge=${data && html`<${Origin} origin=${data.origin} />`} actions=${canAlter && html`
      <${Button} icon="edit" onClick=${() => setDialog("alter")}>Change</${Button}>
      <${Button} kind="danger" icon="remove" onClick=${() => setDialog("remove")}>Remove</${Button}>`} />
    <${Loaded} poll=${poll} what="The principal">${(principal) => html`
      ${isOwn && html`<${Notice}>This is you. The server refuses what would take your own right to administer away.</${Notice}>`}
      ${principal.origin !== TABLE && html`<${Notice}>This principal comes from the ${principal.origin}, and is changed there.</${Notice}>`}
      <div class="grid halves">
        <${Panel} title="Principal"><dl class="pairs">
          <dt>Roles</dt><dd>${principal.roles.length ? principal.roles.map((role) => html`<${Badge} key=${role}>${role}</${Badge}>`) : "none"}</dd>
          <dt>Root</dt><dd>${principal.root ? html`<code>${principal.root}</code>` : "none: subjects are absolute"}</dd></dl></${Panel}>
        <${Used} principal=${principal} />
      </div>
      <${Credentials} principal=${principal} canChange=${canAlter} isOwn=${isOwn} reload=${poll.reload} />
      <${Panel} title="Rows that concern it" actions=${canChange && html`<${Button} small icon="add" onClick=${() => setDialog("row")}>Add row</${Button}>`}>
        <${Rows} rows=${principal.rows} canChange=${canChange} reload=${poll.reload} empty=${html`<${Empty} title="No row concerns this principal.">It may do nothing.</${Empty}>`} /></${Panel}>
      <${Panel} title="Explain"><${Explain} principal=${name} /></${Panel}>
      ${dialog === "alter" && html`<${Alter} principal=${principal} onClose=${close} onDone=${poll.reload} />`}
      ${dialog === "row" && html`<${AddRow} who=${name} onClose=${close} onDone=${poll.reload} />`}
      ${dialog === "remove" && html`<${Confirm} title=${`Remove ${name}`} typed=${name} confirm="Remove" onConfirm=${remove} onClose=${close} lost=${[
        "Its credentials, and its open connections at once.", "Topics and groups that it has made belong to nobody then.",
        "Its rows stay in the table; a new principal of this name would get them."]} />`}`}</${Loaded}>`
}
