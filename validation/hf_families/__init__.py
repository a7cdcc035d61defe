"""The plans of the families of transformers, and their page."""
