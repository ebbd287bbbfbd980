// One topic: its figures, partitions and their segments with the retention to come, settings, and groups.

import { html, useState } from "../../vendor/preact-htm.js"
import { get, patch, path } from "../../api.js"
import { Badge, Button, Bytes, Chart, Dialog, Heading, Loaded, Notice, Num, Panel, Stat, Table, Time, bytesText, link, toast,
  useMay, usePoll, useQuery, Tabs, useHistory } from "../../ui.js"
import { RemoveTopic, bytesOf, recordsOf, total } from "../topics.js"
import { Settings, TopicForm } from "./settings.js"

const SECONDS = 3

function Partitions({ topic, onOpen }) {
  return html`<${Table} caption="Partitions of ${topic.name}" rowKey="partition" rows=${topic.partitions} columns=${[
    { name: "partition", title: "Partition", sort: true,
      render: (one) => html`<a href=${link("/browse/:name", { name: topic.name, partition: one.partition })}>${one.partition}</a>` },
    { name: "first_offset", title: "First offset", sort: true, right: true },
    { name: "high_watermark", title: "Next to read", sort: true, right: true, wide: true },
    { name: "next_offset", title: "Next offset", sort: true, right: true, wide: true },
    { name: "records", title: "Records", sort: true, right: true, value: (one) => one.high_watermark - one.first_offset,
      render: (one) => html`<${Num} value=${one.high_watermark - one.first_offset} />` },
    { name: "bytes", title: "Size", sort: true, right: true, render: (one) => html`<${Bytes} value=${one.bytes} />` },
    { name: "segments", title: "Segments", right: true, render: (one) => one.parts
      ? html`<button type="button" class="linklike" aria-label="${one.segments} segments of partition ${one.partition}" onClick=${() => onOpen(one.partition)}>${one.segments}</button>`
      : html`<${Num} value=${one.segments} />` },
    { name: "next", title: "Retention to come", nowrap: true, wide: true,
      render: (one) => html`<${ToCome} partition=${one} settings=${topic.settings} />` },
  ]} />`
}

function ToCome({ partition, settings }) {
  const oldest = partition.parts?.[0]
  if (settings.cleanup === "compact") return "compaction"
  const age = oldest?.removed_ms
  const left = partition.bytes_left
  if ((age === undefined || age === null) && (left === undefined || left === null)) return html`<span class="muted">none</span>`
  return html`${age ? html`oldest segment <${Time} ms=${age} ago />` : null}${age && typeof left === "number" ? "; " : null}${
    typeof left === "number" ? `after ${bytesText(left)} more` : null}`
}

function Segments({ topic, partition, onClose }) {
  const found = topic.partitions.find((one) => one.partition === partition)
  return html`<${Dialog} title="Segments of ${topic.name}, partition ${partition}" wide onClose=${onClose}>
    ${found && found.segments > (found.parts?.length ?? 0) && html`<${Notice}>The oldest ${found.parts.length} of ${found.segments} segments are shown.</${Notice}>`}
    <${Table} caption="Segments" rows=${found?.parts ?? []} rowKey="first_offset" empty="There is no segment." columns=${[
      { name: "first_offset", title: "First offset", right: true, render: (one) => html`<a href=${link("/browse/:name", { name: topic.name, partition, offset: one.first_offset })}>
        <${Num} value=${one.first_offset} /></a>` },
      { name: "next_offset", title: "Ends before", right: true },
      { name: "bytes", title: "Size", right: true, render: (one) => html`<${Bytes} value=${one.bytes} />` },
      { name: "newest_ms", title: "Newest record", render: (one) => html`<${Time} ms=${one.newest_ms} />` },
      { name: "removed_ms", title: "Removed by age",
        render: (one) => one.removed_ms ? html`<${Time} ms=${one.removed_ms} />` : "–" },
    ]} /></${Dialog}>`
}

function Groups({ groups, topic }) {
  return html`<${Table} caption="Groups of ${topic.name}" rows=${groups} rowKey="name" first=${{ name: "lag", descending: true }}
    empty="No consumer group reads this topic." columns=${[
      { name: "name", title: "Group", sort: true, render: (one) => html`<a href=${link("/groups/:topic/:group", { topic: topic.name, group: one.name })}>${one.name}</a>
        ${one.paused && html` <${Badge} kind="warning">paused</${Badge}>`}` },
      { name: "lag", title: "Lag", sort: true, right: true },
      { name: "in_flight", title: "In flight", sort: true, right: true },
      { name: "members", title: "Members", sort: true, right: true, value: (one) => members(one),
        render: (one) => html`<${Num} value=${members(one)} />` },
    ]} />`
}

