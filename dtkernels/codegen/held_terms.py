"""Say how many terms of a sum are added up before they leave where they are: a warp's registers, or the matrix units."""

HELD_BY_WARP = 64 * 32  #: terms of a product without matrix units, in registers over all steps; of more, each step makes one number
FLOAT8_DEPTH = 32  #: terms that a matrix instruction adds up in float8; shallower tiles are multiplied in fp16
#: terms that Hopper's matrix units add up in their own accumulators, which keep about 14 bits, before the sum is added in float32
MOST_IMPRECISE = 128
