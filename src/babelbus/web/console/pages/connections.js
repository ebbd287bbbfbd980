// The connections of all protocols in one list: who is there, what waits for them, what they read live; close one.

import { html, useRef, useState } from "../vendor/preact-htm.js"
import { del, get, path } from "../api.js"
import { Badge, Button, Bytes, Confirm, Dialog, Duration, Heading, Loaded, Notice, Pager, Rate, Search, Table, Time,
  numText, toast, useMay, usePoll, useQuery } from "../ui.js"

const COUNT = 100
const SECONDS = 2

/** Return the connections with the bytes per second since the last answer. */
function withRates(answer, before, now) {
  const seconds = before.time ? (now - before.time) / 1000 : 0
  const rate = (bytes, old) => (seconds > 0 && typeof bytes === "number" && typeof old === "number" ? Math.max(bytes - old, 0) / seconds : null)
  return answer.connections.map((one) => {
    const old = before.known.get(one.id)
    return { ...one, receiving: rate(one.received, old?.received), sending: rate(one.sent, old?.sent) }
  })
}

function Subscriptions({ connection, onOpen }) {
  const { subscriptions, subscription_count: count } = connection
  if (!count) return html`<span class="muted">none</span>`
  const text = count === 1 ? subscriptions[0].pattern : `${numText(count)} patterns`
  const narrowed = subscriptions.filter((one) => one.narrowed_to).length
  return html`<button type="button" class="linklike" onClick=${onOpen} aria-label="${text}, read by ${connection.id}">${text}</button>
    ${narrowed > 0 && html` <${Badge} kind="warning" title="The table grants a part of what was asked for.">narrowed</${Badge}>`}`
}

function Details({ connection, onClose, onRemove, mayClose }) {
  const { subscriptions, subscription_count: count } = connection
  return html`<${Dialog} title="Connection ${connection.id}" wide onClose=${onClose} actions=${html`
      ${mayClose && html`<${Button} kind="danger" onClick=${onRemove}>Close the connection</${Button}>`}<${Button} onClick=${onClose}>Back</${Button}>`}>
    <dl class="pairs">
      <dt>Principal</dt><dd>${connection.principal ?? "nobody"}</dd>
      <dt>Protocol</dt><dd>${connection.protocol}${connection.encrypted ? ", encrypted" : ", not encrypted"}</dd>
      <dt>Address</dt><dd>${connection.address}${connection.edge && `, through edge ${connection.edge}`}</dd>
      <dt>Since</dt><dd><${Time} ms=${connection.since_ms} /></dd>
      <dt>Received</dt><dd><${Bytes} value=${connection.received} /></dd>
      <dt>Sent</dt><dd><${Bytes} value=${connection.sent} /></dd>
      <dt>Waits to be sent</dt><dd><${Bytes} value=${connection.queue_bytes} /></dd>
    </dl>
    ${count > subscriptions.length && html`<${Notice}>The first ${numText(subscriptions.length)} of ${numText(count)} subscriptions are shown.</${Notice}>`}
    <${Table} caption="Subscriptions" rowKey="pattern" rows=${subscriptions} empty="The connection reads nothing live." columns=${[
      { name: "pattern", title: "Subscribed to", render: (one) => html`<code>${one.pattern}</code>` },
      { name: "narrowed_to", title: "Gets", render: (one) => one.narrowed_to === null ? "all of it"
        : one.narrowed_to.length ? html`<${Badge} kind="warning">narrowed</${Badge}> events of <code>${one.narrowed_to.join(", ")}</code>`
        : html`<${Badge} kind="error">nothing</${Badge}> the table allows no part of it` },
    ]} /></${Dialog}>`
}

