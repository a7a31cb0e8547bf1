"""After pytorch/examples imagenet --dummy: a loader, SGD with momentum, a scheduler, accuracy, an evaluation."""

import torch
from common import iterations, tell, tell_bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
WIDTH = 32
model = nn.Sequential(
    nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True),
    nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 100),
)  # fmt: skip
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
data = TensorDataset(torch.randn(128, 3, 32, 32), torch.randint(100, (128,)))
for epoch in iterations(4):
    model.train()
    for images, target in DataLoader(data, batch_size=16, shuffle=True):
        output = model(images)
        loss = criterion(output, target)
        tell(epoch, loss)
        tell(epoch, (output.topk(5)[1] == target[:, None]).float().sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for images, target in DataLoader(data, batch_size=32):
            tell(epoch, criterion(model(images), target))
    scheduler.step()
tell_bits(model)
