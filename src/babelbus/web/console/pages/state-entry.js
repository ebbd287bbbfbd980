// One key of the state: its value as it changes, the changes before, locks and wills; edit and delete.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js"
import { del, lines, put } from "../api.js"
import {
  Badge, Button, Bytes, Confirm, Dialog, Empty, Failure, Field, Loaded, Notice, Num, Table, Tabs, Time, copyText, numText,
  toast, useMay, usePoll,
} from "../ui.js"
import { Preview, Source, Value, ValueDiff, ask, stateAddress } from "./state-values.js"
import { Owner } from "./state-owners.js"

const VIEW_BYTES = 64 * 1024
const EDIT_BYTES_MAX = 2 ** 20
const EVERY_MS = 500
const RETRY_MS = 2_000
const REVISIONS = 50
const ROW_BYTES = 4_096
const CHANGED = ["version_mismatch", "value_changed", "versioned"]

/** Return the entry of a key, kept fresh by a stream while `live`; `at` is a moment of the past. */
function useEntry(key, at, live, bytes) {
  const poll = usePoll(async (signal) => {
    try {
      return await ask("/api/state/entry", { key, bytes_max: bytes, as_of_time: at }, { signal })
    } catch (error) {
      if (at !== null && error.code === "no_such_key") return { key, value: null }
      throw error
    }
  }, 0, [key, at, bytes])
  const [change, setChange] = useState(null)
  const { reload } = poll
  useEffect(() => {
    if (!live || at !== null) return undefined
    setChange(null)
    reload()
    const stop = new AbortController()
    let timer = 0
    const follow = async () => {
      try {
        await lines(stateAddress("/api/state/watch", { pattern: key, every_ms: EVERY_MS, bytes_max: bytes }), undefined, (line) => {
          if (line.dropped) reload()
          else setChange((old) => ({ ...line, number: (old?.number ?? 0) + (line.timestamp ? 1 : 0) })) // the first line is the present value
        }, stop.signal)
      } catch (error) {
        if (stop.signal.aborted) return
        if (error.status === 403 || error.status === 401) return // the entry itself says so
      }
      if (stop.signal.aborted) return
      timer = setTimeout(() => {
        reload()
        follow()
      }, RETRY_MS)
    }
    follow()
    return () => {
      stop.abort()
      clearTimeout(timer)
    }
  }, [key, at, live, bytes])
  const entry = poll.data && change
    ? { ...poll.data, value: change.deleted ? null : { text: change.text, bytes: change.bytes, clipped: change.bytes > bytes, version: change.version } }
    : poll.data
  return { poll, entry: entry?.key === key ? entry : undefined, change }
}

function Facts({ entry, change, last, at, name }) {
  const { data, error } = last
  const revision = change?.number ? change : data?.revisions.at(-1)
  const version = entry.value?.version
  return html`<dl class="pairs">
    <dt>Size</dt><dd>${entry.value ? html`<${Bytes} value=${entry.value.bytes} />` : "no value"}</dd>
    ${version > 0 && html`<dt>Version</dt><dd><${Num} value=${version} /> <span class="muted">set with compare-and-set</span></dd>`}
    ${at === null && html`<dt>Last change</dt><dd aria-live="off">${revision
      ? html`<${Time} ms=${revision.timestamp} precise /> <${Source} source=${revision.source} />${revision.deleted && html` <${Badge} kind="warning">deleted</${Badge}>`}`
      : name.startsWith("$SYS") ? html`<span class="muted">The server keeps no past of its own keys.</span>`
      : error ? html`<span class="muted">${error.message}</span>` : data ? html`<span class="muted">no change is stored</span>` : "…"}</dd>`}
    ${entry.children > 0 && html`<dt>Children</dt><dd><${Num} value=${entry.children} /></dd>`}
  </dl>`
}

