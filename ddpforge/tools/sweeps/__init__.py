"""Many runs of one recipe with different values: which there are, how they are trained, and what came of them."""
