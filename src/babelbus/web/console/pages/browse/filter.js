// The filter of a search: where it is typed, how far the search came, and the search itself.

import { html, useEffect, useRef, useState } from "../../vendor/preact-htm.js"
import { lines, path } from "../../api.js"
import { Badge, Button, Icon, Notice, Num, Time, numText } from "../../ui.js"

const COUNT = 50
const ROWS_MAX = 2_000

const SIGNS = "= != < <= > >= contains like exists"
const EXAMPLES = [
  ["/amount > 100", "a number in a payload of JSON"],
  ['payload contains "timeout"', "a text in the payload"],
  ['key like "eu-*" and not headers["retry"] exists', "key and headers"],
]

/** The field of the filter. A filter that is wrong is refused with the place of the fault below it. */
export function FilterBox({ topic, value, onChange }) {
  const [text, setText] = useState(value)
  const [fault, setFault] = useState(null)
  useEffect(() => setText(value), [value])
  useEffect(() => setFault(null), [value, text])
  const search = async (event) => {
    event?.preventDefault()
    const next = text.trim()
    if (next) {
      try {
        await check(topic, next)
      } catch (error) {
        if (error.code === "invalid_filter") {
          setFault({ text: next, message: error.message, column: error.told?.column ?? 1 })
          return
        }
      }
    }
    onChange(next || null)
  }
  return html`<form onSubmit=${search} class="filter">
    <div class="toolbar">
      <label class="search wide"><span class="hidden">Filter</span><${Icon} name="search" />
        <input type="search" data-search value=${text} placeholder='Filter, such as /amount > 100 and key like "eu-*"' spellcheck=${false} autocomplete="off"
          aria-invalid=${Boolean(fault)} aria-describedby=${fault ? "filter-fault" : undefined} class="mono"
          onInput=${(event) => setText(event.currentTarget.value)} /></label>
      <${Button} type="submit" kind="primary" icon="search">Search</${Button}>
      ${value && html`<${Button} onClick=${() => onChange(null)}>Clear</${Button}>`}
    </div>
    <div id="filter-fault" aria-live="polite">${fault && html`<${Notice} kind="error" title="The filter cannot be read.">
      ${fault.message}<pre class="mono">${caret(fault)}</pre></${Notice}>`}</div>
    <details><summary>How a filter is written</summary>
      <ul>${EXAMPLES.map(([example, about]) => html`<li key=${example}><button type="button" class="linklike mono" onClick=${() => setText(example)}>${example}</button> ${about}</li>`)}</ul>
      <p class="muted">Fields: <code>key</code>, <code>subject</code>, <code>payload</code>, <code>headers["name"]</code>, <code>/pointer/into/json</code>.
        Tests: <code>${SIGNS}</code>. Join them with <code>and</code>, <code>or</code>, <code>not</code> and parentheses.</p>
    </details>
  </form>`
}

/** Ask the server whether a filter can be read: a search from behind the end reads nothing. */
const check = (topic, filter) => {
  const stop = new AbortController()
  return lines(path`/api/topics/${topic}/search`, { filter, offset: Number.MAX_SAFE_INTEGER }, () => stop.abort(), stop.signal).catch((error) => {
    if (!stop.signal.aborted) throw error
  })
}

function caret({ text, column }) {
  const start = Math.max(0, column - 41)
  return `${text.slice(start, start + 80)}\n${" ".repeat(Math.max(0, column - 1 - start))}^`
}

/** Search while the page is open: `{rows, progress, running, error, notes, goOn, stop, again}`. */
export function useSearch(topic, query) {
  const [state, setState] = useState({ rows: [], progress: null, running: true, error: null, notes: [], records: 0 })
  const [from, setFrom] = useState({ place: "", turn: 0 })
  const control = useRef(null)
  useEffect(() => {
    const stop = new AbortController()
    control.current = stop
    let waiting = []
    let timer = 0
    const before = { records: 0 }
    setState((old) => {
      before.records = old.records
      return { ...old, running: true, error: null }
    })
    const draw = () => {
      timer = 0
      const batch = waiting
      waiting = []
      const progress = batch.findLast((line) => line.progress)?.progress
      setState((old) => ({
        ...old,
        rows: [...old.rows, ...batch.filter((line) => line.record).map((line) => line.record)].slice(0, ROWS_MAX),
        progress: progress ?? old.progress,
        records: progress ? before.records + progress.records : old.records,
        notes: [...old.notes, ...batch.flatMap((line) => line.progress?.notes ?? [])].slice(0, 20),
      }))
    }
    const take = (line) => {
      waiting.push(line)
      timer ||= setTimeout(draw, 100)
    }
    const end = (error) => {
      clearTimeout(timer)
      draw()
      setState((old) => ({ ...old, running: false, error: stop.signal.aborted ? null : error ?? null }))
    }
    const range = from.place ? { from: from.place, partition: query.partition } : { partition: query.partition, offset: query.offset, time_ms: query.time }
    lines(path`/api/topics/${topic}/search`, { filter: query.filter, count: COUNT, ...range }, take, stop.signal).then(() => end(), end)
    return () => {
      stop.abort()
      clearTimeout(timer)
    }
  }, [topic, from.place, from.turn])
  const { progress } = state
  const place = progress && (progress.next || `${progress.partition}:${progress.offset}`)
  return {
    ...state,
    stop: () => control.current.abort(),
    goOn: () => setFrom((old) => ({ place, turn: old.turn + 1 })),
    again: () => setFrom((old) => ({ place: place ?? "", turn: old.turn + 1 })),
  }
}

/** How far the search came, why it stopped, and how it goes on. */
export function SearchProgress({ search, hasPartitions }) {
  const { progress, running, rows, notes, records } = search
  if (!progress) return html`<p role="status" class="muted">Searching …</p>`
  const where = html`offset <${Num} value=${progress.offset} /> of <${Num} value=${progress.end_offset} />${hasPartitions && ` in partition ${progress.partition}`}`
  const kind = progress.why === "ended" || progress.why === "removed" ? "warning" : progress.done ? "good" : "info"
  const reason = running ? "Searching …" : progress.text || "The search was stopped."
  const actions = running
    ? html`<${Button} small onClick=${search.stop}>Stop</${Button}>`
    : !progress.done && progress.why !== "removed" && html`<${Button} small kind="primary" onClick=${search.goOn}>Go on</${Button}>`
  return html`<${Notice} kind=${running ? "info" : kind} title=${reason} actions=${actions}>
    Searched <${Num} value=${records} /> records up to ${where}${progress.time_ms > 0 && html`, <${Time} ms=${progress.time_ms} />`}.
    <${Badge} kind=${rows.length ? "good" : "plain"}>${numText(rows.length)} found</${Badge}>
    ${rows.length >= ROWS_MAX && " The page shows no more than these."}
    ${notes.map((one, number) => html`<p key=${number}>${one}</p>`)}
  </${Notice}>`
}
