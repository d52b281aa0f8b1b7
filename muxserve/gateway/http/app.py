"""The endpoint: routes every HTTP request to its model's stock vLLM application.

    /v1/...                  by the `model` field of the body
    /classify, /score, ...   likewise (gateway/http/served_app.py)
    /tokenize, /detokenize   likewise
    /models/NAME/...         the same for one model, and its /metrics
    /v1/responses/ID         a response that is kept (gateway/http/responses.py)
    /v1/models               all models
    /admin/usage             what tenants used
    /admin/scale, ...        changes of the fleet, with a key (gateway/http/changes.py)
    /ui                      the live page (gateway/status/ui.py)
    /health /metrics /fleet  about the server (/ping and /load as well, as stock servers have them)

Only routes that serve are passed on; what vLLM offers for the administration of its own engine is not.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote

from starlette.middleware.cors import CORSMiddleware

from muxserve.gateway.http.anthropic_errors import PATHS as ANTHROPIC
from muxserve.gateway.http.anthropic_errors import AnthropicErrors
from muxserve.gateway.http.body import (
    BodyClaim,
    BodyMemory,
    BodyReplay,
    ClientGoneError,
    RequestFields,
    asked_by,
    check_media,
    check_tokens,
    read_body,
)
from muxserve.gateway.http.early_errors import EarlyErrors
from muxserve.gateway.http.errors import (
    CLOSE,
    App,
    Message,
    Receive,
    RequestError,
    Scope,
    Send,
    check_method,
    no_such_path,
    only_get,
    respond_error,
    respond_json,
    retry_after,
    shortened,
)
from muxserve.gateway.http.fallback import (
    FALLBACK_HEADER,
    REFUSALS,
    FallbackError,
    HeldAnswer,
    chain,
    for_model,
    relay,
)
from muxserve.gateway.http.http_request import BATCH, HttpRequest, current_http
from muxserve.gateway.http.late_errors import AnswerProgress
from muxserve.gateway.http.own_paths import OwnPaths, app_at
from muxserve.gateway.http.peers import ask_other_fleet, is_from_client
from muxserve.gateway.http.responses import PATH as RESPONSES
from muxserve.gateway.http.responses import ResponseRoutes
from muxserve.gateway.http.served_app import COMPUTE, POSTS, ServedApp
from muxserve.gateway.limits.admission import ApiKeys, Caller, presented_key
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.limits.engine_requests import check_engine_requests, engine_requests
from muxserve.gateway.limits.priorities import Priorities
from muxserve.gateway.limits.tenants import RATE_HEADERS, RATE_KINDS, USAGE_PATH, Tenancy
from muxserve.gateway.routing.model_names import ModelNames
from muxserve.gateway.status.measure import Measures, RequestOutcome
from muxserve.net.logs import of_request, request_id
from muxserve.spec import FallbackSpec, GatewaySpec, OtherFleet, public_name

if TYPE_CHECKING:
    from muxserve.gateway.status.tracing import Tracing

log = logging.getLogger(__name__)
access = logging.getLogger("muxserve.access")

MODELS = "/models/"
REQUEST_ID = b"x-request-id"
_PLAIN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# So often the client of a stream hears something while its request waits; proxies take half a minute for a failure.
SIGN_SECONDS = 2.0
# When a client may ask again for a model that is being started or replaced.
SOON_SECONDS = 2


@dataclass(slots=True)
class Access:
    """Who may come in, which levels requests may ask for, and whose requests they are. Keys and levels may change at
    any time."""

    keys: ApiKeys
    priorities: Priorities
    tenancy: Tenancy


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A request that is to be served, with its body, and the fields of that which are looked at here."""

    path: str
    caller: Caller
    scope: Scope
    body: bytes
    fields: RequestFields
    replay: BodyReplay
    claim: BodyClaim


