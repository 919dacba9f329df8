import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=32))

torch.manual_seed(0)
images, labels = map(torch.tensor, load_digits(return_X_y=True))
loader = DataLoader(TensorDataset(images.float() / 16, labels), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_fn = nn.CrossEntropyLoss()
manager.fit(model, loader, loss_fn=loss_fn, optimizer=optimizer, epochs=3)
