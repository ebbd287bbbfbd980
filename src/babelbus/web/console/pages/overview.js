// What goes on in the whole bus: rates, disk, health, and the groups that lag most.

import { html, useRef } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import { Badge, Bytes, Duration, Heading, Loaded, Notice, Num, Panel, Rate, Stat, Table, link, usePoll } from "../ui.js"

const SECONDS = 2
const GROUPS = 8

/** Return how fast the counters of `now` rise per second since `before`. */
function rates(now, before) {
  const seconds = before ? now.time_seconds - before.time_seconds : 0
  return (of) => (seconds > 0 && now.uptime_seconds >= before.uptime_seconds ? (of(now) - of(before)) / seconds : null)
}

const sum = (field) => (status) => status.protocols.reduce((all, one) => all + one[field], 0)

function Figures({ status, before }) {
  const rate = rates(status, before)
  const { disk } = status
  return html`<dl class="stats">
    <${Stat} label="Published" note=${html`<${Rate} value=${rate(sum("published_bytes"))} bytes />`}><${Rate} value=${rate(sum("published"))} /></${Stat}>
    <${Stat} label="Fetched" note=${html`<${Rate} value=${rate(sum("fetched_bytes"))} bytes />`}><${Rate} value=${rate(sum("fetched"))} /></${Stat}>
    <${Stat} label="Delivered live"><${Rate} value=${rate(sum("live_delivered"))} /></${Stat}>
    <${Stat} label="Connections"><${Num} value=${sum("connections")(status)} /></${Stat}>
    <${Stat} label="Topics" note=${html`<${Bytes} value=${disk.log_bytes} />`}><${Num} value=${status.topics.length} /></${Stat}>
    <${Stat} label="Disk free" note=${html`of <${Bytes} value=${disk.total_bytes} />`}><${Bytes} value=${disk.free_bytes} /></${Stat}>
    <${Stat} label="Memory"><${Bytes} value=${status.memory_bytes} /></${Stat}>
    <${Stat} label="Up for" note=${`Babelbus ${status.version}`}><${Duration} ms=${status.uptime_seconds * 1000} /></${Stat}>
  </dl>`
}

function Lag({ groups }) {
  const busiest = [...groups].sort((one, other) => other.lag - one.lag).slice(0, GROUPS)
  return html`<${Panel} title="Groups with the highest lag">
    <${Table} caption="Groups with the highest lag" rows=${busiest} rowKey=${(one) => `${one.topic}/${one.name}`}
      empty="There is no consumer group." columns=${[
        { name: "name", title: "Group", render: (one) => html`<a href=${link("/groups/:topic/:group", { topic: one.topic, group: one.name })}>${one.name}</a>` },
        { name: "topic", title: "Topic" },
        { name: "lag", title: "Lag", right: true },
        { name: "in_flight", title: "In flight", right: true, wide: true },
        { name: "members", title: "Members", right: true, render: (one) => html`<${Num} value=${one.members} />${one.paused && html` <${Badge} kind="warning">paused</${Badge}>`}` },
      ]} /></${Panel}>`
}

function Page() {
  const last = useRef(null)
  const poll = usePoll(async (signal) => {
    const status = await get("/api/status", {}, { signal })
    const before = last.current
    last.current = status
    return { status, before }
  }, SECONDS)
  return html`<${Heading} title="Overview" />
    <${Loaded} poll=${poll} what="The overview">${({ status, before }) => html`
      ${status.reasons.length > 0 && html`<${Notice} kind="warning" title="The server is degraded.">
        <ul>${status.reasons.map((one) => html`<li key=${one}>${one}</li>`)}</ul></${Notice}>`}
      <${Figures} status=${status} before=${before} />
      <${Lag} groups=${status.groups} />`}</${Loaded}>`
}

export default { Page }
