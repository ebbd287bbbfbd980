// What goes on in the whole bus: health, rates, disk, memory, how late the event loop is, and the groups that lag most.

import { html, useRef, useState } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import { Badge, Bytes, Chart, Duration, Heading, Loaded, Notice, Num, Panel, Rate, Stat, Table, Time, link, useHistory, usePoll,
  useQuery } from "../ui.js"

// All figures of a server with ten thousand topics cost it a tenth of a second: then they are asked for less often, so
// that an open page takes 2 % of a processor at the most.
const INTERVALS = [2, 5, 15, 60]
const SHARE = 0.02
const GROUPS = 8
const CHANGES = 12
const CHANGES_SECONDS = 5
const RANGES = [[1, "10 minutes"], [10, "2 hours"], [60, "2 days"]]
const WHOLE = ["loop_lag", "memory", "disk_free", "log_bytes", "cpu"]
const TRAFFIC = /^(published|fetched|live|connections)\.[^.]+$/

/** Return how fast the counters of `now` rise per second since `before`. */
function rates(now, before) {
  const seconds = before ? now.time_seconds - before.time_seconds : 0
  return (of) => (seconds > 0 && now.uptime_seconds >= before.uptime_seconds ? (of(now) - of(before)) / seconds : null)
}

const sum = (field) => (status) => status.protocols.reduce((all, one) => all + one[field], 0)

function Health({ status }) {
  if (!status.reasons.length) return null
  return html`<${Notice} kind="warning" title="The server is degraded.">
    <ul>${status.reasons.map((one) => html`<li key=${one}>${one}</li>`)}</ul></${Notice}>`
}

function Figures({ status, before }) {
  const rate = rates(status, before)
  const { disk } = status
  const isFull = disk.total_bytes && disk.free_bytes / disk.total_bytes < 0.05
  return html`<dl class="stats eight">
    <${Stat} label="Published" note=${html`<${Rate} value=${rate(sum("published_bytes"))} bytes />`}><${Rate} value=${rate(sum("published"))} /></${Stat}>
    <${Stat} label="Fetched" note=${html`<${Rate} value=${rate(sum("fetched_bytes"))} bytes />`}><${Rate} value=${rate(sum("fetched"))} /></${Stat}>
    <${Stat} label="Delivered live" note=${html`<${Num} value=${sum("live_dropped")(status)} /> dropped since the start`}>
      <${Rate} value=${rate(sum("live_delivered"))} /></${Stat}>
    <${Stat} label="Connections" note=${html`<${Num} value=${sum("connections_refused")(status)} /> refused since the start`}>
      <${Num} value=${sum("connections")(status)} /></${Stat}>
    <${Stat} label="Topics" note=${html`<${Bytes} value=${disk.log_bytes} /> in logs`}><a href="#/topics"><${Num} value=${status.topics.length} /></a></${Stat}>
    <${Stat} label="Disk free" kind=${isFull ? "warning" : ""} note=${html`of <${Bytes} value=${disk.total_bytes} />`}><${Bytes} value=${disk.free_bytes} /></${Stat}>
    <${Stat} label="Memory"><${Bytes} value=${status.memory_bytes} /></${Stat}>
    <${Stat} label="Up for" note=${`Babelbus ${status.version}`}><${Duration} ms=${status.uptime_seconds * 1000} /></${Stat}>
  </dl>`
}

/** Charts from the history: rates by protocol, and what the server needs. */
function Charts() {
  const [query, setQuery] = useQuery()
  const step = RANGES.some(([one]) => String(one) === query.step) ? Number(query.step) : 1
  const history = useHistory((one) => WHOLE.includes(one.name) || TRAFFIC.test(one.name), step)
  const chart = (data, title, unit, names, label) => {
    const series = data.series.filter((one) => names(one.name)).map((one) => ({ ...one, label: label(one) }))
    const active = series.filter((one) => one.points.some((point) => point))
    return html`<${Panel}><${Chart} title=${title} unit=${unit} series=${active.length ? active : series.slice(0, 1)} end_ms=${data.end_ms}
      step_s=${data.step_s} resets_ms=${data.resets_ms} level=${2} /></${Panel}>`
  }
  const of = (kind) => [(name) => name.startsWith(`${kind}.`), (one) => one.name.slice(kind.length + 1)]
  const only = (name, text) => [(one) => one === name, () => text]
  return html`<div class="toolbar"><h2 id="ranges">History</h2>
      <div class="chips" role="group" aria-labelledby="ranges">${RANGES.map(([one, text]) => html`<button key=${one} type="button" class="chip"
        aria-pressed=${one === step} onClick=${() => setQuery({ step: one === 1 ? null : one })}>${text}</button>`)}</div></div>
    <${Loaded} poll=${history} what="The history">${(data) => html`<div class="grid charts">
      ${chart(data, "Published", "records/s", ...of("published"))}
      ${chart(data, "Fetched", "records/s", ...of("fetched"))}
      ${chart(data, "Live events", "messages/s", ...of("live"))}
      ${chart(data, "Connections", "connections", ...of("connections"))}
      ${chart(data, "Event loop: how late at worst", "seconds", ...only("loop_lag", "late"))}
      ${chart(data, "Processor", "processors", ...only("cpu", "busy"))}
      ${chart(data, "Memory", "bytes", ...only("memory", "resident"))}
      ${chart(data, "Logs on the disk", "bytes", ...only("log_bytes", "logs"))}
    </div>`}</${Loaded}>`
}

