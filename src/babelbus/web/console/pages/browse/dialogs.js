// Dialogs of the page: publish a record, copy records to a topic, export them to a file.

import { html, useEffect, useRef, useState } from "../../vendor/preact-htm.js"
import { ApiError, get, lines, path, post } from "../../api.js"
import { Bytes, Dialog, Field, Form, Notice, Num, toast } from "../../ui.js"
import { download } from "./transfer.js"

const EXPORT_COUNT = 10_000
const SERVER_HEADERS = new Set(["ce_source", "ce_subject"])

function headerLines(record) {
  return (record?.headers ?? [])
    .filter(([name, value, about]) => !SERVER_HEADERS.has(name) && value !== null && !about)
    .map(([name, value]) => `${name}: ${value}`)
    .join("\n")
}

function readHeaders(text) {
  return text.split("\n").filter((line) => line.trim()).map((line) => {
    const at = line.indexOf(":")
    if (at < 1) throw new ApiError(0, `A header is written as "name: value", not ${JSON.stringify(line.slice(0, 40))}.`)
    return [line.slice(0, at).trim(), line.slice(at + 1).trim()]
  })
}

const partitionOptions = (partitions) => [
  { value: "", title: "chosen by the key" },
  ...Array.from({ length: Math.min(partitions, 1000) }, (_, number) => ({ value: number, title: number })),
]

/** Publish a record; `record` fills the fields. */
export function PublishDialog({ topic, partitions, record, onClose }) {
  const lost = (record?.headers ?? []).some(([name, value, about]) => !SERVER_HEADERS.has(name) && (value === null || about))
  const isBytes = record?.payload_b64 !== undefined
  const send = async (values) => {
    const body = { subject: values.subject.trim(), headers: readHeaders(values.headers) }
    if (values.key !== "") body[values.key_base64 ? "key_b64" : "key"] = values.key
    if (values.removes) body.payload = null
    else body[values.base64 ? "payload_b64" : "payload"] = values.payload
    if (values.partition !== undefined && values.partition !== "") body.partition = Number(values.partition)
    const place = await post(path`/api/topics/${topic}/records`, body)
    toast(`Published to partition ${place.partition} at offset ${place.offset}.`)
    onClose()
  }
  return html`<${Dialog} title="Publish to ${topic}" onClose=${onClose} wide>
    <${Form} onSubmit=${send} submit="Publish" onCancel=${onClose}>
      ${lost && html`<${Notice} kind="warning">Headers that are no text, or have no value, are left out. A copy keeps them.</${Notice}>`}
      <div class="form-row">
        <${Field} label="Key" name="key" value=${record?.key ?? record?.key_b64 ?? ""} help="Empty for a record without a key." />
        <${Field} label="Subject" name="subject" value=${record?.subject ?? topic} help="The name of the topic, or below it." />
        ${partitions > 1 && html`<${Field} label="Partition" name="partition" type="select" value="" options=${partitionOptions(partitions)} />`}
      </div>
      <${Field} label="Payload" name="payload" type="textarea" rows="10" value=${isBytes ? record.payload_b64 : record?.payload ?? ""} />
      <div class="form-row">
        <${Field} label="The payload is base64" name="base64" type="checkbox" value=${isBytes} />
        <${Field} label="The key is base64" name="key_base64" type="checkbox" value=${record?.key_b64 !== undefined} />
        <${Field} label="No payload: remove the key" name="removes" type="checkbox" value=${record?.deleted ?? false} />
      </div>
      <${Field} label="Headers" name="headers" type="textarea" rows="3" value=${headerLines(record)} help="One a line: name: value" />
    </${Form}>
  </${Dialog}>`
}

