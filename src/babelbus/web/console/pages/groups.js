// Consumer groups: who shares the records of a topic, how far they are, and why records wait.

import { html, useEffect, useState } from "../vendor/preact-htm.js"
import { del, get, patch, path, post } from "../api.js"
import {
  Badge, Button, Chart, Confirm, Dialog, Empty, Field, Form, Heading, Loaded, Notice, Num, Pager, Panel, Search, Stat, Table, Time,
  durationText, go, link, numText, pref, toast, usePoll, useQuery,
} from "../ui.js"

const SECONDS = 2
const COUNT = 50
const PREVIEW_MS = 300
const FEW = 6
const TOPICS = 200
const WHERE = {
  delivered: "with a member",
  ready: "ready for a member",
  waiting: "waits for its next delivery",
  held_back: "held back",
  dead_letter: "becomes a dead letter",
}
const FULL = { connection: "does not read", credit: "has no credit", window: "has a full window" }
const CAUSES = {
  paused: "Paused",
  disk: "Disk",
  filter: "Filter",
  beyond_end: "Beyond the end",
  no_members: "No members",
  no_right: "No right",
  in_flight_max: "Too many in flight",
  members_full: "Members are full",
  redelivery: "Redelivery",
  dead_letter: "Dead letter",
  key_order: "Order per key",
  not_acked: "No ack",
}
const GRAVE = new Set(["disk", "filter", "no_right", "dead_letter"])
const SETTINGS = [
  { name: "ack_seconds", type: "number", label: "Ack within", unit: "seconds", step: "any", min: 0, help: "A record without an ack for so long is delivered again." },
  { name: "attempts_max", type: "number", label: "Deliveries at most", min: 1, none: true, help: "Then the record becomes a dead letter. Empty: no limit." },
  { name: "retry_seconds", type: "number", label: "First wait", unit: "seconds", step: "any", min: 0, help: "Before the second delivery; it doubles each time." },
  { name: "retry_seconds_max", type: "number", label: "Longest wait", unit: "seconds", step: "any", min: 0 },
  { name: "in_flight_max", type: "number", label: "In flight at most", min: 1, help: "Records that are delivered and not acked." },
  { name: "order", type: "select", label: "Order", options: [{ value: "key", title: "per key" }, { value: "none", title: "none" }] },
  { name: "filter", type: "text", label: "Filter", none: true, help: "A header, as name=value or name. Empty: every record." },
  { name: "dead_letter_topic", type: "text", label: "Topic of dead letters", none: true, help: "Empty: dead-letters/ and the name of the group." },
]

const pathOf = (topic, group, action = "") => path`/api/topics/${topic}/groups/${group}` + action
const pageOf = (group) => link("/groups/:topic/:group", { topic: group.topic, group: group.name })
const recordOf = (topic, partition, offset) => link("/browse/:topic", { topic, partition, offset })
const count = (number, word) => `${numText(number)} ${word}${number === 1 ? "" : "s"}`

/** Return how a member is called. */
function memberText(member) {
  const words = [member.protocol || "unknown", member.principal].filter(Boolean)
  return [...new Set(words)].join(" ")
}

// -- the list --------------------------------------------------------------------------------------------------------

function Members({ group }) {
  if (!group.members) return html`<span class="muted">none</span>`
  const more = group.members - group.joined.length
  return html`<${Num} value=${group.members} /> <small class="muted">${group.joined.map(memberText).join(", ")}${more > 0 && ` and ${more} more`}</small>`
}

const Cause = ({ obstacle }) => html`<${Badge} kind=${GRAVE.has(obstacle.kind) ? "error" : "warning"} title=${obstacle.text}>${CAUSES[obstacle.kind] ?? obstacle.kind}</${Badge}>`

function Badges({ group }) {
  if (group.obstacles.length > 0) {
    return html`<span class="badges">${group.obstacles.map((one, number) => html`<${Cause} key=${number} obstacle=${one} />`)}</span>`
  }
  return group.lag ? html`<${Badge} kind="good">delivering</${Badge}>` : html`<${Badge}>all done</${Badge}>`
}

const Causes = ({ group }) => html`<${Badges} group=${group} />
  ${group.obstacles.length > 0 && html`<small class="muted first-cause">${group.obstacles[0].text}</small>`}`

