"""Models for images: timm, torchvision, vit-pytorch, segmentation-models-pytorch, monai, kornia, and others."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from validation.zoo.rows import BATCH, Row, With, images, masks, pairs, rows, small_conv, squared_error, through


def _timm(name: str, size: int = 32, *, wide: bool = False, **options: Any) -> Row:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=4, **options)

    return Row(name, build, images(size), wide=wide)


TIMM = rows(
    "timm",
    _timm("resnet10t", channels=(8, 16, 16, 32), stem_width=8),
    _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2),
    _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    _timm(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        drop_path_rate=0.0,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    _timm("mobilenetv3_small_050", 64, drop_rate=0.0, wide=True),
    _timm("xcit_nano_12_p8_224", img_size=32, embed_dim=32, depth=2, num_heads=2),
    _timm("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2),
    _timm("eva02_tiny_patch14_224", 28, img_size=28, patch_size=7, embed_dim=48, depth=2, num_heads=2),
    _timm("beit_base_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2),
    _timm("davit_tiny", 64, depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 2), window_size=4),
    _timm(
        "maxvit_rmlp_pico_rw_256",
        64,
        img_size=64,
        depths=(1, 1),
        embed_dim=(32, 64),
        stem_width=8,
        wide=True,
        drop_path_rate=0.0,
    ),
)


def _torchvision(name: str, size: int = 32, *, wide: bool = False, **options: Any) -> Row:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=4, **options)

    return Row(name, build, images(size), wide=wide)


def _segments(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    return F.cross_entropy(out["out"] if isinstance(out, dict) else out, batch[1])


def _narrow_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4)


def _tiny_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=4)


def _tiny_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=4)


def _lraspp() -> nn.Module:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    return lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)


TORCHVISION = rows(
    "torchvision",
    Row("ResNet", _narrow_resnet, images(32), wide=True),
    Row("VisionTransformer", _tiny_vit, images(32)),
    Row("SwinTransformer", _tiny_swin, images(32)),
    _torchvision("shufflenet_v2_x0_5", wide=True),
    _torchvision("mobilenet_v2", width_mult=0.25, dropout=0.0, wide=True),
    _torchvision("squeezenet1_1", 64, dropout=0.0),
    Row("lraspp", _lraspp, masks(32), loss_fn=_segments, train=False),
)


def _vit_pytorch(name: str, size: int = 32, **options: Any) -> Row:
    def build() -> nn.Module:
        import importlib

        module, _, kind = name.rpartition(".")
        return getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(**options)

    return Row(name, build, images(size))


def _autoencoder(name: str, **options: Any) -> Row:
    """A ViT that learns to fill in what is hidden: which patches are, PyTorch draws at random, so here by a seed."""

    def build() -> nn.Module:
        import importlib

        from vit_pytorch import ViT

        module, _, kind = name.rpartition(".")
        vit = ViT(image_size=32, patch_size=8, num_classes=4, dim=32, depth=2, heads=2, mlp_dim=32)
        return getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(encoder=vit, **options)

    return Row(name, build, lambda: torch.randn(BATCH, 3, 32, 32), loss_fn=_own_loss)


def _own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch)


_PATCHES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 4}
_WIDTHS: dict[str, Any] = {**_PATCHES, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 32}

VIT_PYTORCH = rows(
    "vit_pytorch",
    _vit_pytorch("vit.ViT", **_WIDTHS),
    _vit_pytorch("simple_vit.SimpleViT", **_WIDTHS),
    _vit_pytorch("deepvit.DeepViT", **_WIDTHS),
    _vit_pytorch("cait.CaiT", **{**_WIDTHS, "cls_depth": 1}),
    _vit_pytorch(
        "cct.CCT",
        img_size=32,
        embedding_dim=32,
        n_conv_layers=1,
        kernel_size=7,
        stride=2,
        padding=3,
        pooling_kernel_size=3,
        pooling_stride=2,
        pooling_padding=1,
        num_layers=2,
        num_heads=2,
        mlp_ratio=2.0,
        num_classes=4,
        positional_embedding="learnable",
        dropout_rate=0.0,
        attention_dropout=0.0,
        stochastic_depth_rate=0.0,
    ),
    _vit_pytorch(
        "mobile_vit.MobileViT", 64, image_size=(64, 64), dims=[16, 16, 16], channels=[8] * 10 + [16], num_classes=4
    ),
    _vit_pytorch(
        "twins_svt.TwinsSVT",
        64,
        num_classes=4,
        s1_emb_dim=8,
        s2_emb_dim=8,
        s3_emb_dim=16,
        s4_emb_dim=16,
        s1_local_patch_size=2,
        s2_local_patch_size=2,
        s3_local_patch_size=2,
        s4_local_patch_size=2,
        s1_global_k=2,
        s2_global_k=2,
        s3_global_k=2,
        s4_global_k=2,
        s3_depth=1,
        s4_depth=1,
    ),
)


def _smp(kind: str, **options: Any) -> Row:
    def build() -> nn.Module:
        import segmentation_models_pytorch as smp

        return getattr(smp, kind)("resnet18", encoder_weights=None, classes=2, **options)

    return Row(kind, build, masks(64), loss_fn=_segments, train=False, wide=True)


def _smp_loss(kind: str, *args: Any, classes: int = 2, **options: Any) -> Row:
    def build() -> nn.Module:
        import segmentation_models_pytorch as smp

        return With(getattr(smp.losses, kind)(*args, **options), small_conv(classes))

    def batch() -> Any:
        target = torch.randint(0, max(classes, 2), (BATCH, 8, 8))
        return torch.randn(BATCH, 3, 8, 8), target if classes > 1 else target[:, None].float()

    return Row(kind, build, batch, loss_fn=through)


SMP = rows(
    "segmentation_models_pytorch",
    _smp("Unet", decoder_channels=(16, 16, 8, 8, 8)),
    _smp("FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32, decoder_dropout=0.0),
    _smp("DeepLabV3Plus", decoder_channels=16, decoder_aspp_dropout=0.0),
    _smp_loss("DiceLoss", "multiclass"),
    _smp_loss("JaccardLoss", "multiclass"),
    _smp_loss("TverskyLoss", "multiclass"),
    _smp_loss("LovaszLoss", "multiclass"),
    _smp_loss("FocalLoss", "multiclass"),
    _smp_loss("SoftBCEWithLogitsLoss", classes=1),
)


def _monai(name: str, size: tuple[int, ...], *, wide: bool = False, **options: Any) -> Row:
    def build() -> nn.Module:
        import monai

        return getattr(monai.networks.nets, name)(**options)

    def batch() -> Any:
        return torch.randn(BATCH, 1, *size), torch.randint(0, 2, (BATCH, *size))

    return Row(name, build, batch, loss_fn=_volume, wide=wide)


def _volume(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    out = out[0] if isinstance(out, (list, tuple)) else out
    return F.cross_entropy(out[:, 0] if out.ndim == batch[1].ndim + 2 else out, batch[1])


def _monai_loss(name: str, **options: Any) -> Row:
    def build() -> nn.Module:
        import monai

        return With(getattr(monai.losses, name)(**options), small_conv(2))

    return Row(
        name, build, lambda: (torch.randn(BATCH, 3, 16, 16), torch.randint(0, 2, (BATCH, 1, 16, 16))), loss_fn=through
    )


MONAI = rows(
    "monai",
    _monai("UNet", (16, 16), spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)),
    _monai(
        "BasicUNet", (32, 32, 32), wide=True, spatial_dims=3, in_channels=1, out_channels=2, features=(4, 4, 4, 4, 4, 4)
    ),
    _monai(
        "UNETR",
        (16, 16),
        in_channels=1,
        out_channels=2,
        img_size=(16, 16),
        spatial_dims=2,
        feature_size=4,
        hidden_size=32,
        mlp_dim=32,
        num_heads=2,
    ),
    _monai(
        "SegResNet",
        (16, 16),
        spatial_dims=2,
        init_filters=8,
        in_channels=1,
        out_channels=2,
        blocks_down=(1, 1),
        blocks_up=(1,),
    ),
    _monai("AttentionUnet", (16, 16), spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)),
    _monai(
        "SwinUNETR",
        (64, 64),
        in_channels=1,
        out_channels=2,
        spatial_dims=2,
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 2, 2),
        window_size=4,
    ),
    _monai_loss("DiceLoss", to_onehot_y=True, softmax=True),
    _monai_loss("DiceCELoss", to_onehot_y=True, softmax=True),
    _monai_loss("FocalLoss", to_onehot_y=True),
    _monai_loss("GeneralizedDiceLoss", to_onehot_y=True, softmax=True),
    _monai_loss("HausdorffDTLoss", to_onehot_y=True, softmax=True),
)


class _Warped(nn.Module):
    """An image turned by an angle and warped by a homography that are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.angle, self.homography = nn.Parameter(torch.tensor([10.0])), nn.Parameter(torch.eye(3)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import kornia

        turned = kornia.geometry.transform.rotate(x, self.angle.expand(len(x)))
        warp = self.homography.expand(len(x), 3, 3) + 0.01 * torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 0]])
        return kornia.geometry.transform.warp_perspective(turned, warp, (8, 8))


