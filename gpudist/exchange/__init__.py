"""Execute plans: pack, post, unpack. Only this package moves the bytes of tensors."""

from gpudist.exchange.carry import InFlight, add_into, all_reduce, carry_out, start
from gpudist.exchange.movement import Movement, MovementStep, bind
from gpudist.exchange.rounds import output_form

__all__ = [
    "InFlight",
    "Movement",
    "MovementStep",
    "add_into",
    "all_reduce",
    "bind",
    "carry_out",
    "output_form",
    "start",
]