const COLUMNS = [
  { name: "name", title: "Group", sort: true, nowrap: true, render: (group) => html`<a href=${pageOf(group)}>${group.name}</a>
      <div class="narrow-only"><small class="muted">on ${group.topic}</small><br /><${Badges} group=${group} /></div>` },
  { name: "topic", title: "Topic", sort: true, nowrap: true, wide: true,
    render: (group) => html`<a href=${link("/topics/:topic", { topic: group.topic })}>${group.topic}</a>` },
  { name: "lag", title: "Lag", right: true, sort: true },
  { name: "in_flight", title: "In flight", right: true, sort: true },
  { name: "members", title: "Members", sort: true, wide: true, render: (group) => html`<${Members} group=${group} />` },
  { name: "attempts", title: "Deliveries", right: true, wide: true,
    render: (group) => html`<${Num} value=${group.attempts || null} title="The most deliveries of a record that failed" />` },
  { name: "next", title: "Next redelivery", wide: true, nowrap: true,
    render: (group) => html`<${Time} ms=${group.next_redelivery_ms} ago />` },
  { name: "obstacles", title: "Why records wait", grow: true, wide: true,
    render: (group) => html`<${Causes} group=${group} />` },
]

function List() {
  const [query, setQuery] = useQuery()
  const [creating, setCreating] = useState(false)
  const { search = "", sort = "topic", descending } = query
  const offset = Number(query.offset) || 0
  const poll = usePoll((signal) => get("/api/groups", { search, sort, descending, offset, count: COUNT }, { signal }), SECONDS,
    [search, sort, descending, offset])
  return html`<${Heading} title="Consumer groups"
    actions=${html`<${Button} kind="primary" icon="add" onClick=${() => setCreating(true)}>Create a group</${Button}>`}>
      The members of a group share the records of a topic. The lag is what is still to be done.</${Heading}>
    <div class="toolbar"><${Search} label="Search groups and topics" value=${search} onSearch=${(text) => setQuery({ search: text, offset: null })} /></div>
    <${Loaded} poll=${poll} what="The list of groups">${({ groups, total }) => total === 0 && !search
      ? html`<${Empty} title="There are no consumer groups.">A client makes a group when it joins, or you create a group here.</${Empty}>`
      : html`<${Table} caption="Consumer groups" columns=${COLUMNS} rows=${groups} rowKey=${(group) => `${group.topic}\n${group.name}`}
          sort=${{ name: sort, descending: descending === "1" }} empty="No group or topic contains this text."
          onSort=${(next) => setQuery({ sort: next.name, descending: next.descending ? "1" : null, offset: null })} />
        <${Pager} offset=${offset} count=${COUNT} total=${total} what="groups" onGo=${(next) => setQuery({ offset: next || null })} />`}</${Loaded}>
    ${creating && html`<${Create} onClose=${() => setCreating(false)} />`}`
}

// -- one group -------------------------------------------------------------------------------------------------------

function State({ group }) {
  if (group.paused) return html`<${Badge} kind="warning">paused</${Badge}>`
  if (group.obstacles.length > 0) return html`<${Badge} kind=${group.obstacles.some((one) => GRAVE.has(one.kind)) ? "error" : "warning"}>records wait</${Badge}>`
  return html`<${Badge} kind="good">${group.lag ? "delivering" : "all done"}</${Badge}>`
}

function Why({ group }) {
  if (group.obstacles.length === 0) {
    return html`<${Notice} kind="good">${group.lag ? "Records are being delivered; nothing holds them up." : "All records are done."}</${Notice}>`
  }
  return html`<${Panel} title="Why records wait"><ul class="causes">
    ${group.obstacles.map((one, number) => html`<li key=${number}><${Cause} obstacle=${one} /> <span>${one.text}
      ${one.at_ms !== undefined && html` <small class="muted">(<${Time} ms=${one.at_ms} />)</small>`}
      ${one.offset !== undefined && one.kind !== "beyond_end" && html` <a href=${recordOf(group.topic, one.partition, one.offset)}>Show the record</a>`}</span></li>`)}
  </ul></${Panel}>`
}

