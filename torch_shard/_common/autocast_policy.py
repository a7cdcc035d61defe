"""Which functions of torch autocast runs in which precision: PyTorch's own lists."""

import torch

PRODUCTS = """
    addbmm addmm addmv baddbmm bmm chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    convolution linalg_multi_dot linear matmul mm mv prelu scaled_dot_product_attention
""".split()  # noqa: SIM905  (a table)

FLOAT32 = """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist
    cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss
    layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss
    nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss
    softmax softmin softplus sum renorm tan triplet_margin_loss rms_norm huber_loss
    gaussian_nll_loss
""".split()  # noqa: SIM905

LOWER = (torch.bfloat16, torch.float16)
