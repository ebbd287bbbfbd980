"""All requests of the administration API, as the administration endpoint and other protocols offer them."""

from collections.abc import Callable

from babelbus.core.access import Identity
from babelbus.core.state import StateEditor, editor_for
from babelbus.identities.proofs import Proofs
from babelbus.metrics import Metrics
from babelbus.storage.notes import Note
from babelbus.web.access import AccessRoutes
from babelbus.web.audit import AuditRoutes
from babelbus.web.change_calls import ChangeRoutes, noting
from babelbus.web.clients import ClientRoutes
from babelbus.web.cluster import ClusterRoutes
from babelbus.web.connections import ConnectionRoutes
from babelbus.web.console_calls import ConsoleCalls
from babelbus.web.consumers import ConsumerRoutes
from babelbus.web.copies import CopyRoutes
from babelbus.web.dead_letters import DeadLetterRoutes
from babelbus.web.direct import Api
from babelbus.web.groups import GroupRoutes
from babelbus.web.history_calls import HistoryRoutes
from babelbus.web.live import LiveRoutes
from babelbus.web.pipelines import PipelineRoutes, Pipelines
from babelbus.web.records import RecordRoutes
from babelbus.web.requests import RequestRoutes
from babelbus.web.search.routes import SearchRoutes
from babelbus.web.server import Host, ServerRoutes
from babelbus.web.sessions import KeptSessions, Sessions
from babelbus.web.state import StateRoutes
from babelbus.web.state_views import StateViews
from babelbus.web.status import StatusRoutes
from babelbus.web.topics import TopicRoutes
from babelbus.web.views import Encoders


class AdminApi:
    """The requests of administration, wherever they come from: the handlers of `routes`, and `direct` without HTTP."""

    def __init__(
        self,
        server: Host,
        metrics: Metrics,
        *,
        read_value: Callable[[bytes], bytes],
        proofs: Proofs | None = None,
        views: Encoders | None = None,
        sessions: Note[KeptSessions] | None = None,
    ) -> None:
        broker = server.broker
        self.metrics = metrics
        self.proofs = proofs = proofs or Proofs(server.folder, server.clock, metrics, server.config.access)

        def editor_of(principal: Identity) -> StateEditor:
            state, history = broker.state_for(principal), broker.history_for(principal)
            return editor_for(principal, state, history, server.clock, read_value)

        self.sessions = Sessions(broker.gate, server.clock, server.config.admin, broker.writer, sessions)
        self.live = LiveRoutes(broker, editor_of, metrics)
        self.search = SearchRoutes(broker, server.clock)
        self._requests = RequestRoutes(broker, server.clock)
        self._consumers = ConsumerRoutes(broker)
        self._records = RecordRoutes(broker, views or {})
        pipelines = Pipelines(server.clock)
        metrics.registry.register(pipelines)
        routes = (
            *TopicRoutes(broker, metrics, server.config).routes,
            *self._records.routes,
            *CopyRoutes(broker).routes,
            *self.search.routes,
            *ServerRoutes(server).routes,
            *StatusRoutes(server, metrics).routes,
            *ClientRoutes(server, broker.gate.audit).routes,
            *StateRoutes(editor_of).routes,
            *StateViews(editor_of, server.clock.now_ms).routes,
            *self.live.routes,
            *self._requests.routes,
            *GroupRoutes(broker).routes,
            *self._consumers.routes,
            *DeadLetterRoutes(broker).routes,
            *PipelineRoutes(pipelines).routes,
            *AccessRoutes(broker, proofs, server.clock.now_ms).routes,
            *AuditRoutes(broker).routes,
            *ConsoleCalls(server, self.sessions).routes,
            *HistoryRoutes(server).routes,
            *ConnectionRoutes(server).routes,
            *ChangeRoutes(broker, server.changes).routes,
            *ClusterRoutes(broker, server.cluster).routes,
        )
        self.direct = Api(noting(server.changes, routes))

    def access_changed(self) -> None:
        """Drop what waits for readers and responders who have lost a right."""
        self.live.access_changed()
        self._requests.access_changed()

    def close(self) -> None:
        """End the live answers in good order, and the process that searches."""
        self.sessions.close()
        self.search.close()
        self.live.close()
        for routes in (self._requests, self._consumers, self._records):
            routes.close()
