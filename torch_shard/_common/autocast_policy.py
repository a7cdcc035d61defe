"""Which functions of torch autocast runs in which precision: PyTorch's own lists."""

from typing import Literal

import torch

MixedPrecision = Literal["autocast", "params"]
"""What is cast to a lower precision: the factors of products, or parameters and with them whole activations."""

PRODUCTS = """
    addbmm addmm addmv baddbmm bmm chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    convolution linalg_multi_dot linear matmul mm mv prelu scaled_dot_product_attention
""".split()  # noqa: SIM905  (a table)

RECURRENT = "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()  # noqa: SIM905

LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy gaussian_nll_loss hinge_embedding_loss
    huber_loss
    kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss
""".split()  # noqa: SIM905

NORMS = "group_norm layer_norm rms_norm".split()  # noqa: SIM905

FLOAT32 = [
    *LOSSES,
    *NORMS,
    *"""
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin cosh cdist cosine_similarity cumprod cumsum dist erfinv exp expm1
    log log10 log_softmax log1p log2 norm normalize pdist pow prod reciprocal rsqrt sinh softmax softmin softplus sum
    renorm tan
    """.split(),  # noqa: SIM905
]

LOWER = (torch.bfloat16, torch.float16)
