"""Rules for products: sums that become them, operands that are shared, sums and elements of them."""