class GatewayApp:
    """The ASGI application of a gateway. What it offers, whom it lets in and the levels may change at any time.

    Args:
        models: what is offered.
        access: whom it lets in.
        own: what it answers itself.
        limiter: how many requests at once.
        measures: where rejections are counted.
        settings: the largest body taken, and whether each request that ended leaves a line in the log.
        tracing: makes the spans of requests.
        responses: answers what is about one response.
    """

    def __init__(
        self,
        models: Mapping[str, ServedApp],
        access: Access,
        own: OwnPaths,
        limiter: ConcurrencyLimiter,
        measures: Measures,
        settings: GatewaySpec,
        tracing: Tracing | None = None,
        responses: ResponseRoutes | None = None,
    ) -> None:
        self.models = models
        self.access = access
        self._own = own
        self._limiter = limiter
        self._measures = measures
        self._tracing = tracing
        self._responses = responses
        self._settings = settings
        self.bodies = BodyMemory(settings.http.max_body_bytes)
        # Connections end with the answers that they have at present; no request is taken; those that wait get no place.
        self.draining = False
        self.refusing = False
        self.ended = False
        # There are more connections than there is room for: what comes is refused, and each ends with its answer.
        self.crowded: Callable[[], bool] = lambda: False
        # Requests may wait for their model to be woken: clients of streams are shown that somebody is there.
        self.models_sleep = False
        # Models of the fleet that cannot be offered, and why.
        self.refused: Mapping[str, str] = {}
        # What may be asked for, also where it cannot be reached at the moment.
        self.names = ModelNames()
        # What answers in place of a model, by the model's name.
        self.fallbacks: Mapping[str, FallbackSpec] = {}
        # What answers requests while units go from one fleet to another.
        self.other_fleet: OtherFleet | None = None
        # Requests that another fleet, or another endpoint, answers.
        self._elsewhere = 0
        self._none_elsewhere = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _decline(scope, receive, send)
            return
        http = HttpRequest(time.monotonic(), request_id=_request_id(scope["headers"]), batch=scope.get(BATCH))
        current_http.set(http)
        request_id.set(http.request_id)
        if self._tracing is not None and scope["method"] == "POST":
            _, path = self._divided(scope)
            if path in POSTS - COMPUTE:
                http.trace = self._tracing.begin(scope["headers"], path, http.arrival)
        answer = _Answer(send, http, self)
        try:
            await self._answer(scope, receive, answer, http)
        finally:
            if http.trace is not None:
                tenant = http.tenant.name if http.tenant is not None else ""
                http.trace.finish(http.model, tenant, answer.progress.status, time.monotonic())
            if self._settings.http.access_log:
                host, port = scope.get("client") or ("-", 0)
                took = time.monotonic() - http.arrival
                access.info(
                    "%s:%s %s %s tenant=%s model=%s status=%s seconds=%.3f request=%s served_as=%s",
                    *(host, port, scope["method"], scope["path"], http.owner or "-", http.model or "-"),
                    *(answer.progress.status or "-", took, http.request_id, http.group or "-"),
                    extra=of_request(http.group),
                )

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer, http: HttpRequest) -> None:
        send: Send = AnthropicErrors(answer) if scope["path"].endswith(ANTHROPIC) else answer
        try:
            await self._route(scope, receive, EarlyErrors(send), http)
        except ClientGoneError:
            pass
        except Exception as error:
            _, path = self._divided(scope)
            refused = _refused(error)
            last_event = answer.progress.last_event(path, refused)
            if answer.begun and not answer.progress.complete and last_event is None:
                raise  # the server logs it and cuts the connection
            if not isinstance(error, RequestError):
                log.exception("%s %s failed", scope["method"], scope["path"])
            if not answer.begun:
                await respond_error(send, refused)
            elif not answer.progress.complete:
                await answer({"type": "http.response.body", "body": last_event})

    async def _route(self, scope: Scope, receive: Receive, send: Send, http: HttpRequest) -> None:
        name, path = self._divided(scope)
        if self._is_not_here(name, path):
            with self.bodies.claim() as claim:
                body = await self._body(scope, receive, claim, name) if scope["method"] == "POST" else b""
            if await self._other_fleet_answers(body, scope, receive, send, http):
                return
            if name is not None:
                raise self._not_there(name)
        batch = http.batch
        caller = self.access.keys.admit(presented_key(scope["headers"])) if batch is None else batch.caller
        if caller is not None and caller.tenant is not None:
            http.owner = caller.tenant.name
        model_page = self._own.model_pages.get(path) if name is not None else None
        if caller is None and (name is not None or path not in self._own.open) and model_page is None:
            self._measures.rejected("", "key")
            raise RequestError(
                HTTPStatus.UNAUTHORIZED,
                "no valid API key: send one of this server's keys in the header 'Authorization: Bearer KEY'",
                headers=[(b"www-authenticate", b"Bearer")],
            )
        if name is not None:
            name = self._known(name, caller, http.request_id, path in POSTS)
            if model_page is not None:
                only_get(scope)
                await model_page(name, scope, send)
                return
            if path in ("/", "/v1/models"):
                only_get(scope)
                await respond_json(send, {"object": "list", "data": [*self.models[name].cards.values()]})
                return
        elif path in self._own.pages:
            only_get(scope)
            if path not in self._own.open:
                _only_admins(path, caller)
            await self._own.pages[path](scope, send)
            return
        elif (app := app_at(self._own.apps, path)) is not None:
            _only_admins(path, caller)
            await app(scope, receive, send)
            return
        elif caller is not None and (own := app_at(self._own.caller_apps, path)) is not None:
            await own(caller, scope, receive, send)
            return
        elif path == "/v1/models":
            only_get(scope)
            # A name that several models share is one entry.
            cards = {of: card for name in self._offered_to(caller) for of, card in self.models[name].cards.items()}
            await respond_json(send, {"object": "list", "data": [*cards.values()]})
            return
        elif path.startswith("/v1/models/"):
            only_get(scope)
            await self._card(path.removeprefix("/v1/models/"), caller, send)
            return
        elif path == USAGE_PATH:
            only_get(scope)
            await self.access.tenancy.report(scope.get("query_string", b""), caller.tenant if caller else None, send)
            return
        assert caller is not None, "no path that serves is open"
        if path.startswith(RESPONSES) and self._responses is not None:
            await self._responses.answer(http.owner, name, path, scope, receive, send)
            return
        if path not in POSTS:
            raise no_such_path(scope)
        check_method(scope, "POST")
        http.priority = (
            self.access.priorities.of(scope["headers"], caller.level) if batch is None else self.access.priorities.last
        )
        await self._serve(name, path, caller, scope, receive, send, http)

    async def _serve(
        self, name: str | None, path: str, caller: Caller, scope: Scope, receive: Receive, send: Send, http: HttpRequest
    ) -> None:
        if self.refusing:
            raise self._shutting_down(name)
        if self.crowded():
            self._measures.rejected(self._version(name), "connections")
            raise RequestError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "this server has as many connections as it may have; try again in a moment",
                headers=[CLOSE, retry_after(1)],
            )
        with self.bodies.claim() as claim:
            body = await self._body(scope, receive, claim, name)
            asked = asked_by(body)
            if (
                name is None
                and self._is_not_here(asked.model)
                and await self._other_fleet_answers(body, scope, receive, send, http)
            ):
                return
            if name is None:
                name = self.model_of(asked.model, caller, http.request_id)
            if self._is_elsewhere(name) and path not in COMPUTE and is_from_client(scope):
                if await self._other_fleet_answers(body, scope, receive, send, http):
                    return
                raise self._not_there(name)
            incoming = _Incoming(path, caller, scope, body, asked, BodyReplay(receive, body, http), claim)
            try:
                if path in COMPUTE:
                    served = self._checked(name, incoming)
                    await served.app(_below(scope, path), incoming.replay, send)
                else:
                    self.access.tenancy.check_budgets(caller, name)
                    with self.access.tenancy.serving(caller, name, limited=http.batch is None) as http.tenant:
                        await self._serve_or_fall_back(name, incoming, send, http)
            finally:
                incoming.replay.unwatch()

    async def _serve_or_fall_back(self, name: str, incoming: _Incoming, send: Send, http: HttpRequest) -> None:
        """Let the model answer, or what stands in for it while it is degraded or at its limit."""
        # A batch can wait until the model serves.
        steps = chain(self.fallbacks, name) if http.batch is None else []
        if len(steps) <= 1:
            await self._attempt(name, incoming, send, http)
            return
        first: HeldAnswer | RequestError | None = None
        first_after: int | None = None
        for step in steps:
            held = HeldAnswer(send)
            if step is not steps[0]:
                if not step.url and not incoming.caller.may_use(step.model):
                    continue
                http.fallback, http.retry_after = step.words, None
                incoming.replay.again(incoming.body if step.url else for_model(incoming.body, step.model))
            refused: HeldAnswer | RequestError = held
            try:
                if step.url:
                    self.access.tenancy.check_budgets(incoming.caller, name)
                    await self._relay(name, step, incoming, held, http)
                else:
                    self.access.tenancy.check_budgets(incoming.caller, step.model)
                    await self._attempt(step.model, incoming, EarlyErrors(held), http)
            except RequestError as error:
                if held.begun or (first is None and error.status not in REFUSALS):
                    raise
                refused = error
            except FallbackError as error:
                log.warning("model %s has no fallback at present: %s", name, error)
                refused = RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            if refused is held and not held.refused:
                if first is not None:
                    self._measures.fell_back(name, step.words)
                return
            if first is None:
                first, first_after = refused, http.retry_after
            if self.ended:
                break
        http.fallback, http.retry_after = "", first_after
        http.model = self._version(name) or name
        if http.tenant is not None:
            http.tenant.model = name
        if isinstance(first, HeldAnswer):
            await first.release()
        elif first is not None:
            raise first

    async def _relay(self, name: str, step: FallbackSpec, incoming: _Incoming, send: Send, http: HttpRequest) -> None:
        """Let another endpoint answer a request for the model `name`, which it counts for."""
        http.model = self._version(name) or name
        if http.tenant is not None:
            http.tenant.model = name
        with self._answered_elsewhere():
            used = await relay(step, incoming.path, incoming.body, incoming.replay, send)
        if http.tenant is not None:
            http.tenant.prompted(used.prompt_tokens)
            http.tenant.ended(name, RequestOutcome.COMPLETED.value, used)

    async def _attempt(self, name: str, incoming: _Incoming, send: Send, http: HttpRequest) -> None:
        """Let the model `name` answer."""
        served = self._checked(name, incoming)
        model = http.model = served.model
        if http.tenant is not None:
            http.tenant.model = name
        async with self._limiter.hold(model, incoming.replay, _engine_requests(incoming, served)):
            if self.ended:  # while it waited for its place
                raise self._shutting_down(name)
            incoming.claim.release()  # how many are in service is bounded
            async with self._signs_of_life(send, name):
                await served.app(_below(incoming.scope, incoming.path), incoming.replay, send)
            if http.background is not None:  # the client has its answer, and the model still works
                await asyncio.wait([http.background])

    def _checked(self, name: str, incoming: _Incoming) -> ServedApp:
        """The model `name`, to its end, also if it is removed or replaced meanwhile.

        Raises:
            RequestError: it is not there, or cannot take such a request.
        """
        served = self.models.get(name)
        if served is None:  # removed while the body was read, or cannot be offered
            raise self._not_offered(name, incoming.caller)
        if incoming.path not in served.posts:
            raise RequestError(
                HTTPStatus.NOT_FOUND,
                f"the model {name!r} does not serve {incoming.path}; it has {_listed(served.posts)}",
            )
        check_tokens(incoming.fields, served.most_tokens)
        check_media(incoming.body, served.sees_images)
        check_engine_requests(_engine_requests(incoming, served), self._limiter.gates[served.model].largest, name)
        return served

    async def _body(self, scope: Scope, receive: Receive, claim: BodyClaim, name: str | None) -> bytes:
        try:
            return await read_body(receive, scope["headers"], self._settings.http.max_body_bytes, claim)
        except RequestError as error:
            if error.status is HTTPStatus.SERVICE_UNAVAILABLE:
                self._measures.rejected(self._version(name), "memory")
            raise

    def _is_elsewhere(self, name: str) -> bool:
        """Whether another fleet still answers requests for the model that clients call `name`."""
        return self.other_fleet is not None and self.other_fleet.names is not None and name in self.other_fleet.names

    def _is_not_here(self, asked: str | None, path: str = "") -> bool:
        """Whether another fleet has, besides the models here, those that went there: asked for by name, or listed."""
        if self.other_fleet is None or self.other_fleet.names is not None:
            return False
        if asked is None:
            return path == "/v1/models" or path.startswith("/v1/models/")
        here = any(asked in (name, served.model) or asked in served.cards for name, served in self.models.items())
        return not here and asked not in self.names.shared

    async def _other_fleet_answers(
        self, body: bytes, scope: Scope, receive: Receive, send: Send, http: HttpRequest
    ) -> bool:
        """Let the other fleet answer, unless it has sent the request; whether it did. A batch waits until its model is
        here."""
        if self.other_fleet is None or http.batch is not None or not is_from_client(scope):
            return False
        with self._answered_elsewhere():
            return await ask_other_fleet(self.other_fleet, http.request_id, body, scope, receive, send)

    @contextmanager
    def _answered_elsewhere(self) -> Iterator[None]:
        self._elsewhere += 1
        try:
            yield
        finally:
            self._elsewhere -= 1
            if not self._elsewhere:
                self._none_elsewhere.set()

    async def until_others_answered(self) -> None:
        """Until no request is with another fleet or another endpoint."""
        while self._elsewhere:
            self._none_elsewhere.clear()
            await self._none_elsewhere.wait()

    @asynccontextmanager
    async def _signs_of_life(self, send: Send, model: str) -> AsyncIterator[None]:
        """While a stream waits for its first event: a comment line now and then."""
        if not self.models_sleep or not isinstance(send, EarlyErrors):
            yield
            return

        async def show() -> None:
            while True:
                await asyncio.sleep(SIGN_SECONDS)
                await send.comment(f"waiting for {model}")

        showing = asyncio.create_task(show())
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    def _divided(self, scope: Scope) -> tuple[str | None, str]:
        """The model that a path names, if it does, and the path below it."""
        path: str = scope["path"]
        if not path.startswith(MODELS):
            return None, path
        # An alias may have slashes, which are written as %2F: here they still are.
        raw = scope.get("raw_path", b"").decode("latin-1")
        if raw.startswith(MODELS) and "%2f" in raw.lower():
            name, _, below = raw.removeprefix(MODELS).partition("/")
            return unquote(name), f"/{unquote(below)}"
        below = path.removeprefix(MODELS)
        # A proxy may have written them out.
        aliases = (alias for served in self.models.values() for alias in served.cards if "/" in alias)
        written = max((a for a in aliases if f"{below}/".startswith(f"{a}/")), key=len, default="")
        name = written or below.partition("/")[0]
        return name, f"/{below.removeprefix(name).removeprefix('/')}"

    def model_of(self, asked: str | None, caller: Caller, request_id: str) -> str:
        """The model that a request for `asked` is for; the only one that there is if it names none.

        Raises:
            RequestError: there is none for `caller`.
        """
        if asked is None:
            offered = self._offered_to(caller)
            if len(offered) == 1:
                return offered[0]
            raise RequestError(
                HTTPStatus.BAD_REQUEST,
                f"'model' is missing; this server has {self._names(caller)}",
                param="model",
            )
        return self._known(asked, caller, request_id, serving=True)

    def _known(self, asked: str, caller: Caller | None, request_id: str = "", serving: bool = False) -> str:
        """The name of the model that is called so, which may be its version, one of its aliases, or a name that it
        shares. What `caller` may not use is not there for it, as with OpenAI. For `serving` a model that cannot be
        offered is one, too, if there is a fallback for it."""
        offered = [(name, self.models[name]) for name in self._offered_to(caller)]
        called = [name for name, served in offered if asked in (name, served.model) or asked in served.cards]
        if asked in self.names.shared:
            chosen = self.names.choose(asked, request_id, called)
        else:
            chosen = next(iter(called), None)
        if chosen is None and serving:
            behind = [name for name in self.names.models.get(asked, ()) if caller is None or caller.may_use(name)]
            chosen = next((name for name in behind if name in self.fallbacks), None)
        if chosen is None:
            raise self._not_offered(asked, caller)
        return chosen

    async def _card(self, asked: str, caller: Caller | None, send: Send) -> None:
        name = self._known(asked, caller)
        cards = self.models[name].cards
        await respond_json(send, cards[asked if asked in cards else name])

    def _not_offered(self, asked: str, caller: Caller | None) -> RequestError:
        """Nobody serves `asked` here: for a while, or because `caller` cannot have it."""
        behind = [name for name in self.names.models.get(asked, ()) if caller is None or caller.may_use(name)]
        # It has just gone to another fleet.
        if not behind and self.other_fleet is not None and self.other_fleet.names is None:
            return self._not_there(asked)
        if not behind:
            return self._unknown_model(asked, caller)
        reason = next((why for model, why in self.refused.items() if public_name(model) in behind), None)
        if reason is not None:
            return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, f"{asked} cannot be served: {reason}")
        return self._not_there(asked)

    def _not_there(self, asked: str) -> RequestError:
        self._measures.rejected("", "not_ready")
        return RequestError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"{shortened(asked)} is being started or replaced; try again in a moment",
            headers=[retry_after(SOON_SECONDS)],
        )

    def _offered_to(self, caller: Caller | None) -> list[str]:
        return [name for name in self.models if caller is None or caller.may_use(name)]

    def _shutting_down(self, name: str | None) -> RequestError:
        self._measures.rejected(self._version(name), "draining")
        return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "this server is shutting down", headers=[retry_after(5)])

    def _version(self, name: str | None) -> str:
        """The model that is offered under `name`, as metrics have it; empty: none."""
        return self.models[name].model if name is not None and name in self.models else ""

    def _unknown_model(self, name: str, caller: Caller | None) -> RequestError:
        self._measures.rejected("", "unknown_model")
        has = f"this {'key' if caller is not None and caller.tenant is not None else 'server'} has"
        return RequestError(
            HTTPStatus.NOT_FOUND,
            f"the model {shortened(name)} does not exist; {has} {self._names(caller)}",
            param="model",
        )

    def _names(self, caller: Caller | None) -> str:
        return ", ".join(self._offered_to(caller)) or "none"


