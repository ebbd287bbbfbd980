// The records of a topic: by offset, by time, live, or those that match a filter.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js"
import { events, get, lines, path } from "../api.js"
import {
  Badge, Button, Bytes, Empty, Failure, Field, Heading, Icon, Loaded, Notice, Num, Panel, Search, Table, Time, link,
  localText, useMay, usePoll, usePref, useQuery,
} from "../ui.js"
import { CopyDialog, ExportDialog, PublishDialog } from "./browse/dialogs.js"
import { FilterBox, SearchProgress, useSearch } from "./browse/filter.js"
import { RecordDialog } from "./browse/record.js"
import { keyText, originText, previewOf, short } from "./browse/shown.js"

const COUNT = 50
const HOUR_MS = 3_600_000
const LIVE_ROWS = 200
const AGAIN_MS = 2_000
const TOPICS = 50

/** Return the place of a record as the page writes it: partition and offset. */
const placeOf = (record) => `${record.partition}:${record.offset}`

function Topics() {
  const [query, setQuery] = useQuery()
  const poll = usePoll((signal) => get("/api/topics", { search: query.search, count: TOPICS }, { signal }), 0, [query.search])
  return html`<${Heading} title="Browse">Choose the topic whose records you want to see.</${Heading}>
    <div class="toolbar"><${Search} label="Search topics" value=${query.search} onSearch=${(search) => setQuery({ search })} /></div>
    <${Loaded} poll=${poll} what="The list of topics">${({ topics, total = topics.length }) => html`
      <${Table} caption="Topics" rows=${topics} rowKey="name" empty=${query.search ? "No topic has this text in its name." : "There is no topic yet."} columns=${[
        { name: "name", title: "Topic",
          render: (one) => html`<a href=${link("/browse/:topic", { topic: one.name })}>${one.name}</a>` },
        { name: "records", title: "Records", right: true, render: (one) => html`<${Num} value=${countOf(one)} />` },
        { name: "partitions", title: "Partitions", right: true, wide: true,
          render: (one) => html`<${Num} value=${one.partitions.length} />` },
        { name: "bytes", title: "Size", right: true, wide: true,
          render: (one) => html`<${Bytes} value=${one.partitions.reduce((all, part) => all + part.bytes, 0)} />` },
      ]} />
      ${total > topics.length && html`<p class="muted">These are ${topics.length} of ${total} topics. Search for the others.</p>`}`}</${Loaded}>`
}

const countOf = (topic) => topic.partitions.reduce((all, part) => all + part.high_watermark - part.first_offset, 0)

function columnsOf(open, hasPartitions) {
  return [
    { name: "offset", title: hasPartitions ? "Place" : "Offset", right: true, render: (one) => html`<button type="button"
      class="linklike num" aria-label="Open the record at offset ${one.offset} of partition ${one.partition}" onClick=${() => open(one)}>
      ${hasPartitions ? placeOf(one) : one.offset}</button>` },
    { name: "time_ms", title: "Time", nowrap: true, wide: true,
      render: (one) => html`<${Time} ms=${one.time_ms} precise />` },
    { name: "key", title: "Key", nowrap: true,
      render: (one) => html`<span class="mono" title=${keyText(one)}>${short(keyText(one))}</span>` },
    { name: "subject", title: "Subject", wide: true, nowrap: true,
      render: (one) => html`<span title=${one.subject}>${short(one.subject)}</span>` },
    { name: "origin", title: "From", wide: true, nowrap: true,
      render: (one) => html`<span title=${one.origin.source}>${short(originText(one.origin))}</span>` },
    { name: "payload", title: "Payload", grow: true, render: (one) => html`<${Preview} record=${one} />` },
    { name: "payload_bytes", title: "Size", right: true, wide: true,
      render: (one) => html`<${Bytes} value=${one.payload_bytes} />` },
  ]
}

function Preview({ record }) {
  if (record.deleted) return html`<${Badge} title="This record removes its key.">removes the key</${Badge}>`
  const { text, note } = previewOf(record)
  return html`<div class="preview mono">${text}</div>${note && html`<${Badge}>${note}</${Badge}>`}`
}

