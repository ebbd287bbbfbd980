// The settings of a topic: their words, a form for them, and a table that says where each value comes from.

import { html, useState } from "../../vendor/preact-htm.js"
import { Badge, Field, Form, Table, bytesText, durationText, numText } from "../../ui.js"

/** The settings in the order of the form: `kind` says how a value is written, `optional` that it may be empty. */
export const SETTINGS = [
  { name: "retention_seconds", title: "Keep for", kind: "duration", optional: true, help: "Segments whose newest record is older are removed. Such as 7d or 12h; empty: for ever." },
  { name: "retention_bytes", title: "Keep at most, per partition", kind: "size", optional: true, help: "The oldest segments go while a partition is larger. Such as 10GiB; empty: no bound." },
  { name: "retention_records", title: "Keep at least so many records", kind: "number", optional: true, help: "The oldest segments go while the rest has so many. Empty: no bound." },
  { name: "cleanup", title: "Cleanup", kind: "choice", options: ["delete", "compact"], help: "delete removes old segments; compact keeps the last record of each key." },
  { name: "retain", title: "State", kind: "choice", options: ["none", "last"], help: "last also keeps the last event of each subject as state." },
  { name: "ack", title: "Answer a publisher when", kind: "choice", options: ["flushed", "written", "accepted", "replicated"], help: "The record is flushed (survives loss of power), written (survives a killed process), accepted (in memory), or replicated (engine jetstream)." },
  { name: "engine", title: "Engine", kind: "choice", options: ["disk", "memory", "db", "jetstream"], fixed: true, help: "memory does not survive a restart." },
  { name: "segment_bytes", title: "Size of a segment", kind: "size", optional: true, more: true, help: "A log rolls at this size. Empty: the server's value." },
  { name: "segment_seconds", title: "Age of a segment", kind: "duration", optional: true, more: true, help: "A segment also rolls at this age, so that retention by age can remove it." },
  { name: "tombstone_seconds", title: "Keep tombstones for", kind: "duration", more: true, help: "How long a compacted topic shows that a key was removed." },
  { name: "compact_after_seconds", title: "Compact after", kind: "duration", optional: true, more: true, help: "Compaction leaves younger records alone." },
]

const UNITS = [[604_800, "w"], [86_400, "d"], [3_600, "h"], [60, "m"], [1, "s"]]
const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]

/** Return a value as the form shows it: exact, in the largest unit that divides it. */
function written(kind, value) {
  if (value === null || value === undefined) return ""
  const units = kind === "duration" ? UNITS : kind === "size" ? SIZES : []
  const unit = value > 0 && units.find(([size]) => value % size === 0)
  return unit ? `${value / unit[0]}${unit[1]}` : String(value)
}

/** Return a value as the table shows it. */
function shown({ kind, name }, value) {
  if (value === null || value === undefined) return name.startsWith("retention") ? "no bound" : "none"
  if (kind === "duration") return durationText(value * 1000)
  if (kind === "size") return bytesText(value)
  return kind === "number" ? numText(value) : String(value)
}

const SOURCES = {
  topic: ["info", "this topic"],
  config: ["plain", "server's configuration"],
  default: ["plain", "built in"],
}

/** A table of the settings of a topic. */
export function Settings({ topic }) {
  const known = new Set(SETTINGS.map((one) => one.name))
  const others = Object.keys(topic.settings).filter((name) => !known.has(name)).map((name) => ({ name, title: name, kind: "text" }))
  return html`<${Table} caption="Settings of ${topic.name}" rowKey="name" rows=${[...SETTINGS, ...others].filter((one) => one.name in topic.settings)} columns=${[
    { name: "title", title: "Setting",
      render: (one) => html`<span title=${one.help}>${one.title}</span> <code class="muted">${one.name}</code>` },
    { name: "value", title: "Value", nowrap: true,
      render: (one) => html`<strong>${shown(one, topic.settings[one.name])}</strong>` },
    { name: "source", title: "From", render: (one) => {
      const [kind, text] = SOURCES[topic.sources?.[one.name]] ?? ["plain", "unknown"]
      return html`<${Badge} kind=${kind}>${text}</${Badge}>`
    } },
  ]} />`
}

/** A form of a new topic, or of the settings of `topic`: `onSubmit({name, partitions, settings})` gets what was changed. */
export function TopicForm({ topic, submit, onSubmit, onCancel }) {
  const [more, setMore] = useState(false)
  const first = Object.fromEntries(SETTINGS.map((one) => [one.name, topic ? written(one.kind, topic.settings[one.name]) : ""]))
  const now = topic?.partitions.length
  const send = (values) => {
    const settings = {}
    for (const one of SETTINGS) {
      const value = values[one.name]
      if (value === undefined || String(value ?? "") === first[one.name]) continue
      settings[one.name] = value === "" || value === null ? null : value
    }
    const partitions = values.partitions === null || values.partitions === now ? undefined : values.partitions
    return onSubmit({ name: values.name?.trim(), partitions, settings })
  }
  const field = (one) => {
    const empty = topic ? "" : "as the server's configuration says"
    if (one.kind === "choice") {
      const options = topic ? one.options : [{ value: "", title: "as configured" }, ...one.options]
      return html`<${Field} key=${one.name} label=${one.title} name=${one.name} type="select" options=${options} value=${first[one.name]} help=${one.help} />`
    }
    const isNumber = one.kind === "number"
    return html`<${Field} key=${one.name} label=${one.title} name=${one.name} type=${isNumber ? "number" : "text"} min=${isNumber ? 1 : undefined}
      value=${first[one.name]} help=${one.help} placeholder=${empty} />`
  }
  const fields = SETTINGS.filter((one) => !(topic && one.fixed))
  return html`<${Form} submit=${submit} onSubmit=${send} onCancel=${onCancel}>
    <div class="form-row">
      ${!topic && html`<${Field} label="Name" name="name" required maxlength="255" help="Subjects below the name are recorded too: plant also records plant/line1." />`}
      <${Field} label="Partitions" name="partitions" type="number" min=${now ?? 1} max="1024" value=${now ?? ""} placeholder=${topic ? "" : "as configured"}
        help=${topic ? "More let more readers share the topic. The count can grow, never shrink; keys may move to other partitions." : "Ordered logs of the topic. The count can grow, never shrink."} />
    </div>
    <div class="form-row">${fields.filter((one) => !one.more).map(field)}</div>
    <div class="form-row" hidden=${!more}>${fields.filter((one) => one.more).map(field)}</div>
    ${!more && html`<button type="button" class="linklike start" onClick=${() => setMore(true)}>More settings</button>`}
  </${Form}>`
}
