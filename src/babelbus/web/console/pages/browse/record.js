// One record: its text, its JSON, its bytes, its headers, and what the clients of each protocol get.

import { html, useEffect, useState } from "../../vendor/preact-htm.js"
import { get, path } from "../../api.js"
import {
  Button, Bytes, Dialog, Empty, Icon, Json, Loaded, Notice, Table, Tabs, Time, copyText, link, usePoll,
} from "../../ui.js"
import { download } from "./transfer.js"
import { bytesOf, hexDump, jsonOf, keyText, originText, payloadBytes } from "./shown.js"

const PROTOCOLS = { jebp: "jebp", zbus: "zbus", worterbuch: "Wörterbuch", sbus: "sbus", eventmesh: "EventMesh" }
const WHAT = {
  jebp: "The batch of an answer to a fetch, as bytes: the place, and the record in its stored form.",
  zbus: "The frame of a delivery to a channel.",
  worterbuch: "The message to a client that subscribed to the subject.",
  sbus: "The packet to a client that subscribed to the subject.",
  eventmesh: "The body of the frame to a subscriber over TCP.",
}
const BIG_NUMBER = /\d{16,}/

/** A record in a dialog; `place` is partition:offset. */
export function RecordDialog({ topic, place, onClose, onMove, onNearest, mayPublish, onDialog }) {
  const [partition, offset] = place.split(":").map(Number)
  const isPlace = Number.isSafeInteger(partition) && Number.isSafeInteger(offset) && offset >= 0
  const poll = usePoll((signal) => get(path`/api/topics/${topic}/records/${partition}/${offset}`, {}, { signal }), 0, [topic, place])
  const data = isPlace && poll.data?.record.offset === offset && poll.data.record.partition === partition ? poll.data : undefined
  const record = data?.record
  const move = (step) => onMove(`${partition}:${offset + step}`)
  const file = path`/api/topics/${topic}/records/${partition}/${offset}/payload`
  const actions = html`
    <${Button} icon="left" aria-label="The record before" disabled=${!isPlace || offset <= (data?.first_offset ?? 0)} onClick=${() => move(-1)} />
    <${Button} icon="right" aria-label="The record after" disabled=${!data || offset + 1 >= data.end_offset} onClick=${() => move(1)} />
    ${record && html`
      <${Button} icon="download" onClick=${() => download(file)}>Payload</${Button}>
      <${Button} icon="copy" onClick=${() => onDialog({ kind: "copy", record })}>Copy to …</${Button}>
      <${Button} icon="add" disabled=${!mayPublish || record.clipped || record.headers_bytes > 0}
        title=${record.clipped ? "The record is larger than a page can hold: copy it to its own topic instead." : undefined}
        onClick=${() => onDialog({ kind: "publish", record })}>Publish again …</${Button}>`}
    ${isPlace && !record && poll.error?.status === 404 && html`
      <${Button} onClick=${() => onNearest({ partition, offset })}>Show the nearest records</${Button}>`}
    <${Button} kind="primary" onClick=${onClose}>Close</${Button}>`
  return html`<${Dialog} wide title="Record ${place}" onClose=${onClose} actions=${actions}>
    ${isPlace ? html`<${Loaded} poll=${data ? poll : { ...poll, data: undefined }} what="The record">${({ views }) => html`<${Whole} key=${place} record=${record} views=${views} topic=${topic} />`}</${Loaded}>`
      : html`<${Notice} kind="warning">There is no such place: it is a partition and an offset, such as 0:17.</${Notice}>`}
  </${Dialog}>`
}

