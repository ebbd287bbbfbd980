// A chart of some series over time, and the same figures as a table (a button or the key "t" switches); the history of
// the server, which most charts draw.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import { Icon } from "./basics.js"
import { bytesText, durationText, numText, timeText } from "./format.js"
import { usePoll } from "./hooks.js"
import { usePref } from "./prefs.js"

const HEIGHT = 180
const ROWS = 60
const RETRY_MS = 2_000
const COLOURS = 8
const FORMATS = {
  bytes: bytesText,
  "bytes/s": (value) => (value === null ? "–" : `${bytesText(value)}/s`),
  "records/s": (value) => (value === null ? "–" : `${numText(value)}/s`),
  "messages/s": (value) => (value === null ? "–" : `${numText(value)}/s`),
  connections: numText,
  processors: (value) => (value === null ? "–" : `${numText(Math.round(value * 1000) / 10)} %`),
  seconds: (value) => (value === null ? "–" : durationText(value * 1000)),
  s: (value) => (value === null ? "–" : durationText(value * 1000)),
  ms: (value) => (value === null ? "–" : durationText(value)),
}

const BYTES = Array.from({ length: 50 }, (_, power) => 2 ** power) // marks of round sizes

let library = null

/** Load uPlot when the first chart is shown, not before. */
function load() {
  library ??= import("../vendor/uplot.js").then((module) => module.default, (error) => {
    library = null // it is asked for again
    throw error
  })
  return library
}

/** Return how a unit is written. */
export function formatOf(unit) {
  return FORMATS[unit] ?? ((value) => (value === null || value === undefined ? "–" : `${numText(value)}${unit && unit !== "1" ? ` ${unit}` : ""}`))
}

/** A chart of `series` ({label, points}), all in `unit`, whose last points are of `end_ms` with `step_s` between them.
 *
 * `resets_ms` are moments when the server started: a line is drawn there, and it is said in the table.
 */
export function Chart({ title, series, end_ms, step_s, unit = "", height = HEIGHT, resets_ms = [], level = 3, note }) {
  const [charts, setCharts] = usePref("charts")
  const [mine, setMine] = useState(null)
  useEffect(() => setMine(null), [charts])
  const asTable = mine ?? charts === "table"
  const other = asTable ? "chart" : "table"
  const named = series.map((one) => one.label)
  const hasPoints = series.some((one) => one.points.some((point) => point !== null))
  return html`<figure class="chart">
    <figcaption><${level === 2 ? "h2" : "h3"}>${title}</>
      ${note && html`<span class="muted">${note}</span>`}
      <button type="button" class="icon-button" aria-label="Show ${title} as a ${other}" title="Show as a ${other} (t: all)" onClick=${() => setMine(!asTable)}>
        <${Icon} name=${other} /></button></figcaption>
    ${!hasPoints
      ? html`<p class="chart-none muted">There are no figures of this time.</p>`
      : asTable
        ? html`<${Figures} ...${{ title, series, end_ms, step_s, unit, resets_ms }} />`
        : html`<${Lines} ...${{ title, series, end_ms, step_s, unit, height, resets_ms }} />`}
    ${!asTable && hasPoints && html`<${Legend} series=${series} unit=${unit} />`}
  </figure>`
}

const lastOf = (points) => points.findLast((point) => point !== null) ?? null

const Legend = ({ series, unit }) => html`<ul class="legend">
  ${series.map((one, number) => html`<li key=${one.label}><span class="swatch colour-${number % COLOURS}"></span>${one.label}
    <span class="num">${formatOf(unit)(lastOf(one.points))}</span></li>`)}</ul>`

function Figures({ title, series, end_ms, step_s, unit, resets_ms }) {
  const count = Math.max(0, ...series.map((one) => one.points.length))
  const rows = []
  for (let back = 0; back < Math.min(count, ROWS); back += 1) {
    const time = end_ms - back * step_s * 1000
    rows.push({ time, reset: resets_ms.some((one) => one > time - step_s * 1000 && one <= time),
      values: series.map((one) => one.points[one.points.length - 1 - back] ?? null) })
  }
  const format = formatOf(unit)
  return html`<div class="table-box figures" role="group" aria-label="${title}, as a table" tabIndex="0"><table>
    <caption class="hidden">${title}: the last ${rows.length} values, the newest first</caption>
    <thead><tr><th scope="col">Time</th>${series.map((one) => html`<th key=${one.label} scope="col" class="right">${one.label}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.time}><th scope="row" class="num">${timeText(row.time, { clock: step_s < 60 })}
      ${row.reset && " (server started)"}</th>
      ${row.values.map((value, number) => html`<td key=${number} class="right num">${format(value)}</td>`)}</tr>`)}</tbody>
  </table></div>`
}

