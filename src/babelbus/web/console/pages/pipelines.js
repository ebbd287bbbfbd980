// Pipelines on Spark: the graph from sources to sinks, rows, lag, batches and failures, as their runners tell them.

import { html, useEffect, useState } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import {
  Badge, Bytes, Duration, Empty, Heading, Icon, Loaded, Notice, Num, Panel, Rate, Table, Time,
  link, numText, usePoll, usePref,
} from "../ui.js"

const SECONDS = 3
const STATUS = { running: "good", stopped: "plain", failed: "error", silent: "warning" }
const WORDS = { running: "running", stopped: "stopped", failed: "failed", silent: "not heard of" }
const BOX = { width: 168, height: 46, gap: 44, space: 14, pad: 8 }
const ARROW = 6
const SMALLEST = 0.75 // a graph that needs more room than that can be scrolled

// -- the graph -------------------------------------------------------------------------------------------------------

/** Return the nodes of a pipeline; a sink may have the name of a step. */
const nodesOf = (pipeline) => pipeline.nodes.map((node) => ({ ...node, id: node.kind === "sink" ? `sink ${node.name}` : node.name }))

/** Return nodes with their places: a node stands one layer behind the last of those that feed it, sinks stand last. */
function layOut(nodes, across) {
  const layerOf = new Map()
  const byId = new Map(nodes.map((node) => [node.id, node]))
  for (const node of nodes) {
    const before = node.inputs.map((name) => layerOf.get(name) ?? 0)
    layerOf.set(node.id, node.kind === "source" ? 0 : 1 + Math.max(0, ...before))
  }
  const last = Math.max(0, ...layerOf.values())
  const layers = Array.from({ length: last + 1 }, () => []) // of names, in order; one that only sinks left is empty
  for (const node of nodes) {
    if (node.kind === "sink") layerOf.set(node.id, last)
    layers[layerOf.get(node.id)].push(node.id)
  }
  // An edge over several layers passes a bend in each of them, so that it crosses no box.
  const edges = []
  const above = new Map()
  for (const node of nodes) {
    for (const name of node.inputs.filter((one) => byId.has(one) && layerOf.get(one) < layerOf.get(node.id))) {
      const bends = []
      for (let layer = layerOf.get(name) + 1; layer < layerOf.get(node.id); layer += 1) {
        const bend = `${name}\n${node.id}\n${layer}`
        layers[layer].push(bend)
        bends.push(bend)
      }
      const way = [name, ...bends, node.id]
      edges.push(way)
      way.slice(1).forEach((id, number) => above.set(id, [...(above.get(id) ?? []), way[number]]))
    }
  }
  order(layers, above)
  return place(layers, edges, byId, across)
}

/** Put each layer into the order of what feeds it, and the layers before into that of what they feed. */
function order(layers, above) {
  const below = new Map()
  for (const [id, feeders] of above) for (const one of feeders) below.set(one, [...(below.get(one) ?? []), id])
  const sort = (layer, beside, near) => {
    const places = new Map((beside ?? []).map((id, number) => [id, number]))
    const middle = (id) => {
      const found = (near.get(id) ?? []).filter((one) => places.has(one)).map((one) => places.get(one))
      return found.length ? found.reduce((all, one) => all + one, 0) / found.length : layer.indexOf(id)
    }
    const keys = new Map(layer.map((id) => [id, middle(id)]))
    layer.sort((one, other) => keys.get(one) - keys.get(other))
  }
  for (let round = 0; round < 4; round += 1) {
    for (let at = layers.length - 2; at >= 0; at -= 1) sort(layers[at], layers[at + 1], below)
    for (let at = 1; at < layers.length; at += 1) sort(layers[at], layers[at - 1], above)
  }
}

/** Return boxes and edges with their places, and the size of the whole. */
function place(layers, edges, byId, across) {
  const most = Math.max(1, ...layers.map((layer) => layer.length))
  const [long, wide] = across ? [BOX.width + BOX.gap, BOX.height + BOX.space] : [BOX.height + BOX.gap, BOX.width + BOX.space]
  const places = new Map()
  layers.forEach((layer, number) => layer.forEach((id, row) => {
    const [along, side] = [BOX.pad + number * long, BOX.pad + (row + (most - layer.length) / 2) * wide]
    places.set(id, across ? { x: along, y: side } : { x: side, y: along })
  }))
  const boxes = [...byId.values()].map((node) => ({ ...node, ...places.get(node.id) }))
  const size = { along: layers.length * long - BOX.gap + 2 * BOX.pad, side: most * wide - BOX.space + 2 * BOX.pad }
  const ways = edges.map((way) => ({ key: way.join("\n"), d: curve(way.map((id) => places.get(id)), across) }))
  return { boxes, ways, width: across ? size.along : size.side, height: across ? size.side : size.along }
}

