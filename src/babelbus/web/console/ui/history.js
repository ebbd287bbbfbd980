// The history of the server, kept fresh: the first answer has all points, later answers only the new ones.

import { useRef } from "../vendor/preact-htm.js"
import { get } from "../api.js"
import { usePoll } from "./hooks.js"

const POINTS = { 1: 600, 10: 720, 60: 2880 }
const LIST_MS = 15_000
const SECONDS = 2
const AT_ONCE = 100

/** Return old points followed by the new ones, which overlap or leave a gap. */
function joined(old, fresh, steps, size) {
  const kept = old.slice(0, old.length - Math.max(fresh.length - steps, 0))
  const gap = Array(Math.max(steps - fresh.length, 0)).fill(null)
  return [...kept, ...gap, ...fresh].slice(-size)
}

/** Poll the series that `choose({name, unit, label})` accepts, with points of 1, 10 or 60 seconds.
 *
 * Returns what `usePoll` returns; `data` is `{step_s, end_ms, series: [{name, unit, label, points}], resets_ms, left_out}`.
 */
export function useHistory(choose, step) {
  const kept = useRef({ step: 0, read: 0, list: null, data: null })
  return usePoll(async (signal) => {
    const now = kept.current
    if (now.step !== step) Object.assign(now, { step, data: null })
    if (!now.list || Date.now() - now.read > LIST_MS || !now.list.series.some(choose)) {
      now.list = await get("/api/history", {}, { signal })
      now.read = Date.now()
    }
    const names = now.list.series.filter(choose).map((one) => one.name).slice(0, AT_ONCE)
    if (!names.length) return { step_s: step, end_ms: Date.now(), series: [], resets_ms: [], left_out: now.list.left_out }
    const before = now.data
    const isSame = before && before.series.length === names.length && before.series.every((one) => names.includes(one.name))
    const passed = isSame ? Math.ceil((Date.now() - before.end_ms) / 1000 / step) : Infinity
    const count = Math.min(POINTS[step], Math.max(passed, 0) + 5)
    const fresh = await get("/api/history", { series: names.join(","), step, count }, { signal })
    const steps = isSame ? Math.round((fresh.end_ms - before.end_ms) / 1000 / step) : 0
    const goesOn = isSame && steps >= 0 && count < POINTS[step] && (!fresh.resets_ms.length || before.resets_ms.includes(fresh.resets_ms[0]))
    if (goesOn) {
      const old = new Map(before.series.map((one) => [one.name, one.points]))
      for (const one of fresh.series) one.points = joined(old.get(one.name) ?? [], one.points, steps, POINTS[step])
      fresh.resets_ms = [...new Set([...before.resets_ms, ...fresh.resets_ms])].filter((one) => one > fresh.end_ms - POINTS[step] * step * 1000)
    }
    now.data = { ...fresh, left_out: now.list.left_out }
    return now.data
  }, Math.max(SECONDS, Math.min(step, 10)), [step])
}
