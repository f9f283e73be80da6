"""Encode numbers and texts as bytes, and read them back with bounds checks."""

from __future__ import annotations

from gpudist.errors import TransportError

_VARINT_BYTES = 10
_VARINT_LIMIT = 1 << 63


def malformed(what: str) -> TransportError:
    """Return the error for bytes that are not a batch, with the reason ``what``."""
    return TransportError(
        f"received bytes that are not a valid batch: {what}; run the same gpudist on every rank, "
        f"and call the same operations in the same order"
    )


class Reader:
    """Reader of ``data``; every method raises ``TransportError`` when it reaches beyond the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not yet read."""
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise malformed(f"it is {count - self.left} bytes too short")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        """Read an unsigned integer of 7 bits per byte, lowest bits first."""
        value = 0
        for shift in range(0, 7 * _VARINT_BYTES, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                if value >= _VARINT_LIMIT:
                    break
                return value
        raise malformed("a number has too many bits")

    def counted(self) -> bytes:
        """Read bytes that follow their count."""
        return self.take(self.varint())

    def text(self) -> str:
        try:
            return self.counted().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise malformed(f"a text is not UTF-8 ({error})") from None

    def finish(self) -> None:
        if self.left:
            raise malformed(f"it is {self.left} bytes too long")


def write_varint(out: bytearray, value: int) -> None:
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def write_counted(out: bytearray, data: bytes) -> None:
    write_varint(out, len(data))
    out += data


def write_text(out: bytearray, text: str) -> None:
    write_counted(out, text.encode("utf-8", "surrogatepass"))
