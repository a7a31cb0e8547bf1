"""A LightningModule and a Trainer: logging, clipping, accumulation, a validation an epoch, checkpoints."""

import logging
import tempfile
import warnings

import torchvision_ops  # noqa: F401

# isort: split
import lightning
import torch
from common import LENGTH, tell, tell_bits, time_optimizer_steps
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 16, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10),
        )  # fmt: skip

    def training_step(self, batch, index):
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        tell(index, loss)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        found = self.net(images)
        self.log("val_loss", functional.cross_entropy(found, labels))
        self.log("val_acc", (found.argmax(1) == labels).float().mean())
        tell(index, functional.cross_entropy(found, labels))

    def on_validation_epoch_end(self):
        tell(self.current_epoch, self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


lightning.seed_everything(3, verbose=False)
images, labels = torch.randn(160, 3, 16, 16), torch.randint(10, (160,))
time_optimizer_steps()
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=4 * LENGTH,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=False,
        callbacks=[ModelCheckpoint(dirpath=folder, monitor="val_loss")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(
        model,
        DataLoader(TensorDataset(images[:128], labels[:128]), batch_size=8, shuffle=True),
        DataLoader(TensorDataset(images[128:], labels[128:]), batch_size=16),
    )
tell_bits(model)