function Records({ rows, topic, open, hasPartitions, empty, chosen, busy }) {
  return html`<${Table} caption="Records of ${topic}" rows=${rows} rowKey=${placeOf} columns=${columnsOf(open, hasPartitions)} busy=${busy}
    rowClass=${(row) => (placeOf(row) === chosen ? "chosen" : "")}
    empty=${html`<${Empty} title=${empty}>${null}</${Empty}>`} />`
}

/** The controls for where the page begins. */
function Start({ query, partitions, onChange, live }) {
  const [from, setFrom] = useState(query.time ? "time" : query.offset !== undefined ? "offset" : "end")
  const offset = useRef(null)
  const moment = useRef(null)
  const [zone] = usePref("zone")
  useEffect(() => setFrom(query.time ? "time" : query.offset !== undefined ? "offset" : "end"), [query.time, query.offset])
  const show = (event) => {
    event.preventDefault()
    const start = { offset: null, before: null, time: null, order: null, from: null }
    if (from === "offset" && offset.current.value !== "") start.offset = offset.current.value
    if (from === "time" && moment.current.value) start.time = Date.parse(`${moment.current.value}${zone === "utc" ? "Z" : ""}`)
    onChange(start)
  }
  return html`<form class="toolbar" onSubmit=${show}>
    ${partitions > 1 && html`<${Field} label="Partition" type="select" value=${query.partition ?? ""} disabled=${live}
      onChange=${(value) => onChange({ partition: value === "" ? null : value, offset: null, before: null, from: null, order: null })}
      options=${[{ value: "", title: "all" }, ...Array.from({ length: Math.min(partitions, 1000) }, (_, number) => ({ value: number, title: number }))]} />`}
    <${Field} label="Begin at" type="select" value=${from} disabled=${live} onChange=${setFrom} options=${[
      { value: "end", title: query.filter ? "the beginning" : "the newest" }, { value: "offset", title: "an offset" }, { value: "time", title: "a time" }]} />
    ${from === "offset" && html`<label class="hidden" for="browse-offset">Offset</label><input id="browse-offset" class="short" type="number" min="0" step="1"
      ref=${offset} defaultValue=${query.offset ?? 0} required />`}
    ${from === "time" && html`<label class="hidden" for="browse-time">Time (${zone === "utc" ? "UTC" : "local"})</label><input id="browse-time" class="short" type="datetime-local" step="1"
      ref=${moment} defaultValue=${localText(Number(query.time) || Date.now() - HOUR_MS, zone)} key=${zone} required />`}
    <${Button} type="submit" disabled=${live}>Show</${Button}>
  </form>`
}

/** One page of records by offset or time. */
function Stored({ topic, query, setQuery, open, chosen, turn: changes }) {
  const { partition, offset, before, time } = query
  const isMerged = partition === undefined && offset === undefined && before === undefined && time === undefined
  const poll = usePoll((signal) => get(path`/api/topics/${topic}/records`, {
    partition, offset, before, time_ms: time, last: isMerged || undefined, count: COUNT,
  }, { signal }), 0, [topic, partition, offset, before, time, changes])
  return html`<${Loaded} poll=${poll} what="The records">${(page) => {
    const isUp = (query.order ?? (offset !== undefined || time !== undefined ? "up" : "down")) === "up"
    const rows = isUp ? page.records : [...page.records].reverse()
    const turn = (changes) => setQuery({ offset: null, before: null, time: null, partition: page.partition, order: isUp ? "up" : "down", ...changes }, { replace: false })
    const isMany = page.partition === null
    return html`<div class="stack">
      ${page.notes.map((one) => html`<${Notice} key=${one}>${one}</${Notice}>`)}
      <${Records} rows=${rows} topic=${topic} open=${open} chosen=${chosen} hasPartitions=${page.partitions > 1} busy=${poll.loading}
        empty=${page.end_offset === page.first_offset ? "There is no record here now." : "There is no record at this place."} />
      <nav class="pager" aria-label="Pages">
        <span role="status">${isMany
          ? html`The newest records of ${page.partitions} partitions. Choose a partition to page.`
          : html`Partition ${page.partition} has the offsets from <${Num} value=${page.first_offset} /> up to <${Num} value=${page.end_offset} />, without that one.`}</span>
        <${Button} small icon="reload" onClick=${poll.reload}>Again</${Button}>
        ${!isMany && html`
          <${Button} small disabled=${page.previous_offset === null} onClick=${() => turn({ offset: page.first_offset, order: "up" })}>Oldest</${Button}>
          <${Button} small disabled=${page.previous_offset === null} onClick=${() => turn({ before: page.previous_offset })}><${Icon} name="left" />Older</${Button}>
          <${Button} small disabled=${page.next_offset >= page.end_offset} onClick=${() => turn({ offset: page.next_offset })}>Newer<${Icon} name="right" /></${Button}>
          <${Button} small onClick=${() => turn({ order: "down" })}>Newest</${Button}>`}
      </nav></div>`
  }}</${Loaded}>`
}