/** Change a value, or make a new one when `entry` is null. The server refuses it when somebody else was faster. */
export function Edit({ name, entry, onClose, onSaved }) {
  const isNew = !entry
  const [key, setKey] = useState(name ?? "")
  const [text, setText] = useState(entry?.value?.text ?? "")
  const [base, setBase] = useState(entry ?? { digest: "", value: null })
  const [other, setOther] = useState(null)
  const [versioned, setVersioned] = useState(false)
  const [error, setError] = useState(null)
  const [busy, setBusy] = useState(false)
  let fault = null
  try {
    JSON.parse(text)
  } catch (failure) {
    fault = failure.message
  }
  const save = async () => {
    setBusy(true)
    setError(null)
    const version = base.value?.version || (versioned ? 0 : undefined)
    try {
      await put(stateAddress("/api/state/value", { key, version, digest: base.digest }), undefined, { text })
      toast(isNew ? `${key} has a value now.` : "The value is changed.")
      onSaved(key)
      onClose()
    } catch (failure) {
      setBusy(false)
      if (!CHANGED.includes(failure.code)) {
        setError(failure)
        return
      }
      try {
        const found = await ask("/api/state/entry", { key, bytes_max: EDIT_BYTES_MAX })
        const last = await ask("/api/state/revisions", { key, max: 1, bytes_max: 0 }).catch(() => null)
        setOther({ entry: found, revision: last?.revisions.at(-1) })
      } catch (second) {
        setError(second)
      }
    }
  }
  const overwrite = () => {
    setBase(other.entry)
    setOther(null)
  }
  const take = () => {
    setText(other.entry.value?.text ?? "")
    overwrite()
  }
  const mine = { text, bytes: new Blob([text]).size }
  return html`<${Dialog} wide title=${isNew ? "New key" : "Edit the value"}
    onClose=${() => busy || onClose()} actions=${other ? html`
      <${Button} onClick=${take}>Edit the other value</${Button}>
      <${Button} kind="primary" onClick=${overwrite}>Go on with my value</${Button}>` : html`
      <${Button} onClick=${onClose} disabled=${busy}>Cancel</${Button}>
      <${Button} kind="primary" busy=${busy} disabled=${fault !== null || (isNew && key === "")} onClick=${() => { save() }}>Save</${Button}>`}>
    ${other ? html`
      <${Notice} kind="warning" title=${isNew ? "The key has a value already." : "Somebody else has changed the value meanwhile."}>
        ${other.revision && html`It was ${other.revision.deleted ? "deleted" : "set"} <${Time} ms=${other.revision.timestamp} ago /> by <${Source} source=${other.revision.source} />. `}
        Nothing of yours is stored yet.</${Notice}>
      <${ValueDiff} before=${other.entry.value} after=${mine} titles=${["the other value", "your value"]} />`
    : html`
      ${isNew ? html`<${Field} label="Key" name="key" value=${key} onChange=${setKey} help="Parts are separated by /." />`
        : html`<p><code>${name}</code></p>`}
      <${Field} label="Value (JSON)" type="textarea" name="value" rows="14" value=${text} onChange=${setText} class="state-edit"
        aria-invalid=${fault !== null && text !== ""} />
      <p class=${fault && text ? "error-text" : "muted"} role="status">${text === "" ? "Enter a JSON value, such as 12 or {\"on\": true}." : fault ? `This is no JSON: ${fault}` : `JSON of ${numText(mine.bytes)} bytes.`}</p>
      ${!base.value?.version && html`<${Field} type="checkbox" label="Count versions from now on" value=${versioned} onChange=${setVersioned}
        help="From then on only writers that name the current version can change the value (compare-and-set)." />`}
      ${error && html`<${Notice} kind="error">${error.message}</${Notice}>`}`}
  </${Dialog}>`
}

function Delete({ name, entry, onClose, onDone }) {
  const [below, setBelow] = useState(!entry.value)
  const remove = async () => {
    if (below) {
      const { deleted } = await del(stateAddress("/api/state/values", { pattern: `${name}/#` }))
      toast(`${numText(deleted)} ${deleted === 1 ? "value is" : "values are"} deleted.`)
    } else {
      await del(stateAddress("/api/state/value", { key: name, digest: entry.digest }))
      toast("The value is deleted.")
    }
    onDone()
  }
  return html`<${Confirm} title="Delete" confirm="Delete" typed=${below ? name : undefined} onConfirm=${remove}
    onClose=${onClose}
      lost=${[below ? `every value at and below ${name}` : `the value of ${name}`]}>
    <p>Live subscribers hear of it. The history keeps the values until compaction removes them.</p>
    ${entry.children > 0 && entry.value && html`<${Field} type="checkbox" label=${`Also everything below (${numText(entry.children)} children)`} value=${below} onChange=${setBelow} />`}
  </${Confirm}>`
}