/** Return the colours of this theme: the canvas knows no variables. */
function colours(element) {
  const probe = document.createElement("span")
  element.append(probe)
  const of = (name) => {
    probe.className = name
    return getComputedStyle(probe).color
  }
  const found = {
    lines: Array.from({ length: COLOURS }, (_, number) => of(`ink-${number}`)),
    axis: of("ink-axis"),
    grid: of("ink-grid"),
  }
  probe.remove()
  return found
}

function options(uPlot, element, { series, unit, height, zone, resets }) {
  const format = formatOf(unit)
  const inks = colours(element)
  const font = `11px ${getComputedStyle(element).fontFamily}`
  const axis = { stroke: inks.axis, font, grid: { stroke: inks.grid, width: 1 }, ticks: { show: false } }
  return {
    width: Math.max(element.clientWidth, 120),
    height,
    legend: { show: false },
    tzDate: (seconds) => (zone === "utc" ? uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC") : new Date(seconds * 1000)),
    cursor: { drag: { x: false, y: false }, points: { size: 6 } },
    scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high ?? 0) > 0 ? high * 1.08 : 1] } },
    axes: [
      { ...axis, size: 26, space: 70, grid: { show: false }, values: (_, marks) => marks.map((one) => timeText(one * 1000, { zone, clock: true }).slice(0, marks[1] - marks[0] < 60 ? 8 : 5)) },
      { ...axis, size: 68, gap: 4, ...(unit.startsWith("bytes") ? { incrs: BYTES } : {}), values: (_, marks) => marks.map((one) => format(one)) },
    ],
    series: [
      {},
      ...series.map((one, number) => ({
        label: one.label,
        stroke: inks.lines[number % COLOURS],
        width: 1.5,
        points: { show: false },
        fill: series.length === 1 ? inks.lines[0].replace("rgb(", "rgba(").replace(")", ", 0.1)") : undefined,
      })),
    ],
    hooks: { draw: [(plot) => drawResets(plot, resets, inks)] },
  }
}

function drawResets(plot, resets, inks) {
  const { ctx, bbox } = plot
  ctx.save()
  ctx.strokeStyle = inks.axis
  ctx.setLineDash([3, 3])
  for (const moment of resets.current) {
    const x = plot.valToPos(moment / 1000, "x", true)
    if (x < bbox.left || x > bbox.left + bbox.width) continue
    ctx.beginPath()
    ctx.moveTo(x, bbox.top)
    ctx.lineTo(x, bbox.top + bbox.height)
    ctx.stroke()
  }
  ctx.restore()
}

