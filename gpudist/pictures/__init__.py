"""Draw partitions and the movements between them."""

from gpudist.pictures.draw import draw
from gpudist.pictures.page import save

__all__ = ["draw", "save"]