function Page() {
  const [query, setQuery] = useQuery()
  const [open, setOpen] = useState(null)
  const [closing, setClosing] = useState(null)
  const last = useRef({ time: 0, known: new Map() })
  const mayClose = useMay("admin", "$server")
  const offset = Number(query.offset) || 0
  const asked = { search: query.search, protocol: query.protocol, offset, count: COUNT }
  const poll = usePoll(async (signal) => {
    const answer = await get("/api/connections", asked, { signal })
    const now = Date.now()
    const connections = withRates(answer, last.current, now)
    last.current = { time: now, known: new Map(answer.connections.map((one) => [one.id, one])) }
    return { ...answer, connections }
  }, SECONDS, [JSON.stringify(asked)])
  const columns = [
    { name: "principal", title: "Principal", sort: true, render: (one) => html`<button type="button" class="linklike" onClick=${() => setOpen(one)}>
      ${one.principal ?? "nobody"}</button>` },
    { name: "protocol", title: "Protocol", sort: true, nowrap: true,
      render: (one) => html`${one.protocol}${one.encrypted && html` <${Badge} kind="good">encrypted</${Badge}>`}` },
    { name: "address", title: "Address", sort: true, wide: true },
    { name: "since_ms", title: "Open for", sort: true, right: true, wide: true,
      render: (one) => html`<span title=${new Date(one.since_ms).toISOString()}><${Duration} ms=${Math.max(Date.now() - one.since_ms, 0)} /></span>` },
    { name: "receiving", title: "Receives", sort: true, right: true, wide: true,
      render: (one) => html`<${Rate} value=${one.receiving} bytes />` },
    { name: "sending", title: "Sends", sort: true, right: true, wide: true,
      render: (one) => html`<${Rate} value=${one.sending} bytes />` },
    { name: "queue_bytes", title: "Waits", sort: true, right: true,
      render: (one) => html`<${Bytes} value=${one.queue_bytes} />` },
    { name: "subscription_count", title: "Subscriptions", sort: true,
      render: (one) => html`<${Subscriptions} connection=${one} onOpen=${() => setOpen(one)} />` },
    { name: "close", title: "", wide: true,
      render: (one) => mayClose && html`<${Button} small kind="danger" aria-label="Close ${one.id}" onClick=${() => setClosing(one)}>Close</${Button}>` },
  ]
  return html`<${Heading} title="Connections">The client is nobody while it has not proved who it is. Rates are those of the server.</${Heading}>
    <${Loaded} poll=${poll} what="The list of connections">${({ connections, total, protocols }) => html`
      <div class="toolbar">
        <${Search} label="Search principals and addresses" value=${query.search ?? ""} onSearch=${(search) => setQuery({ search, offset: null })} />
        <div class="chips" role="group" aria-label="Protocol">
          ${["", ...Object.keys(protocols)].map((name) => html`<button key=${name} type="button" class="chip" aria-pressed=${(query.protocol ?? "") === name}
            onClick=${() => setQuery({ protocol: name || null, offset: null })}>${name || "all"}
            <span class="num">${numText(name ? protocols[name] : Object.values(protocols).reduce((sum, one) => sum + one, 0))}</span></button>`)}
        </div>
      </div>
      <${Table} caption="Connections" rows=${connections} columns=${columns}
        empty=${query.search || query.protocol ? "No connection fits the filter." : "Nobody is connected over a protocol of the bus. Browsers of the console are not listed."} />
      <${Pager} offset=${offset} count=${COUNT} total=${total} what="connections" onGo=${(next) => setQuery({ offset: next || null }, { replace: false })} />
    `}</${Loaded}>
    ${open && html`<${Details} connection=${poll.data?.connections.find((one) => one.id === open.id) ?? open} mayClose=${mayClose}
      onClose=${() => setOpen(null)} onRemove=${() => { setClosing(open); setOpen(null) }} />`}
    ${closing && html`<${Confirm} title="Close the connection of ${closing.principal ?? closing.address}?" confirm="Close the connection" onClose=${() => setClosing(null)}
      lost=${[`What waits to be sent (${numText(closing.queue_bytes)} bytes)`, "Live events until the client comes again; records of its groups are delivered to other members."]}
      onConfirm=${async () => {
        await del(path`/api/connections/${closing.id}`)
        toast("The connection is closed.")
        poll.reload()
      }}>Most clients connect again by themselves.</${Confirm}>`}`
}

export default { Page }