function Lag({ groups }) {
  const busiest = [...groups].sort((one, other) => other.lag - one.lag).slice(0, GROUPS)
  return html`<${Panel} title="Groups with the highest lag">
    <${Table} caption="Groups with the highest lag" rows=${busiest} rowKey=${(one) => `${one.topic}/${one.name}`}
      empty="There is no consumer group." columns=${[
        { name: "name", title: "Group", render: (one) => html`<a href=${link("/groups/:topic/:group", { topic: one.topic, group: one.name })}>${one.name}</a>
          ${one.paused && html` <${Badge} kind="warning">paused</${Badge}>`}` },
        { name: "topic", title: "Topic" },
        { name: "lag", title: "Lag", right: true },
        { name: "in_flight", title: "In flight", right: true, wide: true },
        { name: "members", title: "Members", right: true },
      ]} /></${Panel}>`
}

/** What was changed by requests since the server started, the newest first. */
function Changes() {
  const poll = usePoll((signal) => get("/api/changes", { count: CHANGES }, { signal }), CHANGES_SECONDS)
  return html`<${Panel} title="What changed lately"><${Loaded} poll=${poll} what="The list of changes">${({ changes }) => html`
    <${Table} caption="Changes" rows=${changes.map((one, number) => ({ ...one, number }))} rowKey="number" empty="Nothing was changed since the server started." columns=${[
      { name: "time_ms", title: "When", nowrap: true, render: (one) => html`<${Time} ms=${one.time_ms} ago />` },
      { name: "text", title: "Change", grow: true },
      { name: "principal", title: "By", wide: true },
    ]} />`}</${Loaded}></${Panel}>`
}

function Protocols({ status, before }) {
  const rate = rates(status, before)
  const of = (name, field) => rate((now) => now.protocols.find((one) => one.protocol === name)?.[field] ?? 0)
  return html`<${Panel} title="Protocols">
    <${Table} caption="Protocols" rows=${status.protocols} rowKey="protocol" columns=${[
      { name: "protocol", title: "Protocol", nowrap: true },
      { name: "connections", title: "Connections", right: true },
      { name: "published", title: "Published", right: true,
        render: (one) => html`<${Rate} value=${of(one.protocol, "published")} />` },
      { name: "fetched", title: "Fetched", right: true, wide: true,
        render: (one) => html`<${Rate} value=${of(one.protocol, "fetched")} />` },
      { name: "live", title: "Live", right: true, wide: true,
        render: (one) => html`<${Rate} value=${of(one.protocol, "live_delivered")} />` },
      { name: "waiting_bytes", title: "Waits", right: true,
        render: (one) => html`<${Bytes} value=${one.waiting_bytes} />` },
    ]} /></${Panel}>`
}

function Page() {
  const last = useRef(null)
  const [seconds, setSeconds] = useState(INTERVALS[0])
  const poll = usePoll(async (signal) => {
    const begun = performance.now()
    const status = await get("/api/status", {}, { signal })
    const least = (performance.now() - begun) / 1000 / SHARE
    setSeconds((old) => Math.max(old, INTERVALS.find((one) => one >= least) ?? INTERVALS.at(-1)))
    const before = last.current
    last.current = status
    return { status, before }
  }, seconds)
  const health = poll.data?.status.health
  const badge = health && html`<${Badge} kind=${health === "ok" ? "good" : "warning"}>${health === "ok" ? "healthy" : health}</${Badge}>`
  return html`<${Heading} title="Overview" badge=${badge} />
    <${Loaded} poll=${poll} what="The overview">${({ status, before }) => html`
      <${Health} status=${status} />
      <${Figures} status=${status} before=${before} />
      <${Charts} />
      <div class="grid halves"><${Lag} groups=${status.groups} /><${Protocols} status=${status} before=${before} /></div>
      <${Changes} />`}</${Loaded}>`
}

export default { Page }
