"""What holds for all tests."""

import os

# torch in the tests' own processes computes with one thread, as MuxServe's processes do. Threads that spin at the
# barriers of small operations take the cores of what runs beside, and take ten times as long where those are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
