"""Sources of the documentation, and what makes its pages."""
