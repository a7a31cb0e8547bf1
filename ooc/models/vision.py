"""Convolutional classifiers: VGG16, ResNets, MobileNetV2, and a plain stack of convolutions.

Written from the papers' tables in plain torch. Parameter counts equal torchvision's, which the
tests assert, so figures for these names compare with figures elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.models.workload import Batch, Preset, Workload, generator, register


def _image_batch(step_index: int, *, batch_size: int, image_side: int, num_classes: int) -> Batch:
    source = generator(step_index)
    images = torch.randn(batch_size, 3, image_side, image_side, generator=source)
    labels = torch.randint(num_classes, (batch_size,), generator=source)
    return images, labels


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the label, per image."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def image_classifier(
    build: Callable[[], nn.Module],
    *,
    preset: Preset,
    batch_size: int,
    image_side: int,
    num_classes: int,
    optimizer: str = "sgd_momentum",
) -> Workload:
    """A workload of labelled images around `build`."""
    return Workload(
        name="",
        preset=preset,
        batch_size=batch_size,
        build=build,
        make_batch=partial(_image_batch, batch_size=batch_size, image_side=image_side, num_classes=num_classes),
        loss=classification_loss,
        optimizer=optimizer,
        description=f"batch {batch_size} of {image_side}x{image_side}x3, {num_classes} classes",
    )


# VGG (Simonyan and Zisserman 2015, table 1, column D)

_VGG16_CHANNELS: tuple[tuple[int, ...], ...] = (
    (64, 64),
    (128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (512, 512, 512),
)


def _vgg16_features() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for block in _VGG16_CHANNELS:
        for out_channels in block:
            layers += [nn.Conv2d(channels, out_channels, 3, padding=1), nn.ReLU()]
            channels = out_channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class VGG16(nn.Module):
    """For 224x224 images: 13 convolutions, then 4096-4096-classes with dropout."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = _vgg16_features()
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


class VGG16Cifar(nn.Module):
    """For 32x32 images: 13 convolutions with bias, then FC 256, batch norm, ReLU, FC classes."""

    def __init__(self, num_classes: int = 100) -> None:
        super().__init__()
        self.features = _vgg16_features()
        self.classifier = nn.Sequential(
            nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


@register("vgg16")
def vgg16(preset: Preset, *, batch_size: int | None = None) -> Workload:
    """VGG16: on 32x32 images and 100 classes when small, on 224x224 and 1000 when full."""
    if preset == "small":
        return vgg16_cifar(preset, batch_size=batch_size)
    return image_classifier(VGG16, preset=preset, batch_size=batch_size or 4, image_side=224, num_classes=1000)


@register("vgg16_cifar")
def vgg16_cifar(preset: Preset, *, batch_size: int | None = None) -> Workload:
    """VGG16 for 32x32 images; at batch 64 and plain SGD the case that edge frameworks report."""
    default = 8 if preset == "small" else 64
    return image_classifier(
        VGG16Cifar, preset=preset, batch_size=batch_size or default, image_side=32, num_classes=100, optimizer="sgd"
    )


# ResNet (He et al. 2016; stride on the 3x3 convolution of a bottleneck, as torchvision has it)


def conv_bn(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Sequential:
    """A convolution that keeps the resolution but for its stride, and batch norm."""
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, dilation, groups, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = conv_bn(in_channels, width, 3, stride)
        self.second = conv_bn(width, width, 3)
        self.relu = nn.ReLU(inplace=True)
        project = stride != 1 or in_channels != width
        self.shortcut = conv_bn(in_channels, width, 1, stride) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.relu(self.first(x)))
        y += self.shortcut(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut; four times as wide outside as inside."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.first = conv_bn(in_channels, width, 1)
        self.second = conv_bn(width, width, 3, stride, dilation=dilation)
        self.third = conv_bn(width, out_channels, 1)
        self.relu = nn.ReLU(inplace=True)
        project = stride != 1 or in_channels != out_channels
        self.shortcut = conv_bn(in_channels, out_channels, 1, stride) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        y = self.relu(self.second(y))
        y = self.third(y)
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Four stages of blocks behind a 7x7 stem; `width` is the first stage's (64 in the paper)."""

    def __init__(
        self, block: type[BasicBlock | Bottleneck], depths: tuple[int, ...], width: int, num_classes: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages: list[nn.Module] = []
        channels = width
        for stage_index, depth in enumerate(depths):
            stage_width = width << stage_index
            for block_index in range(depth):
                stride = 2 if stage_index > 0 and block_index == 0 else 1
                stages.append(block(channels, stage_width, stride))
                channels = stage_width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images))
        return self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))


