"""Rules for exponentials and sums of them: maxima that are subtracted, and what a shift does to an expression."""
