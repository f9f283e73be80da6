"""Execute plans: pack, post, unpack. Only this package moves the bytes of tensors."""

from gpudist.exchange.carry import add_into, all_reduce, carry_out, carry_out_one, start
from gpudist.exchange.in_flight import InFlight
from gpudist.exchange.movement import Movement, bind, output_form
from gpudist.exchange.step import MovementStep

__all__ = [
    "InFlight",
    "Movement",
    "MovementStep",
    "add_into",
    "all_reduce",
    "bind",
    "carry_out",
    "carry_out_one",
    "output_form",
    "start",
]
