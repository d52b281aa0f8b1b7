"""NVIDIA's own bindings over a driver without a GPU: `python -m tests.gpu_control.real_bindings`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from muxserve.engine.cuda import cuda_ipc
from muxserve.gpu import green
from muxserve.gpu.driver import Driver, DriverError
from muxserve.gpu.sm import SmRange


def contexts() -> None:
    """Two green contexts and the whole GPU's, as an engine whose share changes has them."""
    driver = green.load()
    device = green.device_of(driver, 0)
    division = green.divide(driver, device)
    assert (division.total, division.size, len(division.parts)) == (132, 8, 16)
    ranges = (SmRange(12, 4), SmRange(8, 8))
    made = [green.make_context(driver, device, division, where) for where in ranges]
    made.append(green.primary(driver, device, division))
    assert [context.sms for context in made] == [32, 64, 132]
    assert len({context.handle for context in made}) == 3
    chosen = green.ContextSet(driver, made)
    streams = []
    for index in (0, 1, 0):
        chosen.use(index)
        assert int(driver.call("cuCtxGetCurrent")) == made[index].handle
        streams.append(chosen.stream())
    assert streams[0] == streams[2] != streams[1]
    driver.call("cuCtxSetCurrent", made[2].handle)
    with pytest.raises(green.GreenContextError, match="is not current any more"):
        chosen.use(1)
    chosen.enter_again()
    chosen.check()


def shared() -> None:
    """Memory of this process, mapped by another one."""
    driver = Driver.load()
    device = driver.call("cuDeviceGet", 0)
    driver.call("cuCtxSetCurrent", driver.call("cuDevicePrimaryCtxRetain", device))
    address = int(driver.call("cuMemAlloc", 4096))
    base, size, handle = cuda_ipc.export(address + 512)
    assert (base, size, len(handle)) == (address, 4096, 64)
    subprocess.run([sys.executable, "-m", "tests.gpu_control.real_bindings", handle.hex()], check=True)


def mapped(handle: bytes) -> None:
    driver = Driver.load()
    driver.call("cuCtxSetCurrent", driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0)))
    assert cuda_ipc.open_handle(handle)
    with pytest.raises(cuda_ipc.CudaIpcError, match="cuIpcOpenMemHandle failed with CUDA_ERROR_"):
        cuda_ipc.open_handle(bytes(64))


def missing() -> None:
    """A function that the bindings do not know."""
    with pytest.raises(DriverError, match=r"cuda\.bindings has no cuNoSuchFunction"):
        Driver.load().call("cuNoSuchFunction")


if __name__ == "__main__":
    if sys.argv[1:]:
        mapped(bytes.fromhex(sys.argv[1]))
    else:
        contexts()
        shared()
        missing()
