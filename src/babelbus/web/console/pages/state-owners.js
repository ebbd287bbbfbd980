// Locks and wills of all clients, and who their owners are.

import { html, useState } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import { Badge, Empty, Loaded, Num, Search, Table, link, numText, usePoll } from "../ui.js"
import { IS_ID, Preview } from "./state-values.js"

/** The client that holds a lock or has left a will; Wörterbuch's clients are known by an id. */
export function Owner({ owner, principal }) {
  const isId = IS_ID.test(owner)
  const address = isId ? link("/connections", { search: owner }) : link("/connections", { search: principal || owner.replace(/#\d+$/, "").replace(/^[^:/]*[:/]/, "") })
  return html`<a href=${address} title=${owner}>${isId ? html`<${Badge}>worterbuch</${Badge}> <span class="mono">${owner.slice(0, 8)}</span>` : html`<bdi>${owner}</bdi>`}</a>${principal && html` <span class="muted">(${principal})</span>`}`
}

const keyAddress = (key) => link("/state", { key })

/** All locks that somebody holds. */
export function Locks() {
  const [search, setSearch] = useState("")
  const poll = usePoll((signal) => get("/api/state/locks", { search, count: 500 }, { signal }), 2, [search])
  return html`<div class="toolbar"><${Search} label="Search locks" value=${search} onSearch=${setSearch} /></div>
    <${Loaded} poll=${poll} what="The list of locks">${({ locks, total }) => html`
      ${locks.length < total && html`<p class="muted">The first ${numText(locks.length)} of ${numText(total)} locks are shown: search for others.</p>`}
      <${Table} caption="Locks" rows=${locks} rowKey="key" columns=${[
        { name: "key", title: "Key", sort: true, grow: true,
          render: (one) => html`<a href=${keyAddress(one.key)}><bdi>${one.key}</bdi></a>` },
        { name: "holder", title: "Held by", sort: true, render: (one) => html`<${Owner} owner=${one.holder} />` },
        { name: "waiting", title: "Waiting", right: true, sort: true, value: (one) => one.waiting.length,
          render: (one) => html`<${Num} value=${one.waiting.length} />` },
        { name: "next", title: "Next", wide: true,
          render: (one) => (one.waiting.length ? html`<${Owner} owner=${one.waiting[0]} />` : "–") },
      ]} empty=${html`<${Empty} title="Nobody holds a lock.">A lock is held by a client of Wörterbuch or jebp, as long as it is connected.</${Empty}>`} />`}</${Loaded}>`
}

/** What is deleted and set when clients are gone. */
export function Wills() {
  const poll = usePoll((signal) => get("/api/state/wills", { count: 200 }, { signal }), 3)
  return html`<${Loaded} poll=${poll} what="The list of wills">${({ wills, total }) => html`
    ${wills.length < total && html`<p class="muted">The first ${numText(wills.length)} of ${numText(total)} wills are shown.</p>`}
    <${Table} caption="Wills" rows=${wills} rowKey="owner" columns=${[
      { name: "owner", title: "When this client is gone",
        render: (one) => html`<${Owner} owner=${one.owner} principal=${one.principal} />` },
      { name: "grave_goods", title: "These keys are deleted",
        render: (one) => (one.grave_goods.length === 0 ? "–" : html`<ul class="state-list">${one.grave_goods.map((pattern) => html`<li key=${pattern}><code>${pattern}</code></li>`)}</ul>`) },
      { name: "last_will", title: "These values are set", grow: true, render: (one) => (one.last_will.length === 0 ? "–" : html`<ul class="state-list">
        ${one.last_will.map((value) => html`<li key=${value.key}><a href=${keyAddress(value.key)}><bdi>${value.key}</bdi></a> = <${Preview} view=${value.value} /></li>`)}
        ${one.more > 0 && html`<li class="muted">and ${numText(one.more)} more</li>`}</ul>`) },
    ]} empty=${html`<${Empty} title="There are no wills.">A client may leave keys to delete (grave goods) and values to set (last will) for when its connection ends.</${Empty}>`} />`}</${Loaded}>`
}
