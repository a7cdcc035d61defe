"""Models of the hub, unmodified and on the meta device, split by the recipes: what users get by default.

Eight chips as batch=4, model=2, or four as 2 and 2; about 8 x 2048 tokens a step, as much as a model and its kind take.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from jax.sharding import Mesh
from torch import nn

import torch_shard as ts
from benchmarks.communication import ring
from benchmarks.tpu_cases import TpuCase, class_loss, find, fsdp_tp, next_token_loss, tokens

EIGHT, FOUR = ("v5e:2x4", {"batch": 4, "model": 2}), ("v5e:2x2", {"batch": 2, "model": 2})
Machine = tuple[str, dict[str, int]]


@dataclasses.dataclass(frozen=True)
class Streams:
    """Activations that tensor parallelism sums.

    Attributes:
        sums: How many there are in a step, forward and backward, by the width and the rows of what is summed.
    """

    sums: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, layers: int, width: int, num_rows: int, *, cross: int = 0, words: bool = True) -> "Streams":
        """Of layers with attention and MLP, of which so many have attention twice; and of a vocabulary's two ends."""
        return cls(((4 * layers + 2 * cross + 2 * words, width, num_rows),))

    def __add__(self, other: "Streams") -> "Streams":
        return Streams(self.sums + other.sums)


@dataclasses.dataclass(frozen=True)
class ZooCase:
    """A model, and what the textbook sends for it.

    Attributes:
        case: The model and its machine.
        streams: That tensor parallelism sums; None if no textbook has it.
    """

    case: TpuCase
    streams: Streams | None = None

    def textbook(self) -> float | None:
        """Bytes that the recipe sends from each device, all in bfloat16 (see `communication`)."""
        if self.streams is None:
            return None
        num_bytes = 2.0 * sum(p.numel() for p in self.case.model().parameters())
        batch, model = (self.case.axes.get(axis, 1) for axis in ("batch", "model"))
        if self.case.recipe is replicated:
            return 2 * ring(num_bytes, batch)
        summed = sum(2 * ring(times * width * 2.0 * rows / batch, model) for times, width, rows in self.streams.sums)
        return summed + 3 * ring(num_bytes / model, batch)


def fsdp(model: nn.Module, mesh: Mesh) -> ts.ShardingPlan:
    """FSDP alone."""
    return ts.plans.fsdp(model, mesh)


def replicated(model: nn.Module, mesh: Mesh) -> ts.ShardingPlan:
    """Data parallel alone."""
    return ts.plans.replicated()


def on_meta(kind: str, config: Any) -> Callable[[], nn.Module]:
    """A class of transformers, by name."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return getattr(transformers, kind)(config)

    return build


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The one that comes with the model."""
    return model(**batch).loss


def decoder(name: str, kind: str, config: Any, machine: Machine, rows: int) -> ZooCase:
    """A decoder on rows of 2048 tokens."""
    layers, width = config.num_hidden_layers, config.hidden_size
    batch, streams = tokens(rows, 2048), Streams.of(layers, width, rows * 2048)
    return ZooCase(TpuCase(name, *machine, on_meta(kind, config), next_token_loss, batch, fsdp_tp), streams)


def llama() -> ZooCase:
    """The width of Llama 3 8B."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=128256)
    return decoder("Llama-8B width (4)", "LlamaForCausalLM", config, EIGHT, 8)


def gemma() -> ZooCase:
    """Gemma 3 4B, its part for text."""
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.Gemma3TextConfig(**sizes, head_dim=256, sliding_window=1024, num_hidden_layers=6)
    return decoder("Gemma3-4B (6)", "Gemma3ForCausalLM", config, FOUR, 4)


def phi() -> ZooCase:
    """Phi-3-mini."""
    config = transformers.Phi3Config(num_hidden_layers=4)
    return decoder("Phi-3-mini (4)", "Phi3ForCausalLM", config, EIGHT, 8)


def neox() -> ZooCase:
    """Pythia 1.4B."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "vocab_size": 50304}
    config = transformers.GPTNeoXConfig(**sizes, num_hidden_layers=3)
    return decoder("GPT-NeoX 1.4B (3)", "GPTNeoXForCausalLM", config, FOUR, 4)


def mamba() -> ZooCase:
    """Mamba-2 1.3B; a layer has one sum, forward and backward."""
    sizes = {"hidden_size": 2048, "num_heads": 64, "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True}
    config = transformers.Mamba2Config(**sizes, num_hidden_layers=3)
    found = decoder("Mamba-2 (3)", "Mamba2ForCausalLM", config, EIGHT, 8)
    return dataclasses.replace(found, streams=Streams(((2 * 3 + 2, 2048, 8 * 2048),)))


def bert() -> ZooCase:
    """BERT-base with its dropout."""
    batch = {"input_ids": tokens(64, 512), "labels": tokens(64, 512)}
    build = on_meta("BertForMaskedLM", transformers.BertConfig(num_hidden_layers=4))
    case = TpuCase("BERT-base (4)", *EIGHT, build, own_loss, batch, fsdp_tp)
    return ZooCase(case, Streams.of(4, 768, 64 * 512))


def vit() -> ZooCase:
    """ViT-B/16."""
    case = dataclasses.replace(find("vit", quick=False), name="ViT-B/16 (4)")
    return ZooCase(case, Streams.of(4, 768, 256 * 197, words=False))


def clip() -> ZooCase:
    """CLIP ViT-B/32."""
    config = transformers.CLIPConfig(text_config={"num_hidden_layers": 3}, vision_config={"num_hidden_layers": 3})
    pixels = torch.empty(128, 3, 224, 224, device="meta")
    batch = {"input_ids": tokens(128, 77), "pixel_values": pixels}
    case = TpuCase("CLIP B/32 (3+3)", *FOUR, on_meta("CLIPModel", config), _contrastive, batch, fsdp_tp)
    streams = Streams.of(3, 768, 128 * 50, words=False) + Streams.of(3, 512, 128 * 77, words=False)
    return ZooCase(case, streams)


def _contrastive(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, return_loss=True).loss


def whisper() -> ZooCase:
    """Whisper-small, 30 s of sound and 448 tokens a row."""
    sizes: dict[str, Any] = {"d_model": 768}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 3, f"{part}_attention_heads": 12, f"{part}_ffn_dim": 3072}
    sound = torch.empty(16, 80, 3000, device="meta")
    build = on_meta("WhisperForConditionalGeneration", transformers.WhisperConfig(**sizes))
    batch = {"input_features": sound, "labels": tokens(16, 448)}
    case = TpuCase("Whisper-small (3+3)", *FOUR, build, own_loss, batch, fsdp_tp)
    return ZooCase(case, Streams.of(3, 768, 16 * 1500, words=False) + Streams.of(3, 768, 16 * 448, cross=3))


