"""The model that the demo trains: a small GPT in plain torch, which knows nothing of torch_shard.

Letters: B batch, T position, D width, H head, K width of a head, V vocabulary.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the stream and added to it.

    The key projection has no bias: it would add the same number to all scores of a query, which softmax
    ignores. Its gradient is zero, and what rounding leaves of it Adam would blow up to full-sized steps.

    Args:
        width: Of the stream, D.
        num_heads: Must divide the width.
        dropout: Probability, of attention weights and of what is added to the stream.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the stream, (B, T, D), after this block."""
        x_BTD = x_BTD + self.drop(self.attend(self.ln_1(x_BTD)))
        return x_BTD + self.drop(self.down(F.gelu(self.up(self.ln_2(x_BTD)))))

    def attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Causal attention of (B, T, D) over itself."""
        q_BHTK, k_BHTK, v_BHTK = (
            project(x_BTD).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        dropout = self.dropout if self.training else 0.0
        out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.o(out_BHTK.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Predict the next token from those before it.

    Args:
        vocab_size: Number of tokens, V.
        context: Largest number of positions, T.
        width: Of the stream, D.
        num_layers: Number of blocks.
        num_heads: Attention heads per block.
        dropout: Probability.
    """

    def __init__(
        self, vocab_size: int, context: int, width: int, *, num_layers: int, num_heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self._init(width, num_layers)

    def _init(self, width: int, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith("blocks") and parameter.ndim == 2:
                # Each block adds to the stream twice; so scaled, the stream's variance does not grow with depth.
                adds = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, std=width**-0.5 / (math.sqrt(2 * num_layers) if adds else 1))
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.15)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits of the next token at every position, (B, T, V)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.drop(self.tokens(tokens_BT) + self.positions(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.ln(x_BTD))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy, in nats per token, of a batch of windows.

    Args:
        model: A `GPT`.
        batch: Inputs and targets, both int64 (B, T).
    """
    inputs_BT, targets_BT = batch
    return F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())


@torch.no_grad()
def generate(model: GPT, prompt_T: torch.Tensor, num_tokens: int, *, temperature: float, seed: int) -> torch.Tensor:
    """Continue a prompt, token by token.

    Args:
        model: On the CPU. It is left in eval mode.
        prompt_T: int64 (T,), at least one token.
        num_tokens: How many to add.
        temperature: Below 1 prefers likely tokens.
        seed: Of the samples.

    Returns:
        Prompt and continuation, int64 (T + num_tokens,).
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens_T = prompt_T
    for _ in range(num_tokens):
        logits_V = model(tokens_T[None, -model.context :])[0, -1] / temperature
        drawn = torch.multinomial(logits_V.softmax(dim=0), 1, generator=generator)
        tokens_T = torch.cat([tokens_T, drawn])
    return tokens_T