function Figures({ group }) {
  const { counts } = group
  return html`<dl class="stats">
    <${Stat} label="Lag" note=${`${numText(group.settings.ack === "explicit" ? counts.acknowledged : counts.delivered)} done since the start`}><${Num} value=${group.lag} /></${Stat}>
    <${Stat} label="In flight" note=${`of at most ${numText(group.settings.in_flight_max)}`}><${Num} value=${group.in_flight} /></${Stat}>
    <${Stat} label="Members"><${Num} value=${group.members} /></${Stat}>
    <${Stat} label="Next redelivery" note=${group.attempts ? `after ${count(group.attempts, "delivery").replace("deliverys", "deliveries")} at most` : "no record has failed"}>
      <${Time} ms=${group.next_redelivery_ms} ago /></${Stat}>
    <${Stat} label="Redelivered" note="since the start"><${Num} value=${counts.redelivered} /></${Stat}>
    <${Stat} label="Dead letters" note="since the start" kind=${counts.dead_lettered ? "warning" : ""}><${Num} value=${counts.dead_lettered} /></${Stat}>
  </dl>`
}

/** The lag over the last ten minutes, if the group is one of those that the server keeps it for. */
function Lag({ group }) {
  const escape = (text) => text.replaceAll("%", "%25").replaceAll(",", "%2C") // commas are between the names of series
  const series = `group.${escape(group.topic)}.${escape(group.name)}.lag`
  const { data } = usePoll((signal) => get("/api/history", { series, step: 1 }, { signal }), SECONDS, [series])
  if (!data || data.series.length === 0) return null
  const { end_ms, step_s, resets_ms } = data
  return html`<${Panel}><${Chart} level=${2} title="Lag" unit="records" note="the last ten minutes" ...${{ end_ms, step_s, resets_ms }}
    series=${[{ label: "Lag", points: data.series[0].points }]} /></${Panel}>`
}

function Partitions({ group }) {
  return html`<${Panel} title="Partitions"><${Table} caption="Partitions" rows=${group.lanes} rowKey="partition" columns=${[
    { name: "partition", title: "Partition", sort: true },
    { name: "committed", title: "Done below", right: true,
      render: (lane) => html`<a class="num" href=${recordOf(group.topic, lane.partition, lane.committed)}>${numText(lane.committed)}</a>` },
    { name: "position", title: "Next", right: true, wide: true },
    { name: "end", title: "End", right: true },
    { name: "lag", title: "Lag", right: true, sort: true },
    { name: "in_flight", title: "In flight", right: true, sort: true },
  ]} /></${Panel}>`
}

function Joined({ group }) {
  const more = group.members - group.joined.length
  const rows = group.joined.map((member, number) => ({ ...member, number }))
  return html`<${Panel} title="Members">
    ${rows.length === 0
      ? html`<p class="muted">Nobody has joined the group.</p>`
      : html`<${Table} caption="Members" rows=${rows} rowKey="number" columns=${[
        { name: "principal", title: "Principal", sort: true, grow: true,
          render: (member) => member.principal ?? html`<span class="muted">not told</span>` },
        { name: "protocol", title: "Protocol", sort: true, wide: true },
        { name: "address", title: "Address", wide: true, render: (member) => member.address || "–" },
        { name: "since_ms", title: "Joined", wide: true, nowrap: true, sort: true,
          render: (member) => html`<${Time} ms=${member.since_ms} ago />` },
        { name: "in_flight", title: "In flight", right: true, sort: true,
          render: (member) => html`<${Num} value=${member.in_flight} />${member.window !== null && html`<small class="muted"> of ${numText(member.window)}</small>`}` },
        { name: "capacity", title: "Takes", right: true, render: (member) => member.full
          ? html`<${Badge} kind="warning">${FULL[member.full]}</${Badge}>`
          : member.capacity === null ? "no limit" : html`<${Num} value=${member.capacity} />` },
        { name: "oldest_ms", title: "Oldest without ack", wide: true, nowrap: true,
          render: (member) => html`<${Time} ms=${member.oldest_ms} ago />` },
      ]} />
      ${more > 0 && html`<p class="muted">${count(more, "more member")} not shown.</p>`}
      ${!group.may_manage && html`<p class="muted">Names and addresses of members are for those who may manage the group.</p>`}`}
  </${Panel}>`
}

