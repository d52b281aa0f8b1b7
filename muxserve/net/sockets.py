"""ZeroMQ sockets of the fleet, which let in processes of the fleet only.

* Between machines: TCP with CURVE (RFC 26), which proves who is at the other end and encrypts. A server proves itself
  by the fleet's server key, and lets in whoever proves to have the fleet's client key.
* On one machine: Unix sockets with PLAIN (RFC 24). The directory that a socket lies in has a file, readable by its
  owner only, with a secret that is made for each run; whoever connects shows it.

Servers use `bind_local` and `bind_tcp`, clients `connect`. One socket may be bound to both kinds of address, since
ZeroMQ takes its options for each when that is bound. Who is let in is decided by an `Authenticator` (ZAP, RFC 27) at
the handshake, before the peer has an identity and a message of it is read; it costs nothing per message. It fails
closed: without one nobody is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import os
import secrets
import socket as sockets
import stat
import threading
import time
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from muxserve.spec.network import Keys

AnySocket = zmq.Socket[Any]

# A machine that loses its power says no goodbye; after this long without a sign its connections are closed, and what
# watches them is told as of a process that died.
HEARTBEAT_MS = 1_000
SILENCE_MS = 3_000
# Who connects and does not prove itself is cut off.
HANDSHAKE_MS = 5_000
RECONNECT_MS = 20
PAUSE_SECONDS = 0.02
RECONNECT_MAX_MS = 1_000
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_LOCAL = "ipc://"
# In the directory of the sockets that it opens.
SECRET_FILE = "secret"
_USERNAME = b"muxserve"


class NetworkError(Exception):
    """An address that cannot be bound or reached; the message says which, and what to do."""


def new_keys() -> Keys:
    """Keys for a fleet that is being started."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return Keys(server_public.decode(), server_secret.decode(), client_public.decode(), client_secret.decode())


def tcp_address(host: str, port: int) -> str:
    """The ZeroMQ address of a port; IPv6 addresses are put in brackets."""
    return f"tcp://[{host}]:{port}" if _is_ipv6(host) else f"tcp://{host}:{port}"


def bind_tcp(socket: AnySocket, host: str, port: int, keys: Keys) -> int:
    """Let other machines reach `socket` at that port of `host`, an address or a name of this machine.

    Addresses that the socket is bound to before or after are not concerned. Starts the `Authenticator` of the socket's
    context if there is none yet.

    Args:
        port: 0 for any that is free.

    Returns:
        The port.

    Raises:
        NetworkError: there is no such address here, or the port is taken.
    """
    try:
        found = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM, flags=sockets.AI_PASSIVE)
    except OSError as error:
        raise NetworkError(f"{host!r} cannot be listened on: {error.strerror or error}; give its address") from error
    family, address = found[0][0], str(found[0][4][0])
    serve_curve(socket, keys)
    try:
        if family == sockets.AF_INET6:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(tcp_address(address, port))
        return int(socket.get_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
    except zmq.ZMQError as error:
        shown = host if host == address else f"{host} ({address})"
        if error.errno == zmq.EADDRINUSE:
            why = f"port {port} of {shown} is taken; stop what listens there, or choose another"
        elif error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            why = f"{shown} is no address of this machine ({sockets.gethostname()}); name one by which others reach it"
        else:
            why = f"{shown}, port {port}, cannot be listened on: {error.strerror}"
        raise NetworkError(why) from error
    finally:
        socket.setsockopt(zmq.CURVE_SERVER, 0)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)


def bind_local(socket: AnySocket, address: str) -> None:
    """Let processes of this machine reach `socket` at an `ipc://` address that show the secret of its directory.

    Addresses that the socket is bound to before or after are not concerned. Makes the secret if there is none yet, and
    starts the `Authenticator` of the socket's context.

    Raises:
        NetworkError: the secret cannot be read.
        zmq.ZMQError: the address cannot be bound.
    """
    directory = _directory_of(address)
    secret = local_secret(directory, binding=True)
    if secret is not None:  # else the directory is not there, as binding is about to say
        Authenticator.of(socket.context).allow_local(directory, secret)
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, os.fsencode(directory))
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        socket.bind(address)
    finally:
        socket.setsockopt(zmq.PLAIN_SERVER, 0)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)