function Whole({ record, views, topic }) {
  const value = record.clipped ? undefined : jsonOf(record.payload)
  const tabs = [
    { name: "text", title: "Text" },
    ...(value === undefined ? [] : [{ name: "json", title: "JSON" }]),
    { name: "hex", title: "Hex" },
    { name: "headers", title: "Headers", count: record.headers.length },
    { name: "views", title: "As other protocols see it" },
  ]
  const [tab, setTab] = useState(value !== undefined && typeof value === "object" ? "json" : record.payload_b64 === undefined ? "text" : "hex")
  useEffect(() => {
    if (!tabs.some((one) => one.name === tab)) setTab("text")
  })
  const address = `${location.origin}/${link("/browse/:topic", { topic, partition: record.partition, offset: record.offset, open: `${record.partition}:${record.offset}` })}`
  return html`<div class="stack">
    <dl class="pairs">
      <dt>Subject</dt><dd>${record.subject}</dd>
      <dt>Key</dt><dd class="mono">${keyText(record)}${record.key_bytes > 0 && html` (<${Bytes} value=${record.key_bytes} />)`}</dd>
      <dt>Time</dt><dd><${Time} ms=${record.time_ms} precise /> (<${Time} ms=${record.time_ms} ago />)</dd>
      <dt>Published by</dt><dd>${record.origin.protocol ? html`${originText(record.origin)}${record.origin.principal && html` <span class="muted">${record.origin.source}</span>`}`
        : "The record does not say: it came in the stored form over jebp, or the server made it."}</dd>
      <dt>Payload</dt><dd>${record.deleted ? "none: this record removes its key" : html`<${Bytes} value=${record.payload_bytes} />`}
        ${record.clipped && html` <span class="muted">(only the beginning is shown; download it to see all)</span>`}</dd>
    </dl>
    <p><button type="button" class="linklike" onClick=${() => copyText(address, "The address")}><${Icon} name="copy" /> Copy the address of this record</button></p>
    <${Tabs} tabs=${tabs} value=${tab} onChange=${setTab} label="The record as" />
    <div role="tabpanel" aria-label=${tabs.find((one) => one.name === tab)?.title} tabIndex="0" class="record-panel">
      ${tab === "text" && html`<${Text} record=${record} />`}
      ${tab === "json" && html`${BIG_NUMBER.test(record.payload) && html`<p class="muted">Numbers with more than 15 digits may be rounded here; the text is exact.</p>`}<${Json} value=${value} />`}
      ${tab === "hex" && html`<${Hex} bytes=${payloadBytes(record)} total=${record.payload_bytes} />`}
      ${tab === "headers" && html`<${Headers} record=${record} />`}
      ${tab === "views" && html`<${Views} views=${views} />`}
    </div>
  </div>`
}

function Text({ record }) {
  if (record.deleted) return html`<${Empty} title="There is no payload.">This record removes its key.</${Empty}>`
  if (record.payload_b64 !== undefined) return html`<${Notice}>The payload is no text (UTF-8). Look at its bytes.</${Notice}>`
  if (record.payload === "") return html`<${Empty} title="The payload is empty." />`
  return html`<pre class="mono wrap">${record.payload}</pre>
    ${record.clipped && html`<p class="muted">These are the first <${Bytes} value=${new TextEncoder().encode(record.payload).length} /> of <${Bytes} value=${record.payload_bytes} />.</p>`}`
}

function Hex({ bytes, total }) {
  if (total === 0) return html`<${Empty} title="There are no bytes." />`
  const { text, count } = hexDump(bytes)
  return html`<pre class="mono" tabIndex="0" aria-label="Bytes in hex">${text}</pre>
    ${count < total && html`<p class="muted">These are the first ${count} of ${total} bytes.</p>`}`
}

function Headers({ record }) {
  const rows = record.headers.map(([name, value, about], number) => ({ number, name, value, about }))
  return html`${record.headers_bytes > 0 && html`<${Notice}>The headers have <${Bytes} value=${record.headers_bytes} /> together, so that some are shortened.</${Notice}>`}
    <${Table} caption="Headers" rows=${rows} rowKey="number" empty="The record has no header." columns=${[
      { name: "name", title: "Name", render: (one) => html`<span class="mono">${one.name}</span>` },
      { name: "value", title: "Value", grow: true,
        render: ({ value, about }) => html`${value === null ? html`<span class="muted">none</span>` : html`<span class="mono">${value}</span>`}
        ${about?.base64 && html` <span class="muted">(base64)</span>`}${about?.bytes && html` <span class="muted">(shortened; <${Bytes} value=${about.bytes} />)</span>`}` },
    ]} />`
}

function Views({ views }) {
  const names = Object.keys(PROTOCOLS).filter((name) => views[name])
  const [name, setName] = useState(names[0])
  const view = views[name]
  if (!view) return html`<${Empty} title="There are no views of this record." />`
  const value = jsonOf(view.text)
  return html`<div class="stack">
    <${Tabs} tabs=${names.map((one) => ({ name: one, title: PROTOCOLS[one] }))} value=${name} onChange=${setName} label="Protocol" />
    <p class="muted">${WHAT[name]}${view.bytes > 0 && html` <${Bytes} value=${view.bytes} />.`}</p>
    ${view.note ? html`<${Notice}>${view.note}</${Notice}>`
      : view.b64 !== undefined ? html`<${Hex} bytes=${bytesOf(view.b64)} total=${view.bytes} />`
      : html`${value !== undefined && html`<${Json} value=${value} open=${3} />`}<details open=${value === undefined}><summary>On the wire</summary><pre class="mono wrap">${view.text}</pre></details>`}
    ${view.clipped && html`<p class="muted">Only the beginning is shown.</p>`}
  </div>`
}
