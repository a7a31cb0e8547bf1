"""DenseNet: each layer reads all that its block has made so far, so that a block's activations live long."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.models.vision import image_classifier
from ooc.models.workload import Preset, Workload, register

_BOTTLENECK = 4
"""A layer's 1x1 convolution makes so many times the growth rate's channels."""


class DenseLayer(nn.Module):
    """Batch norm, ReLU, 1x1 convolution; batch norm, ReLU, 3x3 convolution to `growth` channels."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        inner = _BOTTLENECK * growth
        self.body = nn.Sequential(
            nn.BatchNorm2d(in_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(in_channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class DenseBlock(nn.Module):
    """`depth` layers, each on its input and the results of all before it."""

    def __init__(self, in_channels: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(in_channels + i * growth, growth) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


class DenseNet(nn.Module):
    """Huang et al. 2017, table 1; between blocks the channels and the resolution are halved."""

    def __init__(self, *, growth: int, depths: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        for index, depth in enumerate(depths):
            layers.append(DenseBlock(channels, growth, depth))
            channels += depth * growth
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            if index < len(depths) - 1:
                layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(images), 1).flatten(1))


@register("densenet121")
def densenet121(preset: Preset, *, batch_size: int | None = None) -> Workload:
    """DenseNet-121; two short blocks of growth 8 on 64x64 images when small."""
    small = preset == "small"
    num_classes = 10 if small else 1000
    return image_classifier(
        partial(
            DenseNet,
            growth=8 if small else 32,
            depths=(3, 3) if small else (6, 12, 24, 16),
            num_classes=num_classes,
        ),
        preset=preset,
        batch_size=batch_size or (8 if small else 16),
        image_side=64 if small else 224,
        num_classes=num_classes,
    )
