"""What a zbuspy program does, step by step, against the server whose address is the first argument.

It runs in an environment of its own, with the released zbuspy and the websocket-client that it needs; it knows nothing
of ours. Further arguments: apiKey and secretKey, if the server wants signatures. It prints `done` at the end.
"""

import collections
import http.client
import inspect
import os
import queue
import sys
import threading
import time
import traceback
from typing import Any

if not hasattr(inspect, "getargspec"):  # Python 3.11 has it no more, and zbuspy's RpcProcessor calls it
    Spec = collections.namedtuple("Spec", "args varargs varkw defaults")
    vars(inspect)["getargspec"] = lambda function: Spec(*inspect.getfullargspec(function)[:4])

from zbus import (  # type: ignore[import-not-found]
    Message,
    MqClient,
    Protocol,
    RpcClient,
    RpcProcessor,
    RpcServer,
)

ADDRESS, KEYS = sys.argv[1], sys.argv[2:4]
SECONDS = 100


def check(good: object, *told: object) -> None:
    """End the program if something is not as it has to be."""
    if not good:
        raise RuntimeError(*told)


def signing(client: Any) -> Any:
    if KEYS:
        client.enable_auth(*KEYS)
    return client


def command(cmd: str, body: object = None, **headers: object) -> Any:
    message = Message()
    message.headers.cmd = cmd
    for name, value in headers.items():
        message.headers[name] = value
    if body is not None:
        message.body = body
    return message


def ask(client: Any, cmd: str, body: object = None, status: int = 200, **headers: object) -> Any:
    answer = client.invoke(command(cmd, body, **headers), timeout=SECONDS)
    check(answer is not None and answer.status == status, (cmd, headers, answer))
    return answer


def opened() -> Any:
    client = signing(MqClient(ADDRESS))
    ready = threading.Event()
    client.onopen = lambda _: ready.set()
    client.connect()
    check(ready.wait(SECONDS), "not connected")
    return client


def try_queues(client: Any) -> None:
    for mq_type in (Protocol.MEMORY, Protocol.DISK, Protocol.DB):
        mq = "queue-" + mq_type
        created = ask(client, "create", mq=mq, mqType=mq_type, channel="taker")
        check(created.body == f"OK, CREATE (mq={mq},channel=taker)", created)
        bodies = ["text", {"a": [1, None, 2.5]}, "\u4e2d\u6587", [1, 2], 7]
        for body in bodies:
            ask(client, "pub", body, mq=mq, tag="a.b")
        taken = ask(client, "take", mq=mq, channel="taker", window=10)
        check([one["body"] for one in taken.body] == bodies, taken)
        check(ask(client, "take", 604, mq=mq, channel="taker", status=604).body == [])
        told = ask(client, "query", mq=mq).body
        check((told["type"], told["size"]) == (mq_type, len(bodies)), told)
        ask(client, "remove", mq=mq)
        ask(client, "query", mq=mq, status=404)


def try_subscriptions(client: Any) -> None:
    """A pool of two on one channel shares the work; another channel gets everything."""
    count = 40
    got: queue.Queue[Any] = queue.Queue()
    ask(client, "create", mq="work", channel="pool")
    ask(client, "create", mq="work", channel="all")
    members = [opened(), opened(), opened()]
    for number, (member, channel) in enumerate(zip(members, ["pool", "pool", "all"], strict=True)):
        member.add_mq_handler("work", channel, lambda one, number=number: got.put((number, one.body)), window=4)
        ask(member, "sub", mq="work", channel=channel, window=4)
    for number in range(count):
        ask(client, "pub", number, mq="work")
    shares: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for _ in range(2 * count):
        number, body = got.get(timeout=SECONDS)
        shares[number].append(body)
    check(sorted(shares[0] + shares[1]) == list(range(count)), shares)
    check(shares[0] and shares[1], shares)
    check(shares[2] == list(range(count)), shares)
    for member in members:
        member.close()


def try_own_deliveries(client: Any) -> None:
    """A client that publishes to the channel it consumes gets first the answer, then the message, with one id."""
    got: queue.Queue[Any] = queue.Queue()
    ask(client, "create", mq="own", channel="own")
    client.add_mq_handler("own", "own", got.put, window=1)
    ask(client, "sub", mq="own", channel="own", window=1)
    for number in range(20):
        answer = ask(client, "pub", number, mq="own")
        message = got.get(timeout=SECONDS)
        check((answer.body, message.body) == ("OK, PUB (mq=own)", number))
        check(answer.headers.id == message.headers.id)


class Example:
    def plus(self, a: Any, b: Any) -> int:
        return int(a) + int(b)

    def echo(self, text: str) -> str:
        return text

    def fail(self) -> None:
        raise ValueError("on purpose")


def try_rpc(client: Any) -> None:
    processor = RpcProcessor()
    processor.mount("/example", Example())
    server = RpcServer(processor)
    server.mq_server_address, server.mq = ADDRESS, "MyRpc"
    if KEYS:
        server.enable_auth(*KEYS)
    server.start()
    wait_for_consumer(client, "MyRpc")
    caller = signing(RpcClient(ADDRESS, url_prefix="/MyRpc"))
    check(caller.invoke("plus", [1, 2], url_prefix="/MyRpc/example") == 3)
    check(caller.example.echo("\u4e2d") == "\u4e2d")
    failure = ""
    try:
        caller.example.fail()
    except Exception as error:
        failure = str(error)
    check(failure == "on purpose", failure)
    if not KEYS:
        check(fetch("GET", "/MyRpc/example/plus/4/5") == (200, b"9"))
        check(fetch("POST", "/MyRpc/example/plus", "[6, 7]") == (200, b"13"))
        check(fetch("GET", "/MyRpc/nothing")[0] == 404)
        status, page = fetch("GET", "/MyRpc/doc")
        check((status, b"example/plus" in page) == (200, True))
    caller.close()
    server.close()


def wait_for_consumer(client: Any, mq: str) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        answer = client.invoke(command("query", mq=mq), timeout=SECONDS)
        if answer.status == 200 and answer.body["consumerCount"]:
            return
    check(False, "the service did not subscribe")


def fetch(method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(ADDRESS, timeout=SECONDS)
    connection.request(method, path, body, {"content-type": "application/json"} if body else {})
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def main() -> None:
    client = opened()
    try_queues(client)
    try_subscriptions(client)
    try_own_deliveries(client)
    try_rpc(client)
    print("done", flush=True)
    os._exit(0)  # zbuspy's threads do not end by themselves


try:
    main()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
