// The tree of the state: levels are loaded when they are opened, a page at a time, and only the rows in sight are drawn.

import { html, useCallback, useEffect, useRef, useState } from "../vendor/preact-htm.js"
import { Busy, Empty, Failure, Icon, numText } from "../ui.js"

const ROW = 28
const MARGIN = 12
const PAGE = 300
const REFRESH_MS = 3_000
const REFRESH_MAX = 400

/** Return the rows of the tree in order: nodes, and at the end of a level what is still to be loaded. */
function rowsOf(levels, open, parent = null, depth = 0, rows = []) {
  const level = levels.get(parent)
  if (!level) return rows
  for (const [place, node] of level.nodes.entries()) {
    rows.push({ kind: "node", id: `n${node.key}`, node, depth, parent, place, total: level.total ?? level.nodes.length })
    if (open.has(node.key)) rowsOf(levels, open, node.key, depth + 1, rows)
  }
  if (level.error) rows.push({ kind: "error", id: `e${parent}`, depth, parent, text: level.error.message })
  else if (level.after !== null || level.loading) rows.push({ kind: "more", id: `m${parent}`, depth, parent, level })
  else if (level.nodes.length === 0 && parent !== null) rows.push({ kind: "none", id: `z${parent}`, depth, parent })
  return rows
}

/** Put fresh nodes of a level in the place of those between `after` and the last fresh one. */
function merge(level, from, fresh, isLast) {
  const last = fresh.at(-1)
  let to = level.nodes.length
  if (!isLast && last) {
    const same = level.nodes.findIndex((node, place) => place >= from && node.name === last.name)
    to = same >= 0 ? same + 1 : level.nodes.findIndex((node, place) => place >= from && node.name > last.name)
    if (to < 0) to = level.nodes.length
  }
  return [...level.nodes.slice(0, from), ...fresh, ...level.nodes.slice(to)]
}

/** Return the levels of a tree and what changes them. `source(parent, query, signal)` loads a page of a level. */
function useLevels(source, live) {
  const [levels, setLevels] = useState(new Map())
  const [open, setOpen] = useState(new Set())
  const stop = useRef(new AbortController())
  const now = useRef(levels)
  now.current = levels
  const change = (parent, changes) => setLevels((old) => {
    const level = old.get(parent) ?? { nodes: [], total: null, after: null, loading: false, error: null }
    return new Map(old).set(parent, { ...level, ...(typeof changes === "function" ? changes(level) : changes) })
  })

  const load = useCallback(async (parent, from = null) => {
    const { signal } = stop.current
    change(parent, { loading: true, error: null })
    try {
      const page = await source(parent, { count: PAGE, after: from }, signal)
      if (signal.aborted) return
      change(parent, (level) => ({
        nodes: from === null ? page.nodes : [...level.nodes, ...page.nodes], total: page.total, after: page.after, loading: false,
      }))
    } catch (error) {
      if (!signal.aborted) change(parent, { loading: false, error })
    }
  }, [source])

  const refresh = useCallback(async (parent, from, to) => {
    const level = now.current.get(parent)
    if (!level || level.loading || level.error) return
    const first = Math.max(0, from)
    const count = Math.min(REFRESH_MAX, Math.max(1, to - first + 1))
    const { signal } = stop.current
    try {
      const page = await source(parent, { count, after: first === 0 ? null : level.nodes[first - 1]?.name }, signal)
      if (signal.aborted) return
      change(parent, (old) => {
        const isAll = first + count >= old.nodes.length
        return { nodes: merge(old, first, page.nodes, page.after === null), total: page.total, ...(isAll || page.after === null ? { after: page.after } : {}) }
      })
    } catch (error) {
      if (!signal.aborted && !error.isAway) change(parent, { error })
    }
  }, [source])

  useEffect(() => {
    const gone = stop.current = new AbortController()
    setLevels(new Map())
    load(null)
    for (const key of open) load(key)
    return () => gone.abort()
  }, [source])

  const toggle = (key, on = !open.has(key)) => {
    const next = new Set(open)
    if (on) next.add(key)
    else next.delete(key)
    setOpen(next)
    if (on) load(key)
  }
  return { levels, open, load, refresh, toggle, live }
}

