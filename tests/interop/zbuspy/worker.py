"""A zbuspy worker as its `examples/sub.py` has it: it makes its queue and subscribes whenever a connection opens.

The argument is the server's address. It prints `open` for each connection and `got BODY` for each message.
"""

import sys
from typing import Any

from zbus import Message, MqClient  # type: ignore[import-not-found]

MQ, CHANNEL = "work", "pool"


def say(cmd: str, **headers: object) -> Any:
    message = Message()
    message.headers.cmd = cmd
    message.headers.mq = MQ
    message.headers.channel = CHANNEL
    for name, value in headers.items():
        message.headers[name] = value
    return message


def subscribe(client: Any) -> None:
    client.invoke(say("create", mqType="disk"), ondata=lambda answer: None)
    client.invoke(say("sub", window=1), ondata=lambda answer: print("open", flush=True))


client = MqClient(sys.argv[1])
client.reconnect_delay = 1
client.add_mq_handler(MQ, CHANNEL, lambda message: print("got", message.body, flush=True), window=1)
client.onopen = subscribe
client.connect()
