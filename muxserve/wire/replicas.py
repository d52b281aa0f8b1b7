"""Messages about several replicas of a model: between gateways, the global scheduler, units and the controller.

The global scheduler is a ZeroMQ ROUTER to gateways (`gateway/EPOCH`) and the controller (`controller`), and itself a
peer (`scheduler/EPOCH`) of every unit scheduler's ROUTER. It holds nothing that it does not get back by itself when it
is started again: units report as soon as they are greeted.
"""

from __future__ import annotations

import msgspec

from muxserve.replicas.priorities import ServiceClass
from muxserve.replicas.views import InstanceLoad
from muxserve.wire.base import Message

# ---------------------------------------------------------------- global scheduler <-> unit scheduler


class SchedulerHello(Message):
    """First message of a global scheduler to a unit, which sends it `Loads` from then on."""

    epoch: str


class PoolsLoad(msgspec.Struct, omit_defaults=True, gc=False):
    """How the KV pools of a unit stand together, bytes of one device, or of the machine's memory on a CPU. They are to
    take `target`, as the unit was told last (0: nothing), and `backed` of them have memory. What runs has them or takes
    them next: `needed`; with the oldest requests that wait that is `urgent`, and with all that there are seats for
    `wanted`. `model` is the one whose oldest request waits for longest; empty if none waits. Pools that are not
    `elastic` have what they have."""

    target: int = 0
    backed: int = 0
    needed: int = 0
    urgent: int = 0
    wanted: int = 0
    model: str = ""
    elastic: bool = True


class Loads(Message):
    """How the replicas of a unit stand; sent when asked (`SchedulerHello`), when they have changed by more than a
    little, and at least every second. `epoch` is the unit scheduler's. Models that are not up are not in it. `came` are
    the requests that gateways have given to the unit since the last one: `loads` tells of these. `pools` is None while
    the memory manager is away."""

    unit: str
    epoch: str
    loads: list[InstanceLoad]
    came: list[str] = []
    pools: PoolsLoad | None = None


class SetRoom(Message):
    """The KV pools of the unit may take `bytes` together, of each device, or of the machine's memory on a CPU. Said
    again for as long as they take another number."""

    bytes: int


class RollingRequest(msgspec.Struct, omit_defaults=True, gc=False):
    """A request that a replica of a rolling model has. `tokens` are those of its prompt and what it had generated when
    it came, `max_tokens` the most that it may generate. Once it decodes, that was `decoding_seconds` ago."""

    request_id: str
    tokens: int
    max_tokens: int
    prefilled: bool = False
    decoding_seconds: float | None = None


class RollingReport(Message):
    """What happened in the replica of a rolling model since its last report; the unit sends one whenever something has,
    beside its `Loads` and before them.

    `whole`: a first report, or one after something was lost: `requests` are then all that the replica has, otherwise
    those that came. `prefilled` have their first token; `left` ended, for whatever reason. What came is taken first and
    what left last: a request that leaves and comes again does so in two reports. `over` of those that left are done or
    were cancelled: nobody serves them any more. `steps` counts the decode steps since the engine is up, as it reported
    `counted_ago` seconds before this report; one takes `step_seconds` by now (0: not known). Since the last report such
    steps generated `decoded` tokens, and `prefill_tokens` took `prefill_seconds`.
    """

    unit: str
    epoch: str
    model: str
    whole: bool = False
    requests: list[RollingRequest] = []
    prefilled: list[str] = []
    left: list[str] = []
    over: int = 0
    steps: int = 0
    counted_ago: float = 0.0
    step_seconds: float = 0.0
    decoded: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0


class Paired(Message):
    """The replica of `model` is to give requests to the one in unit `destination`, whose migrator listens at `address`
    and whose last report was `load`. Repeated with every round for as long as it holds: a unit that has not heard it
    for two seconds begins no more migrations."""

    model: str
    destination: str
    address: str
    load: InstanceLoad


class Unpaired(Message):
    """The replica of `model` gives away no more requests; those on their way arrive."""

    model: str


