"""An image-to-image generator: few, very large activations at full resolution around a deep middle."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.models.workload import Batch, Preset, Workload, generator, register


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with instance norm, mirrored borders, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv_norm(width, width, 3), nn.ReLU(inplace=True), *_conv_norm(width, width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class GlobalGenerator(nn.Module):
    """The global generator of pix2pixHD (Wang et al. 2018, section 3.2 and appendix).

    Args:
        in_channels: Of the label map.
        width: Channels at full resolution; they double at each of `depth` halvings.
        num_blocks: Residual blocks at the lowest resolution.
    """

    def __init__(self, *, in_channels: int, width: int, depth: int, num_blocks: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_conv_norm(in_channels, width, 7), nn.ReLU(inplace=True)]
        for level in range(depth):
            channels = width << level
            layers += [
                nn.Conv2d(channels, 2 * channels, 3, 2, 1),
                nn.InstanceNorm2d(2 * channels),
                nn.ReLU(inplace=True),
            ]
        layers += [ResidualBlock(width << depth) for _ in range(num_blocks)]
        for level in reversed(range(depth)):
            channels = width << level
            layers += [
                nn.ConvTranspose2d(2 * channels, channels, 3, 2, 1, output_padding=1),
                nn.InstanceNorm2d(channels),
                nn.ReLU(inplace=True),
            ]
        layers += [nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    def forward(self, label_map: Tensor) -> Tensor:
        return self.layers(label_map)


def _conv_norm(in_channels: int, out_channels: int, kernel: int) -> list[nn.Module]:
    return [
        nn.ReflectionPad2d(kernel // 2),
        nn.Conv2d(in_channels, out_channels, kernel),
        nn.InstanceNorm2d(out_channels),
    ]


def _translation_batch(step_index: int, *, batch_size: int, in_channels: int, height: int, width: int) -> Batch:
    source = generator(step_index)
    label_map = torch.randn(batch_size, in_channels, height, width, generator=source)
    return label_map, torch.rand(batch_size, 3, height, width, generator=source) * 2 - 1


def _reconstruction_loss(model: nn.Module, batch: Batch) -> Tensor:
    label_map, image = batch
    return F.l1_loss(model(label_map), image)


@register("pix2pix_hd")
def pix2pix_hd(preset: Preset, *, batch_size: int | None = None) -> Workload:
    """pix2pixHD's global generator with an L1 loss, without its discriminators.

    Full: 36 channels of labels at 512x1024; small: 8 channels at 32x64, an eighth as wide, half as deep.
    """
    small = preset == "small"
    batch_size = batch_size or (4 if small else 1)
    in_channels, height, width = (8, 32, 64) if small else (36, 512, 1024)
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=partial(
            GlobalGenerator,
            in_channels=in_channels,
            width=8 if small else 64,
            depth=2 if small else 4,
            num_blocks=2 if small else 9,
        ),
        make_batch=partial(
            _translation_batch, batch_size=batch_size, in_channels=in_channels, height=height, width=width
        ),
        loss=_reconstruction_loss,
        optimizer="adam",
        description=f"batch {batch_size} of {height}x{width}x{in_channels}, an image each",
    )