/** Return the path of an edge through the middles of what it passes. */
function curve(points, across) {
  const [half, full] = across ? [BOX.height / 2, BOX.width] : [BOX.width / 2, BOX.height]
  const flat = points.map(({ x, y }) => (across ? [x, y + half] : [y, x + half])) // along the flow, and beside it
  const point = ([along, side]) => (across ? `${along} ${side}` : `${side} ${along}`)
  const parts = [`M${point([flat[0][0] + full, flat[0][1]])}`]
  for (let at = 1; at < flat.length; at += 1) {
    const isLast = at === flat.length - 1
    const from = [flat[at - 1][0] + full, flat[at - 1][1]]
    const to = [flat[at][0] - (isLast ? ARROW : 0), flat[at][1]]
    const middle = (from[0] + to[0]) / 2
    parts.push(`C${point([middle, from[1]])} ${point([middle, to[1]])} ${point(to)}`)
    if (!isLast) parts.push(`L${point([flat[at][0] + full, flat[at][1]])}`)
  }
  return parts.join("")
}

const shorten = (text, letters) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text)

/** Return whether the screen has room for a graph from left to right. */
function useAcross() {
  const query = matchMedia("(min-width: 901px)")
  const [across, setAcross] = useState(query.matches)
  useEffect(() => {
    const update = () => setAcross(query.matches)
    query.addEventListener("change", update)
    return () => query.removeEventListener("change", update)
  }, [])
  return across
}

function Drawing({ pipeline, nodes }) {
  const across = useAcross()
  const { boxes, ways, width, height } = layOut(nodes, across)
  const status = new Map(pipeline.sinks.map((sink) => [`sink ${sink.name}`, sink.status]))
  const arrow = `arrow-${pipeline.name}`
  return html`<div class="graph-box" role="region" aria-label="Graph of pipeline ${pipeline.name}" tabIndex="0">
    <svg class="graph" width=${width} height=${height} viewBox="0 0 ${width} ${height}" style=${{ minWidth: `${Math.round(width * SMALLEST)}px` }} role="img"
      aria-label="From sources to sinks: ${nodes.map((node) => node.name).join(", ")}. The button beside the title shows the graph as a table.">
      <defs><marker id=${arrow} viewBox="0 0 8 8" refX="2" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path class="graph-head" d="M0 0 8 4 0 8z" /></marker></defs>
      ${ways.map((way) => html`<path key=${way.key} class="graph-edge" d=${way.d} marker-end="url(#${arrow})" />`)}
      ${boxes.map((node) => html`<g key=${node.id} class="graph-node ${node.kind} ${status.get(node.id) ?? ""}" transform="translate(${node.x} ${node.y})">
        <title>${node.kind} ${node.name}${node.about && `: ${node.about}`}</title>
        <rect width=${BOX.width} height=${BOX.height} rx="6" />
        <text x="10" y="19" class="graph-name">${shorten(node.name, 22)}</text>
        <text x="10" y="36" class="graph-about">${shorten(node.about || node.kind, 24)}</text></g>`)}
    </svg></div>`
}

/** Return the topic that a node reads or writes, null if it is none. */
function topicOf(node) {
  const found = /^(?:topic|state) ([^,]+)$/.exec(node.about)
  return found ? found[1] : null
}

const Nodes = ({ nodes }) => html`<${Table} caption="Sources, steps and sinks" rows=${nodes} columns=${[
  { name: "name", title: "Name" },
  { name: "kind", title: "Kind" },
  { name: "about", title: "About", grow: true,
    render: (node) => topicOf(node) ? html`<a href=${link("/topics/:topic", { topic: topicOf(node) })}>${node.about}</a>` : node.about || "–" },
  { name: "inputs", title: "Fed by", render: (node) => node.inputs.join(", ") || "–" },
]} />`

function Graph({ pipeline }) {
  const [charts] = usePref("charts")
  const [mine, setMine] = useState(null)
  useEffect(() => setMine(null), [charts])
  const asTable = mine ?? charts === "table"
  const other = asTable ? "chart" : "table"
  if (pipeline.nodes.length === 0) return html`<p class="muted">The runner of this pipeline does not tell what feeds its sinks: it is older than this server.</p>`
  const nodes = nodesOf(pipeline)
  return html`<div class="graph-head-row"><h3>From sources to sinks</h3>
      <button type="button" class="icon-button" aria-label="Show the graph of ${pipeline.name} as a ${asTable ? "drawing" : "table"}" title="Show as a ${asTable ? "drawing" : "table"} (t: all)"
        onClick=${() => setMine(!asTable)}><${Icon} name=${other} /></button></div>
    ${asTable ? html`<${Nodes} nodes=${nodes} />` : html`<${Drawing} pipeline=${pipeline} nodes=${nodes} />`}`
}

