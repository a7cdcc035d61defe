"""A torch callable and shapes become one functional ATen graph, by PyTorch alone. No JAX in here."""
