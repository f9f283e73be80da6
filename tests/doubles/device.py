"""Python access to the call table of the double of CUDA's runtime."""

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
        ("runtime_version", call(INT)),
        ("driver_version", call(INT)),
        ("device_count", call(INT)),
        ("get_device", call(INT)),
        ("set_device", call(c_int)),
        ("has_context", call(c_int, POINTER(c_bool))),
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
def device() -> DeviceTable:
    library = nccl()
    library.gpudist_device_api.restype = POINTER(DeviceTable)
    return library.gpudist_device_api().contents


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
