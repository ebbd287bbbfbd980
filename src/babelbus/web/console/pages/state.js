// The state: the tree of all keys with their values, as it is now or as it was; differences, locks and wills.

import { html, useCallback, useMemo, useState } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import { Button, Empty, Heading, Loaded, Notice, Search, Tabs, Time, go, useMay, usePoll, useQuery } from "../ui.js"
import { Differences } from "./state-differences.js"
import { Edit, Entry } from "./state-entry.js"
import { Moment } from "./state-moments.js"
import { Locks, Wills } from "./state-owners.js"
import { Tree } from "./state-tree.js"
import { ask } from "./state-values.js"

const PREVIEW_BYTES = 120
const TABS = [
  { name: "tree", title: "Tree" },
  { name: "differences", title: "Differences" },
  { name: "locks", title: "Locks" },
  { name: "wills", title: "Wills" },
]
const isPattern = (text) => text.split("/").some((part) => part === "?" || part === "#")

/** Return the source of a tree or of a list of found keys: a function that loads a page of a level. */
function useSource(search, at) {
  return useCallback(async (parent, page, signal) => {
    if (search) return get("/api/state/search", { ...(isPattern(search) ? { pattern: search } : { search }), ...page, bytes_max: PREVIEW_BYTES }, { signal })
    return ask("/api/state/nodes", { parent, ...page, bytes_max: PREVIEW_BYTES, as_of_time: at }, { signal })
  }, [search, at])
}

function TreeView({ ends, reloadEnds }) {
  const [query, change] = useQuery()
  const [making, setMaking] = useState(false)
  const [round, setRound] = useState(0)
  const key = query.key
  const at = query.at ? Number(query.at) : null
  const search = at === null ? (query.search ?? "") : ""
  const source = useSource(search, at)
  const tree = useMemo(() => (...given) => source(...given), [source, round])
  const mayWrite = useMay("write-state", "#")
  const setAt = (ms) => {
    change({ at: ms, search: ms === null ? query.search : null })
    reloadEnds()
  }
  const select = (chosen) => change({ key: chosen })
  return html`
    <div class="panel state-bar">
      <div class="toolbar">
        <${Search} label="Search all keys" placeholder="Search all keys, or a pattern a/?/b" value=${search} onSearch=${(text) => change({ search: text, at: null })} wide />
        ${mayWrite !== false && at === null && html`<${Button} icon="add" onClick=${() => setMaking(true)}>New key</${Button}>`}
      </div>
      <${Moment} label="As of" value=${at} ends=${ends} onChange=${setAt} />
      ${at !== null && html`<${Notice} kind="info" title="This is the past." actions=${html`
        <${Button} small onClick=${() => go("/state", { tab: "differences", pattern: key ? `${key}/#` : "#", from: at })}>Compare with now</${Button}>
        <${Button} small onClick=${() => setAt(null)}>Back to now</${Button}>`}>
        The state as it was at <${Time} ms=${at} precise />. Nothing can be changed here.</${Notice}>`}
    </div>
    <div class="state-columns">
      <div class="state-tree-box">
        <${Tree} key=${`${search} ${at} ${round}`} source=${tree} selected=${key} onSelect=${select} live=${at === null} flat=${search !== ""} reveal=${search ? null : key}
          label=${search ? "Keys that were found" : "Keys of the state"}
          empty=${search ? `No key contains ${search}.` : at !== null ? "No key had a value then." : "Clients of Wörterbuch and jebp set keys, and so does this page. Topics that retain the last record of each subject do, too."} />
      </div>
      ${key === undefined ? html`<section class="panel"><${Empty} title="Choose a key.">Its value, its history and its locks are shown here.</${Empty}></section>`
        : html`<${Entry} key=${`${key}\n${at}`} name=${key} at=${at} setAt=${setAt} onGone=${() => setRound(round + 1)} />`}
    </div>
    ${making && html`<${Edit} name=${key ? `${key}/` : ""} entry=${null} onClose=${() => setMaking(false)} onSaved=${(made) => {
      setRound(round + 1)
      change({ key: made, search: null })
    }} />`}`
}

function Page() {
  const [query] = useQuery()
  const tab = TABS.some((one) => one.name === query.tab) ? query.tab : "tree"
  const needsPast = tab === "tree" || tab === "differences"
  const poll = usePoll((signal) => get("/api/state/ends", {}, { signal }), 30)
  const show = (name) => {
    const key = query.key === undefined ? {} : { key: query.key }
    go("/state", name === "differences" && query.key ? { tab: name, ...key, pattern: `${query.key}/#` } : { ...(name === "tree" ? {} : { tab: name }), ...key })
  }
  return html`<${Heading} title="State">The last value of each key, now and as it was.</${Heading}>
    <${Tabs} label="Views of the state" tabs=${TABS} value=${tab} onChange=${show} />
    ${needsPast && html`<${Loaded} poll=${poll} what="The state">${(ends) => (tab === "tree"
      ? html`<${TreeView} ends=${ends} reloadEnds=${poll.reload} />` : html`<${Differences} ends=${ends} />`)}</${Loaded}>`}
    ${tab === "locks" && html`<${Locks} />`}
    ${tab === "wills" && html`<${Wills} />`}`
}

export default { Page }
