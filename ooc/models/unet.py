"""A U-Net: activations of the way down wait, one at each resolution, for the way up."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.models.workload import Batch, Preset, Workload, generator, register


class UNet(nn.Module):
    """Ronneberger et al. 2015, with padding and batch norm; skips are concatenated.

    Args:
        width: Channels at full resolution; they double at each of `depth` halvings.
    """

    def __init__(self, width: int, depth: int, num_classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double_conv(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.merge = nn.ModuleList(_double_conv(2 * a, a) for a in widths[-2::-1])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = images
        for level, block in enumerate(self.down):
            if level > 0:
                x = F.max_pool2d(x, 2)
            x = block(x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def _double_conv(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


def segmentation_batch(step_index: int, *, batch_size: int, image_side: int, num_classes: int) -> Batch:
    """Images, and a class for each pixel."""
    source = generator(step_index)
    images = torch.randn(batch_size, 3, image_side, image_side, generator=source)
    labels = torch.randint(num_classes, (batch_size, image_side, image_side), generator=source)
    return images, labels


def segmentation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the class, per pixel.

    Over a list of pixels: the loss over images has no deterministic kernel on CUDA (nll_loss2d).
    """
    images, labels = batch
    return F.cross_entropy(model(images).movedim(1, -1).flatten(0, 2), labels.flatten())


@register("unet")
def unet(preset: Preset, *, batch_size: int | None = None) -> Workload:
    """U-Net: 8 channels on 64x64 when small, 64 channels on 128x128 when full."""
    small = preset == "small"
    batch_size = batch_size or (4 if small else 8)
    side = 64 if small else 128
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=partial(UNet, 8 if small else 64, 3 if small else 4, 4),
        make_batch=partial(segmentation_batch, batch_size=batch_size, image_side=side, num_classes=4),
        loss=segmentation_loss,
        optimizer="adam",
        description=f"batch {batch_size} of {side}x{side}x3, 4 classes a pixel",
    )