class _Filters(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        self.net = small_conv(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import kornia

        x = kornia.filters.gaussian_blur2d(self.net(x), (3, 3), (1.0, 1.0))
        return kornia.filters.sobel(kornia.color.rgb_to_lab(torch.sigmoid(x)))


def _kornia_loss(name: str, classes: int, target: Any, **options: Any) -> Row:
    def build() -> nn.Module:
        import kornia

        return With(getattr(kornia.losses, name)(**options), small_conv(classes))

    return Row(name, build, lambda: (torch.randn(BATCH, 3, 8, 8), target()), loss_fn=through)


def _hardnet() -> nn.Module:
    import kornia

    return kornia.feature.HardNet8(False)


KORNIA = rows(
    "kornia",
    Row("rotate and warp_perspective", _Warped, pairs(3, 8, 8), loss_fn=squared_error),
    Row("gaussian_blur2d, rgb_to_lab, sobel", _Filters, pairs(3, 8, 8), loss_fn=squared_error),
    _kornia_loss("SSIMLoss", 1, lambda: torch.rand(BATCH, 1, 8, 8), window_size=5),
    _kornia_loss("FocalLoss", 3, lambda: torch.randint(0, 3, (BATCH, 8, 8)), alpha=0.5, reduction="mean"),
    _kornia_loss("LovaszSoftmaxLoss", 3, lambda: torch.randint(0, 3, (BATCH, 8, 8))),
    _kornia_loss("DiceLoss", 3, lambda: torch.randint(0, 3, (BATCH, 8, 8))),
    _kornia_loss("MS_SSIMLoss", 3, lambda: torch.rand(BATCH, 3, 8, 8), sigmas=[0.5, 1.0], compensation=1.0),
)


def _diffusers(kind: str, batch: Any, loss: Any, *, train: bool = True, **options: Any) -> Row:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, kind)(**options)

    return Row(kind, build, batch, loss_fn=loss, train=train)


def _denoises(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of DDPM with noise and times from the batch."""
    import diffusers

    noisy = diffusers.DDPMScheduler(100).add_noise(batch["x"], batch["noise"], batch["time"])
    inputs = {name: value for name, value in batch.items() if name not in ("x", "noise", "time")}
    return F.mse_loss(model(noisy, batch["time"], **inputs).sample[:, : noisy.shape[1]], batch["noise"])


def _noise(channels: int, size: int, **others: tuple[int, ...]) -> Any:
    def batch() -> Any:
        shape = (BATCH, channels, size, size)
        inputs = {name: torch.randn(BATCH, *of) for name, of in others.items()}
        return {"x": torch.randn(shape), "noise": torch.randn(shape), "time": torch.randint(0, 100, (BATCH,)), **inputs}

    return batch


def _classed() -> Any:
    return {**_noise(4, 8)(), "class_labels": torch.arange(BATCH) % 4}


def _reconstructs(model: nn.Module, batch: Any) -> torch.Tensor:
    posterior = model.encode(batch).latent_dist  # pyright: ignore
    return F.mse_loss(model.decode(posterior.mode()).sample, batch) + 1e-3 * posterior.kl().mean()  # pyright: ignore


def _quantizes(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch)
    return F.mse_loss(out.sample, batch) + out.commit_loss.mean()


def _flows(model: nn.Module, batch: Any) -> torch.Tensor:
    ids = {"img_ids": torch.zeros(4, 3), "txt_ids": torch.zeros(3, 3)}
    inputs = {k: v for k, v in batch.items() if k != "target"}
    return F.mse_loss(model(**inputs, **ids).sample, batch["target"])


def _flow_batch() -> Any:
    shapes = {"hidden_states": (4, 8), "target": (4, 8), "encoder_hidden_states": (3, 16), "pooled_projections": (16,)}
    return {**{name: torch.randn(BATCH, *s) for name, s in shapes.items()}, "timestep": torch.rand(BATCH)}


_BLOCKS: dict[str, Any] = {"norm_num_groups": 4, "layers_per_block": 1, "sample_size": 16}

DIFFUSERS = rows(
    "diffusers",
    _diffusers(
        "UNet2DModel",
        _noise(3, 16),
        _denoises,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **_BLOCKS,
    ),
    _diffusers(
        "UNet2DConditionModel",
        _noise(4, 16, encoder_hidden_states=(3, 16)),
        _denoises,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
        **_BLOCKS,
    ),
    _diffusers(
        "DiTTransformer2DModel",
        _classed,
        _denoises,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        dropout=0.0,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    ),
    _diffusers(
        "AutoencoderKL",
        lambda: torch.randn(BATCH, 3, 16, 16),
        _reconstructs,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        **_BLOCKS,
    ),
    _diffusers(
        "VQModel",
        lambda: torch.randn(BATCH, 3, 16, 16),
        _quantizes,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        num_vq_embeddings=16,
        **_BLOCKS,
    ),
    _diffusers(
        "FluxTransformer2DModel",
        _flow_batch,
        _flows,
        patch_size=1,
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
    ),
)


def _clip() -> nn.Module:
    import open_clip

    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
    return open_clip.CLIP(16, vision, text)


def _captions() -> Any:
    return torch.randn(BATCH, 3, 32, 32), torch.randint(1, 64, (BATCH, 8))


def _clip_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    import open_clip

    return open_clip.ClipLoss()(*model(*batch))


def _siglip_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    from open_clip.loss import SigLipLoss

    image, text, scale = model(*batch)
    return SigLipLoss()(image, text, scale, torch.tensor(-10.0))


OPEN_CLIP = rows(
    "open_clip",
    Row("CLIP with ClipLoss", _clip, _captions, loss_fn=_clip_loss),
    Row("CLIP with SigLipLoss", _clip, _captions, loss_fn=_siglip_loss),
)

VISION = [*TIMM, *TORCHVISION, *VIT_PYTORCH, *SMP, *MONAI, *KORNIA, *DIFFUSERS, *OPEN_CLIP]
