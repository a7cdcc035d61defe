"""The compiled step: loss program, state, optimiser update, microbatches."""
