"""The commands of staged publishing (docs/protocols/jebp.md, extension: staged batches)."""

from collections.abc import Callable, Sequence

from babelbus.core.access import Identity
from babelbus.core.broker import Broker
from babelbus.core.failures import failure_reason
from babelbus.core.receipt import Promise
from babelbus.core.transactions import (
    PartRef,
    Staging,
)
from babelbus.errors import BabelbusError
from babelbus.metrics import Metrics
from babelbus.protocols.jebp.fields import encode_numbers
from babelbus.protocols.jebp.messages import (
    PROTOCOL,
    AbortBatch,
    AskTransaction,
    BatchCommitted,
    CommitBatch,
    PartsDropped,
    RecordsStaged,
    StageRecords,
    StagingRequest,
    TransactionTold,
)
from babelbus.protocols.jebp.staging_codec import encode_told
from babelbus.protocols.jebp.status import Outcome
from babelbus.records.ingest import parse_records

Said = tuple[Outcome, bytes]
Reply = tuple[Sequence[Promise], Callable[[], Said]]
"""The promises that an answer waits for, and the function that returns the answer then."""


def carry_out(request: StagingRequest, broker: Broker, client: Identity, metrics: Metrics) -> Reply:
    """Handle a request. Transaction ids belong to their client: two clients may use the same id."""
    staging = broker.staging
    transaction_id = own_id(client, request.transaction)
    try:
        match request:
            case StageRecords():
                return _stage(request, transaction_id, broker, client, metrics)
            case CommitBatch():
                return _commit(request, transaction_id, broker, client, metrics)
            case AbortBatch():
                dropped = staging.abort(transaction_id, request.batch_id, request.part or None)
                return _at_once(Outcome.BATCH_ABORTED, encode_numbers(PartsDropped(dropped)))
            case AskTransaction():
                return _at_once(Outcome.TRANSACTION_TOLD, _tell(staging, transaction_id))
    except BabelbusError as error:
        return _at_once(*_refusal(error, client, metrics))


def own_id(client: Identity, id_: str) -> str:
    """Return the id of a client's transaction or will, which no transaction or will of another client has.

    Clients of a list may have a `/` in their names: the name is quoted then, behind a blank, with which no name begins.
    """
    name = client.name
    if "/" in name:
        name = " " + name.replace("%", "%25").replace("/", "%2F")
    return f"{name}/{id_}"


def _at_once(outcome: Outcome, content: bytes) -> Reply:
    return (), lambda: (outcome, content)


def _refuse(reason: str) -> Reply:
    return _at_once(Outcome.STAGING_REFUSED, reason.encode())


def _stage(request: StageRecords, transaction_id: str, broker: Broker, client: Identity, metrics: Metrics) -> Reply:
    refused = broker.refuse_staged(client, request.topic)
    if refused is not None:
        return _refuse(client.relative_text(str(refused)))
    batch = parse_records(request.records)
    receipt = broker.staging.stage(
        transaction_id,
        request.batch_id,
        request.part,
        request.topic,
        batch,
        first_record=request.first_record,
        partition=request.partition,
        to_state=request.to_state,
    )

    def tell() -> Said:
        if receipt.error is not None:
            return _refusal(receipt.error, client, metrics)
        staged = RecordsStaged(receipt.partition, receipt.base_offset + receipt.count)
        return Outcome.RECORDS_STAGED, encode_numbers(staged)

    return (receipt,), tell


def _commit(request: CommitBatch, transaction_id: str, broker: Broker, client: Identity, metrics: Metrics) -> Reply:
    for topic, _ in broker.staging.places(transaction_id, request.batch_id):
        refused = broker.refuse_staged(client, topic)  # any more
        if refused is not None:
            return _refuse(client.relative_text(str(refused)))
    parts = [PartRef(one.part, one.records) for one in request.parts]
    receipt = broker.staging.commit(transaction_id, request.batch_id, parts, owner=request.owner)

    def tell() -> Said:
        if receipt.error is not None:
            return _refusal(receipt.error, client, metrics)
        return Outcome.BATCH_COMMITTED, encode_numbers(BatchCommitted(receipt.count, receipt.again))

    return (receipt,), tell


def _tell(staging: Staging, transaction_id: str) -> bytes:
    info = staging.transaction(transaction_id)
    return encode_told(
        TransactionTold(info.last_batch_id, info.last_records, info.pending_batch_id, info.staged_bytes, info.owner)
    )


def _refusal(error: BabelbusError, client: Identity, metrics: Metrics) -> Said:
    """Return the answer to what could not be done: whether asking again may help, and why in words."""
    reason = failure_reason(error)
    metrics.publish_errors_total.labels(PROTOCOL, reason).inc()
    if reason == "disk":  # its text names files of the server
        return Outcome.STAGING_REPEAT, b"the server's disk refused it"
    outcome = Outcome.STAGING_REPEAT if error.retriable else Outcome.STAGING_REFUSED
    return outcome, client.relative_text(str(error)).encode("utf-8", "replace")
