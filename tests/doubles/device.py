"""Python access to the call table of the double of CUDA's driver."""

from __future__ import annotations

import ctypes
import time
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

from tests.doubles.nccl import nccl

INT, BYTES, OUT = POINTER(c_int), c_size_t, POINTER(c_void_p)


def call(*arguments: Any) -> type:
    return CFUNCTYPE(c_int, *arguments)


class DeviceTable(ctypes.Structure):
    """DeviceApi of csrc/device/device_api.h, but for the launches."""

    _fields_ = [
        ("abi", c_int),
        ("name", c_char_p),
        ("error_string", CFUNCTYPE(c_char_p, c_int)),
        ("compiler_version", call(INT)),
        ("driver_version", call(INT)),
        ("device_count", call(INT)),
        ("context_of", call(c_int, OUT)),
        ("get_context", call(OUT)),
        ("set_context", call(c_void_p)),
        ("capability", call(c_int, INT)),
        ("multiprocessors", call(c_int, INT)),
        ("check_kernels", call()),
        ("allocate", call(OUT, BYTES)),
        ("release", call(c_void_p)),
        ("allocate_pinned", call(OUT, BYTES)),
        ("release_pinned", call(c_void_p)),
        ("copy", call(c_void_p, c_void_p, BYTES, c_void_p)),
        ("create_stream", call(OUT)),
        ("destroy_stream", call(c_void_p)),
        ("create_event", call(OUT)),
        ("destroy_event", call(c_void_p)),
        ("record_event", call(c_void_p, c_void_p)),
        ("query_event", call(c_void_p, POINTER(c_bool))),
        ("wait_event", call(c_void_p, c_void_p)),
        ("capture_id", call(c_void_p, POINTER(c_uint64))),
        ("exchange_capture_mode", call(POINTER(c_int))),
    ]


@lru_cache(maxsize=1)
def table() -> DeviceTable:
    library = nccl()
    library.gpudist_device_api.restype = POINTER(DeviceTable)
    return library.gpudist_device_api().contents


def device() -> DeviceTable:
    """Return the table, for a thread that has a context: the first device's, unless it chose."""
    if current_context() is None:
        assert set_device(0) == 0
    return table()


def current_context() -> int | None:
    context = c_void_p()
    assert table().get_context(ctypes.byref(context)) == 0
    return context.value


def set_device(number: int) -> int:
    context = c_void_p()
    error = table().context_of(number, ctypes.byref(context))
    return error or table().set_context(context)


def make(kind: str, *arguments: object) -> int:
    """Return a new ``stream`` or ``event``, or memory by ``allocate`` or ``allocate_pinned``."""
    made = c_void_p()
    name = kind if kind.startswith("allocate") else f"create_{kind}"
    result = getattr(device(), name)(ctypes.byref(made), *arguments)
    assert result == 0, result
    assert made.value is not None
    return made.value


def finish(stream: int | None) -> None:
    """Return when everything on a stream has been done."""
    event = make("event")
    assert device().record_event(event, stream) == 0
    while not is_complete(event):
        time.sleep(1e-4)
    assert device().destroy_event(event) == 0


def is_complete(event: int) -> bool:
    answer = c_bool()
    assert device().query_event(event, ctypes.byref(answer)) == 0
    return answer.value
