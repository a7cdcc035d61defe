"""Lives of training runs, drawn at random: each beside the same life in eager torch, in float64."""
