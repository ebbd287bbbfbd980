// The released npm client against our server: node run.js ADDRESS BASE; prints one line a step, fails on the first wrong one.
// Whoever waits for an event has a promise for it; nothing sleeps.

const assert = require("node:assert/strict");
const { connect } = require("worterbuch-js");
const WebSocket = require("ws");

const address = process.argv[2];
const base = process.argv[3]; // first element of all keys of this run

function step(name) {
  console.log(name);
}

// Collects events and lets a test wait until one of them fits.
function inbox() {
  const seen = [];
  const waiting = [];
  return {
    seen,
    take(event) {
      seen.push(event);
      for (const one of [...waiting]) {
        if (one.wanted(event)) {
          waiting.splice(waiting.indexOf(one), 1);
          one.resolve(event);
        }
      }
    },
    until(wanted) {
      const found = seen.find(wanted);
      if (found !== undefined) return Promise.resolve(found);
      return new Promise((resolve) => waiting.push({ wanted, resolve }));
    },
  };
}

// cGet and cSet are in the protocol and not in this client: said by hand over its own WebSocket library.
function raw(url) {
  return new Promise((resolve, reject) => {
    const socket = new WebSocket(url);
    const answers = inbox();
    socket.on("message", (data) => answers.take(JSON.parse(data.toString())));
    socket.on("error", reject);
    socket.on("open", async () => {
      await answers.until((message) => message.welcome);
      resolve({ answers, send: (message) => socket.send(JSON.stringify(message)), close: () => socket.close() });
    });
  });
}

async function main() {
  const one = await connect(address);
  const two = await connect(address);
  assert.notEqual(one.clientId(), two.clientId());
  step("connect");

  const values = ["text", "grüße, 世界", 42, 1.5, true, null, [1, [2]], { x: { y: [null] } }];
  for (const [number, value] of values.entries()) {
    await one.set(`${base}/values/${number}`, value);
    assert.deepEqual(await two.get(`${base}/values/${number}`), value);
  }
  assert.equal(await one.get(`${base}/missing`), undefined);
  step("set and get");

  assert.equal((await two.pGet(`${base}/values/?`)).length, values.length);
  assert.deepEqual(await two.pGet(`${base}/nothing/#`), []);
  step("pGet");

  const key = inbox();
  const keyId = two.subscribe(`${base}/live`, key.take);
  const pattern = inbox();
  const patternId = two.pSubscribe(`${base}/tree/#`, pattern.take);
  await pattern.until((event) => event.keyValuePairs && event.keyValuePairs.length === 0);
  await two.get(`${base}/live`); // the subscriptions stand
  await one.set(`${base}/live`, 1);
  await key.until((event) => event.value === 1);
  await one.delete(`${base}/live`);
  await key.until((event) => event.deleted === 1);
  await one.set(`${base}/tree/a`, "A");
  await pattern.until((event) => event.keyValuePairs?.[0]?.key === `${base}/tree/a`);
  await one.publish(`${base}/tree/b`, "only told");
  await pattern.until((event) => event.keyValuePairs?.[0]?.value === "only told");
  assert.equal(await one.get(`${base}/tree/b`), undefined);
  two.unsubscribe(keyId);
  two.unsubscribe(patternId);
  step("subscribe and pSubscribe");

  const unique = inbox();
  two.subscribe(`${base}/unique`, unique.take, true);
  await two.get(`${base}/unique`);
  for (const value of [1, 1, 2]) await one.set(`${base}/unique`, value);
  await unique.until((event) => event.value === 2);
  assert.deepEqual(unique.seen.map((event) => event.value), [1, 2]);
  step("unique");

  const stream = await one.sPubInit(`${base}/stream`);
  const streamed = inbox();
  two.subscribe(`${base}/stream`, streamed.take);
  await two.get(`${base}/stream`);
  one.sPub(stream, "one");
  one.sPub(stream, "two");
  await streamed.until((event) => event.value === "two");
  step("sPub");

  assert.deepEqual((await one.ls(`${base}/values`)).sort(), values.map((_, number) => String(number)));
  assert.deepEqual(await one.ls(`${base}/nowhere`), []);
  assert.ok((await one.ls()).includes("$SYS"));
  assert.deepEqual((await one.pLs(`${base}/?`)).sort(), (await one.ls(`${base}/values`)).concat(["a"]).sort());
  const listed = inbox();
  const lsId = two.subscribeLs(`${base}/names`, listed.take);
  await listed.until((children) => children.length === 0);
  await one.set(`${base}/names/x`, 1);
  await listed.until((children) => children.includes("x"));
  two.unsubscribeLs(lsId);
  step("ls, pLs and subscribeLs");

  await one.delete(`${base}/values/2`); // this client resolves with undefined whatever was there
  assert.equal(await one.get(`${base}/values/2`), undefined);
  assert.equal(await one.delete(`${base}/values/2`), undefined);
  assert.equal((await one.pDelete(`${base}/values/#`)).length, values.length - 1);
  step("delete and pDelete");

  await assert.rejects(one.set(`${base}/?`, 1));
  await assert.rejects(one.set("$SYS/version", 1));
  step("errors");

  assert.equal(await one.lock(`${base}/lock`), true);
  assert.equal(await two.lock(`${base}/lock`), false);
  const waiting = two.acquireLock(`${base}/lock`);
  assert.equal(await one.releaseLock(`${base}/lock`), true);
  await waiting;
  assert.equal(await two.locked(`${base}/other`, () => "done"), "done");
  step("locks");

  if (address.startsWith("ws")) {
    const by = await raw(address);
    by.send({ cSet: { transactionId: 1, key: `${base}/cas`, value: "a", version: 0 } });
    await by.answers.until((message) => message.ack?.transactionId === 1);
    by.send({ cSet: { transactionId: 2, key: `${base}/cas`, value: "b", version: 0 } });
    await by.answers.until((message) => message.err?.transactionId === 2 && message.err.errorCode === 18);
    by.send({ cGet: { transactionId: 3, key: `${base}/cas` } });
    const found = await by.answers.until((message) => message.cState);
    assert.deepEqual(found.cState, { transactionId: 3, value: "a", version: 1 });
    await assert.rejects(one.set(`${base}/cas`, "plain"));
    by.close();
    step("cSet and cGet");
  }

  const heir = inbox();
  one.pSubscribe(`${base}/will/#`, heir.take);
  await two.set(`${base}/will/mine`, "still here");
  two.setGraveGoods([`${base}/will/mine`]);
  two.setLastWill([{ key: `${base}/will/left`, value: "gone" }]);
  assert.deepEqual(await two.graveGoods(), [`${base}/will/mine`]);
  assert.deepEqual(await two.lastWill(), [{ key: `${base}/will/left`, value: "gone" }]);
  two.close();
  await heir.until((event) => event.deleted?.[0]?.key === `${base}/will/mine`);
  await heir.until((event) => event.keyValuePairs?.[0]?.value === "gone");
  assert.equal(await one.get(`${base}/will/mine`), undefined);
  assert.equal(await one.get(`${base}/will/left`), "gone");
  step("last will and grave goods");

  one.close();
}

main().then(
  () => {
    console.log("done");
    process.exit(0);
  },
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