def with_cors(app: GatewayApp, origins: Sequence[str]) -> App:
    """`app` for web pages of these origins, too: browsers ask before they send, without a key, and are answered."""
    if not origins:
        return app
    exposed = [
        "retry-after",
        REQUEST_ID.decode(),
        FALLBACK_HEADER.decode(),
        *(f"x-ratelimit-{what}-{kind}" for what in RATE_HEADERS for kind in RATE_KINDS),
    ]
    return CORSMiddleware(
        app, origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"], expose_headers=exposed
    )


class _Answer:
    """ASGI's `send`, which knows whether the answer has begun, tells a client when to come back if that is known by
    then, and ends its connection when the server drains."""

    __slots__ = ("_endpoint", "_http", "_send", "progress")

    def __init__(self, send: Send, http: HttpRequest, endpoint: GatewayApp) -> None:
        self._send = send
        self._http = http
        self._endpoint = endpoint
        self.progress = AnswerProgress()

    @property
    def begun(self) -> bool:
        """Whether the client has been sent something."""
        return self.progress.status != 0

    async def __call__(self, message: Message) -> None:
        if not self.begun and message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (REQUEST_ID, self._http.request_id.encode())]
            after = self._http.retry_after
            if after is not None:
                message["headers"] = [*message.get("headers", ()), retry_after(after)]
            if self._http.fallback:
                named = (FALLBACK_HEADER, self._http.fallback.encode("latin-1", "replace"))
                message["headers"] = [*message.get("headers", ()), named]
            if self._http.tenant is not None:
                message["headers"] = [*message.get("headers", ()), *self._http.tenant.allowance.headers()]
            if (self._endpoint.draining or self._endpoint.crowded()) and CLOSE not in message.get("headers", ()):
                message["headers"] = [*message.get("headers", ()), CLOSE]
        self.progress.sent(message)
        await self._send(message)