def with_experts(name: str, short: str) -> ZooCase:
    """As in the comparison with hand-written JAX, but by `fsdp_tp`."""
    case = dataclasses.replace(find(short, quick=False), name=name, recipe=fsdp_tp)
    config: Any = case.model().config
    streams = Streams.of(config.num_hidden_layers, config.hidden_size, math.prod(case.batch.shape))
    return ZooCase(case, streams)


def convnext() -> ZooCase:
    """ConvNeXt-T, fewer layers in each stage."""
    build = on_meta("ConvNextForImageClassification", transformers.ConvNextConfig(depths=[1, 1, 3, 1], num_labels=1000))
    case = TpuCase("ConvNeXt-T (1, 1, 3, 1)", "v5e:2x2", {"batch": 4}, build, class_loss, images(128), fsdp)
    return ZooCase(case, Streams(()))


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures and their classes."""
    return torch.empty(rows, 3, 224, 224, device="meta"), torch.empty(rows, dtype=torch.int64, device="meta")


def replicated_case(name: str, short: str) -> ZooCase:
    """As in the comparison with hand-written JAX."""
    return ZooCase(dataclasses.replace(find(short, quick=False), name=name, recipe=replicated), Streams(()))


def t5() -> ZooCase:
    """T5-base, half of its layers."""
    sizes = {
        "d_model": 768,
        "d_ff": 3072,
        "num_heads": 12,
        "num_layers": 6,
        "num_decoder_layers": 6,
        "decoder_start_token_id": 0,
    }
    batch = {"input_ids": tokens(32, 512), "labels": tokens(32, 128)}
    build = on_meta("T5ForConditionalGeneration", transformers.T5Config(**sizes))
    case = TpuCase("T5-base (6+6)", *FOUR, build, own_loss, batch, fsdp_tp)
    return ZooCase(case, Streams.of(6, 768, 32 * 512) + Streams.of(6, 768, 32 * 128, cross=6))


class LstmLm(nn.Module):
    """A language model of two layers of an LSTM."""

    def __init__(self, width: int = 1024, vocab: int = 32000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(self.lstm(self.embed(ids))[0])


def lstm() -> ZooCase:
    """256 steps."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return LstmLm()

    def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    case = TpuCase("LSTM, 2 x 1024, 256 steps", "v5e:2x2", {"batch": 4}, build, loss_fn, tokens(64, 256), fsdp)
    return ZooCase(case, Streams(()))


def swin() -> ZooCase:
    """Swin-T with its drop path."""
    build = on_meta("SwinForImageClassification", transformers.SwinConfig(num_labels=1000))
    return ZooCase(TpuCase("Swin-T", "v5e:2x2", {"batch": 4}, build, class_loss, images(128), fsdp), Streams(()))


def dit() -> ZooCase:
    """DiT-XL/2 of diffusers, four of its layers, 64 latents of 32 x 32."""
    import diffusers

    def build() -> nn.Module:
        with torch.device("meta"):
            return diffusers.DiTTransformer2DModel(num_layers=4)

    latents, times = torch.empty(64, 4, 32, 32, device="meta"), torch.empty(64, dtype=torch.int64, device="meta")
    case = TpuCase("DiT-XL/2 (4)", *FOUR, build, _denoising_loss, (latents, times, times), fsdp_tp)
    return ZooCase(case, Streams.of(4, 1152, 64 * 256, words=False))


def _denoising_loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    latents, times, classes = batch
    found = model(latents, timestep=times, class_labels=classes).sample
    return nn.functional.mse_loss(found[:, :4], latents)


ZOO: dict[str, Callable[[], ZooCase]] = {
    "llama": llama,
    "gemma3": gemma,
    "phi3": phi,
    "neox": neox,
    "bert": bert,
    "vit": vit,
    "clip": clip,
    "whisper": whisper,
    "mamba2": mamba,
    "qwen": lambda: with_experts("Qwen3-MoE, 64 experts (3)", "qwen"),
    "gpt-oss": lambda: with_experts("gpt-oss, 16 experts (3)", "gpt-oss"),
    "convnext": convnext,
    "resnet": lambda: replicated_case("ResNet-50", "resnet"),
    "gpt2": lambda: replicated_case("GPT-2", "gpt"),
    "t5": t5,
    "lstm": lstm,
    "swin": swin,
    "dit": dit,
}
