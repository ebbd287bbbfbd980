// Who may do what, and which row decides.

import { html, useState } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import { Field, Form, Notice } from "../ui.js"
import { ACTIONS, Origin, RowLine } from "./access-parts.js"

/** A question to the table, and its answer. With `principal`, the question is about this one. */
export function Explain({ principal, names = [], first = {}, onAsked }) {
  const [answer, setAnswer] = useState(null)
  const ask = async (values) => {
    const question = { principal: principal ?? values.principal.trim(), action: values.action, subject: values.subject }
    setAnswer({ question, ...(await get("/api/access/explain", question)) })
    onAsked?.(question)
  }
  return html`<div class="stack">
    <${Form} submit="Explain" onSubmit=${ask}>
      <div class="form-row">
        ${!principal && html`<${Field} label="Principal" name="principal" required list="access-names" value=${first.principal ?? ""} />
          <datalist id="access-names">${["anonymous", ...names].map((name) => html`<option key=${name} value=${name} />`)}</datalist>`}
        <${Field} label="Action" name="action" type="select" options=${ACTIONS} value=${first.action ?? "publish"} />
        <${Field} label="Subject" name="subject" required value=${first.subject ?? ""} help="As the principal calls it." />
      </div></${Form}>
    <div aria-live="polite">${answer && html`<${Notice} kind=${answer.allowed ? "good" : "warning"}
        title=${`${answer.question.principal} ${answer.allowed ? "may" : "may not"} ${answer.question.action} on ${answer.question.subject}.`}>
      ${!answer.exists && html`<p>There is no principal of this name.</p>`}
      ${answer.subject !== answer.question.subject && html`<p>The subject is <code>${answer.subject}</code>: the principal has a root.</p>`}
      ${answer.row ? html`<p>This row decides: <${RowLine} row=${answer.row} /> <${Origin} origin=${answer.row.origin} /></p>` : html`<p>No row concerns the subject, and then the answer is no.</p>`}
      ${answer.roles.length > 0 && html`<p>Roles: ${answer.roles.join(", ")}.</p>`}
      ${!answer.enforcing && html`<p>The gate is off: at the moment only the administration API asks for rights.</p>`}</${Notice}>`}</div>
  </div>`
}