function History({ name, at, setAt, stamp }) {
  const [before, setBefore] = useState(null)
  const [pair, setPair] = useState(null)
  const [older, setOlder] = useState([])
  const poll = usePoll((signal) => ask("/api/state/revisions", { key: name, max: REVISIONS, bytes_max: ROW_BYTES }, { signal, timeout: 120_000 }), 0, [name, stamp])
  useEffect(() => setOlder([]), [name])
  const more = async (offset) => {
    const page = await ask("/api/state/revisions", { key: name, max: REVISIONS, before: offset, bytes_max: ROW_BYTES }, { timeout: 120_000 })
    setBefore(page.revisions.length)
    setOlder([...page.revisions, ...older])
  }
  const viewOf = (one) => (!one || one.deleted ? null : { text: one.text, bytes: one.bytes, clipped: one.bytes > ROW_BYTES, version: one.version ?? 0 })
  return html`<${Loaded} poll=${poll} what="The history">${(data) => {
    const newest = data.revisions
    const all = [...older.filter((one) => newest.length === 0 || one.offset < newest[0].offset), ...newest]
    if (all.length === 0) return html`<${Empty} title="No change is stored.">The server keeps no past of this key.</${Empty}>`
    const rows = all.map((one, place) => ({ ...one, previous: all[place - 1] })).reverse()
    const hasMore = before === null ? newest.length === REVISIONS : before === REVISIONS
    return html`
      <${Table} caption="Changes of the key" rows=${rows} rowKey="offset" columns=${[
        { name: "timestamp", title: "Time", nowrap: true,
          render: (one) => html`<${Time} ms=${one.timestamp} precise />` },
        { name: "source", title: "By", render: (one) => html`<${Source} source=${one.source} />` },
        ...(all.some((one) => one.version) ? [{ name: "version", title: "Version", right: true, wide: true, render: (one) => (one.version ? html`<${Num} value=${one.version} />` : "–") }] : []),
        { name: "value", title: "Value", grow: true,
          render: (one) => (one.deleted ? html`<${Badge} kind="warning">deleted</${Badge}>` : html`<${Preview} view=${viewOf(one)} />`) },
        { name: "do", title: html`<span class="hidden">Actions</span>`, nowrap: true, render: (one) => html`
          ${one.previous && html`<${Button} small onClick=${() => setPair(one)} aria-label=${`Compare the change of offset ${one.offset} with the one before`}>Compare</${Button}>`}
          ${at !== one.timestamp && html` <${Button} small onClick=${() => setAt(one.timestamp)} aria-label=${`Show the state as of offset ${one.offset}`}>As of</${Button}>`}` },
      ]} />
      <div class="toolbar"><span class="muted">${data.complete_from > all[0].offset ? `Compaction may have removed changes before offset ${numText(data.complete_from)}.` : hasMore ? "" : "These are all changes that are stored."}</span>
        ${hasMore && html`<span class="push"></span><${Button} small onClick=${() => more(all[0].offset)}>Older changes</${Button}>`}</div>
      ${pair && html`<${Dialog} wide title="What the change did" onClose=${() => setPair(null)} actions=${html`<${Button} onClick=${() => setPair(null)}>Close</${Button}>`}>
        <p><${Time} ms=${pair.timestamp} precise /> by <${Source} source=${pair.source} /></p>
        <${ValueDiff} before=${viewOf(pair.previous)} after=${viewOf(pair)} /></${Dialog}>`}`
  }}</${Loaded}>`
}

function Bound({ name }) {
  const poll = usePoll(async (signal) => {
    const [{ locks }, { wills }] = await Promise.all([ask("/api/state/locks", { key: name }, { signal }), ask("/api/state/wills", { key: name }, { signal })])
    return { locks, wills }
  }, 3, [name])
  return html`<${Loaded} poll=${poll} what="Locks and wills">${({ locks, wills }) => html`
    ${locks.length === 0 && html`<p class="muted">Nobody has locked this key.</p>`}
    ${locks.map((lock) => html`<div key=${lock.key}><p>Locked by <${Owner} owner=${lock.holder} />${lock.waiting.length > 0 && `, ${numText(lock.waiting.length)} wait:`}</p>
      ${lock.waiting.length > 0 && html`<ol>${lock.waiting.map((one) => html`<li key=${one}><${Owner} owner=${one} /></li>`)}</ol>`}</div>`)}
    ${wills.length === 0 && html`<p class="muted">No will concerns this key.</p>`}
    ${wills.map((will) => html`<div key=${will.owner}><p>When <${Owner} owner=${will.owner} principal=${will.principal} /> is gone:</p><ul>
      ${will.grave_goods.map((pattern) => html`<li key=${`d${pattern}`}>the key is deleted (<code>${pattern}</code>)</li>`)}
      ${will.last_will.map((one) => html`<li key=${`s${one.key}`}>the value becomes <${Preview} view=${one.value} /></li>`)}</ul></div>`)}`}</${Loaded}>`
}

