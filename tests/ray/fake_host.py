"""Speaks as a unit's host does, and has no processes: python -m tests.ray.fake_host --unit-spec FILE ..."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from muxserve.cluster.events import Failed, PartId, Ready, Stopping, Up, to_line
from muxserve.spec import load

UNIT = PartId("unit")


def main() -> int:
    path = Path(sys.argv[sys.argv.index("--unit-spec") + 1])
    unit_spec = load(path)
    lock = threading.Lock()

    def write(line: str) -> None:
        with lock:
            print(line, flush=True)

    def end(*_: object) -> None:
        write(to_line(Stopping()))
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    write(json.dumps({"event": "Sized", "unit_spec": json.loads(path.read_text())}))
    write(to_line(Up(UNIT, 1, 0.1)))
    write(to_line(Ready(0.1)))
    print("started", sys.argv[1:], file=sys.stderr, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply: dict[str, object] = {"reply": command["id"]}
        match command["do"]:
            case "state":
                nice = os.getpriority(os.PRIO_PROCESS, 0)
                reply["state"] = {"unit": unit_spec.unit, "arguments": sys.argv[1:], "nice": nice, "pid": os.getpid()}
            case "start_model" if command["model"] == "broken":
                reply |= {"error": "no room", "part": {"kind": "engine", "model": "broken", "phase": "decode"}}
            case "tell":
                reply["state"] = command["message"]
            case "start_model" if command["model"] == "fatal":
                part = PartId("engine", "fatal", "decode")
                write(to_line(Failed(part, f"{part} keeps dying: killed", Path("/x/engine.log"), ("a", "b"))))
                return 4
        write(json.dumps(reply))
    end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
