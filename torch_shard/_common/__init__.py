"""Parts that every room may use, each file by itself; this face is empty, so that torch-only rooms stay so."""
