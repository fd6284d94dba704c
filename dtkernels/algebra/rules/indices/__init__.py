"""Rules for index arithmetic: phases of strided windows, remainders and quotients."""
