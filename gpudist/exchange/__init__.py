"""Carry out plans: pack, post, unpack. The only place that moves the bytes of tensors."""

from gpudist.exchange.carry import InFlight, add_into, all_reduce, carry_out, start
from gpudist.exchange.movement import Movement, Step, bind
from gpudist.exchange.rounds import output_form

__all__ = [
    "InFlight",
    "Movement",
    "Step",
    "add_into",
    "all_reduce",
    "bind",
    "carry_out",
    "output_form",
    "start",
]