/** One key with all that is known of it. `at` is a moment of the past, null is now. */
export function Entry({ name, at, setAt, onGone }) {
  const [live, setLive] = useState(true)
  const [bytes, setBytes] = useState(VIEW_BYTES)
  const [tab, setTab] = useState("value")
  const [dialog, setDialog] = useState(null)
  const { poll, entry, change } = useEntry(name, at, live, bytes)
  const last = usePoll((signal) => ask("/api/state/revisions", { key: name, max: 1, bytes_max: 0 }, { signal, timeout: 120_000 }), 0, [name])
  const mayWrite = useMay("write-state", name)
  const flash = useRef(null)
  useEffect(() => setBytes(VIEW_BYTES), [name])
  useEffect(() => {
    if (!change?.number || !flash.current?.animate) return
    flash.current.animate([{ backgroundColor: "var(--accent-soft)" }, { backgroundColor: "transparent" }], { duration: 800 })
  }, [change?.number])
  const isOwn = name === "$SYS" || name.startsWith("$SYS/")
  const canWrite = mayWrite !== false && !isOwn && at === null
  const edit = async () => {
    const fresh = await ask("/api/state/entry", { key: name, bytes_max: EDIT_BYTES_MAX })
    if (fresh.value?.clipped) throw new Error("The value has more than 1 MiB: change it with 'babelbus state set'.")
    setDialog({ kind: "edit", entry: fresh })
  }
  const remove = async () => setDialog({ kind: "delete", entry: await ask("/api/state/entry", { key: name, bytes_max: 0 }) })
  const done = () => {
    poll.reload()
    last.reload()
  }
  const head = html`<div class="state-entry-head"><h2><bdi>${name === "" ? "(empty key)" : name}</bdi></h2><div class="actions">
    <${Button} small icon="copy" onClick=${() => copyText(name, "The key")}>Copy key</${Button}>
    ${at === null && html`<${Button} small icon=${live ? "pause" : "play"} aria-pressed=${!live} onClick=${() => setLive(!live)}>${live ? "Pause" : "Go on"}</${Button}>`}
    ${canWrite && entry && html`<${Button} small icon="edit" onClick=${edit}>Edit</${Button}>`}
    ${canWrite && entry && (entry.value || entry.children > 0) && html`<${Button} small kind="danger" icon="remove" onClick=${remove}>Delete</${Button}>`}
  </div></div>`
  if (!entry) return html`<section class="panel" aria-label="Chosen key">${head}${poll.error ? html`<${PastFailure} error=${poll.error} setAt=${setAt} reload=${poll.reload} />` : html`<p class="muted" role="status">Loading …</p>`}</section>`
  return html`<section class="panel" aria-label="Chosen key">${head}
    ${!live && at === null && html`<p class="muted">Paused: the value is that of the moment of the pause.</p>`}
    <${Facts} entry=${entry} change=${change} last=${last} at=${at} name=${name} />
    <${Tabs} label="Parts of the key" value=${tab} onChange=${setTab}
      tabs=${[{ name: "value", title: "Value" }, { name: "history", title: "History" }, { name: "bound", title: "Locks and wills" }]} />
    ${tab === "value" && html`<div ref=${flash}>${entry.value
      ? html`<${Value} name=${name} view=${entry.value} query=${at === null ? {} : { as_of_time: at }} onMore=${setBytes} />`
      : html`<${Empty} title=${at === null ? "The key has no value." : "The key had no value then."}>${entry.children > 0 && "Keys below it have values."}</${Empty}>`}</div>`}
    ${tab === "history" && html`<${History} name=${name} at=${at} setAt=${setAt} stamp=${change?.number} />`}
    ${tab === "bound" && html`<${Bound} name=${name} />`}
    ${dialog?.kind === "edit" && html`<${Edit} name=${name} entry=${dialog.entry} onClose=${() => setDialog(null)} onSaved=${done} />`}
    ${dialog?.kind === "delete" && html`<${Delete} name=${name} entry=${dialog.entry} onClose=${() => setDialog(null)} onDone=${() => { done(); onGone?.() }} />`}
  </section>`
}

/** A failure to read the past; if compaction has gone past the moment, a button leads to the earliest one. */
export function PastFailure({ error, setAt, reload }) {
  if (error.code !== "history_gone") return html`<${Failure} error=${error} reload=${reload} what="The value" />`
  const earliest = error.told?.time_ms
  return html`<${Notice} kind="warning" title="The past does not reach back so far."
    actions=${earliest !== null && earliest !== undefined
    && html`<${Button} small onClick=${() => setAt(earliest)}>Go to the earliest moment</${Button}>`}>${error.message}</${Notice}>`
}
