"""What a service manager is told (systemd's `sd_notify`)."""

from __future__ import annotations

import contextlib
import os
import socket


def notify_service(*news: str) -> None:
    """Tell whoever started this process as a service, such as `READY=1`; nothing where nobody wants to hear."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # A name that begins with @ is none of the file system.
    address = f"\0{address[1:]}" if address.startswith("@") else address
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sending,
        contextlib.suppress(OSError),
    ):
        sending.sendto("\n".join(news).encode(), address)
