// Forms: labelled fields, one way to send them, and the failure beside them.

import { html, useRef, useState } from "../vendor/preact-htm.js"
import { Button, Notice, messageOf, useId } from "./basics.js"

/** A field with its label. `type`: text, number, password, textarea, select, checkbox, search, datetime-local, ...
 *
 * `options` of a select: texts, or {value, title}. `value` is the first value; with `onChange(value)` the page keeps it.
 */
export function Field({ label, name, type = "text", value, options, help, unit, onChange, class: kind, ...rest }) {
  const id = useId("field")
  const about = help ? `${id}-help` : undefined
  const change = onChange && ((event) => onChange(type === "checkbox" ? event.currentTarget.checked : event.currentTarget.value))
  const shared = { id, name, "aria-describedby": about, ...rest }
  // A value that the page does not keep is only the first value: drawing again must not take back what was typed.
  const content = onChange ? { value } : { defaultValue: value }
  const tick = onChange ? { checked: value } : { defaultChecked: value }
  let input
  if (type === "select") {
    input = html`<select ...${shared} onChange=${change}>
      ${options.map((one) => (typeof one === "object" ? one : { value: one, title: one })).map((one) =>
        html`<option key=${one.value} value=${one.value} selected=${String(one.value) === String(value ?? "")}>${one.title}</option>`)}
    </select>`
  } else if (type === "textarea") {
    input = html`<textarea spellcheck=${false} ...${shared} ...${content} onInput=${change} />`
  } else if (type === "checkbox") {
    return html`<div class="field check ${kind ?? ""}"><label><input type="checkbox" ...${shared} ...${tick}
      onChange=${change} /> ${label}</label>${help && html`<small id=${about}>${help}</small>`}</div>`
  } else {
    input = html`<input type=${type} spellcheck=${false} autocomplete="off" ...${shared} ...${content} onInput=${change} />`
  }
  return html`<div class="field ${kind ?? ""}"><label for=${id}>${label}</label>
    ${unit ? html`<div class="with-unit">${input}<span>${unit}</span></div>` : input}
    ${help && html`<small id=${about}>${help}</small>`}</div>`
}

/** Return the values of a form by name: numbers of number fields (null if empty), booleans of check boxes, else texts. */
export function valuesOf(form) {
  const values = {}
  for (const element of form.elements) {
    if (!element.name || element.disabled) continue
    if (element.type === "checkbox") values[element.name] = element.checked
    else if (element.type === "radio") {
      if (element.checked) values[element.name] = element.value
    } else if (element.type === "number") values[element.name] = element.value === "" ? null : Number(element.value)
    else values[element.name] = element.value
  }
  return values
}

/** A form: `onSubmit(values)` may return a promise, whose failure is shown. `onCancel` adds a cancel button. */
export function Form({ onSubmit, submit = "Save", kind = "primary", onCancel, children, disabled, class: name, extra }) {
  const [error, setError] = useState(null)
  const [busy, setBusy] = useState(false)
  const form = useRef(null)
  const send = async (event) => {
    event.preventDefault()
    if (busy) return
    setBusy(true)
    setError(null)
    try {
      await onSubmit(valuesOf(form.current))
    } catch (failure) {
      setError(failure)
    } finally {
      setBusy(false)
    }
  }
  return html`<form class="form ${name ?? ""}" ref=${form} onSubmit=${send}>
    ${children}
    ${error && html`<${Notice} kind="error">${messageOf(error)}</${Notice}>`}
    <div class="form-actions">${extra}
      ${onCancel && html`<${Button} onClick=${onCancel} disabled=${busy}>Cancel</${Button}>`}
      <${Button} kind=${kind} type="submit" busy=${busy} disabled=${disabled}>${submit}</${Button}></div>
  </form>`
}
