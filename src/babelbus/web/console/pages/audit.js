// The audit: log-ins, refusals and changes of the table, newest first.

import { html, useEffect, useState } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import {
  Badge, Button, Dialog, Empty, Field, Heading, Loaded, Num, Search, Table, Time, go, link, localText, numText,
  timeText, usePoll, usePref, useQuery,
} from "../ui.js"
import { RowLine } from "./access-parts.js"
import { Source, momentOf } from "./state-values.js"

const SECONDS = 5
const COUNT = 100
const KINDS = { refusal: "warning", login: "good", "login-refused": "error", change: "info" }
const TITLES = { refusal: "refused", login: "log-in", "login-refused": "wrong proof", change: "change" }

function EntryText({ entry }) {
  if (entry === null || entry === undefined) return html`<span class="muted">nothing</span>`
  if (entry.pattern !== undefined) return html`<${RowLine} row=${entry} />`
  if (entry.enforce !== undefined) return `the gate is ${entry.enforce ? "on" : "off"}`
  return html`<pre class="audit-entry" tabIndex="0">${JSON.stringify(entry, null, 2)}</pre>`
}

function subjectOf(record) {
  const entry = record.after?.find(Boolean) ?? record.before?.find(Boolean)
  if (record.kind !== "change" || !entry) return html`<bdi>${record.subject || "–"}</bdi>`
  const more = Math.max(record.after?.length ?? 0, record.before?.length ?? 0) - 1
  return html`${entry.pattern !== undefined ? html`<${RowLine} row=${entry} />` : entry.enforce !== undefined ? "the mode of the gate" : html`principal <bdi>${entry.name}</bdi>`}${more > 0 && ` and ${numText(more)} more`}`
}

const Kind = ({ record }) => html`<${Badge} kind=${KINDS[record.kind]}>${TITLES[record.kind] ?? record.kind}</${Badge}>`

const doneBy = (record) => {
  if (record.kind !== "change") return record.action
  if (record.after?.[0]?.enforce !== undefined || record.before?.[0]?.enforce !== undefined) return "changed"
  const [before, after] = [record.before?.some(Boolean), record.after?.some(Boolean)]
  return before && after ? "changed" : after ? "added" : "removed"
}

function Record({ record, onClose }) {
  const pairs = (record.after ?? []).map((after, place) => [record.before?.[place], after])
  return html`<${Dialog} wide title=${`Record ${record.offset}: ${TITLES[record.kind] ?? record.kind}${record.kind === "change" ? " of the table" : ""}`} onClose=${onClose} actions=${html`<${Button} onClick=${onClose}>Close</${Button}>`}>
    <dl class="pairs">
      <dt>Time</dt><dd><${Time} ms=${record.time_ms} precise /></dd>
      <dt>Principal</dt><dd><a href=${link("/access/:name", { name: record.principal })}><bdi>${record.principal}</bdi></a></dd>
      <dt>Source</dt><dd><${Source} source=${record.source} /></dd>
      ${record.action && html`<dt>Action</dt><dd>${record.action}</dd>`}
      ${record.subject && html`<dt>Subject</dt><dd><bdi><code>${record.subject}</code></bdi></dd>`}
      ${record.reason && html`<dt>Reason</dt><dd>${record.reason}</dd>`}
      ${(record.count ?? 1) > 1 && html`<dt>Count</dt><dd><${Num} value=${record.count} /> alike within a second</dd>`}
      ${record.id && html`<dt>Id</dt><dd><code>${record.id}</code></dd>`}
      ${record.version > 0 && html`<dt>Version</dt><dd>of the table: <${Num} value=${record.version} /></dd>`}
    </dl>
    ${record.kind === "refusal" && html`<p><a href=${link("/access", { tab: "explain", principal: record.principal, action: record.action, subject: record.subject })}>Explain why it was refused</a></p>`}
    ${pairs.length > 0 && html`<${Table} caption="Entries before and after the change" rows=${pairs.map(([before, after], place) => ({ place, before, after }))} rowKey="place" columns=${[
      { name: "before", title: "Before", render: (one) => html`<${EntryText} entry=${one.before} />` },
      { name: "after", title: "After", render: (one) => html`<${EntryText} entry=${one.after} />` },
    ]} />`}
  </${Dialog}>`
}

function MomentField({ label, value, onChange }) {
  const [zone] = usePref("zone")
  return html`<${Field} label=${label} type="datetime-local" step="1" value=${value ? localText(Number(value), zone) : ""}
    onChange=${(text) => onChange(text === "" ? null : momentOf(text, zone))} />`
}

