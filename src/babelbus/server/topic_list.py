"""The list of topics in the data folder: topics that an operator adds there are made, and clients' topics are added."""

import logging
from collections.abc import Callable
from functools import partial

from babelbus.core.access import SERVER
from babelbus.core.broker import Broker
from babelbus.core.receipt import Promise
from babelbus.core.topic import Topic
from babelbus.server.access import AccessLists

log = logging.getLogger(__name__)


class TopicList:
    """The topics that clients or an operator made, in the broker and in the list."""

    def __init__(self, lists: AccessLists, broker: Broker) -> None:
        self._lists = lists
        self._broker = broker
        self._listed: dict[str, int] = {}
        """The list, with numbers of partitions: topics of the broker, and those of the list that are damaged."""
        self.removed: set[str] = set()
        """The topics that went and that the file may have still."""
        self._writer = broker.writer("the list of topics", self._prepare)

    @property
    def last(self) -> Promise:
        """The last write of the list."""
        return self._writer.last

    def topics(self) -> dict[str, Topic]:
        """Return the topics of the broker by name: all but the server's own."""
        return {topic.name: topic for topic in self._broker.topics() if not topic.reserved}

    async def reconcile(self, listed: dict[str, int], removed: set[str]) -> None:
        """Create the topics of a list that the broker does not have; topics of the broker are kept in any case.

        The topics in `removed` are not created: they went after the list was written.
        """
        broker = self._broker
        for name, partitions in listed.items():
            topic = broker.find_topic(name)
            if name in broker.damaged_topics:
                self._listed[name] = partitions
            elif topic is None:
                if name not in removed:
                    log.warning(
                        "topic %r of the list of topics is not in the data folder: it is made, empty; if it had "
                        "records, stop the server and put its folder back in the place of the new one", name
                    )  # fmt: skip
                    await broker.create_topic(name, partitions, principal=SERVER)
            elif partitions > len(topic.partitions):
                await broker.alter_topic(name, {"partitions": partitions}, SERVER)
            elif partitions < len(topic.partitions):
                log.warning("the list of topics gives %r %d partitions, it has %d and keeps them",
                            name, partitions, len(topic.partitions))  # fmt: skip
        for name in sorted(set(self.topics()) - set(listed)):
            log.warning("topic %r is not in the list of topics; it is kept ('babelbus topics remove' removes it)", name)

    def write(self) -> Promise:
        """Write the list with all topics of the broker; return what is done when it is written."""
        self._listed |= {name: len(topic.partitions) for name, topic in self.topics().items()}
        return self._writer.write()

    def note(self, name: str) -> Promise:
        """Record a topic that came, went or grew; return what is done when the list is written."""
        topic = self._broker.find_topic(name)
        if topic is None:
            self._listed.pop(name, None)
            self.removed.add(name)
        elif not topic.reserved:
            self._listed[name] = len(topic.partitions)
        return self._writer.write()

    def _prepare(self) -> Callable[[], None]:
        """Return the write of the list as it is now."""
        self._writer.last.when_done(self._written)
        return partial(self._lists.write_topics, self._listed.copy().items())

    def _written(self, written: Promise) -> None:
        if written.error is not None:
            log.error("the list of topics could not be written; the topics themselves are safe: %s", written.error)
        elif written is self._writer.last:
            self.removed.clear()