def local_secret(directory: Path, binding: bool = False) -> bytes | None:
    """The secret that whoever connects to a socket in `directory` has to show; None if there is no such directory.

    Whoever needs it first makes it. Who is not `binding` a socket there makes none in a directory that is not its
    owner's alone, since that is no run's.

    Raises:
        NetworkError: the file cannot be read or written, or others than its owner may read it.
    """
    path = directory / SECRET_FILE
    # Once more if another process has made it meanwhile.
    for _ in range(2):
        try:
            with open(path, "rb") as file:
                info = os.fstat(file.fileno())
                if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
                    raise NetworkError(f"{path} is to be read by its owner only, by nobody else; remove it")
                return file.read()
        except FileNotFoundError:
            if not directory.is_dir() or not (binding or _is_private(directory)):
                return None
        except OSError as error:
            raise NetworkError(f"{path} cannot be read: {error.strerror}") from error
        # Complete under its name from the first moment on, for whoever reads it just then.
        temporary = directory / f"{SECRET_FILE}.{secrets.token_hex(8)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(secrets.token_hex(32).encode())
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        except OSError as error:
            raise NetworkError(f"{path} cannot be written: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
    raise NetworkError(f"{path} comes and goes; is the directory of a run being removed?")


def connect(socket: AnySocket, address: str, keys: Keys | None = None) -> None:
    """Connect to a `tcp://` address with the fleet's keys, or to an `ipc://` one with the secret of its directory.

    Raises:
        NetworkError: the address is TCP, and there are no keys; or the secret cannot be read.
        zmq.ZMQError: it is no address at all.
    """
    if address.startswith("tcp://"):
        if keys is None:
            raise NetworkError(f"{address} is reached over the network, and this fleet has no keys: deploy it anew")
        client_curve(socket, keys)
        if address.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
    elif address.startswith(_LOCAL) and (secret := local_secret(_directory_of(address))) is not None:
        socket.setsockopt(zmq.PLAIN_USERNAME, _USERNAME)
        socket.setsockopt(zmq.PLAIN_PASSWORD, secret)
    socket.connect(address)


def serve_curve(socket: AnySocket, keys: Keys) -> None:
    """Demand CURVE on every address that `socket` is bound to from now on; `bind_tcp` does this and undoes it."""
    Authenticator.of(socket.context).allow(keys)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
    # The domain tells the authenticator whose keys count, and without an authenticator nobody is let in.
    socket.setsockopt(zmq.ZAP_DOMAIN, keys.server_public.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    _watch(socket)


def client_curve(socket: AnySocket, keys: Keys) -> None:
    """Prove to have the client key, and demand proof of the server key, wherever `socket` connects to from now on."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
    _watch(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    # Doubled up to this while nobody is there: a machine that is gone is not asked fifty times a second.
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)


def probe(address: str, keys: Keys, seconds: float) -> None:
    """Make sure that a server of this fleet answers at a `tcp://` address.

    Raises:
        NetworkError: nobody answers in time, it does not let us in, or it is not of this fleet.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        connect(socket, address, keys)
        failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        failed |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED | failed)
        # The socket was connected before it was watched, so that what has failed by now is seen at the next attempt.
        end, connected = time.monotonic() + seconds, False
        try:
            while (left := end - time.monotonic()) > 0 and monitor.poll(max(1, int(left * 1000))):
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return
                connected = True
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise NetworkError(
                        f"{address} does not let us in: it belongs to another fleet, or an older life of it"
                    )
                if event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                    raise NetworkError(
                        f"what listens at {address} is not of this fleet (its keys are others, or it is no MuxServe)"
                    )
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
    if connected:
        raise NetworkError(f"what listens at {address} did not answer within {seconds:g} s")
    raise NetworkError(f"nobody listens at {address}, or a firewall is between (waited {seconds:g} s)")


async def until_reachable(address: str) -> None:
    """Until a process listens at `address`, which is ZeroMQ's `ipc://PATH`."""
    while not reachable(address):
        await asyncio.sleep(PAUSE_SECONDS)


def reachable(address: str) -> bool:
    """Whether a process listens at `address` now. A file that a dead one has left is not enough."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(address.removeprefix("ipc://"))
        except OSError:
            return False
    return True


class Authenticator:
    """Lets in who proves to have the client key of the fleet whose server key it asked for, or shows the secret of the
    directory whose socket it came to.

    A thread with ZeroMQ's ZAP socket; it ends with its context, which it does not keep from ending.
    """

    _lock = threading.Lock()
    _running: dict[int, Authenticator] = {}  # noqa: RUF012 (one for all, on purpose)

    def __init__(self, context: zmq.Context[Any]) -> None:
        """Start it; use `of`.

        Raises:
            NetworkError: another ZAP handler has this context.
        """
        # A context for asyncio makes sockets that only a loop can read.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._clients: dict[bytes, bytes] = {}
        self._secrets: dict[bytes, bytes] = {}
        self._closed = False
        socket = self._context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(_ZAP_ADDRESS)
        except zmq.ZMQError as error:
            socket.close()
            raise NetworkError("this ZeroMQ context has another authenticator already") from error
        self._thread = threading.Thread(target=self._serve, args=(socket,), name="zap", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, context: zmq.Context[Any]) -> Authenticator:
        """The one of this context, started if there is none."""
        with cls._lock:
            found = cls._running.get(context.underlying)
            # The address of a context may be that of an earlier one; after a fork the thread is in the other process.
            if found is None or found._closed or not found._thread.is_alive():
                found = cls._running[context.underlying] = cls(context)
            return found

    def allow(self, keys: Keys) -> None:
        """From now on let in this fleet's clients, to its own sockets."""
        self._clients[keys.server_public.encode()] = z85.decode(keys.client_public)

    def allow_local(self, directory: Path, secret: bytes) -> None:
        """From now on let in who shows `secret`, to the Unix sockets of `directory`."""
        self._secrets[os.fsencode(directory)] = secret

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        try:
            while True:
                frames = socket.recv_multipart()
                if len(frames) < 2:
                    socket.send_multipart([b"1.0", b"", b"500", b"not ZAP", b"", b""])
                    continue
                good = self._good(frames)
                status = [b"200", b"OK", b"fleet"] if good else [b"400", b"not of this fleet", b""]
                socket.send_multipart([b"1.0", frames[1], *status, b""])
        except zmq.ContextTerminated:
            pass
        finally:
            self._closed = True
            socket.close()

    def _good(self, frames: list[bytes]) -> bool:
        # version, request id, domain, address, identity, mechanism, credentials
        match frames:
            case [b"1.0", _, domain, _, _, b"CURVE", shown]:
                wanted = self._clients.get(domain)
            case [b"1.0", _, domain, _, _, b"PLAIN", _, shown]:
                wanted = self._secrets.get(domain)
            case _:
                return False
        return wanted is not None and hmac.compare_digest(wanted, shown)


def free_port(host: str) -> int:
    """A port of `host` that nobody listens on at this moment.

    Raises:
        NetworkError: it is no address of this machine.
    """
    try:
        family = sockets.getaddrinfo(host, 0, type=sockets.SOCK_STREAM)[0][0]
        with sockets.socket(family, sockets.SOCK_STREAM) as one:
            one.bind((host, 0))
            return int(one.getsockname()[1])
    except OSError as error:
        why = error.strerror or str(error)
        raise NetworkError(
            f"{host!r} cannot be listened on: {why}; name this machine by one of its addresses"
        ) from error


def machine_id() -> str:
    """Equal for two processes that can use each other's shared memory: same boot of the same kernel, same user."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot or sockets.gethostname()}/{os.getuid()}"


def _is_private(path: Path) -> bool:
    info = path.stat()
    return info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077


def _directory_of(address: str) -> Path:
    return Path(address.removeprefix(_LOCAL)).parent


def _watch(socket: AnySocket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_ipv6(host: str) -> bool:
    return _is_ip(host) and ipaddress.ip_address(host).version == 6