/** The tree, or with `flat` a list of keys. `source` must stay the same function for the same tree. */
export function Tree({ source, selected, onSelect, live, flat = false, reveal, label = "Keys of the state", empty }) {
  const { levels, open, load, refresh, toggle } = useLevels(source, live)
  const box = useRef(null)
  const [view, setView] = useState({ top: 0, height: 600 })
  const rows = rowsOf(levels, flat ? new Set() : open)
  const first = Math.max(0, Math.floor(view.top / ROW) - MARGIN)
  const last = Math.min(rows.length, Math.ceil((view.top + view.height) / ROW) + MARGIN)
  const shown = rows.slice(first, last)
  const state = useRef({})
  state.current = { shown, refresh }

  useEffect(() => {
    if (!box.current) return undefined
    const update = () => setView({ top: box.current.scrollTop, height: box.current.clientHeight })
    const observer = new ResizeObserver(update)
    observer.observe(box.current)
    return () => observer.disconnect()
  }, [rows.length > 0])

  const waiting = shown.find((row) => row.kind === "more" && !row.level.loading)
  useEffect(() => {
    if (waiting) load(waiting.parent, waiting.level.after)
  }, [waiting?.id, waiting?.level.after])

  useEffect(() => {
    if (!live) return undefined
    const timer = setInterval(() => {
      if (document.hidden) return
      const parts = new Map()
      for (const row of state.current.shown) {
        if (row.kind === "none") parts.set(row.parent, [0, PAGE])
        if (row.kind !== "node") continue
        const [from, to] = parts.get(row.parent) ?? [row.place, row.place]
        parts.set(row.parent, [Math.min(from, row.place), Math.max(to, row.place)])
      }
      for (const [parent, [from, to]] of parts) state.current.refresh(parent, from, to)
      if (parts.size === 0) state.current.refresh(null, 0, 0)
    }, REFRESH_MS)
    return () => clearInterval(timer)
  }, [live])

  useEffect(() => { // open the way to a key that an address names
    if (!reveal || flat) return
    const parts = reveal.split("/")
    for (let count = 1; count < parts.length; count += 1) {
      const key = parts.slice(0, count).join("/")
      if (!open.has(key)) {
        toggle(key, true)
        return
      }
    }
  }, [reveal, open])

  const place = rows.findIndex((row) => row.kind === "node" && row.node.key === selected)
  const scrollTo = (number) => {
    const [top, height] = [number * ROW, box.current.clientHeight]
    if (top < box.current.scrollTop) box.current.scrollTop = top
    else if (top + ROW > box.current.scrollTop + height) box.current.scrollTop = top + ROW - height
  }
  const choose = (number) => {
    const step = number > place ? 1 : -1
    let at = Math.min(rows.length - 1, Math.max(0, number))
    while (rows[at] && rows[at].kind !== "node") at += step
    if (!rows[at]) return
    scrollTo(at)
    onSelect(rows[at].node.key)
  }
  const press = (event) => {
    const row = rows[place]
    const jump = Math.max(1, Math.floor(view.height / ROW) - 1)
    const moves = { ArrowDown: place + 1, ArrowUp: place < 0 ? 0 : place - 1, Home: 0, End: rows.length - 1, PageDown: place + jump, PageUp: place - jump }
    if (event.key in moves) choose(moves[event.key])
    else if (row && !flat && event.key === "ArrowRight" && row.node.children) {
      if (open.has(row.node.key)) choose(place + 1)
      else toggle(row.node.key, true)
    } else if (row && !flat && event.key === "ArrowLeft") {
      if (open.has(row.node.key)) toggle(row.node.key, false)
      else if (row.parent !== null) choose(rows.findIndex((one) => one.kind === "node" && one.node.key === row.parent))
    } else if (row && (event.key === "Enter" || event.key === " ")) {
      if (!flat && row.node.children) toggle(row.node.key)
    } else return
    event.preventDefault()
  }

  const root = levels.get(null)
  if (!root || (root.loading && root.nodes.length === 0)) return html`<${Busy} />`
  if (root.error && root.nodes.length === 0) return html`<${Failure} error=${root.error} reload=${() => load(null)} what="The tree" />`
  if (root.nodes.length === 0 && root.after === null) return html`<${Empty} title="There are no keys.">${empty}</${Empty}>`
  const active = place >= first && place < last ? `tree-${place}` : undefined
  return html`<div class="state-tree" role="tree" tabIndex="0" aria-label=${label} aria-activedescendant=${active} ref=${box}
      onKeyDown=${press} onScroll=${(event) => setView({ top: event.currentTarget.scrollTop, height: event.currentTarget.clientHeight })}>
    <div role="presentation" style=${{ height: `${rows.length * ROW}px`, position: "relative" }}>
      ${shown.map((row, number) => html`<${Row} key=${row.id} row=${row} number=${first + number} selected=${row.node?.key === selected}
        isOpen=${open.has(row.node?.key)} flat=${flat} onSelect=${onSelect} onToggle=${toggle} onRetry=${load} />`)}
    </div>
  </div>`
}

function Row({ row, number, selected, isOpen, flat, onSelect, onToggle, onRetry }) {
  const style = { top: `${number * ROW}px`, paddingLeft: `${8 + row.depth * 16}px` }
  if (row.kind !== "node") {
    const { level } = row
    return html`<div class="state-row quiet" role="presentation" style=${style}>
      ${row.kind === "error" ? html`<button type="button" class="linklike" tabIndex="-1" onClick=${() => onRetry(row.parent)}>${row.text} Try again.</button>`
        : row.kind === "none" ? "nothing below" : level.total === null ? "loading more …"
        : `loading ${numText(level.total - level.nodes.length)} more …`}</div>`
  }
  const { node } = row
  const click = () => {
    onSelect(node.key)
    if (!flat && node.children && !node.value) onToggle(node.key)
  }
  const twist = (event) => {
    event.stopPropagation()
    onToggle(node.key)
  }
  return html`<div class=${`state-row${selected ? " chosen" : ""}`} id=${`tree-${number}`} role="treeitem" style=${style} title=${node.key}
      aria-level=${row.depth + 1} aria-setsize=${row.total} aria-posinset=${row.place + 1} aria-selected=${selected}
      aria-expanded=${!flat && node.children ? isOpen : undefined} onClick=${click}>
    ${!flat && html`<span class=${`state-twist${isOpen ? " open" : ""}`} aria-hidden="true" onClick=${node.children ? twist : undefined}>
      ${node.children ? html`<${Icon} name="right" />` : null}</span>`}
    <bdi class="state-name">${node.name === "" ? html`<i class="muted">(empty)</i>` : node.name}</bdi>
    ${node.children > 0 && html`<span class="state-count" title="children">${numText(node.children)}</span>`}
    ${node.value && html`<span class="state-row-value">${node.value.text}</span>`}
  </div>`
}