/** Copy one record, or those of a range, to a topic. */
export function CopyDialog({ topic, partitions, record, query, onClose }) {
  const [line, setLine] = useState(null)
  const control = useRef(null)
  const [names, setNames] = useState([])
  useEffect(() => {
    get("/api/topics", { count: 200 }).then(({ topics }) => setNames(topics.map((one) => one.name)), () => setNames([]))
    return () => control.current?.abort()
  }, [])
  const send = async (values) => {
    const body = { to: values.to.trim(), partition: record?.partition ?? Number(values.partition ?? 0) }
    if (record) body.offsets = [record.offset]
    else {
      body.from = values.from ?? 0
      if (values.end !== null) body.end = values.end
    }
    control.current = new AbortController()
    let last = null
    const take = (next) => {
      last = next
      setLine(next)
    }
    await lines(path`/api/topics/${topic}/copy`, {}, take, control.current.signal, { method: "POST", body })
    if (!last?.done) throw new ApiError(0, last?.error ?? "The copy broke off.")
    toast(`${last.copied} ${last.copied === 1 ? "record was" : "records were"} copied to ${body.to}.`)
    onClose()
  }
  return html`<${Dialog} title=${record ? `Copy record ${record.partition}:${record.offset}` : `Copy records of ${topic}`} onClose=${onClose}>
    <${Form} onSubmit=${send} submit="Copy" onCancel=${onClose}>
      <${Field} label="To the topic" name="to" value=${record ? topic : ""} required list="copy-topics" help=${record ? "The same topic publishes the record again." : "Subjects below the topic stay the same below the other one."} />
      <datalist id="copy-topics">${names.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
      ${!record && html`<div class="form-row">
        ${partitions > 1 && html`<${Field} label="Partition" name="partition" type="select" value=${query.partition ?? 0} options=${partitionOptions(partitions).slice(1)} />`}
        <${Field} label="From offset" name="from" type="number" min="0" value=${query.offset ?? 0} required />
        <${Field} label="Up to offset" name="end" type="number" min="0" value="" help="Not included; empty for the end." />
      </div>`}
      <div role="status">${line && html`<p><${Num} value=${line.copied} /> copied, offset <${Num} value=${line.next_offset} /> of <${Num} value=${line.end_offset} />.</p>
        <progress max=${line.end_offset} value=${line.next_offset} aria-label="Progress of the copy" />`}</div>
    </${Form}>
  </${Dialog}>`
}

/** Export records to a file that the browser saves. */
export function ExportDialog({ topic, partitions, query, onClose }) {
  const [size, setSize] = useState(0)
  const control = useRef(null)
  useEffect(() => () => control.current?.abort(), [])
  const send = async (values) => {
    control.current = new AbortController()
    const range = { partition: values.partition, offset: values.offset, end: values.end, count: values.count, time_ms: query.time }
    const bytes = await download(path`/api/topics/${topic}/export`, { format: values.format, ...range }, setSize, control.current.signal)
    toast(bytes === 0 ? "There was no record to export." : "The file is saved.")
    onClose()
  }
  return html`<${Dialog} title="Export records of ${topic}" onClose=${onClose}>
    <${Form} onSubmit=${send} submit="Export" onCancel=${onClose}>
      <${Field} label="Format" name="format" type="select" value="jsonl" options=${[{ value: "jsonl", title: "JSON lines" }, { value: "csv", title: "CSV" }]}
        help="In CSV an apostrophe stands before what a spreadsheet would take for a formula." />
      <div class="form-row">
        ${partitions > 1 && html`<${Field} label="Partition" name="partition" type="select" value=${query.partition ?? ""} options=${[{ value: "", title: "all" }, ...partitionOptions(partitions).slice(1)]} />`}
        ${query.time === undefined && html`<${Field} label="From offset" name="offset" type="number" min="0" value=${query.offset ?? 0} />`}
        <${Field} label="Up to offset" name="end" type="number" min="0" value="" help="Not included; empty for the end." />
        <${Field} label="Records at most" name="count" type="number" min="1" max="1000000" value=${EXPORT_COUNT} required />
      </div>
      <p role="status" class="muted">${size > 0 && html`<${Bytes} value=${size} /> have come.`}</p>
    </${Form}>
  </${Dialog}>`
}
