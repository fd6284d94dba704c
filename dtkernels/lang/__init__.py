"""DT text <-> Algorithm, Schedule, Program. Frozen values; ``parse(str(program)) == program``."""

from .algorithm import Algorithm, Definition
from .errors import DTError, Position
from .parser import parse, parse_schedule
from .schedule import Primitive, Program, Schedule

__all__ = ["Algorithm", "DTError", "Definition", "Position", "Primitive", "Program", "Schedule", "parse", "parse_schedule"]
