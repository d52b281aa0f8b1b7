"""Calls of the CUDA driver through NVIDIA's own bindings, `cuda.bindings`, which torch's builds for CUDA bring.

They are imported when the driver is loaded: nothing of CUDA is touched before.
"""

from __future__ import annotations

from typing import Any


class DriverError(RuntimeError):
    """A call of the driver failed; the message names it and says why."""


class Driver:
    """The driver by its bindings: `api` has the functions, and the names of their constants."""

    def __init__(self, api: Any) -> None:
        self.api = api

    @classmethod
    def load(cls) -> Driver:
        """The driver of this machine, initialised.

        Raises:
            DriverError: there is none, or nothing to call it with.
        """
        try:
            from cuda.bindings import driver as api
        except ImportError as error:
            raise DriverError(f"cuda.bindings cannot be imported: {error}; torch's builds for CUDA bring it") from None
        driver = cls(api)
        driver.call("cuInit", 0)
        return driver

    def call(self, name: str, *arguments: Any) -> Any:
        """What a function answers besides its status: nothing, a value, or several.

        Raises:
            DriverError: there is no driver, it does not have the function, or that failed.
        """
        try:
            status, *values = getattr(self.api, name)(*arguments)
        except AttributeError:
            raise DriverError(f"cuda.bindings has no {name}") from None
        except RuntimeError as error:  # of the bindings: no driver, or one without this function
            raise DriverError(f"{name} cannot be called: {error}") from None
        if int(status):
            raise DriverError(f"{name} failed with {self._words(status)}")
        return values[0] if len(values) == 1 else tuple(values) or None

    def _words(self, status: Any) -> str:
        parts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            code, text = getattr(self.api, name)(status)
            parts.append(text.decode() if not int(code) and text else "unknown error")
        return f"{parts[0]} ({int(status)}): {parts[1]}"
