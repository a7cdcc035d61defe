"""PyTorch's own samples of every operator, and the table of what is right, refused or wrong."""
