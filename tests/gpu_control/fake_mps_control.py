"""Stands in for nvidia-cuda-mps-control. As the daemon (-f) it listens in its pipe directory and starts a server,
another process; without arguments it passes the commands of its standard input on.

Everything that it is told goes to `$FAKE_MPS/journal`; `$FAKE_MPS/refuse-start` lets no server start, `broken` ends the
daemon at once, `deaf` makes it ignore `quit`, with `fault` the server is in FAULT, `clients` has the pids of its
clients.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_MPS"])
PIPE = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "control"
LOGS = Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])


def note(line: str) -> None:
    with (STATE / "journal").open("a") as journal:
        journal.write(f"{line}\n")


def daemon() -> int:
    if (STATE / "broken").exists():
        (LOGS / "control.log").write_text("Failed to start: no GPU is fit for MPS\n")
        return 3
    note(f"daemon {os.environ['CUDA_VISIBLE_DEVICES']} {os.environ.get('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE')}")
    note(f"pid {os.getpid()}")
    server = None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(PIPE))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                command = connection.recv(1000).decode().strip()
                if not command.startswith("get_"):
                    note(command)
                if command.startswith("get_server_status"):
                    connection.sendall(b"FAULT\n" if (STATE / "fault").exists() else b"ACTIVE\n")
                    continue
                if command.startswith("get_client_list"):
                    connection.sendall((STATE / "clients").read_bytes() if (STATE / "clients").exists() else b"\n")
                    continue
                if command.startswith("start_server") and not (STATE / "refuse-start").exists():
                    program = STATE / "nvidia-cuda-mps-server"
                    program.unlink(missing_ok=True)
                    program.symlink_to(shutil.which("sleep") or "/bin/sleep")
                    server = subprocess.Popen([program, "600"])
                    note(f"server {server.pid}")
                if command.startswith("quit") and not (STATE / "deaf").exists():
                    if server is not None:
                        server.kill()
                        server.wait()
                    connection.sendall(b"")
                    return 0
                alive = server is not None and server.poll() is None
                connection.sendall(f"{server.pid}\n".encode() if alive and command == "get_server_list" else b"\n")


def client() -> int:
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(PIPE))
            sock.sendall(sys.stdin.read().encode())
            sys.stdout.write(sock.recv(1000).decode())
    except OSError:
        print("Cannot find MPS control daemon process")
        return 1
    return 0


sys.exit(daemon() if sys.argv[1:] == ["-f"] else client())
