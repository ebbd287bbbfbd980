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

if not hasattr(inspect, "getargspec"):  # Python 3.11 has it no more, and zbuspy's RpcProcessor calls it
    Spec = collections.namedtuple("Spec", "args varargs varkw defaults")  # noqa: PYI024
    inspect.getargspec = lambda function: Spec(*inspect.getfullargspec(function)[:4])

from zbus import Message, MqClient, Protocol, RpcClient, RpcProcessor, RpcServer

ADDRESS, KEYS = sys.argv[1], sys.argv[2:4]
SECONDS = 20


def signing(client):
    if KEYS:
        client.enable_auth(*KEYS)
    return client


def command(cmd, body=None, **headers):
    message = Message()
    message.headers.cmd = cmd
    for name, value in headers.items():
        message.headers[name] = value
    if body is not None:
        message.body = body
    return message


def ask(client, cmd, body=None, status=200, **headers):
    answer = client.invoke(command(cmd, body, **headers), timeout=SECONDS)
    assert answer is not None and answer.status == status, (cmd, headers, answer)
    return answer


def opened():
    client = signing(MqClient(ADDRESS))
    ready = threading.Event()
    client.onopen = lambda _: ready.set()
    client.connect()
    assert ready.wait(SECONDS), "not connected"
    return client


def try_queues(client):
    for mq_type in (Protocol.MEMORY, Protocol.DISK, Protocol.DB):
        mq = "queue-" + mq_type
        created = ask(client, "create", mq=mq, mqType=mq_type, channel="taker")
        assert created.body == "OK, CREATE (mq=%s,channel=taker)" % mq, created
        bodies = ["text", {"a": [1, None, 2.5]}, "\u4e2d\u6587", [1, 2], 7]
        for body in bodies:
            ask(client, "pub", body, mq=mq, tag="a.b")
        taken = ask(client, "take", mq=mq, channel="taker", window=10)
        assert [one["body"] for one in taken.body] == bodies, taken
        assert ask(client, "take", 604, mq=mq, channel="taker", status=604).body == []
        told = ask(client, "query", mq=mq).body
        assert (told["type"], told["size"]) == (mq_type, len(bodies)), told
        ask(client, "remove", mq=mq)
        ask(client, "query", mq=mq, status=404)


def try_subscriptions(client):
    """A pool of two on one channel shares the work; another channel gets everything."""
    count = 40
    got = queue.Queue()
    ask(client, "create", mq="work", channel="pool")
    ask(client, "create", mq="work", channel="all")
    members = [opened(), opened(), opened()]
    for number, (member, channel) in enumerate(zip(members, ["pool", "pool", "all"])):
        member.add_mq_handler("work", channel, lambda one, number=number: got.put((number, one.body)), window=4)
        ask(member, "sub", mq="work", channel=channel, window=4)
    for number in range(count):
        ask(client, "pub", number, mq="work")
    shares = {0: [], 1: [], 2: []}
    for _ in range(2 * count):
        number, body = got.get(timeout=SECONDS)
        shares[number].append(body)
    assert sorted(shares[0] + shares[1]) == list(range(count)), shares
    assert shares[0] and shares[1], shares
    assert shares[2] == list(range(count)), shares
    for member in members:
        member.close()


def try_own_deliveries(client):
    """A client that publishes to the channel it consumes gets first the answer, then the message, with one id."""
    got = queue.Queue()
    ask(client, "create", mq="own", channel="own")
    client.add_mq_handler("own", "own", got.put, window=1)
    ask(client, "sub", mq="own", channel="own", window=1)
    for number in range(20):
        answer = ask(client, "pub", number, mq="own")
        message = got.get(timeout=SECONDS)
        assert (answer.body, message.body) == ("OK, PUB (mq=own)", number)
        assert answer.headers.id == message.headers.id


class Example:
    def plus(self, a, b):
        return int(a) + int(b)

    def echo(self, text):
        return text

    def fail(self):
        raise ValueError("on purpose")


def try_rpc(client):
    processor = RpcProcessor()
    processor.mount("/example", Example())
    server = RpcServer(processor)
    server.mq_server_address, server.mq = ADDRESS, "MyRpc"
    if KEYS:
        server.enable_auth(*KEYS)
    server.start()
    wait_for_consumer(client, "MyRpc")
    caller = signing(RpcClient(ADDRESS, url_prefix="/MyRpc"))
    assert caller.invoke("plus", [1, 2], url_prefix="/MyRpc/example") == 3
    assert caller.example.echo("\u4e2d") == "\u4e2d"
    try:
        caller.example.fail()
    except Exception as error:
        assert str(error) == "on purpose", error
    else:
        raise AssertionError("an exception of the service got lost")
    if not KEYS:
        assert fetch("GET", "/MyRpc/example/plus/4/5") == (200, b"9")
        assert fetch("POST", "/MyRpc/example/plus", "[6, 7]") == (200, b"13")
        assert fetch("GET", "/MyRpc/nothing")[0] == 404
        status, page = fetch("GET", "/MyRpc/doc")
        assert (status, b"example/plus" in page) == (200, True)
    caller.close()
    server.close()


def wait_for_consumer(client, mq):
    for _ in range(1000):
        answer = client.invoke(command("query", mq=mq), timeout=SECONDS)
        if answer.status == 200 and answer.body["consumerCount"]:
            return
    raise AssertionError("the service did not subscribe")


def fetch(method, path, body=None):
    connection = http.client.HTTPConnection(ADDRESS, timeout=SECONDS)
    connection.request(method, path, body, {"content-type": "application/json"} if body else {})
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def main():
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
    import traceback

    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
