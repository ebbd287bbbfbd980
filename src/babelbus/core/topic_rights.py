"""The rights to a topic, and to the topics whose records it holds copies of: may a principal do this with it?"""

from collections.abc import Set

from babelbus.core.access import (
    ANONYMOUS,
    STATE_TOPIC,
    AccessRefusedError,
    Action,
    Identity,
    Narrowing,
    may_topic,
    owner_of,
    refusal,
    subjects_of_topic,
)
from babelbus.core.subject import TopicTable, exactly, is_secret
from babelbus.core.topic import DEAD_LETTERS_PREFIX, RESERVED_PREFIX, Topic, Topics


class TopicRights:
    """The topics by name, and the questions about rights to them."""

    def __init__(self) -> None:
        self._table = TopicTable()
        self._topics = Topics()

    def may_topic(self, principal: Identity, action: Action, name: str) -> bool:
        """Return whether a principal may do this with everything that a topic holds, dead letters of others too."""
        if principal.rights is None:
            return True
        if not may_topic(principal, action, name):
            return False
        topic = self._topics.get(name)
        return topic is None or all(may_topic(principal, action, source) for source in self._sources(topic))

    def may_some(self, principal: Identity, action: Action, name: str) -> bool:
        """Return whether a principal may do this with something that a topic holds."""
        rights = principal.rights
        return (
            rights is None
            or rights.may_topic(action, name)
            or any(rights.overlaps(action, part) is not Narrowing.NONE for part in subjects_of_topic(name))
        )

    def may_see(self, principal: Identity, name: str) -> bool:
        """Return whether a principal may know of a topic: it may do something with it."""
        return any(
            self.may_topic(principal, action, name) for action in (Action.READ, Action.CONSUME, Action.MANAGE)
        ) or (not name.startswith(RESERVED_PREFIX) and self.may_some(principal, Action.PUBLISH, name))

    def may_manage(self, principal: Identity, name: str, owner: str) -> bool:
        """Return whether a principal may manage a topic, or something on the topic whose owner is given."""
        rights = principal.rights
        if rights is None or may_topic(principal, Action.MANAGE, name):
            return True
        if owner in ("", ANONYMOUS) or owner != owner_of(principal):  # what a stranger made belongs to no stranger
            return False
        return not rights.denies(Action.MANAGE, *subjects_of_topic(name))

    def check_topic(self, principal: Identity, action: Action, name: str) -> None:
        """Check that a principal may do this with everything that a topic holds.

        Raises:
            AccessRefusedError: it may not.
        """
        if not self.may_topic(principal, action, name):
            raise refusal(principal, action, name)

    def check_managed(self, principal: Identity, name: str) -> None:
        """Check that a principal may manage a topic; for a free name, that it may create the topic.

        Raises:
            AccessRefusedError: it may not.
        """
        topic = self._topics.get(name)
        if not self.may_manage(principal, name, "" if topic is None else topic.owner):
            raise refusal(principal, Action.MANAGE, name)

    def _sources(self, topic: Topic) -> tuple[str, ...]:
        """Return the topics whose rights somebody needs who reads a topic."""
        sources = topic.sources + topic.coming
        if not sources and topic.name.startswith(DEAD_LETTERS_PREFIX):
            return (STATE_TOPIC,)  # from before sources were kept: it may hold records of every subject
        return sources

    def _sources_of(self, subject: str) -> tuple[str, ...]:
        topic = self._topics.get(self._table.find(subject) or "")
        return () if topic is None else self._sources(topic)

    def _with_sources(self, name: str) -> set[str]:
        """Return a topic and the topics that its own records come from."""
        topic = self._topics.get(name)
        return {name, *(() if topic is None else self._sources(topic))}

    def refuse_staged(self, principal: Identity, name: str) -> AccessRefusedError | None:
        """Return the refusal of records that the server publishes later for a principal: the whole topic is asked for.

        Where the records set the state, no row may deny that for a part of the topic.
        """
        if not self.may_topic(principal, Action.PUBLISH, name):
            return refusal(principal, Action.PUBLISH, name)
        topic = self._topics.get(name)
        if topic is not None and self._denies_values(principal, topic):
            return refusal(principal, Action.WRITE_STATE, name)
        return None

    def may_publish_all(self, principal: Identity, topic: Topic) -> bool:
        """Return whether a principal may publish events under all subjects of a topic; else `refuse_events` says."""
        rights = principal.rights
        return not topic.may_hold_secrets and (
            rights is None
            or (rights.may_topic(Action.PUBLISH, topic.name) and not self._denies_values(principal, topic))
        )

    @staticmethod
    def _denies_values(principal: Identity, topic: Topic) -> bool:
        """Return whether a row denies values of the state that events of a topic set."""
        rights = principal.rights
        return rights is not None and topic.retains and rights.denies_topic(Action.WRITE_STATE, topic.name)

    def refuse_events(self, principal: Identity, topic: Topic | None, subjects: Set[str]) -> AccessRefusedError | None:
        """Return the refusal of events of a topic, or of live ones; each subject counts.

        Secret subjects are refused to all; an event may be refused because of the value of the state that it would set.
        """
        rights = principal.rights
        denies_values = topic is not None and self._denies_values(principal, topic)
        for subject in sorted(subjects) if len(subjects) > 1 else subjects:
            if is_secret(subject) or (rights is not None and not rights.may(Action.PUBLISH, subject)):
                return refusal(principal, Action.PUBLISH, subject)
            if denies_values and rights is not None and rights.denies(Action.WRITE_STATE, exactly(subject)):
                return refusal(principal, Action.WRITE_STATE, subject)
        return None

    def refuse_letters(self, principal: Identity, topic: Topic) -> AccessRefusedError | None:
        """Return the refusal of a publication to a topic of dead letters; it needs the rights to all their sources.

        Else a principal could forge letters, and whoever replays them would publish for that principal elsewhere.
        """
        if all(may_topic(principal, Action.PUBLISH, source) for source in self._sources(topic)):
            return None
        return refusal(principal, Action.PUBLISH, topic.name)