const members = (group) => Array.isArray(group.members) ? group.members.length : group.members

function Rate({ name }) {
  const series = `topic.${name.replace(/[^\w-]/g, escape)}.published`
  const history = useHistory((one) => one.name === series || one.label === `${name}: published`, 1)
  if (!history.data?.series.length) return null
  return html`<${Panel}><${Chart} title="Published, the last ten minutes" unit="records/s" ...${history.data} height=${150}
    series=${history.data.series.map((one) => ({ ...one, label: "published" }))} /></${Panel}>`
}

/** The page of one topic. */
export function TopicPage({ name }) {
  const [query, setQuery] = useQuery()
  const [open, setOpen] = useState(null) // "alter", "remove", or the number of a partition
  const mayAlter = useMay("manage", name)
  const poll = usePoll((signal) => get(path`/api/topics/${name}`, { parts: 1 }, { signal }), SECONDS, [name])
  const groups = usePoll((signal) => get("/api/groups", { topic: name }, { signal }), SECONDS, [name])
  const close = () => setOpen(null)
  const tab = query.tab ?? "partitions"
  const actions = html`
    <a class="button" href=${link("/browse/:name", { name })}>Browse</a>
    ${mayAlter && poll.data && html`<${Button} icon="edit" onClick=${() => setOpen("alter")}>Alter</${Button}>
      <${Button} kind="danger" icon="remove" onClick=${() => setOpen("remove")}>Remove</${Button}>`}`
  const gone = poll.error?.status === 404
  return html`<${Heading} title=${name} crumbs=${[["Topics", "#/topics"]]} actions=${!gone && actions} />
    ${gone ? html`<${Notice} kind="warning" title="There is no such topic.">It has been removed, or you may not see it. <a href="#/topics">See all topics.</a></${Notice}>`
    : html`<${Loaded} poll=${poll} what="The topic">${(topic) => html`
      ${topic.failing && html`<${Notice} kind="error" title="The topic refuses records.">${topic.failing}</${Notice}>`}
      <dl class="stats">
        <${Stat} label="Records"><${Num} value=${recordsOf(topic)} /></${Stat}>
        <${Stat} label="Size"><${Bytes} value=${bytesOf(topic)} /></${Stat}>
        <${Stat} label="Partitions"><${Num} value=${topic.partitions.length} /></${Stat}>
        <${Stat} label="Segments"><${Num} value=${total(topic, (one) => one.segments)} /></${Stat}>
        <${Stat} label="Engine" note="a record is ${topic.settings.ack}">${topic.settings.engine}</${Stat}>
      </dl>
      <${Rate} name=${name} />
      <${Tabs} label="Parts of the topic" value=${tab} onChange=${(next) => setQuery({ tab: next === "partitions" ? null : next })} tabs=${[
        { name: "partitions", title: "Partitions", count: topic.partitions.length },
        { name: "settings", title: "Settings" },
        { name: "groups", title: "Groups", count: groups.data?.groups.length },
      ]} />
      ${tab === "settings" ? html`<${Settings} topic=${topic} />`
        : tab === "groups" ? html`<${Loaded} poll=${groups} what="The list of groups">${(found) => html`<${Groups} groups=${found.groups} topic=${topic} />`}</${Loaded}>`
        : html`<${Partitions} topic=${topic} onOpen=${setOpen} />`}
      ${typeof open === "number" && html`<${Segments} topic=${topic} partition=${open} onClose=${close} />`}
      ${open === "remove" && html`<${RemoveTopic} topic=${topic} groups=${groups.data?.groups ?? []} onClose=${close} />`}
      ${open === "alter" && html`<${Dialog} title="Alter ${name}" wide onClose=${close}>
        <${TopicForm} topic=${topic} submit="Save" onCancel=${close} onSubmit=${async ({ partitions, settings }) => {
          await patch(path`/api/topics/${name}`, { ...settings, ...(partitions === undefined ? {} : { partitions }) })
          close()
          toast(`The topic ${name} is altered.`)
          poll.reload()
        }} /></${Dialog}>`}`}</${Loaded}>`}`
}
