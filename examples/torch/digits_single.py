"""Train a small convolutional network on scikit-learn's handwritten digits, in one process.

    python examples/torch/digits_single.py

digits.py beside this file is the same script for any number of processes: five lines differ.
"""

import time

import numpy
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

EPOCHS = 12


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(128, 10),
        )


def load(*, training: bool) -> DataLoader:
    """1,797 images of 8 x 8 pixels with their labels; every fifth is kept for testing."""
    digits = load_digits()
    chosen = (numpy.arange(len(digits.target)) % 5 != 0) == training
    images = torch.tensor(digits.images[chosen, None] / 16.0, dtype=torch.float32)
    data = TensorDataset(images, torch.tensor(digits.target[chosen]))
    options = {"batch_size": 32, "num_workers": 2, "persistent_workers": True}
    return DataLoader(data, shuffle=training, **options)


def train(model: nn.Module, batches: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    """One epoch; returns images per second."""
    model.train()
    began, images_seen = time.perf_counter(), 0
    for images, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        images_seen += len(images)
    return images_seen / (time.perf_counter() - began)


@torch.no_grad()
def validate(model: nn.Module, batches: DataLoader) -> tuple[int, int]:
    """How many test images the model gets right, and of how many."""
    model.eval()
    right = seen = 0
    for images, labels in batches:
        right += int((model(images).argmax(dim=1) == labels).sum())
        seen += len(labels)
    return right, seen


def main() -> None:
    torch.manual_seed(0)
    train_batches, test_batches = load(training=True), load(training=False)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(1, EPOCHS + 1):
        rate = train(model, tqdm(train_batches, f"epoch {epoch:2}", leave=False), optimizer)
        schedule.step()
        totals = torch.tensor([rate, *validate(model, test_batches)], dtype=torch.float64)
        rate, right, seen = totals.tolist()
        print(f"epoch {epoch:2}: {right:.0f} of {seen:.0f} test images right")
    print(f"test accuracy {100 * right / seen:.1f} %")
    print(f"last epoch    {rate:.0f} images/s")


if __name__ == "__main__":
    main()
