"""The answers to `query`: MQs and channels, as a principal may see them (docs/specifications/zbus.md, 4.6)."""

from typing import Any

from babelbus.core.access import Identity
from babelbus.core.groups import Group
from babelbus.core.topic import Topic
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.hub import Hub


def describe_all(hub: Hub, principal: Identity) -> list[dict[str, Any]]:
    """Return what `query` tells of all MQs that a principal may see."""
    return [describe(hub, topic, principal) for topic in hub.mqs() if hub.sees(principal, topic)]


def describe(hub: Hub, topic: Topic, principal: Identity) -> dict[str, Any]:
    """Return what `query` tells of an MQ: all that any release tells (4.6, DECISION)."""
    mq = topic.name
    entry = hub.entry(topic)
    groups = hub.groups.on_topic(mq)
    channels = [describe_channel(hub, group, principal) for group in groups]
    size = sum(partition.high_watermark for partition in topic.partitions)
    if topic.settings.engine == m.MEMORY:
        size -= sum(partition.oldest for partition in topic.partitions)
    return {
        "name": principal.relative(mq),
        "type": topic.settings.engine,
        "mask": entry.mask,
        "size": size,
        "messageDepth": size,
        "channelCount": len(channels),
        "consumerCount": sum(len(group.members) for group in groups),
        "creator": entry.creator if hub.manages(principal, topic) else "",
        "createdAt": entry.created_ms,
        "lastPubTime": hub.published_ms.get(mq, 0),
        "lastSubTime": max(hub.subscribed_ms.get(mq, {}).values(), default=0),
        "channels": channels,
        "channelList": channels,
    }


def describe_channel(hub: Hub, group: Group, principal: Identity) -> dict[str, Any]:
    """Return what `query` tells of a channel; a principal that may not manage the MQ sees no clients of others."""
    sees_all = hub.manages(principal, group.topic)
    mq, channel = group.topic.name, group.name
    position = group.stored()[0].committed
    if group.topic.settings.engine == m.MEMORY:
        position = max(position, group.topic.partitions[0].oldest)
    return {
        "name": channel,
        "mask": hub.channel_mask(group),
        "filter": group.settings.filter,
        "offset": position,
        "lastSubTime": hub.subscribed_ms.get(mq, {}).get(channel, 0),
        "subscriptions": [
            {
                "clientId": one.session_id,
                "clientAddress": one.address,
                "mq": principal.relative(mq),
                "channel": channel,
                "filters": [] if one.filter is None else [one.filter],
                "window": one.window,
            }
            for one in hub.subscribers.get((mq, channel), {})
            if sees_all or one.principal.name == principal.name
        ],
    }