function Oldest({ group }) {
  const [all, setAll] = useState(false)
  if (group.settings.ack !== "explicit") return null
  const rows = all ? group.oldest : group.oldest.slice(0, FEW)
  return html`<${Panel} title="Oldest records in flight">
    ${group.oldest.length === 0
      ? html`<p class="muted">No record is with a member or waits for its next delivery.</p>`
      : html`<${Table} caption="Oldest records in flight" rows=${rows} rowKey=${(one) => `${one.partition}:${one.offset}`} columns=${[
        { name: "offset", title: "Record", nowrap: true,
          render: (one) => html`<a class="num" href=${recordOf(group.topic, one.partition, one.offset)}>${one.partition}:${one.offset}</a>` },
        { name: "where", title: "Where it is", grow: true, render: (one) => html`${WHERE[one.where] ?? one.where}
          ${one.behind !== null && html` behind <a class="num" href=${recordOf(group.topic, one.partition, one.behind)}>${one.partition}:${one.behind}</a>, of the same key`}
          ${one.member !== null && group.joined[one.member] && html` <small class="muted">${memberText(group.joined[one.member])}</small>`}` },
        { name: "attempts", title: "Deliveries", right: true,
          render: (one) => html`<${Num} value=${one.attempts || null} />${one.attempts > 0 && group.settings.attempts_max !== null && html`<small class="muted"> of ${group.settings.attempts_max}</small>`}` },
        { name: "since_ms", title: "Delivered", wide: true, nowrap: true,
          render: (one) => html`<${Time} ms=${one.since_ms} ago />` },
        { name: "again_ms", title: "Again", nowrap: true, render: (one) => html`<${Time} ms=${one.again_ms} ago />` },
      ]} />
      ${group.in_flight > rows.length && html`<p class="muted">${count(group.in_flight - rows.length, "newer record")} in flight, too.
        ${rows.length < group.oldest.length && html` <button type="button" class="linklike" onClick=${() => setAll(true)}>Show ${group.oldest.length - rows.length} more</button>`}</p>`}`}
  </${Panel}>`
}

function settingText(name, value) {
  if (value === null) return { attempts_max: "no limit", filter: "every record", dead_letter_topic: "by the name of the group" }[name] ?? "none"
  if (name.endsWith("_seconds") || name.endsWith("_seconds_max")) return durationText(value * 1000)
  if (name === "ack") return value === "explicit" ? "when a member acks (at least once)" : "on delivery (at most once)"
  return typeof value === "number" ? numText(value) : String(value)
}

function Settings({ group }) {
  const names = { ack: "A record is done", filter_kind: "Language of the filter", ...Object.fromEntries(SETTINGS.map((one) => [one.name, one.label])) }
  const labels = Object.entries(group.settings.labels ?? {})
  return html`<${Panel} title="Settings"><dl class="pairs">
    <dt>Created</dt><dd><${Time} ms=${group.created_ms} /></dd>
    ${Object.entries(group.settings).filter(([name]) => name !== "labels").map(([name, value]) => html`<dt key=${name}>${names[name] ?? name}</dt><dd>
      ${name === "dead_letter_topic" && value ? html`<a href=${link("/dead-letters/:topic", { topic: value })}>${value}</a>` : settingText(name, value)}</dd>`)}
    ${labels.map(([name, value]) => html`<dt key=${name}>Label ${name}</dt><dd>${value}</dd>`)}
  </dl></${Panel}>`
}

function One({ topic, name }) {
  const [dialog, setDialog] = useState("")
  const poll = usePoll((signal) => get(pathOf(topic, name), {}, { signal }), SECONDS, [topic, name])
  const group = poll.data
  const setPaused = async (action, text) => {
    await post(pathOf(topic, name, `/${action}`))
    toast(text)
    poll.reload()
  }
  const close = (changed) => {
    setDialog("")
    if (changed) poll.reload()
  }
  const actions = group?.may_manage && html`
    ${group.paused
      ? html`<${Button} icon="play" onClick=${() => setPaused("resume", `Group ${name} goes on.`)}>Resume</${Button}>`
      : html`<${Button} icon="pause" onClick=${() => setPaused("pause", `Group ${name} is paused.`)}>Pause</${Button}>`}
    <${Button} icon="right" onClick=${() => setDialog("seek")}>Move …</${Button}>
    <${Button} icon="edit" onClick=${() => setDialog("alter")}>Change …</${Button}>
    <${Button} icon="remove" kind="danger" onClick=${() => setDialog("remove")}>Remove …</${Button}>`
  return html`<${Heading} title=${name} badge=${group && html`<${State} group=${group} />`} actions=${actions}
      crumbs=${[["Consumer groups", "#/groups"], [topic, link("/topics/:topic", { topic })]]} />
    ${poll.error?.status === 404 && !group
      ? html`<${Empty} title="There is no such group." actions=${html`<a href="#/groups">Go to the list of groups</a>`}>Topic ${topic} has no group ${name}. Perhaps somebody has removed the group.</${Empty}>`
      : html`<${Loaded} poll=${poll} what="The group">${(group) => html`
          <${Why} group=${group} />
          <${Figures} group=${group} />
          <${Lag} group=${group} />
          <${Joined} group=${group} />
          <${Oldest} group=${group} />
          <div class="grid halves"><${Partitions} group=${group} /><${Settings} group=${group} /></div>`}</${Loaded}>`}
    ${dialog === "seek" && html`<${Seek} group=${group} onClose=${close} />`}
    ${dialog === "alter" && html`<${Alter} group=${group} onClose=${close} />`}
    ${dialog === "remove" && html`<${Confirm} title="Remove group ${name}" confirm="Remove the group" typed=${name} onClose=${close}
      lost=${[`Its position in topic ${topic}, with a lag of ${count(group.lag, "record")}.`, ...(group.members ? [`${count(group.members, "membership")}: the members are told that the group is gone.`] : [])]}
      onConfirm=${async () => {
        await del(pathOf(topic, name))
        toast(`Group ${name} is removed.`)
        go("/groups")
      }}>The records of the topic are kept.</${Confirm}>`}`
}

