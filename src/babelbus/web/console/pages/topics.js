// Topics: the list, which the server searches, sorts and cuts into pages, and one topic with all that is known of it.

import { html, useState } from "../vendor/preact-htm.js"
import { del, get, path, post } from "../api.js"
import { Bytes, Button, Confirm, Dialog, Empty, Heading, Loaded, Num, Pager, Search, Table, bytesText, durationText, go, link,
  numText, toast, useMay, usePoll, useQuery } from "../ui.js"
import { TopicPage } from "./topics/topic.js"
import { TopicForm } from "./topics/settings.js"

const COUNT = 50
const SECONDS = 5

/** Return the sum of a figure over the partitions of a topic. */
export const total = (topic, of) => topic.partitions.reduce((sum, one) => sum + of(one), 0)
/** Return how many records of a topic can be read. */
export const recordsOf = (topic) => total(topic, (one) => one.high_watermark - one.first_offset)
/** Return the bytes of a topic. */
export const bytesOf = (topic) => total(topic, (one) => one.bytes)

/** Return in a few words how long records stay. */
function kept({ settings }) {
  const bounds = [
    settings.retention_seconds && durationText(settings.retention_seconds * 1000),
    settings.retention_bytes && bytesText(settings.retention_bytes),
    settings.retention_records && `${numText(settings.retention_records)} records`,
  ].filter(Boolean)
  if (settings.cleanup === "compact") return "the last of each key"
  return bounds.join(", ") || "for ever"
}

const COLUMNS = [
  { name: "name", title: "Topic", sort: true, grow: true,
    render: (one) => html`<a href=${link("/topics/:name", { name: one.name })}>${one.name}</a>` },
  { name: "records", title: "Records", sort: true, right: true,
    render: (one) => html`<${Num} value=${recordsOf(one)} />` },
  { name: "bytes", title: "Size", sort: true, right: true, render: (one) => html`<${Bytes} value=${bytesOf(one)} />` },
  { name: "published", title: "Published since the start", sort: true, right: true, wide: true },
  { name: "partitions", title: "Partitions", right: true, wide: true,
    render: (one) => html`<${Num} value=${one.partitions.length} />` },
  { name: "kept", title: "Kept", wide: true, nowrap: true, render: kept },
  { name: "engine", title: "Engine", wide: true, render: (one) => one.settings.engine },
  { name: "browse", title: "", nowrap: true, wide: true,
    render: (one) => html`<a href=${link("/browse/:name", { name: one.name })} aria-label="Browse ${one.name}">Browse</a>` },
]

function List() {
  const [query, setQuery] = useQuery()
  const [adding, setAdding] = useState(false)
  const offset = Number(query.offset) || 0
  const sort = { name: query.sort ?? "name", descending: query.descending === "1" }
  const asked = { search: query.search, sort: sort.name, descending: sort.descending ? 1 : null, offset, count: COUNT }
  const poll = usePoll((signal) => get("/api/topics", asked, { signal }), SECONDS, [JSON.stringify(asked)])
  const add = useMay("manage", "#", true) && html`<${Button} kind="primary" icon="add" onClick=${() => setAdding(true)}>New topic</${Button}>`
  const none = query.search
    ? html`<${Empty} title="No topic has this text in its name." actions=${html`<${Button} onClick=${() => setQuery({ search: null, offset: null })}>Show all topics</${Button}>`} />`
    : html`<${Empty} title="There is no topic yet." actions=${add}>A topic records the events that are published to it and below it.</${Empty}>`
  return html`<${Heading} title="Topics" actions=${add} />
    <div class="toolbar"><${Search} label="Search topics" value=${query.search ?? ""}
      onSearch=${(search) => setQuery({ search, offset: null })} /></div>
    <${Loaded} poll=${poll} what="The list of topics">${({ topics, total: count }) => html`
      <${Table} caption="Topics" rows=${topics} rowKey="name" columns=${COLUMNS} sort=${sort} busy=${poll.loading} empty=${none}
        onSort=${(next) => setQuery({ sort: next.name, descending: next.descending ? 1 : null, offset: null })} />
      <${Pager} offset=${offset} count=${COUNT} total=${count} what="topics" onGo=${(next) => setQuery({ offset: next || null }, { replace: false })} />`}
    </${Loaded}>
    ${adding && html`<${Dialog} title="New topic" wide onClose=${() => setAdding(false)}>
      <${TopicForm} submit="Create" onCancel=${() => setAdding(false)} onSubmit=${async ({ name, partitions, settings }) => {
        await post("/api/topics", { name, partitions, settings })
        setAdding(false)
        toast(`The topic ${name} is created.`)
        go("/topics/:name", { name })
      }} /></${Dialog}>`}`
}

/** Ask before a topic is removed, and name what is lost. */
export function RemoveTopic({ topic, groups, onClose }) {
  const lost = [
    `${numText(recordsOf(topic))} records in ${numText(topic.partitions.length)} partitions (${bytesText(bytesOf(topic))})`,
    groups.length ? `${numText(groups.length)} consumer groups with their positions: ${groups.slice(0, 10).map((one) => one.name).join(", ")}${groups.length > 10 ? " and others" : ""}` : null,
    topic.settings.retain === "last" ? "The last events of its subjects are kept as state no longer." : null,
  ].filter(Boolean)
  return html`<${Confirm} title="Remove the topic ${topic.name}?" confirm="Remove" lost=${lost} typed=${topic.name}
    onClose=${onClose}
    onConfirm=${async () => {
      await del(path`/api/topics/${topic.name}`)
      toast(`The topic ${topic.name} is removed.`)
      go("/topics")
    }}>Publishers of this topic get an error from now on, or create it anew.</${Confirm}>`
}

function Page({ params }) {
  return params.name === undefined ? html`<${List} />` : html`<${TopicPage} name=${params.name} />`
}

export default { Page }