@register("resnet18")
def resnet18(
    preset: Preset, *, batch_size: int | None = None, width: int | None = None, image_side: int | None = None
) -> Workload:
    """ResNet-18; a quarter as wide and on 64x64 images when small."""
    small = preset == "small"
    width = width or (16 if small else 64)
    num_classes = 10 if small else 1000
    return image_classifier(
        partial(ResNet, BasicBlock, (2, 2, 2, 2), width, num_classes),
        preset=preset,
        batch_size=batch_size or (8 if small else 16),
        image_side=image_side or (64 if small else 224),
        num_classes=num_classes,
    )


@register("resnet50")
def resnet50(
    preset: Preset, *, batch_size: int | None = None, width: int | None = None, image_side: int | None = None
) -> Workload:
    """ResNet-50; a quarter as wide and on 64x64 images when small."""
    small = preset == "small"
    width = width or (16 if small else 64)
    num_classes = 10 if small else 1000
    return image_classifier(
        partial(ResNet, Bottleneck, (3, 4, 6, 3), width, num_classes),
        preset=preset,
        batch_size=batch_size or (8 if small else 16),
        image_side=image_side or (64 if small else 224),
        num_classes=num_classes,
    )


# MobileNetV2 (Sandler et al. 2018, table 2)

_MOBILENET_STAGES: tuple[tuple[int, int, int, int], ...] = (
    # expansion, out channels, repeats, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Expand by 1x1, filter by depthwise 3x3, project by 1x1; a shortcut where shapes allow."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [conv_bn(in_channels, hidden, 1), nn.ReLU6(inplace=True)]
        layers += [conv_bn(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6(inplace=True)]
        layers.append(conv_bn(hidden, out_channels, 1))
        self.body = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.has_shortcut else self.body(x)


class MobileNetV2(nn.Module):
    """Width 1.0: 17 inverted residual blocks between a 3x3 stem and a 1x1 head."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, 32, 3, 2), nn.ReLU6(inplace=True)]
        channels = 32
        for expansion, out_channels, repeats, first_stride in _MOBILENET_STAGES:
            for repeat in range(repeats):
                stride = first_stride if repeat == 0 else 1
                layers.append(InvertedResidual(channels, out_channels, stride, expansion))
                channels = out_channels
        layers += [conv_bn(channels, 1280, 1), nn.ReLU6(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(F.adaptive_avg_pool2d(self.features(images), 1).flatten(1))


@register("mobilenet_v2")
def mobilenet_v2(preset: Preset, *, batch_size: int | None = None) -> Workload:
    """MobileNetV2; on 64x64 images when small."""
    small = preset == "small"
    num_classes = 10 if small else 1000
    return image_classifier(
        partial(MobileNetV2, num_classes),
        preset=preset,
        batch_size=batch_size or (8 if small else 16),
        image_side=64 if small else 224,
        num_classes=num_classes,
    )


class ConvStack(nn.Module):
    """`depth` x (3x3 convolution to `width` channels, batch norm, ReLU) at one resolution."""

    def __init__(self, depth: int, width: int, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


@register("conv_stack")
def conv_stack(
    preset: Preset, *, batch_size: int | None = None, depth: int | None = None, width: int | None = None
) -> Workload:
    """Activations and next to no parameters; full: 10 x conv64 on 32x3x64x64."""
    small = preset == "small"
    return image_classifier(
        partial(ConvStack, depth or (4 if small else 10), width or (16 if small else 64)),
        preset=preset,
        batch_size=batch_size or (8 if small else 32),
        image_side=32 if small else 64,
        num_classes=10,
        optimizer="sgd",
    )