// -- figures ---------------------------------------------------------------------------------------------------------

const COLUMNS = [
  { name: "name", title: "Sink",
    render: (sink) => html`${sink.name} <${Badge} kind=${STATUS[sink.status]}>${WORDS[sink.status]}</${Badge}>` },
  { name: "rows_in", title: "Rows in", right: true,
    render: (sink) => html`<${Num} value=${sink.rows_in} /><br /><small class="muted"><${Rate} value=${sink.rows_in_per_second} /></small>` },
  { name: "rows_out", title: "Rows out", right: true,
    render: (sink) => html`<${Num} value=${sink.rows_out} /><br /><small class="muted"><${Rate} value=${sink.rows_out_per_second} /></small>` },
  { name: "lag_records", title: "Lag", right: true },
  { name: "batches", title: "Batches", right: true, wide: true,
    render: (sink) => html`<${Num} value=${sink.batches} />${sink.batches > 0 && html`<br /><small class="muted"><${Duration} ms=${sink.batch_seconds / sink.batches * 1000} /> each</small>`}` },
  { name: "state", title: "State", right: true, wide: true,
    render: (sink) => html`<${Num} value=${sink.state_rows} /><br /><small class="muted"><${Bytes} value=${sink.state_bytes} /></small>` },
  { name: "rows_late", title: "Late", right: true, wide: true },
  { name: "rows_lost", title: "Lost", right: true, wide: true,
    render: (sink) => html`<span class=${sink.rows_lost ? "error-text" : ""}><${Num} value=${sink.rows_lost} /></span>` },
  { name: "failures", title: "Failures", right: true,
    render: (sink) => html`<span class=${sink.failures ? "error-text" : ""}><${Num} value=${sink.failures} /></span>` },
]

/** Return the word for a whole pipeline: the worst of its sinks. */
function statusOf(pipeline) {
  const found = new Set(pipeline.sinks.map((sink) => sink.status))
  return ["failed", "silent", "running", "stopped"].find((one) => found.has(one)) ?? "stopped"
}

function Pipeline({ pipeline }) {
  const status = statusOf(pipeline)
  const failed = pipeline.sinks.filter((sink) => sink.error)
  const watermarks = pipeline.sinks.filter((sink) => sink.watermark)
  return html`<${Panel} title=${pipeline.name}
    actions=${html`<${Badge} kind=${STATUS[status]}>${WORDS[status]}</${Badge}>
      <small class="muted">last report <${Time} ms=${pipeline.heard_ms} ago /></small>`}>
    ${pipeline.silent && html`<${Notice} kind="warning">Nothing was heard of this pipeline for a while: its process has ended, or it does not reach the server. The figures are those of its last report.</${Notice}>`}
    ${failed.map((sink) => html`<${Notice} key=${sink.name} kind=${sink.status === "running" ? "warning" : "error"}
      title=${`The query of sink ${sink.name} failed${sink.failures > 1 ? ` ${numText(sink.failures)} times, the last time` : ""}:`}>
      ${sink.error}${sink.error_ms !== null && html` <small class="muted">(<${Time} ms=${sink.error_ms} />)</small>`}
      ${sink.status === "running" && " It runs again."}</${Notice}>`)}
    <${Graph} pipeline=${pipeline} />
    <${Table} caption="Sinks of pipeline ${pipeline.name}" columns=${COLUMNS} rows=${pipeline.sinks} rowKey="name" empty="The pipeline has told nothing of its sinks yet." />
    ${watermarks.length > 0 && html`<p class="muted">Watermark: ${watermarks.map((sink, number) => html`<span key=${sink.name}>${number > 0 && ", "}${sink.name} <${Time} ms=${Date.parse(sink.watermark)} /></span>`)}</p>`}
  </${Panel}>`
}

function Page() {
  const poll = usePoll((signal) => get("/api/pipelines", {}, { signal }), SECONDS)
  return html`<${Heading} title="Pipelines">Spark pipelines that have reported to this server within a day.</${Heading}>
    <${Loaded} poll=${poll} what="The list of pipelines">${({ pipelines }) => pipelines.length === 0
      ? html`<${Empty} title="No pipeline has reported." actions=${html`<code>babelbus pipeline run FILE</code>`}>
          A pipeline reports every five seconds while it runs.</${Empty}>`
      : pipelines.map((pipeline) => html`<${Pipeline} key=${pipeline.name} pipeline=${pipeline} />`)}</${Loaded}>`
}

export default { Page }