function Page() {
  const [query, change] = useQuery()
  const [pages, setPages] = useState([null])
  const [fields, setFields] = useState(Boolean(query.since || query.until || query.principal || query.id))
  const [chosen, setChosen] = useState(null)
  const filter = { kind: query.kind, principal: query.principal, id: query.id, search: query.search, since_ms: query.since, until_ms: query.until }
  const key = JSON.stringify(filter)
  useEffect(() => setPages([null]), [key])
  const before = pages.at(-1)
  const isNewest = pages.length === 1
  const poll = usePoll((signal) => get("/api/audit", { ...filter, count: COUNT, ...(before === null ? { newest: true } : { before }) }, { signal }), isNewest ? SECONDS : 0, [key, before])
  const opened = usePoll(async (signal) => {
    if (query.open === undefined || chosen?.offset === Number(query.open)) return null
    const { records } = await get("/api/audit", { before: Number(query.open) + 1, count: 1 }, { signal })
    return records.find((one) => one.offset === Number(query.open)) ?? null
  }, 0, [query.open])
  const open = (record) => {
    setChosen(record)
    change({ open: record.offset })
  }
  const shown = query.open === undefined ? null : chosen?.offset === Number(query.open) ? chosen : opened.data
  const isFiltered = Object.values(filter).some(Boolean)
  return html`<${Heading} title="Audit">Log-ins, refusals and changes of the table, newest first. The topic is <a href=${link("/topics/:name", { name: "$audit" })}>$audit</a>.</${Heading}>
    <div class="panel"><div class="toolbar">
      <${Search} label="Search" placeholder="Search all texts" value=${query.search ?? ""} onSearch=${(text) => change({ search: text })} />
      <${Field} label="Kind" type="select" value=${query.kind ?? ""} onChange=${(kind) => change({ kind })}
        options=${[{ value: "", title: "all" }, ...Object.entries(TITLES).map(([value, title]) => ({ value, title }))]} />
      <${Button} small aria-expanded=${fields} onClick=${() => setFields(!fields)}>More filters</${Button}>
      ${isFiltered && html`<${Button} small kind="quiet" onClick=${() => go("/audit")}>Without filters</${Button}>`}</div>
      ${fields && html`<div class="form-row">
        <${Field} label="Principal" value=${query.principal ?? ""} onChange=${(text) => change({ principal: text })} />
        <${Field} label="Id of a refusal" value=${query.id ?? ""} onChange=${(text) => change({ id: text })} />
        <${MomentField} label="Since" value=${query.since} onChange=${(ms) => change({ since: ms })} />
        <${MomentField} label="Until" value=${query.until} onChange=${(ms) => change({ until: ms })} /></div>`}
    </div>
    <${Loaded} poll=${poll} what="The audit">${({ records, before: next, looked_ms }) => html`
      <${Table} caption="Records of the audit" rows=${records} rowKey="offset" busy=${poll.loading && poll.stale} columns=${[
        { name: "time_ms", title: "Time", nowrap: true, render: (one) => html`<${Time} ms=${one.time_ms} />
          <div class="narrow-only"><${Kind} record=${one} /> <small class="muted"><bdi>${one.principal}</bdi></small></div>` },
        { name: "kind", title: "Kind", wide: true, render: (one) => html`<${Kind} record=${one} />` },
        { name: "principal", title: "Principal", wide: true, render: (one) => html`<bdi>${one.principal}</bdi>` },
        { name: "source", title: "Source", wide: true, render: (one) => html`<${Source} source=${one.source} />` },
        { name: "action", title: "Action", wide: true, nowrap: true, render: (one) => doneBy(one) || "–" },
        { name: "subject", title: "Subject", grow: true,
          render: (one) => (one.reason && !one.subject ? one.reason : subjectOf(one)) },
        { name: "count", title: "Count", right: true, wide: true,
          render: (one) => html`<${Num} value=${one.count ?? 1} />` },
        { name: "do", title: html`<span class="hidden">Actions</span>`, render: (one) => html`<${Button} small onClick=${() => open(one)} aria-label=${`Open record ${one.offset}`}>Open</${Button}>` },
      ]} empty=${html`<${Empty} title=${isFiltered ? "No record fits the filters." : "The audit is empty."}>${next !== null && looked_ms ? `Records back to ${timeText(looked_ms)} were looked at.`
        : isFiltered ? "" : "While the gate is off only changes of the table are recorded."}</${Empty}>`} />
      <nav class="pager" aria-label="Pages">
        <${Button} small disabled=${isNewest} onClick=${() => setPages([null])}>Newest</${Button}>
        <${Button} small disabled=${isNewest} onClick=${() => setPages(pages.slice(0, -1))}>Newer</${Button}>
        <${Button} small disabled=${next === null} onClick=${() => setPages([...pages, next])}>${records.length === 0 && next !== null ? "Look further back" : "Older"}</${Button}></nav>`}</${Loaded}>
    ${query.open !== undefined && shown === null && opened.data === null && !opened.loading && html`<p class="muted" role="status">Record ${query.open} is not there: retention has removed it.</p>`}
    ${shown && html`<${Record} record=${shown} onClose=${() => change({ open: null })} />`}`
}

export default { Page }
