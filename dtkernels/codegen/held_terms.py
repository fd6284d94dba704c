"""Say how many terms of a sum the threads of a warp add up by themselves."""

HELD_BY_WARP = 64 * 32  #: terms of a product without matrix units, in registers over all steps; of more, each step makes one number
