"""An ATen graph as a function of JAX arrays: a table of operators, an interpreter, and captures with their lowering."""
