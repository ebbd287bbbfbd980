// What pages ask again and again: data that is kept fresh, and what the user may do.

import { createContext, useCallback, useContext, useEffect, useRef, useState } from "../vendor/preact-htm.js"
import { events, post } from "../api.js"

const AWAY_SECONDS = 2
const ASK_MAX = 100
const MAY_MS = 30_000

/** The session of this browser: `{principal, root, enforcing, version, server, ...}`. */
export const Session = createContext(null)

/** Return the session of this browser. */
export const useSession = () => useContext(Session)

/** Load now and every `seconds` (0: once); old data stays while the server is away, and loading goes on by itself.
 *
 * Returns `{data, error, loading, stale, reload}`: `stale` when `data` is older than a failure. `load(signal)` is
 * called anew when one of `deps` changes. A page that nobody looks at loads nothing until it is shown again.
 */
export function usePoll(load, seconds = 0, deps = []) {
  const [state, setState] = useState({ data: undefined, error: null, loading: true, stale: false })
  const current = useRef(load)
  current.current = load
  const again = useRef(() => {})

  useEffect(() => {
    const stop = new AbortController()
    let timer = 0
    let running = false
    setState((old) => ({ ...old, error: null, loading: true }))

    async function run() {
      if (running) return
      running = true
      clearTimeout(timer)
      let next = seconds
      try {
        const data = await current.current(stop.signal)
        if (!stop.signal.aborted) setState({ data, error: null, loading: false, stale: false })
      } catch (error) {
        if (stop.signal.aborted) return
        setState((old) => ({ data: old.data, error, loading: false, stale: old.data !== undefined }))
        if (error.isAway) next = Math.max(seconds, AWAY_SECONDS)
      } finally {
        running = false
      }
      if (!stop.signal.aborted && next && !document.hidden) timer = setTimeout(run, next * 1000)
    }
    const shown = () => document.hidden ? clearTimeout(timer) : run()

    again.current = run
    run()
    if (seconds) document.addEventListener("visibilitychange", shown)
    events.addEventListener("back", run)
    return () => {
      stop.abort()
      clearTimeout(timer)
      document.removeEventListener("visibilitychange", shown)
      events.removeEventListener("back", run)
    }
  }, [seconds, ...deps])

  const reload = useCallback(() => again.current(), [])
  return { ...state, reload }
}

const answers = new Map() // question -> {time, promise}
let asked = []

async function ask(batch) {
  try {
    const { answers: given } = await post("/api/console/may", { questions: batch.map((one) => one.question) })
    batch.forEach((one, number) => one.resolve(given[number] === true))
  } catch {
    batch.forEach((one) => one.resolve(true)) // the button is shown, and the server refuses if it must
  }
}

/** Return a promise of whether the user may do an action on a subject, or with `some` on a part of a pattern;
 * questions of one moment are asked together.
 */
export function may(action, subject, some = false) {
  const key = JSON.stringify([action, subject, some])
  const known = answers.get(key)
  if (known && Date.now() - known.time < MAY_MS) return known.promise
  const promise = new Promise((resolve) => {
    asked.push({ question: { action, subject, some }, resolve })
    if (asked.length > 1) return
    queueMicrotask(() => {
      const batch = asked
      asked = []
      for (let start = 0; start < batch.length; start += ASK_MAX) ask(batch.slice(start, start + ASK_MAX))
    })
  })
  answers.set(key, { time: Date.now(), promise })
  return promise
}

/** Forget what was answered: somebody else has logged in. */
export function forgetRights() {
  answers.clear()
}

/** Return whether the user may do an action on a subject, or with `some` on a part of a pattern: true, false, or null
 * while that is not known.
 */
export function useMay(action, subject, some = false) {
  const [answer, setAnswer] = useState(null)
  useEffect(() => {
    let gone = false
    if (subject === undefined || subject === null) return undefined
    may(action, subject, some).then((given) => gone || setAnswer(given))
    return () => {
      gone = true
    }
  }, [action, subject, some])
  return answer
}