function Lines({ title, series, end_ms, step_s, unit, height, resets_ms }) {
  const place = useRef(null)
  const plot = useRef(null)
  const tip = useRef(null)
  const resets = useRef(resets_ms)
  resets.current = resets_ms
  const [zone] = usePref("zone")
  const [theme] = usePref("theme")
  const [dark, setDark] = useState(matchMedia("(prefers-color-scheme: dark)").matches)
  const labels = series.map((one) => one.label).join("\n")
  const data = useMemo(() => {
    const count = Math.max(0, ...series.map((one) => one.points.length))
    const times = Array.from({ length: count }, (_, number) => (end_ms - (count - 1 - number) * step_s * 1000) / 1000)
    return [times, ...series.map((one) => [...Array(count - one.points.length).fill(null), ...one.points])]
  }, [series, end_ms, step_s])
  const newest = useRef(data)
  newest.current = data

  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)")
    const update = () => setDark(query.matches)
    query.addEventListener("change", update)
    return () => query.removeEventListener("change", update)
  }, [])

  useEffect(() => {
    let gone = false
    const element = place.current
    const show = (chart) => {
      const { idx, left } = chart.cursor
      const at = idx ?? -1
      const text = at < 0 || left < 0 ? "" : [timeText(chart.data[0][at] * 1000, { zone, clock: step_s < 60 }),
        ...chart.series.slice(1).map((one, number) => `${one.label} ${formatOf(unit)(chart.data[number + 1][at] ?? null)}`)].join(" · ")
      if (tip.current) tip.current.textContent = text
    }
    let timer = 0
    const begin = () => load().then((uPlot) => {
      if (gone) return
      const settings = options(uPlot, element, { series, unit, height, zone, resets })
      settings.hooks.setCursor = [show]
      plot.current = new uPlot(settings, newest.current, element)
    }, () => {
      timer = setTimeout(begin, RETRY_MS)
    })
    begin()
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: Math.max(element.clientWidth, 120), height }))
    observer.observe(element)
    return () => {
      gone = true
      clearTimeout(timer)
      observer.disconnect()
      plot.current?.destroy()
      plot.current = null
    }
  }, [labels, unit, height, zone, theme, dark, step_s])

  useEffect(() => {
    plot.current?.setData(data)
  }, [data])

  const words = series.map((one) => `${one.label} ${formatOf(unit)(lastOf(one.points))}`).join(", ")
  return html`<div class="plot">
    <div ref=${place} role="img" aria-label="${title}: ${words}. The table has all figures."></div>
    <div class="tip num" ref=${tip} aria-hidden="true"></div></div>`
}

// -- the history: the first answer has all points, later answers only the new points

const POINTS = { 1: 600, 10: 720, 60: 2880 }
const LIST_MS = 15_000
const POLL_SECONDS = 2
const AT_ONCE = 100

/** Return old points followed by the new ones, which overlap or leave a gap. */
function joined(old, fresh, steps, size) {
  const kept = old.slice(0, old.length - Math.max(fresh.length - steps, 0))
  const gap = Array(Math.max(steps - fresh.length, 0)).fill(null)
  return [...kept, ...gap, ...fresh].slice(-size)
}

/** Poll the series that `choose({name, unit, label})` accepts, with points of 1, 10 or 60 seconds.
 *
 * Returns what `usePoll` returns; `data` is `{step_s, end_ms, series: [{name, unit, label, points}], resets_ms, left_out}`.
 */
export function useHistory(choose, step) {
  const kept = useRef({ step: 0, read: 0, list: null, data: null })
  return usePoll(async (signal) => {
    const now = kept.current
    if (now.step !== step) Object.assign(now, { step, data: null })
    if (!now.list || Date.now() - now.read > LIST_MS || !now.list.series.some(choose)) {
      now.list = await get("/api/history", {}, { signal })
      now.read = Date.now()
    }
    const names = now.list.series.filter(choose).map((one) => one.name).slice(0, AT_ONCE)
    if (!names.length) return { step_s: step, end_ms: Date.now(), series: [], resets_ms: [], left_out: now.list.left_out }
    const before = now.data
    const isSame = before && before.series.length === names.length && before.series.every((one) => names.includes(one.name))
    const passed = isSame ? Math.ceil((Date.now() - before.end_ms) / 1000 / step) : Infinity
    const count = Math.min(POINTS[step], Math.max(passed, 0) + 5)
    const fresh = await get("/api/history", { series: names.join(","), step, count }, { signal })
    const steps = isSame ? Math.round((fresh.end_ms - before.end_ms) / 1000 / step) : 0
    const goesOn = isSame && steps >= 0 && count < POINTS[step] && (!fresh.resets_ms.length || before.resets_ms.includes(fresh.resets_ms[0]))
    if (goesOn) {
      const old = new Map(before.series.map((one) => [one.name, one.points]))
      for (const one of fresh.series) one.points = joined(old.get(one.name) ?? [], one.points, steps, POINTS[step])
      fresh.resets_ms = [...new Set([...before.resets_ms, ...fresh.resets_ms])].filter((one) => one > fresh.end_ms - POINTS[step] * step * 1000)
    }
    now.data = { ...fresh, left_out: now.list.left_out }
    return now.data
  }, Math.max(POLL_SECONDS, Math.min(step, 10)), [step])
}
