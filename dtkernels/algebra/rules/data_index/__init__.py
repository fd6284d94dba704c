"""Rules for products and sums whose terms data picks: slices by an index, rows by a label that equals an element."""
