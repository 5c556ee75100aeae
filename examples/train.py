# SPDX-License-Identifier: MIT
"""A training that may be stopped at any moment, by Ctrl-C, kill -9 or a loss of power, and goes on
from its last checkpoint when it is started again. The numbers are those of a run without a stop.

    python3 examples/train.py FOLDER [STEPS]

Two lines of it are Penstock's: the one that makes the Checkpointer, and the one that saves.
"""
import sys

import torch

import penstock

EVERY = 10      # steps between two checkpoints


def batch(device):
    """Points, and whether they lie in a circle."""
    points = torch.rand(256, 2, device=device) * 2 - 1
    return points, (points.square().sum(1, keepdim=True) < 0.5).float()


def main(folder, steps):
    """Train, from wherever the folder says."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler,
             "random": penstock.RandomState(), "step": 0}

    with penstock.Checkpointer(folder, keep=3) as ckpt:
        if ckpt.latest() is not None:
            # A file that the disk has damaged is no reason to begin anew.
            ckpt.restore(into=state, fallback=True)
            print(f"goes on after step {state['step']}", flush=True)
        while state["step"] < steps:
            points, inside = batch(device)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points), inside)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state["step"] += 1
            if state["step"] % EVERY == 0:
                # Returns when the state may change; the rest happens while training goes on.
                # A damaged step that was passed over on the way back is replaced here.
                report = ckpt.save(state["step"], state, overwrite=True,
                                   user={"loss": loss.item()})
                print(f"step {state['step']}: loss {loss.item():.9f}, "
                      f"stopped for {report.stall_seconds * 1000:.1f} ms", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 200)
