"""python lightning_before.py"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(0)
x = torch.randn(1201, 20)
y = torch.sin(x @ torch.randn(20, 1))
train_set, val_set = TensorDataset(x[:1001], y[:1001]), TensorDataset(x[1001:], y[1001:])


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = F.smooth_l1_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self.net(inputs)
        self.log("val_loss", F.smooth_l1_loss(outputs, targets), sync_dist=True)
        self.log("val_mae", F.l1_loss(outputs, targets), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


trainer = L.Trainer(
    max_epochs=4,
    gradient_clip_val=1.0,
    callbacks=[EarlyStopping("val_loss", patience=3), ModelCheckpoint(monitor="val_loss")],
)
trainer.fit(
    Regressor(),
    DataLoader(train_set, batch_size=32),
    DataLoader(val_set, batch_size=64),
)
trainer.save_checkpoint("model.ckpt")