/** Records as they come; `paused` keeps those that are shown. */
function Live({ topic, partition, open, chosen, hasPartitions }) {
  const [state, setState] = useState({ rows: [], skipped: 0, seen: 0, error: null, end: "" })
  const [paused, setPaused] = useState(false)
  const held = useRef(false)
  held.current = paused
  const [turn, setTurn] = useState(0)
  const again = () => {
    setState((old) => ({ ...old, error: null, end: "" }))
    setTurn((old) => old + 1)
  }
  useEffect(() => {
    const stop = new AbortController()
    let waiting = []
    let timer = 0
    let later = 0
    let hasEnd = false // an answer that ends without a word is asked for again
    const draw = () => {
      timer = 0
      const batch = waiting
      waiting = []
      setState((old) => {
        const skipped = batch.reduce((all, line) => all + (line.skipped ?? 0), 0)
        const records = batch.filter((line) => line.offset !== undefined).reverse()
        const shown = held.current ? old.rows : [...records, ...old.rows].slice(0, LIVE_ROWS)
        const end = batch.find((line) => line.end)?.end ?? old.end
        return { rows: shown, skipped: old.skipped + skipped + (held.current ? records.length : 0), seen: old.seen + records.length, error: null, end }
      })
    }
    const take = (line) => {
      hasEnd ||= line.end !== undefined
      waiting.push(line)
      timer ||= setTimeout(draw, 200)
    }
    lines(path`/api/topics/${topic}/follow`, { partition }, take, stop.signal).then(
      () => {
        if (!hasEnd) later = setTimeout(again, AGAIN_MS)
      },
      (error) => stop.signal.aborted || setState((old) => ({ ...old, error })),
    )
    return () => {
      stop.abort()
      clearTimeout(timer)
      clearTimeout(later)
    }
  }, [topic, partition, turn])
  useEffect(() => {
    if (!state.error?.isAway) return undefined
    events.addEventListener("back", again)
    return () => events.removeEventListener("back", again)
  }, [state.error])
  return html`<div class="stack">
    <div class="toolbar">
      <${Button} small icon=${paused ? "play" : "pause"} onClick=${() => setPaused(!paused)}>${paused ? "Go on" : "Pause"}</${Button}>
      <span role="status" class="muted">${paused ? "Paused." : "Waiting for records."} <${Num} value=${state.seen} /> have come${
        state.skipped > 0 && html`, <${Num} value=${state.skipped} /> more were not shown`}.</span>
    </div>
    ${state.error && html`<${Failure} error=${state.error} reload=${again} what="The live view" />`}
    ${state.end && html`<${Notice} kind="warning" actions=${html`<${Button} small onClick=${again}>Try again</${Button}>`}>${state.end}</${Notice}>`}
    <${Records} rows=${state.rows} topic=${topic} open=${open} chosen=${chosen} hasPartitions=${hasPartitions} empty="No record has come since this page was opened." />
  </div>`
}

