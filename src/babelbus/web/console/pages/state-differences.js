// What differs in the state between two moments: keys that were added, changed and removed.

import { html, useEffect, useState } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import { Badge, Button, Dialog, Empty, Form, Field, Loaded, Num, Table, Time, link, usePoll, useQuery } from "../ui.js"
import { Preview, Source, ValueDiff } from "./state-values.js"
import { PastFailure } from "./state-entry.js"
import { Moment } from "./state-moments.js"

const COUNT = 100
const HOUR_MS = 3_600_000
const KINDS = { added: "good", changed: "info", removed: "warning" }

/** The differences of a pattern; the address keeps pattern and moments. */
export function Differences({ ends }) {
  const [query, change] = useQuery()
  const pattern = query.pattern ?? "#"
  const [start] = useState(() => Math.max(ends.earliest.time_ms ?? 0, (ends.latest.time_ms ?? 0) - HOUR_MS))
  const first = query.from ? Number(query.from) : start
  const second = query.to ? Number(query.to) : null
  const [pages, setPages] = useState([null])
  const [row, setRow] = useState(null)
  useEffect(() => setPages([null]), [pattern, first, second])
  const poll = usePoll(
    (signal) => get("/api/state/differences", { pattern, from_time: first, to_time: second, count: COUNT, after: pages.at(-1) }, { signal, timeout: 120_000 }),
    0, [pattern, first, second, pages.length],
  )
  const setFrom = (ms) => change({ from: ms })
  const setTo = (ms) => change({ to: ms })
  const { data } = poll
  return html`
    <div class="panel">
      <${Form} submit="Compare" onSubmit=${(values) => change({ pattern: values.pattern || "#" })} class="state-pattern">
        <${Field} label="Keys" name="pattern" value=${pattern} key=${pattern} help="A key, or a pattern: ? is one part, # at the end everything below." /></${Form}>
      <${Moment} label="From" value=${first} ends=${ends} onChange=${setFrom} now=${false} />
      <${Moment} label="To" value=${second} ends=${ends} onChange=${setTo} />
    </div>
    ${poll.error && data === undefined ? html`<${PastFailure} error=${poll.error} setAt=${setFrom} reload=${poll.reload} />` : html`
    <${Loaded} poll=${poll} what="The comparison">${({ rows, counts, after }) => html`
      <p role="status" class="toolbar">${Object.entries(counts).map(([kind, count]) => html`<span key=${kind}><${Badge} kind=${count ? KINDS[kind] : "plain"}>${kind}</${Badge}> <${Num} value=${count} /></span>`)}
        ${poll.loading && html`<span class="muted">comparing …</span>`}</p>
      <${Table} caption="Keys that differ" rows=${rows} rowKey="key" busy=${poll.loading} columns=${[
        { name: "key", title: "Key",
          render: (one) => html`<a class="state-key" href=${link("/state", { key: one.key })}><bdi>${one.key}</bdi></a>` },
        { name: "difference", title: "Is",
          render: (one) => html`<${Badge} kind=${KINDS[one.difference]}>${one.difference}</${Badge}>` },
        { name: "before", title: "Before", wide: true,
          render: (one) => html`<${Preview} view=${one.before?.value} />` },
        { name: "after", title: "After", render: (one) => html`<${Preview} view=${one.after?.value} />` },
        { name: "when", title: "Last change", wide: true,
          render: (one) => (one.after ? html`<${Time} ms=${one.after.timestamp} /> <${Source} source=${one.after.source} />` : "–") },
        { name: "do", title: html`<span class="hidden">Actions</span>`, render: (one) => html`<${Button} small onClick=${() => setRow(one)} aria-label=${`Compare the values of ${one.key}`}>Compare</${Button}>` },
      ]} empty=${html`<${Empty} title="Nothing differs.">Every key of the pattern has the same value at both moments.</${Empty}>`} />
      ${(after !== null || pages.length > 1) && html`<nav class="pager" aria-label="Pages">
        <${Button} small disabled=${pages.length === 1} onClick=${() => setPages(pages.slice(0, -1))}>Back</${Button}>
        <${Button} small disabled=${after === null} onClick=${() => setPages([...pages, after])}>Next</${Button}></nav>`}`}</${Loaded}>`}
    ${row && html`<${Dialog} wide title=${row.key} onClose=${() => setRow(null)} actions=${html`<${Button} onClick=${() => setRow(null)}>Close</${Button}>`}>
      <${ValueDiff} before=${row.before?.value} after=${row.after?.value} /></${Dialog}>`}`
}
