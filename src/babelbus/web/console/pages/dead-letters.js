// Dead letters: records that groups gave up, why, where they came from; replay and purge.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js"
import { get, lines, path, post } from "../api.js"
import {
  Badge, Button, Bytes, Confirm, Dialog, Empty, Field, Heading, Json, Loaded, Notice, Num, Panel, Stat, Table, Time,
  go, link, numText, toast, useMay, usePoll, useQuery,
} from "../ui.js"

const SECONDS = 3
const COUNT = 50

const pathOf = (topic, action = "") => path`/api/dead-letters/${topic}` + action
const pageOf = (topic) => link("/dead-letters/:topic", { topic })
const keyOf = (letter) => `${letter.record.partition}:${letter.record.offset}`
const count = (number, word) => `${numText(number)} ${word}${number === 1 ? "" : "s"}`
const recordOf = (topic, partition, offset) => link("/browse/:topic", { topic, partition, offset })

// -- the list --------------------------------------------------------------------------------------------------------

const Senders = ({ senders }) => senders.length === 0
  ? html`<span class="muted">none now</span>`
  : senders.slice(0, 5).map((one, number) => html`<span key=${number}>${number > 0 && ", "}<a href=${link("/groups/:topic/:group", { topic: one.topic, group: one.group })}>${one.group}</a>
      <small class="muted"> on ${one.topic}</small></span>`)

const COLUMNS = [
  { name: "topic", title: "Topic", sort: true, render: (one) => html`<a href=${pageOf(one.topic)}>${one.topic}</a>` },
  { name: "waiting", title: "Not replayed", right: true, sort: true },
  { name: "letters", title: "Letters", right: true, sort: true },
  { name: "senders", title: "From groups", grow: true, wide: true,
    render: (one) => html`<${Senders} senders=${one.senders} />` },
]

function List() {
  const poll = usePoll((signal) => get("/api/dead-letters", {}, { signal }), SECONDS)
  return html`<${Heading} title="Dead letters">Records that a group gave up after all their deliveries, or that a member rejected.</${Heading}>
    <${Loaded} poll=${poll} what="The list of dead letters">${({ dead_letters: topics }) => topics.length === 0
      ? html`<${Empty} title="There are no dead letters.">No group has given a record up.</${Empty}>`
      : html`<${Table} caption="Topics of dead letters" columns=${COLUMNS} rows=${topics} rowKey="topic" first=${{ name: "waiting", descending: true }} />`}</${Loaded}>`
}

// -- one topic -------------------------------------------------------------------------------------------------------

/** Return the beginning of a payload, or of a key, as one line; it comes shortened from the server. */
function preview(text, base64, deleted) {
  if (deleted) return html`<em class="muted">no payload: removes its key</em>`
  if (base64 !== undefined) return html`<span class="mono">${base64.slice(0, 80)}</span> <small class="muted">(base64)</small>`
  if (text === "") return html`<em class="muted">empty</em>`
  return html`<span class="mono">${(text ?? "").slice(0, 110)}</span>`
}

function Origin({ origin }) {
  if (!origin) return html`<span class="muted">no dead letter: a client has published it here</span>`
  return html`<a href=${recordOf(origin.topic, origin.partition, origin.offset)}>${origin.topic} <span class="num">${origin.partition}:${origin.offset}</span></a>
    <br /><small class="muted">group </small><a href=${link("/groups/:topic/:group", { topic: origin.topic, group: origin.group })}><small>${origin.group}</small></a>`
}

const publisher = ({ origin }) => (origin.protocol ? `${origin.protocol} ${origin.principal ?? ""}`.trim() : "")

function columns(show) {
  return [
    { name: "offset", title: "Letter", nowrap: true,
      render: (one) => html`<button type="button" class="linklike num" onClick=${() => show(one)}
      aria-label="Show letter ${keyOf(one)}">${keyOf(one)}</button>${one.replayed && html`<br /><${Badge} kind="good">replayed</${Badge}>`}` },
    { name: "reason", title: "Reason", grow: true, render: ({ origin }) => origin && html`<span class="reason">${origin.reason.slice(0, 300)}</span>
      <br /><small class="muted">${origin.attempts === 1 ? "1 delivery" : `${origin.attempts} deliveries`}, <${Time} ms=${origin.time_ms} ago /></small>` },
    { name: "origin", title: "Came from", render: ({ origin }) => html`<${Origin} origin=${origin} />` },
    { name: "publisher", title: "Published by", wide: true, render: ({ record }) => publisher(record) || "–" },
    { name: "payload", title: "Payload", wide: true, grow: true,
      render: ({ record }) => html`${preview(record.payload, record.payload_b64, record.deleted)}
      ${record.clipped && html` <small class="muted">… <${Bytes} value=${record.payload_bytes} /></small>`}` },
  ]
}