// -- places ----------------------------------------------------------------------------------------------------------

/** Return a time of a field as ms, in the zone that the pages show; null if there is none. */
function timeOf(text) {
  const ms = text ? new Date(pref("zone") === "utc" ? `${text}Z` : text).getTime() : NaN
  return Number.isNaN(ms) ? null : ms
}

function placeOf({ at, offset, time, partition }) {
  const value = at === "offset" ? Number(offset) : at === "time" ? timeOf(time) : 0
  if (value === null || !Number.isSafeInteger(value) || value < 0 || (at === "offset" && offset === "")) return null
  return { at, value, ...(partition === undefined || partition === "" ? {} : { partition: Number(partition) }) }
}

/** The fields of a place: the beginning, the end, an offset or a time. */
function Place({ place, onChange, label, lanes }) {
  const set = (name) => (value) => onChange({ ...place, [name]: value })
  return html`<div class="form-row">
    <${Field} label=${label} type="select" value=${place.at} onChange=${set("at")} options=${[
      { value: "beginning", title: "at the earliest record" }, { value: "end", title: "at the end: new records only" },
      { value: "offset", title: "at an offset" }, { value: "time", title: "at a time" }]} />
    ${place.at === "offset" && html`<${Field} label="Offset" type="number" min="0" required value=${place.offset} onChange=${set("offset")} />`}
    ${place.at === "time" && html`<${Field} label=${pref("zone") === "utc" ? "Time (UTC)" : "Time"} type="datetime-local" step="1" required value=${place.time} onChange=${set("time")} />`}
    ${lanes?.length > 1 && html`<${Field} label="Partition" type="select" value=${place.partition} onChange=${set("partition")}
      options=${[{ value: "", title: "all partitions" }, ...lanes.map((lane) => ({ value: String(lane.partition), title: `partition ${lane.partition}` }))]} />`}
  </div>`
}

function Effect({ effect }) {
  const { again, skipped, in_flight: inFlight, partitions } = effect
  return html`<${Notice} kind=${again || skipped ? "warning" : "info"}>
      <strong>${count(again, "record")}</strong> would be delivered again, <strong>${numText(skipped)}</strong> would be skipped.
      ${inFlight > 0 && html` Members hold ${count(inFlight, "record")}: their acks would count as stale.`}</${Notice}>
    <${Table} caption="Effect in each partition" rows=${partitions} rowKey="partition" columns=${[
      { name: "partition", title: "Partition" },
      { name: "committed", title: "Done below", right: true },
      { name: "target", title: "New position", right: true },
      { name: "end", title: "End", right: true, wide: true },
      { name: "again", title: "Again", right: true },
      { name: "skipped", title: "Skipped", right: true },
    ]} />`
}

