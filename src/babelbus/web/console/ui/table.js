// Tables of data: sorted here or by the server, paged, selected.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js"
import { Busy, Button, Icon, words } from "./basics.js"
import { numText } from "./format.js"

function compare(one, other) {
  const [isNone, otherIsNone] = [one === undefined || one === null, other === undefined || other === null]
  if (isNone || otherIsNone) return isNone - otherIsNone
  if (typeof one === "number" && typeof other === "number") return one - other
  return String(one).localeCompare(String(other), "en", { numeric: true })
}

/** A table.
 *
 * `columns`: {name, title, render(row), value(row), sort: true, right: true, wide: true, nowrap, grow}; `wide` columns are left out
 * on narrow screens, `value` is what is sorted by (else `row[name]`). `caption` names the table for screen readers.
 * `sort` {name, descending} with `onSort(sort)`: the server sorts; without them the table sorts by itself.
 * `selected` (a Set of keys) with `onSelect(set)` adds check boxes. `rowKey`: a field, or a function of the row.
 */
export function Table({ columns, rows, caption, rowKey = "id", sort, onSort, first, selected, onSelect, empty, busy, rowClass, class: kind }) {
  const [own, setOwn] = useState(first ?? null)
  const shown = onSort ? sort : own
  const keyOf = typeof rowKey === "function" ? rowKey : (row) => row[rowKey]
  const sorted = useMemo(() => {
    const column = !onSort && own && columns.find((one) => one.name === own.name)
    if (!column || !rows) return rows
    const value = column.value ?? ((row) => row[column.name])
    const up = [...rows].sort((one, other) => compare(value(one), value(other)))
    return own.descending ? up.reverse() : up
  }, [rows, own, onSort, columns])
  const toggle = (column) => {
    const isSame = shown?.name === column.name
    const next = { name: column.name, descending: isSame ? !shown.descending : Boolean(column.right) }
    if (onSort) onSort(next)
    else setOwn(next)
  }
  const select = (key, on) => {
    const next = new Set(selected)
    if (on) next.add(key)
    else next.delete(key)
    onSelect(next)
  }
  const all = onSelect && sorted?.length > 0 && sorted.every((row) => selected.has(keyOf(row)))
  const some = onSelect && !all && sorted?.some((row) => selected.has(keyOf(row)))
  const selectAll = (on) => onSelect(new Set([...selected].filter((key) => !sorted.some((row) => keyOf(row) === key))
    .concat(on ? sorted.map(keyOf) : [])))
  const cell = (column) => words(column.right && "right", column.wide && "wide-only", column.nowrap && "nowrap", column.grow && "grow")
  return html`<div class=${words("table-box", kind)} role="group" aria-label=${caption} tabIndex="0">
    <table aria-busy=${busy ? "true" : undefined}>
      <caption class="hidden">${caption}</caption>
      <thead><tr>
        ${onSelect && html`<th class="tick"><${Tick} checked=${all} some=${some} label="Select all" onChange=${selectAll} /></th>`}
        ${columns.map((column) => html`<th key=${column.name} scope="col" class=${cell(column)}
          aria-sort=${shown?.name === column.name ? (shown.descending ? "descending" : "ascending") : undefined}>
          ${column.sort
            ? html`<button type="button" class="sort" onClick=${() => toggle(column)}>${column.title}
                <span class="arrow" aria-hidden="true">${shown?.name === column.name ? (shown.descending ? "↓" : "↑") : ""}</span></button>`
            : column.title || html`<span class="hidden">Actions</span>`}</th>`)}
      </tr></thead>
      <tbody>
        ${sorted?.map((row) => html`<tr key=${keyOf(row)} class=${rowClass?.(row)}>
          ${onSelect && html`<td class="tick"><${Tick} checked=${selected.has(keyOf(row))} label="Select ${keyOf(row)}"
            onChange=${(on) => select(keyOf(row), on)} /></td>`}
          ${columns.map((column) => html`<td key=${column.name} class=${cell(column)}>
            ${column.render ? column.render(row) : plain(row[column.name])}</td>`)}
        </tr>`)}
      </tbody>
    </table>
    ${!sorted && html`<${Busy} />`}
    ${sorted?.length === 0 && (typeof empty === "string" || !empty ? html`<p class="empty-row">${empty ?? "There is nothing."}</p>` : empty)}
  </div>`
}

function plain(value) {
  if (value === undefined || value === null) return "–"
  return typeof value === "number" ? html`<span class="num">${numText(value)}</span>` : String(value)
}

function Tick({ checked, some, label, onChange }) {
  const box = useRef(null)
  useEffect(() => {
    box.current.indeterminate = Boolean(some)
  }, [some])
  return html`<input ref=${box} type="checkbox" aria-label=${label} checked=${Boolean(checked)}
    onChange=${(event) => onChange(event.currentTarget.checked)} />`
}

/** Buttons to go through pages of a list that the server keeps: `onGo(offset)`. */
export function Pager({ offset, count, total, onGo, what = "rows" }) {
  const last = Math.min(offset + count, total)
  if (total <= count && offset === 0) return html`<p class="pager"><span role="status">${numText(total)} ${what}</span></p>`
  return html`<nav class="pager" aria-label="Pages of the list">
    <span role="status">${total === 0 ? 0 : numText(offset + 1)} to ${numText(last)} of ${numText(total)} ${what}</span>
    <${Button} small disabled=${offset === 0} onClick=${() => onGo(Math.max(0, offset - count))}><${Icon} name="left" />Back</${Button}>
    <${Button} small disabled=${last >= total} onClick=${() => onGo(offset + count)}>Next<${Icon} name="right" /></${Button}>
  </nav>`
}