def _refused(error: Exception) -> RequestError:
    """What a client is told of `error`."""
    # Starlette raises another error in its place where the answer has begun.
    for each in (error, error.__cause__):
        if isinstance(each, RequestError):
            return each
        status = getattr(each, "http_status", None)  # of vLLM's errors that are meant for clients
        if isinstance(status, HTTPStatus):
            return RequestError(status, str(each))
    return RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed; its log says how")


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own name for its request, if it can stand in a log; else a new one."""
    given = next((value for name, value in headers if name == REQUEST_ID), b"").decode("latin-1")
    return given if _PLAIN_ID.fullmatch(given) else secrets.token_hex(8)


def _engine_requests(incoming: _Incoming, served: ServedApp) -> int:
    return engine_requests(incoming.path, incoming.fields, reads_pairs="/classify" in served.posts)


def _below(scope: Scope, path: str) -> Scope:
    """`scope` as the application of one model has it."""
    return {**scope, "path": path, "raw_path": path.encode()} if path != scope["path"] else scope


def _listed(paths: frozenset[str]) -> str:
    return ", ".join(sorted(paths))


def _only_admins(path: str, caller: Caller | None) -> None:
    if caller is not None and not caller.is_admin:
        raise RequestError(HTTPStatus.FORBIDDEN, f"{path} is for admins; this key's tenant is none")


async def _decline(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer what is not plain HTTP: nothing is to be done at start and end, and there are no web sockets."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    elif scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1003})
