"""Stands in for `muxserve.probes.child`: says of each role what `$ROLES/<role>` holds, and notes its environment.

A file may hold several lines, one for each time that the role runs, the last for all further times: JSON to be said, or
`hang`, `die`, `stay` (JSON follows, then it stays), `unless NAME` (dies unless its environment has that). `spin` is a
client of the MPS server; `beside` says that it is ready for each of two lines of input.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path

place = Path(os.environ["ROLES"])
role = sys.argv[1]
with (place / "journal").open("a") as journal:
    seen = {name: value for name, value in os.environ.items() if name.startswith(("CUDA", "NCCL"))}
    journal.write(json.dumps({"role": role, "arguments": sys.argv[2:], "pid": os.getpid(), **seen}) + "\n")
with (place / "lock").open("w") as lock:  # several run beside each other
    fcntl.flock(lock, fcntl.LOCK_EX)
    mine, *later = (place / role).read_text().splitlines()
    if later:
        (place / role).write_text("\n".join(later))
word, _, rest = mine.partition(" ")
if role == "spin":
    (place / "clients").write_text(f"{os.getpid()}\n")
if word == "unless":
    word, mine = ("", '{"same": true}') if rest in os.environ else ("die", "")
if word == "hang":
    time.sleep(600)
if word == "die":
    print("Segmentation fault: as the test says", file=sys.stderr)
    sys.exit(139)
print("a library says hello", flush=True)
if role == "beside" and "error" not in mine:
    for _ in ("alone", "beside others"):
        print('{"ready": true}', flush=True)
        sys.stdin.readline()
print(rest if word == "stay" else mine, flush=True)
if word == "stay":
    sys.stdin.read()
