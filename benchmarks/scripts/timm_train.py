"""After timm's train.py: its factories, mixup, an average of the weights, a validation an epoch."""

import torchvision_ops  # noqa: F401

# isort: split
import timm
import torch
from common import LENGTH, tell, tell_bits, time_optimizer_steps
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV2, accuracy, random_seed
from timm.utils.clip_grad import dispatch_clip_grad
from torch.utils.data import DataLoader, TensorDataset

random_seed(42, 0)
model = timm.create_model("resnet10t", num_classes=10, in_chans=3, drop_path_rate=0.1)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
schedule = CosineLRScheduler(optimizer, t_initial=3 * LENGTH, warmup_t=1, warmup_lr_init=1e-4)
average = ModelEmaV2(model, decay=0.99)
mixup = Mixup(mixup_alpha=0.4, label_smoothing=0.1, num_classes=10)
images, labels = torch.randn(80, 3, 64, 64), torch.randint(10, (80,))
for_training = DataLoader(TensorDataset(images[:64], labels[:64]), batch_size=8, shuffle=True, drop_last=True)
for_validation = DataLoader(TensorDataset(images[64:], labels[64:]), batch_size=8)
train_loss, validation_loss = SoftTargetCrossEntropy(), torch.nn.CrossEntropyLoss()
time_optimizer_steps()
for epoch in range(3 * LENGTH):
    model.train()
    for index, (batch, targets) in enumerate(for_training):
        batch, targets = mixup(batch, targets)
        loss = train_loss(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
        optimizer.step()
        average.update(model)
        tell(index, loss)
    for own in (model, average.module):
        own.eval()
        with torch.inference_mode():
            for batch, targets in for_validation:
                found = own(batch)
                tell(epoch, validation_loss(found, targets))
                tell(epoch, accuracy(found, targets, topk=(1, 5))[0])
    schedule.step(epoch + 1)
tell_bits(model, average.module)
