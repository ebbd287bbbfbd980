// Dialogs: the browser's own element keeps the focus inside and gives it back.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js"
import { Button, Icon, Notice, messageOf, useId } from "./basics.js"

/** A dialog while it is in the page; `onClose` is called by Escape and by its close button. `wide` for tables. */
export function Dialog({ title, onClose, children, actions, wide = false }) {
  const element = useRef(null)
  const id = useId("dialog")
  useEffect(() => {
    const dialog = element.current
    const before = document.activeElement
    dialog.showModal()
    const first = dialog.querySelector("[autofocus], .dialog-body input, .dialog-body select, .dialog-body textarea")
    ;(first ?? dialog.querySelector(".dialog-body button, .dialog-actions button") ?? dialog).focus()
    return () => {
      dialog.close()
      if (before?.isConnected) before.focus()
    }
  }, [])
  const cancel = (event) => {
    if (event.target !== element.current) return
    event.preventDefault()
    onClose?.()
  }
  return html`<dialog ref=${element} class=${wide ? "wide" : ""} aria-labelledby=${id} onCancel=${cancel}>
    <div class="dialog-head"><h2 id=${id}>${title}</h2>
      <button type="button" class="icon-button" aria-label="Close" onClick=${() => onClose?.()}><${Icon} name="close" /></button></div>
    <div class="dialog-body">${children}</div>
    ${actions && html`<div class="dialog-actions">${actions}</div>`}
  </dialog>`
}

/** Ask before something that cannot be undone.
 *
 * `lost` is a list of sentences that name what is lost; with `typed`, the user has to type that text first.
 * `onConfirm` may return a promise: the dialog waits, shows a failure, and calls `onClose` when it has succeeded.
 */
export function Confirm({ title, children, lost = [], confirm = "Confirm", kind = "danger", typed, onConfirm, onClose }) {
  const [text, setText] = useState("")
  const [error, setError] = useState(null)
  const [busy, setBusy] = useState(false)
  const id = useId("typed")
  const run = async () => {
    setBusy(true)
    setError(null)
    try {
      await onConfirm()
      onClose()
    } catch (failure) {
      setError(failure)
      setBusy(false)
    }
  }
  const ready = typed === undefined || text === typed
  const submit = (event) => {
    event.preventDefault()
    if (ready && !busy) run()
  }
  return html`<${Dialog} title=${title} onClose=${() => busy || onClose()} actions=${html`
      <${Button} onClick=${onClose} disabled=${busy}>Cancel</${Button}>
      <${Button} kind=${kind} onClick=${() => { run() }} busy=${busy} disabled=${!ready}>${confirm}</${Button}>`}>
    <form onSubmit=${submit}>
      ${children && html`<div>${children}</div>`}
      ${lost.length > 0 && html`<div class="lost"><strong>This is lost:</strong>
        <ul>${lost.map((one, number) => html`<li key=${number}>${one}</li>`)}</ul></div>`}
      ${typed !== undefined && html`<div class="field"><label for=${id}>Type <code>${typed}</code> to go on</label>
        <input id=${id} autocomplete="off" spellcheck=${false} value=${text} onInput=${(event) => setText(event.currentTarget.value)} /></div>`}
      ${error && html`<${Notice} kind="error">${messageOf(error)}</${Notice}>`}
    </form>
  </${Dialog}>`
}
