// A chart of some series over time, and the same figures as a table: a button or the key "t" switches.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js"
import { Button, Icon } from "./basics.js"
import { bytesText, durationText, numText, timeText } from "./format.js"
import { usePref } from "./prefs.js"

const HEIGHT = 180
const ROWS = 60
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

let library = null

/** Load uPlot when the first chart is shown, not before. */
function load() {
  library ??= import("../vendor/uplot.js").then((module) => module.default)
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
  return html`<div class="table-box figures" role="region" aria-label="${title}, as a table" tabIndex="0"><table>
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
      { ...axis, size: 68, gap: 4, values: (_, marks) => marks.map((one) => format(one)) },
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
    load().then((uPlot) => {
      if (gone) return
      const settings = options(uPlot, element, { series, unit, height, zone, resets })
      settings.hooks.setCursor = [show]
      plot.current = new uPlot(settings, newest.current, element)
    })
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: Math.max(element.clientWidth, 120), height }))
    observer.observe(element)
    return () => {
      gone = true
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