class Terminating(Message):
    """The replica of `model` is (or, with `on` false, is no longer) being drained. What waits in its queue is given
    back (`Elsewhere`); what runs is moved as pairs allow, or ends."""

    model: str
    on: bool


# ---------------------------------------------------------------- unit scheduler -> gateway


class Elsewhere(Message):
    """The unit has not begun these requests and will not, since it is being drained: the gateway sends them to another
    one. This does not count as an attempt that failed. `attempts` are those that it means, one for each id."""

    request_ids: list[str]
    attempts: list[int]


class TookOver(Message):
    """The request came to this unit by migration, and is served here now. A gateway that does not know it, or knows a
    later attempt, answers with `Cancel`.

    `moves` is how often it has moved within this attempt (`Moving.moves`): of a request that moves on at once, the
    gateway may hear from its last unit first. Said again when the gateway greets the unit again, since it may have been
    lost with the connection.
    """

    request_id: str
    attempt: int
    moves: int = 0


# ---------------------------------------------------------------- gateway <-> global scheduler


class ServedBefore(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request came at `arrival`, seconds of the machine's monotonic clock, and its client has `emitted` tokens."""

    arrival: float
    emitted: int


class Place(Message):
    """Where to send a request? `demand` is the tokens of KV that it needs to start: those to be prefilled, and one.
    It waits since `since`, seconds of the machine's monotonic clock. `max_tokens` is the most that it may generate.
    `prefix` has keys of the prompt's beginnings, one after the other, each of `replicas.prefixes.KEY_BYTES`."""

    request_id: str
    model: str
    demand: int
    since: float
    service: ServiceClass = ServiceClass()
    max_tokens: int = 0
    prefix: bytes = b""
    before: ServedBefore | None = None


class Unplace(Message):
    """The answer is not needed any more."""

    request_ids: list[str]


class Placed(Message):
    """Answer to `Place`."""

    request_id: str
    unit: str


class Waits(Message):
    """Answer to `Place`: the request waits with the global scheduler until it can be placed, and `Placed` or
    `NotPlaced` will come. The gateway need not choose by itself as long as the global scheduler is there. `asleep`: it
    waits for its model to be woken, which is no sign of load."""

    request_id: str
    asleep: bool = False


class NotPlaced(Message):
    """Answer to `Place`: the request cannot be served; `message` is for the user. `late`: no replica came up in time
    (it may be tried again); otherwise none could ever hold it."""

    request_id: str
    message: str
    late: bool


# ---------------------------------------------------------------- controller <-> global scheduler


class ControllerHello(Message):
    """First message of the controller to the global scheduler."""


class StartReplicas(Message):
    """The global scheduler wants `count` more replicas of `model`."""

    model: str
    count: int


class StopReplica(Message):
    """The replica is drained: the controller ends it."""

    model: str
    unit: str


class StartFailed(Message):
    """The controller could not start a replica of `model`. `broken`: its engines failed, and nothing lacked room."""

    model: str
    reason: str
    broken: bool = False


class DrainReplicas(Message):
    """Somebody wants these replicas of `unit` drained; the global scheduler answers with `StopReplica` for each. It is
    to be done when the fleet's file of that `generation` is known, which may have the replicas that take over."""

    unit: str
    models: list[str]
    generation: int = 0


class MemoryReport(Message):
    """What everything takes of the memory that the models of `unit` share, bytes (on a CPU: PSS of the whole fleet),
    and of that what would come free with each model that has processes now. `pools`: what the KV pools have of it,
    where they take what models leave. `starting` are models that are being started. `wake_peaks`: of each model, what
    its process took at most while it loaded the weights. All of it was read within the last `seconds`. On GPUs,
    `copies` are bytes of the host's memory for weights of each model, and the engines of those that are `resting` have
    stayed. Sent where memory decides which models are awake."""

    unit: str
    total: int
    models: dict[str, int]
    pools: int = 0
    starting: list[str] = []
    wake_peaks: dict[str, int] = {}
    copies: dict[str, int] = {}
    resting: list[str] = []
    seconds: float = 0.0


class ReplicaEnded(Message):
    """The processes of a replica of `model` have ended: its memory is free."""

    model: str
    unit: str
