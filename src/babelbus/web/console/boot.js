// The first script. When a file of the console has not come, as from a server that takes no more connections, the page
// says so, and loads itself anew.

const RETRY_MS = 2_000

async function load() {
  // Scripts wait for style sheets: a sheet that is not there now has failed.
  const missing = [...document.querySelectorAll("link[rel=stylesheet]")].find((one) => one.sheet === null)
  if (missing) throw new Error(`${missing.href} has not come`)
  await import("./app.js")
}

async function loadAnew() {
  try {
    const answer = await fetch("/console/boot.js", { method: "HEAD" })
    if (answer.ok) return location.reload()
  } catch {
    // The server is still away.
  }
  return setTimeout(loadAnew, RETRY_MS)
}

load().catch((error) => {
  console.warn(error)
  const place = document.getElementById("app")
  place.className = "alone"
  place.textContent =
    "The server has not sent all files of the console: it stops, or takes no more connections. The page loads itself anew."
  setTimeout(loadAnew, RETRY_MS)
})
