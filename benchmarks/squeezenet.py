"""SqueezeNet 1.1 (Iandola et al. 2016), without batch norm: a workload of Melon's evaluation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ooc.models import Batch, Preset, Workload


class Fire(nn.Module):
    """A squeeze to `narrow` channels, then two expansions to `wide` each."""

    def __init__(self, in_channels: int, narrow: int, wide: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(in_channels, narrow, 1)
        self.one = nn.Conv2d(narrow, wide, 1)
        self.three = nn.Conv2d(narrow, wide, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


class SqueezeNet(nn.Module):
    """Images to logits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(64, 16, 64),
            Fire(128, 16, 64),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(128, 32, 128),
            Fire(256, 32, 128),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(256, 48, 192),
            Fire(384, 48, 192),
            Fire(384, 64, 256),
            Fire(512, 64, 256),
        )
        self.head = nn.Conv2d(512, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.head(self.features(images))).mean((2, 3))


def squeezenet(preset: Preset) -> Workload:
    """SqueezeNet with SGD; 64x64 images and 8 of them when small."""
    batch_size, side, num_classes = (8, 64, 10) if preset == "small" else (32, 224, 1000)

    def make_batch(index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        images = torch.randn(batch_size, 3, side, side, generator=generator)
        return images, torch.randint(num_classes, (batch_size,), generator=generator)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Workload(
        name="squeezenet",
        preset=preset,
        batch_size=batch_size,
        build=lambda: SqueezeNet(num_classes),
        make_batch=make_batch,
        loss=loss,
        optimizer="sgd",
        description="SqueezeNet 1.1",
    )
