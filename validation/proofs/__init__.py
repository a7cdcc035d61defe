"""Models of the hub, proved under every usual plan: the rows of docs/proof.md."""
