"""DeepLabv3: a ResNet that keeps its resolution by dilation, and a pyramid of dilated convolutions."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.models.unet import segmentation_batch, segmentation_loss
from ooc.models.vision import Bottleneck, conv_bn
from ooc.models.workload import Preset, Workload, register

_RATES = (12, 24, 36)


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling: views of several widths and of the whole image, side by side."""

    def __init__(self, in_channels: int, width: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        views = [conv_bn(in_channels, width, 1)]
        views += [conv_bn(in_channels, width, 3, dilation=rate) for rate in rates]
        self.views = nn.ModuleList(nn.Sequential(view, nn.ReLU(inplace=True)) for view in views)
        self.whole = nn.Sequential(conv_bn(in_channels, width, 1), nn.ReLU(inplace=True))
        self.merge = nn.Sequential(conv_bn((len(views) + 1) * width, width, 1), nn.ReLU(inplace=True), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.whole(F.adaptive_avg_pool2d(x, 1)).expand(-1, -1, *x.shape[2:])
        return self.merge(torch.cat([*(view(x) for view in self.views), whole], 1))


class DeepLabV3(nn.Module):
    """Chen et al. 2017, output stride 8, on a ResNet whose last two stages dilate instead of striding.

    Args:
        width: Of the ResNet's first stage (64 in the paper).
        pyramid_width: Channels of each view and of the head.
    """

    def __init__(self, *, depths: tuple[int, ...], width: int, pyramid_width: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        channels, dilation = width, 1
        for stage_index, depth in enumerate(depths):
            before = dilation
            dilation *= 2 if stage_index >= 2 else 1
            for block_index in range(depth):
                is_first = block_index == 0
                stride = 2 if stage_index == 1 and is_first else 1
                stages.append(Bottleneck(channels, width << stage_index, stride, before if is_first else dilation))
                channels = (width << stage_index) * Bottleneck.expansion
        self.stages = nn.Sequential(*stages)
        self.pyramid = Pyramid(channels, pyramid_width, _RATES)
        self.head = nn.Sequential(
            conv_bn(pyramid_width, pyramid_width, 3), nn.ReLU(inplace=True), nn.Conv2d(pyramid_width, num_classes, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        coarse = self.head(self.pyramid(self.stages(self.stem(images))))
        return F.interpolate(coarse, size=images.shape[2:], mode="bilinear", align_corners=False)


@register("deeplab_v3")
def deeplab_v3(preset: Preset, *, batch_size: int | None = None) -> Workload:
    """DeepLabv3 on a ResNet-50, 513x513 and 21 classes when full; an eighth as wide on 65x65 when small."""
    small = preset == "small"
    batch_size = batch_size or (4 if small else 2)
    side, num_classes = (65, 5) if small else (513, 21)
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=partial(
            DeepLabV3,
            depths=(1, 1, 2, 1) if small else (3, 4, 6, 3),
            width=8 if small else 64,
            pyramid_width=32 if small else 256,
            num_classes=num_classes,
        ),
        make_batch=partial(segmentation_batch, batch_size=batch_size, image_side=side, num_classes=num_classes),
        loss=segmentation_loss,
        optimizer="sgd_momentum",
        description=f"batch {batch_size} of {side}x{side}x3, {num_classes} classes a pixel",
    )
