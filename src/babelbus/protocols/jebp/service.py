"""jebp as a server offers it (docs/protocols/jebp.md)."""

import logging
from collections.abc import Callable

import msgspec

from babelbus.config import JebpSettings
from babelbus.listening.openings import Opening
from babelbus.protocols.contract import Outbox
from babelbus.protocols.jebp.batches import Batches
from babelbus.protocols.jebp.calls import admin
from babelbus.protocols.jebp.calls.call import Method
from babelbus.protocols.jebp.calls.methods import METHODS
from babelbus.protocols.jebp.calls.state import StateMethods
from babelbus.protocols.jebp.continuation import KeptSession, decode_session
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import PROTOCOL
from babelbus.protocols.jebp.proved import JebpPlan, ProvedHandshake
from babelbus.protocols.jebp.session import Session
from babelbus.protocols.jebp.status import answers
from babelbus.protocols.service import ServiceContext, StreamService

log = logging.getLogger(__name__)


def openings(settings: JebpSettings) -> list[Opening]:
    """Return the TCP listeners of some settings."""
    host, port, seconds = settings.host, settings.port, settings.handshake_seconds
    return [Opening(name=PROTOCOL, host=host, port=port, section=PROTOCOL, speaks_tls=False, handshake_seconds=seconds)]


class JebpService(StreamService):
    """One TCP listener; sessions need nothing that they share beside the broker."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(PROTOCOL, context, context.config.jebp)
        self._context = context
        self._identity = Identity.load(context.server_key)
        self.state = StateMethods(context.broker.state, context.clock, context.read_value, context.metrics)
        self.methods: dict[str, Method] = METHODS | self.state.methods
        """The methods of jebp/1.2; what the server offers beside those of the protocol is added before `start`."""
        if context.administer is not None:
            self.methods["admin"] = admin.make_method(context.administer)

        self._batches = Batches(context.broker, answers(context.config.jebp.status), context.crowd.may_serve)

    async def start(self) -> None:
        """Start to listen.

        Raises:
            OSError: the address is taken.
        """
        settings = self._context.config.jebp
        if settings.bare_certificates:
            log.warning("jebp.bare_certificates is on: who saw a certificate once can show it again")
        fronted = self._plan(settings), self._make_fronted, self._batches.receive
        await self.listeners.listen(PROTOCOL, settings.host, settings.port, self._make_session, fronted=fronted)
        log.info("the certificate of jebp is %s", self._identity.fingerprint)

    def _plan(self, settings: JebpSettings) -> bytes:
        plan = JebpPlan(self._identity.seed, settings.frame_bytes_max, settings.bare_certificates)
        return msgspec.json.encode(plan)

    @property
    def unsent(self) -> bool:
        """Whether an answer is outstanding or has not gone out."""
        return self._batches.unanswered > 0 or super().unsent

    def _make_fronted(self, outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
        handshake = ProvedHandshake(self._context.config.jebp.frame_bytes_max)
        return self._make_session(outbox, close, peer, handshake)

    def continue_session(self, content: bytes, outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
        """Return a session that goes on."""
        return self._make_session(outbox, close, peer, kept=decode_session(content))

    def _make_session(
        self,
        outbox: Outbox,
        close: Callable[[], None],
        peer: str | None,
        handshake: ProvedHandshake | None = None,
        kept: KeptSession | None = None,
    ) -> Session:
        context, gate = self._context, self._context.broker.gate

        def note_login(name: str, refused: str) -> None:
            gate.note_login(name, f"{PROTOCOL} {peer}", refused=refused, is_known=True)

        return Session(
            context.broker,
            outbox,
            close,
            identity=self._identity,
            authorise=context.authorise,
            settings=context.config.jebp,
            metrics=context.metrics,
            handshake=handshake,
            kept=kept,
            note_login=note_login,
            methods=self.methods,
        )