function Seek({ group, onClose }) {
  const [place, setPlace] = useState({ at: "beginning", offset: "", time: "", partition: "" })
  const [effect, setEffect] = useState(null)
  const [error, setError] = useState(null)
  const body = placeOf(place)
  const asked = JSON.stringify(body)
  useEffect(() => {
    setEffect(null)
    setError(null)
    if (!body) return undefined
    const stop = new AbortController()
    const timer = setTimeout(() => {
      post(pathOf(group.topic, group.name, "/seek?preview=1"), body, { signal: stop.signal }).then(
        (found) => setEffect(found), (failure) => stop.signal.aborted || setError(failure))
    }, PREVIEW_MS)
    return () => {
      clearTimeout(timer)
      stop.abort()
    }
  }, [asked])
  const move = async () => {
    await post(pathOf(group.topic, group.name, "/seek"), body)
    toast(`Group ${group.name} goes on at its new position.`)
    onClose(true)
  }
  return html`<${Dialog} title="Move group ${group.name}" wide onClose=${() => onClose()}>
    <${Form} onSubmit=${move} submit="Move the group" kind="danger" onCancel=${() => onClose()} disabled=${!effect}>
      <p>Choose where the group goes on. Nothing moves before you press the button; the group may be in use.</p>
      <${Place} label="Go on" place=${place} onChange=${setPlace} lanes=${group.lanes} />
      <div aria-live="polite">${error
        ? html`<${Notice} kind="error">${error.message}</${Notice}>`
        : effect ? html`<div class="stack"><${Effect} effect=${effect} /></div>`
        : html`<p class="muted">${body ? "Counting …" : "Fill in the place to see the effect."}</p>`}</div>
    </${Form}></${Dialog}>`
}

// -- settings --------------------------------------------------------------------------------------------------------

/** The fields of settings; `values` are those that the group has. */
const SettingFields = ({ values }) => html`<div class="form-row">${SETTINGS.map(({ none, ...field }) => html`<${Field} key=${field.name} ...${field}
  value=${values?.[field.name] ?? (field.type === "select" && values ? "key" : "")}
  options=${field.options && !values ? [{ value: "", title: "the server's" }, ...field.options] : field.options} />`)}</div>`

/** Return the settings of a form that differ from `old`; without `old`, those that are given. */
function changesOf(values, old) {
  const changes = {}
  for (const { name, none } of SETTINGS) {
    const value = values[name] === "" ? null : values[name]
    if (old ? value === old[name] || (value === null && !none) : value === null) continue
    changes[name] = value
  }
  return changes
}

function Alter({ group, onClose }) {
  const save = async (values) => {
    const changes = changesOf(values, group.settings)
    if (Object.keys(changes).length > 0) {
      await patch(pathOf(group.topic, group.name), changes)
      toast(`Group ${group.name} is changed.`)
    }
    onClose(true)
  }
  return html`<${Dialog} title="Change group ${group.name}" wide onClose=${() => onClose()}>
    <${Form} onSubmit=${save} submit="Save" onCancel=${() => onClose()}>
      <p>The group may be in use. A new filter is for records that were not read yet.</p>
      <${SettingFields} values=${group.settings} />
    </${Form}></${Dialog}>`
}

function Create({ onClose }) {
  const topics = usePoll((signal) => get("/api/topics", { sort: "name", count: TOPICS }, { signal }))
  const [place, setPlace] = useState({ at: "end", offset: "", time: "" })
  const create = async (values) => {
    const start = placeOf(place)
    if (!start) throw new Error("The place to begin at is not complete.")
    const settings = { ack: values.ack, ...changesOf(values) }
    const made = await post("/api/groups", { topic: values.topic, name: values.name, settings, start })
    toast(`Group ${made.name} is created.`)
    onClose()
    go("/groups/:topic/:group", { topic: made.topic, group: made.name })
  }
  return html`<${Dialog} title="Create a group" wide onClose=${onClose}>
    <datalist id="group-topics">${topics.data?.topics.map((one) => html`<option key=${one.name} value=${one.name} />`)}</datalist>
    <${Form} onSubmit=${create} submit="Create the group" onCancel=${onClose}>
      <div class="form-row"><${Field} label="Topic" name="topic" required autofocus list="group-topics" /><${Field} label="Name of the group" name="name" required /></div>
      <${Field} label="A record is done" name="ack" type="select" value="explicit" help="This cannot be changed later." options=${[
        { value: "explicit", title: "when a member acks it (at least once)" }, { value: "on_delivery", title: "when it is delivered (at most once)" }]} />
      <${Place} label="Begin" place=${place} onChange=${setPlace} />
      <details><summary>More settings</summary><p>A field that is empty has the server's value.</p><${SettingFields} /></details>
    </${Form}></${Dialog}>`
}

function Page({ params }) {
  return params.group === undefined ? html`<${List} />` : html`<${One} topic=${params.topic} name=${params.group} />`
}

export default { Page }