/** What a filter finds, and how far the search came. */
function Found({ topic, query, open, chosen, hasPartitions }) {
  const search = useSearch(topic, query)
  if (search.error) {
    return search.error.code === "invalid_filter" ? null : html`<${Failure} error=${search.error} reload=${search.again} what="The search" />`
  }
  return html`<div class="stack">
    <${SearchProgress} search=${search} hasPartitions=${hasPartitions} />
    ${(search.rows.length > 0 || !search.running) && html`<${Records} rows=${search.rows} topic=${topic} open=${open} chosen=${chosen}
      hasPartitions=${hasPartitions} empty=${search.progress?.done ? "No record matches the filter." : "No record has matched so far."} />`}
  </div>`
}

function TopicPage({ topic }) {
  const [query, setQuery] = useQuery()
  const [dialog, setDialog] = useState(null)
  const [turn, setTurn] = useState(0)
  const poll = usePoll((signal) => get(path`/api/topics/${topic}`, {}, { signal }), 0, [topic])
  const mayPublish = useMay("publish", topic)
  const partitions = poll.data?.partitions.length ?? 1
  const hasPartitions = partitions > 1
  const open = (record) => setQuery({ open: placeOf(record) })
  const live = query.live !== undefined
  const shared = { topic, query, open, chosen: query.open, hasPartitions }
  const close = () => {
    setDialog(null)
    setTurn(turn + 1) // what was published is shown
  }
  return html`<${Heading} title=${topic} crumbs=${[["Browse", link("/browse")]]} actions=${html`
      <${Button} icon="add" disabled=${mayPublish === false} title=${mayPublish === false ? "You may not publish to this topic." : undefined}
        onClick=${() => setDialog({ kind: "publish" })}>Publish</${Button}>
      <${Button} icon="copy" onClick=${() => setDialog({ kind: "copy" })}>Copy</${Button}>
      <${Button} icon="download" onClick=${() => setDialog({ kind: "export" })}>Export</${Button}>
      <a class="button" href=${link("/topics/:name", { name: topic })}>Topic</a>`} />
    ${poll.error && poll.data === undefined ? html`<${Failure} error=${poll.error} reload=${poll.reload} what="The topic" />` : html`
      <${Panel}>
        <div class="toolbar">
          <${Start} query=${query} partitions=${partitions} live=${live} onChange=${(changes) => setQuery({ open: null, ...changes }, { replace: false })} />
          <span class="push"><${Button} icon=${live ? "close" : "play"} aria-pressed=${live} onClick=${() =>
            setQuery({ live: live ? null : true, open: null, filter: null }, { replace: false })}>${live ? "End live" : "Live"}</${Button}></span>
        </div>
        ${!live && html`<${FilterBox} topic=${topic} value=${query.filter ?? ""} onChange=${(filter) => setQuery({ filter, from: null, open: null }, { replace: false })} />`}
      </${Panel}>
      ${live ? html`<${Live} ...${shared} partition=${query.partition} />`
        : query.filter ? html`<${Found} key=${[query.filter, query.partition, query.offset, query.time].join("\n")} ...${shared} />`
        : html`<${Stored} ...${shared} setQuery=${setQuery} turn=${turn} />`}`}
    ${query.open && html`<${RecordDialog} topic=${topic} place=${query.open} onClose=${() => setQuery({ open: null })}
      onMove=${(place) => setQuery({ open: place })}
      onNearest=${(start) => setQuery({ open: null, before: null, time: null, order: null, filter: null, ...start })} mayPublish=${mayPublish !== false} onDialog=${setDialog} />`}
    ${dialog?.kind === "publish" && html`<${PublishDialog} topic=${topic} partitions=${partitions} record=${dialog.record} onClose=${close} />`}
    ${dialog?.kind === "copy" && html`<${CopyDialog} topic=${topic} partitions=${partitions} record=${dialog.record} query=${query} onClose=${close} />`}
    ${dialog?.kind === "export" && html`<${ExportDialog} topic=${topic} partitions=${partitions} query=${query} onClose=${close} />`}`
}

function Page({ params }) {
  return params.topic === undefined ? html`<${Topics} />` : html`<${TopicPage} topic=${params.topic} />`
}

export default { Page }