/** Return a payload as JSON, undefined if it is none. */
function jsonOf({ payload, clipped }) {
  if (clipped || !/^\s*[[{]/.test(payload ?? "")) return undefined
  try {
    return JSON.parse(payload)
  } catch {
    return undefined
  }
}

function Letter({ topic, letter, onClose }) {
  const { record, origin } = letter
  const value = jsonOf(record)
  return html`<${Dialog} title="Letter ${keyOf(letter)}" wide onClose=${onClose} actions=${html`
      <a class="button" href=${recordOf(topic, record.partition, record.offset)}>Open in Browse</a>
      <${Button} kind="primary" onClick=${onClose}>Close</${Button}>`}>
    ${origin && html`<${Notice} kind="warning" title="Why the group gave it up">${origin.reason}</${Notice}>`}
    <dl class="pairs">
      <dt>Replayed</dt><dd>${letter.replayed ? "yes" : "no"}</dd>
      ${origin && html`<dt>Came from</dt><dd><${Origin} origin=${origin} /></dd>
        <dt>Deliveries</dt><dd>${origin.attempts}</dd>
        <dt>Given up</dt><dd><${Time} ms=${origin.time_ms} precise /></dd>`}
      <dt>Published</dt><dd><${Time} ms=${record.time_ms} precise />${publisher(record) && ` by ${publisher(record)}`}</dd>
      <dt>Key</dt><dd>${record.key === undefined && record.key_b64 === undefined ? "none" : preview(record.key, record.key_b64)}</dd>
      ${record.headers.map(([name, value], number) => html`<dt key=${number}>Header ${name}</dt><dd class="mono">${value ?? html`<em class="muted">no value</em>`}</dd>`)}
    </dl>
    <h3>Payload</h3>
    ${value !== undefined
      ? html`<div class="payload"><${Json} value=${value} /></div>`
      : html`<pre class="payload" tabIndex="0">${record.deleted ? "" : record.payload ?? record.payload_b64}</pre>`}
    ${record.payload_b64 !== undefined && html`<p class="muted">The payload is no text: this is base64.</p>`}
    ${record.clipped && html`<p class="muted">Shortened: the payload has <${Bytes} value=${record.payload_bytes} />. Browse shows the whole payload.</p>`}
    ${record.deleted && html`<p class="muted">The record has no payload: it removes its key.</p>`}
  </${Dialog}>`
}

/** Replays letters and shows how far it is; `body` says which, `total` about how many. */
function Replay({ topic, body, total, onClose }) {
  const [state, setState] = useState({ replayed: 0, failed: 0 })
  const [done, setDone] = useState(null)
  const [error, setError] = useState("")
  const stop = useRef(null)
  useEffect(() => {
    stop.current = new AbortController()
    const read = (line) => {
      if (line.progress) setState(line.progress)
      if (line.done) setDone(line.done)
      if (line.error) setError(line.error)
    }
    lines(pathOf(topic, "/replay"), {}, read, stop.current.signal, { method: "POST", body: { ...body, progress: true } })
      .catch((failure) => setError(failure.name === "AbortError" ? "The replay was stopped. Letters that were replayed are marked." : failure.message))
    return () => stop.current.abort()
  }, [])
  const { replayed, failed } = done ?? state
  const ended = done !== null || error !== ""
  return html`<${Dialog} title="Replay dead letters" onClose=${() => onClose()} actions=${ended
      ? html`<${Button} kind="primary" onClick=${() => onClose()}>Close</${Button}>`
      : html`<${Button} onClick=${() => stop.current.abort()}>Stop</${Button}>`}>
    <p role="status">${ended ? "" : "Replaying … "}${count(replayed, "letter")} replayed${failed > 0 ? `, ${numText(failed)} failed` : ""}${done && `, ${numText(done.waiting)} not replayed are left`}.</p>
    <progress max=${Math.max(total, 1)} value=${ended ? Math.max(total, 1) : Math.min(replayed + failed, total)} aria-label="Letters replayed"></progress>
    ${error && html`<${Notice} kind="error">${error}</${Notice}>`}
    ${done?.failed === 0 && html`<${Notice} kind="good">Every group on the topics of origin gets the records again, behind all newer ones.</${Notice}>`}
    ${done?.failures.length > 0 && html`<h3>Letters that could not be replayed</h3>
      <${Table} caption="Letters that could not be replayed" rows=${done.failures} rowKey=${(one) => `${one.partition}:${one.offset}`} columns=${[
        { name: "place", title: "Letter", nowrap: true,
          render: (one) => `${one.partition}:${one.offset}` }, { name: "reason", title: "Why" }]} />`}
  </${Dialog}>`
}

function One({ topic }) {
  const [query, setQuery] = useQuery()
  const [chosen, setChosen] = useState(new Set())
  const [dialog, setDialog] = useState(null)
  const partition = Number(query.partition) || 0
  const offset = Number(query.offset) || 0
  const waiting = query.all !== "1"
  const place = `${partition} ${offset} ${waiting}`
  useEffect(() => setChosen(new Set()), [topic, place])
  const info = usePoll((signal) => get(pathOf(topic), {}, { signal }), SECONDS, [topic])
  const poll = usePoll((signal) => get(pathOf(topic, `/${partition}`), { shortened: 1, waiting: waiting ? 1 : null, offset, max: COUNT }, { signal }),
    SECONDS, [topic, place])
  const mayConsume = useMay("consume", info.data?.topic)
  const mayManage = useMay("manage", info.data?.topic)
  const reload = () => {
    setChosen(new Set())
    info.reload()
    poll.reload()
  }
  const close = () => {
    setDialog(null)
    reload()
  }
  const places = [...chosen].map((key) => key.split(":").map(Number))
  const actions = info.data && html`
    ${mayConsume !== false && html`<${Button} icon="play" disabled=${!info.data.waiting} onClick=${() => setDialog("replay")}>Replay all …</${Button}>`}
    ${mayManage !== false && html`<${Button} icon="remove" kind="danger" onClick=${() => setDialog("purge")}>Purge …</${Button}>`}`
  const isGone = info.error?.status === 404 && !info.data
  return html`<${Heading} title=${topic} crumbs=${[["Dead letters", "#/dead-letters"]]} actions=${actions} />
    ${isGone
      ? html`<${Empty} title="There are no dead letters here." actions=${html`<a href="#/dead-letters">Go to the list</a>`}>Topic ${topic} has none: perhaps they were purged.</${Empty}>`
      : html`<${Loaded} poll=${info} what="The topic">${(one) => html`<dl class="stats">
          <${Stat} label="Not replayed" kind=${one.waiting ? "warning" : ""}><${Num} value=${one.waiting} /></${Stat}>
          <${Stat} label="Letters" note=${one.partitions > 1 && `in ${one.partitions} partitions`}><${Num} value=${one.letters} /></${Stat}>
        </dl>
        ${one.senders.length > 0 && html`<p>From groups: <${Senders} senders=${one.senders} /></p>`}`}</${Loaded}>
      <${Panel} title="Letters" actions=${html`
          ${info.data?.partitions > 1 && html`<${Field} label="Partition" type="select" value=${String(partition)} onChange=${(next) => setQuery({ partition: next, offset: null })}
            options=${Array.from({ length: info.data.partitions }, (_, number) => String(number))} />`}
          <${Field} label="Only those not replayed" type="checkbox" value=${waiting} onChange=${(next) => setQuery({ all: next ? null : "1", offset: null })} />
          ${mayConsume !== false && html`<${Button} small icon="play" disabled=${chosen.size === 0} onClick=${() => setDialog("some")}>Replay ${chosen.size ? numText(chosen.size) : "the selected"}</${Button}>`}`}>
        <${Loaded} poll=${poll} what="The list of letters">${(page) => html`
          <${Table} caption="Dead letters of ${topic}" columns=${columns(setDialog)} rows=${page.letters} rowKey=${keyOf} selected=${chosen}
            onSelect=${mayConsume === false ? undefined : setChosen}
            empty=${waiting ? "All letters of this partition were replayed." : "There are no letters in this partition."} />
          <nav class="pager" aria-label="Pages">
            ${offset > 0 && html`<${Button} small onClick=${() => history.back()}>Back</${Button}>`}
            <${Button} small disabled=${page.next_offset === null} onClick=${() => setQuery({ offset: page.next_offset }, { replace: false })}>Next</${Button}></nav>`}</${Loaded}>
      </${Panel}>`}
    ${dialog?.record && html`<${Letter} topic=${topic} letter=${dialog} onClose=${() => setDialog(null)} />`}
    ${dialog === "some" && html`<${Replay} topic=${topic} body=${{ places }} total=${places.length} onClose=${close} />`}
    ${dialog === "replay" && html`<${Confirm} title="Replay all dead letters" confirm="Replay ${count(info.data.waiting, "letter")}" kind="primary"
      onClose=${() => setDialog((now) => (now === "replay" ? null : now))} onConfirm=${() => setDialog("all")}>
      Each letter is published again in the topic that it came from, behind all newer records. Every group on that topic gets the record again, also groups that were done with it.</${Confirm}>`}
    ${dialog === "all" && html`<${Replay} topic=${topic} body=${{}} total=${info.data.waiting} onClose=${close} />`}
    ${dialog === "purge" && html`<${Confirm} title="Purge dead letters" confirm="Purge" typed=${info.data.waiting ? topic : undefined} onClose=${() => setDialog(null)}
      lost=${[`${count(info.data.letters, "letter")}, ${numText(info.data.waiting)} of them not replayed.`, "The topic of the letters, and the groups that read it."]}
      onConfirm=${async () => {
        await post(pathOf(topic, "/purge"), { all: true })
        toast(`The dead letters of ${topic} are removed.`)
        go("/dead-letters")
      }}>There is no way back. The next dead letter creates the topic again.</${Confirm}>`}`
}

function Page({ params }) {
  return params.topic === undefined ? html`<${List} />` : html`<${One} topic=${params.topic} />`
}

export default { Page }
